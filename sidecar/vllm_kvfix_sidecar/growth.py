# SPDX-License-Identifier: Apache-2.0
"""What the size of a process alone says: whether it grows, and whether for so long that it cannot be a warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import trend
from vllm_kvfix_sidecar.owners import DAY, HOUR, MEBIBYTE, MINUTE, Work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_kvfix_sidecar.observed import Series
    from vllm_kvfix_sidecar.trend import Interval

# What warms up in vLLM does so for three hours at most; growth counts from the second hour of a life on.
YOUTH = HOUR
AGO = HOUR / 2
LONG = (6 * HOUR, 9 * HOUR, 12 * HOUR, 18 * HOUR, DAY)
RECENT = (5 * MINUTE, 15 * MINUTE, HOUR, 3 * HOUR)
# With a limit that is days away one can wait longer, and be surer.
URGENT = 3 * DAY
PATIENT_WINDOW = 12 * HOUR
# A leak is as fast for the same work at the end as at the begin, within what noise makes of it; a warm-up is not.
SLOWEST_PACE, FASTEST_PACE = 0.6, 1.7
# The three largest of its steps make up no more than this share of it.
FEW_STEPS = 0.6
# The work done makes up at least this share of it, beside what the level of the load does.
BY_WORK = 0.6
# How far, of its size, its increments may be off from what the work done, or the time, makes of them.
MOST_UNEVEN = 0.25


@dataclass(frozen=True)
class Needs:
    """From when a growth matters: bytes an hour, and bytes of room to the limit; when the process began."""

    started: float
    least: float
    room: float


@dataclass(frozen=True)
class Rise:
    """A rise of memory in a window: bytes an hour, bytes in all, and the spread about the line."""

    since: float
    until: float
    slope: Interval
    grown: float
    noise: float
    driver: str
    pace: float
    misfit: float

    @property
    def seconds(self) -> float:
        """The window."""
        return self.until - self.since


def memory_of(memory: Mapping[str, Series]) -> Series:
    """RssAnon and VmSwap, or RSS where they could not be read."""
    anon = memory.get("status.anon")
    if anon is None or not anon.times:
        return trend.clean(memory.get("status.rss"))
    return trend.added(trend.clean(anon), trend.clean(memory.get("status.swap")))


def recent(memory: Series, now: float, floor: float) -> Rise | None:
    """The longest of the recent windows, all the history if that is shorter, in which memory went on growing."""
    for window in _windows(memory, now, RECENT):
        rise = _rise(memory, now - window, now, None)
        if rise is not None and rise.slope.best >= floor and rise.grown >= 3 * rise.noise:
            return rise
    return None


def lasting(memory: Series, work: Work, now: float, needs: Needs) -> Rise | None:
    """A growth that nothing but a leak explains: for six hours or more, without slowing down, not in a few steps.

    It must have been one half an hour ago already. Where there is a limit, and it is days away at this pace, it takes
    twelve hours to be sure.
    """
    if not memory.times:
        return None
    first = max(memory.times[0], needs.started + YOUTH)
    end = min(now, memory.times[-1])
    for window in LONG:
        if end - AGO - window < first:
            return None
        rise = _sure(memory, work, end, window, needs)
        if rise and _sure(memory, work, end - AGO, window, needs):
            return rise
    return None


def _sure(memory: Series, work: Work, end: float, window: float, needs: Needs) -> Rise | None:
    rise = _rise(memory, end - window, end, work)
    if rise is None or rise.slope.best < needs.least or rise.grown < 4 * rise.noise:
        return None
    if rise.misfit > MOST_UNEVEN:
        return None
    if window < PATIENT_WINDOW and URGENT < needs.room / rise.slope.best * HOUR < math.inf:
        return None
    even = SLOWEST_PACE <= rise.pace <= FASTEST_PACE
    return rise if even and not _fell_before(memory, rise) and not _is_level(memory, work, rise) else None


def _windows(memory: Series, now: float, windows: Sequence[float]) -> list[float]:
    if not memory.times:
        return []
    there = now - memory.times[0]
    chosen = [window for window in windows if window <= there]
    if there < windows[-1] and there >= 2 * MINUTE:
        chosen.append(there)
    return chosen[::-1]


def _rise(memory: Series, since: float, until: float, work: Work | None) -> Rise | None:
    """The growth in one window; None where it stops in a third, is a matter of a few steps, or may be chance."""
    if not trend.rises(memory, since, until):
        return None
    points = trend.floors(memory, since, until)
    if len(points) < 9:  # noqa: PLR2004  # three a third
        return None
    grown = points[-1][1] - points[0][1]
    if grown <= 0:
        return None
    driver, along, misfit = _axis(points, work)
    rates = trend.thirds(along)
    mean = (along[-1][1] - along[0][1]) / (along[-1][0] - along[0][0])
    if min(rates) < 0.25 * mean or trend.largest_steps(points, 3) > FEW_STEPS:
        return None
    slope = trend.slope(points)
    if slope.low <= 0:
        return None
    noise = trend.noise(along, mean)
    pace = rates[2] / rates[0]
    return Rise(points[0][0], points[-1][0], slope.times(HOUR), grown, noise, driver, pace, misfit)


def _axis(points: trend.Points, work: Work | None) -> tuple[str, trend.Points, float]:
    """Along what the growth is judged: the load that it keeps to best, as a night makes a leak slow; else time."""
    coarse = points[::2]
    by_time = trend.misfit(coarse, None)
    fits = {driver: trend.misfit(coarse, series) for driver, series in work.totals.items()} if work else {}
    best = min(fits, key=lambda driver: fits[driver], default=None)
    if best is None or work is None or fits[best] > by_time:
        return "time", points, by_time
    along = trend.mapped(points, work.totals[best])
    return (best, along, fits[best]) if len(along) >= 9 else ("time", points, by_time)  # noqa: PLR2004  # three a third


def _is_level(memory: Series, work: Work, rise: Rise) -> bool:
    """Whether it is not shown to be more than what more load at a time takes, and gives back with the load."""
    total = next(iter(work.totals.values()), None)
    if total is None:
        return False
    points = trend.floors(memory, rise.since, rise.until)
    by_work, error = trend.beside_level(points, total)
    return by_work - 2 * error < BY_WORK * (points[-1][1] - points[0][1])


def _fell_before(memory: Series, rise: Rise) -> bool:
    """Whether it had been as large before, and fell: a sawtooth, which will fall again."""
    points = trend.floors(memory, memory.times[0], rise.since, 48)
    if not points:
        return False
    start = trend.at(memory, rise.since)
    peak = max(value for _, value in points)
    return peak - start > 0.5 * rise.grown and start + rise.grown < 1.5 * peak


def least(limit_room: float) -> float:
    """Bytes an hour from which a growth matters: 1 MiB, or what reaches the limit within 30 days if that is less."""
    return min(MEBIBYTE, max(1.0, limit_room / (30 * DAY) * HOUR)) if limit_room > 0 else MEBIBYTE
