# SPDX-License-Identifier: Apache-2.0
"""The image, built from this checkout and run: what is in it, what is not, and under which restrictions it works."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.helm.containers import BASE, IMAGE
from tests.support import ROOT
from vllm_kvfix import __version__
from vllm_kvfix.demo.environment import find_uv

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.containers import Podman

pytestmark = pytest.mark.engine

MEBI = 1 << 20
# What it adds to its base: some 40 MB, of which gRPC is 18.
MOST_BYTES = 60 * MEBI
# As the chart runs it, and without even a folder for temporary files.
HELD = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges")
# Tells of the image from inside it, as JSON.
_INSIDE = """
import glob, importlib.metadata, importlib.util, json, os, pathlib
plugin = pathlib.Path("/opt/vllm-kvfix/plugin")
files = [path for path in plugin.rglob("*") if path.is_file()]
(found,) = importlib.metadata.distributions(path=[str(plugin)])
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "groups": os.getgroups(),
    "importable": [name for name in ("vllm", "torch", "numpy", "hypno") if importlib.util.find_spec(name)],
    "suffixes": sorted({path.suffix for path in files if ".dist-info" not in str(path)}),
    "demo": (plugin / "vllm_kvfix" / "demo").exists(),
    "unreadable": [str(path) for path in plugin.rglob("*") if not os.access(path, os.R_OK)],
    "entry_points": [[e.group, e.name, e.value] for e in found.entry_points],
    "version": found.version,
    "page": sorted(os.listdir("/opt/vllm-kvfix/sidecar/vllm_kvfix_sidecar/page/vendor")),
    "tests": glob.glob("/opt/vllm-kvfix/sidecar/**/tests", recursive=True),
    "bytecode": glob.glob("/opt/vllm-kvfix/**/*.pyc", recursive=True),
}))
"""


def test_it_adds_little_to_its_base(podman: Podman) -> None:
    """Less than 60 MiB, whatever Python image it is built on."""
    added = podman.inspect(IMAGE)["Size"] - podman.inspect(BASE)["Size"]
    print(f"the image adds {added / MEBI:.0f} MiB to its base")  # noqa: T201  # shown by -rP, and where it fails
    assert 0 < added < MOST_BYTES


def test_it_says_what_it_is(podman: Podman) -> None:
    """Labels of OCI's names, the version among them; a user by number, so that Kubernetes can tell it is not root."""
    config = podman.inspect(IMAGE)["Config"]
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items() if "opencontainers" in name}
    assert set(labels) == {"title", "description", "licenses", "source", "version", "revision"}
    assert labels["version"] == __version__
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", config["User"])


def test_what_is_in_it(podman: Podman) -> None:
    """No vLLM, no torch; a plugin that is Python alone, found by its entry point; the page, with what it draws with."""
    done = podman.once(*HELD, "--entrypoint=python3", command=["-c", _INSIDE])
    assert done.returncode == 0, done.stderr
    inside = json.loads(done.stdout)
    assert inside["user"] == [10001, 10001]
    assert 0 not in inside["groups"]
    assert inside["importable"] == (["hypno"] if platform.machine() == "x86_64" else [])
    assert inside["suffixes"] == [".py", ".typed"]
    assert ["vllm.general_plugins", "kvfix", "vllm_kvfix.plugin:register"] in inside["entry_points"]
    assert inside["version"] == __version__
    assert "uPlot.iife.min.js" in inside["page"]
    assert inside["unreadable"] == inside["tests"] == inside["bytecode"] == []
    assert inside["demo"] is False


@pytest.mark.parametrize(
    "command",
    ["--help", "sidecar --help", "attach --help", "diagnose --help", "top --help", "postmortem --help", "--version"],
)
def test_its_commands_start(podman: Podman, command: str) -> None:
    """Held to the least, as the chart holds it: whatever a command imports is there, and nothing is written."""
    done = podman.once(*HELD, command=command.split())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "vllm-kvfix" in done.stdout


def test_the_webhook_starts(podman: Podman) -> None:
    """The same image serves it: its module tells its options."""
    done = podman.once(*HELD, "--entrypoint=python3", command=["-m", "vllm_kvfix_sidecar.injection.webhook", "--help"])
    assert done.returncode == 0, done.stderr
    assert "--certificate" in done.stdout


def test_nothing_in_its_recipe_is_of_one_architecture() -> None:
    """The Dockerfile names none."""
    recipe = (ROOT / "sidecar" / "Dockerfile").read_text()
    assert "FROM" in recipe
    assert not re.search(r"amd64|x86|arm64|aarch64|--platform", recipe)


@pytest.mark.parametrize("python", ["3.10", "3.13"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_the_sidecar_needs_has_wheels(machine: str, python: str, tmp_path: Path) -> None:
    """Of all that uv.lock pins for it there is one, for both architectures: a slim image has no compiler."""
    uv = find_uv()
    assert uv, "uv is missing: make .tools/bin/uv"
    told = ["--quiet", "--locked", "--no-dev", "--extra=sidecar", "--no-emit-project"]
    requirements = tmp_path / "requirements.txt"
    subprocess.run([*uv, "export", *told, f"--output-file={requirements}"], cwd=ROOT, check=True)
    options = ["--dry-run", "--require-hashes", "--no-deps", "--only-binary=:all:", f"--target={tmp_path}"]
    options += [f"--python-platform={machine}-manylinux_2_28", f"--python-version={python}"]
    done = subprocess.run(
        [*uv, "pip", "install", *options, "-r", str(requirements)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "grpcio" in done.stderr
