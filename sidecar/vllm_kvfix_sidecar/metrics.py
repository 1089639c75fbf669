# SPDX-License-Identifier: Apache-2.0
"""What is known of each engine as plain numbers, cheap to write for each request and to read for each export.

One thread writes, others read. Each field is stored whole, so a reader sees a state that was; what belongs together
(a step, a header) is one object.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix import events
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.requests import ENGINE_ENDED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.trace import SpanContext

    from vllm_kvfix.ring.reader import Header
    from vllm_kvfix_sidecar.requests import RequestRecord

KEEP_ENDED_S = 300.0
# What fits the protocol's int64: a word of a ring may be larger, and would fail the whole batch.
LARGEST = (1 << 63) - 1
REASONS = (*events.FINISH_REASONS, ENGINE_ENDED)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class EngineKey:
    """Which engine: pid and data-parallel index, and its ring's file name, which tells two of one pid apart."""

    pid: int
    index: int
    ring: str


class Exemplar(NamedTuple):
    """A value in a bucket of a histogram and the exported span that it belongs to; time in unix ns."""

    value: float
    time: int
    trace_id: int
    span_id: int


class Histogram:
    """Counts by bucket, the last beyond all bounds; of each bucket the last value that has an exported span."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)

    def record(self, value: float) -> int:
        """Count a value, in the first bucket whose bound is no less; which one that was."""
        at = bisect_left(self.bounds, value)
        self.counts[at] += 1
        self.sum += value
        return at


class SpanCounts:
    """What became of spans, or of events.

    ``emitted`` is always exported + failed + dropped + pending; ``unsampled`` is apart.
    ``lock`` guards every change, so that they add up for whoever holds it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.emitted = 0
        self.exported = 0
        self.failed = 0
        self.dropped = 0
        self.unsampled = 0

    @property
    def pending(self) -> int:
        """Spans that wait for their export, or are in it."""
        return self.emitted - self.exported - self.failed - self.dropped


class ExportCounts:
    """What became of exports of metrics."""

    def __init__(self) -> None:
        self.exported = 0
        self.failed = 0


class EngineMetrics:
    """One engine."""

    def __init__(self, key: EngineKey) -> None:
        self.key = key
        self.state = "unknown"
        self.ended_s: float | None = None
        self.settings: events.Config | None = None
        self.first_step: events.Step | None = None
        self.last_step: events.Step | None = None
        self.first_header: Header | None = None
        self.header: Header | None = None
        self.lost = 0
        self.malformed = 0
        self.finished_by_reason = dict.fromkeys(REASONS, 0)
        self.peak = Histogram(conventions.PEAK_BLOCKS.bounds)
        self.residency = Histogram(conventions.RESIDENCY.bounds)
        self.block_seconds = Histogram(conventions.BLOCK_SECONDS.bounds)
        self.queue = Histogram(conventions.QUEUE_DURATION.bounds)

    def config(self, config: events.Config) -> None:
        """What the engine is."""
        self.settings = config

    def step(self, step: events.Step) -> None:
        """The engine's state; the latest stands."""
        if self.first_step is None:
            self.first_step = step
        self.last_step = step

    def finished(self, request: RequestRecord, end_unix_ns: int, span: SpanContext | None) -> None:
        """Count a request that is over; ``span`` if it was exported, for the exemplars.

        One that never ran has held no blocks and is in no histogram.
        """
        reason = request.reason
        self.finished_by_reason[reason if reason in self.finished_by_reason else "unknown"] += 1
        admission = request.admission
        if not admission:
            return
        # A hostile ring may turn times round, and hold counts that are too large for an exemplar's int64.
        peak, residency = float(request.peak_blocks), max(0.0, (request.freed_at - admission) * 1e-9)
        held, queue = request.held_block_us * 1e-6, max(0.0, (admission - request.arrival) * 1e-9)
        peak_at = self.peak.record(peak)
        residency_at = self.residency.record(residency)
        held_at = self.block_seconds.record(held)
        queue_at = self.queue.record(queue)
        if span is not None:
            link = (min(max(0, end_unix_ns), LARGEST), span.trace_id, span.span_id)
            self.peak.exemplars[peak_at] = Exemplar(peak, *link)
            self.residency.exemplars[residency_at] = Exemplar(residency, *link)
            self.block_seconds.exemplars[held_at] = Exemplar(held, *link)
            self.queue.exemplars[queue_at] = Exemplar(queue, *link)

    def ring(self, header: Header, lost: int, malformed: int, state: str) -> None:
        """What the ring's header says, what was lost and malformed so far, and whether the engine lives."""
        if self.first_header is None:
            self.first_header = header
        self.header, self.lost, self.malformed, self.state = header, lost, malformed, state

    @property
    def started_unix_ns(self) -> int:
        """When the engine's process began; 0: unknown."""
        header = self.first_header
        if header is None or not header.start_time:
            return 0
        return max(0, header.start_time * 10**9 // _TICKS_PER_S + header.clock_offset_ns)


class Metrics:
    """All engines, and the sidecar itself."""

    def __init__(self) -> None:
        self.spans = SpanCounts()
        self.events = SpanCounts()
        self.exports = ExportCounts()
        self.refused_files = 0
        self._engines: dict[EngineKey, EngineMetrics] = {}

    def engine(self, key: EngineKey) -> EngineMetrics:
        """The engine's numbers, made on first use."""
        found = self._engines.get(key)
        if found is None:
            found = self._engines[key] = EngineMetrics(key)
        return found

    def known(self, key: EngineKey) -> EngineMetrics:
        """The engine's numbers; of one that is not shown (any more), empty ones that nobody keeps."""
        return self._engines.get(key) or EngineMetrics(key)

    def ended(self, key: EngineKey, now_s: float) -> None:
        """The engine is over; it is shown for ``KEEP_ENDED_S`` more seconds. ``now_s`` on the clock of ``expire``."""
        self.engine(key).ended_s = now_s

    def expire(self, now_s: float) -> None:
        """Forget engines that ended more than ``KEEP_ENDED_S`` before ``now_s``."""
        for key, engine in list(self._engines.items()):
            if engine.ended_s is not None and now_s - engine.ended_s > KEEP_ENDED_S:
                del self._engines[key]

    def engines(self) -> list[EngineMetrics]:
        """All that are kept, in the order in which they were met."""
        return list(self._engines.values())

    def shown(self) -> Iterator[tuple[EngineMetrics, dict[str, str | int]]]:
        """The engines that are to be shown, each with attributes that no other has.

        A container that starts anew often gives its engine the pid of the one before: the live one stands for both.
        Two live ones of two PID namespaces are told apart by the names of their rings.
        """
        by_identity: dict[tuple[int, int], list[EngineMetrics]] = {}
        for engine in self.engines():
            by_identity.setdefault((engine.key.pid, engine.key.index), []).append(engine)
        for (pid, index), alike in by_identity.items():
            chosen = [engine for engine in alike if engine.ended_s is None] or alike[-1:]
            for engine in chosen:
                attributes: dict[str, str | int] = {
                    conventions.ATTR_PID: min(pid, LARGEST),
                    conventions.ATTR_ENGINE_INDEX: min(index, LARGEST),
                }
                if len(chosen) > 1:
                    attributes[conventions.ATTR_RING_FILE] = engine.key.ring
                yield engine, attributes
