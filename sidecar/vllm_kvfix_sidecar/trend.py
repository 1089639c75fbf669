# SPDX-License-Identifier: Apache-2.0
"""Robust statistics of a growing figure, in plain Python: floors, slopes with an interval, what growth follows."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar.observed import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A fall of a running total is the counter's restart; what it counts from then on is added to what it had.
PARTS = 24
NORMAL_80 = 1.2816
MAD_TO_SIGMA = 1.4826

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Interval:
    """An 80 % interval and the best estimate in it; ``high`` may be infinite."""

    low: float
    best: float
    high: float

    def times(self, factor: float) -> Interval:
        """The interval of ``factor`` (not negative) times the figure."""
        return Interval(self.low * factor, self.best * factor, self.high * factor)


NOTHING = Interval(0.0, 0.0, 0.0)


def clean(series: Series | None) -> Series:
    """The series with rising times and finite values alone; the same object where it is so already."""
    if series is None:
        return Series()
    times, values = series.times, series.values
    floors = series.floors if len(series.floors) == len(values) else values
    if len(times) == len(values) and _all_finite(values) and _rises(times, operator.lt) and _all_finite(floors):
        return series if floors is series.floors else Series(times, values, floors)
    kept: list[tuple[float, float, float]] = []
    for time, value, floor in zip(times, values, floors, strict=False):
        if math.isfinite(time) and math.isfinite(value) and math.isfinite(floor) and (not kept or time > kept[-1][0]):
            kept.append((time, value, floor))
    return Series(*(tuple(column) for column in zip(*kept, strict=True))) if kept else Series()


def _rises(values: Sequence[float], compare: Callable[[float, float], bool]) -> bool:
    return math.isfinite(sum(values[-1:])) and all(map(compare, values, islice(values, 1, None)))


def _all_finite(values: Sequence[float]) -> bool:
    return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # the sum may be too large


def at(series: Series, time: float) -> float:
    """The value at ``time``, between two samples on the line between them, outside them the nearest; 0 if empty."""
    times, values = series.times, series.values
    if not times:
        return 0.0
    i = bisect_left(times, time)
    if i == 0:
        return values[0]
    if i == len(times):
        return values[-1]
    share = (time - times[i - 1]) / (times[i] - times[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def running_total(series: Series | None) -> Series:
    """A counter that a restart never sets back: falls are taken out."""
    cleaned = clean(series)
    values = cleaned.values
    if _rises(values, operator.le):
        return cleaned
    total, risen = 0.0, []
    for before, value in zip([values[0], *values], values, strict=False):
        total += value - before if value >= before else value
        risen.append(total)
    return Series(cleaned.times, risen, risen)


def added(first: Series, second: Series) -> Series:
    """The sum of two figures at the times of the first; the first itself where the second is 0 or was not read."""
    if not any(second.values):
        return first
    extra = [at(second, time) for time in first.times]
    values = [value + more for value, more in zip(first.values, extra, strict=True)]
    floors = [value + more for value, more in zip(first.floors, extra, strict=True)]
    return Series(first.times, values, floors)


def floors(series: Series, since: float, until: float, parts: int = PARTS) -> Points:
    """The least value in each of ``parts`` equal spans of time, and where; spans without samples are left out."""
    times, values, lows = series.times, series.values, series.floors
    points: Points = []
    length = (until - since) / parts
    stop = bisect_left(times, since)
    for part in range(1, parts + 1):
        start = stop
        stop = bisect_right(times, since + part * length if part < parts else until, start)
        if stop > start:
            here = lows[start:stop]
            least = min(here)
            i = start + here.index(least)
            # A floor below its own sample lay somewhere since the sample before; of what grows, right behind that.
            time = times[i - 1] if i and least < values[i] else times[i]
            if not points or time > points[-1][0]:
                points.append((time, least))
    return points


def rises(series: Series, since: float, until: float, parts: int = PARTS) -> bool:
    """Whether the least value in the last of the parts is above that in the first: a quick look before a long one."""
    times, part = series.times, (until - since) / parts
    first = series.floors[bisect_left(times, since) : bisect_right(times, since + part)]
    last = series.floors[bisect_right(times, until - part) : bisect_right(times, until)]
    return not first or not last or min(last) > min(first)


def slope(points: Points) -> Interval:
    """Theil and Sen's slope, with Sen's 80 % interval; NOTHING for fewer than three points.

    The interval takes the points for independent; memory's are not, so that it is rather too narrow.
    """
    count = len(points)
    if count < 3:  # noqa: PLR2004  # a line needs two, a spread three
        return NOTHING
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 > x1]
    if not slopes:
        return NOTHING
    slopes.sort()
    pairs = len(slopes)
    half = NORMAL_80 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18) / 2
    low = max(0, math.floor(pairs / 2 - half))
    high = min(pairs - 1, math.ceil(pairs / 2 + half))
    return Interval(slopes[low], median(slopes), slopes[high])


def rise_since(series: Series, since: float) -> float:
    """By how much it rose, by its slope, as single samples may lie on a peak."""
    points = floors(series, since, series.times[-1], 12) if series.times[-1] > since else []
    if len(points) < 3:  # noqa: PLR2004  # too few for a slope
        return series.values[-1] - at(series, since)
    return slope(points).best * (series.times[-1] - since)


def noise(points: Points, rise: float) -> float:
    """The spread (as a normal's sigma) of points about the line of ``rise`` per unit through them."""
    if not points:
        return 0.0
    x0 = points[0][0]
    rests = [y - rise * (x - x0) for x, y in points]
    middle = median(rests)
    return MAD_TO_SIGMA * median([abs(rest - middle) for rest in rests])


def thirds(points: Points) -> tuple[float, float, float]:
    """The slope in the first, middle and last third of the way along x; each from ends that are medians of points."""
    begin, end = points[0][0], points[-1][0]
    rates = []
    for third in range(3):
        low, high = begin + third * (end - begin) / 3, begin + (third + 1) * (end - begin) / 3
        part = [p for p in points if low <= p[0] <= high]
        rates.append(_rate(part))
    return rates[0], rates[1], rates[2]


def _rate(points: Points) -> float:
    if len(points) < 2 or points[-1][0] <= points[0][0]:  # noqa: PLR2004  # a line needs two
        return 0.0
    if len(points) < 4:  # noqa: PLR2004  # as above
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    return slope(points).best


def mapped(points: Points, driver: Series) -> Points:
    """The points with what a driver had counted in place of the time; where it stood still, the last point is kept."""
    along: Points = []
    for time, value in points:
        x = at(driver, time)
        if along and x <= along[-1][0]:
            along[-1] = (along[-1][0], value)
        else:
            along.append((x, value))
    return along


def misfit(points: Points, driver: Series | None) -> float:
    """How badly the growth keeps to a driver: 0: each increment in proportion to it, 1 and more: not at all.

    ``driver`` None: to the time. Half the sum of what the increments are off, over the growth.
    """
    grown = points[-1][1] - points[0][1]
    xs = [time if driver is None else at(driver, time) for time, _ in points]
    units = xs[-1] - xs[0]
    if grown <= 0 or units <= 0:
        return math.inf
    rate = grown / units
    off = sum(
        abs(y2 - y1 - rate * (x2 - x1)) for (x1, y1), (x2, y2) in pairwise(zip(xs, (y for _, y in points), strict=True))
    )
    return off / 2 / grown


def largest_steps(points: Points, count: int) -> float:
    """The share of the growth that the ``count`` largest increments make up, 0 where nothing grew."""
    grown = points[-1][1] - points[0][1]
    if grown <= 0:
        return 0.0
    increments = sorted((b[1] - a[1] for a, b in pairwise(points)), reverse=True)
    return sum(increment for increment in increments[:count] if increment > 0) / grown


def fallen(points: Sequence[tuple[float, float]]) -> float:
    """What the figure fell by in all, between one point and the next."""
    return sum(max(0.0, a[1] - b[1]) for a, b in pairwise(points))


def beside_level(points: Points, work: Series, level_seconds: float = 600.0) -> tuple[float, float]:
    """What of a figure's rise the work done makes up when the pace of the work is allowed for: the rise, and its error.

    Least squares of ``y = a + b work + c pace``: memory that is larger while there is more to do falls with the load.
    """
    done = [at(work, time) for time, _ in points]
    pace = [total - at(work, time - level_seconds) for total, (time, _) in zip(done, points, strict=True)]
    ys = [y for _, y in points]
    x, z = _centred(done), _centred(pace)
    y = _centred(ys)
    xx, zz, xz = _dot(x, x), _dot(z, z), _dot(x, z)
    spread = xx * zz - xz * xz
    if spread <= 1e-6 * xx * zz:  # the pace never changes, or changes with the work: nothing to tell apart
        return (0.0, math.inf) if zz > 0 else (ys[-1] - ys[0], 0.0)
    b = (zz * _dot(x, y) - xz * _dot(z, y)) / spread
    c = (xx * _dot(z, y) - xz * _dot(x, y)) / spread
    rest = sum((v - b * u - c * w) ** 2 for u, w, v in zip(x, z, y, strict=True)) / max(1, len(y) - 3)
    way = done[-1] - done[0]
    return b * way, math.sqrt(rest * zz / spread) * way


def _centred(values: list[float]) -> list[float]:
    middle = sum(values) / len(values)
    return [value - middle for value in values]


def _dot(a: list[float], b: list[float]) -> float:
    return float(sum(x * y for x, y in zip(a, b, strict=True)))
