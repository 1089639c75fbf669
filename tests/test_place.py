# SPDX-License-Identifier: Apache-2.0
"""ring.place and the writer's lock: where rings lie, how large they are, and which are left of the dead."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT
from vllm_kvfix.ring import place
from vllm_kvfix.ring.reader import RingReader

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITER = """
import sys
from pathlib import Path
from vllm_kvfix.ring.writer import Origin, RingWriter
writer = RingWriter(Path(sys.argv[1]), 256, Origin(1, bytes(16)))
writer.write([1, 2], 1)
print("ready", flush=True)
sys.stdin.read()
"""


class Engine:
    """Another process that holds a ring until it is ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", WRITER, str(path)]
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
    assert place.clean_up(tmp_path, keep=1) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken.ring", "notes.txt", "other-1.ring", "other-2.ring",
    ]  # fmt: skip
