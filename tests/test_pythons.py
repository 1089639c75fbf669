# SPDX-License-Identifier: Apache-2.0
"""The plugin on every Python that it promises, with the wheel as users get it, beside the fake vLLM."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import packaging
import pytest

from tests.support import ROOT, copy_fake

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSIONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
SCENARIO = """
import importlib.metadata, json, logging, sys
logging.basicConfig(level=logging.INFO)
(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvfix")
entry.load()()
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec
from vllm_kvfix import faults, plugin
def run(*specs):
    scheduler = Scheduler(KVCacheConfig(list(specs)))
    outputs = [scheduler.schedule() for _ in range(5)]
    return [len(m.new_block_ids) for m in scheduler.kv_cache_manager.coordinator.single_type_managers], outputs
fixed, hybrid = run(FullAttentionSpec()), run(FullAttentionSpec(), MambaSpec())
plugin.restore()
stock, stock_hybrid = run(FullAttentionSpec()), run(FullAttentionSpec(), MambaSpec())
assert fixed[0] == [0] and stock[0] == [10] and fixed[1] == stock[1], (fixed, stock)
assert hybrid == stock_hybrid, (hybrid, stock_hybrid)
assert not faults.counts, faults.counts
"""


def candidates(version: str) -> Iterator[str]:
    """Where an interpreter of this version may be, cheapest to ask first; the last resort is that uv installs one."""
    yield sys.executable
    yield from filter(None, [shutil.which(f"python{version}")])
    pyenv = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    yield from sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"))  # noqa: PTH207  # absolute patterns
    uv = shutil.which("uv") or str(ROOT / ".tools/bin/uv")
    for action in ("find", "install", "find"):
        done = subprocess.run(
            [uv, "python", action, version],
            env={**os.environ, "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "0"},
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        if done.returncode == 0 and action == "find":
            yield done.stdout.strip()


def interpreter(version: str) -> str | None:
    """An interpreter of this version that runs; None where none can be had."""
    for candidate in candidates(version):
        try:
            done = subprocess.run(
                [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            )
        except OSError:
            continue
        if done.stdout.strip() == version:
            return candidate
    return None


def pip(*arguments: str) -> None:
    """Run pip quietly."""
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, env=environ)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Path:
    """The wheel, unpacked as pip would, with packaging beside it."""
    site = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    (site / "packaging").symlink_to(Path(packaging.__file__).parent)
    return site


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_fixes_the_fake_on_this_python(version: str, installed: Path, tmp_path: Path) -> None:
    """Loaded by its entry point, the plugin fixes the fake, keeps hybrids as they are, and status says protected."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version}: no interpreter of it can be had here")
    site = copy_fake(tmp_path / "site")
    path = os.pathsep.join(map(str, (site, installed)))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYENV_VERSION"))}
    environ = {**clean, "PYTHONPATH": path, "VLLM_KVFIX_PATCH": "force", "VLLM_KVFIX_OBSERVE": "off"}
    for arguments in (["-W", "error", "-c", SCENARIO], ["-m", "vllm_kvfix", "status"]):
        done = subprocess.run(
            [python, "-S", *arguments], env=environ, capture_output=True, text=True, check=False, timeout=120, cwd="/"
        )
        assert done.returncode == 0, done.stderr + done.stdout


def test_the_wheel_holds_what_it_must_and_no_more(installed: Path) -> None:
    """Both packages with py.typed, the licence, one script and one entry point; no tests, no benchmarks."""
    tops = {path.name for path in installed.iterdir()} - {"packaging"}
    (info,) = (name for name in tops if name.endswith(".dist-info"))
    assert tops == {"vllm_kvfix", "vllm_kvfix_sidecar", info}
    for name in ("vllm_kvfix/py.typed", "vllm_kvfix_sidecar/py.typed", f"{info}/licenses/LICENSE"):
        assert (installed / name).is_file()
    metadata = (installed / info / "METADATA").read_text()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == ["Requires-Dist: packaging>=22"]


def test_pip_installs_and_uninstalls_it_without_a_trace(wheel: Path, tmp_path: Path) -> None:
    """In an environment with a vLLM, pip install makes status say protected; pip uninstall leaves no file of ours."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin/python"
    (site,) = environment.glob("lib/python*/site-packages")
    copy_fake(tmp_path / "fake")
    shutil.move(tmp_path / "fake/vllm", site / "vllm")
    (site / "packaging").symlink_to(Path(packaging.__file__).parent)

    def files() -> set[Path]:
        return {path for path in environment.rglob("*") if "__pycache__" not in path.parts}

    def status() -> int:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHONPATH"))}
        environ = {**clean, "VLLM_KVFIX_PATCH": "force"}
        return subprocess.run([python, "-m", "vllm_kvfix", "status"], env=environ, check=False, cwd="/").returncode

    before = files()
    pip("--python", str(python), "install", "--no-deps", str(wheel))
    assert (environment / "bin/vllm-kvfix").is_file()
    assert status() == 0
    pip("--python", str(python), "uninstall", "--yes", "vllm-kvfix")
    assert files() == before
