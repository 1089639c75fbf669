# SPDX-License-Identifier: Apache-2.0
"""Serves the pages below over HTTP, to whoever is slow, too many or curious without being held up.

``/`` and ``/page/...``: the live page, which holds no figure; ``/api/now`` and ``/api/history``: its figures, as JSON.
``/diagnosis``: what ``vllm-kvfix diagnose`` says; ``/metrics``; ``/healthz`` and ``/readyz``.

All of it can be read, and nothing changed. A web page from elsewhere reads none of it: no answer allows another origin,
and a Host header that a stranger can make lead here is refused. Where there is a token, all figures want it.

One connection, one answer. At most ``MOST_CONNECTIONS`` at a time, each for ``LONGEST_S`` at most; when one more
comes, the oldest is cut off.
"""

from __future__ import annotations

import gzip
import ipaddress
import json
import logging
import re
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from vllm_kvfix_sidecar.logs import fields
from vllm_kvfix_sidecar.page_data import DEFAULT_POINTS, DEFAULT_RANGE_S, BadQueryError, UnknownProcessError
from vllm_kvfix_sidecar.settings import Address
from vllm_kvfix_sidecar.words import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_kvfix_sidecar.health import Answer
    from vllm_kvfix_sidecar.static_files import StaticFile

MOST_CONNECTIONS = 32
LONGEST_S = 10.0
_TURN_S = 0.5
_STRANGE_HOST = "the Host header names another host than this one; if it is right, allow it by --allow-host NAME"
# Nobody can register a name under these for all the world, so none leads a stranger's web page here.
_LOCAL_SUFFIXES = (".local", ".svc", ".internal", ".localhost")
# Of the page itself: its own scripts, styles and figures, nothing else, and in no frame. Trusted Types: text that an
# engine chose cannot become markup, whatever a script does with it.
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_FRESH = ("Cache-Control", "no-store")
_ALWAYS = (
    ("Content-Security-Policy", _CSP),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)

_log = logging.getLogger(__name__)


class Pages(NamedTuple):
    """What is served: ``metrics`` is given the Accept header and returns body and content type.

    ``now`` and ``history`` return JSON; ``history`` is given a process's key (None: of all), seconds and points, and
    raises what :meth:`~vllm_kvfix_sidecar.page_data.PageData.history` does. ``files`` of the page, by path.
    """

    metrics: Callable[[str], tuple[bytes, str]]
    alive: Callable[[], Answer]
    ready: Callable[[], Answer]
    diagnosis: Callable[[], Answer]
    now: Callable[[], bytes]
    history: Callable[[str | None, float, int], bytes]
    files: Mapping[str, StaticFile]


class Access(NamedTuple):
    """Who is answered: ``hosts`` may stand in a Host header beside those that always may.

    ``lets_in``: whether an Authorization header lets its sender see figures; None: anybody may.
    """

    hosts: frozenset[str] = frozenset()
    lets_in: Callable[[str | None], bool] | None = None


class Reply(NamedTuple):
    """An answer before it is written; ``packed``: its body by gzip, if that is there already."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = (_FRESH,)
    packed: bytes | None = None


def _text(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Reply:
    return Reply(status, f"{text}\n".encode(), headers=(_FRESH, *headers))


def _json(body: bytes, status: HTTPStatus = HTTPStatus.OK, *headers: tuple[str, str]) -> Reply:
    return Reply(status, body, "application/json", (_FRESH, *headers))


def _error(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Reply:
    return _json(json.dumps({"error": text}).encode() + b"\n", status, *headers)


def _who_are_you(path: str) -> Reply:
    text = "this wants the token that is in the sidecar's --token-file, as `Authorization: Bearer TOKEN`"
    asked = ("WWW-Authenticate", 'Bearer realm="vllm-kvfix"')
    if path.startswith("/api/"):
        return _error(HTTPStatus.UNAUTHORIZED, text, asked)
    return _text(HTTPStatus.UNAUTHORIZED, text, asked)


def _answered(answer: Answer, *, whole: bool = True) -> Reply:
    status = HTTPStatus.OK if answer.good else HTTPStatus.SERVICE_UNAVAILABLE
    body = answer.body if whole else {"status": answer.body.get("status")}
    return _json(json.dumps(body, indent=2).encode() + b"\n", status)


def _file(file: StaticFile, seen: str) -> Reply:
    headers = (("Cache-Control", "no-cache"), ("ETag", file.tag))
    if file.tag in seen:
        return Reply(HTTPStatus.NOT_MODIFIED, b"", file.content_type, headers)
    return Reply(HTTPStatus.OK, file.body, file.content_type, headers, file.packed)


def _parts(target: str) -> tuple[str, str]:
    """Path and query of a request's target.

    Raises:
        BadQueryError: It is none.
    """
    try:
        parts = urlsplit(target)
    except ValueError as error:
        raise BadQueryError("this is no path") from error
    return parts.path, parts.query


def _asked(query: str) -> tuple[str | None, float, int]:
    """Process, range in seconds and points of a question for history.

    Raises:
        BadQueryError: One of them is none.
    """
    given = dict(parse_qsl(query, keep_blank_values=True))
    within, points = given.get("range"), given.get("points")
    return (
        given.get("process"),
        DEFAULT_RANGE_S if within is None else _number("range", within),
        DEFAULT_POINTS if points is None else _number("points", points),
    )


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise BadQueryError(f"{name} is no whole number")
    return int(text)


_PROBES: dict[str, Callable[[Pages], Answer]] = {
    "/healthz": lambda pages: pages.alive(),
    "/readyz": lambda pages: pages.ready(),
}
# Each is given the query and the Accept header.
_FIGURES: dict[str, Callable[[Pages, str, str], Reply]] = {
    "/api/now": lambda pages, _query, _accept: _json(pages.now()),
    "/api/history": lambda pages, query, _accept: _json(pages.history(*_asked(query))),
    "/diagnosis": lambda pages, _query, _accept: _answered(pages.diagnosis()),
    "/metrics": lambda pages, _query, accept: Reply(HTTPStatus.OK, *pages.metrics(accept)),
}
_ALL = ", ".join(("/", *_FIGURES, *_PROBES))
_NO_PAGE = "this installation has no page, and the sidecar's log says why"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
            self._answer(_text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", ("Allow", "GET, HEAD")))
        else:
            self._answer(_text(HTTPStatus(code), HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        _log.debug("%s %s", self.address_string(), format % args)

    def _reply(self) -> Reply:
        host = self.headers.get("Host")
        if not self.server.is_for_us(host):
            return _text(HTTPStatus.FORBIDDEN, _STRANGE_HOST)
        try:
            return self._found(*_parts(self.path))
        except BadQueryError as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        except UnknownProcessError as error:
            return _error(HTTPStatus.NOT_FOUND, str(error))
        except Exception:  # noqa: BLE001  # whatever it is, the client gets no traceback and the log does
            _log.exception("cannot answer %s", clean(self.path, 200))
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "an error, see the log of the sidecar")

    def _found(self, path: str, query: str) -> Reply:
        pages = self.server.pages
        if path in pages.files:  # the page asks for the token, so it comes without
            return _file(pages.files[path], self.headers.get("If-None-Match", ""))
        known = self.server.knows(self.headers.get("Authorization"))
        if path in _PROBES:  # nor has a kubelet one
            return _answered(_PROBES[path](pages), whole=known)
        if not known:
            return _who_are_you(path)
        if path in _FIGURES:
            return _FIGURES[path](pages, query, self.headers.get("Accept", ""))
        return _text(HTTPStatus.NOT_FOUND, f"there are {_ALL}" if pages.files else f"{_NO_PAGE}; there are {_ALL}")

    def _answer(self, reply: Reply) -> None:
        body = reply.body
        # A request line that cannot be parsed leaves no headers behind.
        accepted = self.headers.get("Accept-Encoding", "") if hasattr(self, "headers") else ""
        zipped = "gzip" in accepted and len(body) > 1024  # noqa: PLR2004  # one packet goes as fast
        if zipped:
            body = reply.packed or gzip.compress(body, 6, mtime=0)
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        if reply.status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Vary", "Accept, Accept-Encoding")
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        for name, value in (*reply.headers, *_ALWAYS):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Listens from the moment it is made; serves between :meth:`start` and :meth:`stop`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: Address,
        pages: Pages,
        clock: Callable[[], float] = time.monotonic,
        access: Access = Access(),  # noqa: B008  # it is immutable
    ) -> None:
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
        self._access = access
        self._own_name = socket.gethostname().lower()
        self._refused_a_host = False
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
        """Whether a Host header may be answered; not one that a web page from elsewhere would bring, led here by DNS.

        On loopback those are all but loopback's names. Beyond it they are names that anybody can register: an address,
        or a name of this network, leads nobody else here. A page that has no token learns nothing, whatever its name.
        """
        if host is None:  # every browser sends one
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        good = bool(name) and (name in self._access.hosts or self._is_ours(name))
        if not good and not self._refused_a_host:
            self._refused_a_host = True
            _log.warning("%s; said once", _STRANGE_HOST, extra=fields(host=clean(host, 100)))
        return good

    def _is_ours(self, name: str) -> bool:
        if Address(name, 0).is_loopback:
            return True
        if self.address.is_loopback:
            return False
        if self._access.lets_in is not None or name in {self.address.host.lower(), self._own_name}:
            return True
        return "." not in name or name.endswith(_LOCAL_SUFFIXES) or _is_address(name)

    def knows(self, authorization: str | None) -> bool:
        """Whether who sent this header may see figures."""
        return self._access.lets_in is None or self._access.lets_in(authorization)

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
