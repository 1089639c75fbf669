# SPDX-License-Identifier: Apache-2.0
"""Serves /metrics, /healthz and /readyz over HTTP, to whoever is slow, too many or curious without being held up.

One connection, one answer. At most ``MOST_CONNECTIONS`` at a time, each for ``LONGEST_S`` at most; when one more
comes, the oldest is cut off.
"""

from __future__ import annotations

import gzip
import json
import logging
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from vllm_kvfix_sidecar.settings import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_kvfix_sidecar.health import Answer

MOST_CONNECTIONS = 32
LONGEST_S = 10.0
_TURN_S = 0.5

_log = logging.getLogger(__name__)


class Pages(NamedTuple):
    """What is served: ``metrics`` is given the Accept header and returns body and content type."""

    metrics: Callable[[str], tuple[bytes, str]]
    alive: Callable[[], Answer]
    ready: Callable[[], Answer]


class Reply(NamedTuple):
    """An answer before it is written."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    allow: str = ""


def _text(status: HTTPStatus, text: str, allow: str = "") -> Reply:
    return Reply(status, f"{text}\n".encode(), allow=allow)


def _json(answer: Answer) -> Reply:
    status = HTTPStatus.OK if answer.good else HTTPStatus.SERVICE_UNAVAILABLE
    return Reply(status, json.dumps(answer.body, indent=2).encode() + b"\n", "application/json")


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.0"
    timeout = LONGEST_S

    def version_string(self) -> str:
        """No version: it helps only those who look for old ones."""
        return "vllm-kvfix"

    def do_GET(self) -> None:  # http.server's name
        self._answer(self._reply())

    def do_HEAD(self) -> None:  # http.server's name
        self._answer(self._reply())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002  # http.server's
        """What http.server says of requests that it does not understand, in plain words; methods, too."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._answer(_text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", allow="GET, HEAD"))
        else:
            self._answer(_text(HTTPStatus(code), HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        _log.debug("%s %s", self.address_string(), format % args)

    def _reply(self) -> Reply:
        if not self.server.is_for_us(self.headers.get("Host")):
            return _text(HTTPStatus.FORBIDDEN, "the Host header names another host than this one")
        pages = self.server.pages
        path = urlsplit(self.path).path
        try:
            if path == "/metrics":
                return Reply(HTTPStatus.OK, *pages.metrics(self.headers.get("Accept", "")))
            if path == "/healthz":
                return _json(pages.alive())
            if path == "/readyz":
                return _json(pages.ready())
        except Exception:  # noqa: BLE001  # whatever it is, the client gets no traceback and the log does
            _log.exception("cannot answer %s", path)
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "an error, see the log of the sidecar")
        return _text(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz and /readyz")

    def _answer(self, reply: Reply) -> None:
        body = reply.body
        # A request line that cannot be parsed leaves no headers behind.
        accepted = self.headers.get("Accept-Encoding", "") if hasattr(self, "headers") else ""
        zipped = "gzip" in accepted and len(body) > 1024  # noqa: PLR2004  # one packet goes as fast
        if zipped:
            body = gzip.compress(body, 6, mtime=0)
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Vary", "Accept, Accept-Encoding")
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        if reply.allow:
            self.send_header("Allow", reply.allow)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Listens from the moment it is made; serves between :meth:`start` and :meth:`stop`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: Address, pages: Pages, clock: Callable[[], float] = time.monotonic) -> None:
        """Bind ``address``; port 0 takes any free one.

        Raises:
            OSError: The port is taken, or the address is not this machine's.
        """
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self.pages = pages
        self._clock = clock
        self._only_loopback = address.is_loopback
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(where[:2], _Handler)  # type: ignore[arg-type]  # typeshed knows TCP addresses of IPv4 alone
        self.address = Address(address.host, self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, args=(_TURN_S,), name="http", daemon=True)

    def server_bind(self) -> None:
        """Bind without asking the resolver for our own name, as http.server does, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def start(self) -> None:
        """Serve, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; what is being answered is cut off."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def is_for_us(self, host: str | None) -> bool:
        """Whether a Host header may be answered: on loopback only loopback's names, lest a web page read us by DNS."""
        if not self._only_loopback or host is None:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return Address(name, 0).is_loopback

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, after cutting off the oldest if there are too many."""
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                self._cut(min(self._open, key=self._open.__getitem__))
            self._open[request] = self._clock()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off, about twice a second, who has been here too long."""
        with self._lock:
            now = self._clock()
            for request in [request for request, since in self._open.items() if now - since > LONGEST_S]:
                self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError as error:  # it has gone by itself
            _log.debug("a connection was gone when it was to be cut off: %s", error)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # socketserver's names
        """A client that went away or was cut off is no news; anything else is."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            _log.debug("connection of %s: %s", client_address, error)
        else:
            _log.error("connection of %s failed", client_address, exc_info=error)
