# SPDX-License-Identifier: Apache-2.0
"""A fake engine process, named so: leaks as growing_engine does, has requests at work, and goes on when it is told to.

Run as ``python -m tests.browser.told_engine RING VLLM_VERSION [TEXT ...]``: the texts are the ids of its requests, and
parts of paths of containers. It says "ready"; each number N on its input adds N ids
to the list that leaks, and is answered by that list's length; it lives until its input ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.sidecar.fake_engine import BOOT, finished, start_time_of
from tests.sidecar.growing_engine import PAST_S, PATH, past
from vllm_kvfix import events, host
from vllm_kvfix.events import Admitted, Allocated, Arrived, Blocks, Container, Identity, Step, TraceContext
from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix.ring.writer import Origin, RingWriter

BYTES_AN_HOUR = 90 << 20
REQUESTS = tuple(f"cmpl-{number}-0a1b2c3d" for number in range(1, 13))


class ToldEngine:
    """What it has written so far."""

    def __init__(self, path: Path, version: str) -> None:
        origin = Origin(start_time_of(os.getpid()), BOOT, vllm_version=version, role=ENGINE_CORE)
        self._writer = RingWriter(path, 1 << 18, origin)
        self._writer.set_patch_state("refused")
        self._step: Step | None = None
        self._ids = 0

    def write(self, *happened: events.Event) -> None:
        """Publish one frame, and keep what the next one goes on from."""
        words = [word for event in happened for word in events.encode(event)]
        assert self._writer.write(words, len(happened))
        for event in happened:
            if isinstance(event, Step):
                self._step, self._ids = event, event.backlog[0]

    def begin(self, texts: tuple[str, ...]) -> None:
        """The past, then requests that run, one that waits, some that ended, and a container for each text."""
        now = time.monotonic_ns()
        for frame in past(now, BYTES_AN_HOUR, host.status()["anon"]):
            self.write(*frame)
        for number, text in enumerate(texts, 1):
            arrival = now - (20 + number) * 10**9
            context = TraceContext(0xABC0 + number, 0xDEF, 1) if number % 2 else None
            self.write(Arrived(number, arrival, 100, Identity(text, context)))
            self.write(Container(now, f"scheduler.requests[{text}]", number, 1, 100, 1000 * number, 5, 4, 1, 3))
            if number == len(texts):
                break  # this one waits
            self.go_on(0, admission := arrival + 10**9)
            self.write(Admitted(number, admission, False, 32, 0, (Blocks(2, 3 * number),)))  # noqa: FBT003  # a record's field
            self.write(Allocated(number, admission + 10**9, (1,)))
        for number in range(1000, 1010):
            self.write(finished(number)._replace(time=now, peak=number - 990))
        self.go_on(0)

    def go_on(self, ids: int, at: int | None = None) -> int:
        """A step after which so many ids more are in the list; how many are in it then."""
        now = time.monotonic_ns() if at is None else at
        assert self._step is not None
        total = self._ids + ids
        self.write(self._step._replace(time=now, running=len(REQUESTS) - 1, waiting=1, backlog=(total,)))
        self.write(Container(now, PATH, total, 1, None, total * 8, total, 0, 0, 0))
        return total


def main() -> None:
    """Begin, and do as told."""
    engine = ToldEngine(Path(sys.argv[1]), sys.argv[2])
    ballast = b"x" * (BYTES_AN_HOUR * PAST_S // 3600)  # what has grown is really there
    engine.begin(tuple(sys.argv[3:]) or REQUESTS)
    say("ready")
    for line in sys.stdin:
        say(str(engine.go_on(int(line))))
    del ballast


def say(text: str) -> None:
    """A line of output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
