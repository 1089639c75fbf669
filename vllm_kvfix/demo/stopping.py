# SPDX-License-Identifier: Apache-2.0
"""Sees to it that a Ctrl-C never comes between the start of a process and the moment when we know whom to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# An ended `make` or a closed terminal must end what we started as well.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off what would stop us to the end of the block; a child started in it inherits nothing of that."""
    if threading.current_thread() is not threading.main_thread():  # no handler ever runs there
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)

    before = {number: signal.signal(number, note) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for noted in came:
        signal.raise_signal(noted)
