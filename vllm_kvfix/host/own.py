# SPDX-License-Identifier: Apache-2.0
"""What only a process itself can tell of its memory: what glibc's malloc and CPython have handed out."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from vllm_kvfix.host import procfs
from vllm_kvfix.host.errors import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_GLIBC = re.compile(r"libc(-[\d.]+)?\.so")
_ALLOCATORS = re.compile(rb"/(lib(?:tcmalloc|jemalloc|mimalloc|snmalloc|hoard|rpmalloc|scudo)[\w-]*)")


def malloc() -> dict[str, int]:
    """What this process's malloc has handed out, keeps of freed memory, and has mapped singly, in bytes.

    glibc locks one arena after the other for it and looks at every free piece: slow where there are many.

    Raises:
        UnreadableError: malloc is not glibc's, or a glibc before 2.33, whose figures end at 2 GiB.
    """
    ask = _mallinfo2()
    if isinstance(ask, str):
        raise UnreadableError(ask)
    info = ask()
    return {"in_use": info.uordblks + info.hblkhd, "retained": info.fordblks, "mapped": info.hblkhd}


@functools.cache
def _mallinfo2() -> Callable[[], Any] | str:
    """The function of glibc, or why there is none to ask."""
    try:
        import ctypes  # noqa: PLC0415  # half a millisecond that a process without this scope need not pay
    except ImportError:
        return "this Python has no ctypes"
    program = ctypes.CDLL(None)
    owner = _owner(ctypes, program)
    if not _GLIBC.match(owner):
        return f"malloc is {owner.partition('.')[0]}'s, which mallinfo2 knows nothing of"
    if not hasattr(program, "mallinfo2"):
        return "this glibc has no mallinfo2, which came with 2.33"
    info = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in _FIELDS]})
    ask = program.mallinfo2
    ask.restype = info
    ask.argtypes = []
    return ask


def _owner(ctypes: Any, program: Any) -> str:
    """The name of the file that malloc comes from: of all that offer one, the first is in front."""
    info = (ctypes.c_void_p * 4)()  # Dl_info, whose first field is the path
    ask = getattr(program, "dladdr", None)
    found = ask(ctypes.cast(program.malloc, ctypes.c_void_p), ctypes.byref(info)) if ask else 0
    path = ctypes.string_at(info[0]) if found and info[0] else b""
    name = os.path.basename(os.fsdecode(path))  # noqa: PTH119  # a word is wanted, no file
    # A program that is not relocatable shows an entry of its own for the C library's function.
    return name if ".so" in name else _allocator_in(procfs.read("self", "maps", procfs.PROC)) or "libc.so"


def _allocator_in(maps: bytes) -> str:
    """The first of the well-known allocators among the files that a process has mapped; none: empty."""
    found = _ALLOCATORS.search(maps)
    return found[1].decode() if found else ""


def python() -> dict[str, int]:
    """What CPython counts of this process's objects; another Python leaves out what it does not count.

    ``blocks_count`` asks each of pymalloc's pools with the GIL held, some ms where there is a GB of them. Objects that
    ``gc.freeze`` set aside are not counted: that would visit each one, and stop an engine for a tenth of a second.
    """
    found: dict[str, int] = {}
    if hasattr(sys, "getallocatedblocks"):
        found["blocks_count"] = sys.getallocatedblocks()
    if hasattr(gc, "get_count"):
        found.update(zip(("gen0_count", "gen1_count", "gen2_count"), gc.get_count(), strict=False))
    if hasattr(gc, "get_stats"):
        found["collections_count"] = sum(generation["collections"] for generation in gc.get_stats())
    return found
