# SPDX-License-Identifier: Apache-2.0
"""Judges the recent history of a process: does its memory grow, what owns the growth, and when does it end?

Containers decide first, in minutes: they show what grows, against which capacity, with which load. Where they explain
nothing, the size of the process alone decides, which takes hours: a warm-up looks like a leak for that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import evidence, forecast, growth, owners, places, remedies, trend
from vllm_kvfix_sidecar.observed import Series
from vllm_kvfix_sidecar.owners import DRIVERS, HOUR, MEBIBYTE, MINUTE, Finding, Nature, Work
from vllm_kvfix_sidecar.trend import Interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_kvfix_sidecar.growth import Rise
    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.remedies import Remedy

__all__ = ["Culprit", "Interval", "Kind", "Verdict", "judge"]


class Kind(Enum):
    """What a process's memory does."""

    STEADY = "steady"
    WARMING = "warming"
    BOUNDED = "bounded growth"
    UNBOUNDED = "unbounded growth"
    RETAINED = "retained by the allocator"
    UNEXPLAINED = "unexplained growth"


@dataclass(frozen=True)
class Culprit:
    """A container that grows.

    ``bytes_per_hour`` as it grew in the window that was judged; ``per`` maps each driver of the load (``request``,
    ``abort``, ``generated_token``, ``block``, ``step``) to bytes per unit; ``follows``: the driver whose steps the
    growth matches best, or ``time``. ``capacity`` in entries. ``why``: one sentence. ``full_bytes``: what it will have
    grown by when its capacity is full, and in how many seconds that will be at this pace; None: nothing bounds it.
    """

    path: str
    bytes_per_hour: float
    per: Mapping[str, float]
    follows: str | None
    capacity: int | None
    why: str
    full_bytes: float | None = None
    full_in_s: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one process.

    ``category``: the part of its memory that grows, one of ``events.CATEGORIES``, or of ``anon``, ``file``, ``shmem``
    where its maps could not be read; None: nothing grows. ``culprits``: the containers that own the growth; of a
    process that is WARMING those that may turn out to, of one with BOUNDED growth those that fill. ``slope``: bytes per
    hour of the process's memory (RssAnon + VmSwap). ``per`` and ``follows`` as in :class:`Culprit`, of the whole
    growth. ``explained``: the share of it that the culprits make up, 0 to 1, None: the growth is too small to say.
    ``time_to_limit_s``: seconds until the limit is reached if it goes on so, None: it is not growing, or there is no
    limit. ``evidence``: sentences with the figures. ``window_s``: the seconds that were judged.
    """

    pid: int
    role: str
    name: str
    kind: Kind
    category: str | None = None
    culprits: tuple[Culprit, ...] = ()
    slope: Interval | None = None
    per: Mapping[str, float] | None = None
    follows: str | None = None
    explained: float | None = None
    time_to_limit_s: Interval | None = None
    evidence: tuple[str, ...] = ()
    remedy: Remedy | None = None
    window_s: float = 0.0

    @property
    def alarming(self) -> bool:
        """Whether somebody must act: the growth has no end that is known."""
        return self.kind in {Kind.UNBOUNDED, Kind.UNEXPLAINED}


# Shares of a growth: what containers that fill must explain, for it to be theirs, and where it has lasted for hours.
LITTLE, HALF = 0.3, 0.5
# How much larger than its estimate an entry may be: so many times, or so many bytes; else all of them must fit.
MOST_TIMES, MOST_BYTES = 8.0, 512.0
# Memory rises with a container if so many points show it, and no more of its increments is off: tables grow in leaps.
FEWEST, MOST_OFF = 6, 0.4


@dataclass(frozen=True)
class _Case:
    """All that a verdict is made of, looked up once."""

    history: ProcessHistory
    now: float
    memory: Series
    work: Work
    room: float
    least: float
    found: Sequence[Finding]
    recent: Rise | None


def judge(history: ProcessHistory, now: float) -> Verdict:
    """The verdict on one process at ``now``, on the clock of its series. Pure: the same history, the same verdict."""
    memory = growth.memory_of(history.memory)
    work = Work.of(history)
    room = forecast.room_of(history.limit)
    least = growth.least(room)

    def is_known(path: str) -> bool:
        return remedies.known_leak(path, history.vllm_version, history.patch_state) is not None

    terms = owners.Terms(least, room, is_known, remedies.is_expected)
    found = owners.find(history.containers, work, now, terms)
    case = _Case(history, now, memory, work, room, least, found, growth.recent(memory, now, least))
    leaks = _of(found, Nature.LEAK)
    if leaks:
        return _unbounded(case, leaks)
    case = replace(case, found=_weighed(case))
    verdict = _retained(case) or _bounded(case) or _unexplained(case) or _warming(case)
    return verdict or _steady(case)


def _of(found: Sequence[Finding], *natures: Nature) -> list[Finding]:
    return [finding for finding in found if finding.nature in natures]


def _verdict(case: _Case, kind: Kind) -> Verdict:
    return Verdict(case.history.pid, case.history.role, case.history.name, kind)


def _culprit(finding: Finding) -> Culprit:
    full = full_in = None
    if finding.nature is Nature.BOUNDED and finding.room < math.inf:
        full = finding.room * finding.unit
        full_in = full / finding.rate * HOUR if finding.rate > 0 else math.inf
    capacity = finding.history.capacity if finding.nature is Nature.BOUNDED else None
    return Culprit(
        finding.path,
        finding.rate,
        finding.per,
        finding.follows,
        capacity,
        finding.why,
        full_bytes=full,
        full_in_s=full_in,
    )


# ---- unbounded: containers that leak ----


def _unbounded(case: _Case, leaks: list[Finding]) -> Verdict:
    since, until = min(leak.since for leak in leaks), max(leak.until for leak in leaks)
    rate = sum(leak.rate for leak in leaks)
    memory = _memory_over(case, since)
    spread = 0.1 + 0.3 * min(1.0, 5 * MINUTE / max(1.0, until - since))
    known = Interval(rate / (1 + spread), rate, rate * (1 + spread))
    first = leaks[0]
    explained = _explained(case, leaks, since)
    return replace(
        _verdict(case, Kind.UNBOUNDED),
        category=places.nearest(case.history.memory, since, rate / HOUR * (until - since)),
        culprits=tuple(_culprit(leak) for leak in leaks),
        slope=memory,
        per=_sum_per(leaks),
        follows=first.follows,
        explained=explained,
        time_to_limit_s=_until_limit(case, since, known),
        evidence=(
            *(evidence.of_culprit(leak) for leak in leaks[:5]),
            *evidence.of_memory(case.memory, memory, case.now - since),
            *evidence.of_malloc(case.history.memory, since),
            *evidence.of_the_rest(case.found, case.history.unread),
        ),
        remedy=remedies.for_container(first.path, case.history.vllm_version, case.history.patch_state),
        window_s=until - since,
    )


def _sum_per(found: Sequence[Finding]) -> dict[str, float]:
    return {
        driver: sum(finding.per.get(driver, 0.0) for finding in found)
        for driver in DRIVERS
        if any(driver in finding.per for finding in found)
    }


def _memory_over(case: _Case, since: float) -> Interval:
    return trend.slope(trend.floors(case.memory, since, case.now)).times(HOUR) if case.memory.times else trend.NOTHING


def _explained(case: _Case, found: Sequence[Finding], since: float) -> float | None:
    points = trend.floors(case.memory, since, case.now) if case.memory.times else []
    if len(points) < 3:  # noqa: PLR2004  # no line
        return None
    grown = points[-1][1] - points[0][1]
    rate = trend.slope(points)
    if grown <= max(4 * trend.noise(points, rate.best), MEBIBYTE / 4) or rate.low <= 0:
        return None
    owned = sum(finding.rate / HOUR * (points[-1][0] - points[0][0]) for finding in found)
    return min(1.0, max(0.0, owned / grown))


def _until_limit(case: _Case, since: float, known: Interval) -> Interval | None:
    work = next(iter(case.work.totals.values()), None)
    return forecast.until_limit(case.history.limit, case.now, since, known, work)


# ---- bounded: a capacity fills, requests wait ----


def _weighed(case: _Case) -> list[Finding]:
    """The findings, that which fills and which memory rises with weighed by the memory.

    What entries refer to is counted only where nobody else holds it, so that estimates may be several times too small.
    """
    weights = {}
    for finding in case.found:
        filling = finding.nature is Nature.BOUNDED or (finding.nature is Nature.SMALL and finding.has_end)
        if filling and (weighed := _by_memory(case, finding)):
            weights[finding.path] = weighed
    if not weights:
        return list(case.found)
    path = min(weights, key=lambda path: weights[path][0])
    return [
        replace(finding.weighed(weights[path][1]), nature=Nature.BOUNDED) if finding.path == path else finding
        for finding in case.found
    ]


def _by_memory(case: _Case, finding: Finding) -> tuple[float, float] | None:
    """How badly memory keeps to a container's entries, and bytes an entry by it; None: too badly, or not plausible."""
    length = trend.clean(finding.history.length)
    points = trend.floors(case.memory, finding.since, finding.until, 8) if case.memory.times else []
    if len(points) < FEWEST or (off := trend.misfit(points, length)) > MOST_OFF:
        return None
    unit = trend.slope(trend.mapped(points, length)).best
    small = unit <= max(MOST_TIMES * finding.unit, MOST_BYTES)
    fits = finding.room * unit <= min(case.room, case.memory.values[-1])
    plausible = 0 < finding.unit < unit and (small or fits)
    return (off, unit) if plausible and unit / finding.unit * finding.rate >= case.least else None


def _bounded(case: _Case) -> Verdict | None:
    filling = _of(case.found, Nature.BOUNDED, Nature.LIVE)
    if not filling:
        return None
    since = min(finding.since for finding in filling)
    explained = _explained(case, filling, since)
    if explained is not None and (explained < LITTLE or (explained < HALF and _lasting(case))):
        return None
    full = sum(finding.room * finding.unit for finding in filling if finding.nature is Nature.BOUNDED)
    fits = full < case.room
    rate = sum(finding.rate for finding in filling)
    known = Interval(rate * 0.7, rate, rate * 1.4)
    sizes = tuple(evidence.of_filling(finding) for finding in filling[:5])
    return replace(
        _verdict(case, Kind.BOUNDED),
        category=places.category(case.history.memory, since, sum(finding.grown for finding in filling)),
        culprits=tuple(_culprit(finding) for finding in filling),
        slope=_memory_over(case, since),
        per=_sum_per(filling),
        follows=filling[0].follows,
        explained=explained,
        time_to_limit_s=None if fits else _until_limit(case, since, known),
        evidence=(
            *sizes,
            *evidence.of_memory(case.memory, _memory_over(case, since), case.now - since),
            *evidence.of_the_rest(case.found, case.history.unread),
        ),
        remedy=remedies.for_bounded(filling[0].path),
        window_s=case.now - since,
    )


# ---- what memory alone says ----


def _lasting(case: _Case, name: str = "") -> Rise | None:
    """A growth of the memory, or of the shared memory alone, that goes on for hours and that no container explains."""
    needs = growth.Needs(case.history.started, case.least, case.room)
    series = trend.clean(case.history.memory.get("status.shmem")) if name else case.memory
    rise = growth.lasting(series, case.work, case.now, needs)
    if rise is None or name:
        return rise
    # None of the containers leaks, or there were another verdict; their sizes are estimates, rather too small.
    rest = _less_owned(case)
    grown = trend.rise_since(rest, rise.since) if rest is not case.memory else rise.grown
    if grown < 0.5 * rise.grown:
        return None
    return growth.lasting(rest, case.work, case.now, needs) if rest is not series else rise


def _unexplained(case: _Case) -> Verdict | None:
    for name in ("", "shmem"):
        rise = _lasting(case, name)
        if rise is None:
            continue
        category = places.category(case.history.memory, rise.since, rise.grown)
        if name:
            category = "shared_memory" if "smaps.shared_memory" in case.history.memory else name
        units = {driver: case.work.done(driver, rise.since, rise.until) for driver in DRIVERS}
        in_malloc = places.in_malloc(case.history.memory, rise.since, rise.grown)
        return replace(
            _verdict(case, Kind.UNEXPLAINED),
            category=category,
            slope=rise.slope,
            per={driver: rise.grown / done for driver, done in units.items() if done >= 1},
            follows=rise.driver,
            explained=0.0,
            time_to_limit_s=_until_limit(case, rise.since, rise.slope),
            evidence=(
                evidence.of_rise(name, rise),
                *evidence.of_malloc(case.history.memory, rise.since),
                *evidence.of_the_rest(case.found, case.history.unread),
            ),
            remedy=remedies.for_unexplained(category, in_malloc=in_malloc),
            window_s=rise.seconds,
        )
    return None


def _less_owned(case: _Case) -> Series:
    """The memory without what lies in containers; those that fill are weighed by it, as estimates may be too small."""
    owned = []
    for container in case.history.containers:
        values = container.size.values
        if values and max(values) - min(values) > MEBIBYTE:
            size = trend.clean(container.size)
            owned.append((size, _weight(case, size) if container.capacity is not None and size.values else 1.0))
    if not owned:
        return case.memory
    values, floors = list(case.memory.values), list(case.memory.floors)
    for i, time in enumerate(case.memory.times):
        held = sum(weight * trend.at(size, time) for size, weight in owned)
        values[i] -= held
        floors[i] -= held
    return Series(case.memory.times, values, floors)


def _weight(case: _Case, size: Series) -> float:
    """How many bytes the memory rose by for each byte that a container is thought to have, while it filled."""
    full = size.times[size.values.index(max(size.values))]
    points = trend.floors(case.memory, size.times[0], full, 16) if case.memory.times else []
    if len(points) < FEWEST or trend.misfit(points, size) > MOST_OFF:
        return 1.0
    return min(MOST_TIMES, max(1.0, trend.slope(trend.mapped(points, size)).best))


def _retained(case: _Case) -> Verdict | None:
    """Memory that rose, of which malloc keeps the larger part although the program gave it back."""
    kept, used = (trend.clean(case.history.memory.get(name)) for name in ("malloc.retained", "malloc.in_use"))
    if not kept.times or not used.times or not case.memory.times:
        return None
    lately = case.now - 5 * MINUTE
    size, keeps, uses = (_least(series, lately) for series in (case.memory, kept, used))
    least = max(32 * MEBIBYTE, 0.03 * size)
    for since, before in trend.floors(case.memory, max(kept.times[0], case.memory.times[0]), lately, 16):
        rose, keeps_more, uses_more = size - before, keeps - trend.at(kept, since), uses - trend.at(used, since)
        if rose >= least and keeps_more >= 0.6 * rose and uses_more <= 0.3 * rose:
            said = evidence.of_retained(keeps, (rose, keeps_more), (uses, max(used.values)), case.now - since)
            return replace(
                _verdict(case, Kind.RETAINED),
                category=places.category(case.history.memory, since, rose),
                slope=case.recent.slope if case.recent else _memory_over(case, max(since, case.now - HOUR)),
                time_to_limit_s=_until_limit(case, case.recent.since, case.recent.slope) if case.recent else None,
                evidence=(said, *evidence.of_the_rest(case.found, case.history.unread)),
                remedy=remedies.for_allocator(keeps),
                window_s=case.now - since,
            )
    return None


def _least(series: Series, since: float) -> float:
    points = trend.floors(series, since, series.times[-1], 1) if series.times[-1] >= since else []
    return points[0][1] if points else series.values[-1]


def _warming(case: _Case) -> Verdict | None:
    suspects = _of(case.found, Nature.SUSPECT, Nature.SLOWING)
    rise = case.recent
    if rise is None and not suspects:
        return None
    since = rise.since if rise else min(suspect.since for suspect in suspects)
    slope = rise.slope if rise else _memory_over(case, since)
    rate = sum(suspect.rate for suspect in suspects)
    known = slope if rise else Interval(rate * 0.7, rate, rate * 1.4)
    grown = rise.grown if rise else sum(suspect.grown for suspect in suspects)
    return replace(
        _verdict(case, Kind.WARMING),
        category=places.category(case.history.memory, since, grown),
        culprits=tuple(_culprit(suspect) for suspect in suspects),
        slope=slope,
        per=_sum_per(suspects) if suspects else None,
        follows=suspects[0].follows if suspects else None,
        explained=_explained(case, suspects, since) if suspects else None,
        time_to_limit_s=_until_limit(case, since, known),
        evidence=(
            *(evidence.of_culprit(suspect) for suspect in suspects[:5]),
            *evidence.of_memory(case.memory, slope, case.now - since),
            evidence.TOO_EARLY,
            *(evidence.of_filling(finding) for finding in _of(case.found, Nature.BOUNDED, Nature.LIVE)[:3]),
            *evidence.of_the_rest(case.found, case.history.unread),
        ),
        window_s=case.now - since,
    )


def _steady(case: _Case) -> Verdict:
    points = trend.floors(case.memory, case.now - HOUR, case.now) if case.memory.times else []
    slope = trend.slope(points).times(HOUR) if points else None
    there = min(HOUR, case.now - case.memory.times[0]) if case.memory.times else 0.0
    said = evidence.of_steady(case.memory, there)
    return replace(
        _verdict(case, Kind.STEADY),
        slope=slope,
        evidence=(said, *evidence.of_the_rest(case.found, case.history.unread)),
        window_s=max(0.0, there),
    )
