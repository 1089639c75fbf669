# SPDX-License-Identifier: Apache-2.0
"""vitals: what a process tells of itself, how often, and that nothing of it gets out of hand."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix import events, faults, host, vitals
from vllm_kvfix.vitals import Vitals, Voice, frames

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Sequence

SECOND = 10**9
ROUND = (events.Container(1, "a.b", 3, 1, None, 80, 3, 0, 0, 0), events.Census(2, 1, 1000, complete=True))


class Clock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000 * SECOND

    def __call__(self) -> int:
        """The time."""
        return self.now


class FakeCensus:
    """Tells a whole round in one turn."""

    def __init__(self) -> None:
        self.resting = True
        self.turns = 0

    def turn(self, budget_ns: int = 0) -> Sequence[events.Container | events.Census]:
        """All there is."""
        assert 0 < budget_ns <= 100_000
        self.turns += 1
        return ROUND


class BrokenCensus(FakeCensus):
    """Fails whatever it is asked."""

    def turn(self, budget_ns: int = 0) -> Sequence[events.Container | events.Census]:
        """Fail."""
        raise RuntimeError("ours", budget_ns)


class Sink:
    """Keeps what it was told; `most` times, then it is over."""

    largest = 200

    def __init__(self, most: int = 10**9) -> None:
        self.told: list[events.Event] = []
        self.most = most
        self.heard = threading.Event()

    def tell(self, words: array[int], count: int) -> bool:
        """Keep it."""
        if self.most == 0:
            return False
        self.most -= 1
        before = len(self.told)
        self.told += events.decode(words)
        assert len(self.told) - before == count
        self.heard.set()
        return True


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    faults.counts.clear()
    yield
    faults.counts.clear()


def of(clock: Clock, census: FakeCensus | None = None, **readers: tuple[Callable[[], dict[str, int]], float]) -> Vitals:
    """Vitals with these readers alone."""
    return Vitals(census or FakeCensus(), readers, clock, lambda: clock() / SECOND)  # type: ignore[arg-type]  # a fake, named so


class TestVitals:
    """One turn after the other."""

    def test_a_scope_is_read_when_it_is_due_and_not_before(self) -> None:
        """Read at once, then again after its least time, and not in between."""
        clock = Clock()
        found = of(clock, status=(lambda: {"rss": 5}, 1.0))
        told = []
        for _ in range(40):
            told += [event for event in found.turn() if isinstance(event, events.Figures)]
            clock.now += SECOND // 10
        assert [event.values for event in told] == [{"rss": 5}] * 4
        assert all(later.time - event.time >= SECOND for event, later in itertools.pairwise(told))

    def test_what_is_dear_is_read_rarely(self) -> None:
        """A reading that takes a second is not repeated within a thousand seconds."""
        clock, reads = Clock(), []

        def dear() -> dict[str, int]:
            reads.append(clock.now)
            clock.now += SECOND
            return {"rss": 1}

        found = of(clock, smaps=(dear, 1.0))
        for _ in range(5000):
            found.turn()
            clock.now += SECOND
        assert 2 <= len(reads) <= 6
        assert all(later - read > 1000 * SECOND for read, later in itertools.pairwise(reads))

    def test_a_turn_reads_one_scope_at_most(self) -> None:
        """Three scopes that are due take three turns."""
        clock = Clock()

        def nothing() -> dict[str, int]:
            return {}

        found = of(clock, status=(nothing, 1.0), malloc=(nothing, 1.0), python=(nothing, 1.0))
        turns = [found.turn() for _ in range(3)]
        assert [[event.scope for event in turn if isinstance(event, events.Figures)] for turn in turns] == [
            ["status"],
            ["malloc"],
            ["python"],
        ]

    def test_what_cannot_be_read_is_told_with_its_reason(self) -> None:
        """A scope that is refused gives an Unread with the reason, and no figures."""

        def refused() -> dict[str, int]:
            raise host.UnreadableError("permission denied")

        (told,) = of(Clock(), smaps=(refused, 30.0)).turn()
        assert told[1:] == ("smaps", "permission denied")

    def test_a_round_of_the_census_begins_every_few_seconds(self) -> None:
        """A census that is over in one turn is asked again after CENSUS_S, not before."""
        clock, census = Clock(), FakeCensus()
        found = of(clock, census)
        for _ in range(101):
            found.turn()
            clock.now += SECOND // 10
        assert census.turns == 1 + int(10 / vitals.CENSUS_S)

    def test_a_round_that_is_not_over_goes_on_in_every_turn(self) -> None:
        """While the census is at it, each turn gives it some time."""
        census = FakeCensus()
        census.resting = False
        found = of(Clock(), census)
        assert [found.turn() for _ in range(7)] == [ROUND] * 7

    def test_turns_come_faster_until_containers_were_counted_twice(self) -> None:
        """Before two rounds of the census are over the pause is the short one, after them the long one."""
        clock = Clock()
        found = of(clock)
        pauses = []
        for _ in range(3):
            pauses.append(found.pause_s)
            found.turn()
            clock.now += 10 * SECOND
        assert pauses == [vitals.FIRST_PAUSE_S, vitals.FIRST_PAUSE_S, vitals.PAUSE_S]


class TestVoice:
    """The thread."""

    def test_the_newest_sink_is_told_and_then_the_one_before(self) -> None:
        """A sink that is over is left for the one before it, which gets what that one did not take."""
        clock = Clock()
        voice = Voice(of(clock, status=(lambda: {"rss": 7}, 0.0)))
        first, second = Sink(), Sink(most=0)
        voice.start(first)
        voice.start(second)
        try:
            clock.now += SECOND
            assert first.heard.wait(10)
        finally:
            voice.stop()
        assert second.told == []
        assert [event.values for event in first.told if isinstance(event, events.Figures)]

    def test_it_falls_silent_after_too_many_errors_of_its_own(self, caplog: pytest.LogCaptureFixture) -> None:
        """Ten errors: each contained and counted, one WARNING, and the thread ends."""

        def broken() -> dict[str, int]:
            raise RuntimeError("ours")

        voice = Voice(of(Clock(), BrokenCensus(), status=(broken, 0.0)))
        sink = Sink()
        voice.start(sink)
        thread = voice._thread
        assert thread is not None
        thread.join(20)
        assert not thread.is_alive()
        assert faults.counts["vitals"] == vitals.MOST_FAULTS
        assert sum("no longer telling" in record.message for record in caplog.records) == 1
        voice.start(Sink())
        assert not thread.is_alive()

    def test_a_sink_that_is_over_while_all_are_given_up_is_no_fault(self) -> None:
        """Whoever stops the voice in the middle of a turn gets no error of ours in vLLM's log."""
        clock = Clock()
        voice = Voice(of(clock, status=(lambda: {"rss": 7}, 0.0)))

        class Stopping(Sink):
            def tell(self, words: array[int], count: int) -> bool:
                voice.stop()
                return super().tell(words, count)

        voice._sinks.append(Stopping(most=0))
        clock.now += SECOND
        voice._turn()
        assert (voice._sinks, voice._faults) == ([], 0)

    def test_the_same_sink_twice_is_one(self) -> None:
        """Starting twice leaves one thread."""
        voice = Voice(of(Clock()))
        sink = Sink()
        voice.start(sink)
        thread = voice._thread
        voice.start(sink)
        try:
            assert voice._thread is thread
        finally:
            voice.stop()


RECORDS = st.lists(
    st.builds(events.Unread, st.integers(0, 9), st.sampled_from(list(events.SCOPES)), st.text("abcä", max_size=80)),
    max_size=30,
)


@given(RECORDS, st.integers(20, 400))
def test_frames_hold_all_events_in_their_order_and_are_small_enough(told: list[events.Unread], largest: int) -> None:
    """All comes out, in order, and no piece is larger than asked unless one event alone is."""
    pieces = list(frames(told, largest))
    assert [event for words, _ in pieces for event in events.decode(words)] == told
    assert sum(count for _, count in pieces) == len(told)
    assert all(len(words) <= largest or count == 1 for words, count in pieces)
