# SPDX-License-Identifier: Apache-2.0
"""Runs the feeder, and reads what it says that it wrote."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sidecar_e2e.processes import Child, clean_environ
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_FEED_S = 60.0


@dataclass
class Ledger:
    """The feeder's lines; see :mod:`tests.sidecar_e2e.feeder` for the fields."""

    engine: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    open: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> Ledger:
    """The ledger so far; a last line that is still being written is left out."""
    ledger = Ledger()
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            fields = json.loads(line)
            kind = fields.pop("kind")
            if kind in {"engine", "totals"}:
                setattr(ledger, kind, fields)
            else:
                {"request": ledger.requests, "open": ledger.open}[kind].append(fields)
    return ledger


class Feeder(Child):
    """The feeder as a child process; ``options`` are its own, ``--ring`` left out."""

    def __init__(self, folder: Path, ring: Path, *options: str) -> None:
        command = [sys.executable, "-m", "tests.sidecar_e2e.feeder", "--ring", str(ring), *options]
        environ = {**clean_environ(), "PYTHONPATH": str(ROOT)}
        super().__init__(f"feeder-{ring.stem}", command, folder, environ, cwd=ROOT)
        self.ring = ring

    def fed(self, timeout_s: float = _FEED_S) -> Ledger:
        """The ledger, once all is written; the process may live on.

        Raises:
            NotInTimeError: It is not within ``timeout_s``.
        """
        self.wait_until(lambda: read(self.out).totals, timeout_s, "the feeder has written all")
        return read(self.out)


def fed_and_ended(folder: Path, ring: Path, *options: str) -> Ledger:
    """The ledger of a feeder that has ended."""
    with Feeder(folder, ring, *options) as feeder:
        assert feeder.wait(_FEED_S) == 0, feeder.log()
        return read(feeder.out)
