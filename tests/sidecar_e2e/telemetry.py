# SPDX-License-Identifier: Apache-2.0
"""What came over OTLP, decoded from its protobuf messages into small values that a test can compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
    from opentelemetry.proto.metrics.v1 import metrics_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2

    Attributes: TypeAlias = "dict[str, object]"


class SpanEvent(NamedTuple):
    """An event of a span; ``time`` in unix ns."""

    name: str
    time: int
    attributes: Attributes


class Link(NamedTuple):
    """A link of a span to another one."""

    trace_id: int
    span_id: int
    attributes: Attributes


class Scope(NamedTuple):
    """Name and version of what made it."""

    name: str
    version: str


class Dropped(NamedTuple):
    """How many of each a span has lost to its limits."""

    attributes: int
    events: int
    links: int


class Span(NamedTuple):
    """A span; ids as numbers, ``parent_id`` 0 where there is none, times in unix ns, enumerations as OTLP numbers."""

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    kind: int
    start: int
    end: int
    attributes: Attributes
    events: tuple[SpanEvent, ...]
    links: tuple[Link, ...]
    status: int
    message: str
    flags: int
    dropped: Dropped
    scope: Scope
    resource: Attributes


class LogRecord(NamedTuple):
    """A log record; ids as numbers, 0 where there are none, times in unix ns, ``severity`` as OTLP's number."""

    event: str
    body: object
    time: int
    severity: int
    trace_id: int
    span_id: int
    attributes: Attributes
    scope: Scope
    resource: Attributes


class Exemplar(NamedTuple):
    """One measured value of a point, and the span that it came from; ``time`` in unix ns."""

    value: float
    time: int
    trace_id: int
    span_id: int
    attributes: Attributes


class Histogram(NamedTuple):
    """What a histogram point holds instead of one value."""

    total: int
    sum: float
    buckets: tuple[int, ...]
    bounds: tuple[float, ...]
    least: float | None
    most: float | None


class Point(NamedTuple):
    """One data point with the metric that it belongs to.

    ``kind`` is ``gauge``, ``sum`` or ``histogram``; ``temporality`` 1 delta, 2 cumulative, 0 for a gauge; ``value`` is
    None in a histogram, ``histogram`` None elsewhere; ``start`` and ``time`` in unix ns.
    """

    name: str
    unit: str
    description: str
    kind: str
    monotonic: bool
    temporality: int
    attributes: Attributes
    start: int
    time: int
    value: float | None
    histogram: Histogram | None
    exemplars: tuple[Exemplar, ...]
    scope: Scope
    resource: Attributes


def decode_spans(body: bytes) -> list[Span]:
    """The spans in the body of an OTLP trace request."""
    return spans_of(ExportTraceServiceRequest.FromString(body))


def spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    """The spans in an OTLP trace request."""
    return [
        _span(span, _scope(scoped.scope), _attributes(resource.resource.attributes))
        for resource in request.resource_spans
        for scoped in resource.scope_spans
        for span in scoped.spans
    ]


def decode_logs(body: bytes) -> list[LogRecord]:
    """The log records in the body of an OTLP logs request."""
    return [
        LogRecord(
            event=record.event_name,
            body=_any(record.body),
            time=record.time_unix_nano,
            severity=record.severity_number,
            trace_id=_number(record.trace_id),
            span_id=_number(record.span_id),
            attributes=_attributes(record.attributes),
            scope=_scope(scoped.scope),
            resource=_attributes(resource.resource.attributes),
        )
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for scoped in resource.scope_logs
        for record in scoped.log_records
    ]


def decode_points(body: bytes) -> list[Point]:
    """The data points in the body of an OTLP metrics request."""
    return points_of(ExportMetricsServiceRequest.FromString(body))


def points_of(request: ExportMetricsServiceRequest) -> list[Point]:
    """The data points in an OTLP metrics request."""
    return [
        point
        for resource in request.resource_metrics
        for scoped in resource.scope_metrics
        for metric in scoped.metrics
        for point in _points(metric, _scope(scoped.scope), _attributes(resource.resource.attributes))
    ]


def _span(span: trace_pb2.Span, scope: Scope, resource: Attributes) -> Span:
    return Span(
        trace_id=_number(span.trace_id),
        span_id=_number(span.span_id),
        parent_id=_number(span.parent_span_id),
        name=span.name,
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(SpanEvent(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in span.events),
        links=tuple(Link(_number(k.trace_id), _number(k.span_id), _attributes(k.attributes)) for k in span.links),
        status=span.status.code,
        message=span.status.message,
        flags=span.flags,
        dropped=Dropped(span.dropped_attributes_count, span.dropped_events_count, span.dropped_links_count),
        scope=scope,
        resource=resource,
    )


def _points(metric: metrics_pb2.Metric, scope: Scope, resource: Attributes) -> Iterator[Point]:
    kind = metric.WhichOneof("data")
    if kind not in {"gauge", "sum", "histogram"}:
        raise ValueError(f"{metric.name} is a {kind}, which no test here expects")
    data = getattr(metric, kind)
    for point in data.data_points:
        yield Point(
            name=metric.name,
            unit=metric.unit,
            description=metric.description,
            kind=kind,
            monotonic=kind == "sum" and data.is_monotonic,
            temporality=0 if kind == "gauge" else data.aggregation_temporality,
            attributes=_attributes(point.attributes),
            start=point.start_time_unix_nano,
            time=point.time_unix_nano,
            value=None if kind == "histogram" else _value(point),
            histogram=_histogram(point) if kind == "histogram" else None,
            exemplars=tuple(map(_exemplar, point.exemplars)),
            scope=scope,
            resource=resource,
        )


def _histogram(point: metrics_pb2.HistogramDataPoint) -> Histogram:
    least = point.min if point.HasField("min") else None
    most = point.max if point.HasField("max") else None
    return Histogram(point.count, point.sum, tuple(point.bucket_counts), tuple(point.explicit_bounds), least, most)


def _exemplar(exemplar: metrics_pb2.Exemplar) -> Exemplar:
    return Exemplar(
        value=_value(exemplar),
        time=exemplar.time_unix_nano,
        trace_id=_number(exemplar.trace_id),
        span_id=_number(exemplar.span_id),
        attributes=_attributes(exemplar.filtered_attributes),
    )


def _value(holder: metrics_pb2.NumberDataPoint | metrics_pb2.Exemplar) -> float:
    return holder.as_int if holder.WhichOneof("value") == "as_int" else holder.as_double


def _number(identifier: bytes) -> int:
    return int.from_bytes(identifier, "big")


def _scope(scope: InstrumentationScope) -> Scope:
    return Scope(scope.name, scope.version)


def _attributes(pairs: Iterable[KeyValue]) -> Attributes:
    return {pair.key: _any(pair.value) for pair in pairs}


def _any(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(map(_any, value.array_value.values))
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return None if kind is None else getattr(value, kind)
