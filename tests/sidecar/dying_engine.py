# SPDX-License-Identifier: Apache-2.0
"""A fake engine process, named so, that works until it is ended: steps, memory, three requests, a list that grows.

Run as ``python -m tests.sidecar.dying_engine RING ROLE``: it says "ready", and ends as the line says that it reads:
``order``, ``exception``, or ``stop``, after which it stays; or as whoever kills it wants.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

from tests.sidecar.fake_engine import BOOT, admitted, arrived, start_time_of
from tests.sidecar.growing_engine import past
from tests.support import ROOT
from vllm_kvfix import events
from vllm_kvfix.events import Figures, Step, TraceContext
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP_S = 0.02
CONTEXT = TraceContext(0xABC, 0xDEF, 1)
IDS = ("cmpl-1-0a1b2c3d", "cmpl-2-0a1b2c3d", "cmpl-3-0a1b2c3d")
LIMIT = 1 << 30


@contextmanager
def dying_engine(ring: Path, role: str = layout.ENGINE_CORE) -> Iterator[Popen[str]]:
    """The process, ready."""
    command = [sys.executable, "-m", "tests.sidecar.dying_engine", str(ring), role]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def order(process: Popen[str], how: str) -> None:
    """Have it end so, and wait for that."""
    assert process.stdin is not None
    process.stdin.write(f"{how}\n")
    process.stdin.flush()
    process.wait(60)


def work(writer: RingWriter, stop: threading.Event) -> None:
    """One frame a step."""
    steps = 0
    while not stop.is_set():
        steps += 1
        now = time.monotonic_ns()
        step = Step._make(
            [now, 2, 1, 100, 50, 24_000 + steps, 500_000 + 32 * steps, 9, 9, 9, 0, 0, 0, 0, 7, 0, 9, (0,)]
        )
        happened: list[events.Event] = [step]
        if steps == 1:
            happened = [arrived(1, now), arrived(2, now, CONTEXT), arrived(3, now), step, admitted(1, now)]
        if steps % 10 == 0:
            happened.append(Figures(now, "status", {"rss": 900 << 20, "anon": 880 << 20}))
            told = {"usage": 1023 << 20, "limit": LIMIT, "file": 0, "shmem": 0, "oom_kill_count": 0}
            happened.append(Figures(now, "cgroup", told))
        words = [word for event in happened for word in events.encode(event)]
        assert writer.write(words, len(happened))
        stop.wait(STEP_S)


def main() -> None:
    """Work, and end."""
    path, role = Path(sys.argv[1]), sys.argv[2]
    origin = Origin(start_time_of(os.getpid()), BOOT, vllm_version="0.25.1", plugin_version="0.2.0", role=role)
    writer = RingWriter(path, 1 << 18, origin)
    for happened in past(time.monotonic_ns() - 10**9, 90 << 20, 900 << 20):
        told = happened if role == layout.ENGINE_CORE else [event for event in happened if isinstance(event, Figures)]
        assert writer.write([word for event in told for word in events.encode(event)], len(told))
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(writer, stop))
    if role == layout.ENGINE_CORE:
        thread.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    how = sys.stdin.readline().strip()
    if how == "stop":
        writer.end(layout.STOPPING)
        sys.stdin.read()
    stop.set()
    if role == layout.ENGINE_CORE:
        thread.join()
    if how == "exception":
        writer.end(layout.ENDED_BY_EXCEPTION, "torch.OutOfMemoryError")
    writer.close()


if __name__ == "__main__":
    main()
