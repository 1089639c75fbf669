# SPDX-License-Identifier: Apache-2.0
"""The load of an engine, and of all engines of a deployment, as series: what growth is compared with."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar.history import LEVELS, Track
from vllm_kvfix_sidecar.observed import Series

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_kvfix.events import Step

TOTALS = ("requests", "aborts", "generated_tokens", "blocks", "steps")
STATES = ("running", "waiting")
NAMES = (*TOTALS, *STATES)
# What is kept beside the load: free blocks, and the lengths of all groups' backlogs together.
POOL = ("free", "backlog")
SHOWN = (*STATES, *POOL)
EVERY_S = 1.0
IDLE_S = 5.0
# A step that was published late may still come from so long ago.
LATE_S = 2.0


class EngineLoad:
    """What one engine has done. Totals never fall: an engine whose recorder began anew goes on from where it was."""

    def __init__(self) -> None:
        self.ended = False
        self._track = Track(len(NAMES) + len(POOL), 0)
        self._base = [0] * len(TOTALS)
        self._last: tuple[int, ...] = ()
        self._step: Step | None = None
        self._added = 0.0

    def take(self, step: Step) -> None:
        """The state after a step; one in a second is kept, and the last."""
        self._step = step
        if step.time / 1e9 - self._added >= EVERY_S:
            self._add(step, step.time / 1e9)

    def look(self, now: float) -> None:
        """Keep the last step; where there was none for a while, nothing has changed since."""
        step = self._step
        if step is None:
            return
        if step.time / 1e9 > self._added:
            self._add(step, step.time / 1e9)
        elif now - self._added >= IDLE_S:
            self._add(step, now - LATE_S)

    def _add(self, step: Step, time: float) -> None:
        totals = (step.finished, step.aborted, step.generated, step.new, step.steps)
        if self._last and any(new < old for new, old in zip(totals, self._last, strict=True)):
            self._base = [base + old for base, old in zip(self._base, self._last, strict=True)]
        self._last, self._added = totals, time
        shown = [base + value for base, value in zip(self._base, totals, strict=True)]
        self._track.add(time, *shown, step.running, step.waiting, step.free, sum(step.backlog))

    def series(self) -> dict[str, Series]:
        """By name; empty where no step was seen."""
        return dict(zip(NAMES, self._track.all_series(), strict=False)) if self._track.last is not None else {}

    def shown_since(self, since: float) -> tuple[Sequence[float], dict[str, Sequence[float]]]:
        """The times from ``since`` on, and each of ``SHOWN`` then, as :meth:`Track.rows_since` gives them."""
        times, columns = self._track.rows_since(since)
        return times, dict(zip(SHOWN, columns[len(TOTALS) :], strict=True))


def combined(engines: Sequence[EngineLoad]) -> Mapping[str, Series]:
    """The sum over the engines at each time that one of them tells of.

    Before it was first seen an engine's totals are what they were then, so that only increments are told; its requests
    that run and wait are 0 then, and when it has ended.
    """
    known = [(found, engine.ended) for engine in engines if (found := engine.series())]
    if len(known) <= 1:
        return known[0][0] if known else {}
    times = _thinned(sorted({time for found, _ in known for time in found[TOTALS[0]].times}))
    sums: dict[str, Series] = {}
    for name in NAMES:
        total = [0.0] * len(times)
        for found, ended in known:
            for at, value in enumerate(_at(found[name], times, is_total=name in TOTALS, ended=ended)):
                total[at] += value
        sums[name] = Series(times, total, total)
    return sums


def _thinned(times: Sequence[float]) -> Sequence[float]:
    """No closer to each other than the levels of a track ask; the first and the last stay."""
    kept = array("d")
    for time in times:
        age = times[-1] - time
        width = next((level.width for level in LEVELS if age <= level.span), LEVELS[-1].width)
        if not kept or time - kept[-1] >= 0.9 * width or time == times[-1]:
            kept.append(time)
    return kept


def _at(series: Series, times: Sequence[float], *, is_total: bool, ended: bool) -> list[float]:
    """The value at each time: the last one not after it."""
    found, at, last = [], bisect_right(series.times, times[0]), len(series.times)
    for time in times:
        while at < last and series.times[at] <= time:
            at += 1
        if at == 0:
            found.append(series.values[0] if is_total else 0.0)
        elif ended and not is_total and at == last and time > series.times[-1]:
            found.append(0.0)
        else:
            found.append(series.values[at - 1])
    return found
