# SPDX-License-Identifier: Apache-2.0
"""The command: from arguments and signals to an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import logs, settings
from vllm_kvfix_sidecar.telemetry_settings import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

DONE, CANNOT_RUN, MISUSED = 0, 1, 2
_NEEDED = frozenset({"opentelemetry", "prometheus_client", "google", "grpc", "requests"})
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command; the exit code."""
    try:
        asked = settings.parse(sys.argv[1:] if arguments is None else arguments, environ)
        logs.set_up(asked.log_level, asked.log_format, sys.stderr)
        return _run(asked, environ)
    except SettingError as error:
        sys.stderr.write(f"vllm-kvfix-sidecar: {error}\n")
        return MISUSED
    except ImportError as error:
        if (error.name or "").split(".")[0] not in _NEEDED:
            raise
        sys.stderr.write(f"vllm-kvfix-sidecar: {error.name} is not installed here; pip install 'vllm-kvfix[sidecar]'\n")
        return CANNOT_RUN


def _run(asked: settings.Settings, environ: Mapping[str, str]) -> int:
    # Not before the arguments are known to be good: this imports the SDK, the exporters, and half a second of time.
    from vllm_kvfix_sidecar.service import Service  # noqa: PLC0415  # ^

    stop = threading.Event()
    with _stopping(stop):
        try:
            service = Service(asked, environ)
        except OSError as error:
            text = "cannot listen on %s: %s; choose another by --listen"
            _log.error(text, asked.listen, error.strerror or error)  # the text says it all
            return CANNOT_RUN
        if asked.once:
            service.once(sys.stdout)
        else:
            service.run(stop)
        service.close()
    return DONE


@contextlib.contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Let the first signal set ``stop``, and a second one end the process on the spot."""

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # a signal handler's
        if stop.is_set():
            os._exit(CANNOT_RUN)
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
