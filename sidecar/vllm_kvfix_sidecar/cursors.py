# SPDX-License-Identifier: Apache-2.0
"""Remembers beside a ring how far it was told, so that a restarted sidecar does not tell everything twice.

``<ring>.cursor`` is one JSON object::

    {"boot_id": "3f…", "pid": 4711, "start_time": 123456, "events": 90210, "lost": 0, "ended": false}

``events``: those before this one were told. ``lost``: how many of them were overwritten unread. ``ended``: the engine
had ended, and all of it was told. ``witness``, of one that has ended: what was seen of that from outside, see
:class:`vllm_kvfix_sidecar.oom.Witness`. The file is replaced in one step; a damaged one, or another process's, is
ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvfix.ring import place

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_kvfix.ring.reader import Header

SUFFIX, path_of = place.CURSOR_SUFFIX, place.cursor_of
_MOST_BYTES = 4096


class Cursor(NamedTuple):
    """How far a ring was told; see the module."""

    events: int = 0
    lost: int = 0
    ended: bool = False


def _process_of(header: Header) -> dict[str, object]:
    return {"boot_id": header.boot_id.hex(), "pid": header.pid, "start_time": header.start_time}


def read(ring: Path, header: Header) -> Cursor:
    """The cursor of a ring; ``Cursor()`` where there is none, or none that is this ring's."""
    found = _read(ring, header)
    try:
        cursor = Cursor(found["events"], found["lost"], found["ended"])
    except KeyError:
        return Cursor()
    sound = type(cursor.events) is type(cursor.lost) is int and type(cursor.ended) is bool
    return cursor if sound and 0 <= cursor.lost <= cursor.events <= header.events else Cursor()


def witness(ring: Path, header: Header) -> object:
    """What the cursor of a ring says was seen of its process's end, as it stands there; None: nothing."""
    return _read(ring, header).get("witness")


def _read(ring: Path, header: Header) -> dict[str, Any]:
    """What a cursor says; nothing where there is none that is this ring's."""
    try:
        found = json.loads(_bytes_of(path_of(ring)))
        of_this = all(found[key] == value for key, value in _process_of(header).items())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if of_this and isinstance(found, dict) else {}


def _bytes_of(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is no regular file")
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def write(ring: Path, header: Header, cursor: Cursor, seen: object = None) -> None:
    """Put the cursor beside the ring; ``seen``: what was seen of the process's end, None: it has not ended.

    Raises:
        OSError: The folder cannot be written, or is gone.
    """
    path = path_of(ring)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    # A file left behind by a crash, or a link that somebody laid there: never written through.
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            told = {**_process_of(header), **cursor._asdict(), **({} if seen is None else {"witness": seen})}
            json.dump(told, file)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove(path: Path) -> None:
    """Remove a cursor whose ring is gone; that it cannot be removed does no harm."""
    with contextlib.suppress(OSError):
        path.unlink()
