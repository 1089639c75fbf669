# SPDX-License-Identifier: Apache-2.0
"""Remembers which files are not followed, and why, so that each is said once and looked at ever more rarely."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from pathlib import Path

LONGEST_WAIT_S = 300.0
MOST_SAID = 100

_log = logging.getLogger(__name__)


class _Refusal(NamedTuple):
    """Looked at again at ``again_at``, or when ``stamp`` has changed; a stamp of () does not change."""

    stamp: tuple[int, ...]
    reason: str
    again_at: float
    wait: float


class Refusals:
    """Files that are not followed: as many as the caller has seen in its folders; ``MOST_SAID`` of them are said."""

    def __init__(self) -> None:
        self._refused: dict[Path, _Refusal] = {}
        # Those that are tried again: one that fails anew waits longer than before, and is not said anew.
        self._tried: dict[Path, _Refusal] = {}

    @property
    def reasons(self) -> Mapping[Path, str]:
        """Why a file is not followed, for each such file."""
        return {path: refusal.reason for path, refusal in tuple(self._refused.items())}  # other threads ask, too

    def is_due(self, path: Path, stamp: tuple[int, ...], now: float) -> bool:
        """Whether to look at a file (again); ``stamp`` tells whether it has changed."""
        refusal = self._refused.get(path)
        return refusal is None or now >= refusal.again_at or (refusal.stamp not in {(), stamp})

    def add(self, path: Path, reason: str, stamp: tuple[int, ...], now: float) -> None:
        """A file is not followed; with a stamp of () it is looked at again after a while only, changed or not."""
        before = self._refused.pop(path, None) or self._tried.pop(path, None)
        if (before is None or before.reason != reason) and len(self._refused) < MOST_SAID:
            _log.warning("not followed: %s", reason)
        wait = min(LONGEST_WAIT_S, before.wait * 2) if before and before.stamp == stamp else 1.0
        self._refused[path] = _Refusal(stamp, reason, now + wait, wait)

    def followed(self, path: Path) -> None:
        """A file is followed after all."""
        refusal = self._refused.pop(path, None)
        if refusal is not None:
            self._tried[path] = refusal

    def keep(self, seen: Container[Path]) -> None:
        """Forget files that are gone."""
        self._refused = {path: refusal for path, refusal in self._refused.items() if path in seen}
        self._tried = {path: refusal for path, refusal in self._tried.items() if path in seen}
