# SPDX-License-Identifier: Apache-2.0
"""build_page: whatever is built has the page's chart library, which npm fetches; without it no build succeeds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT
from vllm_kvfix.demo.environment import find_uv

VENDOR = Path("sidecar/vllm_kvfix_sidecar/page/vendor")
LOCK = Path("sidecar/page/package-lock.json")
FILES = {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE.txt", "vendored.json"}
# What a build reads; .gitignore, too, since it keeps files out of it.
SOURCES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore", "vllm_kvfix", "sidecar")
LONG_S = 400
OFFLINE = "#!/bin/sh\necho 'npm error code ENOTFOUND' >&2\nexit 1\n"


def checkout(folder: Path) -> Path:
    """A copy of the sources as git has them, with nothing that was fetched."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES],  # noqa: S607  # git is the one on PATH
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # it may have been deleted, and not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    assert not (folder / VENDOR).exists()
    return folder


def uv(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run uv; ``path``: the only folder on PATH, None: PATH as it is."""
    found = find_uv()
    assert found is not None, "uv is missing, so NO BUILD IS TESTED: make test brings it, or pip install uv"
    command = [shutil.which(found[0]) or found[0], *found[1:], *words]
    environ = os.environ if path is None else {**os.environ, "PATH": str(path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S, env=environ)


def wheel(source: Path, out: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Build a wheel as users of pip do."""
    options = ("--wheel", "--python", sys.executable, "--out-dir", str(out))
    return uv("build", *options, str(source), path=path)


def in_wheel(folder: Path) -> dict[str, bytes]:
    """The library's files in the one wheel there, by name."""
    (found,) = folder.glob("*.whl")
    with zipfile.ZipFile(found) as archive:
        names = [name for name in archive.namelist() if "/page/vendor/" in name]
        return {name.rpartition("/")[2]: archive.read(name) for name in names}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel made of that."""
    folder = tmp_path_factory.mktemp("built")
    source = checkout(tmp_path_factory.mktemp("checkout"))
    done = uv("build", "--python", sys.executable, "--out-dir", str(folder), str(source))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def unpacked(built: Path, tmp_path: Path) -> Path:
    """The sdist's folder, unpacked."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist")  # noqa: S202  # of our own making
    (folder,) = (tmp_path / "sdist").iterdir()
    return folder


@pytest.fixture
def offline(tmp_path: Path) -> Path:
    """A folder for PATH whose npm reaches nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "npm").write_text(OFFLINE)
    (folder / "npm").chmod(0o755)
    return folder


def test_a_wheel_has_the_page_the_library_and_its_licence(built: Path) -> None:
    """All four files, with the licence's text, beside the page; not what fetched them."""
    files = in_wheel(built)
    assert set(files) == FILES
    assert b"Permission is hereby granted" in files["uPlot.LICENSE.txt"]
    assert json.loads(files["vendored.json"])["files"].keys() == FILES - {"vendored.json"}
    (found,) = built.glob("*.whl")
    with zipfile.ZipFile(found) as archive:
        names = set(archive.namelist())
    assert "vllm_kvfix_sidecar/page/index.html" in names
    assert not [name for name in names if "build_page" in name or "node_modules" in name or "package-lock" in name]


def test_an_sdist_builds_without_network(unpacked: Path, offline: Path, tmp_path: Path) -> None:
    """Its wheel has the same files, and npm was not needed."""
    assert {path.name for path in (unpacked / VENDOR).iterdir()} == FILES
    done = wheel(unpacked, tmp_path, offline)
    assert done.returncode == 0, done.stderr
    assert in_wheel(tmp_path) == {name: (unpacked / VENDOR / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("spoilt", ["missing", "changed", "pinned anew"])
def test_without_network_and_files_the_build_says_what_to_do(
    unpacked: Path, offline: Path, tmp_path: Path, spoilt: str
) -> None:
    """Where a file is missing, changed, or of another version than the pinned one: npm's words, and three ways out."""
    script = unpacked / VENDOR / "uPlot.iife.min.js"
    if spoilt == "missing":
        script.unlink()
    elif spoilt == "changed":
        script.write_bytes(script.read_bytes() + b" ")
    else:
        text = (unpacked / LOCK).read_text()
        (unpacked / LOCK).write_text(text.replace("sha512-KIM", "sha512-KIN"))
        assert text != (unpacked / LOCK).read_text()
    done = wheel(unpacked, tmp_path, offline)
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.whl"))
    for words in (
        "chart library",
        "npm error code ENOTFOUND",
        "npm_config_registry",
        "the sdist",
        "no network is needed",
    ):
        assert words in done.stderr


def test_what_is_not_what_was_pinned_is_refused(tmp_path: Path) -> None:
    """A package of another hash than the lock file's ends the build, and leaves no file behind."""
    source = checkout(tmp_path / "checkout")
    lock = json.loads((source / LOCK).read_text())
    pin = lock["packages"]["node_modules/uplot"]
    pin["integrity"] = "sha512-" + "A" * 86 + "=="
    (source / LOCK).write_text(json.dumps(lock))
    done = wheel(source, tmp_path / "out")
    assert done.returncode != 0
    assert "EINTEGRITY" in done.stderr
    assert not (source / VENDOR).exists() or not list((source / VENDOR).iterdir())


def test_an_editable_install_brings_the_files_into_the_checkout(tmp_path: Path) -> None:
    """As `uv sync` makes one; what else lay in the folder is gone."""
    source = checkout(tmp_path / "checkout")
    (source / VENDOR).mkdir()
    (source / VENDOR / "old.js").write_text("")
    done = uv("venv", "--python", sys.executable, str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    done = uv("pip", "install", "--python", str(tmp_path / "venv"), "--no-deps", "--editable", str(source))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (source / VENDOR).iterdir()} == FILES


def test_a_machine_without_npm_gets_one_from_pypi(tmp_path: Path, built: Path) -> None:
    """With nothing on PATH the same files are fetched."""
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    done = wheel(checkout(tmp_path / "checkout"), tmp_path / "out", nothing)
    assert done.returncode == 0, done.stderr
    assert in_wheel(tmp_path / "out") == in_wheel(built)
