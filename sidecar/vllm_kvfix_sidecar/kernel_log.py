# SPDX-License-Identifier: Apache-2.0
"""What the kernel's log says of the end of a process: killed by the out-of-memory killer, or crashed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix_sidecar.words import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

KMSG = Path("/dev/kmsg")
# The log's clock is not quite the monotonic one; and between the kill and the end lies the giving back of memory.
NEAR_S = 60.0
MOST_LINES = 1 << 16
_LONGEST = 8192
_KILLED = re.compile(r"(?P<memcg>Memory cgroup out|Out) of memory.*: Killed process (?P<pid>\d{1,10}) \(")
_CRASHED = re.compile(r"(?:^|\s)\S{0,15}\[(?P<pid>\d{1,10})\](?::)? (?:segfault|general protection|trap )")


class KernelLine(NamedTuple):
    """A line that names the process; ``oom``: it was killed for memory, by a cgroup's limit if ``by_cgroup``."""

    text: str
    oom: bool
    by_cgroup: bool


def about(pid: int, time_s: float, path: Path = KMSG) -> KernelLine | None:
    """What the log says of a process that ended at ``time_s`` of the monotonic clock; None: nothing, or not readable.

    Args:
        pid: The process, as the host counts.
        time_s: When it ended.
        path: The log.
    """
    found = None
    with contextlib.suppress(OSError):
        for at, text in _lines(path):
            if abs(at - time_s) > NEAR_S:
                continue
            killed, crashed = _KILLED.search(text), _CRASHED.search(text)
            if killed and int(killed["pid"]) == pid:
                return KernelLine(clean(text, 200), oom=True, by_cgroup=killed["memcg"].startswith("Memory"))
            if crashed and int(crashed["pid"]) == pid:
                found = KernelLine(clean(text, 200), oom=False, by_cgroup=False)
    return found


def _lines(path: Path) -> Iterator[tuple[float, str]]:
    """Seconds and text of each line that is still there: ``priority,number,microseconds,flags;text``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(MOST_LINES):
            try:
                record = os.read(descriptor, _LONGEST)
            except BrokenPipeError:  # lines went meanwhile
                continue
            except BlockingIOError:
                return
            if not record:
                return
            head, _, text = record.partition(b";")
            parts = head.split(b",")
            if len(parts) > 2 and parts[2].isdigit():  # noqa: PLR2004  # the third is the time
                yield int(parts[2]) / 1e6, text.partition(b"\n")[0].decode(errors="replace")
    finally:
        os.close(descriptor)
