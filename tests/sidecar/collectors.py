# SPDX-License-Identifier: Apache-2.0
"""The smallest OTLP receivers, for both protocols; each can refuse, or hang until it is let go."""

from __future__ import annotations

import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]  # it has no types
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_S = 120.0


def wait_until(condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
    """Come back when ``condition`` holds; fail where it does not in time."""
    pause = threading.Event()
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {condition}"
        pause.wait(0.01)


class Collector:
    """What has come in. ``held``: requests wait until it is cleared. ``refusing``: they are answered with an error."""

    def __init__(self) -> None:
        self.port = 0
        self.traces: list[Any] = []
        self.metrics: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.refusing = False
        self.released = threading.Event()
        self.released.set()
        self.waiting = threading.Semaphore(0)

    def take(self, kept: list[Any], request: object, headers: dict[str, str]) -> bool:
        """Keep a request; False: it is refused."""
        self.waiting.release()
        self.released.wait(DEADLINE_S)
        if self.refusing:
            return False
        self.headers.append(headers)
        kept.append(request)
        return True

    @property
    def spans(self) -> list[Span]:
        """All spans."""
        return [
            span
            for request in list(self.traces)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def last_metrics(self) -> dict[str, Metric]:
        """The metrics of the last export, by name."""
        (resource,) = self.metrics[-1].resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}


@contextmanager
def over_grpc() -> Iterator[Collector]:
    """A collector that speaks gRPC."""
    found = Collector()
    server = grpc.server(ThreadPoolExecutor(4))

    def answer(kept: list[Any], response: Callable[[], Any]) -> Callable[[Any, Any, Any], Any]:
        def export(_: object, request: Any, context: Any) -> Any:
            if not found.take(kept, request, dict(context.invocation_metadata())):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")
            return response()

        return export

    trace = type(
        "Trace",
        (trace_service_pb2_grpc.TraceServiceServicer,),
        {"Export": answer(found.traces, trace_service_pb2.ExportTraceServiceResponse)},
    )
    metric = type(
        "Metrics",
        (metrics_service_pb2_grpc.MetricsServiceServicer,),
        {"Export": answer(found.metrics, metrics_service_pb2.ExportMetricsServiceResponse)},
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(trace(), server)  # type: ignore[no-untyped-call]  # generated
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metric(), server)  # type: ignore[no-untyped-call]  # generated
    found.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield found
    finally:
        found.released.set()
        server.stop(None).wait()


class _HttpHandler(BaseHTTPRequestHandler):
    collector: Collector

    def do_POST(self) -> None:  # http.server's name
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        found = self.collector
        kinds: dict[str, tuple[list[Any], Any]] = {
            "/v1/traces": (found.traces, trace_service_pb2.ExportTraceServiceRequest()),
            "/v1/metrics": (found.metrics, metrics_service_pb2.ExportMetricsServiceRequest()),
        }
        kept, request = kinds[self.path]
        request.ParseFromString(body)
        taken = self.collector.take(kept, request, {k.lower(): v for k, v in self.headers.items()})
        try:
            self.send_response(200 if taken else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()
        except OSError:
            self.close_connection = True  # the exporter has given up on us, as a held collector wants

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Say nothing."""


@contextmanager
def over_http() -> Iterator[Collector]:
    """A collector that speaks HTTP with protobuf."""
    found = Collector()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_HttpHandler,), {"collector": found}))
    server.daemon_threads = True
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
