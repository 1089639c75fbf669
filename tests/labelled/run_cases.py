# SPDX-License-Identifier: Apache-2.0
"""Cases of one release: `python run_cases.py --release X --out FOLDER CASE...`, each case in a fork of its own.

The process must have the release's sources first on PYTHONPATH; `tests.releases.environment` makes such an environment.
vLLM is imported once, nothing is played here, and so no case meets the memory of another. For each case there are
`CASE.rec`, see `recording.py`, and `CASE.json`: what the case knows of itself, or why it failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Last, so that an installed or unzipped `vllm_kvfix` wins over the checkout's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests import releases
from tests.contract import driver, running_release
from tests.labelled import cases, recording, scenes
from tests.labelled.clock import Clock
from tests.labelled.stage import Stage
from vllm_kvfix import plugin


def play(case: cases.Case, out: Path) -> dict[str, Any]:
    """Play one case in this process; what it knows of itself, as plain JSON."""
    scene = case.scene(case.name)
    if scene.patched:
        plugin.register({"VLLM_KVFIX_OBSERVE": "off"})
        for report in plugin.report():
            if not report.replaced and running_release.release() in releases.AFFECTED:
                raise AssertionError(f"not applied: {report.decision}")
    stage = Stage(scene)
    scene.set_up(stage)
    _warm_up(stage)
    clock = Clock()
    with (out / f"{case.name}.rec").open("wb") as file:
        recorder = recording.Recorder(stage, clock, scene.pace, file)
        begin = dict(vars(stage.totals))
        anon, leaked = _anon(), scene.leaked
        for tick, now in enumerate(scene.pace.times()):
            stage.tick(tick)
            clock.now_s = now
            recorder.look()
    return {
        "leaked": scene.leaked - leaked,
        "load": {name: count - begin[name] for name, count in vars(stage.totals).items()},
        "anon": _anon() - anon,
        "category": scene.category(),
    }


def _warm_up(stage: Stage) -> None:
    """Some load, and then what vLLM does at the end of its start: all that is alive is hidden from the collector."""
    for tick in range(-scenes.WARM_TICKS, 0):
        stage.tick(tick)
    for generation in range(3):
        gc.collect(generation)
    gc.freeze()


def _anon() -> int:
    """RssAnon of this process in bytes, by our own reading."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def _in_a_fork(case: cases.Case, out: Path) -> None:
    """Play a case in a fork of this process and wait for it."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            result: dict[str, Any] = {"failure": None, **play(case, out)}
            code = 0
        except BaseException:  # noqa: BLE001  told to the parent's parent, which fails
            result = {"failure": traceback.format_exc()}
        result["seconds"] = round(time.monotonic() - started, 1)
        result["cpu"] = round(time.process_time(), 1)
        (out / f"{case.name}.json").write_text(json.dumps(result))
        os._exit(code)  # nothing that the parent registered may run here
    os.waitpid(child, 0)
    print(f"  {case.name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)  # noqa: T201  progress


def main() -> int:
    """Play the named cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    chosen = parser.parse_args()
    if running_release.release() != chosen.release:
        raise SystemExit(f"asked for vLLM {chosen.release}, but sys.path has {running_release.release()}")
    driver.make_scheduler(max_model_len=64).run()  # what is imported lazily is imported here, once
    for name in chosen.cases:
        _in_a_fork(cases.BY_NAME[name], chosen.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
