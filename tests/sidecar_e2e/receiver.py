# SPDX-License-Identifier: Apache-2.0
"""A real OTLP receiver that others wrote: ``rotel``, a collector, as a child process.

It takes gRPC and HTTP at once, decodes, and hands everything on as OTLP over HTTP to the sink here, which keeps it.
So what a test reads back has been understood by a program that is neither ours nor OpenTelemetry's.
"""

from __future__ import annotations

import gzip
import importlib.util
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from tests.sidecar_e2e.certificates import TlsFront
from tests.sidecar_e2e.processes import Child, clean_environ, free_port, listens, wait_until
from tests.sidecar_e2e.telemetry import decode_logs, decode_points, decode_spans
from vllm_kvfix_sidecar.conventions import DEATH_SPAN_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from tests.sidecar_e2e.certificates import Certificate
    from tests.sidecar_e2e.telemetry import LogRecord, Point, Span

_READY_S = 120.0


class Received:
    """All that has come in so far, in the order of its arrival; written by the sink's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._points: list[Point] = []
        self._logs: list[LogRecord] = []
        self.requests = 0

    def add(self, path: str, body: bytes) -> None:
        """Keep what a request to ``/v1/traces``, ``/v1/metrics`` or ``/v1/logs`` holds.

        Raises:
            ValueError: Another path.
        """
        if path not in {"/v1/traces", "/v1/metrics", "/v1/logs"}:
            raise ValueError(f"nothing is kept under {path}")
        spans = decode_spans(body) if path == "/v1/traces" else []
        points = decode_points(body) if path == "/v1/metrics" else []
        logs = decode_logs(body) if path == "/v1/logs" else []
        with self._lock:
            self.requests += 1
            self._spans += spans
            self._points += points
            self._logs += logs

    @property
    def spans(self) -> list[Span]:
        """The spans, but for those of deaths: most engines here are killed in the end."""
        with self._lock:
            return [span for span in self._spans if span.name != DEATH_SPAN_NAME]

    @property
    def deaths(self) -> list[Span]:
        """The spans of deaths."""
        with self._lock:
            return [span for span in self._spans if span.name == DEATH_SPAN_NAME]

    @property
    def metrics(self) -> list[Point]:
        """The data points."""
        with self._lock:
            return list(self._points)

    @property
    def logs(self) -> list[LogRecord]:
        """The log records."""
        with self._lock:
            return list(self._logs)

    def latest(self, name: str) -> list[Point]:
        """The newest point of each attribute set of metric ``name``."""
        newest = {tuple(sorted(map(repr, p.attributes.items()))): p for p in self.metrics if p.name == name}
        return list(newest.values())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    received: Received

    def do_POST(self) -> None:  # the name that http.server looks for
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.add(self.path, body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the signature of http.server
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def agent_binary() -> Path:
    """The collector's executable.

    Raises:
        RuntimeError: The package ``rotel`` is not installed.
    """
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        raise RuntimeError("the OTLP receiver of these tests is missing; install the development group (rotel)")
    return Path(found.origin).parent / "rotel-agent"


class Receiver:
    """The receiver, running from ``__enter__`` to ``__exit__``; its log lies in ``folder``.

    ``tls``: the endpoints are https, with that certificate. ``ports``: gRPC and HTTP, to come where another one was.
    """

    def __init__(self, folder: Path, tls: Certificate | None = None, ports: tuple[int, int] | None = None) -> None:
        self.received = Received()
        self._folder = folder
        self._tls = tls
        self._plain_ports = ports or (free_port(), free_port())
        self._scheme = "https" if tls else "http"
        self.ports = self._plain_ports
        self.fronts: list[TlsFront] = []
        self._stack = ExitStack()

    @property
    def grpc_endpoint(self) -> str:
        """For ``OTEL_EXPORTER_OTLP_ENDPOINT`` with the protocol ``grpc``."""
        return f"{self._scheme}://127.0.0.1:{self.ports[0]}"

    @property
    def http_endpoint(self) -> str:
        """For ``OTEL_EXPORTER_OTLP_ENDPOINT`` with the protocol ``http/protobuf``; has no path."""
        return f"{self._scheme}://127.0.0.1:{self.ports[1]}"

    @property
    def spans(self) -> list[Span]:
        """All spans so far, but for those of deaths."""
        return self.received.spans

    @property
    def metrics(self) -> list[Point]:
        """All data points so far."""
        return self.received.metrics

    def wait_for(self, condition: Callable[[Received], object], timeout_s: float = 30.0) -> None:
        """Wait until ``condition`` holds of what was received.

        Raises:
            NotInTimeError: It does not within ``timeout_s``.
        """
        wait_until(lambda: condition(self.received), timeout_s, self._have)

    def _have(self) -> str:
        names = sorted({point.name for point in self.metrics})
        return f"the receiver has {len(self.spans)} spans, and points of {names}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            handler = type("Handler", (_Handler,), {"received": self.received})
            sink = stack.enter_context(_Server(("127.0.0.1", 0), handler))
            threading.Thread(target=sink.serve_forever, name="otlp-sink", daemon=True).start()
            stack.callback(sink.shutdown)
            child = stack.enter_context(self._agent(sink.server_address[1]))
            ready = "rotel listens on both ports"
            child.wait_until(lambda: all(map(listens, self._plain_ports)), _READY_S, ready)
            if self._tls is not None:
                self.fronts = [stack.enter_context(TlsFront(self._tls, port)) for port in self._plain_ports]
                self.ports = (self.fronts[0].port, self.fronts[1].port)
            self._stack = stack.pop_all()
        return self

    def _agent(self, sink_port: int) -> Child:
        grpc_port, http_port = self._plain_ports
        options = {
            "--otlp-grpc-endpoint": f"127.0.0.1:{grpc_port}",
            "--otlp-http-endpoint": f"127.0.0.1:{http_port}",
            "--otlp-grpc-max-recv-msg-size-mib": "64",
            "--exporter": "otlp",
            "--otlp-exporter-protocol": "http",
            "--otlp-exporter-endpoint": f"http://127.0.0.1:{sink_port}",
            "--otlp-exporter-request-timeout": "60s",  # it would send again what was only slow
            "--pid-file": str(self._folder / "rotel.pid"),
            "--log-file": str(self._folder / "rotel.log"),
        }
        flat = [word for pair in options.items() for word in pair]
        command = [str(agent_binary()), "start", "--disable-batching", *flat]
        return Child("rotel", command, self._folder, clean_environ())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
