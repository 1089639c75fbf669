# SPDX-License-Identifier: Apache-2.0
"""Certificates of the loopback for tests, made by the ``openssl`` command, and a TLS front for a plain server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

_CHUNK = 1 << 16
_HANDSHAKE_S = 60.0


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for ``localhost`` and 127.0.0.1: who trusts ``path`` trusts it, nobody else does."""

    path: Path
    key: Path


def self_signed(folder: Path, name: str = "loopback") -> Certificate:
    """Make one.

    Raises:
        RuntimeError: The ``openssl`` command is missing or failed.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise RuntimeError("the command openssl is missing; install Debian's package openssl")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    command = [openssl, "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-keyout", str(made.key), "-out", str(made.path), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"openssl made no certificate: {done.stderr}")
    return made


class TlsFront:
    """Takes TLS connections on a port of its own and hands the plain bytes to ``target_port``, and back.

    ``handshakes`` counts those that succeeded, ``refused`` those that a client broke off, or that never ended.
    """

    def __init__(self, certificate: Certificate, target_port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.path, certificate.key)
        self._context.set_alpn_protocols(["h2", "http/1.1"])  # a gRPC client insists on h2
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.handshakes = 0
        self.refused = 0
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="tls-front", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:  # closed: the front's end
                return
            self._open.add(plain)
            threading.Thread(target=self._serve, args=(plain,), name="tls-connection", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        plain.settimeout(_HANDSHAKE_S)
        try:
            client = self._context.wrap_socket(plain, server_side=True)
        except OSError:
            self.refused += 1
            plain.close()
            return
        self.handshakes += 1
        self._open.add(client)
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            self._open.add(server)
            back = threading.Thread(target=_pump, args=(server, client), name="tls-back", daemon=True)
            back.start()
            client.settimeout(None)
            _pump(client, server)
            back.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until either side ends, then end the other side too."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
