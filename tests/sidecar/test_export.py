# SPDX-License-Identifier: Apache-2.0
"""export and push: what goes out is what was there, over both protocols; every span is accounted for at any time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from tests.sidecar import fake_processes
from tests.sidecar.collectors import over_grpc, over_http, wait_until
from tests.sidecar.test_metrics import CONFIG, KEY, SPAN, STEP, engine_of, header, record
from vllm_kvfix_sidecar import conventions, export, push, telemetry_settings
from vllm_kvfix_sidecar.export import BatchSink
from vllm_kvfix_sidecar.metrics import EngineKey, Metrics, SpanCounts
from vllm_kvfix_sidecar.push import Converter, Pusher
from vllm_kvfix_sidecar.readings import Reader
from vllm_kvfix_sidecar.telemetry_settings import SettingError, Signal, Telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.metrics.export import Metric, MetricsData

    from tests.sidecar.collectors import Collector

HOUR_MS = "3600000"
BEGAN = 2_000 * 10**9


def telemetry(**environ: str) -> Telemetry:
    """What the environment asks for, with nothing exported by the clock."""
    clocks = {"OTEL_BSP_SCHEDULE_DELAY": HOUR_MS, "OTEL_METRIC_EXPORT_INTERVAL": HOUR_MS}
    return telemetry_settings.read(clocks | environ)


def span(number: int, *, sampled: bool = True) -> ReadableSpan:
    """A span."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    context = SpanContext(1, number + 1, is_remote=False, trace_flags=flags)
    return ReadableSpan(conventions.SPAN_NAME, context, start_time=1, end_time=2, resource=Resource({}))


class Exporter(SpanExporter):
    """An exporter that does what its plan says: take, refuse, raise; and waits where it is held."""

    def __init__(self, plan: Sequence[str] = ()) -> None:
        self.plan = list(plan)
        self.batches: list[int] = []
        self.released = threading.Event()
        self.released.set()
        self.entered = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One batch."""
        self.entered.set()
        assert self.released.wait(20)
        self.batches.append(len(spans))
        does = self.plan.pop(0) if self.plan else "take"
        if does == "raise":
            raise RuntimeError("as planned")
        return SpanExportResult.SUCCESS if does == "take" else SpanExportResult.FAILURE


def sum_of(counts: SpanCounts) -> tuple[int, int, int, int, int]:
    """The account, read at one moment."""
    with counts.lock:
        return counts.emitted, counts.exported, counts.failed, counts.dropped, counts.pending


class TestAccount:
    """emitted = exported + failed + dropped + pending."""

    @settings(deadline=None, max_examples=30)
    @given(
        plan=st.lists(st.sampled_from(["take", "refuse", "raise"]), max_size=12),
        spans=st.lists(st.booleans(), max_size=60),
        queue=st.integers(1, 40),
        batch=st.integers(1, 40),
    )
    def test_after_the_end_nothing_is_pending_and_all_adds_up(
        self, plan: list[str], spans: list[bool], queue: int, batch: int
    ) -> None:
        """Whatever exporters do, each span ends as exported, failed or dropped, and what emit said of it is so."""
        counts, exporter = SpanCounts(), Exporter(plan)
        asked = telemetry(OTEL_BSP_MAX_QUEUE_SIZE=str(queue), OTEL_BSP_MAX_EXPORT_BATCH_SIZE=str(min(batch, queue)))
        sink = BatchSink([exporter], counts, asked)
        accepted = sum(sink.emit(span(number, sampled=sampled)) for number, sampled in enumerate(spans))
        assert sink.close(20)
        emitted, exported, failed, dropped, pending = sum_of(counts)
        assert (emitted, pending) == (len(spans), 0)
        assert exported + failed == accepted == sum(exporter.batches)
        assert dropped == len(spans) - accepted

    def test_a_full_queue_drops_the_new_span_and_counts_it(self) -> None:
        """With the receiver stuck, one batch is out, the queue fills, and the rest is refused at once."""
        counts, exporter = SpanCounts(), Exporter()
        exporter.released.clear()
        sink = BatchSink([exporter], counts, telemetry(OTEL_BSP_MAX_QUEUE_SIZE="4", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2"))
        assert [sink.emit(span(n)) for n in range(2)] == [True, True]
        assert exporter.entered.wait(20)
        assert [sink.emit(span(n)) for n in range(100)] == [True] * 4 + [False] * 96
        assert sum_of(counts) == (102, 0, 0, 96, 6)
        assert len(sink._processor._batch_processor._queue) == 4
        exporter.released.set()
        assert sink.close(20)
        assert sum_of(counts) == (102, 6, 0, 96, 0)

    def test_an_unsampled_span_is_dropped_not_lost(self) -> None:
        """The SDK's processor would pass over it without a word."""
        counts = SpanCounts()
        sink = BatchSink([Exporter()], counts, telemetry())
        assert not sink.emit(span(1, sampled=False))
        assert sum_of(counts) == (1, 0, 0, 1, 0)
        assert sink.close(20)

    def test_a_batch_counts_as_exported_if_every_exporter_took_it(self) -> None:
        """With two exporters of which one refuses, the batch has failed, and both were asked."""
        counts, good, bad = SpanCounts(), Exporter(), Exporter(["refuse"])
        sink = BatchSink([bad, good], counts, telemetry())
        assert sink.emit(span(1))
        assert sink.close(20)
        assert sum_of(counts) == (1, 0, 1, 0, 0)
        assert good.batches == [1]

    def test_the_end_comes_though_the_receiver_hangs(self) -> None:
        """Close comes back while the exporter is stuck; what is left is dropped, and is not counted twice later."""
        counts, exporter = SpanCounts(), Exporter()
        exporter.released.clear()
        sink = BatchSink([exporter], counts, telemetry(OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2"))
        for number in range(5):
            sink.emit(span(number))
        assert exporter.entered.wait(20)
        assert not sink.close(0.1)
        assert sum_of(counts) == (5, 0, 0, 5, 0)
        assert not sink.emit(span(9))
        exporter.released.set()
        wait_until(lambda: sum(exporter.batches) == 5)
        assert sum_of(counts) == (6, 0, 0, 6, 0)


@pytest.fixture(params=["grpc", "http/protobuf"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that the environment points to."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    with over_grpc() if request.param == "grpc" else over_http() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{found.port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", HOUR_MS)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", HOUR_MS)
        yield found


def asked() -> Telemetry:
    """What the process's environment asks for."""
    return telemetry_settings.read(os.environ)


class TestOverTheWire:
    """The SDK's exporters, as the environment makes them."""

    def test_spans_arrive_with_the_headers_of_the_environment(self, collector: Collector) -> None:
        """Every span arrives once, under OTEL_EXPORTER_OTLP_HEADERS."""
        counts = SpanCounts()
        sink = BatchSink(export.span_exporters(asked().traces), counts, asked())
        assert all(sink.emit(span(number)) for number in range(700))
        assert sink.close(20)
        assert sum_of(counts) == (700, 700, 0, 0, 0)
        assert sorted(int.from_bytes(s.span_id, "big") for s in collector.spans) == list(range(1, 701))
        assert all(headers["x-tenant"] == "blue" for headers in collector.headers)

    def test_a_refusal_is_counted_as_failed(self, collector: Collector) -> None:
        """A receiver that says no has all spans of the batch counted."""
        collector.refusing = True
        counts = SpanCounts()
        sink = BatchSink(export.span_exporters(asked().traces), counts, asked())
        assert sink.emit(span(1))
        assert sink.close(20)
        assert sum_of(counts) == (1, 0, 1, 0, 0)

    def test_metrics_arrive_with_exemplars(self, collector: Collector) -> None:
        """Each metric of the conventions arrives with its unit, and a histogram with the span that explains it."""
        metrics = Metrics()
        engine_of(metrics).finished(record(), 123, SPAN)
        reader = Reader(metrics, more=fake_processes.points)
        converter = Converter(reader, Resource({"service.name": "s"}), asked(), BEGAN)
        pusher = Pusher(converter, push.metric_exporters(asked().metrics), metrics.exports, asked(), lambda: BEGAN + 5)
        assert pusher.close(20)
        found = collector.last_metrics()
        assert {name: metric.unit for name, metric in found.items()} == {m.name: m.unit for m in conventions.METRICS}
        (point,) = found[conventions.PEAK_BLOCKS.name].histogram.data_points
        assert (point.count, point.sum, sum(point.bucket_counts), len(point.bucket_counts)) == (1, 7, 1, 10)
        assert not point.HasField("min")
        (exemplar,) = point.exemplars
        assert (exemplar.as_double, exemplar.time_unix_nano) == (7, 123)
        assert (exemplar.trace_id.hex(), exemplar.span_id.hex()) == (f"{0xABC:032x}", f"{0xDEF:016x}")
        (steps,) = found[conventions.STEPS.name].sum.data_points
        assert (steps.as_int, steps.start_time_unix_nano, steps.time_unix_nano) == (10, 1_050 * 10**9, BEGAN + 5)
        assert found[conventions.STEPS.name].sum.is_monotonic
        assert not found[conventions.POOL_LIMIT.name].sum.is_monotonic
        assert metrics.exports.exported == 1

    def test_the_end_comes_though_the_receiver_hangs(self, collector: Collector) -> None:
        """The flush of metrics is given up in its time."""
        collector.released.clear()
        metrics = Metrics()
        converter = Converter(Reader(metrics), Resource({}), asked(), BEGAN)
        pusher = Pusher(converter, push.metric_exporters(asked().metrics), metrics.exports, asked())
        assert not pusher.close(0.2)


def test_what_an_exporter_cannot_use_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an exporter raises over its variables becomes a SettingError that says of which signal."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(SettingError, match="the exporter of spans cannot use"):
        export.span_exporters(Signal(("otlp",), "grpc"))
    with pytest.raises(SettingError, match="the exporter of metrics cannot use"):
        push.metric_exporters(Signal(("otlp",), "grpc"))


def named(data: MetricsData) -> dict[str, Metric]:
    """Metrics by name."""
    ((resource,),) = (data.resource_metrics,)
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def only(data: MetricsData, metric: conventions.Metric) -> Any:
    """The one data point of a metric."""
    (point,) = named(data)[metric.name].data.data_points
    return point


class TestTemporality:
    """Cumulative, delta and lowmemory."""

    def converter(self, metrics: Metrics, temporality: str) -> Converter:
        """A converter of a sidecar that began at ``BEGAN``."""
        chosen = telemetry(OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=temporality)
        return Converter(Reader(metrics, more=fake_processes.points), Resource({}), chosen, BEGAN)

    @pytest.mark.parametrize(
        ("temporality", "counter", "histogram"),
        [
            ("cumulative", AggregationTemporality.CUMULATIVE, AggregationTemporality.CUMULATIVE),
            ("delta", AggregationTemporality.DELTA, AggregationTemporality.DELTA),
            ("lowmemory", AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA),
        ],
    )
    def test_each_kind_has_the_temporality_of_the_specification(
        self, temporality: str, counter: AggregationTemporality, histogram: AggregationTemporality
    ) -> None:
        """Up-down counters are always cumulative; our counters are observed ones."""
        metrics = Metrics()
        engine_of(metrics).finished(record(), 1, None)
        found = named(self.converter(metrics, temporality).collect(BEGAN + 1))
        for metric in conventions.METRICS:
            data: Any = found[metric.name].data
            expected = {
                conventions.Kind.COUNTER: counter,
                conventions.Kind.HISTOGRAM: histogram,
                conventions.Kind.UP_DOWN_COUNTER: AggregationTemporality.CUMULATIVE,
                conventions.Kind.GAUGE: None,
            }[metric.kind]
            assert getattr(data, "aggregation_temporality", None) == expected, metric.name

    @given(st.lists(st.lists(st.integers(0, 300), max_size=4), min_size=1, max_size=6))
    def test_the_deltas_of_a_histogram_add_up_to_it(self, rounds: list[list[int]]) -> None:
        """Sums and buckets of all collections are those of one at the end; each begins where the one before ended."""
        metrics = Metrics()
        engine = metrics.engine(KEY)
        converter = self.converter(metrics, "delta")
        points = []
        for number, peaks in enumerate(rounds, 1):
            for peak in peaks:
                engine.finished(record(peak_blocks=peak), 1, None)
            points.append(only(converter.collect(BEGAN + number), conventions.PEAK_BLOCKS))
        assert [sum(column) for column in zip(*(p.bucket_counts for p in points), strict=True)] == engine.peak.counts
        assert sum(p.sum for p in points) == engine.peak.sum
        assert [(p.start_time_unix_nano, p.time_unix_nano) for p in points] == [
            (BEGAN + n, BEGAN + n + 1) for n in range(len(rounds))
        ]

    def test_an_exemplar_is_told_once(self) -> None:
        """Under delta, a collection has the exemplars that came since the one before."""
        metrics = Metrics()
        metrics.engine(KEY).finished(record(), 1, SPAN)
        converter = self.converter(metrics, "delta")
        assert len(only(converter.collect(BEGAN + 1), conventions.PEAK_BLOCKS).exemplars) == 1
        assert only(converter.collect(BEGAN + 2), conventions.PEAK_BLOCKS).exemplars == []

    def test_a_new_sidecar_tells_no_past_again(self) -> None:
        """Of an engine older than the sidecar, delta begins where the sidecar met it; cumulative has the total."""
        metrics = Metrics()
        engine = engine_of(metrics)
        delta, cumulative = self.converter(metrics, "delta"), self.converter(metrics, "cumulative")
        assert only(delta.collect(BEGAN + 1), conventions.STEPS).value == 0
        engine.step(STEP._replace(steps=17))
        assert only(delta.collect(BEGAN + 2), conventions.STEPS).value == 7
        point = only(cumulative.collect(BEGAN + 2), conventions.STEPS)
        assert (point.value, point.start_time_unix_nano) == (17, 1_050 * 10**9)

    def test_of_an_engine_younger_than_the_sidecar_all_is_told(self) -> None:
        """Delta tells what such an engine did before it was met."""
        metrics = Metrics()
        engine = metrics.engine(KEY)
        engine.config(CONFIG)
        engine.step(STEP)
        engine.ring(header(start_time=200_000), 0, 0, "live")
        assert only(self.converter(metrics, "delta").collect(BEGAN + 10**12), conventions.STEPS).value == 10

    def test_the_next_engine_of_a_pid_is_not_taken_for_the_one_before(self) -> None:
        """Its totals begin anew, and no delta is negative or too small."""
        metrics = Metrics()
        engine_of(metrics).step(STEP._replace(steps=1000))
        converter = self.converter(metrics, "delta")
        converter.collect(BEGAN + 1)
        metrics.ended(KEY, 0.0)
        young = metrics.engine(EngineKey(KEY.pid, KEY.index, "b.ring"))
        young.step(STEP._replace(steps=4))
        young.ring(header(start_time=200_000), 0, 0, "live")
        assert only(converter.collect(BEGAN + 10**12), conventions.STEPS).value == 4

    def test_exemplars_can_be_switched_off(self) -> None:
        """OTEL_METRICS_EXEMPLAR_FILTER=always_off leaves none."""
        metrics = Metrics()
        metrics.engine(KEY).finished(record(), 1, SPAN)
        chosen = telemetry(OTEL_METRICS_EXEMPLAR_FILTER="always_off")
        data = Converter(Reader(metrics), Resource({}), chosen, BEGAN).collect(BEGAN + 1)
        assert only(data, conventions.PEAK_BLOCKS).exemplars == []


class _MetricExporter(MetricExporter):
    def __init__(self, plan: list[object]) -> None:
        super().__init__()
        self.plan = plan
        self.ended = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object) -> MetricExportResult:
        """As planned."""
        assert metrics_data.resource_metrics
        assert timeout_millis == 250
        assert not kwargs
        does = self.plan.pop(0)
        if isinstance(does, Exception):
            raise does
        assert isinstance(does, MetricExportResult)
        return does

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing is kept."""
        return timeout_millis > 0

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        """Note it."""
        assert not kwargs
        self.ended = timeout_millis > 0


def test_metrics_go_out_once_an_interval_and_failures_are_counted() -> None:
    """A refusal and an exception are failures; the thread goes on, exports once more at the end, and shuts down."""
    plan: list[object] = [
        MetricExportResult.FAILURE,
        RuntimeError("as planned"),
        *[MetricExportResult.SUCCESS] * 100_000,
    ]
    exporter, metrics = _MetricExporter(plan), Metrics()
    chosen = telemetry(OTEL_METRIC_EXPORT_INTERVAL="1", OTEL_METRIC_EXPORT_TIMEOUT="250")
    pusher = Pusher(Converter(Reader(metrics), Resource({}), chosen, 0), [exporter], metrics.exports, chosen)
    wait_until(lambda: metrics.exports.exported >= 3)
    assert pusher.close(20)
    assert metrics.exports.failed == 2
    assert metrics.exports.exported == 100_000 - len(plan)
    assert exporter.ended


class TestResource:
    """Who we say we are."""

    @pytest.mark.parametrize(
        ("environ", "name"),
        [
            ({}, "vllm-kvfix"),
            ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
            ({"OTEL_RESOURCE_ATTRIBUTES": "a=b, service.name=theirs"}, "theirs"),
            ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs", "OTEL_SERVICE_NAME": "mine"}, "mine"),
            ({"OTEL_SERVICE_NAME": " "}, "vllm-kvfix"),
        ],
    )
    def test_the_service_is_ours_unless_the_environment_names_it(
        self, environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """OTEL_SERVICE_NAME goes before OTEL_RESOURCE_ATTRIBUTES, and both before the default."""
        for key, value in environ.items():
            monkeypatch.setenv(key, value)
        found = export.resource(environ).attributes
        assert found["service.name"] == name
        assert found["service.version"] == conventions.SCOPE_VERSION
        assert found.get("a") == ("b" if "a=b" in str(environ) else None)


def test_the_sampler_is_the_one_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_SAMPLER and its argument reach the SDK."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    assert export.sampler().get_description() == "TraceIdRatioBased{0.25}"
