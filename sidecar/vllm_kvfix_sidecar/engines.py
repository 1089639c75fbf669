# SPDX-License-Identifier: Apache-2.0
"""Finds engines by their ring files, follows each ring from where it was left, and tells whether its engine lives."""

from __future__ import annotations

import errno
import logging
import os
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix.ring.place import SUFFIX
from vllm_kvfix.ring.reader import RingError, RingReader
from vllm_kvfix_sidecar import cursors
from vllm_kvfix_sidecar.metrics import EngineKey
from vllm_kvfix_sidecar.processes import boot_id_of, process_runs
from vllm_kvfix_sidecar.refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from vllm_kvfix.ring.reader import Frame, Header
    from vllm_kvfix_sidecar.cursors import Cursor

MOST_ENGINES = 256
MOST_NAMES = 4096
LIVE, ENDED, UNKNOWN = "live", "ended", "unknown"

_log = logging.getLogger(__name__)


class FileId(NamedTuple):
    """A file, whatever its name; not used again while it is open."""

    device: int
    inode: int


class Engine:
    """One engine, and how far its ring was read.

    ``state`` is ``live``, ``ended``, or ``unknown`` where neither lock nor process table can tell. ``consumed``: events
    before this one were read. ``lost`` events were overwritten, or damaged, before anybody told them, earlier runs of
    the sidecar included. ``behind``: there may be more than was read in the last turn. ``told``: it has ended and all
    was told. ``linked``: the file still lies at ``path``.
    """

    def __init__(self, reader: RingReader, cursor: Cursor) -> None:
        header = reader.header
        self.path = reader.path
        self.file = FileId(reader.found.st_dev, reader.found.st_ino)
        self.key = EngineKey(header.pid, header.engine_index, reader.path.name)
        self.pid = header.pid
        self.start_time = header.start_time
        self.boot_id = header.boot_id
        self.engine_index = header.engine_index
        self.vllm_version = header.vllm_version
        self.state = UNKNOWN
        self.consumed = 0
        self.cursor = cursor
        self.lost = cursor.lost
        self.behind = False
        self.told = cursor.ended
        self.linked = True
        self.closed = False
        self._reader = reader
        self._frames: Iterator[Frame] | None = None
        self._reader_lost = 0
        self._said_unwritable = False

    @property
    def header(self) -> Header:
        """The header when it was last read."""
        return self._reader.header

    def frames(self, most: int) -> Iterator[tuple[Frame, bool]]:
        """Frames published since, and whether each was told before; stops after ``most`` events, to be called again.

        Raises:
            RingError, OSError: The file cannot be read any more.
        """
        taken, fresh = 0, False
        self.behind = True
        while taken < most:
            if self._frames is None:
                self._frames, fresh = self._reader.poll(), True
            frame = next(self._frames, None)
            if frame is None:
                self._frames = None
                if fresh:  # one begun in an earlier call knows nothing of what was published since
                    self.behind = False
                    return
                continue
            taken += frame.events
            self._count_lost(frame)
            self.consumed = frame.first_event + frame.events
            yield frame, self.consumed <= self.cursor.events

    def _count_lost(self, frame: Frame) -> None:
        lost = self._reader.lost - self._reader_lost
        self._reader_lost = self._reader.lost
        # Of those before the cursor, the cursor knows.
        self.lost += min(lost, max(0, frame.first_event - self.cursor.events))

    def end(self) -> int:
        """Nothing will be published any more: what was and could not be read is lost. How many events that is."""
        lost = max(0, self.header.events - max(self.consumed, self.cursor.events))
        self.lost += lost
        return lost

    def look(self, proc: Path, boot_id: bytes | None) -> None:
        """Find out whether the engine lives; ``proc`` is a process table, ``boot_id`` this boot's, if known."""
        self.state = self._state(proc, boot_id)

    def _state(self, proc: Path, boot_id: bytes | None) -> str:
        gone = self._reader.writer_is_gone()
        if gone is False:  # a lock is proof, whatever the process table shows
            return LIVE
        if boot_id is not None and any(self.boot_id) and self.boot_id != boot_id:
            return ENDED
        if process_runs(proc, self.pid, self.start_time):
            return LIVE
        return ENDED if gone else UNKNOWN

    def let_go(self) -> bool:
        """Whether a process that held the lock does so no longer."""
        return self.state == LIVE and self._reader.writer_is_gone() is True

    def save(self, cursor: Cursor, seen: object = None) -> None:
        """Remember beside the ring how far it was told, and what was ``seen`` of the end; a failure is said once."""
        try:
            if self.linked:
                cursors.write(self.path, self.header, cursor, seen)
        except OSError as error:
            if not self._said_unwritable:
                _log.warning(
                    "cannot write %s: %s. If the sidecar is restarted, it tells again what the ring still holds.",
                    cursors.path_of(self.path),
                    error.strerror,
                )
            self._said_unwritable = True

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._reader.close()
        self.closed, self.behind, self._frames = True, False, None


def trusted_owners() -> Collection[int] | None:
    """The users whose rings this process follows unless told otherwise: its own; None, everybody's, for root."""
    user = os.geteuid()
    return None if user == 0 else (user,)


class Engines:
    """The engines of some folders. All that is kept is bounded by ``most``, or by the ``MOST_NAMES`` of each folder."""

    def __init__(
        self,
        folders: Sequence[Path],
        proc: Path,
        most: int = MOST_ENGINES,
        owners: Collection[int] | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        """Look at nothing yet.

        Args:
            folders: Where rings lie; a folder may be missing and come later.
            proc: Where a process table is mounted.
            most: Rings followed at a time.
            owners: The users whose rings are followed; None: everybody's.
            read_only: Remove no cursors whose rings are gone.
        """
        self.folders_readable = False
        self._folders = folders
        self._proc = proc
        self._most = most
        self._read_only = read_only
        self._owners = owners
        self._boot_id = boot_id_of(proc)
        self._engines: dict[FileId, Engine] = {}
        self._refusals = Refusals()
        self._said: dict[Path, str] = {}
        self._told: dict[Path, FileId] = {}

    @property
    def all(self) -> Sequence[Engine]:
        """The engines that are known, those that ended included, as long as their files are there."""
        return tuple(self._engines.values())

    @property
    def refused(self) -> Mapping[Path, str]:
        """Why a file is not followed, for each such file."""
        return self._refusals.reasons

    def scan(self, now: float) -> None:
        """Find new rings, forget what is gone, see who lives. ``now`` in seconds of any steady clock."""
        seen: dict[Path, FileId | None] = {}
        self.folders_readable = bool(sum([self._scan_folder(folder, seen, now) for folder in self._folders]))
        self._refusals.keep(seen)
        self._told = {path: file for path, file in self._told.items() if seen.get(path) == file}
        for engine in self.all:
            engine.linked = seen.get(engine.path) == engine.file
            if not engine.closed:
                engine.look(self._proc, self._boot_id)
            elif not engine.linked:
                del self._engines[engine.file]

    def look(self) -> None:
        """See who has ended since the last scan, by the locks alone: that takes a microsecond each."""
        for engine in self.all:
            if not engine.closed and engine.let_go():
                engine.look(self._proc, self._boot_id)

    def _scan_folder(self, folder: Path, seen: dict[Path, FileId | None], now: float) -> bool:
        try:
            names = _names(folder)
        except OSError as error:
            self._say(folder, f"cannot look into {folder}: {error.strerror}. It is tried again every second.")
            return False
        if len(names) < MOST_NAMES:
            self._said.pop(folder, None)
        else:
            self._say(folder, f"{folder} holds more than {MOST_NAMES} rings and cursors; those beyond are not seen.")
        for name in names:
            if name.endswith(SUFFIX):
                seen[folder / name] = self._look_at(folder / name, now)
            elif name.removesuffix(cursors.SUFFIX) not in names and not self._read_only:
                cursors.remove(folder / name)
        return True

    def _say(self, path: Path, text: str) -> None:
        if self._said.get(path) != text:
            _log.warning("%s", text)
        self._said[path] = text

    def _look_at(self, path: Path, now: float) -> FileId | None:
        try:
            found = path.lstat()
        except OSError:  # it went since the folder was listed: as if it had not been there
            return None
        file = FileId(found.st_dev, found.st_ino)
        if self._is_known(path, file):
            return file
        stamp = (*file, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        if self._refusals.is_due(path, stamp, now):
            self._open(path, stamp, now)
        return file

    def _is_known(self, path: Path, file: FileId) -> bool:
        known = self._engines.get(file)
        if known is not None and known.closed and known.path != path:
            del self._engines[file]  # that file is gone, and another got its inode
            known = None
        return known is not None or self._told.get(path) == file

    def _open(self, path: Path, stamp: tuple[int, ...], now: float) -> None:
        try:
            self._make_room()
            reader = RingReader(path, self._owners)
        except RingError as error:
            self._refusals.add(path, str(error), stamp, now)
        except OSError as error:
            what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            self._refusals.add(path, f"cannot open {path}: {what}", stamp, now)
        else:
            self._refusals.followed(path)
            self._follow(Engine(reader, cursors.read(path, reader.header)))

    def _make_room(self) -> None:
        if len(self._engines) < self._most:
            return
        ended = next((engine for engine in self._engines.values() if engine.closed), None)
        if ended is None:
            raise RingError(f"{self._most} rings are followed already; start another sidecar for another folder")
        del self._engines[ended.file]
        self._told[ended.path] = ended.file  # so that it is not told again

    def _follow(self, engine: Engine) -> None:
        self._engines[engine.file] = engine
        engine.look(self._proc, self._boot_id)
        if engine.told and engine.state == ENDED:
            engine.consumed = engine.cursor.events
            engine.close()
            return
        engine.told = False
        role = engine.header.role
        what = f"engine {engine.engine_index}" if role == ENGINE_CORE else role
        _log.info("follow %s of process %d: %s", what, engine.pid, engine.path)

    def give_up(self, engine: Engine, reason: str, now: float) -> None:
        """Follow a ring that cannot be read no longer, but try again later."""
        engine.close()
        self._engines.pop(engine.file, None)
        self._refusals.add(engine.path, reason, (), now)


def _names(folder: Path) -> set[str]:
    """Names of rings and cursors in a folder, ``MOST_NAMES`` at most."""
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries if entry.name.endswith((SUFFIX, SUFFIX + cursors.SUFFIX)))
        return set(islice(names, MOST_NAMES))
