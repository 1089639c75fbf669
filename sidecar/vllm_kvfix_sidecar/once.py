# SPDX-License-Identifier: Apache-2.0
"""Says a thing once: what is looked at each second would else fill the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

MOST = 64


class Once:
    """Warnings, each said once for its ``what`` and ``reason``, ``MOST`` in all."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[tuple[str, str]] = set()

    def warn(self, what: str, reason: str, text: str) -> None:
        """Say ``text`` if nothing was said yet of this ``what`` and ``reason``."""
        if (what, reason) not in self._said and len(self._said) < MOST:
            self._said.add((what, reason))
            self._log.warning("%s", text)
