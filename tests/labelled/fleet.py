# SPDX-License-Identifier: Apache-2.0
"""Plays cases, two processes at a time, has them judged, and brings together what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests import releases
from tests.labelled import cases, judging, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCRIPT = Path(__file__).with_name("run_cases.py")
CHECKOUT = Path(__file__).resolve().parents[2]
AT_A_TIME = 2
AT_ONCE = 6  # cases of one process, for which vLLM is imported once
LONGEST = 900  # seconds for these


def play(names: Sequence[str], package: Path, folder: Path) -> list[table.Outcome]:
    """Play and judge the named cases, with the packages under test in `package`; what they tell is left in `folder`."""
    chosen = [cases.BY_NAME[name] for name in names]
    needed = list(dict.fromkeys([*(cases.BY_NAME[name] for name in judging.HEALTHY.values()), *chosen]))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(lambda job: _run(_play_command(job, folder), job[0].release, package), _jobs(needed)))
        list(pool.map(lambda job: _run(_judge_command(job, folder), None, package), _parts(chosen)))
    return [_outcome(case, folder) for case in chosen]


def _jobs(needed: Sequence[cases.Case]) -> Iterator[Sequence[cases.Case]]:
    by_release: dict[str, list[cases.Case]] = {}
    for case in needed:
        by_release.setdefault(case.release, []).append(case)
    for of_release in by_release.values():
        yield from _parts(of_release)


def _parts(chosen: Sequence[cases.Case]) -> Iterator[Sequence[cases.Case]]:
    for at in range(0, len(chosen), AT_ONCE):
        yield chosen[at : at + AT_ONCE]


def _play_command(job: Sequence[cases.Case], folder: Path) -> list[str]:
    names = [case.name for case in job]
    python = str(releases.contract_python())
    return [python, str(SCRIPT), "--release", job[0].release, "--out", str(folder), *names]


def _judge_command(job: Sequence[cases.Case], folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.labelled.judging", str(folder), *(case.name for case in job)]


def _run(command: list[str], release: str | None, package: Path) -> None:
    if release is None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(CHECKOUT)])}
    else:
        environ = releases.environment(release, package)
    done = subprocess.run(
        command, env=environ, cwd=CHECKOUT.parent, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def _outcome(case: cases.Case, folder: Path) -> table.Outcome:
    truth = json.loads((folder / f"{case.name}.json").read_text())
    found = json.loads((folder / f"{case.name}.verdict.json").read_text())
    return table.Outcome(case, truth, found["moments"], found["last"])
