# SPDX-License-Identifier: Apache-2.0
"""What the live page takes: `python -m benchmarks.page_cost [--json]`, some five minutes.

Each figure comes from processes of their own, which hold the history of 8 processes in the sidecar's own parts: an
:class:`~vllm_kvfix_sidecar.assessment.Assessment` that was told what engines tell, at the pace at which they do, and
verdicts by the real judge. Of each process there are the 41 figures of ``events.SCOPES`` and 60 containers; two of the
processes are engines with 256 requests each, and one of those leaks. *Realistic*: of a process 10 figures and 6
containers change at each sample, as those of an engine under load do, 6 containers once in ten minutes, the rest never.
*Worst*: all change at each sample, and no value fits 32 bits.

*History*: resident memory after an hour, and after a week, less that before. *An open page*: CPU time of the process
that answers, read from outside, for what the page asks over HTTP: the answer of ``/api/now`` every 2 s, and
``/api/history`` of all, or of one process, every 15 s. Nobody is answered from a cache; each of the answers is asked
for ``POLLS`` times. *Load*: bytes on the wire of the files of the page and the first answers. *Lock*: for how long at
most one answer kept the pipeline from telling something.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import platform
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.spread import shown, spread
from vllm_kvfix import events
from vllm_kvfix.events import SCOPES
from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix_sidecar import static_files
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.health import Answer, Health
from vllm_kvfix_sidecar.history import LEVELS
from vllm_kvfix_sidecar.host_memory import ProcessView
from vllm_kvfix_sidecar.marks import Marks
from vllm_kvfix_sidecar.metrics import EngineKey, Metrics
from vllm_kvfix_sidecar.page_data import About, PageData
from vllm_kvfix_sidecar.process_table import ProcessKey
from vllm_kvfix_sidecar.requests import RequestTracker, SpanIds
from vllm_kvfix_sidecar.server import Pages, Server
from vllm_kvfix_sidecar.settings import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from vllm_kvfix_sidecar.assessment import Feed

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
SECOND = 10**9
HOUR, WEEK = 3600.0, 604_800.0
ROLES = ("api server", ENGINE_CORE, "worker", "worker")
PROCESSES = 8
CONTAINERS, BUSY_CONTAINERS, SLOW_CONTAINERS = 60, 6, 6
BUSY_FIGURES = {
    "status": ("rss", "anon"),
    "cgroup": ("usage", "anon", "file", "kernel"),
    "malloc": ("in_use", "retained"),
    "python": ("blocks_count", "gen0_count"),
}
FIGURES = sum(map(len, SCOPES.values()))
SLOW_S = 600.0
LIMIT = 64 << 30
PID = 1000
BOOTED = 1.8e9
BEGIN_S = 1e6
LEAKED_PER_S = 2000
GROWN = {"status": ("rss", "anon"), "smaps": ("rss", "heap"), "malloc": ("in_use",), "cgroup": ("usage", "anon")}
REQUESTS = 256
POLLS = 40
ROUNDS, MEMORY_ROUNDS = 5, 2
NOW_S, HISTORY_S = 2.0, 15.0
POINTS = 300
LEAKING = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"
_ANSWER_S = 30.0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  a command's output


# -- the 8 processes, in a process of their own ---------------------------------------------------------------------


class _Table:
    """Shows what it is given."""

    def __init__(self) -> None:
        self.views: list[ProcessView] = []

    def look(
        self, engines: Collection[tuple[int, int, str]], silent: Collection[tuple[int, int]] = ()
    ) -> Sequence[ProcessView]:
        """It."""
        del engines, silent
        return self.views


class _Engine(NamedTuple):
    """What is asked of :class:`vllm_kvfix_sidecar.engines.Engine`."""

    pid: int
    start_time: int
    key: EngineKey


class _Follower:
    """A pipeline that has turned just now."""

    scanned = folders_readable = True
    engines = processes = all = ()

    def __init__(self, clock: Callable[[], float]) -> None:
        self.refused: dict[Path, str] = {}
        self.followed: list[tuple[_Engine, RequestTracker]] = []
        self._clock = clock

    @property
    def last_turn(self) -> float:
        """Now."""
        return self._clock()


class _Fleet:
    """Eight processes, of which :meth:`tell` tells; ``now`` is how far it has come."""

    def __init__(self, *, worst: bool) -> None:
        self.now = BEGIN_S
        self._worst = worst
        self._table = _Table()
        self._feeds: list[Feed] = []
        marks, metrics = Marks(), Metrics()
        self.assessment = Assessment(self._table, listeners=(marks,), clock=self.clock, wall=self._wall)
        self.lock = self.assessment.lock = _Timed()  # type: ignore[assignment]  # as it is used
        follower = _Follower(self.clock)
        for at in range(PROCESSES):
            self._feeds.append(
                self.assessment.follow(PID + at, at, ROLES[at % len(ROLES)], f"{PID + at}.ring", "0.25.1")
            )
            self._feeds[-1].patch("refused")
            if self._feeds[-1].role == ENGINE_CORE:
                key = EngineKey(PID + at, 0, f"{PID + at}.ring")
                follower.followed.append((_Engine(PID + at, at, key), _tracker(key, metrics, self.now)))
        health = Health(follower, metrics, [Path("/run/vllm-kvfix")], self.clock)  # type: ignore[arg-type]  # it turns by itself
        self.data = PageData(
            follower,  # type: ignore[arg-type]  # it has what is asked of a pipeline
            self.assessment,
            metrics,
            health,
            marks,
            About("127.0.0.1:9464"),
            clock=self.clock,
            wall=self._wall,
        )

    def clock(self) -> float:
        """Seconds, as far as was told."""
        return self.now

    def _wall(self) -> float:
        return self.now + BOOTED

    def tell(self, length: float) -> None:
        """Tell how they do for so long, as finely as it is kept in the end, and have all judged."""
        end = self.now + length
        while self.now < end:
            age = end - self.now
            self.at(self.now + next(level.width for level in LEVELS if age <= level.span))
        for _ in self._feeds:
            self.assessment.tick(self.now)

    def at(self, time: float) -> None:
        """All processes tell how they do."""
        self.now = time
        self._table.views = [self._view(at, feed) for at, feed in enumerate(self._feeds)]
        self.assessment.look(time)
        for at, feed in enumerate(self._feeds):
            for event in self._happened(leaks=at == 1):
                feed.hear(event)
            feed.step(_step(time))

    def _view(self, at: int, feed: Feed) -> ProcessView:
        root = ProcessKey(PID + at // len(ROLES) * len(ROLES), at // len(ROLES) * len(ROLES))
        usage = self._value(9, busy=True) + LIMIT // 2
        return ProcessView(
            feed.key, 1, feed.role, feed.role, limit=LIMIT, usage=usage, ring=feed.key, root=root, started=1.0
        )

    def _happened(self, *, leaks: bool) -> Iterator[events.ProcessEvent]:
        time = round(self.now * SECOND)
        lost = int(self.now * LEAKED_PER_S) if leaks else 0
        for scope, names in SCOPES.items():
            figures = {}
            for number, name in enumerate(names, 3):
                grown = lost * 8 if name in GROWN.get(scope, ()) else 0
                figures[name] = self._value(number, busy=name in BUSY_FIGURES.get(scope, ())) + grown
            yield events.Figures(time, scope, figures)
        for number in range(CONTAINERS):
            path = LEAKING if not number else f"scheduler.part[{number}].a_name_as_long_as_they_mostly_are"
            length = lost if leaks and not number else self._value(number, busy=number < BUSY_CONTAINERS) >> 10
            slow = int(self.now // SLOW_S) if number < BUSY_CONTAINERS + SLOW_CONTAINERS else 0
            length += slow
            yield events.Container(
                time, path, length, 1, None if number % 2 == 0 else 1 << 40, length * 8, length, 0, 0, 0
            )

    def _value(self, number: int, *, busy: bool) -> int:
        """A figure that moves a little with each sample, or never; of the worst set one that does and is large."""
        base = (number + 1) * 10 * MIB + (1 << 33 if self._worst else 0)
        return base + int(self.now * 977 * (number + 1)) % MIB if busy or self._worst else base


class _Timed:
    """A lock that knows for how many CPU seconds it was held at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._lock = threading.RLock()
        self._depth = 0
        self._began = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.longest_s = max(self.longest_s, time.thread_time() - self._began)
        self._lock.release()


def _tracker(key: EngineKey, metrics: Metrics, now: float) -> RequestTracker:
    """An engine's requests, all of which run."""
    tracker, engine = RequestTracker(SpanIds(b"boot", key.pid, 1, key.ring)), metrics.engine(key)
    config = events.Config(65_536, REQUESTS, 8192, prefix_caching=True, groups=(events.Group(16, "FullAttentionSpec"),))
    engine.config(config)
    engine.step(_step(now))
    told: list[events.Event] = [config, _step(now)]
    for number in range(1, REQUESTS + 1):
        told.append(events.Arrived(number, round(now * SECOND), 200, events.Identity(f"cmpl-{number:032x}-0")))
        blocks = (events.Blocks(2, 11 + number % 7),)
        told.append(events.Admitted(number, 0, False, 32, 0, blocks))  # noqa: FBT003  a field
        told += [events.Allocated(number, 0, (1,))] * 60
    tracker.consume([word for event in told for word in events.encode(event)])
    return tracker


def _step(now: float) -> events.Step:
    """After so many seconds of a steady load."""
    done = int(now * 20)
    return events.Step(
        time=round(now * SECOND),
        running=REQUESTS - int(now) % 9,
        waiting=int(now) % 5,
        free=40_000 + int(now * 77) % 9000,
        cached=20_000,
        steps=done * 2,
        tokens=done * 300,
        new=done * 20,
        reused=done * 3,
        released=done * 23,
        preemptions=0,
        refusals=0,
        queried=done * 300,
        hit=done * 30,
        finished=done,
        aborted=0,
        generated=done * 100,
        backlog=(int(now * LEAKED_PER_S),),
    )


def _resident() -> float:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def _child(*, worst: bool) -> None:
    """Tell how much memory the history takes; then serve it, each answer two seconds later, until there is input."""
    _Fleet(worst=worst).tell(LEVELS[0].width)  # so that code and buffers are there
    before = _resident()
    fleet = _Fleet(worst=worst)
    fleet.tell(HOUR)
    hour = _resident() - before
    fleet.tell(WEEK - HOUR)
    week = _resident() - before
    fleet.lock.longest_s = 0.0

    def later(made: Callable[[], bytes]) -> bytes:
        fleet.now += NOW_S
        return made()

    none = Answer(good=True, body={})
    pages = Pages(
        metrics=lambda _: (b"", ""),
        alive=lambda: none,
        ready=lambda: none,
        diagnosis=lambda: none,
        now=lambda: later(fleet.data.now_body),
        history=lambda *asked: later(lambda: fleet.data.history_body(*asked)),
        files=static_files.load(),
    )
    server = Server(Address("127.0.0.1", 0), pages)
    server.start()
    print(json.dumps({"hour": hour, "week": week, "port": server.address.port}), flush=True)  # noqa: T201  to who started this
    sys.stdin.readline()
    print(json.dumps({"longest_s": fleet.lock.longest_s}), flush=True)  # noqa: T201  to who started this
    server.stop()


# -- what is measured ---------------------------------------------------------------------------------------------


class _Served:
    """Such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.told = self.line()
        self._url = f"http://127.0.0.1:{self.told['port']}"
        self._clock_id = ~process.pid << 3 | 2  # as clock_getcpuclockid makes it

    def line(self) -> Any:
        """What it says next."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit("a process of the benchmark has failed")
        return json.loads(line)

    def cpu_s(self) -> float:
        """CPU seconds of all its threads, those that ended among them."""
        return time.clock_gettime(self._clock_id)

    def get(self, path: str) -> bytes:
        """An answer as it comes over the wire, packed."""
        request = urllib.request.Request(self._url + path, headers={"Accept-Encoding": "gzip"})  # noqa: S310  our own address
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310  our own address
            return bytes(answer.read())

    def polled(self, path: str) -> dict[str, float]:
        """Milliseconds of CPU for an answer, over ``ROUNDS`` times ``POLLS`` of them."""
        self.get(path)
        found = []
        for _ in range(ROUNDS):
            before = self.cpu_s()
            for _ in range(POLLS):
                self.get(path)
            found.append((self.cpu_s() - before) / POLLS * 1000)
        return spread(found)

    def longest_s(self) -> float:
        """End it; for how long the lock was held at most."""
        if self._process.stdin:
            self._process.stdin.write("end\n")
            self._process.stdin.flush()
        return float(self.line()["longest_s"])


@contextmanager
def _served(*, worst: bool) -> Iterator[_Served]:
    command = [sys.executable, "-m", "benchmarks.page_cost", "--child", "worst" if worst else "realistic"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  our own arguments
        try:
            yield _Served(process)
        finally:
            process.kill()


def _measured(*, worst: bool) -> dict[str, Any]:
    """Memory, and what a page costs that shows an hour of a week."""
    told = []
    for _ in range(MEMORY_ROUNDS - 1):
        with _served(worst=worst) as served:
            told.append(served.told)
    with _served(worst=worst) as served:
        told.append(served.told)
        page = _page(served)
    return {"mib": {name: spread([each[name] for each in told]) for name in ("hour", "week")}, "page": page}


def _page(served: _Served) -> dict[str, Any]:
    now, overview = "/api/now", f"/api/history?range=3600&points={POINTS}"
    key = json.loads(gzip.decompress(served.get(now)))["engines"][0]["key"]
    paths = {"now": now, "overview": overview, "process": f"{overview}&process={key}"}
    cpu_ms = {name: served.polled(path) for name, path in paths.items()}
    ms_per_s = cpu_ms["now"]["median"] / NOW_S
    ms_per_s += (cpu_ms["overview"]["median"] + cpu_ms["process"]["median"]) / HISTORY_S
    sizes = {name: len(served.get(path)) for name, path in paths.items()}
    return {"cpu_ms": cpu_ms, "core": ms_per_s / 1000, "bytes": sizes, "longest_lock_s": served.longest_s()}


def measure() -> dict[str, Any]:
    """All figures, as plain JSON."""
    found: dict[str, Any] = {}
    for name, worst in (("realistic", False), ("worst", True)):
        _say(f"  {name}")
        found[name] = _measured(worst=worst)
    found["files"] = sum(len(file.packed) for file in static_files.load().values())
    found["machine"] = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_1m": os.getloadavg()[0]}
    return found


def table(result: dict[str, Any]) -> str:
    """The figures for a reader."""
    lines = []
    for name in ("realistic", "worst"):
        mib, page = result[name]["mib"], result[name]["page"]
        load = result["files"] + sum(page["bytes"].values())
        lines += [
            f"{name}, {PROCESSES} processes with {FIGURES} figures and {CONTAINERS} containers each:",
            f"    history of an hour {shown(mib['hour'])} MiB, of a week {shown(mib['week'])} MiB",
            *(f"    {what}: {shown(page['cpu_ms'][what])} ms of CPU an answer, {page['bytes'][what]:,} bytes"
              for what in ("now", "overview", "process")),
            f"    an open page: {page['core']:.2%} of a core",
            f"    load: {load / 1000:.0f} kB, {result['files'] / 1000:.0f} of them files",
            f"    the lock was held for {page['longest_lock_s'] * 1000:.1f} ms of CPU at most",
        ]  # fmt: skip
    lines.append(f"median (5th .. 95th percentile) of {MEMORY_ROUNDS} processes; of {ROUNDS} times {POLLS} answers")
    lines.append(f"{result['machine']['cpus']} CPUs, load {result['machine']['load_1m']:.1f} at the end")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page_cost", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        _child(worst=chosen.child == "worst")
        return 0
    result = measure()
    print(json.dumps(result) if chosen.json else table(result))  # noqa: T201  a command's output
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
