# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark, one after another: `python -m benchmarks`."""

from __future__ import annotations

import sys

from benchmarks import (
    attach_cost,
    census_cost,
    engine_cost,
    page_cost,
    page_load,
    patch_cost,
    recorder_cost,
    ring_tearing,
    sidecar_cost,
    verdict_quality,
    webhook_rate,
)

BENCHMARKS = (
    attach_cost,
    patch_cost,
    recorder_cost,
    census_cost,
    engine_cost,
    sidecar_cost,
    page_cost,
    page_load,
    ring_tearing,
    webhook_rate,
    verdict_quality,
)


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
