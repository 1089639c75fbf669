# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT

if TYPE_CHECKING:
    from tests.engine.harness import Workshop

pytestmark = pytest.mark.engine

RELEASE = "0.25.1"
STOP_TIMEOUT_S = 90
DEMO_TIMEOUT_S = 600


def processes_in(folder: Path) -> list[str]:
    """The processes that run in ``folder`` or below it, as their working directory tells."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = str((process / "cwd").readlink())
        except OSError:
            continue
        if where.startswith(str(folder)):
            found.append(f"{process.name}: {where}")
    return found


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the demo with ``folder`` as the place for its working files."""
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_kvfix.demo", f"--release={RELEASE}", *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("moment", ["starting vLLM", "load begins"])
def test_interrupted_demo_leaves_no_process(workshop: Workshop, tmp_path: Path, moment: str) -> None:
    """Ctrl-C, while the engine starts or is under load, ends the demo with code 130 and every process it started."""
    workshop.environment(RELEASE)
    with start_demo(tmp_path, f"--output={tmp_path / 'leak.png'}") as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if moment in line:
                break
        demo.send_signal(signal.SIGINT)
        _, rest = demo.communicate(timeout=STOP_TIMEOUT_S)
    assert demo.returncode == 130, rest
    assert "Traceback" not in rest
    assert processes_in(tmp_path) == []
    assert not list(tmp_path.glob("kvfix-demo-*"))


def test_demo_shows_the_leak_and_the_flat_line(workshop: Workshop, tmp_path: Path) -> None:
    """The demo writes a picture and its data; the backlog grows without the plugin and not with it."""
    workshop.environment(RELEASE)
    picture = tmp_path / "leak.png"
    with start_demo(tmp_path, "--seconds=10", "--json", f"--output={picture}") as demo:
        output, progress = demo.communicate(timeout=DEMO_TIMEOUT_S)
    assert demo.returncode == 0, progress
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads(output)
    assert result == json.loads(picture.with_suffix(".json").read_text())
    without, fixed = result["runs"]
    assert without["backlog_ids_per_second"] > 0
    assert {point["backlog"] for point in fixed["points"]} == {0}
    assert fixed["points"][-1]["allocated"] > 0
    last = progress.splitlines()[-1]
    assert last.count("MiB/h") == 2
    assert last.count("ids/s") == 2
    assert processes_in(tmp_path) == []
    workshop.summary.append(f"demo, 10 s instead of 60: {last}; {result['wall_s']:.0f} s")
