# SPDX-License-Identifier: Apache-2.0
"""Where this command and the code in the target meet: a folder that both see, with a socket in it; gone right after.

The folder lies in the target's own file system, which may be a container's, and is reached from outside by
``/proc/PID/root``. Once the target has connected, both hold the connection, and nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix.attach.errors import AttachError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

_PREFIX = "vllm-kvfix-attach-"
_RANDOM_BYTES = 6
_SOCKET = "s"
# A socket's path has 107 bytes at most (unix(7), less the NUL), and the target must use all of it.
_LONGEST = 107 - len(f"/{_PREFIX}{'00' * _RANDOM_BYTES}/{_SOCKET}")


class Meeting:
    """A folder in the target's file system, used as a context manager; and a socket that listens in it."""

    def __init__(self, pid: int, candidates: Iterable[str], owner: tuple[int, int], *, executable: bool) -> None:
        """Nothing is made before it is entered.

        Args:
            pid: The target.
            candidates: Folders as the target sees them, best first.
            owner: The target's user and group ids, as seen from here.
            executable: Whether code must be allowed to be mapped from there.
        """
        self._root = Path(f"/proc/{pid}/root")
        self._owner = owner
        self.name = f"{_PREFIX}{secrets.token_hex(_RANDOM_BYTES)}"
        self._candidates = tuple(dict.fromkeys(candidates))
        self._executable = executable
        self._parent = ""
        self._listener: socket.socket | None = None

    @property
    def socket(self) -> str:
        """The path of the socket as the target sees it."""
        return self.inside(_SOCKET)

    @property
    def outside(self) -> Path:
        """The folder as seen from here."""
        return self._root / self._parent.lstrip("/") / self.name

    def inside(self, name: str) -> str:
        """The path of a file in it as the target sees it."""
        return str(Path(self._parent) / self.name / name)

    def __enter__(self) -> Meeting:  # noqa: PYI034  # Self came with Python 3.11
        """Make the folder, for the target's user alone, and listen.

        Raises:
            AttachError: None of the candidates would do.
        """
        self._make_folder()
        try:
            listener = socket.socket(socket.AF_UNIX)
            self._listener = listener
            # By way of the folder's descriptor the path is short, wherever it lies.
            folder = os.open(self.outside, os.O_RDONLY | os.O_DIRECTORY)
            try:
                listener.bind(f"/proc/self/fd/{folder}/{_SOCKET}")
            finally:
                os.close(folder)
            listener.listen(1)
            self._give(self.outside / _SOCKET)
            self._give(self.outside)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing behind."""
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self.outside, ignore_errors=True)

    def _make_folder(self) -> None:
        seen = []
        for candidate in self._candidates:
            self._parent = candidate
            why = _unfit(self._root, candidate, executable=self._executable)
            if not why:
                try:
                    self.outside.mkdir(mode=0o700)
                except OSError as error:
                    why = error.strerror or "not writable"
                else:
                    return
            seen.append(f"{candidate} ({why})")
        raise AttachError(
            Reason.NO_PLACE,
            f"no folder of it can hold a small file for a moment: {', '.join(seen)}",
            "mount a writable /tmp without noexec, such as an emptyDir",
        )

    def _give(self, path: Path) -> None:
        if os.geteuid() != self._owner[0]:
            os.chown(path, *self._owner)

    def put(self, name: str, content: bytes) -> str:
        """Write a file that the target can read, and return its path as the target sees it."""
        path = self.outside / name
        path.write_bytes(content)
        path.chmod(0o500)
        self._give(path)
        return self.inside(name)

    def wait(self, timeout_s: float) -> Link:
        """The connection of the target.

        Raises:
            AttachError: It did not come.
        """
        assert self._listener is not None, "to be used as a context manager"  # noqa: S101  # a misuse of ours
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError as error:
            raise AttachError(
                Reason.NO_ANSWER,
                f"the code in it did not answer within {timeout_s:.0f} s; it changes nothing before it has",
                "send it a request, so that it runs some Python, and try again",
            ) from error
        return Link(connection)


class Link:
    """The connection to the code in the target."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rwb")

    def peer(self) -> int:
        """The process id at the other end, as seen from here."""
        found = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", found)[0])

    def send(self, head: Mapping[str, Any], data: bytes) -> None:
        """Send a parcel."""
        self._stream.write(json.dumps(head).encode() + b"\n" + data)
        self._stream.flush()

    def events(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """What the other end tells, until it hangs up.

        Raises:
            AttachError: It fell silent.
        """
        self._connection.settimeout(timeout_s)
        try:
            for line in self._stream:
                yield json.loads(line)
        except (OSError, ValueError) as error:
            raise AttachError(
                Reason.FAILED,
                f"the code in it fell silent: {error}",
                "see the engine's log; `vllm-kvfix detach` takes back what it may have attached",
            ) from error

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


def _unfit(root: Path, candidate: str, *, executable: bool) -> str:
    """Why a folder will not do; empty where it may."""
    if not candidate.startswith("/"):
        return "not absolute"
    if len(os.fsencode(candidate)) > _LONGEST:
        return "too long a path"
    folder = root / candidate.lstrip("/")
    try:
        flags = os.statvfs(folder).f_flag
    except OSError as error:
        return error.strerror or "unreadable"
    if not folder.is_dir():
        return "no folder"
    if flags & os.ST_RDONLY:
        return "read-only"
    return "noexec" if executable and flags & os.ST_NOEXEC else ""
