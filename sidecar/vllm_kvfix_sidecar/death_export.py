# SPDX-License-Identifier: Apache-2.0
"""The end of a process as a span over its last seconds and as an event, both with its own times.

The ids are those of a request with the number 0, which no request has: the same for whoever reads the ring, so that
what a sidecar has told, and somebody exports by hand once more, is the same span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from vllm_kvfix_sidecar import conventions, event_export
from vllm_kvfix_sidecar import death as deaths
from vllm_kvfix_sidecar.episodes import growth_attributes
from vllm_kvfix_sidecar.requests import SpanIds
from vllm_kvfix_sidecar.words import clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk._logs import ReadWriteLogRecord
    from opentelemetry.sdk.trace import SpanLimits
    from opentelemetry.util.types import AttributeValue

    from vllm_kvfix_sidecar.death import Death

MOST_SENTENCES = 16
LONGEST_SENTENCE = 500
_SCOPE = InstrumentationScope(conventions.SCOPE_NAME, conventions.SCOPE_VERSION)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_MOST_INT = (1 << 63) - 1
_MOST_TIME = (1 << 64) - 1


def span(death: Death, resource: Resource, limits: SpanLimits) -> ReadableSpan:
    """The span: from the beginning of the last seconds that were told, to the last sign of life."""
    end = _time(death.ended_unix_ns)
    most, longest = limits.max_span_attributes, limits.max_span_attribute_length
    failed = death.is_alarming
    return ReadableSpan(
        name=conventions.DEATH_SPAN_NAME,
        context=_context(death),
        resource=_resource(death, resource),
        attributes=BoundedAttributes(most, attributes(death), max_value_len=longest),
        events=BoundedList.from_seq(limits.max_events, list(_events(death, limits))),
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, _short(deaths.sentence(death))) if failed else Status(),
        start_time=min(end, max(_time(death.words.started_unix_ns), end - int(death.words.seconds * 1e9), 0)),
        end_time=end,
        instrumentation_scope=_SCOPE,
    )


def event(death: Death, resource: Resource) -> ReadWriteLogRecord:
    """The event; it belongs to the span."""
    return event_export.event(
        conventions.EVENT_DEATH,
        _time(death.ended_unix_ns),
        alarming=death.is_alarming,
        body=_short(deaths.sentence(death)),
        attributes=attributes(death),
        span=_context(death),
        resource=_resource(death, resource),
    )


def _context(death: Death) -> SpanContext:
    header = death.words.header
    ids = SpanIds(header.boot_id, header.pid, header.start_time, death.words.path.name)
    return SpanContext(*ids.of(0, None), False, _SAMPLED)  # noqa: FBT003  # its signature


def _resource(death: Death, resource: Resource) -> Resource:
    header = death.words.header
    mine: dict[str, AttributeValue] = {conventions.ATTR_PID: _int(header.pid), conventions.ATTR_ROLE: header.role}
    if header.vllm_version:
        mine[conventions.ATTR_VLLM_VERSION] = clean(header.vllm_version, 64)
    return resource.merge(Resource(mine))


def _events(death: Death, limits: SpanLimits) -> Iterator[Event]:
    words, most, longest = death.steps, limits.max_event_attributes, limits.max_attribute_length
    told: list[tuple[str, int, Mapping[str, AttributeValue]]] = []
    if words.last_step is not None:
        told.append((conventions.EVENT_LAST_STEP, words.unix_ns(words.last_step.time), _step(death)))
    told.append((conventions.EVENT_DEATH, death.ended_unix_ns, {}))
    for name, time, attributes in told:
        yield Event(name, BoundedAttributes(most, attributes, max_value_len=longest), _time(time))


def attributes(death: Death) -> dict[str, AttributeValue]:
    """What span and event say; what is not known is not there."""
    words, use, process = death.words, death.use, death.process
    rows = death.steps.rows
    seconds = sum(row.seconds for row in rows)
    told: dict[str, AttributeValue | None] = {
        conventions.ATTR_DEATH_END: death.end.value.replace(" ", "_"),
        conventions.ATTR_DEATH_REASON: clean(words.header.end_reason, 128) or None,
        conventions.ATTR_DEATH_OOM: death.oom.oom.value.replace(" ", "_"),
        conventions.ATTR_DEATH_EVIDENCE: _sentences(death.oom.evidence),
        conventions.ATTR_DEATH_OTHERS: _sentences(death.others),
        conventions.ATTR_DEATH_LOST: death.lost_requests,
        conventions.ATTR_DEATH_RSS: _maybe(process.figures.get("status.rss")),
        conventions.ATTR_DEATH_USAGE: _maybe(None if use is None else int(use.usage)),
        conventions.ATTR_DEATH_LIMIT: _maybe(None if use is None else int(use.limit)),
        conventions.ATTR_DEATH_LIMIT_OF: None if use is None else use.of,
        conventions.ATTR_DEATH_RING: clean(str(words.path)),
        conventions.ATTR_DEATH_STEPS: sum(row.steps for row in rows) / seconds if seconds > 0 else None,
        **_step(death),
    }
    if process.verdict.slope is not None:
        told |= growth_attributes(process.verdict)
    return {name: value for name, value in told.items() if value is not None}


def _step(death: Death) -> dict[str, AttributeValue]:
    step = death.steps.last_step
    if step is None:
        return {}
    return {
        conventions.ATTR_STEP_RUNNING: step.running,
        conventions.ATTR_STEP_WAITING: step.waiting,
        conventions.ATTR_STEP_FREE: step.free,
    }


def _sentences(said: tuple[str, ...]) -> tuple[str, ...] | None:
    return tuple(map(_short, said[:MOST_SENTENCES])) or None


def _short(text: str) -> str:
    return clean(text, LONGEST_SENTENCE)


def _maybe(value: int | None) -> int | None:
    return None if value is None else _int(value)


def _int(value: int) -> int:
    return min(value, _MOST_INT)


def _time(unix_ns: int) -> int:
    return min(max(0, unix_ns), _MOST_TIME)
