# SPDX-License-Identifier: Apache-2.0
"""How often a costly read may be made: a share of the time, however long one read takes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOW_S = 0.05


class Budget:
    """Lets reads take ``share`` of the time, and none sooner than ``least_s`` seconds after the last.

    A read is paid for before the next one: that must wait ``spent / share`` from the last one's end, and twice as long
    if it took over 50 ms by ``clock``, since others were held up meanwhile. What was spent is told by ``meter``, or by
    ``clock``; whoever pauses within a read gives ``time.thread_time``, so that pauses cost nothing. All in seconds.
    """

    def __init__(
        self,
        share: float = 0.001,
        least_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        meter: Callable[[], float] | None = None,
    ) -> None:
        self._share = share
        self._least_s = least_s
        self._clock = clock
        self._meter = meter or clock
        self._next = float("-inf")

    def due(self) -> bool:
        """Whether the last read has been paid for; the first one is due at once."""
        return self._clock() >= self._next

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Measures the read that is made in it, also one that fails."""
        began, spent = self._clock(), -self._meter()
        try:
            yield
        finally:
            spent += self._meter()
            ended = self._clock()
            rest = spent / self._share * (2 if ended - began > SLOW_S else 1)
            self._next = ended + max(self._least_s, rest)
