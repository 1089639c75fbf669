# SPDX-License-Identifier: Apache-2.0
"""What the demo shows, in its order: an engine leaks, is judged, is fixed while it runs, and stays flat."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvfix.demo.attaching import attach_fix
from vllm_kvfix.demo.engine import EngineFailedError, plugin_lines
from vllm_kvfix.demo.measurement import BYTES_PER_ID, MIB, SECONDS_PER_HOUR, Phase
from vllm_kvfix.demo.served import BLOCK_SIZE, CONCURRENCY, FIXED, MODE_VARIABLE, PROMPT_TOKENS, UNFIXED, Served

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from vllm_kvfix.demo.attaching import Attempt
    from vllm_kvfix.demo.beside import Sidecar
    from vllm_kvfix.demo.measurement import Point
    from vllm_kvfix.demo.screenshots import Camera
    from vllm_kvfix.demo.served import Scene
    from vllm_kvfix_sidecar.report import ProcessReport

LOAD = f"{CONCURRENCY} clients, {PROMPT_TOKENS}-token prompts, max_tokens=1, block size {BLOCK_SIZE}"
LEAKS = "unbounded growth"

_WARM_UP_S = 40.0
_SAMPLE_S = 1.0
_ASK_EVERY_S = 2.0
# Whoever looks at the page should see the verdict there before it is overtaken.
_SHOWN_S = 20.0
_DRAINED_WITHIN_S = 20.0
# What is freed is given back over some steps of the engine.
_SETTLED_AFTER_S = 3.0
_CALM_WITHIN_S = 60.0
_SILENT_FOR_S = 60.0
_FEWEST_POINTS = 3  # a line, and one more


@dataclass(frozen=True)
class Terms:
    """How it is told.

    ``seconds``: the least measured time of each phase; ``wait_s``: how long the verdict may take under load;
    ``camera``: takes pictures of the page on the way.
    """

    seconds: float
    wait_s: float
    camera: Camera | None = None


@dataclass(frozen=True)
class Judged:
    """A verdict of the sidecar on the engine core, ``at`` seconds after the load began."""

    at: float
    kind: str
    alarming: bool
    sentence: str
    remedy: str | None

    def summary(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "at_s": round(self.at, 1),
            "kind": self.kind,
            "alarming": self.alarming,
            "sentence": self.sentence,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Story:
    """What was seen. ``fixed_at``, on the clock of the points: when the fix came; ``marks``: seconds since the start.

    ``why_restarted``: None where the fix went into the running engine.
    """

    leak: Phase
    fixed: Phase
    fixed_at: float
    took_s: float
    why_restarted: str | None
    first: Judged | None
    last: Judged | None
    requests: int
    marks: tuple[tuple[float, str], ...]

    @property
    def held(self) -> bool:
        """Whether nothing piled up once the fix was in."""
        return not any(point.backlog for point in self.fixed.counted)

    @property
    def released(self) -> tuple[int, int]:
        """Ids and bytes of RssAnon that the engine core was rid of, from just before the fix to the settled state."""
        before, after = self.leak.points[-1], self.fixed.counted[0]
        return before.backlog - after.backlog, before.rss - after.rss

    def summary(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        ids, rss = self.released
        return {
            "load": LOAD,
            "requests": self.requests,
            "fix": {
                "how": "attached" if self.why_restarted is None else "restarted",
                "at_s": round(self.fixed_at, 1),
                "took_s": round(self.took_s, 1),
                "why_restarted": self.why_restarted,
                "held": self.held,
            },
            "verdict": {
                "leak": None if self.first is None else self.first.summary(),
                "fixed": None if self.last is None else self.last.summary(),
            },
            "released": {"ids": ids, "backlog_bytes": ids * BYTES_PER_ID, "rss_anon_bytes": rss},
            "explained_by_backlog_mib_per_hour": round(explained(self.leak), 2),
            "phases": [self.leak.summary(), self.fixed.summary()],
            "time_line": [{"at_s": round(at, 1), "what": what} for at, what in self.marks],
        }


def explained(phase: Phase) -> float:
    """MiB an hour of a phase that its backlog alone makes."""
    return phase.ids_per_second * BYTES_PER_ID * SECONDS_PER_HOUR / MIB


class Teller:
    """Plays the story, and says on the way what there is to see."""

    def __init__(
        self,
        scene: Scene,
        terms: Terms,
        sidecar: Sidecar,
        attach: Callable[[int], Attempt] = attach_fix,
        serve: Callable[[Scene, str], Served] = Served,
    ) -> None:
        """Prepare it; ``attach`` brings the fix into an engine core, ``serve`` makes an engine with it on or off."""
        self._terms = terms
        self._scene = scene
        self._sidecar = sidecar
        self._attach = attach
        self._serve = serve
        self._say = scene.progress
        self._started = time.monotonic()
        self._marks: list[tuple[float, str]] = []
        self._began = 0.0
        self._judged: Judged | None = None
        self._next_question = 0.0

    def tell(self, stack: ExitStack) -> tuple[Story, Served]:
        """Play it; what runs at the end, engine and load, is returned and ends with ``stack``.

        Raises:
            EngineFailedError, SidecarFailedError: One of them ended, or the engine did no work.
        """
        served = self._start(stack, UNFIXED, "1/4 an engine without the fix")
        self._say(f"2/4 the leak: {LOAD}; the first {_WARM_UP_S:.0f} s are warm-up")
        self._begin_load(served, first=True)
        points, first = self._until_judged(served)
        leak = _phase("without the fix", _WARM_UP_S, points)
        self._shoot("leak", served, points)
        served, fixed_at, attempt = self._fix(served, stack)
        fixed = self._fixed_phase(served, attempt)
        last = self._until_calm(served)
        requests = served.take_load_off()
        self._mark("done")
        why = None if attempt.done else attempt.said
        story = Story(leak, fixed, fixed_at, attempt.took_s, why, first, last, requests, tuple(self._marks))
        return story, served

    # ---- the acts ----

    def _start(self, stack: ExitStack, mode: str, title: str) -> Served:
        self._say(f"{title}: vLLM {self._scene.environment.release} starts with {MODE_VARIABLE}={mode}")
        served = stack.enter_context(self._serve(self._scene, mode))
        self._say(f"  it answers after {served.engine.start_s:.0f} s, engine core: pid {served.core}")
        for line in plugin_lines(served.engine.log_text()):
            self._say(f"  its log: {line}")
        self._mark("engine answers")
        return served

    def _begin_load(self, served: Served, *, first: bool) -> None:
        served.put_load_on()
        if first:
            self._began = time.time()
        self._mark("load begins")

    def _until_judged(self, served: Served) -> tuple[list[Point], Judged | None]:
        """Follow the leak until it has been measured, and the sidecar has said what it is or had its time."""
        first: list[Judged] = []

        def is_over(now: float) -> bool:
            if not first and self._judged is not None and self._judged.kind == LEAKS:
                first.append(self._judged)
                self._announce(self._judged)
            shown_until = first[0].at + _SHOWN_S if first else self._terms.wait_s
            return now >= max(_WARM_UP_S + self._terms.seconds, shown_until)

        points = self._follow(served, is_over)
        if not first and self._terms.wait_s:
            self._say(f"  no verdict of {LEAKS} within {self._terms.wait_s:.0f} s: this machine is slow, or busy")
        return points, first[0] if first else None

    def _announce(self, judged: Judged) -> None:
        self._mark("verdict")
        self._say(f"  VERDICT after {judged.at:.0f} s under load: {judged.sentence}")
        if judged.remedy:
            self._say(f"  what to do, it says: {judged.remedy}")

    def _fix(self, served: Served, stack: ExitStack) -> tuple[Served, float, Attempt]:
        """Bring in the fix: into the running engine, else by a restart. When it came, on the clock of the points."""
        self._say(f"3/4 the fix: into the same engine core (pid {served.core}), no restart")
        at = time.time() - self._began
        attempt = self._attach(served.core)
        if attempt.done:
            self._mark("fix attached")
            self._say(f"  attached in {attempt.took_s:.1f} s: {attempt.said}")
            return served, at, attempt
        self._say(f"  not attached, so the engine restarts with the fix on: {attempt.said}")
        served.take_load_off()
        served.stop()
        self._judged = None
        restarted = self._start(stack, FIXED, "  the same engine with the fix")
        self._begin_load(restarted, first=False)
        return restarted, time.time() - self._began, attempt

    def _fixed_phase(self, served: Served, attempt: Attempt) -> Phase:
        began = time.time() - self._began
        points: list[Point] = []
        if attempt.done:
            points += self._follow(served, lambda now: now >= began + _DRAINED_WITHIN_S, lambda p: p.backlog == 0)
            settled = points[-1].time + _SETTLED_AFTER_S
            self._say(f"  backlog {points[-1].backlog:,} ids after {points[-1].time - began:.0f} s")
        else:
            settled = began + _WARM_UP_S
        self._say(f"4/4 the same load with the fix, {self._terms.seconds:.0f} s")
        points += self._follow(served, lambda now: now >= settled + self._terms.seconds)
        self._shoot("fixed", served, points)
        return _phase("with vllm-kvfix", settled, points)

    def _until_calm(self, served: Served) -> Judged | None:
        """What the sidecar says at last; it gets some time to see that the leak is over."""
        if self._terms.wait_s:
            until = time.time() - self._began + _CALM_WITHIN_S

            def is_over(now: float) -> bool:
                return now >= until or (self._judged is not None and not self._judged.alarming)

            self._follow(served, is_over)
        if self._judged is not None:
            self._say(f"  VERDICT now: {self._judged.sentence}")
        return self._judged

    def _shoot(self, stage: str, served: Served, points: list[Point]) -> None:
        if self._terms.camera is not None:
            self._say(f"  taking screenshots of the page ({stage})")
            with self._terms.camera.shooting(stage) as shooting:
                points += self._follow(served, lambda _: shooting.poll() is not None)
            self._mark(f"screenshots ({stage})")

    # ---- looking ----

    def _follow(
        self,
        served: Served,
        is_over: Callable[[float], bool],
        enough: Callable[[Point], bool] = lambda _: False,
    ) -> list[Point]:
        """Sample until it is over, or a point is enough; there is one point at least.

        Raises:
            EngineFailedError: The engine makes no steps, or has ended.
        """
        points: list[Point] = []
        silent_since = time.monotonic()
        while True:
            served.check()
            self._ask(served)
            point = served.look(self._began)
            if point is not None:
                points.append(point)
                silent_since = time.monotonic()
                self._say.passing(self._status(point))
                if enough(point) or is_over(point.time):
                    return points
            elif time.monotonic() - silent_since > _SILENT_FOR_S:
                raise EngineFailedError("the engine made no steps under load, so there is nothing to show")
            time.sleep(_SAMPLE_S)

    def _ask(self, served: Served) -> None:
        self._sidecar.check()
        if time.monotonic() < self._next_question:
            return
        self._next_question = time.monotonic() + _ASK_EVERY_S
        found = self._sidecar.judged(served.core)
        if found is not None:  # else what it said last stands: a busy machine may keep it from answering in time
            self._judged = _judged(found, time.time() - self._began)

    def _status(self, point: Point) -> str:
        told = self._judged.kind if self._judged else "no verdict yet"
        return (
            f"  {point.time:4.0f} s  backlog {point.backlog:>9,} ids of {point.allocated:,} blocks  "
            f"RssAnon {point.rss / MIB:,.1f} MiB  {told}"
        )

    def _mark(self, what: str) -> None:
        self._marks.append((time.monotonic() - self._started, what))


def _phase(label: str, counted_from: float, points: list[Point]) -> Phase:
    phase = Phase(label, counted_from, points)
    if len(phase.counted) < _FEWEST_POINTS:
        raise EngineFailedError("the engine made no steps under load, so there is nothing to show")
    return phase


def _judged(process: ProcessReport, at: float) -> Judged:
    from vllm_kvfix_sidecar import report_text  # noqa: PLC0415  the parts that the tests share do without the extra

    verdict = process.verdict
    remedy = None if verdict.remedy is None else verdict.remedy.action
    return Judged(at, verdict.kind.value, verdict.alarming, report_text.sentence(process), remedy)
