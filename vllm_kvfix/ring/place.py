# SPDX-License-Identifier: Apache-2.0
"""Where rings lie: the folder that engine and sidecar agree on, the names in it, and what is left there of the dead."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import LARGEST_FILE, RingError, RingReader

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER_VARIABLE = "VLLM_KVFIX_RING_DIR"
SIZE_VARIABLE = "VLLM_KVFIX_RING_SIZE"
MODE_VARIABLE = "VLLM_KVFIX_RING_MODE"
SUFFIX = ".ring"
# Beside a ring, how far a sidecar has told it.
CURSOR_SUFFIX = ".cursor"
DEFAULT_SIZE = 8 << 20
SMALLEST_SIZE = 16 << 10
# Rings of ended processes that stay for a post-mortem, by role: of one engine there may be many workers.
KEPT = {layout.ENGINE_CORE: 4, layout.API_SERVER: 4, layout.WORKER: 16}
# And in all: the folder may be a tmpfs, whose bytes are memory of the pod. The newest one stays, however large.
KEPT_BYTES = 64 << 20
# Where a filesystem has no locks, a process that has said nothing for so long is gone: it speaks every second.
SILENT_NS = 3600 * 10**9

DEFAULT_MODE = 0o600
# What a mode may add to that: that others read, never that they write.
_READABLE = 0o044
_MOST_CURSOR = 4096
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


class PlaceError(Exception):
    """No ring can be put where it should go; the message says why and what to do."""


def folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The folders that ``VLLM_KVFIX_RING_DIR`` names, separated as in ``PATH``; unset: one for this user."""
    named = [Path(part) for part in environ.get(FOLDER_VARIABLE, "").split(os.pathsep) if part]
    return tuple(named) or (Path(tempfile.gettempdir(), f"vllm-kvfix-{os.getuid()}"),)


def default_folder(environ: Mapping[str, str]) -> Path:
    """The folder that an engine writes to: the first of :func:`folders`."""
    return folders(environ)[0]


def ring_size(environ: Mapping[str, str]) -> int:
    """Bytes for a ring: ``VLLM_KVFIX_RING_SIZE`` such as ``8MiB``, ``512K`` or ``1048576``; unset: 8 MiB.

    Raises:
        ValueError: It is no size, or is too small or too large; the message says what would do.
    """
    text = environ.get(SIZE_VARIABLE, "").strip()
    if not text:
        return DEFAULT_SIZE
    found = re.fullmatch(r"(\d{1,12})\s*([KMG]?)(i?B)?", text, re.IGNORECASE)
    size = int(found[1]) << _UNITS[found[2].upper()] if found else 0
    if not SMALLEST_SIZE <= size <= LARGEST_FILE:
        raise ValueError(
            f"{SIZE_VARIABLE}={text} is no size between {SMALLEST_SIZE >> 10}KiB and {LARGEST_FILE >> 20}MiB; "
            "write it like 8MiB"
        )
    return size


def ring_mode(environ: Mapping[str, str]) -> int:
    """The permissions of a ring: ``VLLM_KVFIX_RING_MODE`` in octal, such as ``644``; unset: 600, this user alone.

    Others than 600 are for a folder that only this user's own containers share, whose sidecar is another user.

    Raises:
        ValueError: It is none of 600, 604, 640 and 644.
    """
    text = environ.get(MODE_VARIABLE, "").strip()
    try:
        mode = int(text, 8) if text else DEFAULT_MODE
    except ValueError:
        mode = -1
    if mode & ~_READABLE != DEFAULT_MODE:
        raise ValueError(f"{MODE_VARIABLE}={text} is none of 600, 604, 640 and 644")
    return mode


def new_ring(folder: Path) -> Path:
    """A path for a new ring of this process in ``folder``, which is made if missing, for this user alone.

    Raises:
        PlaceError: The folder is another user's, or no folder: a shared one such as ``/tmp`` could be prepared by
            somebody else. A folder that is named by ``VLLM_KVFIX_RING_DIR`` may belong to anybody.
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if folder.parent == Path(tempfile.gettempdir()) and (found.st_uid != os.getuid() or folder.is_symlink()):
        raise PlaceError(f"{folder} is not this user's own folder; name another one by {FOLDER_VARIABLE}")
    return folder / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"


class _Ended(NamedTuple):
    """The ring of an ended process; sorts as they are to stay: those that no sidecar has told, then the newest."""

    untold: bool
    unix_ns: int
    path: Path
    role: str
    size: int


def clean_up(folder: Path, keep: Mapping[str, int] = KEPT, keep_bytes: int = KEPT_BYTES) -> int:
    """Remove the rings of ended processes from ``folder``; returns how many were removed.

    Of each role as many stay as ``keep`` says, of all together ``keep_bytes``: the newest, and before those the ones
    that a sidecar has begun to follow and not told to their end. A ring goes by its name alone: whoever has it open
    reads on.

    Rings that this process may have made itself are left alone: to look at one would give up the lock on it.
    """
    others = (path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(f"{os.getpid()}-"))
    ended = sorted((found for path in others if (found := _ended(path)) is not None), reverse=True)
    removed = used = 0
    counts = dict.fromkeys(layout.ROLES, 0)
    for ring in sorted(ended, key=lambda ring: ring.role != layout.ENGINE_CORE):  # its ring tells most
        counts[ring.role] += 1
        if counts[ring.role] <= keep.get(ring.role, 0) and (not used or used + ring.size <= keep_bytes):
            used += ring.size
            continue
        with contextlib.suppress(OSError):  # another engine's clean-up was faster, or it is not ours to remove
            ring.path.unlink()
            removed += 1
            cursor_of(ring.path).unlink()
    return removed


def cursor_of(ring: Path) -> Path:
    """Where the cursor of a ring lies."""
    return ring.with_name(ring.name + CURSOR_SUFFIX)


def _ended(path: Path) -> _Ended | None:
    """A ring whose writer is gone; None of every other file."""
    try:
        reader = RingReader(path)
    except (OSError, RingError):
        return None
    try:
        header, gone = reader.header, reader.writer_is_gone()
    finally:
        reader.close()
    said = header.heartbeat_ns + header.clock_offset_ns
    if gone or (gone is None and time.time_ns() - said > SILENT_NS):
        return _Ended(_is_untold(path), said, path, header.role, reader.found.st_size)
    return None


def _is_untold(ring: Path) -> bool:
    """Whether a sidecar has begun to tell a ring, and not come to its end."""
    try:
        return json.loads(_cursor_bytes(cursor_of(ring)))["ended"] is False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _cursor_bytes(path: Path) -> bytes:
    # Whatever lies there, an engine's start must not wait for it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _MOST_CURSOR)
    finally:
        os.close(descriptor)
