# SPDX-License-Identifier: Apache-2.0
"""Reads a ring file that another process writes, and believes nothing of it that it has not checked.

Reads by ``pread``, never by mapping: a file that is cut while mapped would kill the reader.
"""

from __future__ import annotations

import fcntl
import os
import stat
import weakref
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvfix.ring import layout

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

LARGEST_FILE = 1 << 28
_TAG = layout.FRAME_TAG.to_bytes(4, "little")


class RingError(Exception):
    """A file is no ring that this reader can read; the message says why and what to do."""


@dataclass(frozen=True)
class Header:
    """What a ring file says of itself; see :mod:`vllm_kvfix.ring.layout` for the fields and their units."""

    capacity: int
    pid: int
    start_time: int
    boot_id: bytes
    clock_offset_ns: int
    heartbeat_ns: int
    claim: int
    head: int
    events: int
    dropped: int
    patch_state: str
    engine_index: int
    locked: bool
    vllm_version: str
    plugin_version: str
    role: str = layout.ENGINE_CORE
    end: str = layout.END_UNKNOWN
    end_ns: int = 0
    end_reason: str = ""


@dataclass(frozen=True)
class Frame:
    """One frame: how many events were published before it and are in it, and its payload."""

    first_event: int
    events: int
    payload: array[int]


class RingReader:
    """Follows one ring file from its oldest frame that is still there.

    ``lost`` counts the events that were published but overwritten, or damaged, before they were read.
    ``found`` is what ``fstat`` said of the file that is open, whatever lies at ``path`` by now.
    """

    def __init__(self, path: Path, owners: Collection[int] | None = None) -> None:
        """Open ``path``.

        Args:
            path: The ring file.
            owners: User ids whose files are read; None: anybody's.

        Raises:
            RingError: It is no regular file, no ring, unfinished, of another schema, too large, or lies of its size;
                or its owner is none of ``owners``.
            OSError: It cannot be opened: it is gone, a symbolic link, or another user's.
        """
        self.path = path
        self._owners = owners
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        # Whoever forgets a reader loses no descriptor with it.
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self._closing.atexit = False
        try:
            self._check()
            self.header = self.read_header()
        except BaseException:
            self.close()
            raise
        self.lost = 0
        self._next_event = 0
        self._tail = 0

    def _check(self) -> None:
        found = self.found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RingError(f"{self.path} is no regular file; give the path of a .ring file")
        if self._owners is not None and found.st_uid not in self._owners:
            raise RingError(f"{self.path} belongs to user {found.st_uid}; read it as that user, or as root")
        words = self._words(0, layout.HEADER_BYTES)
        if len(words) < layout.HEADER_BYTES // layout.WORD or words[layout.MAGIC_WORD] != layout.MAGIC:
            raise RingError(
                f"{self.path} is no ring file, or its engine has not finished it; try again, or another file"
            )
        if words[layout.SCHEMA_WORD] != layout.SCHEMA:
            raise RingError(
                f"{self.path} has schema {words[layout.SCHEMA_WORD]}, this reader knows {layout.SCHEMA}; "
                "use the release of vllm-kvfix that wrote it"
            )
        size = layout.HEADER_BYTES + words[layout.CAPACITY_WORD] * layout.WORD
        if words[layout.CAPACITY_WORD] < layout.FRAME_HEADER_WORDS or size > min(found.st_size, LARGEST_FILE):
            raise RingError(
                f"{self.path} says that it holds {words[layout.CAPACITY_WORD]} words, but has {found.st_size} bytes; "
                "it was cut or tampered with"
            )
        self._capacity = words[layout.CAPACITY_WORD]

    def _words(self, offset: int, size: int) -> array[int]:
        data = os.pread(self._descriptor, size, offset)
        return array("Q", data[: len(data) // layout.WORD * layout.WORD])

    def read_header(self) -> Header:
        """The header as it is now.

        Raises:
            RingError: The file has been cut since.
        """
        data = os.pread(self._descriptor, layout.HEADER_BYTES, 0)
        if len(data) < layout.HEADER_BYTES:
            raise RingError(f"{self.path} was cut while it was read")
        words = array("Q", data)
        offset = words[layout.CLOCK_OFFSET_WORD]
        state, role, end = words[layout.PATCH_STATE_WORD], words[layout.ROLE_WORD], words[layout.END_WORD]
        return Header(
            capacity=self._capacity,
            pid=words[layout.PID_WORD],
            start_time=words[layout.START_TIME_WORD],
            boot_id=data[layout.BOOT_ID_BYTES],
            clock_offset_ns=offset - (1 << 64) if offset >> 63 else offset,
            heartbeat_ns=words[layout.HEARTBEAT_WORD],
            claim=words[layout.CLAIM_WORD],
            head=words[layout.HEAD_WORD],
            events=words[layout.EVENTS_WORD],
            dropped=words[layout.DROPPED_WORD],
            patch_state=layout.PATCH_STATES[state] if state < len(layout.PATCH_STATES) else layout.PATCH_STATES[0],
            engine_index=words[layout.ENGINE_INDEX_WORD],
            locked=words[layout.LOCKED_WORD] == 1,
            vllm_version=_text(data[layout.VLLM_VERSION_BYTES]),
            plugin_version=_text(data[layout.PLUGIN_VERSION_BYTES]),
            role=layout.ROLES[role] if role < len(layout.ROLES) else layout.ROLES[0],
            end=layout.ENDS[end] if end < len(layout.ENDS) else layout.END_UNKNOWN,
            end_ns=words[layout.END_TIME_WORD],
            end_reason=_text(data[layout.END_REASON_BYTES]),
        )

    def poll(self) -> Iterator[Frame]:
        """The frames published since the last call; at most one turn of the ring.

        Raises:
            RingError: The file has been cut since.
        """
        end = self.read_header().head
        if end < self._tail or end - self._tail > self._capacity:
            self._tail = max(0, end - self._capacity)
        first = self._tail
        words = self._body(first, end)
        self.header = self.read_header()
        # What the writer may have been overwriting while it was copied is no evidence of anything.
        self._tail = min(end, max(first, self.header.claim - self._capacity))
        yield from self._frames(words, first, end)

    def _body(self, start: int, end: int) -> array[int]:
        """The words of positions [start, end), fewer if the file was cut."""
        words: array[int] = array("Q")
        while start < end:
            at = start % self._capacity
            n = min(end - start, self._capacity - at)
            part = self._words(layout.HEADER_BYTES + at * layout.WORD, n * layout.WORD)
            words.extend(part)
            if len(part) < n:
                break
            start += n
        return words

    def _frames(self, words: array[int], first: int, end: int) -> Iterator[Frame]:
        data = memoryview(words).cast("B").tobytes()
        while self._tail < end:
            frame = self._frame_at(words, self._tail - first)
            if frame is None:
                found = self._next_tag(data, self._tail - first + 1)
                self._tail = end if found is None else first + found
                continue
            self._tail += len(frame.payload) + layout.FRAME_HEADER_WORDS
            if frame.first_event >= self._next_event:
                self.lost += frame.first_event - self._next_event
                self._next_event = frame.first_event + frame.events
                yield frame

    @staticmethod
    def _next_tag(data: bytes, at: int) -> int | None:
        """Index of the next word from ``at`` on that may begin a frame; None where there is none."""
        found = at * layout.WORD
        while True:
            found = data.find(_TAG, found)
            if found < 0:
                return None
            if found % layout.WORD == layout.WORD // 2:  # the tag is a word's high half
                return found // layout.WORD
            found += 1

    def _frame_at(self, words: array[int], at: int) -> Frame | None:
        """The frame that begins at ``words[at]``; None where none does that is whole and where it belongs."""
        if at + layout.FRAME_HEADER_WORDS > len(words):
            return None
        n = words[at] & layout.LOW_HALF
        if words[at] >> 32 != layout.FRAME_TAG or n < layout.FRAME_HEADER_WORDS or at + n > len(words):
            return None
        if words[at + 1] != self._tail or not layout.is_whole(words[at : at + n]):
            return None
        return Frame(words[at + 2], words[at + 3] >> 32, words[at + layout.FRAME_HEADER_WORDS : at + n])

    def writer_is_gone(self) -> bool | None:
        """Whether the writer's process has ended; None where the file cannot tell (its filesystem has no locks).

        True means that no other process holds the writer's lock; asked by the writer's own process, it is always True.
        """
        if not self.header.locked:
            return None
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
        except BlockingIOError:
            return False
        except OSError:
            return None
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1)
        return True

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._closing()


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")
