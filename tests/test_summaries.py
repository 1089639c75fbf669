# SPDX-License-Identifier: Apache-2.0
"""What was seen is printed at the end of a run, whoever saw it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST = """
import pytest
from tests import summaries
from tests.conftest import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown

@pytest.fixture(scope="session")
def seen(request):
    lines = []
    summaries.tell(request.config, "what was seen", lambda: lines)
    return lines
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_each_line_is_printed_once(tmp_path: Path, processes: str) -> None:
    """Two files that tell under one title: one heading and each line once, with workers and without."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(f"def test_it(seen): seen.append('in {name}')\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        processes,
        "--dist=loadfile",
        str(tmp_path),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "sidecar")))
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("in ")) == ["in one", "in two"]
    assert len([line for line in lines if " what was seen " in line]) == 1
