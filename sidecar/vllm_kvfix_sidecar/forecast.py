# SPDX-License-Identifier: Apache-2.0
"""When a growth reaches the limit: an 80 % interval, from the pace so far and what is not known of that to come."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import trend
from vllm_kvfix_sidecar.owners import DAY, HOUR
from vllm_kvfix_sidecar.trend import Interval

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.observed import Limit, Series

# What the interval is wider by, up and down: always, for a day of which little was seen, for load that varies.
LEAST_SPREAD = 1.06
UNSEEN = 0.2
VARIES = 0.75
# How far ahead the pace of the last time says more than that of the whole window.
NEAR = 4 * HOUR


def room_of(limit: Limit | None) -> float:
    """Bytes that are left, 0 where it is used up, infinite where there is no limit."""
    if limit is None or not limit.usage.values:
        return math.inf
    usage = trend.clean(limit.usage)
    if not usage.values:
        return math.inf
    return max(0.0, limit.limit - median(list(usage.values[-3:])))


def until_limit(
    limit: Limit | None, now: float, since: float, known: Interval, work: Series | None = None
) -> Interval | None:
    """Seconds until the limit, 80 %; None where there is none, or nothing grows.

    ``known``: bytes an hour of what is sure to go on. What else the usage grew by since ``since`` may end any time, or
    go on as well. ``work``: a running total of the load, which may come and go.
    """
    room = room_of(limit)
    if limit is None or room == math.inf:
        return None
    if room <= 0:
        return Interval(0.0, 0.0, 0.0)
    usage = trend.clean(limit.usage)
    seen, noise = _pace(usage, since, now)
    if known.best <= 0:
        known = seen
    if known.best <= 0:
        return None
    best = _between(known.best, seen.best, now - since)
    near, _ = _pace(usage, now - min(now - since, max(HOUR / 2, min(room / best * HOUR / 2, NEAR))), now)
    if near.best > 0:
        weight = math.exp(-room / best * HOUR / NEAR)
        best = math.exp(weight * math.log(near.best) + (1 - weight) * math.log(best))
    slow = min(best, known.low, max(known.low, seen.low), near.low if near.low > 0 else known.low)
    fast = max(best, known.high, seen.high)
    spread = LEAST_SPREAD + _unseen(now - since, room / best * HOUR, work, now)
    slow, fast = slow / spread, fast * spread
    low = max(0.0, room - 1.3 * noise) / fast * HOUR
    return Interval(low, room / best * HOUR, (room + 1.3 * noise) / slow * HOUR if slow > 0 else math.inf)


def _pace(usage: Series, since: float, now: float) -> tuple[Interval, float]:
    """Bytes an hour since then, and how far off its line the usage lies."""
    points = trend.floors(usage, since, now)
    if len(points) < 4:  # noqa: PLR2004  # too few to say how sure it is
        return trend.NOTHING, 0.0
    slope = trend.slope(points)
    return slope.times(HOUR), trend.noise(points, slope.best)


def _between(known: float, seen: float, seconds: float) -> float:
    """The likeliest pace: the longer the usage was seen to grow, the more its pace says of what is to come."""
    if seen <= 0:
        return known
    weight = min(1.0, seconds / (6 * HOUR)) if seen >= known else 0.5
    return math.exp((1 - weight) * math.log(known) + weight * math.log(seen))


def _unseen(seen: float, ahead: float, work: Series | None, now: float) -> float:
    """By how much the pace of the time ahead may differ as load comes and goes over the day."""
    reach = min(1.0, ahead / (2 * HOUR))
    unseen = UNSEEN * max(0.0, 1 - seen / DAY) * min(1.0, ahead / (8 * HOUR))
    return unseen + VARIES * _variation(work, now) * reach


def _variation(work: Series | None, now: float) -> float:
    """How much the load varied in the last day: the range of its pace over the middle of it, in twelve parts."""
    if work is None or not work.times:
        return 0.0
    since = max(work.times[0], now - DAY)
    if now - since < HOUR / 2:
        return 0.0
    marks = [trend.at(work, since + part * (now - since) / 12) for part in range(13)]
    paces = sorted(after - before for before, after in pairwise(marks))
    mean = (marks[-1] - marks[0]) / 12
    return (paces[-2] - paces[1]) / mean if mean > 0 else 0.0
