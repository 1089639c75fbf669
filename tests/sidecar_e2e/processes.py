# SPDX-License-Identifier: Apache-2.0
"""Child processes of tests: start them, wait until they are ready, and always end them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

# How long a test waits for what is to come: long, since the machine may be busy.
WAIT_S = 180.0
_PAUSE_S = 0.02
_END_S = 60.0
_LOG_TAIL = 4000


def clean_environ() -> dict[str, str]:
    """This process's environment less what would change how exporters, or the sidecar, behave.

    ``requests`` prefers the two bundles to the certificate that an exporter was told to trust.
    """
    bundles = {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
    return {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "ROTEL_", "VLLM_")) and k not in bundles}


class NotInTimeError(AssertionError):
    """A condition did not come true before its deadline; the message says which, and what there was instead."""


def wait_until(condition: Callable[[], object], timeout_s: float, what: Callable[[], str] | str) -> None:
    """Ask ``condition`` until it is true.

    Raises:
        NotInTimeError: It was not within ``timeout_s``; ``what`` words it, asked only then.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise NotInTimeError(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(_PAUSE_S)


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on, for a program that cannot say which port it took."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def listens(port: int) -> bool:
    """Whether somebody accepts connections on ``port`` of the loopback."""
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


class Child:
    """A child process whose output goes to files in ``folder``: ``NAME.out`` and ``NAME.err``.

    As a context manager it ends the process: SIGTERM, then SIGKILL after ``_END_S`` seconds.
    """

    def __init__(  # noqa: PLR0913  # those of Popen that matter
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        *,
        cwd: Path | None = None,
        user: int | None = None,
    ) -> None:
        self.name = name
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=dict(environ),
                cwd=cwd,
                user=user,
                group=user,
                extra_groups=None if user is None else (),
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def log(self) -> str:
        """The end of what it wrote, for messages."""
        texts = (path.read_text(errors="replace")[-_LOG_TAIL:] for path in (self.out, self.err))
        return f"{self.name} (exit code {self.process.poll()}) wrote:\n" + "\n".join(texts)

    def wait_until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Ask ``condition`` until it is true or the process ends.

        Raises:
            NotInTimeError: It was not within ``timeout_s``, or the process ended before.
        """
        wait_until(lambda: condition() or not self.alive(), timeout_s, lambda: f"{what}; {self.log()}")
        if not condition():
            raise NotInTimeError(f"ended before: {what}; {self.log()}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL, as the kernel does when memory is short."""
        self.process.kill()
        self.process.wait()

    def close_stdin(self) -> None:
        """Tell a process that waits for the end of its input to go on."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended.

        Raises:
            NotInTimeError: It has not within ``timeout_s``.
        """
        wait_until(lambda: not self.alive(), timeout_s, lambda: f"the end of {self.log()}")
        return self.process.wait()

    def end(self, timeout_s: float = _END_S) -> int:
        """End it by SIGTERM, by SIGKILL after ``timeout_s``; returns its exit code."""
        self.close_stdin()
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.alive():
            self.process.send_signal(signal.SIGCONT)  # one that was stopped would not see SIGTERM
        self.end()
