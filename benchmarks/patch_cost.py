# SPDX-License-Identifier: Apache-2.0
"""What the back-port costs: `python -m benchmarks.patch_cost [--release 0.25.1] [--json]`, some three minutes.

*Time of a step.* Three schedulers with the same load live in one process: two stock ones, and one made with the
back-port in force. They step in turn, in one order in the first half of a round and in the other in the second, and
a round gives two ratios: with over without, and without over without, which shows what the machine's
noise alone can do. Only `schedule()` is timed, by the CPU time of its thread: another process that takes the CPU
away for a while is not its cost. The stock ones are called through the function that the back-port
replaced, the other through the replacement, so nothing needs to be toggled between steps; that this is the only
replaced function on the step path is checked, not assumed.

*Memory.* Growth of the list (`sys.getsizeof`) over blocks allocated.

*Start-up.* `register()` in fresh processes: as in a process that never makes a scheduler (API server, worker), and
with the decision that an engine core needs (the scheduler is imported before, untimed).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__" and str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: an unzipped wheel on PYTHONPATH wins over the checkout

from benchmarks.spread import shown, spread  # noqa: E402  the path comes first
from tests import releases  # noqa: E402  as above

NOT_AFFECTED = "0.26.0"
RUNNING = (1, 64, 256)
LOADS = ("decode", "prefill")
ROUNDS = 60
STEPS = {  # in a round: some ten milliseconds
    "decode": {1: 256, 64: 16, 256: 8},
    "prefill": {1: 128, 64: 4, 256: 2},
}
BATCHES = 6  # fresh schedulers for each; they share the rounds
WARM_UP = 20  # steps before the first round
BLOCKS = 200_000  # allocated for the memory figure
STARTS = 15  # fresh processes for the light figure
CORE_STARTS = 5  # fresh processes for the engine core's: each imports the scheduler first
FIX_ALONE = {"VLLM_KVFIX_OBSERVE": "off"}
ON_STEP_PATH = "vllm.v1.core.sched.scheduler.Scheduler.schedule"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  a command's output


# -- in the release's process -------------------------------------------------------------------------------------


@dataclass
class _Load:
    """A scheduler under a load that keeps so many requests running.

    Attributes:
        driver: A `tests.contract.driver.Driver`.
        schedule: The function to time: stock's, or the replacement.
        kind: "decode" (long answers, a block every 16 tokens) or "prefill" (4 blocks and one token each).
        running: Requests at a time.
    """

    driver: Any
    schedule: Any
    kind: str
    running: int
    added: int = 0

    def top_up(self) -> None:
        """Add requests until as many as wanted are there."""
        while len(self.driver.scheduler.requests) < self.running:
            self.added += 1
            if self.kind == "prefill":
                self.driver.add_request(f"r{self.added}", prompt_seed=self.added, prompt_length=64, max_tokens=1)
            else:
                # Answers end at different steps, as they do in a server.
                self.driver.add_request(
                    f"r{self.added}",
                    prompt_seed=self.added,
                    prompt_length=16 + self.added % 16,
                    max_tokens=300 + self.added % 150,
                )

    def step(self) -> int:
        """One step; nanoseconds that `schedule()` took."""
        self.top_up()
        schedule, scheduler = self.schedule, self.driver.scheduler
        before = time.thread_time_ns()
        output = schedule(scheduler)
        took = time.thread_time_ns() - before
        self.driver.put_in_flight(output)
        self.driver.update()
        return took


def _make(kind: str, running: int, *, patched: bool) -> _Load:
    """A scheduler made without or with the back-port in force, and the `schedule()` that then was in its class."""
    from tests.contract import driver as d  # noqa: PLC0415  only in a release's process
    from tests.contract import running_release  # noqa: PLC0415  as above
    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test

    if patched:
        plugin.register(FIX_ALONE)
    schedule = running_release.module("vllm.v1.core.sched.scheduler").Scheduler.__dict__["schedule"]
    made = d.make_scheduler(
        "full", num_blocks=running * 30 + 64, max_num_seqs=running, max_num_batched_tokens=max(running * 64, 512)
    )
    if patched:
        plugin.restore()
    return _Load(made, schedule, kind, running)


def _batch(kind: str, running: int, number: int) -> Iterator[tuple[float, float, float]]:
    """Fresh schedulers; per round, nanoseconds of a step of the first stock one, the patched one, the other stock one.

    In which order they are made differs by batch, so that where their objects lie in memory is part of the noise.
    In the first half of a round they step in one order, in the second in the other.
    """
    from tests.contract import driver as d  # noqa: PLC0415  only in a release's process

    loads: dict[int, _Load] = {}
    for index in ((0, 1, 2), (1, 2, 0), (2, 0, 1))[number % 3]:
        loads[index] = _make(kind, running, patched=index == 1)
    first, patched = loads[0], loads[1]
    if patched.schedule is first.schedule:
        raise SystemExit("the back-port is not in force: nothing to measure")
    for _ in range(WARM_UP):
        for load in loads.values():
            load.step()
    gc.collect()
    gc.disable()
    half = STEPS[kind][running] // 2
    for _ in range(ROUNDS // BATCHES):
        sums = [0, 0, 0]
        for order in ((0, 1, 2), (2, 1, 0)):
            for _ in range(half):
                for index in order:
                    sums[index] += loads[index].step()
        yield sums[0] / (2 * half), sums[1] / (2 * half), sums[2] / (2 * half)
    gc.enable()
    if d.backlog(patched.driver) != (0,) or not d.backlog(first.driver)[0]:
        raise SystemExit(f"backlogs are {d.backlog(patched.driver)} and {d.backlog(first.driver)}")


def _rounds(kind: str, running: int) -> dict[str, Any]:
    """Ratios of one load at one number of running requests."""
    rounds = [times for number in range(BATCHES) for times in _batch(kind, running, number)]
    return {
        "load": kind,
        "running": running,
        "rounds": len(rounds),
        "steps_per_round": STEPS[kind][running],
        "with_over_without": spread([2 * b / (a + c) for a, b, c in rounds]),
        "without_over_without": spread([a / c for a, _, c in rounds]),
        "without_us": statistics.median([(a + c) / 2 for a, _, c in rounds]) / 1e3,
        "with_us": statistics.median([b for _, b, _ in rounds]) / 1e3,
    }


def _memory() -> dict[str, float]:
    """Bytes that the list keeps per allocated block, without and with."""
    from tests.contract import driver as d  # noqa: PLC0415  only in a release's process
    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test

    result: dict[str, float] = {}
    for name in ("without", "with"):
        if name == "with":
            plugin.register(FIX_ALONE)
        driver = d.make_scheduler("full", count=True, num_blocks=3000, max_num_seqs=64, max_num_batched_tokens=32768)
        (manager,) = driver.managers
        before = sys.getsizeof(manager.new_block_ids)
        number = 0
        while sum(d.allocated(driver)) < BLOCKS:
            for _ in range(64):
                number += 1
                driver.add_request(f"r{number}", prompt_seed=number, prompt_length=496, max_tokens=1)
            driver.step()
        result[name] = (sys.getsizeof(manager.new_block_ids) - before) / sum(d.allocated(driver))
    plugin.restore()
    return {**result, "blocks": BLOCKS}


def _inside(release: str) -> dict[str, Any]:
    """Everything that is measured in the release's process."""
    from tests.contract import driver as d  # noqa: PLC0415  only in a release's process
    from tests.contract import (  # noqa: PLC0415  only in a release's process
        replaced,
        running_release,
    )
    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test

    if running_release.release() != release:
        raise SystemExit(f"asked for vLLM {release}, but sys.path has {running_release.release()}")
    d.make_scheduler()
    before = replaced.picture()
    plugin.register(FIX_ALONE)
    during = replaced.replaced(before, replaced.picture())
    plugin.restore()
    on_path = [n for n in during if not n.endswith((".__init__", ".take_new_block_ids"))]
    if on_path != [ON_STEP_PATH]:
        raise SystemExit(f"this measures {ON_STEP_PATH} alone, but on the step path are replaced: {on_path}")
    steps = []
    for kind in LOADS:
        for running in RUNNING:
            _say(f"  {kind}, {running} running: {ROUNDS} rounds")
            steps.append(_rounds(kind, running))
    _say("  memory per allocated block")
    return {"steps": steps, "bytes_per_block": _memory()}


# -- start-up -----------------------------------------------------------------------------------------------------

_START = """
import sys, time
if {core}:
    sys.path.append({root!r})
    from tests.contract import running_release
    running_release.module("vllm.v1.core.sched.scheduler")
before = time.perf_counter()
from vllm_kvfix import plugin
plugin.register()
took = time.perf_counter() - before
print("took", took)  # noqa: T201  a command's output
"""


def _start_up(release: str, package: Path, *, core: bool, times: int) -> dict[str, Any]:
    """Seconds that importing the plugin and `register()` take, in fresh processes."""
    python = str(releases.contract_python())
    environ = releases.environment(release, package)
    code = _START.format(core=core, root=str(ROOT))
    took = []
    for _ in range(times + 1):
        done = subprocess.run([python, "-c", code], env=environ, capture_output=True, text=True, check=False)  # noqa: S603  our own arguments
        lines = [line for line in done.stdout.splitlines() if line.startswith("took ")]
        if done.returncode or not lines:
            raise SystemExit(done.stdout + done.stderr)
        took.append(float(lines[-1].split()[1]) * 1e3)
    del took[0]  # wrote the byte code
    return {
        "release": release,
        "process": "engine core" if core else "other",
        "n": times,
        "median_ms": statistics.median(took),
        "min_ms": min(took),
        "max_ms": max(took),
    }


# -- the parent ---------------------------------------------------------------------------------------------------


def measure(release: str, package: Path) -> dict[str, Any]:
    """All figures, as plain JSON."""
    _say(f"schedule() of vLLM {release}, without and with")
    command = [str(releases.contract_python()), str(Path(__file__).resolve()), "--inside", release]
    done = subprocess.run(  # noqa: S603  our own arguments
        command, env=releases.environment(release, package), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the process of vLLM {release} failed with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    starts = []
    for version in (release, NOT_AFFECTED):
        for core, times in ((False, STARTS), (True, CORE_STARTS)):
            _say(f"register() in {times} fresh processes, vLLM {version}, {'engine core' if core else 'any other'}")
            starts.append(_start_up(version, package, core=core, times=times))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_1m": os.getloadavg()[0]}
    return {"release": release, "machine": machine, **result, "start_up": starts}


def table(result: dict[str, Any]) -> str:
    """The figures for a reader: medians, and the 5th to 95th percentile of the rounds."""
    lines = [
        f"schedule() per step, vLLM {result['release']}; medians, and 5th to 95th percentile of the rounds",
        f"{'load':8} {'running':>7} {'without':>10} {'with':>10}   {'with/without':24} {'without/without':24} rounds",
    ]
    lines += [
        (
            f"{row['load']:8} {row['running']:7} {row['without_us']:7.1f} us {row['with_us']:7.1f} us   "
            f"{shown(row['with_over_without']):24} {shown(row['without_over_without']):24} "
            f"{row['rounds']} x {row['steps_per_round']} steps"
        )
        for row in result["steps"]
    ]
    memory = result["bytes_per_block"]
    lines += [
        "",
        (
            f"bytes kept per allocated block, over {memory['blocks']} blocks: "
            f"without {memory['without']:.2f}, with {memory['with']:.2f}"
        ),
        "",
        "start-up per process: importing the plugin and register()",
    ]
    for row in result["start_up"]:
        affected = "affected" if releases.BY_VERSION[row["release"]].affected else "not affected"
        lines.append(
            f"{row['release']:8} {affected:13} {row['process']:12} median {row['median_ms']:7.1f} ms, "
            f"{row['min_ms']:.1f} to {row['max_ms']:.1f}, n = {row['n']}"
        )
    machine = result["machine"]
    lines.append(f"\n{machine['cpus']} CPUs, load {machine['load_1m']:.1f} at the end")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patch_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--release", default=releases.ENGINE_RELEASE, choices=releases.AFFECTED)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--package", type=Path, default=ROOT, help="folder in which vllm_kvfix lies (the checkout)")
    parser.add_argument("--inside", metavar="RELEASE", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inside:
        print(json.dumps(_inside(chosen.inside)))  # noqa: T201  a command's output
        return 0
    result = measure(chosen.release, chosen.package)
    print(json.dumps(result) if chosen.json else table(result))  # noqa: T201  a command's output
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
