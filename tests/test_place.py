# SPDX-License-Identifier: Apache-2.0
"""ring.place and the writer's lock: where rings lie, how large they are, and which are left of the dead."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT
from vllm_kvfix import own_ring
from vllm_kvfix.ring import layout, place
from vllm_kvfix.ring.reader import RingReader
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITER = """
import sys
from pathlib import Path
from vllm_kvfix.ring.writer import Origin, RingWriter
writer = RingWriter(Path(sys.argv[1]), 256, Origin(1, bytes(16), role=sys.argv[2]))
writer.write([1, 2], 1)
print("ready", flush=True)
sys.stdin.read()
"""


class Engine:
    """Another process that holds a ring until it is ended."""

    def __init__(self, path: Path, role: str = layout.ENGINE_CORE) -> None:
        self.path = path
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", WRITER, str(path), role]
        self._process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    """Three engines, oldest first; what is still running at the end is ended."""
    made = [Engine(tmp_path / f"other-{number}.ring") for number in range(3)]
    yield made
    for engine in made:
        engine.end()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 8 << 20),
        ("8MiB", 8 << 20),
        ("512K", 512 << 10),
        ("64 kib", 64 << 10),
        ("1048576", 1 << 20),
        ("1MB", 1 << 20),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    """A number with or without a unit is that many bytes, powers of two; nothing is the default."""
    assert place.ring_size({place.SIZE_VARIABLE: text}) == size


@pytest.mark.parametrize("text", ["0", "8TiB", "-1", "1KiB", "257MiB", "8 MiB or so", "9" * 40])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The error names variable, value, and what would do."""
    with pytest.raises(ValueError, match=r"VLLM_KVFIX_RING_SIZE=.* write it like 8MiB"):
        place.ring_size({place.SIZE_VARIABLE: text})


@pytest.mark.parametrize(("text", "mode"), [("", 0o600), ("644", 0o644), (" 0640 ", 0o640), ("0o604", 0o604)])
def test_a_mode_is_read(text: str, mode: int) -> None:
    """It is octal, and nothing is 600."""
    assert place.ring_mode({place.MODE_VARIABLE: text}) == mode


@pytest.mark.parametrize("text", ["666", "755", "1644", "0", "-1", "rw", "9" * 40])
def test_what_lets_others_write_is_no_mode(text: str) -> None:
    """Nor is what keeps the writer out, or is no number; the error names what would do."""
    with pytest.raises(ValueError, match=r"VLLM_KVFIX_RING_MODE=.* is none of 600, 604, 640 and 644"):
        place.ring_mode({place.MODE_VARIABLE: text})


@pytest.mark.parametrize(("text", "mode"), [("", 0o600), ("644", 0o644), ("666", 0o600)])
def test_a_ring_has_the_mode_that_was_asked_for(text: str, mode: int, tmp_path: Path) -> None:
    """Whatever the umask; one that cannot be used leaves it to this user alone."""
    before = os.umask(0o077)
    try:
        writer = own_ring.open_ring({place.FOLDER_VARIABLE: str(tmp_path), place.MODE_VARIABLE: text}, "0.25.1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(writer.path.stat().st_mode) == mode
    writer.close()


def test_the_folder_is_the_named_one_or_the_users_own() -> None:
    """The first of several is the engine's; without any there is one for each user."""
    assert place.default_folder({place.FOLDER_VARIABLE: "/a:/b"}) == Path("/a")
    assert place.folders({place.FOLDER_VARIABLE: "/a:/b"}) == (Path("/a"), Path("/b"))
    assert place.default_folder({}).name == f"vllm-kvfix-{os.getuid()}"


def test_a_folder_that_somebody_prepared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder a link in the place of ours is not followed; one of our own is made for this user alone."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(place.PlaceError, match="not this user's own"):
        place.new_ring(tmp_path / "link")
    path = place.new_ring(tmp_path / "ours")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.name.startswith(f"{os.getpid()}-")


def test_the_lock_tells_a_live_writer_from_a_dead_one(engines: list[Engine]) -> None:
    """While the process runs its ring is not given up; once it is killed it is, whatever its pid does next."""
    reader = RingReader(engines[0].path)
    assert reader.writer_is_gone() is False
    engines[0].end()
    assert reader.writer_is_gone() is True
    reader.close()


def test_clean_up_leaves_the_living_and_the_newest_of_the_dead(engines: list[Engine], tmp_path: Path) -> None:
    """Of two dead rings and a live one, keeping one removes the older dead one; other files are not touched."""
    (tmp_path / "notes.txt").write_text("theirs")
    (tmp_path / "broken.ring").write_bytes(b"no ring")
    engines[0].end()
    engines[2].end()
    assert place.clean_up(tmp_path, {layout.ENGINE_CORE: 1}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken.ring", "notes.txt", "other-1.ring", "other-2.ring",
    ]  # fmt: skip


def test_clean_up_counts_each_role_by_itself(engines: list[Engine], tmp_path: Path) -> None:
    """The rings of dead workers do not push out an engine core's, and of theirs the oldest goes."""
    workers = [Engine(tmp_path / f"worker-{number}.ring", layout.WORKER) for number in range(2)]
    for engine in (*engines, *workers):
        engine.end()
    assert place.clean_up(tmp_path, {layout.ENGINE_CORE: 3, layout.WORKER: 1}) == 1
    assert not workers[0].path.exists()
    assert all(engine.path.exists() for engine in (*engines, workers[1]))


def test_clean_up_bounds_the_bytes_of_all_together(engines: list[Engine], tmp_path: Path) -> None:
    """Of three dead rings of which two fit, the oldest goes; where not even one fits, the newest stays."""
    for engine in engines:
        engine.end()
    size = engines[0].path.stat().st_size
    assert place.clean_up(tmp_path, keep_bytes=2 * size) == 1
    assert not engines[0].path.exists()
    assert place.clean_up(tmp_path, keep_bytes=1) == 1
    assert [path.name for path in tmp_path.glob("*.ring")] == ["other-2.ring"]


def test_an_engine_cores_ring_stays_before_a_workers(engines: list[Engine], tmp_path: Path) -> None:
    """Where bytes are short, the rings of workers go, however new they are."""
    worker = Engine(tmp_path / "worker.ring", layout.WORKER)
    for engine in (*engines, worker):
        engine.end()
    assert place.clean_up(tmp_path, keep_bytes=3 * worker.path.stat().st_size) == 1
    assert not worker.path.exists()


def test_what_a_sidecar_has_not_told_yet_goes_last(engines: list[Engine], tmp_path: Path) -> None:
    """A ring whose cursor is not at its end stays before newer ones that were told; its cursor goes with a ring."""
    for engine, ended in zip(engines, ("false", "true", "true"), strict=True):
        engine.end()
        place.cursor_of(engine.path).write_text(f'{{"events": 1, "lost": 0, "ended": {ended}}}')
    assert place.clean_up(tmp_path, {layout.ENGINE_CORE: 1}) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-0.ring", "other-0.ring.cursor"]


@pytest.mark.parametrize("text", ["", "[]", "[" * 5000, '{"ended": 0}', "{}", "\x00"])
def test_a_cursor_of_a_strangers_making_protects_nothing(engines: list[Engine], tmp_path: Path, text: str) -> None:
    """Whatever stands in it, the count is kept."""
    for engine in engines:
        engine.end()
    place.cursor_of(engines[0].path).write_text(text)
    assert place.clean_up(tmp_path, {layout.ENGINE_CORE: 1}) == 2
    assert engines[2].path.exists()


def test_a_pipe_in_the_place_of_a_cursor_holds_up_nobody(engines: list[Engine], tmp_path: Path) -> None:
    """An engine's start does not wait for whoever may write to it."""
    for engine in engines:
        engine.end()
    os.mkfifo(place.cursor_of(engines[0].path))
    assert place.clean_up(tmp_path, {layout.ENGINE_CORE: 1}) == 2


def test_where_there_are_no_locks_silence_tells(tmp_path: Path) -> None:
    """A ring without a lock is one of the dead an hour after its last word, and not before."""
    for name, ago_s in (("old", 3700), ("new", 60)):
        writer = RingWriter(tmp_path / f"{name}.ring", 256, Origin(1, bytes(16)))
        writer._header[layout.LOCKED_WORD] = 0
        writer._header[layout.HEARTBEAT_WORD] = time.monotonic_ns()
        writer._header[layout.CLOCK_OFFSET_WORD] = time.time_ns() - time.monotonic_ns() - ago_s * 10**9
    assert place.clean_up(tmp_path, {}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["new.ring"]
