# SPDX-License-Identifier: Apache-2.0
"""The statistics under the verdict, against figures known by heart or computed another way."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix_sidecar import trend
from vllm_kvfix_sidecar.observed import Series

POINTS = st.lists(st.tuples(st.integers(0, 1000), st.integers(-1000, 1000)), min_size=3, max_size=20).map(
    lambda points: [(float(x), float(y)) for x, y in sorted(dict(points).items())]
)


def made(values: list[float], step: float = 1.0) -> Series:
    """A series at even times from 0 on."""
    return Series([i * step for i in range(len(values))], values, values)


@given(POINTS)
def test_the_slope_is_the_median_of_all_pairs(points: trend.Points) -> None:
    """Theil and Sen's slope, and it lies in its interval."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)]
    found = trend.slope(points)
    if len(points) < 3:
        assert found == trend.NOTHING
        return
    assert found.best == pytest.approx(statistics.median(slopes))
    assert found.low <= found.best <= found.high


def test_the_interval_holds_the_true_slope_in_four_of_five() -> None:
    """Of a thousand noisy lines of slope 2, the interval holds 2 in 76 to 90 %."""
    rng = random.Random(7)  # noqa: S311  noise, no secret
    hits = 0
    for _ in range(1000):
        found = trend.slope([(float(x), 2.0 * x + rng.gauss(0, 5)) for x in range(24)])
        hits += found.low <= 2 <= found.high
    assert 760 <= hits <= 900


def test_an_outlier_does_not_move_the_slope() -> None:
    """One point a thousand times too high leaves the slope of the others."""
    points = [(float(x), 3.0 * x) for x in range(20)]
    points[7] = (7.0, 1e6)
    assert trend.slope(points).best == pytest.approx(3)


def test_floors_are_the_least_of_each_part() -> None:
    """Of a saw of three teeth in three parts: the foot of each tooth, where it is."""
    series = made([0, 5, 9, 1, 6, 8, 2, 7, 9])
    assert trend.floors(series, 0, 8.5, 3) == [(0, 0), (3, 1), (6, 2)]


def test_a_floor_before_its_sample_lies_behind_the_sample_before() -> None:
    """Of a group of samples that grew, the least was at its begin, not at the time of the last."""
    series = Series([30.0, 60.0, 90.0], [30.0, 60.0, 90.0], [10.0, 40.0, 70.0])
    assert trend.floors(series, 0, 90, 3) == [(30.0, 10.0), (60.0, 70.0)] or trend.floors(series, 31, 90, 2) == [
        (30.0, 40.0),
        (60.0, 70.0),
    ]


def test_a_part_without_samples_is_left_out() -> None:
    """A gap in the series is no floor of 0."""
    series = Series([0.0, 1.0, 9.0], [4.0, 5.0, 6.0], [4.0, 5.0, 6.0])
    assert trend.floors(series, 0, 9, 3) == [(0, 4), (9, 6)]


def test_cleaning_keeps_what_can_be_used() -> None:
    """What is no number, or came out of order, goes; what is whole is the same object."""
    whole = made([1.0, 2.0])
    assert trend.clean(whole) is whole
    broken = Series([0.0, 2.0, 1.0, 3.0, 4.0], [1.0, 2.0, 3.0, math.nan, 5.0], [])
    assert list(trend.clean(broken).times) == [0, 2, 4]
    assert list(trend.clean(broken).values) == [1, 2, 5]
    assert trend.clean(None) == Series()


def test_the_value_at_a_time() -> None:
    """On the line between two samples, the nearest outside of them, 0 where there is none."""
    series = made([10.0, 20.0])
    assert [trend.at(series, time) for time in (-1, 0, 0.5, 1, 7)] == [10, 10, 15, 20, 20]
    assert trend.at(Series(), 3) == 0


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_a_running_total_never_falls(values: list[int]) -> None:
    """A counter that restarts goes on from where it was, with what it counts from 0."""
    total = trend.running_total(made([float(value) for value in values]))
    steps = [b if b < a else b - a for a, b in itertools.pairwise(values)]
    assert list(total.values) == [float(sum(steps[:i])) + values[0] * _kept(values) for i in range(len(values))]


def _kept(values: list[int]) -> int:
    """Whether the total begins with the first value: it is the series itself where nothing fell."""
    return int(all(a <= b for a, b in itertools.pairwise(values)))


def test_growth_keeps_to_what_makes_it() -> None:
    """A figure that follows the work, not the time, fits the work exactly and the time badly."""
    work = made([0.0, 1, 1, 1, 8, 9, 9, 20])
    points = [(time, 3 * value) for time, value in zip(work.times, work.values, strict=True)]
    assert trend.misfit(points, work) == pytest.approx(0, abs=1e-9)
    assert trend.misfit(points, None) > 0.3
    assert trend.misfit([(0.0, 5.0), (1.0, 5.0)], work) == math.inf


def test_thirds_show_that_growth_slows() -> None:
    """A figure that saturates grows less in each third; a straight one the same."""
    rates = trend.thirds([(float(x), 1 - math.exp(-x / 10)) for x in range(31)])
    assert rates[0] > rates[1] > rates[2] > 0
    assert trend.thirds([(float(x), 2.0 * x) for x in range(31)]) == pytest.approx((2, 2, 2))


def test_a_step_is_a_large_share_of_the_growth() -> None:
    """One step makes up all of the growth, twelve even ones a quarter with three of them."""
    step = [(float(x), 100.0 * (x > 5)) for x in range(13)]
    even = [(float(x), float(x)) for x in range(13)]
    assert trend.largest_steps(step, 3) == 1
    assert trend.largest_steps(even, 3) == pytest.approx(0.25)


def test_what_the_pace_of_the_work_takes_is_no_growth() -> None:
    """Memory in proportion to the pace of the work alone: the work done explains none of its rise, and the reverse."""
    work = made([0.1 * (t * 60) ** 1.5 for t in range(100)], 60.0)
    times = [float(t) for t in range(1200, 5900, 200)]
    pace = [(time, trend.at(work, time) - trend.at(work, time - 600)) for time in times]
    by_work, error = trend.beside_level(pace, work)
    assert abs(by_work) <= 2 * error + 1e-6 * pace[-1][1]
    done = [(time, 5 * trend.at(work, time)) for time in times]
    by_work, error = trend.beside_level(done, work)
    assert by_work == pytest.approx(done[-1][1] - done[0][1], rel=1e-6)


def test_the_noise_is_that_about_the_line() -> None:
    """Points on a line have none; a spread of 10 about it is found, whatever the slope."""
    rng = random.Random(3)  # noqa: S311  noise, no secret
    assert trend.noise([(float(x), 7.0 * x) for x in range(20)], 7) == pytest.approx(0, abs=1e-9)
    spread = [(float(x), 7.0 * x + rng.gauss(0, 10)) for x in range(2000)]
    assert trend.noise(spread, 7) == pytest.approx(10, rel=0.1)
