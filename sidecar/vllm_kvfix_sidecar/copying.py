# SPDX-License-Identifier: Apache-2.0
"""Copies what another thread changes meanwhile, without a lock: that would hold up the pipeline."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    T = TypeVar("T")


def copied(items: Callable[[], Iterable[T]]) -> list[T]:
    """What ``items()`` goes through; again where it changed on the way, which is rare: a copy takes microseconds."""
    while True:
        with contextlib.suppress(RuntimeError):  # what dict and deque say then
            return list(items())
