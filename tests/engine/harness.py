# SPDX-License-Identifier: Apache-2.0
"""One engine under the deterministic mixed load, and what was seen of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_kvfix.demo.engine import (
    MODEL_NAME,
    Engine,
    EngineSettings,
    Sample,
    distribution_name,
    engine_environ,
    plugin_lines,
    read_samples,
)
from vllm_kvfix.demo.environment import Environment, SetupError, ensure
from vllm_kvfix.demo.run import LOAD_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALLOW_MISSING_VARIABLE = "VLLM_KVFIX_ALLOW_MISSING"
"""Comma-separated releases whose engine may be missing on this machine: their tests then xfail instead of failing."""

RING_FOLDER = "VLLM_KVFIX_RING_DIR"
WATCHING = "watching the KV blocks"
WATCHING_MEMORY = "watching the memory"
REQUESTS = 240
CONCURRENCY = 12
LOAD_TIMEOUT_S = 600
IN_PROCESS_TIMEOUT_S = 600

# 32-bit floats: with 16 bits two tokens often tie, and which one wins depends on what else is in the batch. 96
# blocks do not hold all twelve requests at their longest, so some wait or are preempted.
ENGINE_ARGUMENTS = ("--dtype=float32", "--max-model-len=1024", "--block-size=32", "--num-gpu-blocks-override=96")


@dataclass(frozen=True)
class Observed:
    """What one engine did under the load.

    ``samples`` of the probe, the load's ``requests`` by index and its counts, the ``lines`` of the fix in
    the log and those of ``watching``, the process ids of the engine ``cores``.
    """

    samples: list[Sample]
    requests: dict[int, dict[str, Any]]
    counts: dict[str, int]
    lines: list[str]
    watching: list[str]
    cores: list[int]

    def backlog(self, core: int) -> list[int]:
        """The backlog of an engine core at each sample, all managers together."""
        return [sum(sample.backlog) for sample in self.samples if sample.pid == core]


@dataclass
class Workshop:
    """Makes engines for the tests, with one model and one installed plugin for all of them."""

    model: Path
    plugin: Path
    work: Path
    summary: list[str] = field(default_factory=list)

    def environment(self, release: str) -> Environment:
        """The environment of a release; the test fails if it cannot be had, unless that was allowed by name."""
        try:
            return ensure(release)
        except SetupError as error:
            if release in os.environ.get(ALLOW_MISSING_VARIABLE, "").split(","):
                pytest.xfail(f"allowed by {ALLOW_MISSING_VARIABLE}: no engine of {release}: {error}")
            pytest.fail(
                f"no engine of vLLM {release}: {error}\n"
                f"{ALLOW_MISSING_VARIABLE}={release} turns this failure into an xfail",
                pytrace=False,
            )

    def observe(self, release: str, name: str, plugin: Path | None, arguments: Sequence[str] = ()) -> Observed:
        """Serve, put the load on, stop, and return what was seen."""
        environment = self.environment(release)
        settings = EngineSettings(
            self.model,
            self.work,
            name=f"{release}-{name}",
            arguments=[*ENGINE_ARGUMENTS, *arguments],
            environ={RING_FOLDER: str(self.work / "rings")},
            plugin_path=plugin,
        )
        report_file = self.work / f"{release}-{name}-load.json"
        with Engine(environment, settings) as engine:
            cores = engine.core_pids()
            self._load(environment, engine.url, report_file)
            # Wait for the end before reading: what is logged on shutdown counts as well.
        report = json.loads(report_file.read_text())
        observed = Observed(
            samples=read_samples(engine.probe_file),
            requests={request["index"]: request for request in report["requests"]},
            counts={state: report[state] for state in ("sent", "completed", "aborted", "failed")},
            lines=fix_lines(engine.log_text()),
            watching=[line for line in plugin_lines(engine.log_text()) if WATCHING in line],
            cores=cores,
        )
        last = [observed.backlog(core)[-1:] for core in cores]
        self.summary.append(
            f"vLLM {release:8} {name:24} backlog at the end {last}, of "
            f"{max((s.allocated for s in observed.samples), default=0)} blocks; {observed.counts}; "
            f"started in {engine.start_s:.0f} s"
        )
        return observed

    def in_process(self, release: str, mode: str) -> tuple[dict[str, Any], list[str]]:
        """Run an engine inside one script's process; returns what the script reports and our lines in its output."""
        environment = self.environment(release)
        settings: Mapping[str, str] = {
            "VLLM_KVFIX_PATCH": mode,
            RING_FOLDER: str(self.work / "rings"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        report_file = self.work / f"{release}-in-process-{mode}.json"
        metadata = distribution_name(environment, self.work / "metadata" / release)
        done = subprocess.run(
            [str(environment.python), str(Path(__file__).with_name("in_process.py")), self.model, report_file],
            env=engine_environ(settings, [self.plugin, metadata]),
            capture_output=True,
            text=True,
            check=False,
            timeout=IN_PROCESS_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(report_file.read_text())
        return report, fix_lines(done.stdout + done.stderr)

    @staticmethod
    def _load(environment: Environment, url: str, report_file: Path) -> None:
        command = [str(environment.python), "-I", str(LOAD_SCRIPT), "--mode=mixed", f"--url={url}"]
        command += [f"--model={MODEL_NAME}", f"--output={report_file}", f"--requests={REQUESTS}"]
        command += [f"--concurrency={CONCURRENCY}", f"--seconds={LOAD_TIMEOUT_S}"]
        done = subprocess.run(
            command, env=engine_environ({}, ()), capture_output=True, text=True, check=False, timeout=LOAD_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr


def fix_lines(log: str) -> list[str]:
    """The plugin's lines in a log that speak of the fix."""
    return [line for line in plugin_lines(log) if WATCHING not in line and WATCHING_MEMORY not in line]


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of each file below ``folder``, byte code aside: any Python that runs writes that."""
    files = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            status = os.lstat(os.path.join(root, name))  # noqa: PTH118  60,000 files: pathlib takes seconds
            files[os.path.join(root, name)] = (status.st_size, status.st_mtime_ns)  # noqa: PTH118
    return files
