# SPDX-License-Identifier: Apache-2.0
"""Turns what is known into points of the metrics in ``conventions``: the one list that both outputs are made of."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import psutil

from vllm_kvfix.ring.layout import PATCH_STATES
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import (
    ATTR_CPU_MODE,
    ATTR_FINISH_REASON,
    ATTR_GROUP,
    ATTR_OUTCOME,
    ATTR_STATE,
    Metric,
)
from vllm_kvfix_sidecar.metrics import LARGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm_kvfix.events import Step
    from vllm_kvfix_sidecar.metrics import EngineMetrics, Exemplar, Histogram, Metrics

Attributes: TypeAlias = "dict[str, str | int]"
SIDECAR = "sidecar"
ENGINE_STATES = ("live", "ended", "unknown")


class HistogramValue(NamedTuple):
    """A copy of a histogram; ``total`` is always the sum of its buckets."""

    counts: tuple[int, ...]
    sum: float
    exemplars: tuple[Exemplar | None, ...] = ()

    @property
    def total(self) -> int:
        """Values in all buckets."""
        return sum(self.counts)


@dataclass(frozen=True)
class Point:
    """One value of one metric.

    ``source`` tells apart what has the same attributes one after the other (engines of one pid). ``start`` in unix ns,
    0: when the sidecar began. ``base``: what a counter stood at when the sidecar met it.
    """

    metric: Metric
    attributes: Attributes
    value: float | HistogramValue
    source: str = ""
    start: int = 0
    base: float = 0


class Cost(NamedTuple):
    """What a process has cost: CPU seconds in both modes, resident bytes; None: they cannot be read."""

    user_s: float
    system_s: float
    resident: int | None


def own_cost(process: psutil.Process | None = None) -> Cost:
    """What a process, this one if None, has cost."""
    times = os.times()
    try:
        resident = (process or psutil.Process()).memory_info().rss
    except (psutil.Error, OSError):
        return Cost(times.user, times.system, None)
    return Cost(times.user, times.system, resident)


class Reader:
    """Reads everything there is to show.

    ``monotonic_ns`` is the clock of the engines' heartbeats; ``more`` gives further points, those of processes.
    """

    def __init__(
        self,
        metrics: Metrics,
        cost: Callable[[], Cost] = own_cost,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        more: Callable[[], Iterable[Point]] = tuple,
    ) -> None:
        self._metrics = metrics
        self._more = more
        self._cost = cost
        self._monotonic_ns = monotonic_ns

    def read(self) -> dict[Metric, list[Point]]:
        """The points of every metric, in the order of ``conventions.METRICS``; a metric may have none."""
        found: dict[Metric, list[Point]] = {metric: [] for metric in conventions.METRICS}
        for engine, attributes in self._metrics.shown():
            for point in self._of_engine(engine, attributes):
                found[point.metric].append(_clamped(point))
        for point in self._more():
            found[point.metric].append(_clamped(point))
        for point in self._of_sidecar():
            found[point.metric].append(point)
        return found

    def _of_engine(self, engine: EngineMetrics, attributes: Attributes) -> Iterator[Point]:
        yield from _pool_points(engine, attributes)
        yield from _total_points(engine, attributes)
        yield from _request_points(engine, attributes)
        yield from self._ring_points(engine, attributes)

    def _ring_points(self, engine: EngineMetrics, attributes: Attributes) -> Iterator[Point]:
        header, first, start = engine.header, engine.first_header, engine.started_unix_ns
        yield Point(conventions.RING_LOST, attributes, engine.lost, engine.key.ring)
        yield Point(conventions.RING_MALFORMED, attributes, engine.malformed, engine.key.ring)
        if header is None or first is None:
            return
        source = engine.key.ring
        yield Point(conventions.RING_PUBLISHED, attributes, header.events, source, start, first.events)
        yield Point(conventions.RING_DROPPED, attributes, header.dropped, source, start, first.dropped)
        age = max(0, self._monotonic_ns() - header.heartbeat_ns) / 1e9
        yield Point(conventions.RING_AGE, attributes, age)
        for state in PATCH_STATES:
            named = attributes | {ATTR_STATE: state.replace(" ", "_")}
            yield Point(conventions.PATCH_STATE, named, int(header.patch_state == state))

    def _of_sidecar(self) -> Iterator[Point]:
        metrics = self._metrics
        spans = metrics.spans
        with spans.lock:
            outcomes = {name: getattr(spans, name) for name in ("exported", "failed", "dropped", "unsampled")}
            pending = spans.pending
        for outcome, count in outcomes.items():
            yield Point(conventions.SPANS, {ATTR_OUTCOME: outcome}, count)
        yield Point(conventions.SPANS_PENDING, {}, pending)
        with metrics.events.lock:
            outcomes = {name: getattr(metrics.events, name) for name in ("exported", "failed", "dropped")}
        for outcome, count in outcomes.items():
            yield Point(conventions.GROWTH_EVENT_EXPORTS, {ATTR_OUTCOME: outcome}, count)
        yield Point(conventions.METRIC_EXPORTS, {ATTR_OUTCOME: "exported"}, metrics.exports.exported)
        yield Point(conventions.METRIC_EXPORTS, {ATTR_OUTCOME: "failed"}, metrics.exports.failed)
        states = [engine.state for engine in metrics.engines()]
        for state in dict.fromkeys((*ENGINE_STATES, *states)):
            yield Point(conventions.ENGINES, {ATTR_STATE: state}, states.count(state))
        yield Point(conventions.FILES_REFUSED, {}, metrics.refused_files)
        cost = self._cost()
        yield Point(conventions.CPU_TIME, ourselves() | {ATTR_CPU_MODE: "user"}, cost.user_s)
        yield Point(conventions.CPU_TIME, ourselves() | {ATTR_CPU_MODE: "system"}, cost.system_s)
        if cost.resident is not None:
            yield Point(conventions.PROCESS_MEMORY, ourselves(), cost.resident)


def ourselves() -> Attributes:
    """The attributes of the sidecar as a process."""
    return {
        conventions.ATTR_PID: os.getpid(),
        conventions.ATTR_ROLE: SIDECAR,
        conventions.ATTR_PROCESS_NAME: conventions.SERVICE_NAME,
    }


def _clamped(point: Point) -> Point:
    """As it fits into the protocol's int64: a word of a ring may be larger, and would fail the whole batch."""
    value = point.value
    if isinstance(value, int) and value > LARGEST:
        return replace(point, value=LARGEST)
    return point


def _pool_points(engine: EngineMetrics, attributes: Attributes) -> Iterator[Point]:
    config, step = engine.settings, engine.last_step
    if config is not None:
        yield Point(conventions.POOL_LIMIT, attributes, config.blocks)
        for at, group in enumerate(config.groups):
            named = attributes | {ATTR_GROUP: at, conventions.ATTR_GROUP_KIND: group.kind}
            yield Point(conventions.BLOCK_SIZE, named, group.block_size)
    if step is None:
        return
    if config is not None:
        used = max(0, config.blocks - step.free)
        yield Point(conventions.POOL_USAGE, attributes | {ATTR_STATE: "used"}, used)
        if config.blocks:
            yield Point(conventions.POOL_UTILIZATION, attributes, used / config.blocks)
    yield Point(conventions.POOL_USAGE, attributes | {ATTR_STATE: "free"}, step.free)
    yield Point(conventions.CACHED_BLOCKS, attributes, step.cached)
    yield Point(conventions.REQUESTS, attributes | {ATTR_STATE: "running"}, step.running)
    yield Point(conventions.REQUESTS, attributes | {ATTR_STATE: "waiting"}, step.waiting)
    for at, length in enumerate(step.backlog):
        yield Point(conventions.BACKLOG, attributes | {ATTR_GROUP: at}, length)


_TOTALS: tuple[tuple[Metric, Callable[[Step], int]], ...] = (
    (conventions.BLOCKS_ALLOCATED, lambda step: step.new),
    (conventions.BLOCKS_REUSED, lambda step: step.reused),
    (conventions.BLOCKS_RELEASED, lambda step: step.released),
    (conventions.PREFIX_QUERIED, lambda step: step.queried),
    (conventions.PREFIX_HIT, lambda step: step.hit),
    (conventions.STEPS, lambda step: step.steps),
    (conventions.SCHEDULED_TOKENS, lambda step: step.tokens),
    (conventions.PREEMPTIONS, lambda step: step.preemptions),
    (conventions.REFUSALS, lambda step: step.refusals),
)


def _total_points(engine: EngineMetrics, attributes: Attributes) -> Iterator[Point]:
    first, last, start = engine.first_step, engine.last_step, engine.started_unix_ns
    if first is None or last is None:
        return
    for metric, total in _TOTALS:
        yield Point(metric, attributes, total(last), engine.key.ring, start, total(first))


def _request_points(engine: EngineMetrics, attributes: Attributes) -> Iterator[Point]:
    source = engine.key.ring
    for reason, count in engine.finished_by_reason.items():
        yield Point(conventions.FINISHED, attributes | {ATTR_FINISH_REASON: reason}, count, source)
    for metric, histogram in (
        (conventions.PEAK_BLOCKS, engine.peak),
        (conventions.RESIDENCY, engine.residency),
        (conventions.BLOCK_SECONDS, engine.block_seconds),
        (conventions.QUEUE_DURATION, engine.queue),
    ):
        yield Point(metric, attributes, _copy(histogram), source)


def _copy(histogram: Histogram) -> HistogramValue:
    return HistogramValue(tuple(histogram.counts), histogram.sum, tuple(histogram.exemplars))
