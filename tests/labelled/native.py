# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002, D102  # a scene overrides hooks of Scene, which says what each is for
"""Leaks that no container holds: memory of C code, of other threads, of the kernel, and what glibc keeps."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from typing import TYPE_CHECKING, ClassVar

from tests.labelled import truth
from tests.labelled.clock import FOUR_HOURS, TEN_HOURS
from tests.labelled.scenes import WORKER, Scene
from tests.labelled.stage import Load

if TYPE_CHECKING:
    from tests.labelled.stage import Stage

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.realloc.restype = ctypes.c_void_p
_libc.realloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

PAGE = mmap.PAGESIZE


def malloc(size: int) -> int:
    """So many bytes of C's, written to."""
    address: int = _libc.malloc(size)
    _libc.memset(address, 1, size)
    return address


class Malloc(Scene):
    """C code that forgets to free something of each request."""

    pace = TEN_HOURS
    traffic = Load(requests=12, aborted=0.1)
    size: ClassVar[int] = 96_000

    def set_up(self, stage: Stage) -> None:
        self._addresses: list[int] = []

    def arrived(self, stage: Stage, name: str) -> None:
        self._addresses.append(malloc(self.size))
        self.lost(self.size)

    def addresses(self) -> list[int]:
        return self._addresses


class MallocInWorker(Malloc):
    """The same in a worker."""

    role = WORKER


class MallocInThread(Malloc):
    """The same in a thread other than the main one, so in an arena of its own, which is a heap as well."""

    def set_up(self, stage: Stage) -> None:
        super().set_up(stage)
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._made.put(malloc(self._asked.get()))

    def arrived(self, stage: Stage, name: str) -> None:
        self._asked.put(self.size)
        self._addresses.append(self._made.get())
        self.lost(self.size)

    def category(self) -> str | None:
        return "heap" if all(map(truth.is_in_arena, self._addresses)) else super().category()


class AnonymousMmap(Malloc):
    """Memory that was asked of the kernel, past malloc."""

    def set_up(self, stage: Stage) -> None:
        super().set_up(stage)
        self._pieces: list[mmap.mmap] = []

    def arrived(self, stage: Stage, name: str) -> None:
        size = 24 * PAGE
        piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece.write(b"\1" * size)
        self._pieces.append(piece)
        self.lost(size)

    def addresses(self) -> list[int]:
        return [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in self._pieces]


class Memfd(Malloc):
    """A file in memory that is shared with other processes and only ever filled further."""

    role = WORKER
    most: ClassVar[int] = 2 << 30  # of which what is never touched takes nothing

    def set_up(self, stage: Stage) -> None:
        super().set_up(stage)
        file = os.memfd_create("kv-transfer")
        os.ftruncate(file, self.most)
        self._shared = mmap.mmap(file, self.most)
        os.close(file)

    def arrived(self, stage: Stage, name: str) -> None:
        size = 24 * PAGE
        self._shared[self.leaked : self.leaked + size] = b"\1" * size
        self.lost(size)

    def addresses(self) -> list[int]:
        return [ctypes.addressof(ctypes.c_char.from_buffer(self._shared))]


class RetainedAfterBurst(Scene):
    """A burst of small pieces, all freed again but for one on top, so that glibc keeps what lies below it."""

    pace = FOUR_HOURS
    traffic = Load(requests=12, aborted=0.1)
    begin: ClassVar[int] = 40
    length: ClassVar[int] = 5

    def set_up(self, stage: Stage) -> None:
        self._pieces: list[int] = []
        self._freed: list[int] = []

    def before_tick(self, stage: Stage, tick: int) -> None:
        if self.begin <= tick < self.begin + self.length:
            self._pieces += [malloc(3000) for _ in range(10_000)]
        elif tick == self.begin + self.length:
            malloc(3000)  # stays
            for piece in self._pieces:
                _libc.free(piece)
            self._freed, self._pieces = self._pieces[:], []

    def addresses(self) -> list[int]:
        return self._freed


class Fragmentation(Scene):
    """Buffers that are cut down to a few bytes after use, each tick's a little larger: no hole ever fits again."""

    pace = TEN_HOURS
    traffic = Load(requests=12, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._kept: list[int] = []

    def before_tick(self, stage: Stage, tick: int) -> None:
        pieces = [malloc(16_384 + 64 * (tick + 10)) for _ in range(64)]
        self._kept += [_libc.realloc(piece, 24) for piece in pieces]

    def addresses(self) -> list[int]:
        return self._kept
