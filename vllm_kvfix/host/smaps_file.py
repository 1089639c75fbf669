# SPDX-License-Identifier: Apache-2.0
"""What ``/proc/PID/smaps`` says, summed by kind of memory while it is read, a piece at a time."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vllm_kvfix.host import procfs
from vllm_kvfix.host.errors import UnreadableError, reason
from vllm_kvfix.host.mappings import Mapping, Sorter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# The kernel gives at most a page of it to a read, and lets go of the process's mappings between two reads.
CHUNK = 8 << 10
# A path has at most 4,096 bytes, each of which may be written as four: whoever says more in a line is no kernel.
_LONGEST_LINE = 64 << 10
_KIB = 1024
# Of some 25 lines that a mapping has, those that count. The newline before them is what makes the search fast.
_LINE = re.compile(
    rb"\n(?:([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([-r][-w][-x][ps]) \S+ \S+ [0-9]+ *(.*)"
    rb"|(Rss|Pss|Private_\w+|Swap): +([1-9][0-9]{0,15}) kB"
    rb"|VmFlags:(.*))"
)


def smaps(
    pid: int | str = "self",
    proc: Path = procfs.PROC,
    pause: Callable[[], None] = lambda: None,
    chunk: int = CHUNK,
) -> dict[str, int]:
    """RSS, PSS, USS and swap of a process, and the categories that partition the RSS: ``SCOPES["smaps"]``, bytes.

    Args:
        pid: The process.
        proc: The process table.
        pause: Called after each chunk, so that a thread beside an engine can let go of the GIL.
        chunk: Bytes read at a time.

    Raises:
        UnreadableError: There is no such process, it may not be read, it ended or its pid changed hands meanwhile.
    """
    before = None if pid == "self" else procfs.identity(pid, proc)
    sums = _Sums()
    try:
        _feed(proc / str(pid) / "smaps", sums, pause, chunk)
    except OSError as error:
        raise UnreadableError(reason(error)) from error
    # A process that ends, or executes another program, has no more mappings at once: the rest would be missing unseen.
    if before is not None and procfs.identity(pid, proc) != before:
        raise UnreadableError("another process took its pid, or another program its place, while it was read")
    return sums.figures()


def _feed(path: Path, sums: _Sums, pause: Callable[[], None], chunk: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        begun = b""
        while data := os.read(descriptor, chunk):
            lines, _, begun = (b"\n" + begun + data).rpartition(b"\n")
            if len(begun) > _LONGEST_LINE:
                raise UnreadableError("its smaps file is malformed")
            sums.add(lines)
            pause()
    finally:
        os.close(descriptor)


class _Sums:
    """Adds up mappings, of which any number of whole lines is given at a time, a newline before each."""

    def __init__(self) -> None:
        self._kib = {b"Pss": 0, b"Swap": 0}
        self._private = 0
        self._sorter = Sorter()
        self._mapping: Mapping | None = None

    def add(self, lines: bytes) -> None:
        kib, mapping = self._kib, self._mapping
        for start, end, access, path, name, amount, flags in _LINE.findall(lines):
            if name == b"Rss":
                if mapping:
                    mapping.rss = int(amount)
            elif name in kib:
                kib[name] += int(amount)
            elif name:
                self._private += int(amount)
            elif start:
                if mapping:
                    self._sorter.add(mapping)
                mapping = Mapping(int(start, 16), int(end, 16), access, path)
            elif mapping:
                mapping.flags = flags
        self._mapping = mapping

    def figures(self) -> dict[str, int]:
        if self._mapping is None:
            raise UnreadableError("it has no memory of its own: it is ending, or one of the kernel's threads")
        self._sorter.add(self._mapping)
        categories = self._sorter.sums()
        kib = {
            "rss": sum(categories.values()),
            "pss": self._kib[b"Pss"],
            "uss": self._private,
            "swap": self._kib[b"Swap"],
        }
        return {name: amount * _KIB for name, amount in {**kib, **categories}.items()}
