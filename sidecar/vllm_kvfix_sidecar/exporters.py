# SPDX-License-Identifier: Apache-2.0
"""Makes the SDK's exporters that a signal (spans, metrics, events) asks for.

They are made without arguments, so that endpoints, headers, certificates and time limits are what the environment says
and nothing else. Each protocol brings some 10 MiB of modules: only the one that is used is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_kvfix_sidecar.telemetry_settings import CONSOLE, GRPC, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_kvfix_sidecar.telemetry_settings import Signal

_PACKAGE = "opentelemetry.exporter.otlp.proto"


def make(signal: Signal, what: str, otlp: tuple[str, str], console: Callable[[], Any]) -> list[Any]:
    """The exporters of a signal.

    Args:
        signal: What is asked for.
        what: What they send, for an error.
        otlp: Module and class of the OTLP exporter, the same in the package of each protocol.
        console: Makes the exporter that prints.

    Raises:
        SettingError: The environment has what an exporter cannot use.
    """
    try:
        return [console() if kind == CONSOLE else _otlp(signal.protocol, *otlp) for kind in signal.exporters]
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingError(f"the exporter of {what} cannot use its OTEL_EXPORTER_OTLP_* variables: {error}") from error


def _otlp(protocol: str, module: str, class_name: str) -> Any:
    package = "grpc" if protocol == GRPC else "http"
    return getattr(import_module(f"{_PACKAGE}.{package}.{module}"), class_name)()
