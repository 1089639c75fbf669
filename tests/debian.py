# SPDX-License-Identifier: Apache-2.0
"""Programs of Debian's that tests need: found, or installed where we may, or the test fails and says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from vllm_kvfix.demo.environment import locked

_INSTALL_S = 400
_LOCK = Path(tempfile.gettempdir()) / "vllm-kvfix-tests-apt.lock"


def program(name: str, package: str, without: str) -> str:
    """The path of a program; installs its package if it is missing and we are root.

    ``without``: what is not tested where it cannot be had, for the message.

    Raises:
        RuntimeError: It is missing and cannot be installed; the message says what to do.
    """
    found = shutil.which(name)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with locked(_LOCK):  # apt-get does not wait for another one
            found = shutil.which(name)
            if found is None:
                _install(package)
        found = found or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is missing: {without}; apt-get install {package}")
    return found


def _install(package: str) -> None:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", package]):
        command = ["apt-get", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=_INSTALL_S)
        if done.returncode and words[0] == "install":  # an update may fail where the lists are there already
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
