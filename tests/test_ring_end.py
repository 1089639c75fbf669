# SPDX-License-Identifier: Apache-2.0
"""own_ring: a ring says how its process ended, whichever way that was, and says nothing where it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import RingReader
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_kvfix.ring.reader import Header

_PROGRAM = """
import multiprocessing, os, signal, sys
from vllm_kvfix import own_ring

def end(how, folder):
    global writer
    writer = own_ring.open_ring({"VLLM_KVFIX_RING_DIR": folder}, "0.25.1")
    writer.write([1], 1)
    if how == "raise":
        raise MemoryError("a secret")
    if how == "exit":
        sys.exit(0)
    if how == "exit 3":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abandon":
        os._exit(0)
    if how == "close":
        writer.close()
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    method, how, folder = sys.argv[1:]
    if method == "main":
        end(how, folder)
    else:
        child = multiprocessing.get_context(method).Process(target=end, args=(how, folder))
        child.start()
        child.join()
"""


def run(folder: Path, method: str, how: str) -> Header:
    """The header of a ring whose process has ended so."""
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    rings = folder / "rings"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, program, method, how, rings], env=environ, stderr=subprocess.DEVNULL, check=False, timeout=60
    )
    (path,) = rings.glob("*.ring")
    reader = RingReader(path)
    reader.close()
    return reader.header


METHODS = ["main", "fork", "spawn", "forkserver"]


@pytest.mark.parametrize("method", METHODS)
def test_an_end_in_order_is_said(tmp_path: Path, method: str) -> None:
    """A process whose program comes to its end says so, after its last frame, in a child of any kind, too."""
    header = run(tmp_path, method, "return")
    assert (header.end, header.end_reason) == (layout.ENDED_IN_ORDER, "")
    assert header.end_ns >= header.heartbeat_ns


@pytest.mark.parametrize("method", METHODS)
def test_an_end_by_an_exception_names_it_and_keeps_its_words(tmp_path: Path, method: str) -> None:
    """The type is said, and never the message, which may hold what a user sent."""
    header = run(tmp_path, method, "raise")
    assert (header.end, header.end_reason) == (layout.ENDED_BY_EXCEPTION, "builtins.MemoryError")


@pytest.mark.parametrize(
    ("how", "end", "reason"),
    [
        ("exit", layout.ENDED_IN_ORDER, ""),
        ("exit 3", layout.ENDED_BY_EXCEPTION, "builtins.SystemExit 3"),
        ("kill", layout.NOT_ENDED, ""),
        ("abandon", layout.NOT_ENDED, ""),
        ("close", layout.ENDED_IN_ORDER, ""),
    ],
)
def test_how_a_child_ends(tmp_path: Path, how: str, end: str, reason: str) -> None:
    """sys.exit is in order but for a code; a kill and os._exit say nothing; a ring that was closed stays in order."""
    header = run(tmp_path, "fork", how)
    assert (header.end, header.end_reason) == (end, reason)


def test_what_is_said_first_stands(tmp_path: Path) -> None:
    """An exception is not made an end in order by the closing after it; a long type is cut."""
    writer = RingWriter(tmp_path / "a.ring", 64, Origin(1, bytes(16)))
    assert RingReader(writer.path).header.end == layout.NOT_ENDED
    writer.end(layout.ENDED_BY_EXCEPTION, "x" * 500)
    writer.end(layout.ENDED_IN_ORDER)
    writer.close()
    header = RingReader(writer.path).header
    assert (header.end, header.end_reason) == (layout.ENDED_BY_EXCEPTION, "x" * 128)


def test_a_ring_of_a_release_that_says_no_end_is_unknown(tmp_path: Path) -> None:
    """Zero, and a word that this reader does not know, both mean that nothing is known."""
    writer = RingWriter(tmp_path / "a.ring", 64, Origin(1, bytes(16)))
    for word in (0, 99, layout.WORD_MASK):
        writer._header[layout.END_WORD] = word
        assert RingReader(writer.path).header.end == layout.END_UNKNOWN
