# SPDX-License-Identifier: Apache-2.0
"""The verdict on a real engine: the leak is named while it is small, and silence where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import ROOT
from vllm_kvfix.demo.engine import MODEL_NAME, Engine, EngineSettings, engine_environ, read_samples
from vllm_kvfix.demo.run import LOAD_SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.harness import Workshop
    from vllm_kvfix.demo.engine import Sample

pytestmark = [pytest.mark.engine, pytest.mark.alone]

RELEASE = "0.25.1"
PATH = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"
WATCHED_S = 180
LOAD_S = WATCHED_S + 60
PROMPT_TOKENS = 600
BLOCK_SIZE = 16
# As the demo's engine: a small pool and no prefix cache, so that the leak is all that can grow.
ARGUMENTS = (
    "--dtype=float32",
    "--max-model-len=2048",
    f"--block-size={BLOCK_SIZE}",
    "--num-gpu-blocks-override=4096",
    "--no-enable-prefix-caching",
)


@dataclass(frozen=True)
class Diagnosis:
    """What ``vllm-kvfix diagnose`` said of one engine under load, and what the probe beside us saw."""

    exit_code: int
    report: dict[str, Any]
    text: str
    core: int
    samples: list[Sample]
    lines: list[str]

    def of_core(self) -> dict[str, Any]:
        """The verdict on the engine core."""
        (found,) = [process for process in self.report["processes"] if process["pid"] == self.core]
        return dict(found["verdict"])


def diagnose(workshop: Workshop, mode: str) -> Diagnosis:
    """Serve with the fix on or off, put the load on, and ask for a diagnosis meanwhile."""
    environment = workshop.environment(RELEASE)
    work = workshop.work / f"verdict-{mode}"
    rings = work / "rings"
    rings.mkdir(parents=True)
    settings = EngineSettings(
        workshop.model,
        work,
        arguments=ARGUMENTS,
        environ={"VLLM_KVFIX_PATCH": mode, "VLLM_KVFIX_RING_DIR": str(rings)},
        plugin_path=workshop.plugin,
    )
    with Engine(environment, settings) as engine:
        (core,) = engine.core_pids()
        load = [str(environment.python), "-I", str(LOAD_SCRIPT), "--mode=leak", f"--url={engine.url}"]
        load += [f"--model={MODEL_NAME}", f"--output={work / 'load.json'}", f"--seconds={LOAD_S}"]
        load += ["--concurrency=8", f"--prompt-tokens={PROMPT_TOKENS}"]
        with subprocess.Popen(load, env=engine_environ({}, ())) as running:
            try:
                done = _diagnose(rings, f"--for={WATCHED_S}", "--json")
                said = _diagnose(rings, "--for=1")
            finally:
                running.kill()
        return Diagnosis(
            done.returncode,
            json.loads(done.stdout),
            said.stdout,
            core,
            read_samples(engine.probe_file),
            engine.log_text().splitlines(),
        )


def _diagnose(rings: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_kvfix", "diagnose", f"--ring-dir={rings}", *options]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "sidecar")))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=WATCHED_S + 60)
    assert done.returncode in {0, 1}, done.stderr
    return done


@pytest.fixture(scope="module")
def diagnoses(workshop: Workshop) -> list[Diagnosis]:
    """The engine without the fix and the one with it, side by side, so that both have the same load."""
    workshop.environment(RELEASE)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(diagnose, repeat(workshop), ("off", "auto")))


@pytest.fixture(scope="module")
def leaking(diagnoses: list[Diagnosis]) -> Diagnosis:
    """The engine without the fix."""
    return diagnoses[0]


@pytest.fixture(scope="module")
def fixed(diagnoses: list[Diagnosis]) -> Diagnosis:
    """The engine with the fix."""
    return diagnoses[1]


def test_the_leak_is_named_in_the_right_process(leaking: Diagnosis) -> None:
    """After three minutes of load: unbounded growth in the engine core, and the list that makes it up; exit code 1."""
    verdict = leaking.of_core()
    assert verdict["kind"] == "unbounded growth"
    assert PATH in [culprit["path"] for culprit in verdict["culprits"]]
    assert leaking.exit_code == 1
    alarming = {process["pid"] for process in leaking.report["processes"] if process["verdict"]["alarming"]}
    assert alarming == {leaking.core}


def test_bytes_per_request_are_those_that_were_leaked(leaking: Diagnosis) -> None:
    """Within a tenth of what the probe counted beside us: ids left in the list per request, eight bytes each."""
    (culprit,) = [found for found in leaking.of_core()["culprits"] if found["path"] == PATH]
    first, last = leaking.samples[len(leaking.samples) // 4], leaking.samples[-1]
    ids = sum(last.backlog) - sum(first.backlog)
    # One token asked for: the blocks of a request are those of its prompt.
    requests = (last.allocated - first.allocated) / -(-PROMPT_TOKENS // BLOCK_SIZE)
    assert culprit["bytes_per"]["request"] == pytest.approx(8 * ids / requests, rel=0.1)


def test_it_says_how_to_fix_it(leaking: Diagnosis) -> None:
    """The remedy names the release that has the fix, and this package; so does the text for people."""
    remedy = leaking.of_core()["remedy"]
    assert remedy["fixed_in"] == "0.26.0"
    assert "vllm-kvfix" in remedy["action"]
    assert PATH in leaking.text
    assert remedy["action"] in leaking.text or "vllm-kvfix" in leaking.text


def test_with_the_fix_there_is_silence(leaking: Diagnosis, fixed: Diagnosis) -> None:
    """No process alarms, the exit code is 0, and the engine core is steady, but for what a young one takes by itself.

    In its first minutes under load vLLM's own memory grows by some 5 MiB an hour, with and without us, which shows in
    three minutes or does not: then it is "warming", far slower than the leak, and no container is blamed.
    """
    assert not [process for process in fixed.report["processes"] if process["verdict"]["alarming"]]
    assert fixed.exit_code == 0
    verdict = fixed.of_core()
    assert verdict["kind"] in {"steady", "warming"}
    assert not verdict["culprits"]
    (leak,) = [found for found in leaking.of_core()["culprits"] if found["path"] == PATH]
    assert verdict["slope_bytes_per_hour"]["best"] < leak["bytes_per_hour"] / 3


def test_no_error_of_our_own_was_contained(leaking: Diagnosis, fixed: Diagnosis) -> None:
    """Neither engine's log has a line of an error of ours."""
    assert not [line for line in (*leaking.lines, *fixed.lines) if "an error of its own" in line]
