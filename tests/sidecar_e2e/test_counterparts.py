# SPDX-License-Identifier: Apache-2.0
"""The counterparts themselves: each does to a plain OpenTelemetry client what it is there for."""

from __future__ import annotations

import http.client
import os
import threading
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING

import grpc  # type: ignore[import-untyped]  # grpcio ships no types
import prometheus_client
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.exposition import MetricsHandler

from tests.sidecar_e2e.certificates import TlsFront, self_signed
from tests.sidecar_e2e.faulty import FOREVER, FaultyHttp, Plan, Refusing, Silent, faulty
from tests.sidecar_e2e.processes import clean_environ, wait_until
from tests.sidecar_e2e.prometheus import Prometheus, check_metrics
from tests.sidecar_e2e.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

    from tests.sidecar_e2e.certificates import Certificate
    from tests.sidecar_e2e.telemetry import Span


PROTOCOLS = ["grpc", "http"]

TIMEOUT_S = 1


@pytest.fixture(autouse=True)
def _only_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporters read the environment; that of the developer must not matter."""
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)


def span_exporter(protocol: str, receiver: Receiver, tls: Certificate | None = None) -> SpanExporter:
    """A plain client of ``receiver``."""
    if protocol == "grpc":
        trust = grpc.ssl_channel_credentials(tls.path.read_bytes()) if tls else None
        return grpc_traces.OTLPSpanExporter(receiver.grpc_endpoint, credentials=trust)
    return http_traces.OTLPSpanExporter(
        f"{receiver.http_endpoint}/v1/traces", certificate_file=str(tls.path) if tls else None
    )


def metric_exporter(protocol: str, receiver: Receiver) -> MetricExporter:
    """A plain client of ``receiver``."""
    if protocol == "grpc":
        return grpc_metrics.OTLPMetricExporter(receiver.grpc_endpoint)
    return http_metrics.OTLPMetricExporter(f"{receiver.http_endpoint}/v1/metrics")


def two_spans() -> list[ReadableSpan]:
    """A span with all that one can have, and its child, made by a plain SDK program."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "plain", "n": 7}))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("scope", "1.2")
    with tracer.start_as_current_span("parent", attributes={"a": 1, "b": [1.5, 2.5], "c": "x", "d": True}) as parent:
        parent.add_event("event", {"blocks": 3})
        link = trace.Link(parent.get_span_context(), {"why": "blocks"})
        with tracer.start_as_current_span("child", links=[link]) as child:
            child.set_status(trace.StatusCode.ERROR, "why not")
    return list(kept.get_finished_spans())


def as_sent(span: ReadableSpan) -> tuple[object, ...]:
    """A span of the SDK as :func:`as_received` gives it."""
    context, parent = span.context, span.parent
    assert context is not None
    assert span.instrumentation_scope is not None
    events_of = [(e.name, e.timestamp, dict(e.attributes or {})) for e in span.events]
    links = [(k.context.trace_id, k.context.span_id, dict(k.attributes or {})) for k in span.links]
    head = (context.trace_id, context.span_id, parent.span_id if parent else 0, span.name, span.start_time)
    scope = (span.instrumentation_scope.name, span.instrumentation_scope.version)
    status = (span.status.status_code.value, span.status.description or "")
    resource = dict(span.resource.attributes)
    return (*head, span.end_time, dict(span.attributes or {}), events_of, links, status, scope, resource)


def as_received(span: Span) -> tuple[object, ...]:
    """What can be compared of a span that came out of the receiver."""
    head = (span.trace_id, span.span_id, span.parent_id, span.name, span.start, span.end)
    events_of, links = [tuple(e) for e in span.events], [tuple(k) for k in span.links]
    status, scope = (span.status, span.message), tuple(span.scope)
    return (*head, span.attributes, events_of, links, status, scope, span.resource)


class TestReceiver:
    """The real collector between a plain client and our sink."""

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_spans_come_back_as_they_were_sent(self, tmp_path: Path, protocol: str) -> None:
        """Ids, times, attributes, events, links, status, scope and resource are those that the client sent."""
        spans = two_spans()
        with Receiver(tmp_path) as receiver:
            assert span_exporter(protocol, receiver).export(spans) is SpanExportResult.SUCCESS
            receiver.wait_for(lambda got: len(got.spans) >= 2)
        assert sorted(map(as_received, receiver.spans)) == sorted(map(as_sent, spans))
        assert {span.kind for span in receiver.spans} == {1}, "OTLP's number of INTERNAL"

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_spans_come_over_tls_to_who_trusts_the_certificate(self, tmp_path: Path, protocol: str) -> None:
        """A client that trusts the self-signed certificate gets its spans through; the TLS front saw it."""
        certificate = self_signed(tmp_path)
        with Receiver(tmp_path, tls=certificate) as receiver:
            exported = span_exporter(protocol, receiver, certificate).export(two_spans())
            receiver.wait_for(lambda got: len(got.spans) == 2)
            assert exported is SpanExportResult.SUCCESS
            assert sum(front.handshakes for front in receiver.fronts) == 1

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_metrics_come_back_with_their_exemplars(self, tmp_path: Path, protocol: str) -> None:
        """A counter's value, a gauge's, a histogram's buckets, and the span id of its exemplar are those recorded."""
        tracer = TracerProvider().get_tracer("t")
        with Receiver(tmp_path) as receiver:
            reader = PeriodicExportingMetricReader(metric_exporter(protocol, receiver), export_interval_millis=1e9)
            provider = MeterProvider([reader])
            meter = provider.get_meter("m")
            with tracer.start_as_current_span("measured") as span:
                meter.create_histogram("wait", "s", "how long", explicit_bucket_boundaries_advisory=[1.0]).record(0.25)
            meter.create_counter("seen", "{request}").add(3, {"reason": "stop"})
            meter.create_gauge("level").set(2.5)
            provider.shutdown()  # one collection: exemplars are told once
            receiver.wait_for(lambda got: {"wait", "seen", "level"} <= {p.name for p in got.metrics})
        (wait,), (seen,) = receiver.received.latest("wait"), receiver.received.latest("seen")
        assert wait.histogram == (1, 0.25, (1, 0), (1.0,), 0.25, 0.25)
        assert [(e.value, e.span_id) for e in wait.exemplars] == [(0.25, span.get_span_context().span_id)]
        assert (wait.unit, wait.description, wait.temporality) == ("s", "how long", 2)
        assert (seen.value, seen.monotonic, seen.attributes) == (3, True, {"reason": "stop"})
        assert [p.value for p in receiver.received.latest("level")] == [2.5]

    def test_a_receiver_can_come_back_where_another_was(self, tmp_path: Path) -> None:
        """The second one, on the ports of the first, gets what a client of the first sends now."""
        with Receiver(tmp_path) as first:
            exporter = span_exporter("http", first)
        with Receiver(tmp_path, ports=first.ports) as second:
            assert exporter.export(two_spans()) is SpanExportResult.SUCCESS
            second.wait_for(lambda got: len(got.spans) == 2)
        assert first.spans == []

    def test_nothing_is_lost_of_many(self, tmp_path: Path) -> None:
        """Of 200 requests in 8 threads each span arrives once."""
        spans = two_spans()
        with Receiver(tmp_path) as receiver:
            exporters = [span_exporter(PROTOCOLS[i % 2], receiver) for i in range(8)]

            def send(exporter: SpanExporter) -> None:
                for _ in range(25):
                    exporter.export(spans)

            threads = [threading.Thread(target=send, args=(exporter,)) for exporter in exporters]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            receiver.wait_for(lambda got: len(got.spans) >= 400)
        assert len(receiver.spans) == 400


def send_spans(protocol: str, endpoint: str) -> SpanExportResult:
    """What a plain client with a short time-out says of sending to ``endpoint``."""
    exporter: SpanExporter = (
        grpc_traces.OTLPSpanExporter(endpoint, timeout=TIMEOUT_S)
        if protocol == "grpc"
        else http_traces.OTLPSpanExporter(f"{endpoint}/v1/traces", timeout=TIMEOUT_S)
    )
    result = exporter.export(two_spans())
    exporter.shutdown()
    return result


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestFaulty:
    """Receivers that fail."""

    def test_a_port_that_refuses_fails_the_client(self, protocol: str) -> None:
        """Nothing gets through."""
        with Refusing() as refusing:
            assert send_spans(protocol, refusing.endpoint) is SpanExportResult.FAILURE

    def test_a_silent_one_takes_bytes_and_fails_the_client(self, protocol: str) -> None:
        """It was connected to, swallowed the request, and the client gave up."""
        with Silent() as silent:
            assert send_spans(protocol, silent.endpoint) is SpanExportResult.FAILURE
            assert silent.connections >= 1
            assert silent.taken > 0

    def test_a_slow_one_is_given_up(self, protocol: str) -> None:
        """Slower than the client's time-out is a failure, though the request arrived."""
        with faulty(protocol, Plan(delay_s=60)) as slow:
            assert send_spans(protocol, slow.endpoint) is SpanExportResult.FAILURE
            assert slow.arrived >= 1
            assert slow.failed == 0

    def test_an_overloaded_one_recovers(self, protocol: str) -> None:
        """While it fails nothing is kept; afterwards the same client's spans are."""
        with faulty(protocol, Plan(failures=FOREVER)) as overloaded:
            assert send_spans(protocol, overloaded.endpoint) is SpanExportResult.FAILURE
            assert overloaded.received.spans == []
            assert overloaded.failed == overloaded.arrived >= 1
            overloaded.plan = Plan()
            assert send_spans(protocol, overloaded.endpoint) is SpanExportResult.SUCCESS
            assert {span.name for span in overloaded.received.spans} == {"parent", "child"}

    def test_an_untrusted_certificate_lets_nothing_through(self, tmp_path: Path, protocol: str) -> None:
        """A client that does not know the certificate breaks off, and the receiver behind it sees nothing."""
        with faulty(protocol, Plan()) as behind, TlsFront(self_signed(tmp_path), behind.port) as front:
            endpoint = f"https://127.0.0.1:{front.port}"
            assert send_spans(protocol, endpoint) is SpanExportResult.FAILURE
            wait_until(lambda: front.refused >= 1, 10, "a broken handshake is counted")
            assert (front.handshakes, behind.arrived) == (0, 0)


def test_a_status_is_the_planned_one() -> None:
    """The HTTP receiver answers with the status and the Retry-After of its plan."""
    with FaultyHttp(Plan(failures=1, status=429, retry_after_s=3)) as overloaded:
        client = http.client.HTTPConnection("127.0.0.1", overloaded.port, timeout=10)
        client.request("POST", "/v1/traces", b"")
        answer = client.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
        client.close()


class TestPrometheus:
    """The real server against a plain endpoint."""

    @pytest.fixture
    def endpoint(self) -> Iterator[tuple[prometheus_client.CollectorRegistry, str]]:
        """A registry, and HOST:PORT that exposes it."""
        registry = prometheus_client.CollectorRegistry()
        server = ThreadingHTTPServer(("127.0.0.1", 0), MetricsHandler.factory(registry))
        with server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield registry, f"127.0.0.1:{server.server_address[1]}"
            server.shutdown()
            thread.join()

    def test_values_and_exemplars_are_scraped(
        self, tmp_path: Path, endpoint: tuple[prometheus_client.CollectorRegistry, str]
    ) -> None:
        """A query gives the value, and the exemplars have the trace id, that the endpoint exposed as OpenMetrics."""
        registry, target = endpoint
        prometheus_client.Counter("seen", "Requests.", ["reason"], registry=registry).labels("stop").inc(3)
        wait = prometheus_client.Histogram("wait_seconds", "Wait.", buckets=(1.0,), registry=registry)
        wait.observe(0.25, {"trace_id": f"{7:032x}"})
        with Prometheus(tmp_path, target) as server:
            wait_until(lambda: server.query("seen_total"), 20, lambda: f"a scrape; {server.targets()}")
            wait_until(lambda: server.exemplars("wait_seconds_bucket"), 20, "an exemplar")
            assert [(s.labels["reason"], s.value) for s in server.query("seen_total")] == [("stop", 3)]
            (exemplar,) = server.exemplars("wait_seconds_bucket")
            assert (exemplar.labels, exemplar.value) == ({"trace_id": f"{7:032x}"}, 0.25)
            assert [target.health for target in server.targets()] == ["up"]

    def test_a_target_that_is_gone_is_down(self, tmp_path: Path) -> None:
        """Nobody listens: the target's health says so, with a reason."""
        with Refusing() as refusing, Prometheus(tmp_path, f"127.0.0.1:{refusing.port}") as server:
            wait_until(lambda: [t.health for t in server.targets()] == ["down"], 20, lambda: f"{server.targets()}")
            assert "refused" in server.targets()[0].error

    def test_promtool_finds_what_is_wrong(self) -> None:
        """A good exposition has no complaint; a counter without its suffix has one."""
        help_and_type = "# HELP seen{0} Requests.\n# TYPE seen{0} counter\nseen{0} 3\n"
        assert check_metrics(help_and_type.format("_total")) == (0, ())
        complained = check_metrics(help_and_type.format(""))
        assert complained.code != 0
        assert "_total" in "".join(complained.complaints)
