# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark, one after another: `python -m benchmarks`."""

from __future__ import annotations

import sys

from benchmarks import engine_cost, patch_cost, recorder_cost, ring_tearing, sidecar_cost

BENCHMARKS = (patch_cost, recorder_cost, engine_cost, sidecar_cost, ring_tearing)


def main() -> int:
    """Run them; the first failing one's exit code, else 0."""
    for benchmark in BENCHMARKS:
        sys.stdout.write(f"== {benchmark.__name__}\n")
        sys.stdout.flush()
        code: int = benchmark.main([])
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
