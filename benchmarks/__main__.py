# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark, one after another: `python -m benchmarks`."""

from __future__ import annotations

import sys

from benchmarks import patch_cost, ring_tearing

BENCHMARKS = (patch_cost, ring_tearing)


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
