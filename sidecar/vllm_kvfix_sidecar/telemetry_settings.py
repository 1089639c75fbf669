# SPDX-License-Identifier: Apache-2.0
"""What the ``OTEL_*`` variables ask for, checked; endpoints, headers and certificates are left to the exporters.

Names and defaults are those of the OpenTelemetry specification, and of its Python SDK where the two differ. A value
that cannot be honoured is an error: none is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GRPC = "grpc"
HTTP = "http/protobuf"
OTLP = "otlp"
CONSOLE = "console"
# A pull exporter: /metrics is always served, so asking for it asks for nothing more.
PROMETHEUS = "prometheus"

_EXPORTERS = {
    "none": None,
    OTLP: OTLP,
    "otlp_proto_grpc": OTLP,
    "otlp_proto_http": OTLP,
    CONSOLE: CONSOLE,
}
_PROTOCOL_OF_EXPORTER = {"otlp_proto_grpc": GRPC, "otlp_proto_http": HTTP}
_SAMPLERS = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
_TEMPORALITIES = ("cumulative", "delta", "lowmemory")
_EXEMPLAR_FILTERS = ("trace_based", "always_on", "always_off")
_COMPRESSIONS = ("none", "gzip", "deflate")
_FILES = (
    "OTEL_EXPORTER_OTLP{}_CERTIFICATE",
    "OTEL_EXPORTER_OTLP{}_CLIENT_KEY",
    "OTEL_EXPORTER_OTLP{}_CLIENT_CERTIFICATE",
)
_LIMITS = (
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_SPAN_LINK_COUNT_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LOGRECORD_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LOGRECORD_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
)
_LEVELS = {
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "fatal": "error",
}


class SettingError(ValueError):
    """A variable or an option has a value that cannot be used; the message names it, the value and what would do."""


@dataclass(frozen=True)
class Signal:
    """Where spans, metrics, or events go: the exporters' kinds (``otlp``, ``console``), and how ``otlp`` speaks."""

    exporters: tuple[str, ...]
    protocol: str

    @property
    def text(self) -> str:
        """For a log line."""
        return ", ".join(f"{OTLP} ({self.protocol})" if kind == OTLP else kind for kind in self.exporters) or "none"


@dataclass(frozen=True)
class Batches:
    """How a queue is emptied: ``queue`` and ``batch`` in pieces, ``delay_ms`` between batches."""

    queue: int
    batch: int
    delay_ms: float


@dataclass(frozen=True)
class Telemetry:
    """What is exported and how.

    ``queue`` and ``batch`` in spans, ``batch_delay_ms`` between batches; metrics every ``interval_s``, each export
    given up after ``timeout_s``; ``temporality``: cumulative, delta or lowmemory, as the specification has them.
    ``logs``: where events go, as log records; none of the sidecar's own log.
    """

    disabled: bool
    traces: Signal
    metrics: Signal
    logs: Signal
    events: Batches
    queue: int
    batch: int
    batch_delay_ms: float
    interval_s: float
    timeout_s: float
    temporality: str
    exemplars: bool


def read(environ: Mapping[str, str]) -> Telemetry:
    """What ``environ`` asks for.

    Raises:
        SettingError: A variable has a value that cannot be honoured.
    """
    if _get(environ, "OTEL_CONFIG_FILE"):
        raise SettingError(
            "OTEL_CONFIG_FILE is not supported: say what the file says by the other OTEL_* variables, and unset it"
        )
    disabled = _boolean(environ, "OTEL_SDK_DISABLED")
    spans, events = _batches(environ, "OTEL_BSP", 5000), _batches(environ, "OTEL_BLRP", 1000)
    _check_the_rest(environ)
    return Telemetry(
        disabled=disabled,
        traces=_signal(environ, "TRACES", disabled=disabled),
        metrics=_signal(environ, "METRICS", disabled=disabled),
        logs=_signal(environ, "LOGS", disabled=disabled),
        events=events,
        queue=spans.queue,
        batch=spans.batch,
        batch_delay_ms=spans.delay_ms,
        interval_s=_positive(environ, "OTEL_METRIC_EXPORT_INTERVAL", 60000) / 1000,
        timeout_s=_positive(environ, "OTEL_METRIC_EXPORT_TIMEOUT", 30000) / 1000,
        temporality=_one_of(environ, "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", _TEMPORALITIES, "cumulative"),
        exemplars=_one_of(environ, "OTEL_METRICS_EXEMPLAR_FILTER", _EXEMPLAR_FILTERS, "trace_based") != "always_off",
    )


def _batches(environ: Mapping[str, str], prefix: str, delay_ms: float) -> Batches:
    queue = _whole(environ, f"{prefix}_MAX_QUEUE_SIZE", 2048)
    batch = _whole(environ, f"{prefix}_MAX_EXPORT_BATCH_SIZE", min(512, queue))
    if batch > queue:
        raise SettingError(f"{prefix}_MAX_EXPORT_BATCH_SIZE={batch} is more than {prefix}_MAX_QUEUE_SIZE={queue}")
    _positive(environ, f"{prefix}_EXPORT_TIMEOUT", 30000)
    return Batches(queue, batch, _positive(environ, f"{prefix}_SCHEDULE_DELAY", delay_ms))


def log_level(environ: Mapping[str, str]) -> str:
    """The level that ``OTEL_LOG_LEVEL`` names; unset: info."""
    return _LEVELS[_one_of(environ, "OTEL_LOG_LEVEL", tuple(_LEVELS), "info")]


def _check_the_rest(environ: Mapping[str, str]) -> None:
    """What the SDK reads itself, and would replace by a default, or by a traceback, if it cannot use it."""
    for name in _with_signals("OTEL_EXPORTER_OTLP{}_TIMEOUT"):
        _positive(environ, name, 10)
    for name in _with_signals("OTEL_EXPORTER_OTLP{}_COMPRESSION"):
        _one_of(environ, name, _COMPRESSIONS, "none")
    for name in _LIMITS:
        _number(environ, name, 0, lambda value: value >= 0 and value.is_integer(), "a whole number from 0 on")
    for template in _FILES:
        for name in _with_signals(template):
            _readable(environ, name)
    _one_of(
        environ,
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
        ("explicit_bucket_histogram",),
        "explicit_bucket_histogram",
    )
    plugins = {point.name for point in entry_points(group="opentelemetry_traces_sampler")}
    sampler = _one_of(
        environ, "OTEL_TRACES_SAMPLER", (*_SAMPLERS, *sorted(plugins.difference(_SAMPLERS))), _SAMPLERS[3]
    )
    if sampler.endswith("traceidratio"):
        _number(environ, "OTEL_TRACES_SAMPLER_ARG", 1, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _readable(environ: Mapping[str, str], name: str) -> None:
    path = _get(environ, name)
    try:
        if path:
            Path(path).read_bytes()
    except OSError as error:
        raise _error(name, path, f"a file that can be read, and this one cannot: {error.strerror}") from error


def _with_signals(template: str) -> Sequence[str]:
    return [template.format(signal) for signal in ("", "_TRACES", "_METRICS", "_LOGS")]


def _signal(environ: Mapping[str, str], signal: str, *, disabled: bool) -> Signal:
    names = _exporter_names(environ, signal)
    variable = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    if not _get(environ, variable):
        variable = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = _one_of(environ, variable, (GRPC, HTTP), GRPC)
    for name in names:
        protocol = _PROTOCOL_OF_EXPORTER.get(name, protocol)
    kinds = [kind for name in names if (kind := _EXPORTERS.get(name))]
    return Signal(() if disabled else tuple(dict.fromkeys(kinds)), protocol)


def _exporter_names(environ: Mapping[str, str], signal: str) -> list[str]:
    variable = f"OTEL_{signal}_EXPORTER"
    allowed = (*_EXPORTERS, PROMETHEUS) if signal == "METRICS" else tuple(_EXPORTERS)
    asked = _get(environ, variable)
    if not asked:
        has_endpoint = any(
            _get(environ, name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        )
        return [OTLP] if has_endpoint else []
    names = [name.strip().lower() for name in asked.split(",")]
    for name in names:
        if name not in allowed:
            raise _error(variable, asked, _listed(allowed))
    return names


def _get(environ: Mapping[str, str], name: str) -> str:
    """An empty value is as good as none."""
    return environ.get(name, "").strip()


def _boolean(environ: Mapping[str, str], name: str) -> bool:
    return _one_of(environ, name, ("true", "false"), "false") == "true"


def _one_of(environ: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = _get(environ, name)
    if value and value.lower() not in allowed:
        raise _error(name, value, _listed(allowed))
    return value.lower() or default


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    return int(
        _number(environ, name, default, lambda value: value >= 1 and value.is_integer(), "a whole number from 1 on")
    )


def _positive(environ: Mapping[str, str], name: str, default: float) -> float:
    return _number(environ, name, default, lambda value: value > 0, "a number above 0")


def _number(
    environ: Mapping[str, str], name: str, default: float, fits: Callable[[float], bool], allowed: str
) -> float:
    text = _get(environ, name)
    if not text:
        return float(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise _error(name, text, allowed)
    return value


def _listed(allowed: Sequence[str]) -> str:
    return ", ".join(allowed)


def _error(name: str, value: str, allowed: str) -> SettingError:
    return SettingError(f"{name}={value} cannot be used; allowed: {allowed}")
