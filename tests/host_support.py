# SPDX-License-Identifier: Apache-2.0
"""What the tests of vllm_kvfix.host share: process tables and cgroups as files, and processes that do as told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

KIB = 1024
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40


def write_tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files, by their paths below ``folder``; returns ``folder``."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def stat_text(
    start_time: int = 5000, state: str = "S", stack: int = 0x7FFC0000, comm: str = "VLLM::Engine (x) Z"
) -> str:
    """A ``/proc/PID/stat``."""
    before = f"77 ({comm}) {state} " + "0 " * 18
    return f"{before}{start_time} 1000 20 18446744073709551615 1 1 {stack} 0 0 0 0\n"


def mapping_text(  # noqa: PLR0913  # what a mapping has
    start: int,
    size: int,
    access: str = "rw-p",
    path: str = "",
    *,
    rss: int = 0,
    flags: str = "rd wr mr mw me ac",
) -> str:
    """One mapping of a ``/proc/PID/smaps``, all of its pages private and dirty; ``size`` and ``rss`` in bytes."""
    kib = rss // KIB
    number = 4711 if path.startswith("/") else 0
    lines = [f"{start:08x}-{start + size:08x} {access} 00000000 00:00 {number}".ljust(73) + path]
    amounts = {"Size": size // KIB, "KernelPageSize": 4, "MMUPageSize": 4, "Rss": kib, "Pss": kib, "Pss_Dirty": kib}
    amounts |= {"Shared_Clean": 0, "Shared_Dirty": 0, "Private_Clean": 0, "Private_Dirty": kib, "Referenced": kib}
    amounts |= {"Anonymous": kib, "LazyFree": 0, "Private_Hugetlb": 0, "Swap": 0, "SwapPss": 0, "Locked": 0}
    lines += [f"{name + ':':<16}{amount:>8} kB" for name, amount in amounts.items()]
    return "\n".join([*lines, "THPeligible:    0", f"VmFlags: {flags} ", ""])


CHILD = """
import ctypes, mmap, os, sys, tempfile, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
held, never = [], threading.Event()

def malloc(size, piece=50_000):
    for _ in range(size // piece):
        libc.memset(libc.malloc(piece), 1, piece)

def in_thread(work, *arguments):
    done = threading.Event()
    def run():
        work(*arguments)
        done.set()
        never.wait()
    threading.Thread(target=run, daemon=True).start()
    done.wait()

def mapped(descriptor, size, **options):
    found = mmap.mmap(descriptor, size, **options)
    for at in range(0, size, 4096):
        found[at] = 1
    held.append(found)

def private(size):
    mapped(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

def of_file(size, folder, suffix=""):
    with tempfile.NamedTemporaryFile(dir=folder, suffix=suffix) as file:
        file.truncate(size)
        mapped(file.fileno(), size)

def memfd(size):
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size)
    mapped(descriptor, size)

def stack(size):
    "Touches the far end of this thread's own stack."
    attributes, begin, whole = (ctypes.c_char * 256)(), ctypes.c_void_p(), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_void_p
    assert not libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes)
    assert not libc.pthread_attr_getstack(attributes, ctypes.byref(begin), ctypes.byref(whole))
    assert whole.value > size + 65536
    libc.memset(begin.value + 65536, 1, size)

def forked(work=bool, *arguments):
    "This process goes on as its own child, in which the kernel parts what the parent had joined."
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    work(*arguments)

print(os.getpid(), flush=True)
for line in sys.stdin:
    exec(line)
    print(os.getpid(), flush=True)
"""


class Child:
    """A process that runs a line of Python when told, and is quiet else."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ended = False
        self.pid = self._answer()

    def run(self, line: str) -> None:
        """Have a line run, and wait for its end; ``pid`` is of the process that ran it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self.pid = self._answer()

    def end(self, *, wait: bool = True) -> None:
        """Kill it; without ``wait`` a zombie is left, and there is one for sure when this returns."""
        if not self._ended:
            self._ended = True
            os.kill(self._process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if wait:
            with self._process:  # closes its pipes, and waits for it
                pass

    def _answer(self) -> int:
        assert self._process.stdout is not None
        watchdog = threading.Timer(60, self._process.kill)
        watchdog.start()
        try:
            return int(self._process.stdout.readline())
        finally:
            watchdog.cancel()


@contextlib.contextmanager
def child() -> Iterator[Child]:
    """A :class:`Child` that is gone afterwards."""
    made = Child()
    try:
        yield made
    finally:
        made.end()
