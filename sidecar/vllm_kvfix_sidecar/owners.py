# SPDX-License-Identifier: Apache-2.0
"""Which containers grow, and what kind of growth it is: a leak, a cache that fills, requests that wait."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import trend
from vllm_kvfix_sidecar.observed import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm_kvfix_sidecar.observed import ContainerHistory, ProcessHistory

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
MEBIBYTE = float(1 << 20)
# The windows that a container's growth is looked for in; all of its history comes on top.
WINDOWS = (150.0, 300.0, 600.0, 1200.0, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY)
PARTS = 12
SHORTEST = 110.0
FEWEST_POINTS = 6
FEWEST_UNITS = 30
STALE = 15 * MINUTE
# Growth of fewer bytes an hour is no reason to wake anybody, unless it reaches the limit within the 30 days.
MATERIAL = MEBIBYTE
MATERIAL_ORPHANS = MEBIBYTE / 16
# What a leak must have lost before it is called one: where an entry has an owner that is gone, where it is known, else.
LEAST_KNOWN, LEAST_GROWN = MEBIBYTE / 16, MEBIBYTE / 4
FEWEST_ORPHANS, LEAST_AGE = 8, MINUTE
# Buffers that are sent and cleared grow evenly, too, but with requests, steps or time, and rarely for so long. Where
# memory is soon used up one cannot wait: what lasted so long will last as long again, and perhaps eight times.
CLEARED_BY = 100 * MINUTE
AT_LEAST = 3 * MINUTE - 10
LARGE = 256 * MEBIBYTE  # no buffer becomes
AGAIN = 8
UNCLEARED = ("abort", "block")  # nobody collects these to send them
EARLIER = (1, 0.875, 0.75, 0.625, 0.5)  # shares of its time after which a growth may have been a leak's already
BY_THE_CLOCK = 0.08  # less uneven in time: timers and polls make it, whatever the load does
SLOWING, EVEN = 0.75, 0.85  # pace in the last third over that in the first, below and above which it is so
# In the order of preference where two fit the growth equally well.
DRIVERS = {
    "request": "requests",
    "abort": "aborts",
    "generated_token": "generated_tokens",
    "block": "blocks",
    "step": "steps",
}
TIME = "time"


class Nature(Enum):
    """What a growing container is."""

    LEAK = "leak"
    SUSPECT = "grows, too early to say"
    SLOWING = "grows ever more slowly"
    BOUNDED = "fills a capacity"
    LIVE = "holds the requests that wait or run"
    SMALL = "grows, too slowly to matter"


@dataclass(frozen=True)
class Finding:
    """A container that grows.

    ``rate`` in bytes an hour and ``grown`` bytes in the window that began at ``since``; ``unit`` bytes an entry;
    ``per`` bytes for each unit of a driver; ``room``: entries until its capacity is full.
    """

    history: ContainerHistory
    nature: Nature
    since: float
    until: float
    rate: float
    grown: float
    unit: float
    per: Mapping[str, float]
    follows: str | None
    why: str
    room: float = math.inf

    @property
    def path(self) -> str:
        """Where it is."""
        return self.history.path

    @property
    def has_end(self) -> bool:
        """Whether it fills a capacity."""
        return self.room < math.inf

    def weighed(self, unit: float) -> Finding:
        """The same with another weight of an entry, in bytes."""
        times = unit / self.unit
        per = {driver: times * size for driver, size in self.per.items()}
        return replace(self, unit=unit, rate=times * self.rate, grown=times * self.grown, per=per)


@dataclass(frozen=True)
class Work:
    """What the engines did: running totals by driver, and the requests that were alive, all cleaned."""

    totals: Mapping[str, Series]
    live: tuple[Series, ...]

    @classmethod
    def of(cls, history: ProcessHistory) -> Work:
        """The load of a process, with what has no samples left out."""
        totals = {driver: trend.running_total(history.load.get(name)) for driver, name in DRIVERS.items()}
        totals = {driver: series for driver, series in totals.items() if len(series.times) > 1}
        running, waiting = (trend.clean(history.load.get(name)) for name in ("running", "waiting"))
        both = trend.added(running, waiting)
        return cls(totals, tuple(series for series in (both, running, waiting) if series.times))

    def done(self, driver: str, since: float, until: float) -> float:
        """Units of a driver between two times."""
        series = self.totals.get(driver)
        return trend.at(series, until) - trend.at(series, since) if series else 0.0

    def completed(self, since: float, until: float) -> float:
        """Requests that ended and were not aborted."""
        return self.done("request", since, until) - self.done("abort", since, until)

    def arrived(self, since: float, until: float) -> float:
        """Requests that came: those that ended, and those that are still there and were not before."""
        live = self.live[0] if self.live else Series()
        return self.done("request", since, until) + trend.at(live, until) - trend.at(live, since)


@dataclass(frozen=True)
class Terms:
    """What matters: growth of ``material`` bytes an hour; ``room``: bytes to the limit.

    ``is_known``: whether a path is a known leak of this release; ``is_expected``: whether it is a cache that is known
    to have an end, although the census finds no capacity.
    """

    material: float
    room: float = math.inf
    is_known: Callable[[str], bool] = lambda _: False
    is_expected: Callable[[str], bool] = lambda _: False


def find(containers: Iterable[ContainerHistory], work: Work, now: float, terms: Terms) -> list[Finding]:
    """The containers that grow, largest growth first; a container and its members' are told once."""
    found = [finding for container in containers if (finding := examine(container, work, now, terms))]
    return sorted(_once(found), key=lambda finding: (-finding.rate, finding.path))


def _once(found: list[Finding]) -> Iterable[Finding]:
    """Of a container and what lies in it (``x`` and ``x[*]...``), only the outermost that grows by itself.

    The members' lengths rise with their number: what grows then is the container.
    """
    by_path = {finding.path: finding for finding in found}
    inner: dict[str, float] = {}
    for finding in found:
        owner = next((path for path in by_path if finding.path.startswith(path + "[")), None)
        if owner is None or finding.nature is not by_path[owner].nature:
            continue
        inner[finding.path] = finding.rate
        if finding.rate > by_path[owner].rate:  # the members are what costs
            by_path[owner] = replace(
                by_path[owner], rate=finding.rate, grown=finding.grown, unit=finding.unit, per=finding.per
            )
    return [finding for path, finding in by_path.items() if path not in inner]


def examine(container: ContainerHistory, work: Work, now: float, terms: Terms) -> Finding | None:
    """What one container does; None: it does not grow, or was emptied as it grew before."""
    if not _may_grow(container, now):
        return None
    length, size, orphans = (trend.clean(part) for part in (container.length, container.size, container.orphans))
    if len(length.times) < FEWEST_POINTS or not size.times:
        return None
    if len(orphans.times) >= FEWEST_POINTS and orphans.values[-1] > 0:
        growth = _longest_growth(orphans, work, now)
        if growth and (found := _of_orphans(_finding(container, growth, work, length, size), growth, terms)):
            return found
    growth = _longest_growth(length, work, now)
    return _classify(_finding(container, growth, work, length, size), growth, work, terms) if growth else None


def _may_grow(container: ContainerHistory, now: float) -> bool:
    """A quick look at the ends of the windows, since most containers stand still."""
    size, length = container.size, container.length
    if len(size.times) < FEWEST_POINTS or len(length.times) < FEWEST_POINTS or now - size.times[-1] > STALE:
        return False
    end = size.times[-1]
    for window in (*WINDOWS, end - size.times[0]):
        i = min(bisect_left(size.times, end - window), len(size.values) - 1)
        j = min(bisect_left(length.times, end - window), len(length.values) - 1)
        if size.values[-1] > size.values[i] or length.values[-1] > length.values[j]:
            return True
        if window > end - size.times[0]:
            break
    return bool(container.orphans.values and container.orphans.values[-1] > 0)


@dataclass(frozen=True)
class _Growth:
    counted: Series
    points: trend.Points
    along: trend.Points
    driver: str
    rates: tuple[float, float, float]

    @property
    def since(self) -> float:
        return self.points[0][0]

    @property
    def until(self) -> float:
        return self.points[-1][0]

    @property
    def seconds(self) -> float:
        return self.until - self.since

    @property
    def entries(self) -> float:
        return self.points[-1][1] - self.points[0][1]

    @property
    def pace(self) -> float:
        """How fast it grew in the last third, over the first."""
        return self.rates[2] / self.rates[0]

    @property
    def doubt(self) -> float:
        """The spread of ``pace`` that counting alone makes, and that the clocks of entries and load differ a little."""
        a_third = max(1.0, self.entries / 3)
        return math.sqrt(2 / a_third) + 3 / self.seconds * 3


def _longest_growth(counted: Series, work: Work, now: float) -> _Growth | None:
    end = min(now, counted.times[-1])
    first = counted.times[0]
    windows = [window for window in WINDOWS if window < end - first]
    if end - first >= SHORTEST:
        windows.append(end - first)
    for window in reversed(windows):
        growth = _growth(counted, work, end - window, end)
        if growth is not None:
            return None if _was_emptied(counted, growth) else growth
    return None


def _growth(counted: Series, work: Work, since: float, until: float) -> _Growth | None:
    if not trend.rises(counted, since, until, PARTS):
        return None
    points = trend.floors(counted, since, until, PARTS)
    if len(points) < FEWEST_POINTS:
        return None
    grown = points[-1][1] - points[0][1]
    if grown <= 0 or trend.fallen(points) > 0.15 * grown:
        return None
    driver = _best_driver(counted, points, work)
    along = points if driver == TIME else trend.mapped(points, work.totals[driver])
    if len(along) < 4:  # noqa: PLR2004  # too little work in the window to have thirds
        driver, along = TIME, points
    rates = trend.thirds(along)
    if min(rates) <= 0.05 * sum(rates) / 3:
        return None
    return _Growth(counted, points, along, driver, rates)


def _best_driver(counted: Series, points: trend.Points, work: Work) -> str:
    fits = {driver: trend.misfit(points, series) for driver, series in work.totals.items()}
    fits[TIME] = trend.misfit(points, None) * 1.25 + 0.02  # growth with the load is the rule
    best = min(fits.values())
    if best == math.inf:
        return TIME
    close = [driver for driver, off in fits.items() if off <= best * 1.2 + 0.01]
    since, until, grown = _ends(counted, points)
    for driver in close:  # one entry each is more than chance
        if driver != TIME and abs(grown / max(1e-9, work.done(driver, since, until)) - 1) < _slack(until - since):
            return driver
    return close[0]


def _ends(counted: Series, points: trend.Points) -> tuple[float, float, float]:
    """The times of the first and the last sample in the window, and the entries between: floors lie some time off."""
    i = min(bisect_left(counted.times, points[0][0]), len(counted.times) - 1)
    j = max(i, min(bisect_left(counted.times, points[-1][0]), len(counted.times) - 1))
    return counted.times[i], counted.times[j], counted.values[j] - counted.values[i]


def _slack(seconds: float) -> float:
    """How far a count of entries and one of work may differ, relatively, although they count the same."""
    return 0.003 + 1.5 / max(1.0, seconds)


def _was_emptied(counted: Series, growth: _Growth) -> bool:
    """It had been as large before the growth began, and fell: it will again."""
    stop = bisect_left(counted.times, growth.since)
    if stop == 0:
        return False
    peak = max(counted.values[:stop])
    return peak - growth.points[0][1] > 0.5 * growth.entries and growth.points[-1][1] < 1.5 * peak


def _finding(container: ContainerHistory, growth: _Growth, work: Work, length: Series, size: Series) -> Finding:
    unit = _unit(length, size, growth)
    grown = growth.entries * unit
    rate = grown / growth.seconds * HOUR
    per = {driver: grown / units for driver in DRIVERS if (units := work.done(driver, growth.since, growth.until)) >= 1}
    return Finding(container, Nature.SUSPECT, growth.since, growth.until, rate, grown, unit, per, growth.driver, "")


def _classify(finding: Finding, growth: _Growth, work: Work, terms: Terms) -> Finding:
    container = finding.history
    latest = container.length.values[-1]
    small = finding.rate < min(terms.material, MATERIAL)
    if container.capacity is not None and latest <= container.capacity * 1.02 + 1:
        why = f"it holds {latest:,.0f} of at most {container.capacity:,} entries"
        nature = Nature.SMALL if small else Nature.BOUNDED
        return replace(finding, nature=nature, room=max(0.0, container.capacity - latest), why=why)
    if small:
        why = f"it grows by {_entries(growth)}, which is too little to matter"
        return replace(finding, nature=Nature.SMALL, why=why)
    if terms.is_known(finding.path) and finding.grown >= LEAST_KNOWN:
        return replace(finding, nature=Nature.LEAK, why=f"{_said(growth)}; this release is known for it")
    if terms.is_expected(finding.path):
        return replace(finding, nature=Nature.BOUNDED, why="it is a cache that has an end, but does not show where")
    if _is_live(container, growth, work):
        return replace(finding, nature=Nature.LIVE, why="its entries are the requests that wait or run")
    return _leak_or_not(finding, growth, work, terms)


def _of_orphans(finding: Finding, growth: _Growth, terms: Terms) -> Finding | None:
    age = finding.history.orphan_age_s
    if growth.entries < FEWEST_ORPHANS or age < LEAST_AGE:
        return None
    if finding.rate < min(terms.material, MATERIAL_ORPHANS):
        return replace(finding, nature=Nature.SMALL, why=f"it keeps {_entries(growth)}, which is too little to matter")
    why = (
        f"{growth.points[-1][1]:,.0f} of its {finding.history.length.values[-1]:,.0f} entries belong to requests that "
        f"are gone, the oldest for {age:,.0f} s, and became more in every part of {growth.seconds / MINUTE:.0f} min"
    )
    return replace(finding, nature=Nature.LEAK, why=why)


def _unit(length: Series, size: Series, growth: _Growth) -> float:
    """Bytes an entry, on average: sizes are estimates, and lists take room in leaps, so that differences mislead."""
    entries = trend.at(length, growth.until)
    return trend.at(size, growth.until) / entries if entries > 0 else 0.0


def _is_live(container: ContainerHistory, growth: _Growth, work: Work) -> bool:
    """Whether the entries, or the members, are as many as the requests that are alive, and have been all along."""
    if not work.live:
        return False
    counts = [trend.clean(container.length)]
    if container.members.times and container.members.values[-1] > 1:
        counts.append(trend.clean(container.members))
    orphans = container.orphans.values[-1] if container.orphans.values else 0.0
    if orphans > 0.1 * container.length.values[-1] + 3:
        return False
    for count in counts:
        for live in work.live:
            near = sum(
                abs(trend.at(count, time) - trend.at(live, time)) <= 0.2 * trend.at(live, time) + 5
                for time, _ in growth.points
            )
            if near >= 0.75 * len(growth.points) and trend.at(live, growth.until) > trend.at(live, growth.since):
                return True
    return False


def _said(growth: _Growth) -> str:
    minutes = growth.seconds / MINUTE
    return f"it grew by {_entries(growth)} in {minutes:.0f} min, in every part of them, and was never emptied"


def _leak_or_not(finding: Finding, growth: _Growth, work: Work, terms: Terms) -> Finding:
    pace, doubt = _least_pace(growth, work), trend.NORMAL_80 * growth.doubt
    if pace + doubt < SLOWING and not _exactly(growth, work):
        why = f"it grew by {_entries(growth)}, at last only {pace:.0%} as fast for the same work as at first"
        return replace(finding, nature=Nature.SLOWING, why=why)
    for share in EARLIER:
        # What was a leak goes on being one while it grows, although the load of the last hours may have been odd.
        until = growth.since + share * growth.seconds
        then = growth if share == 1 else _growth(growth.counted, work, growth.since, until)
        if then and (how := _how(finding, then, work, terms)):
            return replace(finding, nature=Nature.LEAK, why=f"{_said(growth)}{how}")
    return replace(finding, why=f"{_said(growth)}; it is too early to say whether it has an end")


def _how(finding: Finding, growth: _Growth, work: Work, terms: Terms) -> str | None:
    """In words, why a growth is a leak's, None: it need not be."""
    exactly = _exactly(growth, work)
    if growth.entries * finding.unit < LEAST_GROWN or growth.seconds < _wait(finding, exactly, terms):
        return None
    if exactly:
        return f": each {exactly.replace('_', ' ')} left one entry"
    even = _least_pace(growth, work) - trend.NORMAL_80 * growth.doubt > EVEN
    return ", without slowing down" if even and not _is_level(growth, work) else None


def _wait(finding: Finding, exactly: str | None, terms: Terms) -> float:
    """Seconds that it must have grown before it is no buffer and no cache."""
    if exactly in UNCLEARED:
        return AT_LEAST
    if exactly and finding.grown >= LARGE:
        return AT_LEAST
    lasts = terms.room / finding.rate * HOUR
    return max(AT_LEAST if exactly else HOUR / 2, min(CLEARED_BY, lasts / AGAIN))


def _is_level(growth: _Growth, work: Work) -> bool:
    """Whether more entries may be no more than what a higher load takes, and gives back with it."""
    total = next(iter(work.totals.values()), None)
    if total is None:
        return False
    by_work, error = trend.beside_level(growth.points, total)
    return by_work - 2 * error < 0.4 * growth.entries


def _least_pace(growth: _Growth, work: Work) -> float:
    """Its pace; where it keeps to no driver closely, that for the same requests if that is less."""
    if growth.driver != TIME and trend.misfit(growth.points, None) < BY_THE_CLOCK:
        rates = trend.thirds(growth.points)
        return max(growth.pace, rates[2] / rates[0]) if rates[0] > 0 else growth.pace
    requests = work.totals.get("request")
    if requests is None or growth.driver == "request" or trend.misfit(growth.points, None) < BY_THE_CLOCK:
        return growth.pace
    if trend.misfit(growth.points, work.totals.get(growth.driver)) < 0.05:  # noqa: PLR2004
        return growth.pace
    along = trend.mapped(growth.points, requests)
    if len(along) < FEWEST_POINTS:
        return growth.pace
    rates = trend.thirds(along)
    return min(growth.pace, rates[2] / rates[0]) if rates[0] > 0 else growth.pace


def _exactly(growth: _Growth, work: Work) -> str | None:
    """Of what each unit left one entry, neither more nor fewer: a cache has hits, a leak has none."""
    since, until, _ = _ends(growth.counted, growth.points)
    marks = [since + third * (until - since) / 3 for third in range(4)]
    for driver in DRIVERS:
        if _one_each(growth.counted, marks, partial(work.done, driver)):
            return driver
    return "request" if any(_one_each(growth.counted, marks, done) for done in (work.arrived, work.completed)) else None


def _one_each(counted: Series, marks: list[float], done: Callable[[float, float], float]) -> bool:
    """Whether there were as many entries as units in all of the time, and, more loosely, in each third of it."""
    if done(marks[0], marks[-1]) < FEWEST_UNITS:
        return False
    for since, until in ((marks[0], marks[-1]), *pairwise(marks)):
        entries, units = trend.at(counted, until) - trend.at(counted, since), done(since, until)
        if abs(entries - units) > _slack(until - since) * units + 2:
            return False
    return True


def _entries(growth: _Growth) -> str:
    return f"{growth.entries:,.0f} entries"
