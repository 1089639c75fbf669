# SPDX-License-Identifier: Apache-2.0
"""Objects of the operators of Prometheus and cert-manager, held against npm's models of these projects' own types.

The models' validators look at what is required, at types and patterns, and let unknown fields pass; so does an API
server, which drops them. The TypeScript types of the same models refuse unknown fields.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.debian import program
from tests.helm.tools import CACHE
from vllm_kvfix.demo.environment import locked

if TYPE_CHECKING:
    from collections.abc import Sequence

_HERE = Path(__file__).parent
_WITHOUT = "whether operators take our objects"
_MODULES = {"monitoring.coreos.com": "prometheus-operator", "cert-manager.io": "cert-manager"}
_CHECK = ("--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext")
_INSTALL = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
_INSTALL_S = 300
_RUN_S = 100


def wrong(objects: Sequence[dict[str, Any]], work: Path) -> list[str]:
    """What is wrong with them, a line each; ``work``: an empty folder."""
    (work / "node_modules").symlink_to(_installed() / "node_modules")
    (work / "package.json").write_text('{"type": "module"}')
    shutil.copy(_HERE / "check.mjs", work)
    node = program("node", "nodejs", _WITHOUT)
    told = _run(work, node, "check.mjs", told=json.dumps(objects))
    assert told.returncode == 0, told.stderr
    lines = [f"{found['kind']}: {text}" for found, text in zip(objects, json.loads(told.stdout), strict=True) if text]
    (work / "objects.ts").write_text("".join(_typed(index, found) for index, found in enumerate(objects)))
    compiler = str(work / "node_modules" / "typescript" / "bin" / "tsc")
    typed = _run(work, node, compiler, *_CHECK, "objects.ts")
    return lines + typed.stdout.splitlines()


def _typed(index: int, found: dict[str, Any]) -> str:
    group, version = found["apiVersion"].split("/")
    module = f"@kubernetes-models/{_MODULES[group]}/{group}/{version}"
    name = f"I{found['kind']}"
    imported = f'import type {{ {name} as T{index} }} from "{module}";'
    return f"{imported}\nexport const o{index}: T{index} = {json.dumps(found)};\n"


def _installed() -> Path:
    """The folder with the packages of package-lock.json, fetched once, into the cache of this user."""
    lock = (_HERE / "package-lock.json").read_bytes()
    folder = CACHE / f"operators-{hashlib.sha256(lock).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / "operators.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(_HERE / name, folder)
            npm = program("npm", "npm", _WITHOUT)
            done = _run(folder, npm, *_INSTALL, limit=_INSTALL_S)
            assert done.returncode == 0, f"npm ci failed: {done.stderr[-2000:]}"
            (folder / "done").touch()
    return folder


def _run(at: Path, *command: str, told: str | None = None, limit: float = _RUN_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=at, input=told, capture_output=True, text=True, check=False, timeout=limit)
