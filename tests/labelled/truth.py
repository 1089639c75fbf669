# SPDX-License-Identifier: Apache-2.0
"""What is so, found out without the code under test: in which mapping an object lies, and how many bytes it has."""

from __future__ import annotations

import bisect
import ctypes
import re
import sys
from pathlib import Path
from typing import Any

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) \d+ *(.*)")
_LIST_ITEMS = 24  # of a PyListObject: reference count, type, size, and then the pointer to its items
_SIZE_WORD, _NON_MAIN_ARENA = 8, 4
_SHARED = ("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero")  # noqa: S108  how the kernel names them


def category_of(addresses: list[int]) -> str | None:
    """The kind of mapping, in the words of `events.CATEGORIES`, in which most of these addresses lie."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [(int(found[1], 16), int(found[2], 16), found[4]) for line in lines if (found := _MAPPING.match(line))]
    begins = [begin for begin, _, _ in maps]
    counts: dict[str, int] = {}
    for address in addresses:
        at = bisect.bisect_right(begins, address) - 1
        if at >= 0 and address < maps[at][1]:
            kind = _kind(maps[at][2])
            counts[kind] = counts.get(kind, 0) + 1
    return max(counts, key=lambda kind: counts[kind]) if counts else None


def _kind(name: str) -> str:
    if name == "[heap]":
        return "heap"
    if name.startswith(_SHARED):
        return "shared_memory"
    return "files" if name.startswith("/") else "anonymous"


def is_in_arena(address: int) -> bool:
    """Whether glibc gave this piece out of a thread's arena: a flag in the word before it says so."""
    return bool(ctypes.c_size_t.from_address(address - _SIZE_WORD).value & _NON_MAIN_ARENA)


def items_of(thing: list[Any]) -> int:
    """The address of a list's items, which lie apart from the list itself."""
    return ctypes.c_void_p.from_address(id(thing) + _LIST_ITEMS).value or 0


def size_of(*things: object) -> int:
    """The bytes of these objects themselves, nothing that they refer to, as the allocators round them."""
    return sum((sys.getsizeof(thing) + 15) & ~15 for thing in things)
