# SPDX-License-Identifier: Apache-2.0
"""A table of the processes that a proc filesystem shows: who they are, whose children, and how they call themselves.

psutil is not what reads it: its root is one global of the whole interpreter, where ours is a parameter; its start times
are seconds since the epoch, where a ring's are clock ticks; it does not know pids of other namespaces; and a scan of
5,000 processes takes it several times as long. Tests compare the two.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.host.errors import UnreadableError, reason

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path

WHOLE_S = 5.0
WHOLE_SHARE = 0.003
# Whatever a process puts there: as much as it takes to know it.
_MOST_STAT = 4096
_MOST_ARGV = 4096
_MOST_STATUS = 8192


class ProcessKey(NamedTuple):
    """A process as a process table counts: its pid and, since pids are used again, its start in ticks since boot."""

    pid: int
    start_time: int


class Entry(NamedTuple):
    """A row of the table. ``parent``: its pid. ``name``: the kernel's, 15 bytes at most. ``argv``: its beginning."""

    key: ProcessKey
    parent: int
    name: str
    argv: tuple[str, ...]


class ProcessTable:
    """What is known of the processes; each :meth:`look` brings it up to date.

    A look lists the pids and reads of those that are new. All rows are read again every ``WHOLE_S``, or more rarely
    where that would take more than ``WHOLE_SHARE`` of the time: for pids that were used again unseen, and new names.
    New children are found in the listing, too: the kernel's list of children is one file a thread, of which an engine
    has hundreds, and not every kernel has it.
    """

    def __init__(self, proc: Path, clock: Callable[[], float]) -> None:
        """Look at nothing yet.

        Args:
            proc: Where a process table is mounted.
            clock: Steady seconds.
        """
        self.fault: str | None = None
        self.whole = False
        self._entries: dict[int, Entry] = {}
        self._news: list[Entry] = []
        self._proc = proc
        self._clock = clock
        self._whole_due = clock()

    @property
    def entries(self) -> Mapping[int, Entry]:
        """The rows by pid."""
        return self._entries

    def look(self, restless: Container[int] = ()) -> list[Entry]:
        """Bring the table up to date; the rows that came, or tell something else than at the last look.

        Nothing is raised: ``fault`` says why the table cannot be read, or None; ``whole``: all rows were read again.

        Args:
            restless: Pids of processes that may call themselves something else soon.
        """
        began = self._clock()
        self.whole = False
        try:
            pids = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}  # noqa: PTH208  # by far the fastest
        except OSError as error:
            self._entries.clear()
            self._news.clear()
            self.fault = f"cannot read {self._proc}: {error.strerror}"
            return []
        self.fault = None if pids else f"{self._proc} shows no process"
        for pid in self._entries.keys() - pids:
            del self._entries[pid]
        self.whole = began >= self._whole_due
        for pid in pids if self.whole else pids - self._entries.keys():
            with contextlib.suppress(UnreadableError):  # gone since the listing, or hidden from us
                self._renew(pid, None if pid in restless else self._entries.get(pid))
        if self.whole:
            ended = self._clock()
            self._whole_due = ended + max(WHOLE_S, (ended - began) / WHOLE_SHARE)
        news, self._news = self._news, []
        return news

    def again(self, pid: int) -> Entry:
        """Read one row again; the next look tells if it is not what it was.

        Raises:
            UnreadableError: It is gone, or it may not be read.
        """
        return self._renew(pid, self._entries.get(pid))

    def _renew(self, pid: int, known: Entry | None) -> Entry:
        before = self._entries.pop(pid, None)
        entry = self._entries[pid] = self._read(pid, known)
        if before is None or (entry.key, entry.parent, entry.argv) != (before.key, before.parent, before.argv):
            self._news.append(entry)
        return entry

    def _read(self, pid: int, known: Entry | None) -> Entry:
        stat = _parse_stat(pid, read_file(f"{self._proc}/{pid}/stat", _MOST_STAT))
        # A title is set together with the kernel's name, and reading it takes a lock of the process: not for each row.
        if known is not None and (known.key, known.name) == (stat.key, stat.name):
            return stat._replace(argv=known.argv)
        with contextlib.suppress(UnreadableError):  # then it has none that we know
            return stat._replace(argv=_parse_argv(read_file(f"{self._proc}/{pid}/cmdline", _MOST_ARGV)))
        return stat

    def own_pid(self, pid: int) -> int | None:
        """The pid of a process as its own PID namespace counts; None where the kernel does not say.

        Raises:
            UnreadableError: It is gone, or it may not be read.
        """
        for line in read_file(f"{self._proc}/{pid}/status", _MOST_STATUS).splitlines():
            if line.startswith(b"NSpid:"):
                with contextlib.suppress(ValueError, IndexError):
                    return int(line.split()[-1])
        return None


def read_file(path: str, most: int) -> bytes:
    """The beginning of a file of a process.

    Raises:
        UnreadableError: It is gone, or it may not be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(file, most)
        finally:
            os.close(file)
    except OSError as error:
        raise UnreadableError(reason(error)) from None


def _parse_stat(pid: int, data: bytes) -> Entry:
    # Name from the first bracket to the last, since a program may have any name; then fields 3, 4 and 22.
    _, _, rest = data.partition(b"(")
    name, _, rest = rest.rpartition(b")")
    fields = rest.split(None, 20)
    try:
        key = ProcessKey(pid, int(fields[19]))
        return Entry(key, int(fields[1]), name.decode(errors="replace"), ())
    except (ValueError, IndexError):
        raise UnreadableError("its stat is not what a kernel writes") from None


def _parse_argv(data: bytes) -> tuple[str, ...]:
    return tuple(data.rstrip(b"\0").decode(errors="replace").split("\0")) if data.strip(b"\0") else ()
