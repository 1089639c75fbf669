# SPDX-License-Identifier: Apache-2.0
"""Where rings lie: the folder that engine and sidecar agree on, the names in it, and what is left there of the dead."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix.ring.reader import LARGEST_FILE, RingError, RingReader

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER_VARIABLE = "VLLM_KVFIX_RING_DIR"
SIZE_VARIABLE = "VLLM_KVFIX_RING_SIZE"
SUFFIX = ".ring"
DEFAULT_SIZE = 8 << 20
SMALLEST_SIZE = 16 << 10
# Rings of ended engines that stay for a post-mortem.
KEPT = 4

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


def clean_up(folder: Path, keep: int = KEPT) -> int:
    """Remove the rings of ended engines from ``folder``, but for the ``keep`` newest; returns how many were removed.

    Rings that this process may have made itself are left alone: to look at one would give up the lock on it.
    """
    others = (path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(f"{os.getpid()}-"))
    beats = ((_last_beat_of_ended(path), path) for path in others)
    ended = sorted(((beat, path) for beat, path in beats if beat is not None), reverse=True)
    removed = 0
    for _, path in ended[keep:]:
        with contextlib.suppress(OSError):  # another engine's clean-up was faster, or it is not ours to remove
            path.unlink()
            removed += 1
    return removed


def _last_beat_of_ended(path: Path) -> int | None:
    """Unix time in ns of the last frame of a ring whose writer is gone; None of every other file."""
    try:
        reader = RingReader(path)
    except (OSError, RingError):
        return None
    try:
        header = reader.header
        return header.heartbeat_ns + header.clock_offset_ns if reader.writer_is_gone() else None
    finally:
        reader.close()
