# SPDX-License-Identifier: Apache-2.0
"""A memory cgroup of its own for a test, with a limit that the kernel enforces: version 1 or 2, made as root."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from typing_extensions import Self

MOUNTS = Path("/sys/fs/cgroup")
_EMPTY_S = 60.0


class MemoryCgroup:
    """Made on entering, removed on leaving; what is still in it goes back to the cgroup above."""

    def __init__(self) -> None:
        self._v1 = (MOUNTS / "memory").is_dir()
        self.path = (MOUNTS / "memory" if self._v1 else MOUNTS) / f"vllm-kvfix-test-{os.getpid()}-{time.time_ns()}"

    def __enter__(self) -> Self:
        try:
            self.path.mkdir()
            self._count()
        except OSError as error:
            raise AssertionError(
                f"this test needs root and a memory cgroup under {MOUNTS}; mount one writable: {error}"
            ) from error
        return self

    def limit(self, size: int) -> None:
        """Let the kernel kill in it when that much is used."""
        (self.path / ("memory.limit_in_bytes" if self._v1 else "memory.max")).write_text(str(size))
        if not self._v1:
            (self.path / "memory.swap.max").write_text("0")

    def put(self, pids: Iterable[int]) -> None:
        """Charge what these processes use from now on to it."""
        for pid in pids:
            (self.path / "cgroup.procs").write_text(str(pid))

    @property
    def kills(self) -> int:
        """How many of its processes the kernel has killed for their memory."""
        return self._count()

    def _count(self) -> int:
        text = (self.path / ("memory.oom_control" if self._v1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _EMPTY_S
        while True:
            for pid in (self.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (self.path.parent / "cgroup.procs").write_text(pid)
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return
