# SPDX-License-Identifier: Apache-2.0
"""Answers a Kubernetes API server's AdmissionReviews of new pods, over TLS; for clusters without its own policies.

POST /inject takes an AdmissionReview (``admission.k8s.io/v1``) and answers with one. It never denies a pod: one that it
cannot change starts as it would have without us, with a warning where that is of use. What is no review gets 400, what
is too large 413, without a traceback. GET /healthz is for probes. Certificate and key are read again when they change.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import signal
import ssl
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix import __version__
from vllm_kvfix_sidecar import logs
from vllm_kvfix_sidecar.injection.patch import Injection, InjectionError, patch
from vllm_kvfix_sidecar.logs import fields

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
# The API server takes objects of 3 MiB at most (etcd's limit is half of that); old and new one may be in a review.
LARGEST_REVIEW = 8 << 20
LONGEST_S = 10.0
LOOK_S = 10.0
MOST_CONNECTIONS = 64
_EPILOG = """\
exit codes:
  0  ended by SIGTERM or SIGINT
  1  it cannot run: the port is taken, a file cannot be read
  2  an option cannot be used, or what is to be injected is none
"""

_log = logging.getLogger(__name__)


class ReviewError(ValueError):
    """What came is no AdmissionReview of a pod; the message says why."""


def answer(body: bytes, injection: Injection) -> bytes:
    """The AdmissionReview that answers one.

    Raises:
        ReviewError: It is none.
    """
    request = _request_of(body)
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    pod = request.get("object")
    if request.get("operation") == "CREATE" and isinstance(pod, dict) and _is_pod(request):
        try:
            made = patch(pod, injection)
        except InjectionError as error:
            response["warnings"] = [f"vllm-kvfix: left alone: {error}"]
        else:
            if made.operations:
                response["patchType"] = "JSONPatch"
                response["patch"] = base64.b64encode(json.dumps(made.operations).encode()).decode()
            if made.reason:
                response["warnings"] = [f"vllm-kvfix: left alone: {made.reason}"]
    return json.dumps({"apiVersion": API_VERSION, "kind": KIND, "response": response}).encode()


def _request_of(body: bytes) -> dict[str, Any]:
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ReviewError("it is no JSON") from error
    if not isinstance(review, dict) or review.get("kind") != KIND or review.get("apiVersion") != API_VERSION:
        raise ReviewError(f"it is no {KIND} of {API_VERSION}")
    request = review.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str) or not request["uid"]:
        raise ReviewError("it has no request with a uid")
    return request


def _is_pod(request: dict[str, Any]) -> bool:
    return request.get("resource") == {"group": "", "version": "v1", "resource": "pods"} and not request.get(
        "subResource"
    )


class _Handler(BaseHTTPRequestHandler):
    """One connection; the API server keeps it for many reviews."""

    server: Webhook
    protocol_version = "HTTP/1.1"
    timeout = LONGEST_S
    # An answer is two writes, headers and body: without this each would wait for the client's acknowledgement.
    disable_nagle_algorithm = True

    def version_string(self) -> str:
        """No version: it helps only those who look for old ones."""
        return "vllm-kvfix"

    def do_GET(self) -> None:  # http.server's name
        if self.path == "/healthz":
            self._answer(HTTPStatus.OK, b"ok\n", "text/plain")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there are POST /inject and GET /healthz")

    def do_POST(self) -> None:  # http.server's name
        body = self._body()
        if body is None:
            return
        if self.path.partition("?")[0] != "/inject":
            self._refuse(HTTPStatus.NOT_FOUND, "there are POST /inject and GET /healthz")
            return
        try:
            said = answer(body, self.server.injection)
        except ReviewError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:  # noqa: BLE001  # whatever came, the server stays up, and the pod starts without us
            _log.exception("cannot answer a review")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "an error, see the log of the webhook")
        else:
            self._answer(HTTPStatus.OK, said, "application/json")

    def _body(self) -> bytes | None:
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a Content-Length is needed")
            return None
        if int(text[:20]) > LARGEST_REVIEW:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {LARGEST_REVIEW} bytes")
            return None
        return self.rfile.read(int(text))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002  # http.server's
        """What http.server says of requests that it does not understand, in plain words."""
        self._refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True  # what is left of the request would be taken for the next one
        self._answer(status, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        _log.debug("%s %s", self.address_string(), format % args)


class Webhook(ThreadingHTTPServer):
    """Listens from the moment it is made."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], injection: Injection, certificate: Path, key: Path) -> None:
        """Bind ``address``; port 0 takes any free one.

        Raises:
            OSError: The port is taken, or a file cannot be read.
        """
        self.injection = injection
        self._files = (certificate, key)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._looked = time.monotonic()
        self._known = self._stamp()
        self._context.load_cert_chain(certificate, key)
        super().__init__(address, _Handler)

    def _stamp(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)

    def service_actions(self) -> None:
        """Read certificate and key again, some time after they have changed; a half-written pair is left for later."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            stamp = self._stamp()
            if stamp != self._known:
                self._context.load_cert_chain(*self._files)
                self._known = stamp
                _log.info("the certificate has changed and is used from now on")
        except OSError as error:  # ssl.SSLError is one
            _log.warning("the new certificate cannot be used yet, the old one stays: %s", error)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; who comes while too many are here is sent away."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Shake hands here, not where others wait to be accepted."""
        try:
            request.settimeout(LONGEST_S)
            secured = self._context.wrap_socket(request, server_side=True)
        except OSError as error:
            _log.debug("no handshake with %s: %s", client_address, error)
            self.shutdown_request(request)
        else:
            super().process_request_thread(secured, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """A client that went away is no news; anything else is."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            _log.debug("connection of %s: %s", client_address, error)
        else:
            _log.error("connection of %s failed", client_address, exc_info=error)
        del request


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvfix_sidecar.injection.webhook",
        description=(__doc__ or "").partition("\n")[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"vllm-kvfix {__version__}")
    add(
        "--injection",
        type=Path,
        required=True,
        metavar="FILE",
        help="what is to be injected, JSON that the chart makes",
    )
    add("--certificate", type=Path, required=True, metavar="FILE", help="certificate chain, PEM")
    add("--key", type=Path, required=True, metavar="FILE", help="its private key, PEM")
    add("--host", default="0.0.0.0", help="listen here (default %(default)s)")  # noqa: S104  # the API server comes from outside
    add("--port", type=int, default=8443, help="and on this port (default %(default)s); 0: any free one")
    add("--log-format", choices=("plain", "json"), default="json", help="log to standard error in this form")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="and what is graver")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; returns the exit code."""
    options = _parser().parse_args(argv)
    logs.set_up(options.log_level, options.log_format, sys.stderr)
    try:
        injection = Injection.of_json(options.injection.read_text(encoding="utf-8"))
    except InjectionError as error:
        sys.stderr.write(f"{options.injection}: {error}\n")
        return 2
    except (OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"{options.injection} cannot be read: {error}\n")
        return 1
    try:
        server = Webhook((options.host, options.port), injection, options.certificate, options.key)
    except OSError as error:
        sys.stderr.write(f"cannot serve on {options.host}:{options.port}: {error}\n")
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
    _log.info("started", extra=fields(version=__version__, port=server.server_port, pid=os.getpid()))
    server.serve_forever(0.5)
    server.server_close()
    _log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
