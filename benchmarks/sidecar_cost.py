# SPDX-License-Identifier: Apache-2.0
"""What the sidecar takes and bears: `python -m benchmarks.sidecar_cost [--json]`, some four minutes.

A real sidecar process with its defaults follows a real ring of the size that engines use by default (8 MiB), which a
fake engine writes as a process of its own, a frame each 20 ms: requests that run for 96 steps and get a block every 16,
8 events each, half of them with a trace context. None is aborted, preempted or refused: the sidecar would trace those
whatever the sampler says. Spans and metrics go over gRPC to a receiver that takes them and looks at none.

*At a steady load*: 1,000 requests a second, one in a hundred traced: share of a core (``/proc/PID/stat``) and resident
memory. *The most it bears*: how fast it reads a ring that was written before, one in a hundred traced; and, all traced,
the highest rate at which no event is lost and no span dropped. Engine, receiver and sidecar share this machine's cores.
*Over time*: memory while it gets requests at half the speed at which it read the ring.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]  # it has no types

from tests.sidecar_e2e.feeder import boot_id, start_time
from tests.sidecar_e2e.sidecar import Sidecar
from vllm_kvfix import events
from vllm_kvfix.ring import layout, place
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
TARGET_RATE = 1000
SETTLE_S = 5.0  # after a start, before anything is measured
STEADY_S = 32.0
STEP_S = 5.0
LONG_S = 100.0
DRAINED = 60_000  # requests
DRAINED_WORDS = 1 << 23
RATES = (2000, 3000, 4000, 5000, 6000, 7000, 8000, 10000)
LONG_SHARE = 0.5
FASTEST = 10_000  # requests a second that the fake engine writes without haste
STEPS_PER_S = 50
LIFE = 96  # steps
BLOCK_SIZE = 16
CAPACITY = layout.capacity(place.DEFAULT_SIZE)
SERVICES = ("trace.v1.TraceService", "metrics.v1.MetricsService")
TRACED = {"one in 100": "0.01", "all": "1.0"}
_TICKS = os.sysconf("SC_CLK_TCK")
_ANSWER_S = 60.0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  a command's output


# -- the fake engine, a process of its own -------------------------------------------------------------------------


class _FakeEngine:
    """Writes frames of events; requests come in cohorts, one a step, that live alike."""

    def __init__(self, ring: Path, capacity: int) -> None:
        origin = Origin(start_time(os.getpid()), boot_id(), vllm_version="0.25.1")
        self._ring = RingWriter(ring, capacity, origin)
        self._cohorts: deque[tuple[int, range]] = deque()
        self._numbers = self._steps = 0
        groups = (events.Group(BLOCK_SIZE, "FullAttentionSpec"),)
        self._write([events.Config(100_000, 4096, 8192, prefix_caching=True, groups=groups)])

    @staticmethod
    def _identity(number: int) -> events.Identity:
        low = number * 0x9E3779B97F4A7C15 & layout.WORD_MASK  # a sampler goes by these bits
        context = events.TraceContext(number << 64 | low, number, 1) if number % 2 else None
        return events.Identity(f"cmpl-{number:032x}-0", context)

    def _write(self, happened: list[events.Event], words: Sequence[int] = (), count: int = 0) -> None:
        told = [word for event in happened for word in events.encode(event)]
        self._ring.write([*told, *words], len(happened) + count)

    def step(self, arrivals: int) -> None:
        """One step: some come, those that came ``LIFE`` steps ago end, and every 16th step of its life one grows."""
        now = time.monotonic_ns()
        self._steps += 1
        come = range(self._numbers + 1, self._numbers + 1 + arrivals)
        self._numbers += arrivals
        happened: list[events.Event] = [events.Arrived(n, now, 200, self._identity(n)) for n in come]
        if len(self._cohorts) == LIFE:
            arrival, gone = self._cohorts.popleft()
            happened += [self._finished(n, now, arrival) for n in gone]
        ended = max(self._steps - LIFE, 0) * arrivals
        totals = [self._steps, *[self._steps * arrivals] * 8, ended, 0, ended * LIFE]
        happened.append(events.Step._make((now, len(self._cohorts) * arrivals, 0, 50_000, 50_000, *totals, (0,))))
        happened += [events.Admitted(n, now, False, 32, 0, (events.Blocks(2, 11),)) for n in come]  # noqa: FBT003  a field
        grown = [
            n for _, cohort in islice(self._cohorts, len(self._cohorts) % BLOCK_SIZE, None, BLOCK_SIZE) for n in cohort
        ]
        self._write(happened, [word for n in grown for word in (events.head(events.ALLOCATED, 2, n), 1)], len(grown))
        self._cohorts.append((now, come))

    def _finished(self, number: int, now: int, arrival: int) -> events.Event:
        return events.Finished(
            number=number,
            time=now,
            arrival=arrival,
            admission=arrival,
            reason="stop" if number % 3 else "length",
            freed=True,
            prompt_tokens=200,
            output_tokens=LIFE,
            hit_tokens=32,
            external_tokens=0,
            peak=19,
            held=16 * (now - arrival) // 1000,
            preemptions=0,
            refusals=0,
            groups=(events.Blocks(2, 17),),
            identity=self._identity(number),
        )

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()


def _feed(ring: Path, rate: int, requests: int, capacity: int) -> None:
    """``requests`` come, ``rate`` a second, or, if that is 0, as fast as can be; then they run to their end."""
    engine = _FakeEngine(ring, capacity)
    arrivals = max((rate or TARGET_RATE) // STEPS_PER_S, 1)
    begin = time.monotonic()
    for number in range(requests // arrivals + LIFE):
        engine.step(arrivals if number < requests // arrivals else 0)
        if rate:
            time.sleep(max(0.0, begin + (number + 1) / STEPS_PER_S - time.monotonic()))
    sys.stdout.write("written\n")
    sys.stdout.flush()
    if not rate:
        sys.stdin.read()
    engine.close()


# -- the parts ----------------------------------------------------------------------------------------------------


@contextmanager
def _receiver() -> Iterator[int]:
    """An OTLP receiver that says thanks; its port."""
    server = grpc.server(ThreadPoolExecutor(2))
    take = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(f"opentelemetry.proto.collector.{name}", {"Export": take})
            for name in SERVICES
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextmanager
def _engine(ring: Path, rate: int, requests: int, capacity: int = CAPACITY) -> Iterator[subprocess.Popen[bytes]]:
    """A fake engine in its process; see :func:`_feed`."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.sidecar_cost",
        "--feed",
        str(ring),
        str(rate),
        str(requests),
        str(capacity),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:  # noqa: S603  our own arguments
        try:
            yield engine
        finally:
            engine.kill()


@dataclass
class _Usage:
    """What a process has taken so far, and holds."""

    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of all its threads."""
        # The name, in parentheses, may hold anything; user and system time are the 12th and 13th field after it.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def status(self, name: str) -> float:
        """A line of its ``status`` in MiB: VmRSS, VmHWM."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


@contextmanager
def _sidecar(port: int, traced: str) -> Iterator[tuple[Sidecar, Path]]:
    """A fresh sidecar with the defaults, and the folder that it follows."""
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": traced,
    }
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as folder:
        rings = Path(folder, "rings")
        rings.mkdir()
        with Sidecar(Path(folder), rings, environ) as sidecar:
            yield sidecar, rings


def _account(sidecar: Sidecar, ring: Path) -> dict[str, int]:
    """Wait until the ring of an ended engine is read; requests told, events published and lost, spans dropped."""
    deadline = time.monotonic() + _ANSWER_S
    while sidecar.state(ring.name) != "ended":
        if time.monotonic() > deadline:
            raise SystemExit(f"the sidecar did not come to the end of {ring.name} in time")
        time.sleep(0.1)
    events = (sidecar.engine(ring.name) or {})["events"]
    return {
        "requests": sidecar.finished(ring.name),
        "events": events["published"],
        "lost": events["lost"],
        "dropped": sidecar.spans("dropped") + sidecar.spans("failed"),
    }


# -- what is measured ---------------------------------------------------------------------------------------------


def _steady(port: int) -> dict[str, float]:
    """Share of a core, and resident memory, at a steady load."""
    with _sidecar(port, TRACED["one in 100"]) as (sidecar, rings):
        usage, ring = _Usage(sidecar.pid), rings / "steady.ring"
        began = usage.cpu_s()
        time.sleep(SETTLE_S)
        idle = (usage.cpu_s() - began) / SETTLE_S
        with _engine(ring, TARGET_RATE, int(TARGET_RATE * (3 * SETTLE_S + STEADY_S))):
            time.sleep(SETTLE_S)  # as many run now as ever will
            before, told, began = usage.cpu_s(), sidecar.finished(ring.name), time.monotonic()
            time.sleep(STEADY_S)
            took = time.monotonic() - began
            cpu, told = usage.cpu_s() - before, sidecar.finished(ring.name) - told
            spans = sidecar.spans("exported")
        return {
            "seconds": took,
            "requests_per_s": told / took,
            "core": cpu / took,
            "idle_core": idle,
            "spans": spans,
            "us_per_request": cpu / max(told, 1) * 1e6,
            "rss_mib": usage.status("VmRSS"),
            "most_rss_mib": usage.status("VmHWM"),
        }


@dataclass
class _Try:
    """One rate, all traced, and what became of it; ``core``: the sidecar's share of one; spans a second."""

    rate: int
    spans_per_s: float
    lost: int
    dropped: int
    core: float

    @property
    def good(self) -> bool:
        """Whether nothing was lost."""
        return not self.lost and not self.dropped


def _try(port: int, rate: int) -> _Try:
    with _sidecar(port, TRACED["all"]) as (sidecar, rings):
        ring, usage = rings / "a.ring", _Usage(sidecar.pid)
        with _engine(ring, rate, int(rate * STEP_S)) as engine:
            while not sidecar.finished(ring.name):
                time.sleep(0.05)
            before, began = usage.cpu_s(), time.monotonic()
            engine.wait()
            took = time.monotonic() - began
            cpu = usage.cpu_s() - before
        told = _account(sidecar, ring)
    return _Try(rate, told["requests"] / took, told["lost"], told["dropped"], cpu / took)


def _spans(port: int) -> dict[str, Any]:
    """The highest rate without a loss, and the next one."""
    tries: list[_Try] = []
    for rate in RATES:
        tries.append(_try(port, rate))
        _say(f"    {tries[-1]}")
        if not tries[-1].good:
            break
    good = [made for made in tries if made.good]
    return {"best": asdict(good[-1]) if good else None, "last": asdict(tries[-1])}


def _drain(port: int) -> dict[str, float]:
    """Requests and events a second that it reads when they are all there."""
    with _sidecar(port, TRACED["one in 100"]) as (sidecar, rings), tempfile.TemporaryDirectory() as other:
        made = Path(other, "a.ring")
        with _engine(made, 0, DRAINED, DRAINED_WORDS) as engine:
            if engine.stdout is None or engine.stdout.readline() != b"written\n":
                raise SystemExit("the fake engine failed")
            ring = rings / "a.ring"
            ring.hardlink_to(made)
            while not sidecar.finished(ring.name):
                time.sleep(0.005)
            first, began = sidecar.finished(ring.name), time.monotonic()
            while (told := sidecar.finished(ring.name)) < DRAINED:
                time.sleep(0.1)
            took = time.monotonic() - began
            events_of = (sidecar.engine(ring.name) or {})["events"]
        per_s = (told - first) / took
        return {
            "requests_per_s": per_s,
            "events_per_s": per_s * events_of["published"] / DRAINED,
            "lost": events_of["lost"],
        }


def _long(port: int, rate: int) -> dict[str, Any]:
    """Memory while requests come."""
    with _sidecar(port, TRACED["one in 100"]) as (sidecar, rings):
        ring, usage = rings / "long.ring", _Usage(sidecar.pid)
        start = usage.status("VmRSS")
        with _engine(ring, rate, int(rate * LONG_S)) as engine:
            points = []
            for quarter in range(1, 5):
                time.sleep(LONG_S / 4)
                points.append({"quarter": quarter, "rss_mib": usage.status("VmRSS")})
            engine.wait()
        return {"start_rss_mib": start, "rate": rate, "points": points, **_account(sidecar, ring)}


def measure() -> dict[str, Any]:
    """All figures, as plain JSON."""
    with ExitStack() as stack:
        port = stack.enter_context(_receiver())
        _say(f"  {TARGET_RATE} requests a second")
        steady = _steady(port)
        _say("  a ring that was written before")
        drain = _drain(port)
        _say("  all traced")
        spans = _spans(port)
        rate = int(min(drain["requests_per_s"] * LONG_SHARE, FASTEST)) // STEPS_PER_S * STEPS_PER_S
        _say(f"  memory over time, {rate} requests a second")
        long = _long(port, rate)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_1m": os.getloadavg()[0]}
    return {"machine": machine, "steady": steady, "drain": drain, "spans": spans, "long": long}


def table(result: dict[str, Any]) -> str:
    """The figures for a reader."""
    steady, long = result["steady"], result["long"]
    quarters = ", ".join(f"{point['rss_mib']:.1f}" for point in long["points"])
    lines = [
        f"{steady['requests_per_s']:.0f} requests/s for {steady['seconds']:.0f} s, one in 100 traced:",
        f"    {steady['spans']} spans, {steady['core']:.1%} of a core ({steady['idle_core']:.1%} before)",
        f"    {steady['rss_mib']:.0f} MiB resident, {steady['most_rss_mib']:.0f} at most",
        _drain_line(**result["drain"]),
        _spans_line(**result["spans"]),
        f"{long['requests']:,} requests at {long['rate']}/s ({long['events']:,} events, {long['lost']} lost):",
        f"    {long['start_rss_mib']:.1f} MiB before, {quarters} MiB after each quarter",
        f"{result['machine']['cpus']} CPUs, load {result['machine']['load_1m']:.1f} at the end",
    ]
    return "\n".join(lines)


def _drain_line(requests_per_s: float, events_per_s: float, lost: int) -> str:
    return (
        f"one in 100 traced, written before: {events_per_s:.0f} events/s, {requests_per_s:.0f} requests/s, {lost} lost"
    )


def _spans_line(best: dict[str, Any] | None, last: dict[str, Any]) -> str:
    end = f"at {last['rate']}/s: {last['lost']} events lost, {last['dropped']} spans dropped"
    if best is None:
        return f"all traced: below {last['rate']} spans/s without a loss; {end}"
    text = f"all traced: {best['rate']} spans/s without a loss ({best['core']:.0%} of a core)"
    return f"{text}; none higher tried" if best == last else f"{text}; {end}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sidecar_cost", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--feed", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.feed:
        ring, *numbers = chosen.feed
        _feed(Path(ring), *map(int, numbers))
        return 0
    result = measure()
    print(json.dumps(result) if chosen.json else table(result))  # noqa: T201  a command's output
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
