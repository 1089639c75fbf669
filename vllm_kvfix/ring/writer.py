# SPDX-License-Identifier: Apache-2.0
"""Writes frames into a ring file: bounded, overwriting the oldest, never waiting."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvfix.ring import layout

if TYPE_CHECKING:
    from array import array
    from pathlib import Path

# A frame may fill this share of the body at most, so that a reader that keeps up never loses one to its successor.
LARGEST_FRAME_SHARE = 4


@dataclass(frozen=True)
class Origin:
    """Who writes, for the header.

    ``start_time`` of the process in clock ticks since boot, ``boot_id`` of 16 bytes: with the pid they name a process
    for good. ``engine_index`` is the data-parallel rank. Versions longer than 64 bytes are cut. ``role`` is one of
    ``layout.ROLES``.
    """

    start_time: int
    boot_id: bytes
    engine_index: int = 0
    vllm_version: str = ""
    plugin_version: str = ""
    role: str = layout.ENGINE_CORE


class RingWriter:
    """The one writer of one ring file. After ``__init__`` no method makes a system call, but for the clock's.

    The file's blocks are allocated up front: storing to a page that a full disk cannot back would kill the process.
    """

    def __init__(self, path: Path, capacity: int, origin: Origin, mode: int = 0o600) -> None:
        """Make the file ``path``; it must not exist.

        Args:
            path: Where to; its folder must exist.
            capacity: Words of 8 bytes in the body.
            origin: What the header says of the writer.
            mode: Its permissions, whatever the umask.

        Raises:
            OSError: The file exists, the folder is missing or read-only, the disk is full, mmap is not to be had.
        """
        size = layout.HEADER_BYTES + capacity * layout.WORD
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, mode)
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)
            raise
        # Open for as long as we write: a process that closes any descriptor of a file loses its locks on it.
        self._descriptor = descriptor
        locked = _lock(descriptor)
        self.path = path
        self.size = size
        self.capacity = capacity
        self.dropped = 0
        self._head = 0
        self._events = 0
        self.largest = capacity // LARGEST_FRAME_SHARE
        """Most words of a frame; what is larger is given up."""
        words = memoryview(self._map).cast("B").cast("Q")
        self._header = words[: layout.HEADER_BYTES // layout.WORD]
        self._body = words[layout.HEADER_BYTES // layout.WORD :]
        # The first store to a page costs many times the later ones: make it here.
        for first in range(0, capacity, mmap.PAGESIZE // layout.WORD):
            self._body[first] = 0
        for field, content in (
            (layout.BOOT_ID_BYTES, origin.boot_id),
            (layout.VLLM_VERSION_BYTES, origin.vllm_version.encode()),
            (layout.PLUGIN_VERSION_BYTES, origin.plugin_version.encode()),
        ):
            room = field.stop - field.start
            self._map[field] = content[:room].ljust(room, b"\0")
        header = self._header
        header[layout.SCHEMA_WORD] = layout.SCHEMA
        header[layout.CAPACITY_WORD] = capacity
        header[layout.PID_WORD] = os.getpid()
        header[layout.START_TIME_WORD] = origin.start_time
        header[layout.ENGINE_INDEX_WORD] = origin.engine_index
        header[layout.LOCKED_WORD] = int(locked)
        header[layout.ROLE_WORD] = layout.ROLES.index(origin.role)
        header[layout.END_WORD] = layout.ENDS.index(layout.NOT_ENDED)
        self._beat()
        header[layout.MAGIC_WORD] = layout.MAGIC

    def _beat(self) -> None:
        now = time.monotonic_ns()
        self._header[layout.CLOCK_OFFSET_WORD] = time.time_ns() - now & layout.WORD_MASK
        self._header[layout.HEARTBEAT_WORD] = now

    def set_patch_state(self, state: str) -> None:
        """Say whether the fix is in force; ``state`` is one of ``layout.PATCH_STATES``."""
        self._header[layout.PATCH_STATE_WORD] = layout.PATCH_STATES.index(state)

    def write(self, payload: list[int] | array[int], events: int) -> bool:
        """Publish one frame; False where it was given up, and its events counted as dropped.

        Args:
            payload: Words, each in [0, 2**64).
            events: How many events it holds.
        """
        head, n = self._head, len(payload) + layout.FRAME_HEADER_WORDS
        if n > self.largest:
            self.drop(events)
            return False
        self._store(head, n, layout.frame(head, self._events, events, payload))
        self._events += events
        self._header[layout.EVENTS_WORD] = self._events
        self._beat()
        self._head = self._header[layout.HEAD_WORD] = head + n
        return True

    def _store(self, head: int, n: int, words: array[int]) -> None:
        self._header[layout.CLAIM_WORD] = head + n
        start = head % self.capacity
        room = self.capacity - start
        source = memoryview(words)
        if n <= room:
            self._body[start : start + n] = source
        else:
            self._body[start:] = source[:room]
            self._body[: n - room] = source[room:]

    def drop(self, events: int) -> None:
        """Count events that could not be written."""
        self.dropped += events
        self._header[layout.DROPPED_WORD] = self.dropped

    def end(self, how: str, reason: str = "") -> None:
        """Say how the process ends, one of ``layout.ENDS``; what is said first stands."""
        if self._header[layout.END_WORD] != layout.ENDS.index(layout.NOT_ENDED):
            return
        field = layout.END_REASON_BYTES
        room = field.stop - field.start
        self._map[field] = reason.encode(errors="replace")[:room].ljust(room, b"\0")
        self._header[layout.END_TIME_WORD] = time.monotonic_ns()
        self._header[layout.END_WORD] = layout.ENDS.index(how)

    def close(self) -> None:
        """Let go of the mapping, in order; the file stays, for a reader or a post-mortem."""
        self.end(layout.ENDED_IN_ORDER)
        self._header.release()
        self._body.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._descriptor)


def _lock(descriptor: int) -> bool:
    """Hold a write lock on byte 0 until the process ends; False where this filesystem has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError:
        return False
    return True
