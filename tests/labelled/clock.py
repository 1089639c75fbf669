# SPDX-License-Identifier: Apache-2.0
"""The clock of a case: it stands still until it is told to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN_S = 10_000.0


@dataclass
class Clock:
    """Simulated seconds on a monotonic clock."""

    now_s: float = BEGIN_S

    def ns(self) -> int:
        """The time as the plugin's parts ask for it."""
        return int(self.now_s * 1e9)


@dataclass(frozen=True)
class Pace:
    """How long a case lasts.

    Attributes:
        ticks: How many ticks there are.
        tick_s: What each of them counts for, in simulated seconds.
        smaps_s: Least simulated seconds between two readings of the maps, and of Python's own figures: these cost.
    """

    ticks: int
    tick_s: float
    smaps_s: float

    @property
    def length_s(self) -> float:
        """Simulated seconds from begin to end."""
        return self.ticks * self.tick_s

    def hours(self, tick: int) -> float:
        """Simulated hours from the begin to that of a tick."""
        return tick * self.tick_s / 3600

    def times(self) -> Iterator[float]:
        """The end of each tick."""
        for tick in range(1, self.ticks + 1):
            yield BEGIN_S + tick * self.tick_s


MINUTES = Pace(ticks=120, tick_s=10.0, smaps_s=60.0)
THREE_HOURS = Pace(ticks=180, tick_s=60.0, smaps_s=240.0)
FOUR_HOURS = Pace(ticks=120, tick_s=120.0, smaps_s=600.0)
SIX_HOURS = Pace(ticks=180, tick_s=120.0, smaps_s=600.0)
TEN_HOURS = Pace(ticks=300, tick_s=120.0, smaps_s=600.0)
DAY = Pace(ticks=288, tick_s=300.0, smaps_s=1200.0)
