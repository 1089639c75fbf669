# SPDX-License-Identifier: Apache-2.0
"""One release, in a process of its own: `python run_release.py --release X --workloads N --seed S --json`.

The process must have the release's sources first on PYTHONPATH, then the package under test, then hypothesis;
`tests.releases.environment` makes such an environment. Progress goes to stderr, one JSON object to stdout.
Exit code 0: everything held; 1: something did not, with the reason in `failure`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Last, so that an installed or unzipped `vllm_kvfix` wins over the checkout's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests import releases
from tests.contract import accounts, census, driver, machine, replaced, rooted, running_release, scenarios, watching
from vllm_kvfix import upstream


def examine(release: str, workloads: int, seed: int, *, shrink: bool = False) -> dict[str, Any]:
    """Run everything that is promised of one release; the result is plain JSON."""
    known = releases.BY_VERSION[release]
    read_the_source_once()
    if running_release.release() != release:
        msg = f"asked for vLLM {release}, but sys.path has {running_release.release()}"
        raise SystemExit(msg)
    result: dict[str, Any] = {"release": release, "when": known.when, "seed": seed}
    totals = machine.Totals()
    try:
        result["replaced"] = replacements({"VLLM_KVFIX_OBSERVE": "off"})
        with accounts.ring_folder() as folder:
            result["observed"] = replacements({"VLLM_KVFIX_PATCH": "off", "VLLM_KVFIX_RING_DIR": str(folder)})
        totals = machine.run(workloads, seed, totals, shrink=shrink)
        result["watched"] = watching.run()
        result["rooted"] = rooted.run()
        result["census"] = census.run(affected=known.affected)
        result["scenarios"] = scenarios.run() if known.affected else {}
        result["uncovered"] = [name for name in machine.required() if not totals.coverage[name]]
        result["failure"] = None
    except Exception:  # noqa: BLE001  reported whole to the parent, which fails
        result["failure"] = traceback.format_exc()
    return result | {
        "workloads": totals.workloads,
        "distinct": len(totals.distinct),
        "outputs": totals.outputs,
        "differing": 0 if result["failure"] is None else None,
        "backlog_without": totals.backlog_without,
        "backlog_with": totals.backlog_with,
        "coverage": dict(sorted(totals.coverage.items())),
        "upstream_errors": dict(totals.upstream_errors),
    }


def read_the_source_once() -> None:
    """Parse and search each text once: every `register()` does so anew; an engine calls it once, this process often."""
    vars(upstream)["ast"] = SimpleNamespace(**vars(ast) | {"parse": functools.cache(ast.parse)})
    vars(upstream)["_names"] = functools.cache(vars(upstream)["_names"])


def replacements(environ: dict[str, str]) -> list[str]:
    """Names of what `register()` replaces, once a scheduler was made; and `restore()` gives back every object.

    Raises:
        AssertionError: Something differs after `restore()`.
    """
    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test

    driver.make_scheduler(async_scheduling=True)
    driver.make_scheduler()
    before = replaced.picture()
    plugin.register(environ)
    driver.make_scheduler(async_scheduling=True)
    driver.make_scheduler().run()
    during = replaced.replaced(before, replaced.picture())
    left = plugin.restore()
    after = replaced.replaced(before, replaced.picture())
    if left or after:
        msg = f"restore() says it left {left}; these are not what they were: {after}"
        raise AssertionError(msg)
    return during


def main() -> int:
    """Run, print, and say by the exit code whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    parser.add_argument("--workloads", type=int, default=25)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--json", action="store_true", help="one JSON object (default: a summary)")
    parser.add_argument("--shrink", action="store_true", help="on a failure, find the smallest workload (minutes)")
    chosen = parser.parse_args()
    started = time.monotonic()
    with accounts.ring_folder() as folder:
        os.environ["VLLM_KVFIX_RING_DIR"] = str(folder)  # of whoever does not name one
        result = examine(chosen.release, chosen.workloads, chosen.seed, shrink=chosen.shrink)
    result["seconds"] = round(time.monotonic() - started, 1)
    if chosen.json:
        print(json.dumps(result))  # noqa: T201  what was asked for
    else:
        print(json.dumps(result, indent=1))  # noqa: T201  what was asked for
    return 0 if result["failure"] is None and not result["uncovered"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
