# SPDX-License-Identifier: Apache-2.0
"""What the process table says in its small files: some 20 us each, whatever the size of the process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from vllm_kvfix.host.errors import UnreadableError, reason

PROC = Path("/proc")

_KIB = 1024
_STATUS = {
    b"VmRSS": "rss",
    b"RssAnon": "anon",
    b"RssFile": "file",
    b"RssShmem": "shmem",
    b"VmSwap": "swap",
    b"VmHWM": "peak",
}
# Sixteen digits of KiB are the most that stays below 2^64 bytes.
_AMOUNT = re.compile(rb"^(\w+):[ \t]+([0-9]{1,16}) kB$", re.MULTILINE)
_THREADS = re.compile(rb"^Threads:[ \t]+([0-9]{1,16})$", re.MULTILINE)
_STATE = re.compile(rb"^State:[ \t]+([A-Z])", re.MULTILINE)
_ENDED = {b"Z", b"X"}
ENDED_REASON = "it has ended and awaits its parent"
_MEMINFO = {b"MemTotal": "total", b"MemAvailable": "available"}


class Identity(NamedTuple):
    """What tells one program in one process from the next: ``/proc`` itself knows only pids.

    ``start_time`` in clock ticks since boot; ``stack``, where its stack begins, changes when it executes another one.
    """

    start_time: int
    stack: int


def read(pid: int | str, name: str, proc: Path) -> bytes:
    """The text of ``proc``/``pid``/``name``.

    Raises:
        UnreadableError: There is no such process, or it may not be read.
    """
    try:
        return (proc / str(pid) / name).read_bytes()
    except OSError as error:
        raise UnreadableError(reason(error)) from error


def status(pid: int | str = "self", proc: Path = PROC) -> dict[str, int]:
    """What ``/proc/PID/status`` tells of memory and threads, by the names of ``SCOPES["status"]``; bytes, and a count.

    Raises:
        UnreadableError: There is no such process, it may not be read, or it is a zombie, which has no memory.
    """
    text = read(pid, "status", proc)
    state = _STATE.search(text)
    if state and state[1] in _ENDED:
        raise UnreadableError(ENDED_REASON)
    found = {_STATUS[name]: int(kib) * _KIB for name, kib in _AMOUNT.findall(text) if name in _STATUS}
    threads = _THREADS.search(text)
    if threads:
        found["threads_count"] = int(threads[1])
    return found


def start_time(pid: int | str = "self", proc: Path = PROC) -> int:
    """When the process began, in clock ticks since boot.

    Raises:
        UnreadableError: There is no such process, it may not be read, or it is a zombie.
    """
    return identity(pid, proc).start_time


def identity(pid: int | str, proc: Path) -> Identity:
    """Which process it is that has this pid now.

    Raises:
        UnreadableError: There is no such process, it may not be read, or it is a zombie.
    """
    # Behind the last bracket, since a program may have any name: field 3, the state, to field 28, the stack's begin.
    fields = read(pid, "stat", proc).rpartition(b")")[2].split()
    if fields and fields[0] in _ENDED:
        raise UnreadableError(ENDED_REASON)
    numbers = fields[19:26:6]
    if [number.isdigit() for number in numbers] != [True, True]:
        raise UnreadableError("its stat file is malformed")
    return Identity(*map(int, numbers))


def host_memory(proc: Path = PROC) -> dict[str, int]:
    """The machine's memory in bytes, ``total`` and ``available``: the limit where no cgroup sets one.

    Raises:
        UnreadableError: The process table does not show it.
    """
    try:
        text = (proc / "meminfo").read_bytes()
    except OSError as error:
        raise UnreadableError(f"{proc / 'meminfo'}: {error.strerror}") from error
    return {_MEMINFO[name]: int(kib) * _KIB for name, kib in _AMOUNT.findall(text) if name in _MEMINFO}
