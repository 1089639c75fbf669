# SPDX-License-Identifier: Apache-2.0
"""The sentences that a verdict stands on, each with its figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import trend
from vllm_kvfix_sidecar.owners import HOUR, MINUTE, Finding, Nature
from vllm_kvfix_sidecar.words import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_kvfix_sidecar.growth import Rise
    from vllm_kvfix_sidecar.observed import Series
    from vllm_kvfix_sidecar.trend import Interval

TOO_EARLY = (
    "it is too early to tell a warm-up or a filling cache from a leak: that takes hours of growth, or a container "
    "whose entries nobody needs"
)


def of_culprit(finding: Finding) -> str:
    """A container that grows, why that is said of it, and how fast."""
    driver = finding.follows or ""
    each = f", {finding.per[driver]:,.1f} bytes a {driver.replace('_', ' ')}" if driver in finding.per else ""
    return f"{finding.path}: {finding.why} ({size(finding.rate)} an hour{each})"


def of_filling(finding: Finding) -> str:
    """A container whose growth has an end, and when that is."""
    if finding.nature is Nature.LIVE:
        return f"{finding.path}: {finding.why} ({size(finding.rate)} an hour): they go when the load does"
    if finding.room == math.inf:
        return f"{finding.path}: {finding.why} ({size(finding.rate)} an hour)"
    full = finding.room * finding.unit
    hours = full / finding.rate if finding.rate > 0 else math.inf
    return f"{finding.path}: {finding.why}; full after {size(full)} more, in {hours:,.1f} h at this pace"


def of_memory(memory: Series, slope: Interval, seconds: float) -> list[str]:
    """How large the process is, and how fast it grew in the last seconds."""
    if not memory.times:
        return ["the size of the process could not be read"]
    said = (
        f"its memory is {size(memory.values[-1])} and grew by {size(slope.best)} an hour "
        f"({size(slope.low)} to {size(slope.high)}) in the last {seconds / MINUTE:,.0f} min"
    )
    return [said]


def of_malloc(memory: Mapping[str, Series], since: float) -> list[str]:
    """What malloc and Python hold more than then."""
    said = []
    for name, what in (("in_use", "in use by malloc"), ("retained", "kept by malloc after it was freed")):
        series = trend.clean(memory.get(f"malloc.{name}"))
        if len(series.times) > 2:  # noqa: PLR2004  # no line
            rise = trend.rise_since(series, since)
            said.append(f"{size(abs(rise))} {_more(rise)} are {what}")
    blocks = trend.clean(memory.get("python.blocks_count"))
    if len(blocks.times) > 2:  # noqa: PLR2004  # no line
        rise = trend.rise_since(blocks, since)
        said.append(f"Python holds {abs(rise):,.0f} blocks {_more(rise)}")
    return ["; ".join(said)] if said else []


def _more(rise: float) -> str:
    return "less" if rise < 0 else "more"


def of_the_rest(found: Sequence[Finding], unread: Mapping[str, str]) -> list[str]:
    """What grows too slowly to matter, and what could not be read."""
    small = [finding for finding in found if finding.nature is Nature.SMALL]
    said = [f"{finding.path}: {finding.why}" for finding in small[:3]]
    said += [f"{scope} could not be read: {reason}" for scope, reason in sorted(unread.items())]
    return said


def of_rise(name: str, rise: Rise) -> str:
    """A growth for hours, of the shared memory if ``name`` says so."""
    what = "shared memory" if name else "memory"
    return (
        f"the process's {what} grew by {size(rise.grown)} in {rise.seconds / HOUR:.1f} h, in every part of them, "
        f"at last {rise.pace:.0%} as fast as at first; no container that was found owns it"
    )


def of_retained(keeps: float, rose: tuple[float, float], uses: tuple[float, float], seconds: float) -> str:
    """What malloc keeps; by how much memory ``rose``, and of that what it keeps; what is in use, and most was."""
    return (
        f"malloc keeps {size(keeps)} that the program freed: of {size(rose[0])} that the memory rose by in "
        f"{seconds / HOUR:.1f} h it keeps {size(rose[1])}; {size(uses[0])} are in use, at most "
        f"{size(uses[1])} were"
    )


def of_steady(memory: Series, seconds: float) -> str:
    """That a process does not grow."""
    if not memory.values:
        return "its memory could not be read"
    return f"its memory is {size(memory.values[-1])} and has not gone on growing in {seconds / MINUTE:.0f} min"
