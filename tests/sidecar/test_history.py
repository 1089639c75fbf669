# SPDX-License-Identifier: Apache-2.0
"""history: what a track keeps is true, in order, bounded, and as fine as its age allows."""

from __future__ import annotations

import random
import sys
from array import array
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_kvfix_sidecar.history import JUDGED, JUDGED_S, KEPT_S, LEVELS, Track

MOST_ROWS = 120 + 220 + 552  # 10 minutes, then up to 2 h, then up to 48 h
MOST_OF_A_WEEK = MOST_ROWS + 240
# Seconds between samples, and what they show: few values, so that equal ones lie next to each other.
GAPS = st.one_of(st.sampled_from([1.0, 5.0, 30.0]), st.floats(0.5, 400), st.just(5000.0))
VALUES = st.one_of(st.integers(0, 2), st.integers(0, 2**33), st.just(2**63))
SAMPLES = st.lists(st.tuples(GAPS, VALUES), min_size=1, max_size=150)


def timed(samples: list[tuple[float, int]], start: float = 1000.0) -> list[tuple[float, int]]:
    """(time, value) of samples that came after gaps."""
    found, time = [], start
    for gap, value in samples:
        time += gap
        found.append((round(time, 3), value))
    return found


def track_of(samples: list[tuple[float, int]]) -> Track:
    """A track with one column that got these."""
    made = Track()
    for time, value in samples:
        assert made.add(time, value)
    return made


def value_at(samples: list[tuple[float, int]], time: float) -> int:
    """The value of the last sample not after a time."""
    return [value for at, value in samples if at <= time + 0.002][-1]


class TestTrack:
    """One series, or some that are told together."""

    @settings(max_examples=300)
    @given(SAMPLES)
    def test_times_rise_and_each_value_is_one_that_was_there_then(self, given_samples: list[tuple[float, int]]) -> None:
        """Whatever came: times rise, the newest sample is the last, each value held at its time, none is too old.

        But for a peak within a bucket, which is passed over.
        """
        samples = timed(given_samples)
        series = track_of(samples).series()
        assert len(series.times) == len(series.values) == len(series.floors)
        assert all(a < b for a, b in pairwise(series.times))
        assert (series.times[-1], series.values[-1]) == pytest.approx(samples[-1])
        assert series.times[0] >= samples[-1][0] - JUDGED_S - 0.01
        for time, value in zip(series.times, series.values, strict=True):
            assert value <= value_at(samples, time)
            assert value in {other for _, other in samples}

    @settings(max_examples=300)
    @given(SAMPLES)
    def test_a_floor_is_the_least_since_the_time_before(self, given_samples: list[tuple[float, int]]) -> None:
        """No dip is lost on the way to coarser buckets, and none is invented.

        But where a peak within a bucket is passed over, the floor is that of what was there before and after it.
        """
        samples = timed(given_samples)
        series = track_of(samples).series()
        coarsest = JUDGED[-1].width
        for (before, at), floor in zip(pairwise(series.times), series.floors[1:], strict=True):
            between = [value for time, value in samples if before + 0.002 < time <= at + 0.002]
            assert floor <= min(between, default=value_at(samples, at))
            around = [value for time, value in samples if before + 0.002 < time <= at + coarsest + 0.002]
            assert floor >= min([value_at(samples, before), *around])

    @settings(max_examples=100)
    @given(SAMPLES)
    def test_steps_stay_steps(self, given_samples: list[tuple[float, int]]) -> None:
        """A value that stood for long before it changed is still there close before the change."""
        samples = timed(given_samples)
        series = track_of(samples).series()
        for (before, at), (old, new) in zip(pairwise(series.times), pairwise(series.values), strict=True):
            if old != new:
                age = series.times[-1] - before
                width = next(level.width for level in JUDGED if age <= level.span + level.width)
                held = [time for time, _ in samples if before + 0.002 < time < at - 0.002]
                # Only what lay in one bucket is not told any more.
                assert not held or at - held[0] <= width

    def test_it_is_coarser_with_age(self) -> None:
        """After two days: every 5 s for 10 minutes, every 30 s for 2 h, every 5 minutes for 48 h."""
        made = Track()
        end = 55 * 3600
        for time in range(0, end, 5):
            made.add(time + 0.5, time)
        series = made.series()
        ages = [series.times[-1] - time for time in series.times]
        gaps = [b - a for a, b in pairwise(series.times)]
        assert max(gap for gap, age in zip(gaps, ages, strict=False) if age < 590) == pytest.approx(5)
        assert max(gap for gap, age in zip(gaps, ages, strict=False) if age < 7100) == pytest.approx(30)
        assert max(gaps) == pytest.approx(300)
        assert min(gap for gap, age in zip(gaps, ages, strict=False) if 700 < age < 7100) >= 25
        assert ages[0] == pytest.approx(JUDGED_S, abs=300)
        assert len(series.times) <= MOST_ROWS + 2 * len(JUDGED)

    def test_what_never_changes_costs_nothing_and_reads_as_if_it_had_been_kept(self) -> None:
        """Six constant figures over 60 h take two rows, and come out every 5 s, 30 s, 5 minutes."""
        made = Track(6, 2)
        for time in range(0, 60 * 3600, 10):
            made.add(float(time), 7, 100, 1, 0, 0, 3)
        assert [len(rows) for rows in made._rows] == [2 * 8, 0, 0, 0]
        all_series = made.all_series()
        assert [set(series.values) for series in all_series] == [{7}, {100}, {1}, {0}, {0}, {3}]
        times = all_series[0].times
        assert MOST_ROWS - 10 <= len(times) <= MOST_ROWS + 10
        assert times[-1] - times[0] == pytest.approx(JUDGED_S, abs=300)
        assert max(b - a for a, b in pairwise(times)) <= 300 * 1.5

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 2**32), st.integers(1, 3))
    def test_it_stays_bounded(self, seed: int, columns: int) -> None:
        """Whatever the pace and the values, no level holds more than two rows a bucket."""
        made, time, chance = Track(columns), 0.0, random.Random(seed)  # noqa: S311  # a test
        for _ in range(3000):
            time += chance.choice([0.3, 1, 2.6, 5, 31, 299])
            made.add(time, *[chance.choice([1, 1, 2, 3])] * columns)
        for level, rows in zip(LEVELS, made._times, strict=True):
            assert len(rows) <= 2 * (level.span // level.width + 2)

    @given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
    def test_a_time_that_does_not_rise_is_dropped(self, times: list[int]) -> None:
        """add() says so, and the last value is that of the first sample at the highest time."""
        made, highest = Track(), -1
        for number, time in enumerate(times):
            assert made.add(float(time), number) == (time > highest)
            highest = max(highest, time)
        assert made.last == max(times)
        assert made.series().values[-1] == times.index(max(times))

    def test_columns_without_a_floor_say_their_value(self) -> None:
        """Of two columns with one floor, the second's floors are its values; the first's are the least."""
        made = Track(2, 1)
        for time, value in enumerate([5, 3, 9]):
            made.add(time, value, value)
        first, second = made.all_series()
        assert (list(first.values), list(first.floors)) == ([9], [3])
        assert (list(second.values), list(second.floors)) == ([9], [9])

    @pytest.mark.parametrize("values", [(2**32,), (-1,), (0.5,), (2**64,)])
    def test_any_number_is_kept(self, values: tuple[float, ...]) -> None:
        """What does not fit 32 bits, is negative or no whole number comes out as it went in."""
        made = Track()
        for time, value in enumerate((1, *values, 2, 3)):
            made.add(10.0 * time, value)
        assert list(made.series().values) == [1, *values, 2, 3]

    def test_an_empty_one_has_no_series(self) -> None:
        """Nothing came: no times, no last time."""
        assert len(Track().series().times) == 0
        assert Track().last is None

    def test_a_rise_is_that_of_the_last_ten_minutes(self) -> None:
        """It is the newest less the oldest of the finest level; of an empty track 0."""
        made = Track(2)
        assert made.rise() == 0
        for time in range(0, 7200, 10):
            made.add(time, time, -time)
        assert made.rise() == pytest.approx(600, abs=10)
        assert made.rise(1) == pytest.approx(-600, abs=10)

    def test_it_takes_the_memory_that_it_says(self) -> None:
        """A container of which every figure changes for a week takes some 44 KiB, a constant one next to nothing."""
        busy, idle = Track(6, 2), Track(6, 2)
        for time in range(0, 8 * 24 * 3600, 30):
            busy.add(time, *[time] * 6)
            idle.add(time, *[5] * 6)
        assert 36_000 < sum(map(sys.getsizeof, (*busy._rows, *busy._times))) < 52_000
        assert sum(map(sys.getsizeof, (*idle._rows, *idle._times))) < 800


class TestRowsSince:
    """What is kept, for who draws it."""

    def test_a_week_is_kept_every_half_hour_in_the_end(self) -> None:
        """After nine days the oldest row is a week old; beyond two days they are 30 minutes apart, but at the ends."""
        made = Track()
        for time in range(0, 9 * 86_400, 30):
            made.add(float(time), time)
        times, (values,) = made.rows_since(0.0)
        assert list(values) == [int(time) for time in times]
        assert times[-1] - times[0] == pytest.approx(KEPT_S, abs=1800)
        old = [b - a for a, b in pairwise(times) if times[-1] - b > JUDGED_S]
        assert set(old[1:-2]) == {1800.0}
        assert len(times) <= MOST_OF_A_WEEK + 2 * len(LEVELS)
        assert made.series().times[0] >= times[-1] - JUDGED_S

    @settings(max_examples=200, deadline=None)
    @given(SAMPLES, st.floats(0, 1.2))
    @example([(1.0, 7), (4.0, 7)], 1.0)
    def test_rows_are_those_that_a_series_is_made_of(self, given_samples: list[tuple[float, int]], part: float) -> None:
        """Times rise from the asked one on; each value was there then or stood since; the newest is the last."""
        samples = timed(given_samples)
        begin, end = samples[0][0], samples[-1][0]
        since = begin + (end - begin) * part
        made = track_of(samples)
        times, (values,) = made.rows_since(since)
        assert all(a < b for a, b in pairwise(times))
        assert all(time >= since for time in times)
        full = dict(zip(made.series().times, made.series().values, strict=True))
        if since <= end:
            assert (times[-1], values[-1]) == samples[-1]
        for time, value in zip(times, values, strict=True):
            assert value <= value_at(samples, time)
            assert full.get(time, value) == value

    def test_equal_rows_that_began_before_begin_where_it_is_asked(self) -> None:
        """A figure that never changes is two rows: one at the begin, one now."""
        made = Track(2, 0)
        for time in range(0, 7200, 5):
            made.add(float(time), 7, 8)
        times, columns = made.rows_since(3601.5)
        assert (list(times), [list(column) for column in columns]) == ([3601.5, 7195.0], [[7, 7], [8, 8]])
        assert made.rows_since(8000.0) == (array("d"), [array("I"), array("I")])

    def test_what_is_copied_is_not_what_goes_on(self) -> None:
        """Rows that were asked for stay as they are while the track goes on."""
        made = track_of(timed([(10.0, 1), (10.0, 2)]))
        times, (values,) = made.rows_since(0.0)
        before = list(times), list(values)
        made.add(2000.0, 9)
        assert (list(times), list(values)) == before

    def test_the_latest_is_that_of_each_column(self) -> None:
        """The last value; None where there is none."""
        made = Track(2, 1)
        assert (made.latest(), made.latest(1)) == (None, None)
        made.add(1.0, 5, 6)
        made.add(9.0, 7, 8)
        assert (made.latest(), made.latest(1)) == (7, 8)
