# SPDX-License-Identifier: Apache-2.0
"""What is measured on an engine under load, and the growth rates that follow from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1024**2
SECONDS_PER_HOUR = 3600.0
BYTES_PER_ID = 8
"""What one entry of a list takes; the number it refers to exists anyway."""


@dataclass(frozen=True)
class Point:
    """One moment: ``time`` in seconds since the demo's load began; ``rss`` the engine core's RssAnon in bytes.

    ``backlog`` is the length of ``new_block_ids`` of all managers, ``allocated`` the blocks that this engine has handed
    out so far.
    """

    time: float
    rss: int
    backlog: int
    allocated: int


@dataclass(frozen=True)
class Phase:
    """A stretch of the time line; what lies before ``counted_from`` (on its clock) is shown but not counted."""

    label: str
    counted_from: float
    points: Sequence[Point]

    @property
    def counted(self) -> list[Point]:
        """The points that the slopes are made of."""
        return [point for point in self.points if point.time >= self.counted_from]

    @property
    def mib_per_hour(self) -> float:
        """Least-squares slope of RssAnon, MiB an hour."""
        return _slope(self.counted, [point.rss / MIB for point in self.counted]) * SECONDS_PER_HOUR

    @property
    def ids_per_second(self) -> float:
        """Least-squares slope of the backlog, ids a second."""
        return _slope(self.counted, [point.backlog for point in self.counted])

    @property
    def blocks_per_second(self) -> float:
        """Least-squares slope of the blocks handed out: how hard the engine worked."""
        return _slope(self.counted, [point.allocated for point in self.counted])

    def summary(self) -> dict[str, object]:
        """Everything above, ready for JSON."""
        return {
            "label": self.label,
            "counted_from_s": round(self.counted_from, 1),
            "rss_anon_mib_per_hour": round(self.mib_per_hour, 2),
            "backlog_ids_per_second": round(self.ids_per_second, 1),
            "allocated_blocks_per_second": round(self.blocks_per_second, 1),
            "points": [
                {"time_s": round(p.time, 2), "rss_anon_bytes": p.rss, "backlog": p.backlog, "allocated": p.allocated}
                for p in self.points
            ],
        }


def _slope(points: Sequence[Point], values: Sequence[float]) -> float:
    return statistics.linear_regression([point.time for point in points], values).slope
