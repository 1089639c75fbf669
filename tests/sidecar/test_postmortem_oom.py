# SPDX-License-Identifier: Apache-2.0
"""oom, kernel_log: a death for memory is proved by what was counted or logged, and never guessed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvfix_sidecar import kernel_log, oom
from vllm_kvfix_sidecar.kernel_log import KernelLine
from vllm_kvfix_sidecar.oom import KillCounts, Oom, Use, Witness, judge, read_witness
from vllm_kvfix_sidecar.process_table import ProcessKey

GIB = 1 << 30
FULL = Use(1.99 * GIB, 2.0 * GIB, "cgroup", 2.0, 1.99 * GIB)
EMPTY = Use(0.2 * GIB, 2.0 * GIB, "cgroup", 2.0, 0.2 * GIB)
RISING = Use(1.5 * GIB, 2.0 * GIB, "cgroup", 4.0, 1.95 * GIB)
BY_CGROUP = KernelLine("Memory cgroup out of memory: Killed process 7 (VLLM)", oom=True, by_cgroup=True)
CRASHED = KernelLine("VLLM[7]: segfault at 0", oom=False, by_cgroup=False)


@pytest.mark.parametrize(
    ("witness", "use", "deaths", "expected"),
    [
        (Witness("/c", before=0, after=1), EMPTY, 1, Oom.YES),
        (Witness("/c", before=3, after=3), FULL, 1, Oom.NO),
        (Witness("/c", before=0, after=1), FULL, 2, Oom.PROBABLY),
        (Witness("/c", before=0, after=2), FULL, 2, Oom.YES),
        (Witness("/c", own=False, before=0, after=1), FULL, 1, Oom.PROBABLY),
        (Witness("/c", before=0), FULL, 1, Oom.PROBABLY),
        (Witness("/c", before=0), EMPTY, 1, Oom.UNKNOWN),
        (Witness(kernel=BY_CGROUP), None, 1, Oom.YES),
        (Witness("/c", before=0, after=0, kernel=BY_CGROUP), EMPTY, 1, Oom.YES),
        (Witness(kernel=CRASHED), FULL, 1, Oom.NO),
        (None, FULL, 1, Oom.PROBABLY),
        (None, RISING, 1, Oom.PROBABLY),
        (None, EMPTY, 1, Oom.UNKNOWN),
        (None, None, 1, Oom.UNKNOWN),
    ],
)
def test_what_proves_what(witness: Witness | None, use: Use | None, deaths: int, expected: Oom) -> None:
    """Counts before and after decide, and the kernel's log above them; figures alone never give more than probably."""
    found = judge(witness, use, deaths=deaths)
    assert found.oom is expected
    assert found.why
    assert len(set(found.evidence)) == len(found.evidence)


def test_the_figures_are_named_with_their_source() -> None:
    """Count, log and ring are each told as a sentence that says where it comes from."""
    use = Use(1.99 * GIB, 2.0 * GIB, "cgroup", 2.0, 1.99 * GIB, stalled_s=3.0)
    told = judge(Witness("/c", before=0, after=1, kernel=BY_CGROUP), use).evidence
    assert told == (
        "its cgroup's oom_kill went from 0 to 1 (seen by a sidecar)",
        "the kernel's log: Memory cgroup out of memory: Killed process 7 (VLLM)",
        "at its last word 1.99 GiB of the cgroup's 2 GiB were used (100 %), 2 seconds before (its ring)",
        "for 3 seconds of its last seconds all in its cgroup waited for memory (PSI)",
    )


class TestKillCounts:
    """On a canned proc and cgroup folder."""

    @pytest.fixture
    def proc(self, tmp_path: Path) -> Path:
        """A process 7 in /pod/box of version 2."""
        (tmp_path / "proc" / "7").mkdir(parents=True)
        (tmp_path / "proc" / "7" / "cgroup").write_text("0::/pod/box\n")
        (tmp_path / "proc" / "7" / "stat").write_text(f"7 (VLLM) S {'0 ' * 18}99 0\n")
        return tmp_path / "proc"

    @pytest.fixture
    def box(self, tmp_path: Path) -> Path:
        """Its cgroup."""
        box = tmp_path / "cgroup" / "pod" / "box"
        box.mkdir(parents=True)
        (tmp_path / "cgroup" / "cgroup.controllers").write_text("memory\n")
        for folder in (box, box.parent):
            (folder / "memory.stat").write_text("anon 1\n")
            self.count(folder, 0)
        return box

    @staticmethod
    def count(folder: Path, kills: int) -> None:
        """The kernel has counted so many."""
        (folder / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")

    def test_the_count_of_its_own_cgroup_is_compared(self, proc: Path, box: Path) -> None:
        """What was counted while it lived, and what is counted after it; the second question knows nothing more."""
        counts = KillCounts(proc, box.parents[1])
        counts.look("a", ProcessKey(7, 99))
        self.count(box, 1)
        assert counts.after("a", time.monotonic_ns()) == Witness(str(box), own=True, before=0, after=1)
        assert counts.after("a", time.monotonic_ns()) == Witness()

    def test_a_kill_that_was_counted_while_it_ended_is_its_own(self, proc: Path, box: Path) -> None:
        """A look between the kill and the end does not hide it: what was counted at its last sign of life decides."""
        counts = KillCounts(proc, box.parents[1])
        counts.look("a", ProcessKey(7, 99))
        alive = time.monotonic_ns()
        self.count(box, 1)
        counts.look("a", ProcessKey(7, 99))
        assert counts.after("a", alive) == Witness(str(box), own=True, before=0, after=1)

    def test_a_cgroup_that_went_with_its_container_is_told_by_the_one_above(self, proc: Path, box: Path) -> None:
        """Version 2 counts what is below, too; own says that it is not the process's own."""
        counts = KillCounts(proc, box.parents[1])
        counts.look("a", ProcessKey(7, 99))
        for file in box.iterdir():
            file.unlink()
        box.rmdir()
        self.count(box.parent, 1)
        assert counts.after("a", time.monotonic_ns()) == Witness(str(box.parent), own=False, before=0, after=1)

    def test_where_all_is_gone_the_count_before_is_kept(self, proc: Path, box: Path) -> None:
        """Nothing is known of after."""
        counts = KillCounts(proc, box.parents[1])
        counts.look("a", ProcessKey(7, 99))
        for file in (box / "memory.events", box.parent / "memory.events"):
            file.unlink()
        assert counts.after("a", time.monotonic_ns()) == Witness(str(box), own=True, before=0, after=None)

    @pytest.mark.parametrize("state", ["Z", "R"])
    def test_one_that_is_ending_is_not_in_the_root_of_all(self, proc: Path, box: Path, state: str) -> None:
        """While a process ends it is said to be in the root, and that is not where it was charged."""
        counts = KillCounts(proc, box.parents[1])
        counts.look("a", ProcessKey(7, 99))
        (proc / "7" / "stat").write_text(f"7 (VLLM) {state} {'0 ' * 18}99 0\n")
        (proc / "7" / "cgroup").write_text("0::/\n")
        (box.parents[1] / "memory.stat").write_text("anon 1\n")
        self.count(box.parents[1], 0)
        counts.look("a", ProcessKey(7, 99))
        assert counts.after("a", time.monotonic_ns()).cgroup == str(box)

    def test_what_cannot_be_read_is_no_fault(self, tmp_path: Path) -> None:
        """No process, no cgroup: nothing is known, and nothing raised."""
        counts = KillCounts(tmp_path, tmp_path)
        counts.look("a", ProcessKey(7, 99))
        assert counts.after("a", time.monotonic_ns()) == Witness()


TEXTS = st.text(max_size=50)
COUNTS = st.none() | st.integers(0, 1 << 59)


@given(st.builds(Witness, TEXTS, st.booleans(), COUNTS, COUNTS))
def test_a_witness_is_read_as_it_was_written(witness: Witness) -> None:
    """Nothing is lost on the way through JSON."""
    assert read_witness(witness.as_json()) == witness


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300)
@given(JSON | st.fixed_dictionaries({"cgroup": JSON, "own": JSON, "oom_kill_before": JSON, "kernel": JSON}))
def test_a_witness_of_a_strangers_making_is_harmless(told: object) -> None:
    """Whatever stands in a cursor, it is a sound witness or none, and can be judged by."""
    found = read_witness(told)
    assert found is None or judge(found, None).why
    if found is not None and found.kernel is not None:
        assert found.kernel.text.isprintable()


class TestKernelLog:
    """On a file with lines as /dev/kmsg gives them, one at a read."""

    LINES = (
        "6,1,1000000,-;VLLM invoked oom-killer: gfp_mask=0xcc0",
        "3,2,5000000,-;Memory cgroup out of memory: Killed process 42 (VLLM::EngineCor) total-vm:9kB, anon-rss:8kB",
        "3,3,6000000,-;Out of memory: Killed process 43 (python) total-vm:9kB",
        "6,4,7000000,-;python[44]: segfault at 0 ip 00 sp 00 error 4 in x.so",
        "6,5,8000000,-;traps: python[45] general protection fault ip:1 sp:2 error:0",
        "garbage",
        "6,6,notime,-;Killed process 46",
    )

    @pytest.fixture
    def log(self, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A log, a line at a read, whose first read finds that older lines are gone."""
        lines = [line.encode() + b"\n SUBSYSTEM=x\n" for line in self.LINES]
        reads: list[bytes | OSError] = [BrokenPipeError(), *lines, BlockingIOError()]

        def read(_: int, __: int) -> bytes:
            found = reads.pop(0)
            if isinstance(found, OSError):
                raise found
            return found

        monkeypatch.setattr(os, "read", read)
        return Path(os.devnull)

    @pytest.mark.parametrize(
        ("pid", "oom_killed", "by_cgroup"),
        [(42, True, True), (43, True, False), (44, False, False), (45, False, False)],
    )
    def test_the_line_of_a_process_is_found(self, log: Path, pid: int, oom_killed: bool, by_cgroup: bool) -> None:  # noqa: FBT001  # cases
        """Killed by a cgroup's limit, by the machine's, or crashed."""
        found = kernel_log.about(pid, 5.0, log)
        assert found is not None
        assert (found.oom, found.by_cgroup) == (oom_killed, by_cgroup)
        assert str(pid) in found.text

    def test_another_process_and_another_time_are_not_meant(self, log: Path) -> None:
        """A pid that is not in it, or was killed long before."""
        assert kernel_log.about(4, 5.0, log) is None

    def test_a_kill_of_an_hour_before_is_another_ones(self, log: Path) -> None:
        """The pid was used again."""
        assert kernel_log.about(42, 3600.0, log) is None

    def test_no_log_is_no_fault(self, tmp_path: Path) -> None:
        """Not there, or not to be read: nothing is known."""
        assert kernel_log.about(42, 5.0, tmp_path / "none") is None
        assert oom.judge(None, None).oom is Oom.UNKNOWN
