# SPDX-License-Identifier: Apache-2.0
"""Tells from a process table whether a process runs: that very one, not another with its pid."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def process_runs(proc: Path, pid: int, start_time: int) -> bool:
    """Whether the process table shows that very process; not another with its pid, nor one that awaits its parent."""
    try:
        # Behind the last bracket, since a program may have any name: field 3, the state, to field 22, the start time.
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] not in {b"Z", b"X"} and int(fields[19]) == start_time
    except (OSError, ValueError, IndexError):
        return False


def boot_id_of(proc: Path) -> bytes | None:
    """The 16 bytes of this boot's id; None where the process table does not show it."""
    with contextlib.suppress(OSError, ValueError):
        return bytes.fromhex((proc / "sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return None
