# SPDX-License-Identifier: Apache-2.0
"""Tells from a process table whether a process runs, that very one, and what else it says of the machine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# The kernel's inode of the first PID namespace, which is the host's (PROC_PID_INIT_INO).
_HOST_PIDS = 0xEFFFFFFC


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


def sees_host_pids(proc: Path) -> bool:
    """Whether this process counts pids as the host does, and so as the driver of a GPU does."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == _HOST_PIDS
    except OSError:
        return False
