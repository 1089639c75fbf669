# SPDX-License-Identifier: Apache-2.0
"""How widely a figure is spread over the rounds of a benchmark, and how that is shown."""

from __future__ import annotations

import statistics


def spread(values: list[float]) -> dict[str, float]:
    """Median, and 5th and 95th percentile, of two values or more."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"median": statistics.median(values), "p5": cuts[0], "p95": cuts[-1]}


def shown(found: dict[str, float]) -> str:
    """A spread for a reader."""
    return f"{found['median']:.3f} ({found['p5']:.3f} .. {found['p95']:.3f})"
