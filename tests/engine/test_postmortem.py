# SPDX-License-Identifier: Apache-2.0
"""The post-mortem of a real engine: one killed by signal 9, one by the memory limit of a real cgroup."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.memory_cgroup import MemoryCgroup
from tests.sidecar_e2e.processes import wait_until
from tests.sidecar_e2e.receiver import Receiver
from tests.sidecar_e2e.sidecar import Sidecar
from tests.support import ROOT
from vllm_kvfix.demo.engine import (
    MODEL_NAME,
    PROBE_FOLDER,
    Engine,
    EngineSettings,
    distribution_name,
    engine_environ,
    session_members,
)
from vllm_kvfix.demo.run import LOAD_SCRIPT
from vllm_kvfix_sidecar import conventions as names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engine.harness import Workshop
    from tests.sidecar_e2e.telemetry import LogRecord, Span

pytestmark = [pytest.mark.engine, pytest.mark.alone]

RELEASE = "0.25.1"
ARGUMENTS = (
    "--dtype=float32",
    "--max-model-len=2048",
    "--block-size=16",
    "--num-gpu-blocks-override=4096",
    "--logits-processors=leaky_processor:Leaky",
)
ROOM = 320 << 20
TOLD_S = 5.0
WARN = 13
ENOUGH = 20
# The SDK's own delays of batches, by which a span would take longer: a death must not wait for them.
USUAL_DELAYS = {"OTEL_BSP_SCHEDULE_DELAY": "5000", "OTEL_BLRP_SCHEDULE_DELAY": "5000"}


class Killed(NamedTuple):
    """Which process was killed, when as seen from outside (unix seconds), and the kernel's count of such kills."""

    pid: int
    at: float
    kills: int


@dataclass(frozen=True)
class Seen:
    """What was seen of a death from outside (``killed_at``: unix seconds), and what was told of it."""

    victim: int
    core: int
    killed_at: float
    kills: int
    span: Span
    event: LogRecord
    requests: list[Span]
    line: dict[str, Any]
    report: dict[str, Any]
    exit_code: int
    text: str
    diagnosis: str
    engine_log: str


def serve(workshop: Workshop, name: str, kill: Callable[[Engine, int, Path, ExitStack], Killed]) -> Seen:
    """Serve under load with a sidecar beside it, and have ``kill`` end one of its processes."""
    environment = workshop.environment(RELEASE)
    work = workshop.work / f"postmortem-{name}"
    rings = work / "rings"
    rings.mkdir(parents=True)
    leak = work / "leak"
    path = [PROBE_FOLDER, distribution_name(environment, work / "metadata"), workshop.plugin, Path(__file__).parent]
    settings = EngineSettings(
        workshop.model,
        work,
        arguments=ARGUMENTS,
        environ={
            "VLLM_KVFIX_RING_DIR": str(rings),
            "KVFIX_TEST_LEAK": str(leak),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
        },
        plugin_path=workshop.plugin,
    )
    with Receiver(work) as receiver, ExitStack() as stack:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint, **USUAL_DELAYS}
        with Sidecar(work, rings, environ) as sidecar, Engine(environment, settings) as engine:
            (core,) = engine.core_pids()
            assert engine._process is not None
            server = engine._process.pid
            with _load(str(environment.python), engine.url, work / "load.json"):
                _wait_for_requests(sidecar, engine)
                killed = kill(engine, core, leak, stack)
                left = killed.at + TOLD_S - time.time()
                receiver.wait_for(lambda _: _span(receiver) and _event(receiver), timeout_s=max(0.0, left))
                wait_until(lambda: not session_members(server), 60, "its server has not given up")
            text = _command("postmortem", rings)
            done = _command("postmortem", rings, "--json")
            receiver.wait_for(lambda _: _lost(receiver), timeout_s=30)
            return Seen(
                victim=killed.pid,
                core=core,
                killed_at=killed.at,
                kills=killed.kills,
                span=_span(receiver)[0],
                event=_event(receiver)[0],
                requests=_lost(receiver),
                line=next(line for line in sidecar.lines if "requests_lost" in line.get("fields", {})),
                report=json.loads(done.stdout),
                exit_code=done.returncode,
                text=text.stdout,
                diagnosis=_command("diagnose", rings, "--for=1").stdout,
                engine_log=engine.log_text(),
            )


@contextlib.contextmanager
def _load(python: str, url: str, output: Path) -> Iterator[None]:
    command = [python, "-I", str(LOAD_SCRIPT), "--mode=leak", f"--url={url}", f"--model={MODEL_NAME}"]
    command += [f"--output={output}", "--seconds=300", "--concurrency=8", "--prompt-tokens=600"]
    with subprocess.Popen(command, env=engine_environ({}, ()), stderr=subprocess.DEVNULL) as running:
        threading.Thread(target=_long_requests, args=(url, 2000), daemon=True).start()
        try:
            yield
        finally:
            running.kill()


def _long_requests(url: str, tokens: int) -> None:
    """One after the other, each as long as so many tokens, until the engine dies."""
    asked = {"model": MODEL_NAME, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError, http.client.HTTPException):
        while True:
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)  # noqa: S310  # ours
            opener.open(request, timeout=300).read()


def _wait_for_requests(sidecar: Sidecar, engine: Engine) -> None:
    """Until some have ended."""
    wait_until(
        lambda: _have_ended(sidecar, ENOUGH),
        180,
        lambda: f"hardly a request has ended: {sidecar.ready()}\n{engine.log_text()[-2000:]}",
    )


def _have_ended(sidecar: Sidecar, requests: int) -> bool:
    try:
        told = sidecar.ready()
    except (OSError, http.client.HTTPException):  # a machine that starts an engine may keep it from answering in time
        return False
    return sum(sum(engine["finished"].values()) for engine in told["engines"]) > requests


def _span(receiver: Receiver) -> list[Span]:
    return receiver.received.deaths


def _event(receiver: Receiver) -> list[LogRecord]:
    return [record for record in receiver.received.logs if record.event == names.EVENT_DEATH]


def _lost(receiver: Receiver) -> list[Span]:
    return [span for span in receiver.spans if span.attributes.get(names.ATTR_FINISH_REASON) == "engine_ended"]


def _command(name: str, rings: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_kvfix", name, f"--ring-dir={rings}", *options]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "sidecar")))}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in {b"Z", b"X"}
    except OSError:
        return True


def by_signal(_: Engine, core: int, __: Path, ___: ExitStack) -> Killed:
    """Kill the engine core as a person would."""
    at = time.time()
    os.kill(core, signal.SIGKILL)
    return Killed(core, at, 0)


def by_limit(engine: Engine, _: int, leak: Path, stack: ExitStack) -> Killed:
    """Give all its processes a limit, and let one of them leak until the kernel kills whichever it takes."""
    cgroup = stack.enter_context(MemoryCgroup())  # it goes when all of them are gone, as a container's does
    cgroup.limit(ROOM)
    assert engine._process is not None
    members = session_members(engine._process.pid)
    cgroup.put(members)
    leak.touch()
    wait_until(lambda: cgroup.kills, 90, "the kernel has not killed any")
    at = time.time()
    wait_until(lambda: any(map(_is_gone, members)), 30, "nobody has ended")
    (victim,) = filter(_is_gone, members)
    return Killed(victim, at, cgroup.kills)


@pytest.fixture(scope="module")
def signalled(workshop: Workshop) -> Seen:
    """Killed by signal 9."""
    return serve(workshop, "signal", by_signal)


@pytest.fixture(scope="module")
def limited(workshop: Workshop) -> Seen:
    """Killed by the kernel, for its memory."""
    return serve(workshop, "limit", by_limit)


@pytest.fixture(params=["signalled", "limited"])
def seen(request: pytest.FixtureRequest) -> Seen:
    """Each of the two."""
    found: Seen = request.getfixturevalue(request.param)
    return found


def test_the_last_step_is_told_to_within_a_second_of_the_kill(seen: Seen) -> None:
    """By its own clock, turned to wall time, against the wall time at which the kill was seen from outside."""
    last = seen.report["last_seconds"]
    assert last["pid"] == seen.core
    assert abs(last["last_step"]["time"] - seen.killed_at) < 1
    assert abs(seen.report["end"]["time_unix_s"] - seen.killed_at) < 1.5
    assert sum(row["steps"] for row in last["rows"]) > 10


def test_the_command_says_who_died_and_with_whom(seen: Seen) -> None:
    """The process that was killed, not those that ended of it; these are named with it; exit code 1."""
    assert seen.report["process"]["pid"] == seen.victim
    assert (seen.report["end"]["kind"], seen.exit_code) == ("killed", 1)
    assert f"(pid {seen.victim})" in seen.text.splitlines()[0]
    assert any("APIServer" in said for said in seen.report["end"]["others"])


def test_a_kill_for_memory_is_told_from_another(signalled: Seen, limited: Seen) -> None:
    """By what was counted before and after: the kernel counted one kill, or none."""
    assert (limited.kills, limited.report["oom"]["killed"]) == (1, "yes")
    assert "was killed by the memory limit" in limited.text
    assert (signalled.kills, signalled.report["oom"]["killed"]) == (0, "no")
    assert "and not for its memory" in signalled.text
    assert any("oom_kill went from 0 to 1" in said for said in limited.report["oom"]["evidence"])
    assert limited.report["use"]["limit_bytes"] == ROOM


def test_the_sidecar_has_told_it_by_itself_within_five_seconds(seen: Seen) -> None:
    """Span and event came in time, whatever the delays of batches, under one id, at the time of the death."""
    assert (seen.span.trace_id, seen.span.span_id) == (seen.event.trace_id, seen.event.span_id)
    assert abs(seen.span.end / 1e9 - seen.killed_at) < 1.5
    assert (seen.event.severity, seen.event.time) == (WARN, seen.span.end)
    assert seen.span.resource[names.ATTR_PID] == seen.victim
    assert seen.span.attributes[names.ATTR_DEATH_OOM] == seen.report["oom"]["killed"]
    assert [event.name for event in seen.span.events] == [names.EVENT_LAST_STEP, names.EVENT_DEATH]
    assert str(seen.event.body).startswith(seen.report["answer"].partition(" at ")[0])


def test_the_lost_requests_are_those_that_the_spans_tell(seen: Seen) -> None:
    """As many as have a span that says that the engine ended, and under the same ids."""
    known = {(request["trace_id"], request["span_id"]) for request in seen.report["requests"]["known"]}
    assert known == {(f"{span.trace_id:032x}", f"{span.span_id:016x}") for span in seen.requests}
    assert seen.report["requests"]["lost"] == seen.span.attributes[names.ATTR_DEATH_LOST] == len(known) > 0


def test_one_line_of_the_log_is_enough_to_act_on(seen: Seen) -> None:
    """A warning: who, whether for memory, how large against which limit, requests lost, and the command for more."""
    fields = seen.line["fields"]
    assert seen.line["level"] == "warning"
    assert (fields["pid"], fields["oom"]) == (seen.victim, seen.report["oom"]["killed"])
    assert fields["requests_lost"] == seen.report["requests"]["lost"]
    assert fields["more"] == f"vllm-kvfix postmortem {seen.report['ring']['path']}"
    assert "iB" in fields["rss"]


def test_what_leaked_is_named(limited: Seen) -> None:
    """The list of the leaky processor is the largest container at the end, in the worker that was killed."""
    largest = max(limited.report["containers"], key=lambda container: container["size_bytes"])
    assert largest["path"].endswith(".history")
    assert limited.report["grown"]["status.anon"]["last"] - limited.report["grown"]["status.anon"]["first"] > ROOM / 2


def test_diagnose_points_to_it(seen: Seen) -> None:
    """After the end, `diagnose` names the process and the command."""
    told = " ".join(seen.diagnosis.split())  # it is wrapped
    assert f"(pid {seen.victim}) was killed, or crashed," in told
    assert f"`vllm-kvfix postmortem {seen.report['ring']['path']}`" in told


def test_no_error_of_our_own_was_contained(seen: Seen) -> None:
    """No line of an engine's log is of an error of ours."""
    assert "an error of its own" not in seen.engine_log


def test_an_engine_that_is_stopped_in_order_is_no_death(workshop: Workshop) -> None:
    """SIGTERM to the server under load, which kills its engine core: nothing is told, and the command says in order."""
    environment = workshop.environment(RELEASE)
    work = workshop.work / "postmortem-stopped"
    rings = work / "rings"
    rings.mkdir(parents=True)
    settings = EngineSettings(
        workshop.model,
        work,
        arguments=ARGUMENTS[:-1],
        environ={"VLLM_KVFIX_RING_DIR": str(rings)},
        plugin_path=workshop.plugin,
    )
    with Sidecar(work, rings, {}) as sidecar:
        with Engine(environment, settings) as engine, _load(str(environment.python), engine.url, work / "load.json"):
            _wait_for_requests(sidecar, engine)
            engine.stop()
        ended = [ring.name for ring in rings.glob("*.ring")]
        wait_until(lambda: {sidecar.state(name) for name in ended} <= {"ended", ""}, 30, "it has not seen the end")
        # Longer than it waits for others before it tells.
        then = time.monotonic()
        wait_until(lambda: time.monotonic() > then + 4, 10, "time stands still")
        assert not [line for line in sidecar.lines if line["level"] == "warning"]
    assert len(ended) == 3
    for name in ended:
        done = _command("postmortem", rings, "--json", name)
        assert (json.loads(done.stdout)["end"]["kind"], done.returncode) == ("in order", 0), name
