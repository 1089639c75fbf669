# SPDX-License-Identifier: Apache-2.0
"""What several test modules need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parent.parent
FAKE_VLLM = Path(__file__).parent / "fake_vllm"


def copy_fake(folder: Path, version: str | None = "0.25.1", edits: dict[str, tuple[str, str]] | None = None) -> Path:
    """A copy of the fake vLLM under ``folder``, with another version and ``edits`` of its files; returns ``folder``.

    Args:
        folder: Where to; becomes an entry for PYTHONPATH.
        version: What ``_version.py`` says; None: there is no such file.
        edits: By file below ``vllm/``, a text that must be in it once and what takes its place.
    """
    shutil.copytree(FAKE_VLLM / "vllm", folder / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    stated = folder / "vllm" / "_version.py"
    if version is None:
        stated.unlink()
    else:
        stated.write_text(f'__version__ = version = "{version}"\n')
    for name, (old, new) in (edits or {}).items():
        path = folder / "vllm" / name
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        path.write_text(text.replace(old, new))
    return folder


def run_python(
    code: str, *path: Path, options: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter with ``path`` and this checkout on PYTHONPATH; must not fail."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**clean, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done
