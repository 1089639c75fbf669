# SPDX-License-Identifier: Apache-2.0
"""engines: rings are found, told apart, resumed and given up; no file in the folder can do harm."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sidecar.fake_engine import BOOT, FakeEngine, other_process, start_time_of, step
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import RingReader
from vllm_kvfix_sidecar import cursors, engines, refusals
from vllm_kvfix_sidecar.cursors import Cursor
from vllm_kvfix_sidecar.engines import Engine, Engines
from vllm_kvfix_sidecar.processes import boot_id_of, process_runs

if TYPE_CHECKING:
    from collections.abc import Callable

PROC = Path("/proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for rings."""
    made = tmp_path / "rings"
    made.mkdir()
    return made


def finder(*folders: Path, proc: Path = PROC, most: int = 8, owners: tuple[int, ...] | None = None) -> Engines:
    """A finder that has looked once."""
    made = Engines(folders, proc, most, owners)
    made.scan(0.0)
    return made


def taken(engine: Engine, most: int = 10**9) -> list[tuple[int, bool]]:
    """(first event, told before) of each new frame."""
    return [(frame.first_event, told) for frame, told in engine.frames(most)]


class TestFound:
    """Which files are followed."""

    def test_rings_of_several_folders_are_followed_as_they_come_and_go(self, folder: Path, tmp_path: Path) -> None:
        """A missing folder is no fault; a scan finds new rings, and forgets those that ended and were deleted."""
        found = finder(folder, tmp_path / "later")
        assert (found.all, found.folders_readable) == ((), True)
        FakeEngine(folder / "a.ring")
        (tmp_path / "later").mkdir()
        FakeEngine(tmp_path / "later" / "b.ring")
        (folder / "notes.txt").write_text("no ring")
        found.scan(1.0)
        assert sorted(engine.path.name for engine in found.all) == ["a.ring", "b.ring"]
        assert found.refused == {}
        for engine in found.all:
            engine.close()
        (folder / "a.ring").unlink()
        shutil.rmtree(tmp_path / "later")
        found.scan(2.0)
        assert found.all == ()

    def test_an_engine_says_who_it_is(self, folder: Path) -> None:
        """Process, boot, rank and version are the header's."""
        FakeEngine(folder / "a.ring").poke(layout.ENGINE_INDEX_WORD, 3)
        (engine,) = finder(folder).all
        assert (engine.pid, engine.start_time, engine.boot_id) == (os.getpid(), start_time_of(os.getpid()), BOOT)
        assert (engine.engine_index, engine.vllm_version, engine.key.ring) == (3, "0.25.1", "a.ring")

    def test_no_folder_at_all_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A folder that cannot be read is said when that begins, not at each scan, and again after it was readable."""
        found = finder(tmp_path / "none")
        found.scan(1.0)
        assert not found.folders_readable
        assert caplog.text.count("cannot look into") == 1
        (tmp_path / "none").mkdir()
        found.scan(2.0)
        assert found.folders_readable
        (tmp_path / "none").rmdir()
        found.scan(3.0)
        assert caplog.text.count("cannot look into") == 2

    def test_a_new_ring_with_an_ended_ones_inode_is_followed(self, folder: Path) -> None:
        """A filesystem gives a deleted file's inode to the next; by its path it is known to be another."""
        FakeEngine(folder / "a.ring")
        found = finder(folder)
        (ended,) = found.all
        ended.close()
        (folder / "a.ring").rename(folder / "b.ring")  # stands for: deleted, and another made with its inode
        found.scan(1.0)
        assert [(engine.path.name, engine.closed) for engine in found.all] == [("b.ring", False)]

    def test_two_names_of_one_ring_are_one_engine(self, folder: Path) -> None:
        """A hard link is not told twice."""
        FakeEngine(folder / "a.ring")
        os.link(folder / "a.ring", folder / "b.ring")
        assert len(finder(folder, folder).all) == 1


def _random_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(9000))


def _lying_header(path: Path) -> None:
    FakeEngine(path).poke(layout.CAPACITY_WORD, 1 << 40)


def _wrong_version(path: Path) -> None:
    FakeEngine(path).poke(layout.SCHEMA_WORD, 99)


def _huge(path: Path) -> None:
    FakeEngine(path).poke(layout.CAPACITY_WORD, (1 << 40) // 8)
    os.truncate(path, 1 << 41)


def _symlink(path: Path) -> None:
    FakeEngine(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


class TestRefused:
    """Which files are not."""

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (_random_bytes, "is no ring file"),
            (_lying_header, "was cut or tampered with"),
            (_wrong_version, "schema 99"),
            (_huge, "was cut or tampered with"),
            (_symlink, "symbolic link"),
            (os.mkfifo, "no regular file"),
            (lambda path: path.mkdir(), "no regular file"),
            (lambda path: path.write_bytes(b""), "is no ring file"),
        ],
    )
    def test_a_hostile_file_is_refused_with_its_reason_once(
        self, folder: Path, make: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is counted and said once, whatever the number of scans, and the good ring beside it is followed."""
        make(folder / "bad.ring")
        FakeEngine(folder / "good.ring")
        found = finder(folder)
        for second in range(1, 20):
            found.scan(float(second))
        assert [engine.path.name for engine in found.all] == ["good.ring"]
        assert reason in found.refused[folder / "bad.ring"]
        assert caplog.text.count("not followed") == 1
        assert len(found.refused) == 1

    @pytest.mark.parametrize(("user", "owners"), [(0, None), (1000, (1000,))])
    def test_root_trusts_everybody_and_others_themselves(
        self, monkeypatch: pytest.MonkeyPatch, user: int, owners: tuple[int, ...] | None
    ) -> None:
        """A sidecar of another user than root follows its own user's rings unless told otherwise."""
        monkeypatch.setattr(os, "geteuid", lambda: user)
        assert engines.trusted_owners() == owners

    @pytest.mark.parametrize(("owners", "followed"), [((os.geteuid(),), 1), ((os.geteuid() + 1,), 0), (None, 1)])
    def test_only_the_rings_of_the_given_owners_are_read(
        self, folder: Path, owners: tuple[int, ...] | None, followed: int
    ) -> None:
        """A ring of another user is refused, and the reason names that user."""
        FakeEngine(folder / "a.ring")
        found = finder(folder, owners=owners)
        assert len(found.all) == followed
        assert [f"belongs to user {os.geteuid()}" in reason for reason in found.refused.values()] == [True] * (
            1 - followed
        )

    def test_a_refused_file_is_not_opened_at_each_scan(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Unchanged, it is looked at ever more rarely; changed, at once; gone, it is forgotten."""
        opened: list[Path] = []

        def opening(path: Path, owners: object) -> RingReader:
            opened.append(path)
            return RingReader(path, owners)  # type: ignore[arg-type]  # handed on

        monkeypatch.setattr(engines, "RingReader", opening)
        bad = folder / "bad.ring"
        _random_bytes(bad)
        found = finder(folder)
        for second in range(1, 200):
            found.scan(float(second))
        assert 2 < len(opened) < 12
        before = len(opened)
        bad.unlink()
        FakeEngine(bad)
        found.scan(200.0)
        assert len(opened) == before + 1
        assert (len(found.all), found.refused) == (1, {})
        _random_bytes(folder / "b.ring")
        found.scan(201.0)
        (folder / "b.ring").unlink()
        found.scan(202.0)
        assert found.refused == {}

    def test_a_ring_that_was_unfinished_is_followed_when_it_is_whole(self, folder: Path) -> None:
        """The magic is stored without a change of the file's times on some filesystems; it is found all the same."""
        engine = FakeEngine(folder / "a.ring")
        engine.poke(layout.MAGIC_WORD, 0)
        found = finder(folder)
        assert "has not finished it" in found.refused[folder / "a.ring"]
        engine.poke(layout.MAGIC_WORD, layout.MAGIC)
        found.scan(5.0)
        assert (len(found.all), found.refused) == (1, {})

    def test_what_is_remembered_and_said_is_bounded(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """So many names of a folder are looked at, and so many refusals said, however many scans; more is said once."""
        monkeypatch.setattr(engines, "MOST_NAMES", 30)
        monkeypatch.setattr(refusals, "MOST_SAID", 5)
        for number in range(40):
            (folder / f"{number}.ring").write_text("")
        found = finder(folder)
        for second in range(1, 50):
            found.scan(float(second))
        assert len(found.refused) == 30
        assert caplog.text.count("not followed") == 5
        assert caplog.text.count("more than 30 rings") == 1

    def test_a_ring_too_many_is_refused_until_another_has_ended(self, folder: Path) -> None:
        """Live rings are never pushed out; an ended one gives way, and is not opened again in its turn."""
        for name in "abc":
            FakeEngine(folder / f"{name}.ring")
        found = finder(folder, most=2)
        (reason,) = found.refused.values()
        assert "2 rings are followed already" in reason
        ended = found.all[0]
        ended.close()
        for second in range(10, 20):
            found.scan(float(second))
        assert len(found.all) == 2
        assert ended not in found.all
        assert found.refused == {}


def _process(proc: Path, pid: int, start: int, *, state: str = "S", name: str = "VLLM::EngineCore") -> None:
    (proc / str(pid)).mkdir(parents=True)
    fields = [state, *["0"] * 18, str(start), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}")


class Case(NamedTuple):
    """What the process table shows at the ring's pid, and what the ring, of start time 500, says."""

    process: dict[str, Any] | None
    boot: bytes = BOOT
    locked: int = 1


class TestState:
    """Who lives."""

    @pytest.mark.parametrize(
        ("case", "state"),
        [
            (Case({"start": 500}), "live"),
            (Case({"start": 500, "name": "a) R 1 (b"}), "live"),
            (Case({"start": 501}), "ended"),
            (Case({"start": 500, "state": "Z"}), "ended"),
            (Case(None), "ended"),
            (Case(None, locked=0), "unknown"),
            (Case({"start": 501}, locked=0), "unknown"),
            (Case({"start": 500}, locked=0), "live"),
            (Case({"start": 500}, boot=bytes(range(16)), locked=0), "ended"),
            (Case({"start": 500}, boot=bytes(16), locked=0), "live"),
        ],
    )
    def test_a_process_is_told_by_pid_start_time_and_boot(
        self, folder: Path, tmp_path: Path, case: Case, state: str
    ) -> None:
        """Not the engine: another of its pid, a zombie, another boot. Without a lock, absence proves nothing."""
        proc = tmp_path / "proc"
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text(BOOT.hex() + "\n")
        if case.process is not None:
            _process(proc, os.getpid(), **case.process)
        FakeEngine(folder / "a.ring", start_time=500, boot=case.boot).poke(layout.LOCKED_WORD, case.locked)
        (engine,) = finder(folder, proc=proc).all
        assert engine.state == state

    def test_a_held_lock_outweighs_a_process_table_that_shows_nothing(self, folder: Path, tmp_path: Path) -> None:
        """An engine in another PID namespace lives as long as it holds its lock, and is seen to end when killed."""
        with other_process(folder / "a.ring") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            found = finder(folder, proc=tmp_path)
            (engine,) = found.all
            assert engine.state == "live"
            process.kill()
            process.wait()
        found.scan(1.0)
        assert engine.state == "ended"

    def test_a_process_table_that_cannot_be_read_shows_nothing(self, tmp_path: Path) -> None:
        """Missing, empty and damaged entries are no process; the boot id is then unknown."""
        (tmp_path / "5").mkdir()
        (tmp_path / "5" / "stat").write_text("5 (x) S 1")
        assert not process_runs(tmp_path, 4, 0)
        assert not process_runs(tmp_path, 5, 0)
        assert boot_id_of(tmp_path) is None
        assert process_runs(PROC, os.getpid(), start_time_of(os.getpid()))


class TestReading:
    """Frames."""

    def test_a_backlog_is_taken_in_slices(self, folder: Path) -> None:
        """A call stops after so many events; the next goes on without loss or repetition."""
        source = FakeEngine(folder / "a.ring")
        for _ in range(10):
            source.write(step(1), step(2))
        (engine,) = finder(folder).all
        got = taken(engine, 6)
        assert (len(got), engine.behind, engine.consumed) == (3, True, 6)
        got += taken(engine)
        assert (len(got), engine.behind, engine.lost) == (10, False, 0)
        assert [first for first, _ in got] == list(range(0, 20, 2))

    def test_a_deleted_ring_is_read_on_while_its_engine_lives(self, folder: Path) -> None:
        """The open file gives what is written after the deletion, and the engine stays known until it has ended."""
        source = FakeEngine(folder / "a.ring")
        found = finder(folder)
        (engine,) = found.all
        source.path.unlink()
        source.write(step(1))
        found.scan(1.0)
        assert (taken(engine), engine.linked, engine.state) == ([(0, False)], False, "live")
        source.die()
        engine.start_time = 1
        found.scan(2.0)
        assert engine.state == "ended"
        engine.close()
        found.scan(3.0)
        assert found.all == ()


class TestCursor:
    """Resumption."""

    def test_what_the_cursor_covers_is_marked_as_told(self, folder: Path) -> None:
        """A second reader gets every frame again, those before the cursor marked, those after it not."""
        source = FakeEngine(folder / "a.ring")
        for _ in range(3):
            source.write(step(1))
        (first,) = finder(folder).all
        taken(first)
        first.save(Cursor(first.consumed, first.lost))
        source.write(step(1))
        (second,) = finder(folder).all
        assert taken(second) == [(0, True), (1, True), (2, True), (3, False)]

    def test_what_was_told_and_overwritten_since_is_not_lost(self, folder: Path) -> None:
        """Lost counts what nobody told: events after the cursor, not those before it; the sum is remembered."""
        source = FakeEngine(folder / "a.ring", capacity=200)
        source.write(step(1))
        (first,) = finder(folder).all
        taken(first)
        first.save(Cursor(first.consumed, first.lost))
        for _ in range(30):
            source.write(step(1))
        (second,) = finder(folder).all
        got = taken(second)
        assert second.lost == 30 - len(got) > 0
        second.save(Cursor(second.consumed, second.lost))
        (third,) = finder(folder).all
        taken(third)
        assert third.lost == second.lost

    @settings(deadline=None)
    @given(
        data=st.one_of(
            st.binary(max_size=200),
            st.recursive(
                st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
                lambda inner: st.dictionaries(
                    st.sampled_from(["pid", "events", "lost", "ended", "boot_id"]), inner, max_size=5
                ),
            ).map(lambda value: json.dumps(value).encode()),
        )
    )
    def test_a_damaged_cursor_is_ignored(self, tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
        """Whatever the cursor file holds, the ring is read from its beginning."""
        source = FakeEngine(tmp_path_factory.mktemp("ring") / "a.ring")
        source.write(step(1))
        cursors.path_of(source.path).write_bytes(data)
        (engine,) = finder(source.path.parent).all
        assert taken(engine) == [(0, False)]

    @pytest.mark.parametrize(
        "changed", [{"pid": 1}, {"start_time": 2}, {"boot_id": "00"}, {"events": 2}, {"events": -1}, {"lost": True}]
    )
    def test_a_cursor_of_another_ring_is_ignored(self, folder: Path, changed: dict[str, object]) -> None:
        """Another process, or more events than the ring has published, is not this ring's; unchanged it is."""
        source = FakeEngine(folder / "a.ring")
        source.write(step(1))
        header = RingReader(source.path).header
        cursors.write(source.path, header, Cursor(1, 0))
        path = cursors.path_of(source.path)
        assert cursors.read(source.path, header) == Cursor(1, 0)
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
        assert cursors.read(source.path, header) == Cursor()

    def test_a_cursor_is_never_written_through_a_link(self, folder: Path, tmp_path: Path) -> None:
        """A link in the place of the cursor, or of its temporary file, is replaced; what it points to stays."""
        theirs = tmp_path / "theirs"
        theirs.write_text("theirs")
        source = FakeEngine(folder / "a.ring")
        path = cursors.path_of(source.path)
        path.symlink_to(theirs)
        path.with_name(f"{path.name}.{os.getpid()}").symlink_to(theirs)
        (engine,) = finder(folder).all
        engine.save(Cursor(0, 0))
        assert theirs.read_text() == "theirs"
        assert not path.is_symlink()
        assert sorted(entry.name for entry in folder.iterdir()) == ["a.ring", "a.ring.cursor"]

    def test_a_cursor_is_read_from_a_regular_file_alone(self, folder: Path, tmp_path: Path) -> None:
        """A link to a sound cursor is not followed, and a FIFO is not waited for."""
        source = FakeEngine(folder / "a.ring")
        header = RingReader(source.path).header
        cursors.write(source.path, header, Cursor(0, 0, ended=True))
        path = cursors.path_of(source.path)
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        assert cursors.read(source.path, header) == Cursor()
        path.unlink()
        os.mkfifo(path)
        assert cursors.read(source.path, header) == Cursor()

    def test_a_cursor_that_cannot_be_written_is_said_once(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The engine is followed all the same, and nothing is left lying about."""
        source = FakeEngine(folder / "a.ring")
        cursors.path_of(source.path).mkdir()
        (engine,) = finder(folder).all
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                engine.save(Cursor(number, 0))
        assert caplog.text.count("cannot write") == 1
        assert len(list(folder.iterdir())) == 2

    def test_a_cursor_goes_with_its_ring(self, folder: Path) -> None:
        """A deleted ring's cursor is removed, and not written again while the open file is read on."""
        source = FakeEngine(folder / "a.ring")
        found = finder(folder)
        (engine,) = found.all
        engine.save(Cursor(0, 0))
        source.path.unlink()
        found.scan(1.0)
        engine.save(Cursor(0, 0))
        assert list(folder.iterdir()) == []
