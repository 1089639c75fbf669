# SPDX-License-Identifier: Apache-2.0
"""Which kind of memory a mapping is, told by its name, its flags and its neighbours.

What the kernel does not name must be guessed from the lay-out that glibc gives it::

    heap of a thread    |rw-p ...|---p     ...|      begins and ends at multiples of 64 MiB; grows from left to right,
                        0                     64M    and consists of rw-p alone once it is full
    stack of a thread   |---p|rw-p .....|            a guard of a few pages below, 8 MiB unless told otherwise

The kernel joins neighbours that are alike, and parts what is alike after a fork. Heaps are mapped without reservation
(flag ``nr``), stacks not, and since Linux 6.7 stacks never in huge pages (``nh``), so these two are never joined. Full
heaps are joined with the heap behind them; a stack on an older kernel with any mapping behind it.
"""

from __future__ import annotations

from vllm_kvfix.events import CATEGORIES
from vllm_kvfix.ring.place import SUFFIX

# glibc's HEAP_MAX_SIZE where pointers have 64 bits.
HEAP = 64 << 20
# glibc's guard is a page, of 64 KiB at most, unless the program asks for more.
LARGEST_GUARD = 1 << 20
STACK = 8 << 20
_KIB = 1024

_DELETED = b" (deleted)"
_RING = SUFFIX.encode()
# By the first match. A device that is no memory is a driver's.
_BY_PREFIX = (
    (b"/dev/shm/", "shared_memory"),
    (b"/memfd:", "shared_memory"),
    (b"/SYSV", "shared_memory"),
    (b"/dev/zero", "shared_memory"),
    (b"/dev/hugepages/", "files"),
    (b"/dev/", "driver"),
    (b"anon_inode:", "driver"),
    (b"/anon_inode:", "driver"),
    (b"/dmabuf:", "driver"),
    (b"/", "files"),
    (b"[heap]", "heap"),
    (b"[stack", "stacks"),
    (b"[anon_shmem:", "shared_memory"),
    (b"[anon: glibc: malloc arena", "heap"),
    (b"[anon: glibc: pthread", "stacks"),
    (b"[anon:", "anonymous"),
)
# Kernels call a private mapping of these by their names; what is in it is anonymous memory like any other.
_ANONYMOUS_IF_PRIVATE = (b"/anon_hugepage", b"/dev/zero")


class Mapping:
    """One mapping: where it is, what may be done with it, its path or the kernel's name for it, and its RSS in KiB."""

    __slots__ = ("access", "end", "flags", "path", "rss", "start")

    def __init__(self, start: int, end: int, access: bytes, path: bytes) -> None:
        self.start = start
        self.end = end
        self.access = access
        self.path = path
        self.rss = 0
        self.flags = b""


class Sorter:
    """Adds up the RSS of mappings by category; they are given in the order of their addresses.

    Keeps nothing but sums, so that it takes no more memory for a million mappings than for one.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(CATEGORIES, 0)
        self._guard_end = -1
        # Neighbours that may together be the heap of a thread: where they begin and end, their RSS, whether unreserved.
        self._start = self._end = self._rss = 0
        self._unreserved = False

    def add(self, mapping: Mapping) -> None:
        """Take the next mapping."""
        if mapping.path or mapping.access.endswith(b"s"):
            self._sums[_category(mapping)] += mapping.rss
        elif mapping.access == b"---p":
            self._add_unused(mapping)
        elif mapping.access == b"rw-p":
            self._add_used(mapping)
        else:
            self._sums["anonymous"] += mapping.rss

    def sums(self) -> dict[str, int]:
        """KiB by category."""
        self._settle(is_heap=self._is_full_heap())
        return dict(self._sums)

    def _add_unused(self, mapping: Mapping) -> None:
        """What can be a heap's unused rest, or the guard of a stack; in both there may be pages from better days."""
        size = mapping.end - mapping.start
        is_heap = mapping.start == self._end and self._start % HEAP == mapping.end % HEAP == 0 and size < HEAP
        if is_heap:
            self._rss += mapping.rss
        else:
            self._sums["anonymous"] += mapping.rss
            self._guard_end = mapping.end if size <= LARGEST_GUARD else -1
        self._settle(is_heap=is_heap or self._is_full_heap())

    def _add_used(self, mapping: Mapping) -> None:
        unreserved = b" nr" in mapping.flags
        never_huge = b" nh" in mapping.flags
        if not unreserved and (never_huge or mapping.start == self._guard_end):
            self._add_stack(mapping, joined=not never_huge)
            return
        if mapping.start != self._end or unreserved != self._unreserved:
            self._settle(is_heap=self._is_full_heap())
            self._start, self._unreserved = mapping.start, unreserved
        self._end = mapping.end
        self._rss += mapping.rss

    def _add_stack(self, mapping: Mapping, *, joined: bool) -> None:
        """A stack, perhaps with a mapping behind it that the kernel joined to it.

        That one is used as a whole as a rule, a stack a little, so the RSS is the other's as far as it has room for it.
        """
        behind = min(mapping.rss, max(0, mapping.end - mapping.start - STACK) // _KIB) if joined else 0
        self._sums["stacks"] += mapping.rss - behind
        self._sums["anonymous"] += behind

    def _is_full_heap(self) -> bool:
        """Whether the run is of heaps without an unused rest: reserved memory would have to be somebody else's."""
        return self._unreserved and self._start % HEAP == self._end % HEAP == 0

    def _settle(self, *, is_heap: bool) -> None:
        self._sums["heap" if is_heap else "anonymous"] += self._rss
        self._start = self._end = self._rss = 0


def _category(mapping: Mapping) -> str:
    """The category of a mapping that has a name, or that is shared."""
    path = mapping.path.removesuffix(_DELETED)
    private = mapping.access.endswith(b"p")
    if path.endswith(_RING):
        return "ring"
    if private and path in _ANONYMOUS_IF_PRIVATE:
        return "anonymous"
    if not path or path.startswith(b"/anon_hugepage"):
        return "shared_memory"
    return next((category for prefix, category in _BY_PREFIX if path.startswith(prefix)), "rest")
