# SPDX-License-Identifier: Apache-2.0
"""In which part of a process's memory a growth lies."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from vllm_kvfix.events import CATEGORIES
from vllm_kvfix_sidecar import trend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_kvfix_sidecar.observed import Series

# How much of a growth a part must have risen by to be where it lies; and where it is to be about as large.
LEAST_SHARE, FITTING_SHARE = 0.05, 0.4


def category(memory: Mapping[str, Series], since: float, grown: float) -> str | None:
    """The part of the memory that grew most since then, from the maps, else from the status."""
    rises = _rises(memory, since)
    best = max(rises, key=lambda name: rises[name], default=None)
    return best if best is not None and rises[best] > LEAST_SHARE * grown else None


def nearest(memory: Mapping[str, Series], since: float, grown: float) -> str | None:
    """The part that grew by about as many bytes as ``grown``, since another may warm up meanwhile; None: none did."""
    fitting = {name: rise for name, rise in _rises(memory, since).items() if rise > FITTING_SHARE * grown > 0}
    return min(fitting, key=lambda name: abs(math.log(fitting[name] / grown)), default=None)


def _rises(memory: Mapping[str, Series], since: float) -> dict[str, float]:
    for prefix, names in (("smaps.", CATEGORIES), ("status.", ("anon", "file", "shmem"))):
        series = {name: trend.clean(memory.get(prefix + name)) for name in names}
        rises = {name: _rise(part, since) for name, part in series.items() if len(part.times) > 1}
        if rises:
            return rises
    return {}


def _rise(series: Series, since: float) -> float:
    """From the first to the last quarter of the time: a list that malloc moves to another part does so in one step."""
    points = trend.floors(series, since, series.times[-1], 12) if series.times[-1] > since else []
    quarter = len(points) // 4
    if not quarter:
        return trend.rise_since(series, since)
    values = [value for _, value in points]
    return median(values[-quarter:]) - median(values[:quarter])


def in_malloc(memory: Mapping[str, Series], since: float, grown: float) -> bool | None:
    """Whether malloc handed out a good part of what grew; None: it is not known."""
    used = trend.clean(memory.get("malloc.in_use"))
    return trend.rise_since(used, since) > 0.3 * grown if len(used.times) > 2 else None  # noqa: PLR2004  # a slope
