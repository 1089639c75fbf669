# SPDX-License-Identifier: Apache-2.0
"""Makes a span of a request that is over, if it is to be kept.

Kept is what the sampler of ``OTEL_TRACES_SAMPLER`` takes, and beside that whatever explains trouble: requests that were
preempted, refused, aborted or failed, whose engine ended, that another was preempted for, or that held their blocks
longest. A span says in ``vllm_kvfix.sampling.reason`` why it was kept. The sampler is asked when the request is over,
without attributes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from vllm_kvfix.events import Admitted, Preempted, Refused
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.details import Merged, blocks_of
from vllm_kvfix_sidecar.requests import ENGINE_ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
    from opentelemetry.util.types import AttributeValue

    from vllm_kvfix.events import TraceContext
    from vllm_kvfix_sidecar.details import Detail
    from vllm_kvfix_sidecar.export import SpanSink
    from vllm_kvfix_sidecar.requests import RequestRecord, Taker

_SCOPE = InstrumentationScope(conventions.SCOPE_NAME, conventions.SCOPE_VERSION)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NO_PARENT = Context()
_FAILED = frozenset({"error", ENGINE_ENDED})
_KEPT_REASONS = _FAILED | {"abort"}
_MOST_INT = (1 << 63) - 1
_MOST_TIME = (1 << 64) - 1


class LongestHeld:
    """Tells which requests held their blocks longest: longer than all but one in ``ONE_IN`` of the last ``WINDOW``.

    Held is in block-microseconds. At most one a second of the engine's clock; none before ``WINDOW_STEP`` were seen.
    The bound is found anew every ``WINDOW_STEP`` requests.
    """

    WINDOW = 1_000
    WINDOW_STEP = 100
    ONE_IN = 200
    SPACING_NS = 1_000_000_000

    def __init__(self) -> None:
        self._window: deque[int] = deque(maxlen=self.WINDOW)
        self._new = 0
        self._bound: int | None = None
        self._last: int | None = None

    def take(self, held: int, time_ns: int) -> bool:
        """Whether this one, which ended at ``time_ns``, is among the longest."""
        longest = self._bound is not None and held > self._bound and self._is_time(time_ns)
        self._window.append(held)
        self._new += 1
        if self._new >= self.WINDOW_STEP:
            self._new = 0
            self._bound = sorted(self._window)[-max(1, len(self._window) // self.ONE_IN)]
        if longest:
            self._last = time_ns
        return longest

    def _is_time(self, time_ns: int) -> bool:
        return self._last is None or abs(time_ns - self._last) >= self.SPACING_NS


class SpanMaker:
    """What is the same for all engines. ``accepted`` counts spans that the sink took, ``unsampled`` those not made."""

    def __init__(
        self, sampler: Sampler, resource: Resource, sink: SpanSink | None, limits: SpanLimits | None = None
    ) -> None:
        self.sampler = sampler
        self.resource = resource
        self.sink = sink
        self.limits = limits or SpanLimits()
        self.accepted = 0
        self.unsampled = 0

    def hand_on(self, span: ReadableSpan) -> bool:
        """Give a span to the sink; whether that took it."""
        taken = self.sink is not None and self.sink.emit(span)
        self.accepted += taken
        return taken

    def engine(self, pid: int, index: int, vllm_version: str) -> EngineSpans:
        """The maker of one engine's spans."""
        attributes: dict[str, AttributeValue] = {
            conventions.ATTR_PID: _int(pid),
            conventions.ATTR_ENGINE_INDEX: _int(index),
            conventions.ATTR_VLLM_VERSION: vllm_version,
        }
        return EngineSpans(self, self.resource.merge(Resource(attributes)))


class EngineSpans:
    """Makes the spans of one engine."""

    def __init__(self, maker: SpanMaker, resource: Resource) -> None:
        self._maker = maker
        self._limits = maker.limits
        self._resource = resource
        self._longest = LongestHeld()

    def tell(self, record: RequestRecord, clock_offset_ns: int) -> SpanContext | None:
        """Make the span and hand it to the sink, if it is to be kept; its context if the sink took it.

        Args:
            record: A request that is over.
            clock_offset_ns: Unix time less the engine's monotonic clock.
        """
        maker = self._maker
        if maker.sink is None:
            return None
        parent = _parent(record.context)
        context = set_span_in_context(NonRecordingSpan(parent), _NO_PARENT) if parent else _NO_PARENT
        result = maker.sampler.should_sample(context, record.trace_id, conventions.SPAN_NAME, SpanKind.INTERNAL)
        longest = self._longest.take(record.held_block_us, record.end)
        reason = "sampler" if result.decision is Decision.RECORD_AND_SAMPLE else _keep_reason(record, longest=longest)
        if reason is None:
            maker.unsampled += 1
            return None
        span = self._span(record, parent, clock_offset_ns, reason, result)
        return span.get_span_context() if maker.hand_on(span) else None

    def _span(
        self,
        record: RequestRecord,
        parent: SpanContext | None,
        offset: int,
        reason: str,
        result: SamplingResult,
    ) -> ReadableSpan:
        limits = self._limits
        failed = record.reason in _FAILED
        return ReadableSpan(
            name=conventions.SPAN_NAME,
            context=SpanContext(record.trace_id, record.span_id, False, _SAMPLED, result.trace_state),  # noqa: FBT003  # its signature
            parent=parent,
            resource=self._resource,
            attributes=self._bounded(dict(result.attributes) | _attributes(record, reason)),
            events=self._events(record, offset),
            links=BoundedList.from_seq(limits.max_links, [self._link(t) for t in record.takers if t.span_id]),
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, record.reason) if failed else Status(),
            start_time=_unix(record.arrival, offset),
            end_time=_unix(record.freed_at, offset),
            instrumentation_scope=_SCOPE,
        )

    def _bounded(self, attributes: dict[str, AttributeValue]) -> Mapping[str, AttributeValue]:
        most, longest = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        return _bounded(attributes, most, longest)

    def _events(self, record: RequestRecord, offset: int) -> BoundedList[Event]:
        most, longest = self._limits.max_event_attributes, self._limits.max_attribute_length
        made = [
            Event(name, _bounded(attributes, most, longest), _unix(time, offset))
            for name, time, attributes in map(_event, record.details)
        ]
        if record.freed_at > record.end:
            made.append(Event(conventions.EVENT_FINISHED, {}, _unix(record.end, offset)))
        bounded = BoundedList.from_seq(self._limits.max_events, made)
        bounded.dropped += record.dropped_details
        return bounded

    def _link(self, taker: Taker) -> Link:
        attributes = {str(conventions.LINK_KIND): str(conventions.LINK_TAKEN_BY)}
        most, longest = self._limits.max_link_attributes, self._limits.max_attribute_length
        # Whether the taker's span is sampled is not known yet, but a taker's always is: see _keep_reason.
        context = SpanContext(taker.trace_id, taker.span_id, True, _SAMPLED)  # noqa: FBT003  # its signature
        return Link(context, _bounded({**attributes}, most, longest))


def _parent(context: TraceContext | None) -> SpanContext | None:
    if context is None:
        return None
    return SpanContext(context.trace_id, context.parent_id, True, TraceFlags(context.flags))  # noqa: FBT003  # its signature


def _keep_reason(record: RequestRecord, *, longest: bool) -> str | None:
    """Why a request is kept that the sampler does not take; None where nothing speaks for it."""
    if record.preemptions:
        return "preempted"
    if record.reason in _KEPT_REASONS:
        return record.reason
    if record.took_blocks:
        return "took_blocks"
    if record.refusals:
        return "refused"
    return "longest_held" if longest else None


def _unix(time_ns: int, offset: int) -> int:
    return min(max(0, time_ns + offset), _MOST_TIME)


def _int(value: int) -> int:
    """What fits the protocol's int64; the exporter leaves a larger one out, and logs a traceback for each."""
    return min(value, _MOST_INT)


def _bounded(
    attributes: dict[str, AttributeValue], most: int | None, longest: int | None
) -> Mapping[str, AttributeValue]:
    """The attributes within the limits; as they are where they keep them, since the other way costs a third."""
    if longest is None and (most is None or len(attributes) <= most):
        return attributes
    return BoundedAttributes(most, attributes, max_value_len=longest)


def _attributes(record: RequestRecord, reason: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        conventions.ATTR_REQUEST_ID: conventions.caller_id(record.request_id),
        conventions.ATTR_ENGINE_REQUEST_ID: record.request_id,
        conventions.ATTR_FINISH_REASON: record.reason,
        conventions.ATTR_SAMPLING_REASON: reason,
        conventions.ATTR_INPUT_TOKENS: _int(record.prompt_tokens),
        conventions.ATTR_OUTPUT_TOKENS: record.output_tokens,
        conventions.ATTR_HIT_TOKENS: record.hit_tokens,
        conventions.ATTR_EXTERNAL_TOKENS: record.external_tokens,
        conventions.ATTR_PEAK_BLOCKS: _int(record.peak_blocks),
        conventions.ATTR_BLOCK_SECONDS: record.held_block_us / 1e6,
        conventions.ATTR_NEW_BLOCKS: record.new_blocks,
        conventions.ATTR_REUSED_BLOCKS: record.reused_blocks,
        conventions.ATTR_GROUP_NEW_BLOCKS: tuple(blocks.new for blocks in record.groups),
        conventions.ATTR_GROUP_REUSED_BLOCKS: tuple(blocks.reused for blocks in record.groups),
        conventions.ATTR_PREEMPTIONS: record.preemptions,
        conventions.ATTR_REFUSALS: record.refusals,
        conventions.ATTR_TOOK_BLOCKS: record.took_blocks,
    }
    if record.admission:
        attributes[conventions.ATTR_QUEUE_DURATION] = (record.admission - record.arrival) / 1e9
        attributes[conventions.ATTR_RESIDENCY] = (record.freed_at - record.admission) / 1e9
    if record.dropped_details:
        attributes[conventions.ATTR_DROPPED_DETAILS] = record.dropped_details
    return attributes


def _event(detail: Detail) -> tuple[str, int, dict[str, AttributeValue]]:
    """Name, time and attributes of the event of a detail."""
    if isinstance(detail, Refused):
        return conventions.EVENT_REFUSED, detail.time, {}
    if isinstance(detail, Preempted):
        lost: dict[str, AttributeValue] = {conventions.ATTR_RELEASED_BLOCKS: _int(detail.released)}
        if detail.taker:
            lost[conventions.ATTR_TAKER] = _int(detail.taker)
        return conventions.EVENT_PREEMPTED, detail.time, lost
    groups = blocks_of(detail)
    attributes: dict[str, AttributeValue] = {
        conventions.ATTR_NEW_BLOCKS: _int(sum(blocks.new for blocks in groups)),
    }
    if isinstance(detail, Admitted):
        attributes[conventions.ATTR_REUSED_BLOCKS] = sum(blocks.reused for blocks in groups)
        attributes[conventions.ATTR_HIT_TOKENS] = detail.hit_tokens
        attributes[conventions.ATTR_EXTERNAL_TOKENS] = detail.external_tokens
        return conventions.EVENT_RESUMED if detail.resumed else conventions.EVENT_ADMITTED, detail.time, attributes
    if isinstance(detail, Merged):
        attributes[conventions.ATTR_ALLOCATIONS] = detail.steps
    return conventions.EVENT_ALLOCATED, detail.time, attributes
