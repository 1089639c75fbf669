# SPDX-License-Identifier: Apache-2.0
"""The sidecar that runs beside the demo's engine: a process of its own, as a user would start it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from vllm_kvfix.demo.stopping import uninterrupted

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from vllm_kvfix_sidecar.report import ProcessReport

_START_DEADLINE_S = 60.0
_STOP_GRACE_S = 15.0
_ANSWER_S = 5.0
_POLL_S = 0.1
_LOG_TAIL = 15


class SidecarFailedError(RuntimeError):
    """The sidecar did not start or ended early; the message holds the end of its log."""


class Sidecar:
    """A running ``vllm-kvfix sidecar`` on a free loopback port, used as a context manager.

    Raises:
        SidecarFailedError: on entering, if it ends or its deadline passes before it says where it listens.
    """

    def __init__(self, rings: Path, log_file: Path) -> None:
        """Prepare it to follow the rings in the folder ``rings``; nothing runs before it is entered."""
        self.url = ""
        self._rings = rings
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def page(self) -> str:
        """The address of its live page, as far back as the demo goes."""
        return f"{self.url}/#range=900"

    def __enter__(self) -> Sidecar:  # noqa: PYI034  Self came with Python 3.11
        """Start it and wait until it says where it listens."""
        self._rings.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "vllm_kvfix", "sidecar", f"--ring-dir={self._rings}"]
        command += ["--listen=127.0.0.1:0", "--log-format=json"]
        try:
            with self._log_file.open("wb") as log, uninterrupted():
                self._process = subprocess.Popen(  # noqa: S603  our own command
                    command,
                    env=_environ(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A session of its own: Ctrl-C reaches us alone.
                    start_new_session=True,
                )
            self._wait_for_the_address()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()

    def check(self) -> None:
        """Raise SidecarFailedError if it has ended."""
        if self._process is None or self._process.poll() is not None:
            code = self._process.returncode if self._process else None
            raise SidecarFailedError(self._failure(f"the sidecar ended by itself with exit code {code}"))

    def judged(self, pid: int) -> ProcessReport | None:
        """What it says of a process; None: nothing yet, or it does not answer in time.

        Raises:
            SidecarFailedError: It has ended.
        """
        from vllm_kvfix_sidecar import client  # noqa: PLC0415  the parts that the tests share do without the extra

        self.check()
        try:
            report = client.ask(client.url_of(self.url), _ANSWER_S)
        except client.NoAnswerError:
            return None
        return next((process for process in report.processes if process.verdict.pid == pid), None)

    def stop(self) -> None:
        """End it: politely, then by force. Harmless if there is none."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait_for_the_address(self) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while not (url := self._address()):
            self.check()
            if time.monotonic() > deadline:
                raise SidecarFailedError(self._failure(f"the sidecar did not start within {_START_DEADLINE_S:.0f} s"))
            time.sleep(_POLL_S)
        self.url = url

    def _address(self) -> str:
        for line in self._log_file.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # half a line, or one that is not ours
                told = json.loads(line)
                if told["message"] == "started":
                    return str(told["fields"]["listen"])
        return ""

    def _failure(self, cause: str) -> str:
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join("    " + line for line in lines[-_LOG_TAIL:])
        return f"{cause}; the end of its log:\n{tail}"


def _environ() -> dict[str, str]:
    """As we were started, but nothing is sent to the collector of whoever runs the demo."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VLLM_"))}
    # The same modules as ours, however we came by them.
    return environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # noqa: PTH109  a string
