# SPDX-License-Identifier: Apache-2.0
"""Runs what may hang for no longer than it may take."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def within(seconds: float, call: Callable[[], object], name: str) -> bool:
    """Run ``call`` in a daemon thread; whether it came back in time. An exception ends in ``threading.excepthook``."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return not thread.is_alive()
