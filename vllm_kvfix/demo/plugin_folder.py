# SPDX-License-Identifier: Apache-2.0
"""A folder that holds an installed vllm_kvfix and nothing else, for the ``PYTHONPATH`` of an engine.

So an engine finds the plugin as if it were installed, and its environment stays as it was.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix.demo.environment import SetupError, child_environ, find_uv, say

if TYPE_CHECKING:
    from collections.abc import Callable

DISTRIBUTION = "vllm-kvfix"


def make_plugin_folder(folder: Path, *, log: Callable[[str], object] = say) -> Path:
    """Fill the new ``folder`` with this package: a wheel built from the checkout, or a copy of what is installed.

    Raises:
        SetupError: the wheel cannot be built, or this package is neither installed nor in a checkout.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists():
        _install_checkout(checkout, folder, log)
    else:
        _copy_installed(folder)
    return folder


def _install_checkout(checkout: Path, folder: Path, log: Callable[[str], object]) -> None:
    uv = find_uv()
    installer = [*uv, "pip", "--quiet"] if uv else [sys.executable, "-m", "pip", "--quiet"]
    # Without the refresh uv takes the wheel that it built last time, whatever was edited since.
    fresh = ["--python", sys.executable, "--refresh-package", DISTRIBUTION]
    options = fresh if uv else ["--disable-pip-version-check"]
    log(f"building the wheel of {checkout}")
    command = [*installer, "install", *options, "--no-deps", "--target", str(folder), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environ())  # noqa: S603
    if done.returncode:
        raise SetupError(f"the wheel cannot be built; mend what this names:\n  {' '.join(command)}\n{done.stderr}")


def _copy_installed(folder: Path) -> None:
    try:
        files = importlib.metadata.files(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        files = None
    if not files:
        raise SetupError(f"{DISTRIBUTION} is neither installed nor in a checkout: pip install {DISTRIBUTION}")
    for file in files:
        # The scripts lie outside the folder of the packages; an engine needs none of them.
        if ".." not in file.parts and file.suffix != ".pyc":
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(str(file.locate())), target)
