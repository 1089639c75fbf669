# SPDX-License-Identifier: Apache-2.0
"""Sends metrics: readings as the SDK's data points, once an interval, through the SDK's exporters.

Not by the SDK's instruments. It has no observable histogram; and its observable counters would tell, under delta
temporality, an engine's whole past again each time the sidecar starts.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.sdk.metrics._internal.exemplar import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    ConsoleMetricExporter,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import Kind
from vllm_kvfix_sidecar.deadline import within
from vllm_kvfix_sidecar.exporters import make
from vllm_kvfix_sidecar.readings import HistogramValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.resources import Resource

    from vllm_kvfix_sidecar.metrics import ExportCounts
    from vllm_kvfix_sidecar.readings import Point, Reader
    from vllm_kvfix_sidecar.telemetry_settings import Signal, Telemetry

_log = logging.getLogger(__name__)
_SCOPE = InstrumentationScope(conventions.SCOPE_NAME, conventions.SCOPE_VERSION)
_CUMULATIVE, _DELTA = AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA


def metric_exporters(signal: Signal) -> list[MetricExporter]:
    """The exporters that are asked for.

    Raises:
        SettingError: The environment has what an exporter cannot use.
    """
    return make(signal, "metrics", ("metric_exporter", "OTLPMetricExporter"), ConsoleMetricExporter)


class _Before(NamedTuple):
    """What a counter, or a histogram, stood at when it was last told."""

    value: float | HistogramValue
    time: int


class Converter:
    """Turns readings into what the SDK's exporters take.

    ``delta``, which is said of what: counters and histograms tell what was added since the collection before, a counter
    that the engine keeps since the sidecar met it.
    """

    def __init__(self, reader: Reader, resource: Resource, telemetry: Telemetry, began_ns: int) -> None:
        self._reader = reader
        self._resource = resource
        self._exemplars = telemetry.exemplars
        # "lowmemory" is delta for what is recorded, cumulative for what is observed: our counters are of the latter.
        self._delta = {
            Kind.COUNTER: telemetry.temporality == "delta",
            Kind.HISTOGRAM: telemetry.temporality in {"delta", "lowmemory"},
        }
        self._began_ns = began_ns
        self._last_ns = began_ns
        self._before: dict[tuple[object, ...], _Before] = {}

    def collect(self, now_ns: int) -> MetricsData:
        """Everything there is to tell at ``now_ns``, unix time."""
        before, self._before = self._before, {}
        metrics = [
            self._metric(metric, points, before, now_ns) for metric, points in self._reader.read().items() if points
        ]
        self._last_ns = now_ns
        scope = ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
        return MetricsData([ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")])

    def _metric(
        self, metric: conventions.Metric, points: list[Point], before: dict[tuple[object, ...], _Before], now: int
    ) -> Metric:
        if self._delta.get(metric.kind):
            spans = [self._since(point, before, now) for point in points]
            temporality = _DELTA
        else:
            spans = [(point.value, min(point.start or self._began_ns, now)) for point in points]
            temporality = _CUMULATIVE
        pairs = list(zip(points, spans, strict=True))
        data: Sum | Gauge | Histogram
        if metric.kind is Kind.HISTOGRAM:
            found = [
                self._histogram_point(point, value, start, now)
                for point, (value, start) in pairs
                if isinstance(value, HistogramValue)
            ]
            data = Histogram(found, temporality)
        else:
            numbers = [
                NumberDataPoint(dict(point.attributes), start, now, value)
                for point, (value, start) in pairs
                if not isinstance(value, HistogramValue)
            ]
            if metric.kind is Kind.GAUGE:
                data = Gauge(numbers)
            else:
                data = Sum(numbers, temporality, is_monotonic=metric.kind is Kind.COUNTER)
        return Metric(metric.name, metric.description, metric.unit, data)

    def _since(
        self, point: Point, before: dict[tuple[object, ...], _Before], now: int
    ) -> tuple[float | HistogramValue, int]:
        """What was added since the collection before, and when that was."""
        key = (point.metric.name, point.source, *sorted(point.attributes.items()))
        self._before[key] = _Before(point.value, now)
        last = before.get(key)
        start = self._last_ns if last is None else last.time
        if isinstance(point.value, HistogramValue):
            return _added(point.value, last.value if last else None), start
        # All of an engine that began after us is new to us; of an older one, an earlier sidecar may have told.
        met = 0 if point.start > self._began_ns else point.base
        base = met if last is None else last.value
        return max(0, point.value - (base if not isinstance(base, HistogramValue) else 0)), start

    def _histogram_point(self, point: Point, value: HistogramValue, start: int, now: int) -> HistogramDataPoint:
        exemplars = [
            Exemplar({}, found.value, found.time, found.span_id, found.trace_id)
            for found in value.exemplars
            if self._exemplars and found is not None
        ]
        return HistogramDataPoint(
            attributes=dict(point.attributes),
            start_time_unix_nano=start,
            time_unix_nano=now,
            count=value.total,
            sum=value.sum,
            bucket_counts=list(value.counts),
            explicit_bounds=list(point.metric.bounds),
            min=None,  # type: ignore[arg-type]  # optional in OTLP, and so in the encoder; we keep none
            max=None,  # type: ignore[arg-type]  # as min
            exemplars=exemplars,
        )


def _added(now: HistogramValue, before: float | HistogramValue | None) -> HistogramValue:
    if not isinstance(before, HistogramValue):
        return now
    counts = tuple(new - old for new, old in zip(now.counts, before.counts, strict=True))
    fresh = tuple(new if new != old else None for new, old in zip(now.exemplars, before.exemplars, strict=True))
    return HistogramValue(counts, now.sum - before.sum, fresh)


class Pusher:
    """Collects and exports once an interval, in a thread of its own, and once more at the end."""

    def __init__(
        self,
        converter: Converter,
        exporters: Sequence[MetricExporter],
        counts: ExportCounts,
        telemetry: Telemetry,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._converter = converter
        self._exporters = exporters
        self._counts = counts
        self._telemetry = telemetry
        self._clock_ns = clock_ns
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="export of metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._telemetry.interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            data = self._converter.collect(self._clock_ns())
            results = [exporter.export(data, self._telemetry.timeout_s * 1000) for exporter in self._exporters]
        except Exception:  # noqa: BLE001  # an exporter of any make; the next interval tries again
            _log.exception("the exporter of metrics failed")
            results = [MetricExportResult.FAILURE]
        if all(result is MetricExportResult.SUCCESS for result in results):
            self._counts.exported += 1
        else:
            self._counts.failed += 1

    def close(self, timeout_s: float) -> bool:
        """Export a last time, for so long at most; whether that was done in time."""
        self._stop.set()
        return within(timeout_s, self._finish, "flush of metrics")

    def _finish(self) -> None:
        self._thread.join()
        for exporter in self._exporters:
            exporter.shutdown()
