# SPDX-License-Identifier: Apache-2.0
"""How many pods a second the webhook answers on one CPU: `python -m benchmarks.webhook_rate [--json]`, half a minute.

The server runs as in a pod, over TLS, held to one CPU; the client, on the others, sends the AdmissionReview of a pod of
vLLM, one after another on a kept connection as an API server does, and checks that each answer has a patch. A round
is ``REVIEWS`` reviews. *A second*: reviews by the clock, the client's share of the time included. *CPU*: what the
server's process took for one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.spread import shown, spread
from tests.helm.webhook_process import Running, review

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS, REVIEWS = 10, 500
WARM_UP = 50
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "llama-", "labels": {"vllm-kvfix.dev/inject": "true"}},
    "spec": {
        "containers": [
            {
                "name": "vllm",
                "image": "vllm/vllm-openai:v0.25.1",
                "env": [{"name": f"NAME_{n}", "value": "x" * 40} for n in range(30)],
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }
        ],
    },
}


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def rounds(folder: Path) -> Iterator[dict[str, float]]:
    """Each round's figures."""
    cpus = sorted(os.sched_getaffinity(0))
    body = json.dumps(review(POD)).encode()
    running = Running(folder)
    with running.child as child, running.client() as client:
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus[:1])
        os.sched_setaffinity(0, cpus[1:] or cpus)
        for number in range(-1, ROUNDS):
            count = WARM_UP if number < 0 else REVIEWS
            began, cpu = time.perf_counter(), _cpu_s(child.pid)
            for _ in range(count):
                status, said = client.post(body)
                if status != 200 or b"JSONPatch" not in said:  # noqa: PLR2004  # HTTP's
                    raise SystemExit(f"answered {status}: {said[:200]!r}")
            found = {
                "a_second": count / (time.perf_counter() - began),
                "cpu_ms": (_cpu_s(child.pid) - cpu) / count * 1e3,
            }
            sys.stderr.write(f"  round {number + 1} of {ROUNDS}: {found['a_second']:.0f} reviews/s\n")
            if number >= 0:
                yield found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.webhook_rate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the sentence")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = list(rounds(Path(folder)))
    figures: dict[str, Any] = {name: spread([one[name] for one in found]) for name in ("a_second", "cpu_ms")}
    if chosen.json:
        sys.stdout.write(json.dumps({"rounds": ROUNDS, "reviews": REVIEWS, **figures}) + "\n")
    else:
        sys.stdout.write(
            f"{ROUNDS} rounds of {REVIEWS} reviews, server on one CPU: {shown(figures['a_second'])} a second, "
            f"{shown(figures['cpu_ms'])} ms of CPU each\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
