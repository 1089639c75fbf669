# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it, on a real engine; and how its story goes on a made-up one, where no engine is needed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.support import ROOT
from vllm_kvfix.demo import run, story
from vllm_kvfix.demo.attaching import Attempt
from vllm_kvfix.demo.measurement import MIB, Point
from vllm_kvfix.demo.progress import Progress
from vllm_kvfix.demo.stopping import STOPS, uninterrupted
from vllm_kvfix.demo.story import Teller, Terms
from vllm_kvfix_sidecar.report import ProcessReport
from vllm_kvfix_sidecar.verdict import Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engine.harness import Workshop
    from vllm_kvfix.demo.story import Story

RELEASE = "0.25.1"
STOP_TIMEOUT_S = 90
DEMO_TIMEOUT_S = 600
CORE = 4242


# ---- a real engine ----


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for temporary files whose name is short: vLLM puts sockets there."""
    folder = Path(tempfile.mkdtemp(prefix="kvfix-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def left_of(folder: Path) -> list[str]:
    """The processes that run in ``folder``, or are told of it on their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = f"{(process / 'cwd').readlink()} {(process / 'cmdline').read_bytes().decode(errors='replace')}"
        except OSError:
            continue
        if str(folder) in told:
            found.append(f"{process.name}: {told}")
    return found


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the demo with ``folder`` as the place for its temporary files."""
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_kvfix.demo", f"--release={RELEASE}", "--no-browser", *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.engine
@pytest.mark.parametrize(
    ("moment", "number"), [("1/4", signal.SIGTERM), ("2/4", signal.SIGINT)], ids=["starting", "under load"]
)
def test_interrupted_demo_leaves_nothing(
    workshop: Workshop, place: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    """A signal, while the engine starts or is under load, ends the demo with 130, its processes and its files."""
    workshop.environment(RELEASE)
    with start_demo(place, f"--output={tmp_path / 'leak.png'}") as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith(moment):
                break
        demo.send_signal(number)
        _, rest = demo.communicate(timeout=STOP_TIMEOUT_S)
    assert demo.returncode == 130, rest
    assert "Traceback" not in rest
    assert left_of(place) == []
    assert list(place.iterdir()) == []


@pytest.mark.engine
def test_demo_fixes_a_live_engine(workshop: Workshop, place: Path, tmp_path: Path) -> None:
    """The backlog grows, the fix goes into the same engine core, and from then on it is empty; nothing is left."""
    workshop.environment(RELEASE)
    picture = tmp_path / "leak.png"
    with start_demo(place, "--seconds=10", "--wait=0", "--json", f"--output={picture}") as demo:
        output, progress = demo.communicate(timeout=DEMO_TIMEOUT_S)
    assert demo.returncode == 0, progress
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads(output)
    assert result == json.loads(picture.with_suffix(".json").read_text())
    assert result["fix"]["how"] == "attached", progress
    leak, fixed = result["phases"]
    assert leak["backlog_ids_per_second"] > 0
    counted = [point for point in fixed["points"] if point["time_s"] > fixed["counted_from_s"]]
    assert {point["backlog"] for point in counted} == {0}
    # The counter is the engine core's own: it goes on where it was, so this is the same process, and it works.
    assert leak["points"][-1]["allocated"] < counted[0]["allocated"] < counted[-1]["allocated"]
    assert result["released"]["ids"] == leak["points"][-1]["backlog"] > 0
    assert progress.index(result["page"]) < progress.index("2/4 the leak")
    address = urlsplit(result["page"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), 5)
    assert left_of(place) == []
    assert list(place.iterdir()) == []
    workshop.summary.append(f"demo, 10 s instead of 60: {progress.splitlines()[-1]}; {result['wall_s']:.0f} s")


# ---- a made-up engine ----


@pytest.mark.parametrize("number", STOPS)
def test_nothing_stops_us_between_the_start_of_a_process_and_its_name(number: signal.Signals) -> None:
    """A signal within the block comes after its last line, and once; the handler from before is back then."""
    seen: list[str] = []

    def stop(*_: object) -> None:
        seen.append("stopped")
        raise KeyboardInterrupt

    def start() -> None:
        with uninterrupted():
            signal.raise_signal(number)
            seen.append("known")

    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert seen == ["known", "stopped"]


class Clock:
    """Stands in for the module ``time``: sleeping is all that takes time."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        """Seconds."""
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass
class Made:
    """An engine that leaks 100 ids a second until it is fixed; the story's ``Served``, its engine, and its sidecar."""

    clock: Clock
    mode: str
    fixed_at: float | None = None
    began: float = 0.0
    gone: list[str] = field(default_factory=list)
    core: int = CORE

    @property
    def engine(self) -> Any:
        """What is asked of the engine itself."""
        return SimpleNamespace(start_s=1.0, log_text=lambda: "")

    def __enter__(self) -> Made:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def put_load_on(self) -> None:
        """Begin to leak."""
        self.began = self.clock.now

    def take_load_off(self) -> int:
        """How many requests there were."""
        self.gone.append("load")
        return 7

    def stop(self) -> None:
        """End."""
        self.gone.append("engine")

    def check(self) -> None:
        """It has not ended."""
        assert "engine" not in self.gone

    def look(self, began: float) -> Point:
        """Its figures."""
        blocks = int(100 * (self.clock.now - self.began))
        leaks = self.mode == "off" and self.fixed_at is None
        return Point(self.clock.now - began, 500 * MIB + (8 * blocks if leaks else 0), blocks if leaks else 0, blocks)


@dataclass
class Stage:
    """The demo on made-up engines: ``named_after`` seconds the sidecar names the leak, None: never."""

    attach: Callable[[Made], Attempt]
    named_after: float | None = 120.0
    clock: Clock = field(default_factory=Clock)
    engines: list[Made] = field(default_factory=list)
    said: io.StringIO = field(default_factory=io.StringIO)

    def serve(self, _: object, mode: str) -> Any:
        """A new engine."""
        self.engines.append(Made(self.clock, mode))
        return self.engines[-1]

    def check(self) -> None:
        """The sidecar lives."""

    def judged(self, pid: int) -> ProcessReport:
        """What the sidecar says."""
        engine = self.engines[-1]
        leaks = engine.look(0).backlog > 0 and self.named_after is not None
        named = leaks and self.clock.now - engine.began >= (self.named_after or 0)
        return ProcessReport(Verdict(pid, "engine core", "VLLM::EngineCore", Kind.UNBOUNDED if named else Kind.STEADY))

    def play(self, monkeypatch: pytest.MonkeyPatch, wait_s: float = 200.0) -> Story:
        """Tell the story to its end, after which nothing runs."""
        monkeypatch.setattr(story, "time", self.clock)
        scene: Any = SimpleNamespace(
            environment=SimpleNamespace(release=RELEASE), progress=Progress(self.said, self.clock.monotonic)
        )
        sidecar: Any = self
        with ExitStack() as stack:
            teller = Teller(scene, Terms(20.0, wait_s), sidecar, lambda _: self.attach(self.engines[-1]), self.serve)
            told, _ = teller.tell(stack)
            assert "engine" not in self.engines[-1].gone
        assert all("engine" in engine.gone for engine in self.engines)
        return told


def refuse(_: Made) -> Attempt:
    """As where the kernel does not let us."""
    return Attempt(done=False, said="the kernel refused to trace it", took_s=0.5)


def fix(engine: Made) -> Attempt:
    """As it should be."""
    engine.fixed_at = engine.clock.now
    return Attempt(done=True, said="fix attached", took_s=0.5)


def pretend(_: Made) -> Attempt:
    """A fix that says it is in, and does nothing."""
    return Attempt(done=True, said="fix attached", took_s=0.5)


def test_where_attach_refuses_the_engine_restarts_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is said in one line; the leaking engine ends, and another with the fix on takes its place."""
    stage = Stage(refuse)
    told = stage.play(monkeypatch)
    assert [engine.mode for engine in stage.engines] == ["off", "auto"]
    assert told.why_restarted == "the kernel refused to trace it"
    assert told.held
    (line,) = [line for line in stage.said.getvalue().splitlines() if "the kernel refused to trace it" in line]
    assert "restarts" in line
    # A new process has a warm-up of its own, and it is not counted.
    assert told.fixed.counted_from >= told.fixed_at + 40 - 1
    assert told.summary()["fix"]["how"] == "restarted"


def test_the_fix_goes_into_the_leaking_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second engine is started, and what is told as given back is what the first one had leaked."""
    stage = Stage(fix)
    told = stage.play(monkeypatch)
    assert [engine.mode for engine in stage.engines] == ["off"]
    ids, rss = told.released
    assert (ids, rss) == (told.leak.points[-1].backlog, 8 * told.leak.points[-1].backlog)
    assert told.leak.ids_per_second == pytest.approx(100)
    assert told.fixed.ids_per_second == 0
    assert told.requests == 7


def test_the_leak_goes_on_until_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix comes after the verdict, not long after it, and after the verdict the leak is called over."""
    told = Stage(fix, named_after=120.0).play(monkeypatch)
    assert told.first is not None
    assert told.first.kind == "unbounded growth"
    assert told.first.at == pytest.approx(120, abs=3)
    assert told.first.at < told.fixed_at < told.first.at + 30
    assert told.last is not None
    assert not told.last.alarming


def test_a_leak_that_nobody_names_does_not_hold_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix comes when the time for the verdict is over, and it is said that there was none."""
    stage = Stage(fix, named_after=None)
    told = stage.play(monkeypatch, wait_s=90.0)
    assert told.first is None
    assert told.fixed_at == pytest.approx(90, abs=2)
    assert "no verdict of unbounded growth within 90 s" in stage.said.getvalue()


@pytest.mark.parametrize(
    ("attach", "named_after", "code"),
    [(fix, 120.0, 0), (pretend, 120.0, 1), (fix, None, 1)],
    ids=["all-well", "not-fixed", "not-named"],
)
def test_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    attach: Callable[[Made], Attempt],
    named_after: float | None,
    code: int,
) -> None:
    """0 where the leak was named and then nothing piled up, 1 where either is missing; the picture is there anyway."""
    told = Stage(attach, named_after).play(monkeypatch)
    options = run._parse([f"--output={tmp_path / 'leak.png'}", "--no-browser"])
    assert run._conclude(options, told, "http://127.0.0.1:1", 200.0, Progress(io.StringIO())) == code
    assert (tmp_path / "leak.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "leak.json").read_text())["exit_code"] == code
