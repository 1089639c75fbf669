# SPDX-License-Identifier: Apache-2.0
"""What the verdict says of processes that are simple enough to know the answer by heart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.sidecar.histories import GIB, HOUR, MIB, MINUTE, Made, engine, nothing
from vllm_kvfix_sidecar.observed import Series
from vllm_kvfix_sidecar.verdict import Kind, Verdict, judge

LIST = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"


def of(made: Made) -> Verdict:
    """The verdict at the end of a history."""
    return judge(made.history(), made.now)


def grow(made: Made, an_hour: float, category: str = "heap") -> Made:
    """Let memory grow evenly on top of what is there."""
    return made.figures(
        status_anon=lambda time: 2 * GIB + an_hour * time / HOUR,
        **{f"smaps_{category}": lambda time: GIB + an_hour * time / HOUR},
    )


# ---- silence ----


@pytest.mark.parametrize("seconds", [0, 10, 60, 5 * MINUTE, 6 * HOUR])
def test_an_even_engine_is_steady(seconds: float) -> None:
    """Memory that stands still is steady, at the age of no second as of six hours."""
    verdict = of(engine(seconds))
    assert verdict.kind is Kind.STEADY
    assert verdict.category is None
    assert verdict.time_to_limit_s is None
    assert verdict.evidence


def test_a_process_of_which_nothing_is_known_is_steady() -> None:
    """No series at all: no alarm, and the evidence says that its memory could not be read, and why."""
    history = replace(Made(0).history(), unread={"status": "permission denied"})
    verdict = judge(history, 10.0)
    assert verdict.kind is Kind.STEADY
    assert any("could not be read" in said for said in verdict.evidence)
    assert any("permission denied" in said for said in verdict.evidence)


def test_growth_of_minutes_is_no_alarm() -> None:
    """Half an hour of growth that no container owns is a warm-up so far; the pace and the time left are told."""
    made = grow(engine(30 * MINUTE), 200 * MIB).limited(4 * GIB, lambda time: 2 * GIB + 200 * MIB * time / HOUR)
    verdict = of(made)
    assert verdict.kind is Kind.WARMING
    assert not verdict.alarming
    assert verdict.slope is not None
    assert verdict.slope.best == pytest.approx(200 * MIB, rel=0.02)
    assert verdict.time_to_limit_s is not None
    left = (2 * GIB - 100 * MIB) / (200 * MIB) * HOUR
    assert verdict.time_to_limit_s.low < left < verdict.time_to_limit_s.high


def test_a_warm_up_that_ends_is_no_alarm_at_any_time() -> None:
    """Two gigabytes that come with a time constant of two hours never raise an alarm in a day."""
    for hours in range(1, 25):
        made = engine(hours * HOUR, every=60).figures(status_anon=lambda time: 2 * GIB * (2 - math.exp(-time / 7200)))
        assert not of(made).alarming, hours


def test_one_step_is_no_growth() -> None:
    """A gigabyte at once in the middle of eight hours is no unexplained growth."""
    made = engine(8 * HOUR, every=60).figures(status_anon=lambda time: 2 * GIB + GIB * (time > 4 * HOUR))
    assert of(made).kind is Kind.STEADY


def test_a_sawtooth_is_no_alarm() -> None:
    """What grows for two hours and falls to the ground again raises no alarm, wherever in the tooth one looks."""
    for hours in range(1, 20):
        made = engine(hours * HOUR + 1700, every=60)
        made.figures(status_anon=lambda time: 2 * GIB + 800 * MIB * (time % 7200) / 7200)
        assert not of(made).alarming, hours


def test_a_sawtooth_of_half_a_day_is_known_from_its_first_tooth() -> None:
    """Seven hours into the second tooth of eight, nothing alarms: it had been as large before, and fell."""
    made = engine(15 * HOUR, every=60)
    made.figures(status_anon=lambda time: 2 * GIB + 800 * MIB * (time % (8 * HOUR)) / (8 * HOUR))
    assert not of(made).alarming


def test_three_steps_are_no_growth() -> None:
    """A step in the middle of each third of six hours is not growth that goes on in each third."""
    made = engine(8 * HOUR, every=60)
    made.figures(status_anon=lambda time: 2 * GIB + 300 * MIB * sum(time > hour * HOUR for hour in (3, 5, 7)))
    assert not of(made).alarming


def test_growth_that_paused_is_no_alarm_yet() -> None:
    """Memory that grew, stood still under the same load for two hours, and grew again, has not gone on growing."""
    made = engine(7 * HOUR + 60, every=60).figures(
        status_anon=lambda time: 2 * GIB + 200 * MIB * (min(time, 3 * HOUR) + max(0.0, time - 5 * HOUR)) / HOUR
    )
    assert not of(made).alarming


@pytest.mark.parametrize(("hours", "alarming"), [(7.0, False), (8.0, True)])
def test_the_first_hour_of_a_life_does_not_count(hours: float, alarming: bool) -> None:  # noqa: FBT001  a parameter
    """Six hours and a half of growth are enough, but not those that begin with the process."""
    assert of(grow(engine(hours * HOUR, every=30), 100 * MIB)).alarming is alarming


# ---- memory alone ----


@pytest.mark.parametrize(("category", "other"), [("heap", "anonymous"), ("anonymous", "heap")])
def test_growth_of_many_hours_that_nothing_owns_is_unexplained(category: str, other: str) -> None:
    """Eight hours of even growth: an alarm, with the category that grew, the pace by the hour and by the request."""
    made = grow(engine(8 * HOUR, every=30), 100 * MIB, category)
    verdict = of(made)
    assert verdict.kind is Kind.UNEXPLAINED
    assert verdict.alarming
    assert verdict.category == category != other
    assert verdict.culprits == ()
    assert verdict.slope is not None
    assert verdict.slope.best == pytest.approx(100 * MIB, rel=0.01)
    assert verdict.per is not None
    assert verdict.per["request"] == pytest.approx(100 * MIB / 36000, rel=0.01)
    assert verdict.remedy is not None


def test_shared_memory_that_grows_is_told_apart() -> None:
    """Shared memory counts against the limit: eight hours of its growth are an alarm of their own category."""
    made = engine(8 * HOUR, every=30).figures(status_shmem=lambda time: 100 * MIB * time / HOUR)
    verdict = of(made)
    assert verdict.kind is Kind.UNEXPLAINED
    assert verdict.category == "shmem"
    assert of(made.figures(smaps_shared_memory=lambda time: 100 * MIB * time / HOUR)).category == "shared_memory"


def test_growth_too_small_to_matter_is_steady() -> None:
    """Half a mebibyte an hour, with years to the limit, is steady even after a day."""
    assert of(grow(engine(24 * HOUR, every=60), 0.5 * MIB)).kind is Kind.STEADY


def test_memory_that_rises_with_the_level_of_the_load_is_no_leak() -> None:
    """What more requests at a time take rises for eight hours of a morning, and is no alarm."""
    made = engine(8 * HOUR, every=60)
    made.loaded(requests=lambda time: 10 * time + 0.0005 * time**2)
    made.figures(status_anon=lambda time: 2 * GIB + 20 * MIB * (10 + 0.001 * time))
    assert not of(made).alarming


def test_a_leak_that_rests_at_night_is_found_by_its_work() -> None:
    """A leak by the request stands still for four hours without load in the middle, and is found all the same."""

    def done(time: float) -> float:
        return 10 * (time - max(0.0, min(time - 6 * HOUR, 4 * HOUR)))

    made = engine(12.5 * HOUR, every=60).loaded(requests=done, aborts=nothing, generated_tokens=nothing, blocks=nothing)
    made.loaded(steps=done).figures(status_anon=lambda time: 2 * GIB + 5000 * done(time))
    verdict = of(made)
    assert verdict.kind is Kind.UNEXPLAINED
    assert verdict.per is not None
    assert verdict.per["request"] == pytest.approx(5000, rel=0.02)


# ---- containers that leak ----


def leaking(seconds: float, version: str = "0.25.1", patch: str = "off") -> Made:
    """The list of block ids, 8 bytes each, at 3,000 a second."""
    made = engine(seconds, 3000 / 7.3)
    made.version, made.patch = version, patch
    made.figures(status_anon=lambda time: 2 * GIB + 24_000 * time, smaps_anonymous=lambda time: GIB + 24_000 * time)
    return made.container(LIST, lambda time: 3000 * time, 8.0)


def test_the_known_leak_is_named_within_minutes() -> None:
    """Two and a half minutes of 3,000 block ids a second: the list, its bytes by request and block, and the fix."""
    verdict = of(leaking(150))
    assert verdict.kind is Kind.UNBOUNDED
    (culprit,) = verdict.culprits
    assert culprit.path == LIST
    assert culprit.follows == "block"
    assert culprit.per["block"] == pytest.approx(8, rel=0.02)
    assert culprit.per["request"] == pytest.approx(8 * 7.3, rel=0.02)
    assert culprit.bytes_per_hour == pytest.approx(24_000 * HOUR, rel=0.05)
    assert verdict.category == "anonymous"
    assert verdict.explained == pytest.approx(1, abs=0.05)
    assert LIST in verdict.evidence[0]
    assert verdict.remedy is not None
    assert "pip install vllm-kvfix" in verdict.remedy.action
    assert verdict.remedy.fixed_in == "0.26.0"


def test_a_leak_of_the_same_kind_that_nobody_knows_is_named_too() -> None:
    """On a release without the known leak, one entry a block is one all the same, and nobody is told to install us."""
    verdict = of(leaking(5 * MINUTE, version="0.31.0", patch="not affected"))
    assert verdict.kind is Kind.UNBOUNDED
    assert verdict.remedy is not None
    assert "pip install" not in verdict.remedy.action


def test_the_patch_that_does_not_help_is_reported() -> None:
    """Where the fix is applied and the list grows, the remedy asks for a report."""
    verdict = of(leaking(5 * MINUTE, patch="applied"))
    assert verdict.kind is Kind.UNBOUNDED
    assert verdict.remedy is not None
    assert "report" in verdict.remedy.action


def test_orphans_decide_at_small_sizes() -> None:
    """A table in which each abort leaves its entry, 300 KiB an hour, is named after two minutes, by aborts."""
    made = engine(2 * MINUTE)
    made.container(
        "scheduler.connector.requests",
        lambda time: 30 + time,
        85.0,
        orphans=lambda time: time,
        orphan_age=110.0,
    )
    verdict = of(made)
    assert verdict.kind is Kind.UNBOUNDED
    assert verdict.culprits[0].per["abort"] == pytest.approx(85, rel=0.05)
    assert "gone" in verdict.evidence[0]


def test_orphans_that_are_swept_are_no_leak() -> None:
    """Entries of requests that ended, swept every 50 s, raise no alarm."""
    made = engine(20 * MINUTE).container(
        "scheduler.ended", lambda time: 30 + time % 50, 5000.0, orphans=lambda time: time % 50, orphan_age=49.0
    )
    assert not of(made).alarming


def test_orphans_that_are_on_their_way_out_are_no_leak() -> None:
    """More and more entries of requests that ended, none of them for a minute: the load rises, they are taken soon."""
    made = engine(5 * MINUTE).loaded(requests=lambda time: 10 * time + 0.05 * time**2)
    made.container(
        "scheduler.ended",
        lambda time: 30 + 40 * (1 + 0.1 * time),
        5000.0,
        orphans=lambda time: 40 * (1 + 0.1 * time),
        orphan_age=40.0,
    )
    assert not of(made).alarming


def test_what_more_load_takes_is_no_leak() -> None:
    """A table that keeps entries for ten minutes grows all morning with the load, as evenly as with the work done."""

    def done(time: float) -> float:
        return 10 * 4 * HOUR * (math.exp(time / (4 * HOUR)) - 1)

    made = engine(6 * HOUR, every=30).loaded(requests=done)
    made.container("scheduler.recent", lambda time: 1.7 * (done(time) - done(max(0.0, time - 600))), 5000.0)
    assert not of(made).alarming


def test_what_slows_a_little_is_no_leak_yet() -> None:
    """A vocabulary that grows four fifths as fast at the end as at the begin is named, and no alarm."""
    made = engine(3 * HOUR, every=30).container("scheduler.words", lambda time: 20 * time**0.88, 500.0)
    verdict = of(made)
    assert verdict.kind is Kind.WARMING
    assert [culprit.path for culprit in verdict.culprits] == ["scheduler.words"]


def test_one_that_is_stuck_makes_no_leak_of_those_that_are_swept() -> None:
    """Orphans that are swept every 97 s, above a few that never go, are no leak, whenever one looks."""
    for seconds in range(110, 600, 10):
        made = engine(seconds).container(
            "scheduler.ended", lambda time: 30 + time % 97, 5000.0, orphans=lambda time: 9 + time % 97, orphan_age=500.0
        )
        assert not of(made).alarming, seconds


def test_a_list_that_was_cleared_once_will_be_again() -> None:
    """Five hours into the second filling of six, a list that was cleared before raises no alarm."""
    made = engine(11 * HOUR, every=60).container("scheduler.stats", lambda time: time % (6 * HOUR), 3000.0)
    assert not of(made).alarming


def test_an_even_list_waits_until_no_buffer_is_so_long() -> None:
    """One entry a step may be a buffer that is sent by the hour: named, but no alarm, until it lasted much longer."""
    path = "worker.records"
    early, late = (of(engine(minutes * MINUTE).container(path, lambda time: 20 * time, 500.0)) for minutes in (30, 120))
    assert (early.kind, late.kind) == (Kind.WARMING, Kind.UNBOUNDED)
    assert [culprit.path for culprit in early.culprits] == [culprit.path for culprit in late.culprits] == [path]
    assert late.culprits[0].follows == "step"


def test_a_leak_that_was_found_is_not_taken_back() -> None:
    """A table whose share of the requests changes by the half hour alarms after two hours, and from then on always."""

    def left(time: float) -> float:
        return 3 * time + 900 * math.sin(time / 400)

    said = []
    for minutes in range(100, 480, 4):
        made = engine(minutes * MINUTE, every=30).container("scheduler.table", left, 500.0)
        said.append(of(made).kind is Kind.UNBOUNDED)
    assert said[-1]
    assert said[said.index(True) :] == [True] * (len(said) - said.index(True))


def test_one_entry_a_request_that_was_not_aborted_is_exact() -> None:
    """Half of the requests are aborted, more and less so; each other one leaves an entry, large ones soon add up."""

    def aborts(time: float) -> float:
        return 5 * time + 1000 * math.sin(time / 300)

    made = engine(12 * MINUTE).loaded(aborts=aborts)
    made.container("scheduler.table", lambda time: 10 * time - aborts(time), 120_000.0)
    verdict = of(made)
    assert verdict.kind is Kind.UNBOUNDED
    assert "each request left one entry" in verdict.evidence[0]


def test_a_leak_by_the_clock_is_none_that_slows() -> None:
    """Entries at each poll, whatever the load: that the same time sees three times the requests is no slowing down."""

    def done(time: float) -> float:
        return 5 * time + 0.001 * time**2

    made = engine(4 * HOUR, every=30).loaded(requests=done, aborts=nothing, steps=done, blocks=done)
    made.loaded(generated_tokens=done).container("scheduler.polls", lambda time: 7 * time, 300.0)
    assert of(made).kind is Kind.UNBOUNDED


def test_what_reaches_the_limit_soon_is_told_soon() -> None:
    """The same list, with half an hour until the limit: no time to wait."""
    made = engine(10 * MINUTE).container("worker.records", lambda time: 20 * time, 10_000.0)
    made.limited(2.4 * GIB, lambda time: 2 * GIB + 2e5 * time)
    verdict = of(made)
    assert verdict.kind is Kind.UNBOUNDED
    assert verdict.time_to_limit_s is not None
    left = (0.4 * GIB - 1.2e8) / 2e5
    assert verdict.time_to_limit_s.low < left < verdict.time_to_limit_s.high


def test_a_list_that_is_cleared_by_the_hour_is_no_leak() -> None:
    """A list that is filled for an hour and cleared raises no alarm in six hours."""
    for minutes in range(10, 360, 10):
        made = engine(minutes * MINUTE).container("scheduler.stats", lambda time: 10 * (time % 3600), 3000.0)
        assert not of(made).alarming, minutes


def test_a_cache_of_unknown_capacity_is_no_leak_while_it_slows() -> None:
    """Half the keys that there are came in twenty minutes: it grows ever more slowly."""
    for minutes in (5, 20, 60, 120, 300):
        made = engine(minutes * MINUTE)
        made.container("scheduler.cache", lambda time: 50_000 * (1 - math.exp(-time / 1700)), 5000.0)
        verdict = of(made)
        assert not verdict.alarming, minutes
        assert minutes != 60 or "as fast" in verdict.culprits[0].why


def test_members_and_their_owner_are_told_once() -> None:
    """A table of lists that leaks is one culprit, not two."""
    made = engine(3 * HOUR, every=30)
    made.container("scheduler.table", lambda time: time, 4000.0)
    made.container("scheduler.table[*]", lambda time: 10 * time, 300.0, members=lambda time: time)
    verdict = of(made)
    assert [culprit.path for culprit in verdict.culprits] == ["scheduler.table"]
    assert verdict.culprits[0].bytes_per_hour == pytest.approx(4000 * HOUR, rel=0.02)


def test_two_tables_that_grow_alike_are_both_named() -> None:
    """Two culprits, the larger one first."""
    made = engine(5 * MINUTE)
    for path, unit in (("scheduler.small", 300.0), ("scheduler.large", 900.0)):
        made.container(path, lambda time: 10 + time, unit, orphans=lambda time: time, orphan_age=200.0)
    assert [culprit.path for culprit in of(made).culprits] == ["scheduler.large", "scheduler.small"]


def test_containers_that_stand_still_change_nothing() -> None:
    """Three hundred even containers beside the leak: the same verdict."""
    alone, among = leaking(5 * MINUTE), leaking(5 * MINUTE)
    for number in range(300):
        among.container(f"scheduler.part{number}", lambda _: 100.0)
    assert of(alone) == of(among)


# ---- growth that has an end ----


def test_a_capacity_that_fills_is_bounded() -> None:
    """Which capacity, how many bytes it will be, and in how long; no time to a limit that it does not reach."""
    path = "scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block"
    made = grow(engine(20 * MINUTE), 36 * MIB).container(path, lambda time: 100 * time, 105.0, capacity=360_000)
    made.limited(8 * GIB, lambda time: 2 * GIB + 36 * MIB * time / HOUR)
    verdict = of(made)
    assert verdict.kind is Kind.BOUNDED
    (culprit,) = verdict.culprits
    assert culprit.capacity == 360_000
    assert culprit.full_bytes == pytest.approx(240_000 * 105, rel=0.01)
    assert culprit.full_in_s == pytest.approx(2400, rel=0.05)
    assert verdict.time_to_limit_s is None


def test_a_capacity_beyond_the_limit_has_a_time_to_it() -> None:
    """A cache that will not fit below the limit when it is full: bounded, but with the time that is left."""
    made = grow(engine(20 * MINUTE), 360 * MIB).container(
        "scheduler.cache", lambda time: time, 105 * 1024.0, capacity=10_000_000
    )
    made.limited(3 * GIB, lambda time: 2 * GIB + 360 * MIB * time / HOUR)
    verdict = of(made)
    assert verdict.kind is Kind.BOUNDED
    assert verdict.time_to_limit_s is not None


def test_beyond_its_capacity_it_is_not_bounded() -> None:
    """A container that has outgrown its capacity by far is not excused by it."""
    made = leaking(5 * MINUTE)
    made.containers[0] = replace(made.containers[0], capacity=1000)
    assert of(made).kind is Kind.UNBOUNDED


def test_requests_that_wait_are_bounded() -> None:
    """A queue under overload grows with its requests; so do their tokens; neither is a leak."""
    made = engine(20 * MINUTE).loaded(waiting=lambda time: 5 * time)
    made.container("scheduler.waiting", lambda time: 5 * time, 6000.0)
    made.container("scheduler.requests[*].tokens", lambda time: 900 * 5 * time, 8.0, members=lambda time: 30 + 5 * time)
    verdict = of(made)
    assert verdict.kind is Kind.BOUNDED
    assert "requests that wait" in verdict.evidence[0]


def test_a_cache_whose_entries_are_larger_than_they_look_is_weighed_by_the_memory() -> None:
    """The census sees 39 of 150 bytes an entry; memory and entries rise together: bounded, and weighed rightly."""
    path = "scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block"
    made = engine(8 * HOUR, every=60).container(path, lambda time: 10 * time, 39.0, capacity=576_000)
    made.figures(status_anon=lambda time: 2 * GIB + 1500 * time, smaps_heap=lambda time: GIB + 1500 * time)
    verdict = of(made)
    assert verdict.kind is Kind.BOUNDED
    assert verdict.culprits[0].full_bytes == pytest.approx(288_000 * 150, rel=0.02)
    assert verdict.explained == pytest.approx(1, abs=0.05)


def test_a_cache_whose_entries_cannot_be_weighed_is_bounded() -> None:
    """Of a cache in C nothing but the length is seen; memory rises with it, and what is to come fits: bounded."""
    made = engine(8 * HOUR, every=60).container("scheduler.tokens_of", lambda time: time / 6, 64.0, capacity=6000)
    made.figures(status_anon=lambda time: 2 * GIB + 2000 * time, smaps_heap=lambda time: GIB + 2000 * time)
    verdict = of(made)
    assert verdict.kind is Kind.BOUNDED
    assert verdict.culprits[0].full_bytes == pytest.approx(1200 * 12_000, rel=0.02)


def test_a_cache_that_filled_and_rests_is_weighed_too() -> None:
    """A cache four times as large as it seems fills for seven hours; in the idle hours behind, nothing alarms."""

    def done(time: float) -> float:
        return 10 * min(time, 7 * HOUR)

    made = engine(11 * HOUR, every=60).loaded(
        requests=done, aborts=nothing, generated_tokens=done, blocks=done, steps=done
    )
    made.container("scheduler.cache", done, 2000.0, capacity=int(done(7 * HOUR)))
    made.figures(status_anon=lambda time: 2 * GIB + 8000 * done(time))
    assert not of(made).alarming


def test_a_large_capacity_is_no_excuse() -> None:
    """The same with room for a hundred times the memory there is: that cannot be meant."""
    made = engine(8 * HOUR, every=60).container("scheduler.tokens_of", lambda time: time / 6, 64.0, capacity=60_000_000)
    made.figures(status_anon=lambda time: 2 * GIB + 2000 * time, smaps_heap=lambda time: GIB + 2000 * time)
    assert of(made).kind is Kind.UNEXPLAINED


def test_a_small_cache_does_not_excuse_a_large_growth() -> None:
    """Memory grows a hundred times as fast as the cache that fills: it is no growth of the cache."""
    made = grow(engine(20 * MINUTE), 500 * MIB)
    made.container("scheduler.cache", lambda time: 100 * time, 14.0, capacity=10_000_000)
    verdict = of(made)
    assert verdict.kind is Kind.WARMING
    assert any("scheduler.cache" in said for said in verdict.evidence)


# ---- where it lies ----


def test_the_category_is_that_which_grew_as_much_as_the_culprit() -> None:
    """While the heap warms up by far more, the list lies in the anonymous mappings, which grew as much as it did."""
    made = leaking(5 * MINUTE).figures(smaps_heap=lambda time: GIB + 300 * MIB * (1 - math.exp(-time / 100)))
    assert of(made).category == "anonymous"


def test_the_category_is_where_the_list_is_after_malloc_moved_it() -> None:
    """A list that outgrows the heap is moved to a mapping of its own in one step: from then on it lies there."""
    made = leaking(20 * MINUTE)
    grown = made.containers[0].size.values[-1] - made.containers[0].size.values[0]
    moved = 14 * MINUTE

    def in_heap(time: float) -> float:
        return GIB + (grown * time / (20 * MINUTE) if time < moved else 0)

    def in_mapping(time: float) -> float:
        return GIB + (grown * time / (20 * MINUTE) if time >= moved else 0)

    made.figures(smaps_heap=in_heap, smaps_anonymous=in_mapping)
    assert of(made).category == "anonymous"


def test_no_category_is_better_than_a_wrong_one() -> None:
    """No mapping grew by nearly as much as the culprit did: none is named."""
    made = leaking(5 * MINUTE)
    made.figures(smaps_anonymous=lambda _: GIB, smaps_files=lambda time: GIB + 100 * time)
    assert of(made).category is None


# ---- the allocator ----


def test_what_malloc_keeps_after_a_burst_is_told() -> None:
    """A burst of a gigabyte that was freed and kept: no alarm, how much, and what helps."""

    def burst(time: float) -> float:
        return GIB if HOUR <= time < 1.5 * HOUR else 0.0

    def kept(time: float) -> float:
        return 0.9 * GIB if time >= 1.5 * HOUR else 0.0

    made = engine(4 * HOUR, every=30).figures(
        status_anon=lambda time: 2 * GIB + burst(time) + kept(time),
        malloc_in_use=lambda time: GIB + burst(time),
        malloc_retained=kept,
    )
    verdict = of(made)
    assert verdict.kind is Kind.RETAINED
    assert not verdict.alarming
    assert verdict.remedy is not None
    assert "MALLOC_ARENA_MAX" in verdict.remedy.action
    assert "922 MiB" in verdict.remedy.action


@pytest.mark.parametrize(("used", "kept"), [(0.5, 0.5), (0.0, 0.4), (0.4, 0.6)])
def test_what_malloc_does_not_keep_is_not_said_to_be(used: float, kept: float) -> None:
    """Memory that rose at once, of which a good part is in use, or lies outside malloc, is not retained by it."""
    made = engine(4 * HOUR, every=30).figures(
        status_anon=lambda time: 2 * GIB + GIB * (time > HOUR),
        malloc_in_use=lambda time: GIB + used * GIB * (time > HOUR),
        malloc_retained=lambda time: kept * GIB * (time > HOUR),
    )
    assert of(made).kind is not Kind.RETAINED


# ---- the limit ----


def test_over_the_limit_nothing_is_left() -> None:
    """A process that grows where the limit is used up has no second left."""
    made = leaking(5 * MINUTE).limited(GIB, lambda _: 2 * GIB)
    interval = of(made).time_to_limit_s
    assert interval is not None
    assert (interval.low, interval.best, interval.high) == (0, 0, 0)


# ---- what series may look like ----


def test_a_counter_that_restarts_takes_nothing_back() -> None:
    """The load's totals begin anew in the middle: the leak and its bytes by block are the same."""
    made = leaking(10 * MINUTE)
    blocks = made.load["blocks"]
    values = [
        value if time < made.begin + 300 else value - 900_000
        for time, value in zip(blocks.times, blocks.values, strict=True)
    ]
    made.load["blocks"] = Series(blocks.times, values, values)
    verdict = of(made)
    assert verdict.kind is Kind.UNBOUNDED
    assert verdict.culprits[0].per["block"] == pytest.approx(8, rel=0.03)


def test_gaps_and_times_that_jump_back_are_borne() -> None:
    """Samples that are missing for a minute, and two that came out of order, do not hide the leak."""
    made = leaking(10 * MINUTE)
    length = made.containers[0].length
    keep = [i for i in range(len(length.times)) if not 20 <= i < 26]
    keep[5], keep[6] = keep[6], keep[5]
    broken = Series([length.times[i] for i in keep], [length.values[i] for i in keep], [length.values[i] for i in keep])
    made.containers[0] = replace(made.containers[0], length=broken)
    assert of(made).kind is Kind.UNBOUNDED
