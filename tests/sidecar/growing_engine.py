# SPDX-License-Identifier: Apache-2.0
"""A fake engine process, named so, whose ring holds the minutes before: load, memory, and a container that grows.

Run as ``python -m tests.sidecar.growing_engine RING BYTES_AN_HOUR ROLE``: it writes all of its past at once, says
"ready", and lives until its input ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.sidecar.fake_engine import BOOT, start_time_of
from vllm_kvfix import events, host
from vllm_kvfix.events import Census, Config, Container, Figures, Group, Step
from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix.ring.writer import Origin, RingWriter

PAST_S = 1200
EVERY_S = 5
ID_BYTES = 8
BLOCKS_A_REQUEST = 20
PATH = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"


def past(now_ns: int, bytes_an_hour: float, anon_now: int) -> list[list[events.Event]]:
    """Frames of the last ``PAST_S`` seconds, if the machine ran; ``anon_now``: bytes of anonymous memory now."""
    base = anon_now - int(bytes_an_hour / 3600 * PAST_S)
    frames: list[list[events.Event]] = [
        [Config(10_000, 64, 8192, prefix_caching=True, groups=(Group(16, "FullAttentionSpec"),))]
    ]
    for second in range(0, PAST_S, EVERY_S):
        at = now_ns - (PAST_S - second) * 10**9
        if at < 0:  # before the machine was started
            continue
        ids = int(bytes_an_hour / 3600 * second / ID_BYTES)
        requests = (ids or second * 100) // BLOCKS_A_REQUEST
        state = [at, 8, 0, 5000, 5000]
        totals = [second * 50, second * 800, requests * BLOCKS_A_REQUEST, 0, requests * BLOCKS_A_REQUEST]
        step = Step._make([*state, *totals, 0, 0, 0, 0, requests, 0, requests * 100, (ids,)])
        anon = base + ids * ID_BYTES
        frames.append(
            [
                step,
                Figures(at, "status", {"rss": anon + (8 << 20), "anon": anon, "file": 8 << 20, "swap": 0}),
                Figures(at, "malloc", {"in_use": anon - (4 << 20), "retained": 1 << 20, "mapped": 0}),
                Figures(at, "cgroup", {"usage": anon + (64 << 20), "limit": 1 << 30, "file": 8 << 20, "shmem": 0}),
                Container(at, PATH, ids, 1, None, ids * ID_BYTES, ids, 0, 0, 0),
                Container(at, "scheduler.running", 8, 1, None, 4096, requests, requests, 0, 0),
                Census(at, 2, 50_000, complete=True),
            ]
        )
    return frames


def main() -> None:
    """Write, and wait."""
    path, bytes_an_hour, role = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    ballast = b"x" * int(bytes_an_hour / 3600 * PAST_S)  # what has grown is really there
    anon = host.status()["anon"]
    origin = Origin(start_time_of(os.getpid()), BOOT, vllm_version="0.25.1", role=role or ENGINE_CORE)
    writer = RingWriter(path, 1 << 18, origin)
    for happened in past(time.monotonic_ns(), bytes_an_hour, anon):
        assert writer.write([word for event in happened for word in events.encode(event)], len(happened))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    del ballast


if __name__ == "__main__":
    main()
