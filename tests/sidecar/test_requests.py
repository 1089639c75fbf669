# SPDX-License-Identifier: Apache-2.0
"""requests: each request that is over gives one record, whatever was lost; what is kept is bounded."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sidecar.fake_engine import SECOND, admitted, allocated, arrived, finished, identity, life, step
from vllm_kvfix import events
from vllm_kvfix.events import Blocks, Freed, Preempted, Refused, TraceContext
from vllm_kvfix_sidecar import requests
from vllm_kvfix_sidecar.details import FIRST_DETAILS, Merged, blocks_of, merged
from vllm_kvfix_sidecar.requests import RequestRecord, RequestTracker, SpanIds

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from vllm_kvfix_sidecar.details import Detail

BOOT = bytes(16)
CALLER = TraceContext(0xABC << 64 | 1, 0xDEF, 1)


def tracker(most_live: int = 100) -> RequestTracker:
    """A tracker of some ring."""
    return RequestTracker(SpanIds(BOOT, 7, 8, "a.ring"), most_live)


def feed(to: RequestTracker, happened: Iterable[events.Event]) -> list[RequestRecord]:
    """Consume one frame."""
    return to.consume([word for event in happened for word in events.encode(event)])


class TestRecords:
    """What a record says."""

    def test_a_life_gives_one_record_with_its_details_in_order(self) -> None:
        """The record has Finished's fields, the sums of its groups, and each detail with the time of its step."""
        (record,) = feed(tracker(), life(1, CALLER))
        assert record.request_id == "cmpl-1-0a1b2c3d"
        assert (record.trace_id, record.context) == (CALLER.trace_id, CALLER)
        assert (record.arrival, record.admission, record.end, record.freed_at) == (
            SECOND,
            2 * SECOND,
            4 * SECOND,
            4 * SECOND,
        )
        assert (record.new_blocks, record.reused_blocks, record.peak_blocks, record.held_block_us) == (
            6,
            2,
            8,
            15 * 10**6,
        )
        assert record.details == (admitted(1), allocated(1))
        assert (record.dropped_details, record.takers, record.took_blocks) == (0, (), False)

    @given(
        groups=st.lists(st.builds(Blocks, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=5),
        reason=st.sampled_from(events.FINISH_REASONS),
        seen=st.booleans(),
    )
    def test_a_record_needs_no_earlier_event(self, groups: list[Blocks], reason: str, *, seen: bool) -> None:
        """Finished alone gives the same record as a whole life, but for the details."""
        last = finished(1, groups=tuple(groups), reason=reason)
        before: list[events.Event] = [arrived(1), step(2 * SECOND), admitted(1)] if seen else []
        (record,) = feed(tracker(), [*before, last])
        assert (record.reason, record.groups) == (reason, tuple(groups))
        assert record.new_blocks == sum(blocks.new for blocks in groups)
        assert record.reused_blocks == sum(blocks.reused for blocks in groups)
        assert len(record.details) == seen
        assert record._replace(details=()) == feed(tracker(), [last])[0]

    def test_blocks_that_a_connector_keeps_delay_the_record(self) -> None:
        """With freed unset the record comes with Freed and has its time; a stray Freed gives none."""
        followed = tracker()
        assert feed(followed, [arrived(1), finished(1, freed=False), Freed(2, 9 * SECOND)]) == []
        (record,) = feed(followed, [Freed(1, 9 * SECOND)])
        assert (record.end, record.freed_at) == (4 * SECOND, 9 * SECOND)
        assert feed(followed, [Freed(1, 9 * SECOND)]) == []

    @given(times=st.tuples(*[st.integers(0, 2**64 - 1)] * 4))
    def test_times_are_in_order_whatever_the_ring_says(self, times: tuple[int, int, int, int]) -> None:
        """Arrival, admission, end and freeing are ordered, and true ones are kept."""
        time, arrival, admission, freed = times
        followed = tracker()
        feed(followed, [finished(1, time=time, arrival=arrival, admission=admission, freed=False)])
        (record,) = feed(followed, [Freed(1, freed)])
        assert record.arrival <= (record.admission or record.arrival) <= record.end <= record.freed_at
        if arrival <= admission <= time <= freed:
            assert (record.arrival, record.admission, record.end, record.freed_at) == (arrival, admission, time, freed)


class TestIds:
    """Identity of spans."""

    def test_who_reads_again_gets_the_same_ids(self) -> None:
        """Two trackers of one ring agree on each id; any other boot, process, ring or number gives others."""
        ids = {SpanIds(*of).of(number, None) for of in OTHERS for number in (1, 2)}
        assert len(ids) == 2 * len(OTHERS)
        assert SpanIds(*OTHERS[0]).of(1, None) == SpanIds(*OTHERS[0]).of(1, None)

    def test_the_taker_is_known_to_its_victim_by_the_ids_of_its_own_record(self) -> None:
        """A victim names its taker's trace and span as the taker's record does, and the taker is marked."""
        followed = tracker()
        feed(followed, [arrived(1), arrived(2, context=CALLER), Preempted(1, 3 * SECOND, 7, 2)])
        victim, taker = feed(followed, [finished(1, preemptions=1), finished(2, CALLER)])
        assert victim.takers == ((2, taker.trace_id, taker.span_id),)
        assert taker.trace_id == CALLER.trace_id
        assert (victim.took_blocks, taker.took_blocks) == (False, True)

    def test_a_taker_that_nobody_saw_arrive_has_no_ids(self) -> None:
        """Its trace may be its caller's, so none is made up; one that is not known (0) is left out."""
        followed = tracker()
        (record,) = feed(followed, [Preempted(1, SECOND, 7, 2), Preempted(1, SECOND, 7, 0), finished(1)])
        assert record.takers == ((2, 0, 0),)


OTHERS = [
    (BOOT, 7, 8, "a.ring"),
    (bytes([1] * 16), 7, 8, "a.ring"),
    (BOOT, 78, 8, "a.ring"),
    (BOOT, 7, 88, "a.ring"),
    (BOOT, 7, 8, "b.ring"),
]


class TestBounds:
    """Memory."""

    @given(count=st.integers(0, 900), seed=st.integers(0, 2**32))
    def test_a_request_that_never_ends_stays_small_and_loses_no_block(self, count: int, seed: int) -> None:
        """However many allocations, at most MOST_DETAILS are kept; blocks and steps add up; the first are exact."""
        chance = random.Random(seed)  # noqa: S311  # drawn by hypothesis
        each = [chance.randrange(6) for _ in range(count)]
        followed = tracker()
        feed(followed, [arrived(1)])
        for at, new in enumerate(each):
            feed(followed, [step(at), allocated(1, at, new)])
        kept = followed._live[1].details
        assert len(kept) <= requests.MOST_DETAILS
        assert sum(blocks.new for detail in kept for blocks in blocks_of(detail)) == sum(each)
        assert sum(detail.steps if isinstance(detail, Merged) else 1 for detail in kept) == len(each)
        assert [detail.time for detail in kept] == sorted(detail.time for detail in kept)
        assert [detail.time for detail in kept[:FIRST_DETAILS]] == list(range(min(len(each), FIRST_DETAILS)))
        assert followed._live[1].dropped == 0

    def test_allocations_are_merged_two_by_two(self) -> None:
        """Of 128 allocations the first 64 stay, and 32 pairs follow; a refusal between two keeps them apart."""
        shorter = merged([allocated(1, at) for at in range(128)])
        assert shorter[:64] == [allocated(1, at) for at in range(64)]
        assert shorter[64:] == [Merged(1, at, (2,), at + 1, 2) for at in range(64, 128, 2)]
        apart: list[Detail] = [Refused(1, 0), allocated(1)] * 64
        assert merged(apart) == apart

    def test_what_cannot_be_merged_is_left_out_and_counted(self) -> None:
        """A request that is refused for ever keeps MOST_DETAILS events, and the rest is a number."""
        (record,) = feed(tracker(), [*[Refused(1, 0)] * 1000, finished(1)])
        assert len(record.details) == requests.MOST_DETAILS
        assert len(record.details) + record.dropped_details == 1000

    def test_details_of_all_requests_are_bounded_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beyond MOST_DETAILS_IN_ALL no detail is kept, until a request that has some is over."""
        monkeypatch.setattr(requests, "MOST_DETAILS_IN_ALL", 10)
        followed = tracker()
        feed(followed, [Refused(number, 0) for number in range(1, 21)])
        one, twenty = feed(followed, [finished(1), finished(20)])
        assert (len(one.details), len(twenty.details), twenty.dropped_details) == (1, 0, 1)
        (later,) = feed(followed, [Refused(21, 0), finished(21)])
        assert len(later.details) == 1

    def test_the_oldest_of_too_many_are_forgotten_and_still_recorded(self) -> None:
        """Requests that never end do not add up; whose beginning was forgotten gets its record all the same."""
        followed = tracker(most_live=32)
        feed(followed, [event for number in range(1, 1001) for event in (arrived(number), Refused(number, 0))])
        assert followed.live <= 32
        assert followed.live + followed.forgotten == 1000
        old, new = feed(followed, [finished(1), finished(1000)])
        assert (len(old.details), len(new.details)) == (0, 1)
        assert old.request_id == "cmpl-1-0a1b2c3d"

    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(0, 12)), max_size=300))
    def test_the_count_of_details_is_that_of_those_kept(self, drawn: list[tuple[int, int, int]]) -> None:
        """In any order of events, the tracker's count of details is what lies in it, and live is bounded."""
        followed = tracker(most_live=8)
        for kind, number, other in drawn:
            event: events.Event = (
                arrived(number),
                admitted(number),
                allocated(number),
                Preempted(number, 0, 1, other),
                finished(number),
                finished(number, freed=False),
                Freed(number, 0),
            )[kind]
            feed(followed, [step(0), event])
            assert followed._details == sum(len(live.details) for live in followed._live.values())
            assert followed.live <= 8


class TestEngineEnded:
    """What a dead engine leaves."""

    def test_live_requests_are_told_with_what_was_seen(self) -> None:
        """The sums come from the details, the end is the last known time, the reason is engine_ended."""
        followed = tracker()
        feed(followed, [arrived(1, context=CALLER), step(2 * SECOND), admitted(1), step(3 * SECOND), allocated(1)])
        (record,) = followed.abandon(5 * SECOND)
        assert (record.reason, record.end, record.admission, record.arrival) == (
            "engine_ended",
            5 * SECOND,
            2 * SECOND,
            SECOND,
        )
        assert (record.new_blocks, record.reused_blocks, record.peak_blocks) == (6, 2, 8)
        assert record.held_block_us == (7 * 1 + 8 * 2) * 10**6
        assert (record.prompt_tokens, record.hit_tokens, record.external_tokens) == (100, 32, 3)
        assert (record.request_id, record.context) == ("cmpl-1-0a1b2c3d", CALLER)
        assert (followed.live, followed.abandon(0)) == (0, [])

    def test_a_preempted_request_holds_nothing_until_it_is_resumed(self) -> None:
        """Peak and held leave out the time after a preemption; preemptions and refusals are counted."""
        followed = tracker()
        ran: list[events.Event] = [arrived(1), step(2 * SECOND), admitted(1)]
        feed(followed, [*ran, Preempted(1, 3 * SECOND, 7, 0), step(3 * SECOND), Refused(1, 0)])
        (record,) = followed.abandon(9 * SECOND)
        assert (record.peak_blocks, record.held_block_us, record.preemptions, record.refusals) == (7, 7 * 10**6, 1, 1)

    def test_one_that_had_finished_is_told_as_it_finished(self) -> None:
        """Blocks that a connector kept are free when the engine is gone; the reason stays."""
        followed = tracker()
        feed(followed, [finished(1, freed=False)])
        (record,) = followed.abandon(9 * SECOND)
        assert (record.reason, record.end, record.freed_at) == ("stop", 4 * SECOND, 9 * SECOND)

    def test_nothing_is_told_that_may_not_be_so(self) -> None:
        """After a gap, only who was heard of again is told; without an arrival nobody is. The rest is counted."""
        followed = tracker()
        feed(followed, [arrived(1), arrived(2), Refused(3, 0)])
        followed.gap()
        feed(followed, [Refused(2, 0), arrived(4)])
        assert [record.number for record in followed.abandon(9 * SECOND)] == [2, 4]
        assert followed.forgotten == 2


class TestHostile:
    """Words that no recorder writes."""

    def test_a_malformed_frame_gives_what_came_before_it(self) -> None:
        """The events before the damage count, the rest of the frame does not, and the next frame is read."""
        followed = tracker()
        words = [word for event in (finished(1), finished(2)) for word in events.encode(event)]
        assert [record.number for record in followed.consume(words[:-1])] == [1]
        assert followed.malformed == 1
        assert [record.number for record in feed(followed, [finished(3)])] == [3]

    @given(
        st.lists(
            st.one_of(
                st.integers(0, 2**64 - 1),
                st.builds(events.head, st.integers(0, 12), st.integers(0, 20), st.integers(0, 3)),
                st.integers(0, 4),
            ),
            max_size=120,
        )
    )
    def test_random_words_raise_nothing(self, words: list[int]) -> None:
        """Whatever stands in a frame, records are well formed or absent, and the engine's end can be told."""
        followed = tracker()
        for record in [*followed.consume(words), *followed.abandon(5)]:
            assert record.arrival <= record.end <= record.freed_at
            assert record.span_id > 0


def test_the_id_of_a_request_is_the_engines() -> None:
    """The request id is not cut or changed on its way."""
    (record,) = feed(tracker(), [finished(1, identity=identity(1)._replace(request_id="ü" * 200))])
    assert record.request_id == "ü" * 200


class TestHolders:
    """The requests that hold most blocks now."""

    def test_each_state_shows_what_it_holds(self) -> None:
        """Waiting: none; running: what it got; preempted: none, but its peak; finished, not freed: still all."""
        made = tracker()
        feed(made, [arrived(1), arrived(2), arrived(3), arrived(4), step(2 * SECOND)])
        feed(made, [step(3 * SECOND), admitted(2), admitted(3), admitted(4)])
        feed(made, [step(4 * SECOND), allocated(2, new=3), Preempted(3, 4 * SECOND, 7, 0)])
        feed(made, [finished(4, freed=False)])
        found = {holder.request_id: holder for holder in made.holders(10)}
        shown = {name: (holder.state, holder.blocks, holder.peak) for name, holder in found.items()}
        assert shown == {
            identity(1).request_id: ("waiting", 0, 0),
            identity(2).request_id: ("running", 10, 10),
            identity(3).request_id: ("preempted", 0, 7),
            identity(4).request_id: ("finished", 7, 7),
        }
        assert [holder.preemptions for holder in found.values()] == [0, 0, 0, 1]
        assert (found[identity(2).request_id].arrival, found[identity(2).request_id].admission) == (SECOND, 3 * SECOND)
        feed(made, [Freed(4, 5 * SECOND), step(6 * SECOND), admitted(3, resumed=True)])
        assert [(holder.state, holder.blocks) for holder in made.holders(10)] == [
            ("running", 10),
            ("running", 7),
            ("waiting", 0),
        ]

    @given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 50)), max_size=400))
    @settings(deadline=None)
    def test_blocks_are_exact_however_many_there_were(self, got: list[tuple[int, int]]) -> None:
        """Each request holds the sum of what it got, though details are merged and left out; most first, no more."""
        made = tracker()
        feed(made, [arrived(number) for number in range(1, 7)])
        for number, new in got:
            feed(made, [step(3 * SECOND), allocated(number, new=new)])
        sums = [sum(new for other, new in got if other == number) for number in range(1, 7)]
        assert [holder.blocks for holder in made.holders(4)] == sorted(sums, reverse=True)[:4]

    def test_one_that_may_be_over_is_not_shown(self) -> None:
        """After a gap a request is shown again once something is heard of it."""
        made = tracker()
        feed(made, [arrived(1), arrived(2), step(2 * SECOND), admitted(1), admitted(2)])
        made.gap()
        assert made.holders(10) == []
        feed(made, [step(3 * SECOND), allocated(2)])
        assert [(holder.request_id, holder.blocks) for holder in made.holders(10)] == [(identity(2).request_id, 8)]

    def test_of_one_whose_arrival_was_not_seen_the_ids_are_not_known(self) -> None:
        """Its trace may be its caller's, so none is told; its span's id and its blocks are."""
        made = tracker()
        feed(made, [step(2 * SECOND), allocated(5, new=4)])
        (holder,) = made.holders(10)
        assert (holder.request_id, holder.trace_id, holder.arrival, holder.admission) == (None, None, 0, 0)
        (record,) = feed(made, [finished(5)])
        assert (holder.span_id, holder.blocks) == (record.span_id, 4)
