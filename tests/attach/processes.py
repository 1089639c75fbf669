# SPDX-License-Identifier: Apache-2.0
"""Processes to attach to, cheap ones: each ends with its test."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import packaging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SCRIPT = Path(__file__).with_name("target_script.py")
TITLE = "VLLM::EngineCore"


class Process:
    """A target, and what it says of itself."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._running = running
        self.pid = running.pid

    def ask(self, what: str = "state") -> dict[str, Any]:
        """Have it say what is in it."""
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        self._running.stdin.write(f"{what}\n")
        self._running.stdin.flush()
        said: dict[str, Any] = json.loads(self._running.stdout.readline())
        return said

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._running.poll() is None


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds, ten seconds at most."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0001)


def state_of(pid: int) -> str:
    """The letter of a process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def started(command: list[str], first_line: str = "", **options: Any) -> Iterator[Process]:
    """A process that has said its first line."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as running:
        try:
            if first_line:
                assert running.stdout is not None
                assert running.stdout.readline() == f"{first_line}\n"
            yield Process(running)
        finally:
            running.kill()


def environ(site: Path, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a target: the fake vLLM, and packaging, which vLLM depends on; nothing of ours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))}
    path = os.pathsep.join([str(site), str(packaging_folder(site))])
    temporary = site.with_name(f"{site.name}-tmp")
    temporary.mkdir(exist_ok=True)
    return {**clean, "VLLM_KVFIX_PATCH": "force", "PYTHONPATH": path, "TMPDIR": str(temporary), **(further or {})}


def packaging_folder(site: Path) -> Path:
    """A folder with packaging and nothing else."""
    folder = site.with_name(f"{site.name}-packaging")
    folder.mkdir(exist_ok=True)
    link = folder / "packaging"
    if not link.exists():
        link.symlink_to(Path(packaging.__file__).parent)
    return folder


@contextlib.contextmanager
def engine(  # noqa: PLR0913  # each has its default
    site: Path,
    drive: str = "idle",
    leaked: int = 0,
    *,
    title: str = TITLE,
    python: str = sys.executable,
    further: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """A fake engine core with the vLLM in ``site``."""
    command = [title, str(SCRIPT), drive, str(leaked)]
    # By its real path: it cannot find its own environment by a name that is none.
    with started(command, "up", executable=os.path.realpath(python), env=environ(site, further)) as running:
        yield running
