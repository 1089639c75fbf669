# SPDX-License-Identifier: Apache-2.0
"""Lines of progress on standard error, so that whoever waits for minutes sees that something happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_REWRITE_EVERY_S = 1.0
_LINE_EVERY_S = 10.0


class Progress:
    """Lines that stay, and passing ones; on a terminal a passing line is written over by the next."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to ``stream``."""
        self.on_terminal = stream.isatty()
        self._stream = stream
        self._clock = clock
        self._passing = False
        self._next = 0.0

    def __call__(self, line: str) -> None:
        """Write a line that stays."""
        self._write(line, passing=False)
        self._next = 0.0

    def passing(self, line: str) -> None:
        """Write a line that the next one may replace, unless the last one was just now: a log needs fewer of them."""
        now = self._clock()
        if now >= self._next:
            self._next = now + (_REWRITE_EVERY_S if self.on_terminal else _LINE_EVERY_S)
            self._write(line, passing=True)

    def _write(self, line: str, *, passing: bool) -> None:
        start = "\r\x1b[K" if self.on_terminal and self._passing else ""
        end = "" if self.on_terminal and passing else "\n"
        self._stream.write(f"{start}{line}{end}")
        self._stream.flush()
        self._passing = passing
