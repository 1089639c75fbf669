# SPDX-License-Identifier: Apache-2.0
"""A browser for all tests here, and a sidecar that follows a fake engine which leaks and has requests at work."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.chromium import chromium
from tests.browser.viewer import Viewer, viewing
from tests.sidecar_e2e.sidecar import Sidecar
from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, so that they can be left out where minutes count."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium: of this folder's tests alone, since as long as it runs no other test of the process can use asyncio."""
    with chromium() as found:
        yield found


@dataclass
class Told:
    """A told engine's process, and its ring's stem."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def kill(self) -> None:
        """End it as the kernel does when memory is short."""
        self.process.kill()
        self.process.wait()

    def add(self, ids: int) -> int:
        """Have it leak so many ids more; how many it has then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{ids}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def engine(ring: Path, *texts: str, version: str = "0.25.1") -> Iterator[Told]:
    """A told engine that has begun."""
    command = [sys.executable, "-m", "tests.browser.told_engine", str(ring), version, *texts]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield Told(process)
        finally:
            process.kill()  # leaving waits for it


@dataclass
class Scene:
    """A sidecar, its page's address, and the engine that it follows."""

    sidecar: Sidecar
    engine: Told

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.sidecar.port}/"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One that the tests of a module share."""
    folder = tmp_path_factory.mktemp("scene")
    rings = folder / "rings"
    rings.mkdir()
    with engine(rings / "a.ring") as told, Sidecar(folder, rings, {}) as sidecar:
        yield Scene(sidecar, told)


@pytest.fixture
def viewer(browser: Browser) -> Iterator[Viewer]:
    """A page that is not open yet."""
    with viewing(browser) as found:
        yield found
