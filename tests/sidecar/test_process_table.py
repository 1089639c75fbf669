# SPDX-License-Identifier: Apache-2.0
"""process_table: rows say what the kernel says, of that very process, and are not read more often than need be."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sidecar.canned_proc import CannedProc
from tests.sidecar.fake_engine import start_time_of
from vllm_kvfix.host import UnreadableError
from vllm_kvfix_sidecar.process_table import ProcessTable, _parse_argv, _parse_stat

PROC = Path("/proc")


class Clock:
    """Seconds that pass when told, and at each look at it."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        """The time."""
        self.now += self.step
        return self.now


@pytest.fixture
def canned(tmp_path: Path) -> CannedProc:
    """A process table with one process, 11."""
    made = CannedProc(tmp_path / "proc")
    made.add(11, "/bin/tool", "x")
    return made


class TestRealTable:
    """This machine's."""

    def test_rows_agree_with_psutil(self) -> None:
        """Parent, name and arguments of this process and of a child are those that psutil tells."""
        child = subprocess.Popen(
            ["VLLM::EngineCore_DP1", "-c", "read x"],  # noqa: S607  # that is its title, not its path
            executable="/bin/sh",
            stdin=subprocess.PIPE,
        )
        try:
            table = ProcessTable(PROC, lambda: 0.0)
            table.look()
            for pid in (os.getpid(), child.pid):
                row, other = table.entries[pid], psutil.Process(pid)
                assert row.parent == other.ppid()
                assert row.name in {other.name(), other.name()[:15]}
                assert list(row.argv) == other.cmdline()
                assert row.key.start_time == start_time_of(pid)
            assert table.entries.keys() >= {os.getpid(), child.pid, 1}
        finally:
            child.communicate()

    def test_a_process_knows_its_own_pid(self) -> None:
        """In the namespace of this table, and in its own: the same, where it has none of its own."""
        assert ProcessTable(PROC, lambda: 0.0).own_pid(os.getpid()) == os.getpid()


class TestNews:
    """What a look tells."""

    def test_news_are_told_once(self, canned: CannedProc) -> None:
        """A new row in the look that found it; a row that went is in the table no more."""
        table = ProcessTable(canned.root, Clock())
        assert [row.key.pid for row in table.look()] == [11]
        assert table.look() == []
        canned.add(12, "child", parent=11)
        assert [(row.key.pid, row.parent, row.argv) for row in table.look()] == [(12, 11, ("child",))]
        canned.remove(11)
        assert table.look() == []
        assert table.entries.keys() == {12}

    def test_a_new_name_is_seen_when_all_is_read_again(self, canned: CannedProc) -> None:
        """A title comes with another kernel's name; until then arguments are not read again."""
        clock = Clock()
        table = ProcessTable(canned.root, clock)
        table.look()
        (canned.root / "11" / "cmdline").write_bytes(b"changed\0")
        clock.now = 5.0
        assert table.look() == []
        assert table.entries[11].argv == ("/bin/tool", "x")
        canned.remove(11)
        canned.add(11, "VLLM::EngineCore")
        assert table.look() == []
        clock.now = 10.0
        assert [row.argv for row in table.look()] == [("VLLM::EngineCore",)]

    def test_a_restless_one_is_asked_for_its_arguments_each_time(self, canned: CannedProc) -> None:
        """A program may start itself anew with other arguments."""
        clock = Clock()
        table = ProcessTable(canned.root, clock)
        table.look()
        (canned.root / "11" / "cmdline").write_bytes(b"changed\0")
        clock.now = 5.0
        assert [row.argv for row in table.look({11})] == [("changed",)]

    def test_what_is_read_in_between_is_news_as_well(self, canned: CannedProc) -> None:
        """A pid that was found to be another process's, or a title, is told by the next look."""
        table = ProcessTable(canned.root, Clock())
        table.look()
        canned.remove(11)
        canned.add(11, "VLLM::EngineCore", start=99)
        assert table.again(11).key.start_time == 99
        assert [row.argv for row in table.look()] == [("VLLM::EngineCore",)]
        assert table.look() == []

    def test_a_pid_used_again_has_its_own_arguments(self, canned: CannedProc) -> None:
        """Although the kernel's name is the same."""
        clock = Clock()
        table = ProcessTable(canned.root, clock)
        table.look()
        canned.remove(11)
        canned.add(11, "/bin/tool", "y", start=99)
        clock.now = 5.0
        assert [row.argv for row in table.look()] == [("/bin/tool", "y")]

    def test_reading_all_rows_takes_a_small_share_of_the_time(self, canned: CannedProc) -> None:
        """It took one second, so for minutes only new rows are read."""
        clock = Clock(step=0.5)
        table = ProcessTable(canned.root, clock)
        table.look()
        clock.step = 0.0
        (canned.root / "11" / "stat").write_text("11 (other) S 7 " + "0 " * 17 + "11 0")
        clock.now = 100.0
        assert table.look() == []
        clock.now = 400.0
        assert [row.parent for row in table.look()] == [7]


class TestFaults:
    """What cannot be read."""

    @pytest.mark.parametrize("what", ["missing", "file", "empty"])
    def test_a_root_that_is_no_process_table_is_told(self, tmp_path: Path, what: str) -> None:
        """No exception, no row, and the reason; it may come back."""
        root = tmp_path / "proc"
        if what == "file":
            root.write_text("no folder")
        elif what == "empty":
            root.mkdir()
        table = ProcessTable(root, Clock())
        assert table.look() == []
        assert table.fault is not None
        assert str(root) in table.fault

    def test_a_table_that_comes_back_is_read(self, canned: CannedProc) -> None:
        """Its rows are news again, and the fault is over."""
        table = ProcessTable(canned.root, Clock())
        table.look()
        canned.root.rename(canned.root.with_name("away"))
        table.look()
        assert (table.fault is not None, table.whole, dict(table.entries)) == (True, False, {})
        canned.root.with_name("away").rename(canned.root)
        assert [row.key.pid for row in table.look()] == [11]
        assert table.fault is None

    @pytest.mark.parametrize("stat", ["", "11 (x) S", "11 (x) S one 2 3", "11 x S 1 " + "0 " * 30])
    def test_a_row_that_is_no_row_is_left_out(self, canned: CannedProc, stat: str) -> None:
        """It vanished while it was read, or lies."""
        canned.add(12, "good")
        (canned.root / "11" / "stat").write_text(stat)
        table = ProcessTable(canned.root, Clock())
        table.look()
        assert table.entries.keys() == {12}
        with pytest.raises(UnreadableError):
            table.again(11)

    def test_a_row_that_cannot_be_read_any_more_is_in_the_table_no_more(self, canned: CannedProc) -> None:
        """Its process may be another by now."""
        table = ProcessTable(canned.root, Clock())
        table.look()
        (canned.root / "11" / "stat").unlink()
        with pytest.raises(UnreadableError, match="no such process"):
            table.again(11)
        assert dict(table.entries) == {}

    def test_one_without_a_readable_command_line_is_in_the_table(self, canned: CannedProc) -> None:
        """It ended so far that only its row is left, or belongs to another user."""
        (canned.root / "11" / "cmdline").unlink()
        table = ProcessTable(canned.root, Clock())
        table.look()
        assert table.entries[11].argv == ()

    @given(st.binary(max_size=200))
    def test_any_bytes_parse_or_are_refused(self, data: bytes) -> None:
        """Nothing else than the one error comes out."""
        assert all(isinstance(word, str) for word in _parse_argv(data))
        with contextlib.suppress(UnreadableError):
            _parse_stat(1, data)

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=15))
    def test_any_name_of_a_program_parses(self, name: str) -> None:
        """Brackets, spaces and newlines in it do not shift the fields."""
        row = _parse_stat(5, f"5 ({name}) S 3 {'0 ' * 17}77 0 0".encode())
        assert (row.name, row.parent, row.key.start_time) == (name, 3, 77)
