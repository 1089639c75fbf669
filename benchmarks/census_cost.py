# SPDX-License-Identifier: Apache-2.0
"""What the census of containers costs: `python -m benchmarks.census_cost [--json]`, some two minutes.

The real scheduler of vLLM 0.25.1 with 10,000 live requests, most of them waiting, in a process of its own. Its objects
are frozen as an engine's are. A caller turns the census with 100 us each time, and the scheduler makes a step in
between, as in an engine, which leaves the processor's caches full of other things. Three dozen rounds, some walks.

*Figures.* Of each turn, the CPU time of its thread, and the time on the wall, in which another process may have had the
processor. The first round, which is a whole walk and in which each class is looked at for the first time, stands apart.
A loop of the same length that only reads the clock, between the same steps, shows what the machine alone can do to such
a figure. The share of wall time is a round's CPU time over the time that it takes at a turn each 100 ms.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__" and str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: an unzipped wheel on PYTHONPATH wins over the checkout

from tests import releases  # noqa: E402  the path comes first

REQUESTS = 10_000
ROUNDS = 36
BUDGET_NS = 100_000
PACE_S = 0.1  # from one turn to the next, in an engine
BENCHMARK_S = 500
MOST_TURNS = 5000  # in a round


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  a command's output


# -- in the release's process -------------------------------------------------------------------------------------


def _live_scheduler() -> Any:
    from tests.contract import driver as d  # noqa: PLC0415  only in a release's process

    driver = d.make_scheduler(num_blocks=20_000, max_num_seqs=1024, max_num_batched_tokens=16_384)
    for number in range(REQUESTS):
        driver.add_request(f"request-{number}", prompt_seed=number, prompt_length=40, max_tokens=400)
    for _ in range(3):
        driver.step()
    gc.collect()
    gc.freeze()
    return driver


def _timed(work: Any) -> tuple[int, int, Any]:
    """Nanoseconds of the thread's CPU time, and on the wall, and what was given."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    given = work()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    return cpu, wall, given


def _spin() -> None:
    end = time.monotonic_ns() + BUDGET_NS * 4 // 5
    while time.monotonic_ns() < end:
        pass


def _inside() -> dict[str, Any]:
    """Everything that is measured in the release's process."""
    from vllm_kvfix import events, live  # noqa: PLC0415  the package under test
    from vllm_kvfix.census import Census  # noqa: PLC0415  as above

    driver = _live_scheduler()
    census = Census()
    census.add_root("scheduler", driver.scheduler, live.live_ids_of)
    rounds: list[list[tuple[int, int]]] = []
    idle: list[tuple[int, int]] = []
    told: list[Any] = []
    told_a_round: list[int] = []
    while len(rounds) < ROUNDS:
        turns: list[tuple[int, int]] = []
        told = []
        for _ in range(MOST_TURNS):
            driver.step()
            cpu, wall, given = _timed(lambda: census.turn(BUDGET_NS))
            turns.append((cpu, wall))
            told += given
            idle.append(_timed(_spin)[:2])
            if census.resting:
                break
        rounds.append(turns)
        told_a_round.append(len(told) - 1)
        for number in range(len(driver.requests), len(driver.requests) + REQUESTS - len(driver.scheduler.requests)):
            driver.add_request(f"request-{number}", prompt_seed=number, prompt_length=40, max_tokens=400)
    later = rounds[1:]
    if not told or not isinstance(told[-1], events.Census):
        raise SystemExit("a round does not end")
    return {
        "live": len(driver.scheduler.requests),
        "containers": told[-1].containers,
        "told_a_round": statistics.median(told_a_round[1:]),
        "complete": told[-1].complete,
        "first_round": _figures(rounds[0]),
        "turns": _figures([turn for turns in later for turn in turns]),
        "idle": _figures(idle),
        "turns_a_round": statistics.median([len(turns) for turns in later]),
        "round_cpu_us": statistics.median([sum(cpu for cpu, _ in turns) for turns in later]) / 1e3,
        "share": statistics.median([sum(cpu for cpu, _ in turns) / (len(turns) * PACE_S * 1e9) for turns in later]),
    }


def _figures(turns: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "number": len(turns),
        "over": sum(cpu > BUDGET_NS for cpu, _ in turns),
        **{name: _percentiles([turn[at] / 1e3 for turn in turns]) for at, name in enumerate(("cpu_us", "wall_us"))},
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=1000, method="inclusive")
    return {"p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "max": max(values)}


# -- the parent ---------------------------------------------------------------------------------------------------


def measure(package: Path) -> dict[str, Any]:
    """All figures, as plain JSON."""
    release = releases.ENGINE_RELEASE
    _say(f"a census of vLLM {release}'s scheduler with {REQUESTS} requests")
    command = [str(releases.contract_python()), str(Path(__file__).resolve()), "--inside"]
    done = subprocess.run(  # noqa: S603  our own arguments
        command,
        env=releases.environment(release, package),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=BENCHMARK_S,
    )
    if done.returncode:
        raise SystemExit(f"the process of vLLM {release} failed with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_1m": os.getloadavg()[0]}
    return {"release": release, "machine": machine, **result}


def table(result: dict[str, Any]) -> str:
    """The figures for a reader."""
    lines = [
        f"vLLM {result['release']}, {result['live']} live requests",
        f"{result['containers']} containers, {result['told_a_round']:.0f} of them in a round",
        f"{'microseconds':26} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>8}   of    over {BUDGET_NS // 1000} us of CPU",
    ]
    for title, name in (("a turn", "turns"), ("a turn, first round", "first_round"), ("the clock alone", "idle")):
        row = result[name]
        for kind, word in (("cpu_us", "CPU"), ("wall_us", "wall")):
            figures = "".join(f" {row[kind][cut]:8.1f}" for cut in ("p50", "p99", "p99.9", "max"))
            lines.append(f"{title + ', ' + word:26}{figures}   {row['number']:5} {row['over']:5}")
    lines += [
        f"a round: {result['turns_a_round']:.0f} turns, {result['round_cpu_us'] / 1e3:.2f} ms of CPU time",
        f"{result['share']:.3%} of wall time at a turn every {PACE_S * 1e3:.0f} ms",
        f"{result['machine']['cpus']} CPUs, load {result['machine']['load_1m']:.1f} at the end",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.census_cost", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--package", type=Path, default=ROOT, help="folder in which vllm_kvfix lies (the checkout)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inside:
        print(json.dumps(_inside()))  # noqa: T201  a command's output
        return 0
    result = measure(chosen.package)
    print(json.dumps(result) if chosen.json else table(result))  # noqa: T201  a command's output
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
