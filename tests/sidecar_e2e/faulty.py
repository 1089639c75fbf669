# SPDX-License-Identifier: Apache-2.0
"""Fake receivers that fail as real ones do, in this process: deaf, slow, overloaded, gone. Each counts what arrived."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple

import grpc  # type: ignore[import-untyped]  # grpcio ships no types
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.sidecar_e2e.receiver import Received

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_OK = 200
_THREADS = 16


class Plan(NamedTuple):
    """What a receiver does with a request.

    It waits ``delay_s``, then fails ``failures`` requests with HTTP status ``status`` (gRPC: UNAVAILABLE), then takes
    all that follow. ``retry_after_s`` goes into the header ``Retry-After`` of a failure.
    """

    failures: int = 0
    delay_s: float = 0.0
    status: int = 503
    retry_after_s: int | None = None


FOREVER = 1 << 60


class Refusing:
    """A port that refuses each connection, held so that nobody else listens on it meanwhile."""

    def __enter__(self) -> Self:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))  # bound and never listening
        self.port: int = self._socket.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


class Silent:
    """Accepts every connection, reads all and never answers; ``connections`` and ``taken`` bytes are counted."""

    def __enter__(self) -> Self:
        self.connections = 0
        self.taken = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="silent", daemon=True)
        self._thread.start()
        return self

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the end
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._open.append(client)
                threading.Thread(target=self._swallow, args=(client,), name="silent-client", daemon=True).start()

    def _swallow(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                self.taken += len(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for client in self._open:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            client.close()


class _Faulty:
    """What both protocols share: the plan, which a test may replace at any time, and the counts.

    ``arrived`` requests of either kind; ``failed`` of them were answered by a failure; ``received`` holds the others.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.arrived = 0
        self.failed = 0
        self.received = Received()
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def fails(self) -> bool:
        """Count a request, wait as planned, and say whether it is to fail."""
        with self._lock:
            self.arrived += 1
            plan = self.plan
            failing = plan.failures > 0
            if failing:
                self.plan = plan._replace(failures=plan.failures - 1)
                self.failed += 1
        self.ended.wait(plan.delay_s)
        return failing


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: FaultyHttp

    def do_POST(self) -> None:  # the name that http.server looks for
        body = self.rfile.read(int(self.headers["Content-Length"]))
        plan = self.faulty.plan
        if self.faulty.fails():
            self._answer(plan.status, plan.retry_after_s)
            return
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.faulty.received.add(self.path, body)
        self._answer(_OK)

    def _answer(self, status: int, retry_after_s: int | None = None) -> None:
        with contextlib.suppress(OSError):  # a client that gave up is what slowness is for
            self.send_response(status)
            if retry_after_s is not None:
                self.send_header("Retry-After", str(retry_after_s))
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the signature of http.server
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that break off are what is tested."""


class FaultyHttp(_Faulty):
    """A receiver of OTLP over HTTP that keeps to a :class:`Plan`."""

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"faulty": self}))
        self.port: int = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="faulty-http", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class FaultyGrpc(_Faulty):
    """A receiver of OTLP over gRPC that keeps to a :class:`Plan`."""

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(_THREADS))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            _Traces(self), self._server
        )
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            _Metrics(self), self._server
        )
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._server.start()
        return self

    def take(self, path: str, body: bytes, context: grpc.ServicerContext) -> None:
        """Keep the request, or fail the call."""
        if self.fails():
            context.abort(grpc.StatusCode.UNAVAILABLE, "as planned")
        self.received.add(path, body)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self._server.stop(grace=None).wait()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, faulty: FaultyGrpc) -> None:
        self._faulty = faulty

    def Export(  # noqa: N802  # the name in the service's definition
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._faulty.take("/v1/traces", request.SerializeToString(), context)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, faulty: FaultyGrpc) -> None:
        self._faulty = faulty

    def Export(  # noqa: N802  # the name in the service's definition
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._faulty.take("/v1/metrics", request.SerializeToString(), context)
        return metrics_service_pb2.ExportMetricsServiceResponse()


def faulty(protocol: str, plan: Plan) -> FaultyGrpc | FaultyHttp:
    """The receiver of that protocol, grpc or http."""
    return FaultyGrpc(plan) if protocol == "grpc" else FaultyHttp(plan)
