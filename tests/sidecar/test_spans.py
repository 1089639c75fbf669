# SPDX-License-Identifier: Apache-2.0
"""spans: what is worth keeping becomes a span with true times, and nothing in it can spoil a batch."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import SpanKind, StatusCode

from tests.sidecar.fake_engine import SECOND, Sink, admitted, allocated, arrived, finished, step
from vllm_kvfix import events
from vllm_kvfix.events import Blocks, Freed, Preempted, Refused, TraceContext
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar.metrics import SpanCounts
from vllm_kvfix_sidecar.requests import RequestRecord, RequestTracker, SpanIds, Taker
from vllm_kvfix_sidecar.spans import LongestHeld, SpanMaker

if TYPE_CHECKING:
    from collections.abc import Sequence

OFFSET = 1_800_000_000 * SECOND
CALLER = TraceContext(0xABC << 64 | 1, 0xDEF, 1)


def record_of(*happened: events.Event) -> RequestRecord:
    """The first record that these events give."""
    tracker = RequestTracker(SpanIds(bytes(16), 7, 8, "a.ring"))
    return tracker.consume([word for event in happened for word in events.encode(event)])[0]


class Made:
    """A maker with its sink."""

    def __init__(self, sampler: Sampler = ALWAYS_ON, **limits: Any) -> None:
        self.sink = Sink(SpanCounts())
        self.maker = SpanMaker(sampler, Resource({"service.name": "s"}), self.sink, SpanLimits(**limits))
        self.engine = self.maker.engine(7, 3, "0.25.1")

    def span(self, record: RequestRecord) -> ReadableSpan:
        """The one span that a record gives."""
        assert self.engine.tell(record, OFFSET) is not None
        (span,) = self.sink.spans
        return span


class TestContent:
    """What a span says."""

    def test_a_preempted_requests_span_tells_its_life(self) -> None:
        """Times are the ring's plus one offset; each event has its time, its blocks, and the taker of lost ones."""
        span = Made().span(
            record_of(
                arrived(1, context=CALLER),
                arrived(2),
                step(2 * SECOND),
                Refused(1, 0),
                admitted(1),
                step(3 * SECOND),
                allocated(1, new=4),
                Preempted(1, 3 * SECOND + 5, 11, 2),
                step(5 * SECOND),
                admitted(1, resumed=True),
                finished(1, CALLER, time=6 * SECOND, preemptions=1, refusals=2),
            )
        )
        assert (span.name, span.kind) == (names.SPAN_NAME, SpanKind.INTERNAL)
        assert (span.start_time, span.end_time) == (OFFSET + SECOND, OFFSET + 6 * SECOND)
        got = {names.ATTR_NEW_BLOCKS: 5, names.ATTR_REUSED_BLOCKS: 2, names.ATTR_HIT_TOKENS: 32}
        began = {**got, names.ATTR_EXTERNAL_TOKENS: 3}
        assert [(event.name, event.timestamp - OFFSET, dict(event.attributes or {})) for event in span.events] == [
            (names.EVENT_REFUSED, 2 * SECOND, {}),
            (names.EVENT_ADMITTED, 2 * SECOND, began),
            (names.EVENT_ALLOCATED, 3 * SECOND, {names.ATTR_NEW_BLOCKS: 4}),
            (names.EVENT_PREEMPTED, 3 * SECOND + 5, {names.ATTR_RELEASED_BLOCKS: 11, names.ATTR_TAKER: 2}),
            (names.EVENT_RESUMED, 5 * SECOND, began),
        ]
        (link,) = span.links
        trace_id, span_id = SpanIds(bytes(16), 7, 8, "a.ring").of(2, None)
        assert (link.context.trace_id, link.context.span_id) == (trace_id, span_id)
        assert dict(link.attributes or {}) == {names.LINK_KIND: names.LINK_TAKEN_BY}

    def test_a_taker_whose_span_is_not_known_is_not_linked(self) -> None:
        """A link to no span is none; the number of the taker still stands in the event."""
        span = Made().span(record_of(Preempted(1, SECOND, 7, 2), finished(1, preemptions=1)))
        assert (span.links, dict(span.events[0].attributes or {})[names.ATTR_TAKER]) == ((), 2)

    def test_the_span_is_a_child_of_the_callers(self) -> None:
        """Trace and parent are those of traceparent, from afar; without it the span is a root."""
        span = Made().span(record_of(finished(1, CALLER)))
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (CALLER.trace_id, CALLER.parent_id)
        assert span.parent.is_remote
        assert span.get_span_context().trace_id == CALLER.trace_id  # type: ignore[union-attr]  # it has one
        assert Made().span(record_of(finished(1))).parent is None

    def test_attributes_say_what_the_record_says(self) -> None:
        """Ids, tokens, blocks of each group, durations in seconds; the resource names the engine."""
        span = Made().span(record_of(finished(1, groups=(Blocks(2, 6), Blocks(0, 1)))))
        expected = {
            names.ATTR_REQUEST_ID: "cmpl-1",
            names.ATTR_ENGINE_REQUEST_ID: "cmpl-1-0a1b2c3d",
            names.ATTR_FINISH_REASON: "stop",
            names.ATTR_SAMPLING_REASON: "sampler",
            names.ATTR_INPUT_TOKENS: 100,
            names.ATTR_OUTPUT_TOKENS: 20,
            names.ATTR_HIT_TOKENS: 32,
            names.ATTR_EXTERNAL_TOKENS: 3,
            names.ATTR_PEAK_BLOCKS: 8,
            names.ATTR_BLOCK_SECONDS: 15.0,
            names.ATTR_NEW_BLOCKS: 7,
            names.ATTR_REUSED_BLOCKS: 2,
            names.ATTR_GROUP_NEW_BLOCKS: (6, 1),
            names.ATTR_GROUP_REUSED_BLOCKS: (2, 0),
            names.ATTR_PREEMPTIONS: 0,
            names.ATTR_REFUSALS: 0,
            names.ATTR_TOOK_BLOCKS: False,
            names.ATTR_QUEUE_DURATION: 1.0,
            names.ATTR_RESIDENCY: 2.0,
        }
        assert dict(span.attributes or {}) == expected
        resource = {
            "service.name": "s",
            "process.pid": 7,
            names.ATTR_ENGINE_INDEX: 3,
            names.ATTR_VLLM_VERSION: "0.25.1",
        }
        assert dict(span.resource.attributes) == resource

    def test_every_name_in_a_span_is_documented(self) -> None:
        """Attributes and events of the fullest span are those that conventions lists."""
        happened: list[events.Event] = [arrived(1), step(1), admitted(1), arrived(2), Preempted(1, 5, 1, 2)]
        happened += [allocated(1)] * 200 + [Refused(1, 0)] * 200
        span = Made().span(record_of(*happened, finished(1, freed=False), Freed(1, 9 * SECOND)))
        assert set(span.attributes or {}) <= set(names.SPAN_ATTRIBUTES)
        assert {event.name for event in span.events} <= set(names.EVENTS)
        assert {key for event in span.events for key in event.attributes or {}} <= set(names.EVENT_ATTRIBUTES)

    def test_a_request_whose_blocks_were_kept_says_when_it_finished(self) -> None:
        """The span lasts until the blocks are given back, and an event marks the request's end."""
        span = Made().span(record_of(finished(1, freed=False), Freed(1, 9 * SECOND)))
        assert span.end_time == OFFSET + 9 * SECOND
        assert [(event.name, event.timestamp) for event in span.events] == [(names.EVENT_FINISHED, OFFSET + 4 * SECOND)]

    @pytest.mark.parametrize(
        ("reason", "status"),
        [
            ("stop", StatusCode.UNSET),
            ("abort", StatusCode.UNSET),
            ("error", StatusCode.ERROR),
            ("engine_ended", StatusCode.ERROR),
        ],
    )
    def test_only_failures_are_errors(self, reason: str, status: StatusCode) -> None:
        """An abort is the caller's will; an error or a dead engine is none."""
        assert Made().span(record_of(finished(1))._replace(reason=reason)).status.status_code is status

    def test_one_that_never_ran_has_no_durations(self) -> None:
        """Without an admission there is no time in the queue to tell, nor one with blocks."""
        span = Made().span(record_of(finished(1, admission=0)))
        assert not {names.ATTR_QUEUE_DURATION, names.ATTR_RESIDENCY} & set(span.attributes or {})


class _Adding(Sampler):
    """A sampler of a user's own: adds an attribute."""

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        return SamplingResult(Decision.RECORD_AND_SAMPLE, {"rate": 0.5})

    def get_description(self) -> str:
        return "adding"


class TestSampling:
    """What is kept."""

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"preemptions": 1, "reason": "abort"}, "preempted"),
            ({"refusals": 1}, "refused"),
            ({"took_blocks": True, "refusals": 1}, "took_blocks"),
            ({"reason": "abort"}, "abort"),
            ({"reason": "error"}, "error"),
            ({"reason": "engine_ended"}, "engine_ended"),
        ],
    )
    def test_trouble_is_kept_whatever_the_sampler_says(self, changed: dict[str, Any], reason: str) -> None:
        """The span says why, and is marked as sampled, also below a parent that is not."""
        unsampled = CALLER._replace(flags=0)
        for context in (None, unsampled):
            span = Made(ParentBased(ALWAYS_OFF)).span(record_of(finished(1, context))._replace(**changed))
            assert (span.attributes or {})[names.ATTR_SAMPLING_REASON] == reason
            assert span.get_span_context().trace_flags.sampled  # type: ignore[union-attr]  # it has one

    def test_what_the_sampler_leaves_is_counted(self) -> None:
        """No span, no context, one more unsampled; and with no sink at all, nothing is counted."""
        made = Made(ALWAYS_OFF)
        assert made.engine.tell(record_of(finished(1)), OFFSET) is None
        assert (made.maker.unsampled, made.maker.accepted, made.sink.spans) == (1, 0, [])
        silent = SpanMaker(ALWAYS_ON, Resource({}), None)
        assert silent.engine(1, 0, "").tell(record_of(finished(1)), OFFSET) is None
        assert (silent.unsampled, silent.accepted) == (0, 0)

    @pytest.mark.parametrize("flags", [0, 1])
    def test_a_parent_based_sampler_follows_the_parent(self, flags: int) -> None:
        """The caller's sampled flag decides, not the root sampler."""
        made = Made(ParentBased(ALWAYS_OFF if flags else ALWAYS_ON))
        told = made.engine.tell(record_of(finished(1, CALLER._replace(flags=flags))), OFFSET)
        assert (told is not None) == bool(flags)

    def test_a_ratio_takes_about_its_share(self) -> None:
        """Of roots under 0.25, a quarter is taken: the ids are spread evenly."""
        made = Made(TraceIdRatioBased(0.25))
        for number in range(1, 4001):
            made.engine.tell(record_of(finished(number, held=0)), OFFSET)
        assert 800 < len(made.sink.spans) < 1200
        assert made.maker.accepted + made.maker.unsampled == 4000

    def test_a_samplers_attributes_are_in_the_span(self) -> None:
        """What a sampler adds is kept beside ours."""
        attributes = Made(_Adding()).span(record_of(finished(1))).attributes or {}
        assert (attributes["rate"], attributes[names.ATTR_FINISH_REASON]) == (0.5, "stop")

    def test_a_sink_that_is_full_gives_no_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the sink drops was not accepted, so no exemplar may point at it."""
        made = Made()
        monkeypatch.setattr(made.sink, "emit", lambda _: False)
        assert made.engine.tell(record_of(finished(1)), OFFSET) is None
        assert (made.maker.accepted, made.maker.unsampled) == (0, 0)


class TestLongestHeld:
    """The rule for the longest."""

    def test_one_that_stands_out_is_kept_with_its_reason(self) -> None:
        """After 1,000 ordinary ones, one that held ten times as long is kept; an ordinary one is not."""
        made = Made(ALWAYS_OFF)
        for number in range(1, 1001):
            made.engine.tell(record_of(finished(number, held=1000)), OFFSET)
        assert made.sink.spans == []
        assert made.engine.tell(record_of(finished(1001, held=1000)), OFFSET) is None
        span = made.span(record_of(finished(1002, held=10_000)))
        assert (span.attributes or {})[names.ATTR_SAMPLING_REASON] == "longest_held"

    @given(seed=st.integers(0, 2**32), rising=st.booleans())
    def test_at_most_one_a_second_is_kept(self, seed: int, *, rising: bool) -> None:
        """Whatever the durations, even ever longer ones, those kept are a second apart."""
        chance = random.Random(seed)  # noqa: S311  # drawn by hypothesis
        longest, time, kept = LongestHeld(), 0, []
        for at in range(600):
            time += chance.randrange(SECOND // 10)
            if longest.take(at if rising else chance.randrange(10**6), time):
                kept.append(time)
        assert all(later - earlier >= SECOND for earlier, later in itertools.pairwise(kept))
        assert kept or not rising

    def test_none_is_kept_before_there_is_something_to_compare(self) -> None:
        """The first WINDOW_STEP requests are no outliers."""
        longest = LongestHeld()
        assert not any(longest.take(at, at * 10 * SECOND) for at in range(LongestHeld.WINDOW_STEP))

    def test_one_in_two_hundred_is_about_what_is_kept(self) -> None:
        """Of random durations far apart in time, about 1 in 200 is kept."""
        chance, longest = random.Random(1), LongestHeld()  # noqa: S311  # a test
        kept = sum(longest.take(chance.randrange(10**9), at * 10 * SECOND) for at in range(40_000))
        assert 120 < kept < 400


def _wild() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**63 - 1, 2**63, 2**64 - 1]))


class TestLimits:
    """What the receiver could not take."""

    def test_counts_of_events_attributes_and_links_are_honoured_and_said(self) -> None:
        """Each limit cuts, and the span says how many were dropped, the tracker's included."""
        record = record_of(arrived(1), step(1), admitted(1), *[Refused(1, 0)] * 200, finished(1))
        record = record._replace(takers=tuple(Taker(number, number, number) for number in range(1, 6)))
        span = Made(max_events=10, max_links=2, max_span_attributes=5, max_event_attributes=1).span(record)
        assert (len(span.events), span.dropped_events) == (10, 201 - 10)
        assert (len(span.links), span.dropped_links) == (2, 3)
        assert len(span.attributes or {}) == 5
        assert span.dropped_attributes > 10

    def test_long_values_are_cut(self) -> None:
        """A limit on the length of values cuts the request's id."""
        attributes = Made(max_attribute_length=4).span(record_of(finished(1))).attributes or {}
        assert attributes[names.ATTR_ENGINE_REQUEST_ID] == "cmpl"

    @given(
        words=st.tuples(*[_wild()] * 8),
        offset=st.integers(-(2**63), 2**63 - 1),
        reason=st.sampled_from(["stop", "engine_ended"]),
    )
    def test_no_number_of_a_ring_spoils_the_batch(self, words: Sequence[int], offset: int, reason: str) -> None:
        """Whatever 64-bit words a ring holds, the span can be encoded, and does not end before it starts."""
        time, arrival, admission, peak, held, released, taker, prompt = words
        record = record_of(
            arrived(1)._replace(prompt_tokens=prompt),
            arrived(taker % 2**40),
            step(time),
            admitted(1),
            Preempted(1, time, released, taker),
            finished(1, time=time, arrival=arrival, admission=admission, peak=peak, held=held),
        )._replace(prompt_tokens=prompt, reason=reason)
        made = Made()
        assert made.engine.tell(record, offset) is not None
        (message,) = encode_spans(made.sink.spans).resource_spans[0].scope_spans[0].spans
        assert {pair.key for pair in message.attributes} == set(made.sink.spans[0].attributes or {})
        for sent, event in zip(message.events, made.sink.spans[0].events, strict=True):
            assert {pair.key for pair in sent.attributes} == set(event.attributes or {})
        assert message.start_time_unix_nano <= message.end_time_unix_nano
