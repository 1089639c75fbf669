# SPDX-License-Identifier: Apache-2.0
"""What attaching costs: `python -m benchmarks.attach_cost [--rounds N] [--json]`, some five minutes.

A real engine on CPUs serves the demo's mixed load over HTTP, on a machine with twenty more processes. Each round runs
the load four times, in turned order every other round: left alone; with ``attach --dry-run`` again and again, which
does all the work outside of the engine and nothing in it; with attach and detach again and again, as a user types them,
each a process of its own; and the same from one process that has prepared already, as with ``--all``.

*Figures.* Seconds of a whole command, from its start to its end; milliseconds that the engine waited at its step
boundary; and how much longer the longest step was than the 99th percentile of the steps when left alone. On a machine
with few CPUs the commands take CPU time from the engine, which the dry runs show; what is put into the engine adds the
difference between those two, and the longest step when left alone is what the machine can do by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.spread import shown, spread
from tests.engine.attaching import Attended, attended
from tests.engine.harness import Workshop
from vllm_kvfix import attach
from vllm_kvfix.demo.engine import Engine
from vllm_kvfix.demo.model import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROUNDS = 5
REQUESTS = 120
DUMMIES = 20
COMMAND_TIMEOUT_S = 120
_DUMMY = "import time\nwhile True: time.sleep(0.05)"


@dataclass
class Measured:
    """Lists of seconds, one entry a command or a round."""

    attach_s: list[float] = field(default_factory=list)
    detach_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    excess_s: dict[str, list[float]] = field(default_factory=dict)


def _command(name: str, pid: int, *options: str) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    done = subprocess.run(  # noqa: S603  # our own command
        [sys.executable, "-m", "vllm_kvfix", name, "--json", *options, str(pid)],
        capture_output=True,
        text=True,
        check=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    return json.loads(done.stdout), time.monotonic() - began


def _nothing(_: int, __: Measured) -> Iterator[bool]:
    yield from ()


def _dry_runs(pid: int, _: Measured) -> Iterator[bool]:
    while True:
        _command("attach", pid, "--dry-run")
        yield True


def _calls(pid: int, _: Measured) -> Iterator[bool]:
    while True:
        attach.attach_to(pid, fix=True, observe=True)
        attach.detach_from(pid)
        yield True


def _commands(pid: int, measured: Measured) -> Iterator[bool]:
    while True:
        said, took = _command("attach", pid)
        measured.attach_s.append(took)
        measured.held_s.append(said["held_s"])
        measured.detach_s.append(_command("detach", pid)[1])
        yield True


ARMS = {"alone": _nothing, "dry_run": _dry_runs, "commands": _commands, "prepared": _calls}


@contextlib.contextmanager
def _dummies() -> Iterator[None]:
    """More processes on this machine."""
    with contextlib.ExitStack() as stack:
        for _ in range(DUMMIES):
            process = subprocess.Popen([sys.executable, "-c", _DUMMY])  # noqa: S603  # our own
            stack.callback(stack.enter_context(process).kill)
        yield


def _p99(steps: list[float]) -> float:
    return sorted(steps)[len(steps) * 99 // 100]


def measure(rounds: int) -> Measured:
    """Run everything."""
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="attach-cost-") as name, _dummies():
        folder = Path(name)
        workshop = Workshop(make_model(folder / "model"), folder, folder)
        settings, environment = attended(workshop)
        with Engine(environment, settings) as serving:
            engine = Attended(serving, environment, settings.work)
            engine.load(REQUESTS)
            for number in range(rounds):
                order = list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]
                steps = {arm: engine.load(REQUESTS, ARMS[arm](engine.core, measured)).steps for arm in order}
                for arm, found in steps.items():
                    measured.excess_s.setdefault(arm, []).append(max(found) - _p99(steps["alone"]))
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="two at least")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    measured = measure(max(2, options.rounds))
    figures = {
        "attach_command_s": spread(measured.attach_s),
        "detach_command_s": spread(measured.detach_s),
        "held_at_boundary_ms": spread([held * 1e3 for held in measured.held_s]),
    }
    for arm in ARMS:
        figures[f"longest_step_over_p99_{arm}_ms"] = spread([excess * 1e3 for excess in measured.excess_s[arm]])
    if options.json:
        sys.stdout.write(json.dumps({"commands": len(measured.attach_s), **figures}) + "\n")
        return 0
    sys.stdout.write(f"{len(measured.attach_s)} times attach and detach; median (5th .. 95th percentile)\n")
    sys.stdout.writelines(f"  {name:<36} {shown(figure)}\n" for name, figure in figures.items())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
