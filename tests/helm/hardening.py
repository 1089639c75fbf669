# SPDX-License-Identifier: Apache-2.0
"""checkov's findings in the chart and in an injected pod, and those that are meant, each with its reason."""

from __future__ import annotations

import json
import subprocess
import venv
from typing import TYPE_CHECKING, Any

from tests.helm.tools import CACHE
from vllm_kvfix.demo.environment import locked

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = "3.3.30"
_INSTALL_S = 500
_RUN_S = 200
DEPLOYMENT, TEST, POD = "the webhook", "its helm test", "an injected pod"
_NO_CPU_LIMIT = "a limit of CPU throttles where nothing is short; memory, which can take a node down, has one"
_TAG = "image.digest is there for it; the default cannot know the digest that a mirror gives"
_PULL = "a tag of ours never changes, and a pod must start while the registry is away; image.pullPolicy is there for it"
_NO_PROBE = "it runs once, to its end"
# Which check of checkov, at what, and why it stays.
MEANT = {
    ("CKV_K8S_11", DEPLOYMENT): _NO_CPU_LIMIT,
    ("CKV_K8S_11", TEST): _NO_CPU_LIMIT,
    ("CKV_K8S_11", POD): _NO_CPU_LIMIT,
    ("CKV_K8S_43", DEPLOYMENT): _TAG,
    ("CKV_K8S_43", TEST): _TAG,
    ("CKV_K8S_43", POD): _TAG,
    ("CKV_K8S_15", DEPLOYMENT): _PULL,
    ("CKV_K8S_15", TEST): _PULL,
    ("CKV_K8S_15", POD): _PULL,
    ("CKV_K8S_8", TEST): _NO_PROBE,
    ("CKV_K8S_9", TEST): _NO_PROBE,
    ("CKV2_K8S_6", TEST): "it lives for seconds, listens to nothing, and asks the webhook alone",
}


def findings(folder: Path) -> set[tuple[str, str]]:
    """What fails in the YAML files of a folder: the check, and the object's kind and name."""
    command = [str(_checkov()), "--directory", str(folder), "--framework", "kubernetes", "--skip-download", "--quiet"]
    done = subprocess.run(
        [*command, "--compact", "--output=json"], capture_output=True, text=True, check=False, timeout=_RUN_S
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["summary"]["parsing_errors"] == 0
    assert told["summary"]["passed"] > 0
    return {(found["check_id"], _name(found["resource"])) for found in told["results"]["failed_checks"]}


def _name(resource: str) -> str:
    kind, _, name = resource.split(".", 2)  # the second is the namespace
    return f"{kind} {name}"


def _checkov() -> Path:
    """The program, in an environment of its own; made once, into the cache of this user."""
    folder = CACHE / f"checkov-{_VERSION}"
    program = folder / "bin" / "checkov"
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / "checkov.lock"):
        if not (folder / "done").exists():
            venv.create(folder, clear=True, with_pip=True)
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"checkov=={_VERSION}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_S)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-2000:]}"
            (folder / "done").touch()
    return program
