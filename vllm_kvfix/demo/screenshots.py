# SPDX-License-Identifier: Apache-2.0
"""Takes pictures of the live page in a headless Chromium, for the README; a script as well, so that it can be stopped.

Playwright is asked for only by who wants pictures: ``pip install playwright && playwright install chromium``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix.demo.environment import SetupError
from vllm_kvfix.demo.stopping import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INSTALL = "pip install playwright && playwright install --with-deps chromium"
_SYSTEM_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CHECK_TIMEOUT_S = 60
_KILL_GRACE_S = 10
_PAGE_TIMEOUT_MS = 30_000
_LIVE = "#live[data-state=live]"
# The history comes after the first figures, and then the charts are drawn.
_DRAWN_AFTER_MS = 3_000


@dataclass(frozen=True)
class View:
    """How one picture is taken."""

    name: str
    width: int
    height: int
    scheme: str
    scale: float = 1.5


STAGES: Mapping[str, tuple[View, ...]] = {
    "check": (),
    "leak": (
        View("page-light", 1280, 1200, "light"),
        View("page-dark", 1280, 1200, "dark"),
        View("page-phone", 390, 844, "light", scale=2),
    ),
    "fixed": (View("page-fixed", 1280, 1200, "light"),),
}


class Camera:
    """Takes the pictures of a stage in a process of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        """Take them of the page ``url``, to ``folder``."""
        self._url = url
        self._folder = folder
        self.files: list[Path] = []

    @contextlib.contextmanager
    def shooting(self, stage: str) -> Iterator[subprocess.Popen[str]]:
        """Take the pictures of a stage; the process that does it ends with the block at the latest.

        Raises:
            SetupError: They cannot be taken; says why.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with _child(stage, self._url, self._folder) as child:
            yield child
            _checked(child)
        self.files += [self._folder / f"{view.name}.png" for view in STAGES[stage]]


def check() -> None:
    """See that pictures can be taken, before minutes are spent.

    Raises:
        SetupError: They cannot; says what to install.
    """
    with _child("check", "about:blank", Path()) as child:
        try:
            child.wait(_CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SetupError(f"Chromium did not start within {_CHECK_TIMEOUT_S} s; try {INSTALL}") from None
        _checked(child)


@contextlib.contextmanager
def _child(stage: str, url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", __name__, stage, url, str(folder)]
    path = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
    # What a browser leaves in the place for temporary files goes with it.
    with tempfile.TemporaryDirectory(prefix="kvfix-shots-", ignore_cleanup_errors=True) as place:
        child: subprocess.Popen[str] | None = None
        try:
            with uninterrupted():
                child = subprocess.Popen(  # noqa: S603  our own command
                    command,
                    env=os.environ | {"PYTHONPATH": path, "TMPDIR": place},
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            yield child
        finally:
            if child is not None:
                # Its browser is in its group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait(_KILL_GRACE_S)


def _checked(child: subprocess.Popen[str]) -> None:
    said = child.communicate()[1].strip()
    if child.returncode:
        raise SetupError(f"no screenshots: {said or f'exit code {child.returncode}'}")


def _launched(playwright: Any) -> Any:
    from playwright.sync_api import Error  # noqa: PLC0415  not there unless pictures are asked for

    found = next((path for name in _SYSTEM_BROWSERS if (path := shutil.which(name))), None)
    # Chromium's sandbox refuses to be set up by root, as containers have it; the page is our own.
    options: dict[str, Any] = {"chromium_sandbox": os.getuid() != 0}
    try:
        return playwright.chromium.launch(**options)
    except Error:
        if found is None:
            raise
    return playwright.chromium.launch(executable_path=found, **options)


def main(arguments: list[str]) -> int:
    """Take the pictures of one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        from playwright.sync_api import Error, sync_playwright  # noqa: PLC0415  as above
    except ImportError:
        sys.stderr.write(f"Playwright is not installed here: {INSTALL}\n")
        return 1
    with sync_playwright() as playwright:
        try:
            browser = _launched(playwright)
        except Error as error:
            first = str(error).strip().splitlines()[0]
            sys.stderr.write(f"no Chromium starts here ({first}): {INSTALL}\n")
            return 1
        for view in STAGES[options.stage]:
            _shoot(browser, view, options.url, options.folder)
        browser.close()
    return 0


def _shoot(browser: Any, view: View, url: str, folder: Path) -> None:
    context = browser.new_context(
        viewport={"width": view.width, "height": view.height},
        device_scale_factor=view.scale,
        color_scheme=view.scheme,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(url, timeout=_PAGE_TIMEOUT_MS)
    page.wait_for_selector(_LIVE, timeout=_PAGE_TIMEOUT_MS)
    page.wait_for_timeout(_DRAWN_AFTER_MS)
    page.screenshot(path=str(folder / f"{view.name}.png"))
    context.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
