# SPDX-License-Identifier: Apache-2.0
"""ring: what is written is read, once and in order; what is lost is counted; nothing false is accepted."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import re
import subprocess
import sys
import time
from array import array
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import Frame, RingError, RingReader
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

WORDS = st.integers(0, layout.WORD_MASK)
BOOT = bytes(range(16))


def make(folder: Path, capacity: int = 64, name: str = "a.ring") -> RingWriter:
    """A writer with a small body."""
    return RingWriter(folder / name, capacity, Origin(start_time=7, boot_id=BOOT, vllm_version="0.25.1"))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder."""
    return tmp_path_factory.mktemp("rings")


def test_the_worked_example_of_the_docstring_is_so() -> None:
    """The bytes in layout's docstring are those that frame() makes."""
    assert layout.__doc__ is not None
    lines = re.findall(r"^    ((?:[0-9a-f]{2} +){10,}[0-9a-f]{2})$", layout.__doc__, re.MULTILINE)
    assert len(lines) == 2
    assert layout.frame(0, 0, 1, [1, 2]).tobytes() == bytes.fromhex("".join(lines))


def test_the_header_says_what_the_writer_was_told(folder: Path) -> None:
    """Every field of the header comes back, and the file is the owner's alone."""
    writer = make(folder)
    writer.set_patch_state("applied")
    writer.drop(3)
    header = RingReader(writer.path).header
    assert (header.pid, header.start_time, header.boot_id, header.capacity) == (os.getpid(), 7, BOOT, 64)
    assert (header.vllm_version, header.patch_state, header.dropped) == ("0.25.1", "applied", 3)
    assert writer.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("wall_ns", [0, 1_800_000_000 * 10**9])
def test_a_clock_behind_the_uptime_has_a_negative_offset(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wall_ns: int
) -> None:
    """A wall clock that says less than the uptime, as before the first time sync, is written and read back."""
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5 * 10**9)
    assert RingReader(make(folder).path).header.clock_offset_ns == wall_ns - 5 * 10**9


class TestRoundTrip:
    """Random writes and reads."""

    @settings(deadline=None)
    @given(
        capacity=st.integers(32, 200),
        steps=st.lists(st.one_of(st.none(), st.lists(WORDS, max_size=40)), max_size=60),
    )
    def test_what_is_read_is_what_was_written_less_what_is_counted(
        self, tmp_path_factory: pytest.TempPathFactory, capacity: int, steps: list[list[int] | None]
    ) -> None:
        """In any order of writes and reads, frames come once, in order, unchanged; read + lost + dropped = all."""
        writer = make(tmp_path_factory.mktemp("ring"), capacity)
        reader = RingReader(writer.path)
        written: list[list[int]] = []
        read: list[Frame] = []
        for step in [*steps, None]:
            if step is None:
                read += reader.poll()
            elif writer.write(step, 1):
                written.append(step)
        assert [written[f.first_event] for f in read] == [f.payload.tolist() for f in read]
        assert sorted({f.first_event for f in read}) == [f.first_event for f in read]
        tail = len(written) - (read[-1].first_event + 1 if read else 0)
        assert len(read) + reader.lost + tail == len(written)
        assert len(written) + writer.dropped == sum(step is not None for step in steps)
        if written and all(len(s) + 4 <= capacity // 4 for s in written):
            assert tail == 0, "the newest frame is always still there"

    @settings(deadline=None, max_examples=50)
    @given(frames=st.lists(st.lists(WORDS, max_size=10), min_size=1, max_size=15))
    def test_a_reader_that_keeps_up_loses_nothing(
        self, tmp_path_factory: pytest.TempPathFactory, frames: list[list[int]]
    ) -> None:
        """Read after every write, each frame is read."""
        writer = make(tmp_path_factory.mktemp("ring"), 64)
        reader = RingReader(writer.path)
        for frame in frames:
            assert writer.write(frame, 1)
            assert [f.payload.tolist() for f in reader.poll()] == [frame]
        assert reader.lost == 0


def test_a_frame_too_large_is_dropped_and_counted(folder: Path) -> None:
    """More than a quarter of the body is refused, and its events are counted, in the header too."""
    writer = make(folder, 64)
    assert not writer.write([0] * 13, 5)
    assert writer.write([0] * 12, 1)
    reader = RingReader(writer.path)
    assert (writer.dropped, reader.header.dropped, len(list(reader.poll()))) == (5, 5, 1)


class TestHostile:
    """Files that are not what they say."""

    def test_not_a_ring_and_another_schema_are_two_errors(self, folder: Path) -> None:
        """Wrong magic and wrong schema differ, and both say what to do."""
        writer = make(folder)
        writer.close()
        data = bytearray(writer.path.read_bytes())
        data[8] = 99
        writer.path.write_bytes(data)
        with pytest.raises(RingError, match="schema 99, this reader knows 1; use the release"):
            RingReader(writer.path)
        data[0] = 0
        writer.path.write_bytes(data)
        with pytest.raises(RingError, match=r"is no ring file.*try again, or another file"):
            RingReader(writer.path)

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4600])
    def test_a_file_that_was_cut_is_refused(self, folder: Path, size: int) -> None:
        """A file shorter than it says is refused at opening."""
        writer = make(folder)
        os.truncate(writer.path, size)
        with pytest.raises(RingError):
            RingReader(writer.path)

    def test_a_file_cut_while_it_is_read_gives_no_false_frame(self, folder: Path) -> None:
        """After opening, a cut body ends the frames, a cut header is an error; neither kills the reader."""
        writer = make(folder)
        reader = RingReader(writer.path)
        writer.write([1, 2, 3], 1)
        os.truncate(writer.path, layout.HEADER_BYTES + 8)
        assert list(reader.poll()) == []
        os.truncate(writer.path, 100)
        with pytest.raises(RingError, match="was cut"):
            list(reader.poll())

    def test_a_symbolic_link_and_a_fifo_are_refused(self, folder: Path) -> None:
        """Neither is followed nor waited for."""
        writer = make(folder)
        (folder / "link.ring").symlink_to(writer.path)
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            RingReader(folder / "link.ring")
        os.mkfifo(folder / "fifo.ring")
        with pytest.raises(RingError, match="no regular file"):
            RingReader(folder / "fifo.ring")

    def test_a_lying_capacity_is_refused(self, folder: Path) -> None:
        """A capacity of 0, one beyond the file, and one beyond all bounds are refused."""
        for lie in (0, 3, 65, 1 << 40, layout.WORD_MASK):
            writer = make(folder, name=f"{lie}.ring")
            writer._header[layout.CAPACITY_WORD] = lie
            with pytest.raises(RingError, match=r"says that it holds|no ring"):
                RingReader(writer.path)

    @settings(deadline=None, max_examples=300)
    @given(seed=st.integers(0, 2**32), flips=st.integers(1, 40))
    def test_no_damaged_frame_is_accepted(
        self, tmp_path_factory: pytest.TempPathFactory, seed: int, flips: int
    ) -> None:
        """With random words of body and header counters overwritten, each frame read is one that was written."""
        chance = random.Random(seed)  # noqa: S311  # drawn by hypothesis
        writer = make(tmp_path_factory.mktemp("ring"), 128)
        written: dict[int, list[int]] = {}
        for _ in range(chance.randrange(1, 40)):
            payload = [chance.getrandbits(64) for _ in range(chance.randrange(20))]
            if writer.write(payload, 1):
                written[len(written)] = payload
        reader = RingReader(writer.path)
        for _ in range(flips):
            writer._body[chance.randrange(128)] = chance.choice([0, layout.WORD_MASK, chance.getrandbits(64)])
        if chance.random() < 0.5:
            writer._header[chance.choice([layout.HEAD_WORD, layout.CLAIM_WORD])] = chance.getrandbits(64)
        for frame in reader.poll():
            assert written[frame.first_event] == frame.payload.tolist()

    @settings(deadline=None, max_examples=200)
    @given(data=st.binary(max_size=9000))
    def test_random_bytes_are_an_error_or_no_frames(
        self, tmp_path_factory: pytest.TempPathFactory, data: bytes
    ) -> None:
        """Random bytes, with and without a valid beginning, never give a frame or another exception."""
        path = tmp_path_factory.mktemp("ring") / "random.ring"
        beginning = array("Q", (layout.MAGIC, layout.SCHEMA, 256)).tobytes()
        for content in (data, (beginning + data).ljust(layout.HEADER_BYTES + 256 * 8, b"\xa5")):
            path.write_bytes(content)
            try:
                reader = RingReader(path)
                frames = list(reader.poll())
            except RingError:
                continue
            assert frames == []


class TestWriterFaults:
    """What the writer meets on disk."""

    def test_an_existing_file_is_not_taken_over(self, folder: Path) -> None:
        """O_EXCL: a file of that name, or a link, is an error and stays as it is."""
        (folder / "a.ring").write_text("theirs")
        with pytest.raises(FileExistsError):
            make(folder)
        assert (folder / "a.ring").read_text() == "theirs"

    @pytest.mark.parametrize(
        ("module", "function", "number"),
        [(os, "posix_fallocate", errno.ENOSPC), (mmap, "mmap", errno.ENODEV)],
        ids=["full disk", "filesystem without mmap"],
    )
    def test_what_the_disk_cannot_give_is_an_error_at_opening_and_leaves_nothing(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str, number: int
    ) -> None:
        """If blocks or mapping cannot be had, opening fails and the file is gone: storing later cannot fail."""

        def refuse(*_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(module, function, refuse)
        with pytest.raises(OSError, match=os.strerror(number)):
            make(folder)
        assert list(folder.iterdir()) == []

    def test_a_deleted_file_is_written_on(self, folder: Path) -> None:
        """The engine goes on when somebody deletes the file or its folder, and an open reader reads on."""
        writer = make(folder)
        reader = RingReader(writer.path)
        writer.path.unlink()
        folder.rmdir()
        assert writer.write([5], 1)
        assert [f.payload.tolist() for f in reader.poll()] == [[5]]


WRITER = """
import sys
from pathlib import Path
from vllm_kvfix.ring.writer import Origin, RingWriter
writer = RingWriter(Path(sys.argv[1]), 4096, Origin(start_time=0, boot_id=bytes(16)))
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    n = number % 97
    writer.write([number] + [number ^ i for i in range(n)], 1)
print("done", flush=True)
sys.stdin.read()
"""


def frames_of(reader: RingReader, process: subprocess.Popen[str], last: int) -> Iterator[Frame]:
    """Every frame that can be read until the last one was written, or the writer is gone."""
    while reader._next_event < last and process.poll() is None:
        yield from reader.poll()


def test_another_process_at_full_speed_gives_no_torn_frame(folder: Path) -> None:
    """Of 200,000 frames written at full speed by another process, none read is torn, and the rest is counted."""
    count = 200_000
    path = folder / "fast.ring"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        reader = RingReader(path)
        read = 0
        for frame in frames_of(reader, process, count):
            number = frame.payload[0]
            assert number == frame.first_event
            assert frame.payload.tolist() == [number] + [number ^ i for i in range(number % 97)]
            read += 1
        process.communicate()
    assert read > 0
    assert read + reader.lost == count


def descriptors() -> int:
    """How many this process has, the one by which they are listed counted."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names alone


def test_a_reader_that_nobody_holds_keeps_no_descriptor(tmp_path: Path) -> None:
    """One that was never closed is closed as it goes; to close one twice closes nobody else's descriptor."""
    path = tmp_path / "a.ring"
    RingWriter(path, 1 << 12, Origin(start_time=0, boot_id=bytes(16)))
    before = descriptors()
    reader = RingReader(path)
    assert descriptors() == before + 1
    del reader
    gc.collect()
    assert descriptors() == before
    reader = RingReader(path)
    reader.close()
    with path.open("rb") as other:
        reader.close()
        assert other.read(1)
