# SPDX-License-Identifier: Apache-2.0
"""A fake process of vLLM's, named so, that leaks and tells of all there is to tell, and goes on telling.

Run as ``python -m tests.monitoring.telling_engine RING ROLE``: it writes its past, says "ready", and then a frame twice
a second until its input ends. An engine core's backlog grows with each, the fix is refused there, and its cgroup is one
with a limit; a worker says that its maps cannot be read.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.sidecar.fake_engine import BOOT, start_time_of
from tests.sidecar.growing_engine import PAST_S, past
from vllm_kvfix import events, host
from vllm_kvfix.events import CATEGORIES, SCOPES, Container, Figures, Step, Unread
from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
# Fast enough for the limit of a machine of some tens of GiB to be less than a day away.
BYTES_AN_HOUR = 1200 * MIB
LIMIT = 4096 * MIB
CACHE = "scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block"


def cgroup(at: int, anon: int, number: int) -> Figures:
    """A cgroup with all that there may be."""
    figures = dict.fromkeys(SCOPES["cgroup"], 0)
    figures |= {"usage": anon + 16 * MIB, "limit": LIMIT, "high": LIMIT - 8 * MIB, "anon": anon, "file": 8 * MIB}
    return Figures(at, "cgroup", figures | {"psi_some_us": number, "psi_full_us": number})


def more(at: int, anon: int, number: int) -> list[events.Event]:
    """The scopes, figures and containers that the growing engine does not tell of."""
    maps = dict.fromkeys(CATEGORIES, 0) | {"heap": anon, "files": 8 * MIB}
    python = dict.fromkeys(SCOPES["python"], 1000) | {"collections_count": number}
    return [
        Figures(at, "smaps", {"rss": anon + 8 * MIB, "pss": anon + 4 * MIB, "uss": anon, "swap": 0} | maps),
        cgroup(at, anon, number),
        Figures(at, "python", python),
        Container(at, CACHE, 500, 1, 10_000, 64_000, 600, 100, 3, 7 * 10**9),
    ]


def completed(frame: Sequence[events.Event], number: int) -> list[events.Event]:
    """A frame of the growing engine, with all that it leaves out."""
    told = list(frame)
    for event in frame:
        if isinstance(event, Figures) and event.scope == "status":
            told += more(event.time, event.values["anon"], number)
    return told


def last_step(frames: Sequence[Sequence[events.Event]]) -> Step:
    """The state at the end of the past."""
    return next(event for frame in reversed(frames) for event in frame if isinstance(event, Step))


def main() -> None:
    """Write, and go on writing."""
    path, role = Path(sys.argv[1]), sys.argv[2]
    ballast = b"x" * (BYTES_AN_HOUR // 3600 * PAST_S)  # what has grown is really there
    origin = Origin(start_time_of(os.getpid()), BOOT, vllm_version="0.25.1", role=role)
    writer = RingWriter(path, 1 << 18, origin)
    writer.set_patch_state("refused" if role == ENGINE_CORE else "unknown")

    def write(told: Sequence[events.Event]) -> None:
        if not writer.write([word for event in told for word in events.encode(event)], len(told)):
            raise RuntimeError("the ring took no frame")

    if role == ENGINE_CORE:
        frames = past(time.monotonic_ns(), BYTES_AN_HOUR, host.status()["anon"])
        for number, frame in enumerate(frames):
            write(completed(frame, number))
        step = last_step(frames)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not ended.wait(0.5):
        now = time.monotonic_ns()
        if role == ENGINE_CORE:
            step = step._replace(time=now, steps=step.steps + 1, backlog=(step.backlog[0] + 1000,))
            write([step, cgroup(now, host.status()["anon"], step.steps)])
        else:
            write([Unread(now, "smaps", "permission denied")])
    del ballast


if __name__ == "__main__":
    main()
