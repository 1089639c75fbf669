# SPDX-License-Identifier: Apache-2.0
"""vllm_kvfix.host.procfs: what the small files of the process table say, and what they do not."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host_support import KIB, TIB, child, stat_text, write_tree
from vllm_kvfix import host
from vllm_kvfix.events import SCOPES

if TYPE_CHECKING:
    from pathlib import Path

STATUS = """Name:\tVmRSS: 7 kB
Umask:\t0022
State:\tS (sleeping)
Pid:\t77
VmPeak:\t   90000 kB
VmHWM:\t    5000 kB
VmRSS:\t    4000 kB
RssAnon:\t    1000 kB
RssFile:\t    2000 kB
RssShmem:\t    1000 kB
VmSwap:\t       0 kB
Threads:\t12
"""


def status(folder: Path, text: str | bytes) -> dict[str, int]:
    """What is made of that file."""
    return host.status(77, write_tree(folder, {"77/status": text}))


def test_status_gives_every_figure_in_bytes(tmp_path: Path) -> None:
    """Under the names of the events, whatever the program calls itself; swap of 0 is a figure."""
    figures = status(tmp_path, STATUS)
    assert set(figures) == set(SCOPES["status"])
    amounts = {name: value // KIB for name, value in figures.items() if name != "threads_count"}
    assert amounts == {"rss": 4000, "anon": 1000, "file": 2000, "shmem": 1000, "swap": 0, "peak": 5000}
    assert figures["threads_count"] == 12


def test_status_leaves_out_what_an_older_kernel_does_not_say(tmp_path: Path) -> None:
    """RssAnon and its kin came with 4.5."""
    text = "\n".join(line for line in STATUS.splitlines() if not line.startswith(("Rss", "Threads")))
    assert set(status(tmp_path, text)) == {"rss", "peak", "swap"}


def test_status_does_not_believe_a_program_that_calls_itself_a_figure(tmp_path: Path) -> None:
    """One of the kernel's threads has none, whatever its name."""
    assert status(tmp_path, "Name:\tVmSwap: 7 kB\nState:\tS (sleeping)\nThreads:\t1\n") == {"threads_count": 1}


def test_status_holds_terabytes(tmp_path: Path) -> None:
    """4 TB, and the most that a line can say: both fit into the 64 bits of an event's word."""
    assert status(tmp_path, f"VmRSS:\t {4 * TIB // KIB} kB\n")["rss"] == 4 * TIB
    assert status(tmp_path, f"VmRSS:\t {'9' * 16} kB\n")["rss"] < 1 << 64
    assert status(tmp_path, f"VmRSS:\t {'9' * 17} kB\n") == {}


@pytest.mark.parametrize("state", ["Z (zombie)", "X (dead)"])
def test_status_refuses_a_zombie(tmp_path: Path, state: str) -> None:
    """It has no memory lines; nothing is not 0."""
    with pytest.raises(host.UnreadableError, match="it has ended and awaits its parent"):
        status(tmp_path, f"Name:\tx\nState:\t{state}\nThreads:\t1\n")


def test_status_of_this_process_is_what_psutil_says() -> None:
    """RSS within 1 %, since both change it by asking; threads exactly."""
    figures, process = host.status(), psutil.Process()
    assert figures["rss"] == pytest.approx(process.memory_info().rss, rel=0.01)
    assert figures["threads_count"] == process.num_threads()
    assert figures["peak"] >= figures["rss"] == figures["anon"] + figures["file"] + figures["shmem"]


def test_start_time_is_behind_a_name_that_tries_to_hide_it(tmp_path: Path) -> None:
    """A name may hold brackets, blanks and newlines."""
    proc = write_tree(tmp_path, {"77/stat": stat_text(start_time=123, comm="a) Z 1 (b\n) S")})
    assert host.start_time(77, proc) == 123


def test_start_time_of_a_real_process_is_that_of_psutil() -> None:
    """Ticks since boot, of this process and of another."""
    with child() as other:
        for pid in (os.getpid(), other.pid):
            ticks = psutil.Process(pid).create_time() - psutil.boot_time()
            assert host.start_time(pid) / os.sysconf("SC_CLK_TCK") == pytest.approx(ticks, abs=1.5)
        assert host.start_time("self") == host.start_time(os.getpid())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (stat_text(state="Z"), "it has ended and awaits its parent"),
        (stat_text(state="X"), "it has ended and awaits its parent"),
        ("", "malformed"),
        ("77 (x) S 1 2", "malformed"),
        ("77 (x) S " + "? " * 40, "malformed"),
    ],
)
def test_start_time_refuses_zombies_and_nonsense(tmp_path: Path, text: str, reason: str) -> None:
    """With the reason."""
    with pytest.raises(host.UnreadableError, match=reason):
        host.start_time(77, write_tree(tmp_path, {"77/stat": text}))


def test_a_process_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Of each file."""
    for read in (host.status, host.start_time):
        with pytest.raises(host.UnreadableError, match="no such process"):
            read(77, tmp_path)


def test_a_file_that_fails_is_told(tmp_path: Path) -> None:
    """In the system's words, whatever it is: here a folder."""
    (tmp_path / "77/status").mkdir(parents=True)
    with pytest.raises(host.UnreadableError, match="Is a directory"):
        host.status(77, tmp_path)


@settings(deadline=None)
@given(text=st.lists(st.one_of(st.sampled_from(STATUS.splitlines()), st.text(max_size=30)), max_size=20))
def test_whatever_status_says_there_are_sound_figures_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, text: list[str]
) -> None:
    """Known names, nothing below zero; or UnreadableError."""
    try:
        figures = status(tmp_path_factory.getbasetemp() / "status", "\n".join(text).encode(errors="replace"))
    except host.UnreadableError:
        return
    assert set(figures) <= set(SCOPES["status"])
    assert all(0 <= value < 1 << 64 for value in figures.values())


@settings(deadline=None)
@given(text=st.binary(max_size=300))
def test_whatever_stat_says_there_is_a_time_or_a_reason(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    """Not below zero."""
    proc = write_tree(tmp_path_factory.getbasetemp() / "stat", {"77/stat": text})
    with contextlib.suppress(host.UnreadableError):
        assert host.start_time(77, proc) >= 0


def test_start_time_is_never_negative(tmp_path: Path) -> None:
    """A minus sign is nonsense."""
    with pytest.raises(host.UnreadableError, match="malformed"):
        host.start_time(77, write_tree(tmp_path, {"77/stat": stat_text(start_time=-5)}))


def test_the_machines_memory(tmp_path: Path) -> None:
    """In bytes; from this machine as psutil says it."""
    proc = write_tree(tmp_path, {"meminfo": f"MemTotal:  {4 * TIB // KIB} kB\nMemFree:  5 kB\nMemAvailable:  7 kB\n"})
    assert host.host_memory(proc) == {"total": 4 * TIB, "available": 7 * KIB}
    assert host.host_memory()["total"] == psutil.virtual_memory().total
    with pytest.raises(host.UnreadableError, match="meminfo"):
        host.host_memory(tmp_path / "nowhere")
