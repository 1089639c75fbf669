# SPDX-License-Identifier: Apache-2.0
"""A fake engine, named so: writes real rings with events that a recorder could have written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import ROOT
from vllm_kvfix import events
from vllm_kvfix.events import Admitted, Allocated, Arrived, Blocks, Finished, Identity, Step, TraceContext
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from opentelemetry.sdk.trace import ReadableSpan

    from vllm_kvfix_sidecar.metrics import SpanCounts

SECOND = 10**9
BOOT = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def start_time_of(pid: int) -> int:
    """Field 22 of a process's stat."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


class FakeEngine:
    """Writes frames of events into a ring, as this process; since the lock is our own, only /proc says that we live."""

    def __init__(self, path: Path, capacity: int = 1 << 14, start_time: int | None = None, boot: bytes = BOOT) -> None:
        start = start_time_of(os.getpid()) if start_time is None else start_time
        self.writer = RingWriter(path, capacity, Origin(start, boot, vllm_version="0.25.1"))
        self.path = path
        self.published = 0

    def write(self, *happened: events.Event) -> None:
        """Publish one frame."""
        words = [word for event in happened for word in events.encode(event)]
        assert self.writer.write(words, len(happened))
        self.published += len(happened)

    def poke(self, word: int, value: int) -> None:
        """Overwrite a word of the header."""
        self.writer._header[word] = value

    def die(self) -> None:
        """Be some other process, that is gone."""
        self.poke(layout.START_TIME_WORD, 1)


def step(time: int, running: int = 0) -> Step:
    """A state, all zero but for what is said."""
    return Step._make([time, running, *[0] * 15, (0,)])


def identity(number: int, context: TraceContext | None = None) -> Identity:
    """An id as vLLM makes them."""
    return Identity(f"cmpl-{number}-0a1b2c3d", context)


def arrived(number: int, time: int = SECOND, context: TraceContext | None = None) -> Arrived:
    """A request with 100 prompt tokens."""
    return Arrived(number, time, 100, identity(number, context))


def admitted(number: int, time: int = 2 * SECOND, *, resumed: bool = False) -> Admitted:
    """It begins with 2 reused and 5 new blocks."""
    return Admitted(number, time, resumed, 32, 3, (Blocks(2, 5),))


def allocated(number: int, time: int = 3 * SECOND, new: int = 1) -> Allocated:
    """It got new blocks of the one group."""
    return Allocated(number, time, (new,))


def finished(number: int, context: TraceContext | None = None, **changed: object) -> Finished:
    """It ended as most do, unless said otherwise."""
    usual = Finished(
        number=number,
        time=4 * SECOND,
        arrival=SECOND,
        admission=2 * SECOND,
        reason="stop",
        freed=True,
        prompt_tokens=100,
        output_tokens=20,
        hit_tokens=32,
        external_tokens=3,
        peak=8,
        held=15_000_000,
        preemptions=0,
        refusals=0,
        groups=(Blocks(2, 6),),
        identity=identity(number, context),
    )
    return usual._replace(**changed)  # type: ignore[arg-type]  # each field has its own type


def life(number: int, context: TraceContext | None = None) -> Iterator[events.Event]:
    """All events of one request in one frame."""
    yield arrived(number, context=context)
    yield step(2 * SECOND)
    yield admitted(number)
    yield step(3 * SECOND)
    yield allocated(number)
    yield finished(number, context)


class Sink:
    """A span sink that keeps what it gets, and exports when told to."""

    def __init__(self, counts: SpanCounts) -> None:
        self.spans: list[ReadableSpan] = []
        self._counts = counts

    def emit(self, span: ReadableSpan) -> bool:
        """Take a span."""
        self.spans.append(span)
        self._counts.emitted += 1
        return True

    def export(self) -> None:
        """All that came so far has arrived."""
        self._counts.exported = len(self.spans)

    @property
    def ids(self) -> list[tuple[int, int]]:
        """(trace id, span id) of each span."""
        contexts = [span.get_span_context() for span in self.spans]
        return [(context.trace_id, context.span_id) for context in contexts if context is not None]


_OTHER_PROCESS = """
import os, sys
from pathlib import Path
from tests.sidecar.fake_engine import FakeEngine, arrived, admitted, life, step
engine = FakeEngine(Path(sys.argv[1]))
engine.write(*life(1))
engine.write(arrived(2), step(2 * 10**9), admitted(2))
print("ready", flush=True)
sys.stdin.read()
"""


def other_process(path: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    """An engine in a process of its own, with request 1 over and request 2 running; it says "ready"."""
    return subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
