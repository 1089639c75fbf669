# SPDX-License-Identifier: Apache-2.0
"""thinning: few rows, all of them real, that draw the shape of all."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvfix_sidecar.thinning import chosen


@st.composite
def series(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    """Times that rise, and one or two columns: up to 600 rows, so that many must go, of few or of many values."""
    chance = random.Random(draw(st.integers(0, 2**32)))  # noqa: S311  # a test
    count, most = draw(st.integers(0, 600)), draw(st.sampled_from([1, 3, 2**40]))
    gaps = draw(st.sampled_from([(5.0,), (0.01, 5.0), (5.0, 30.0, 500.0)]))
    times = list(accumulate(chance.choice(gaps) for _ in range(count)))
    return times, [[chance.randint(0, most) for _ in times] for _ in range(draw(st.integers(1, 2)))]


def span_of(times: list[float]) -> float:
    """As if it had been asked for a little more than there is."""
    return times[-1] - times[0] + 1.0 if times else 1.0


class TestChosen:
    """Whatever the rows are."""

    @settings(deadline=None)
    @given(series(), st.integers(10, 300))
    def test_no_more_than_asked_for_in_order_with_first_and_last(
        self, given_rows: tuple[list[float], list[list[int]]], most: int
    ) -> None:
        """The indices rise, are at most ``most``, and hold the first and the last row."""
        times, columns = given_rows
        at = chosen(times, columns, span_of(times), most)
        assert len(at) <= most
        assert all(a < b for a, b in pairwise(at))
        assert set(at) <= set(range(len(times)))
        if times:
            assert (at[0], at[-1]) == (0, len(times) - 1)

    @settings(deadline=None)
    @given(series(), st.integers(10, 60))
    def test_least_and_greatest_stay(self, given_rows: tuple[list[float], list[list[int]]], most: int) -> None:
        """No peak and no floor of any column is missing."""
        times, columns = given_rows
        at = chosen(times, columns, span_of(times), most)
        for column in columns:
            shown = [column[index] for index in at]
            assert (min(shown, default=0), max(shown, default=0)) == (min(column, default=0), max(column, default=0))

    @settings(deadline=None)
    @given(series())
    def test_where_there_is_room_straight_lines_draw_all_of_it(
        self, given_rows: tuple[list[float], list[list[int]]]
    ) -> None:
        """A row that is left out lies on a level line between its neighbours that stay."""
        times, columns = given_rows
        at = chosen(times, columns, span_of(times), max(10, len(times)))
        for a, b in pairwise(at):
            for column in columns:
                assert set(column[a : b + 1]) == {column[a], column[b]}
                assert b == a + 1 or column[a] == column[b]

    def test_a_peak_in_each_piece_stays(self) -> None:
        """Of a day by seconds with one peak an hour, 300 rows show each of the 24 peaks."""
        times = [float(second) for second in range(86_400)]
        values = [1000 + hour if second == 1234 else second % 7 for hour in range(24) for second in range(3600)]
        at = chosen(times, [values], 86_400.0, 300)
        assert [values[index] - 1000 for index in at if values[index] >= 1000] == list(range(24))

    @pytest.mark.parametrize("later", [5.0, 63.0, 1800.0])
    def test_what_was_shown_is_shown_again_as_time_goes_on(self, later: float) -> None:
        """An hour that moves on shows of what is in both the same rows, but for those at its ends."""

        def shown(begin: float) -> set[float]:
            times = [begin + second for second in range(3600)]
            values = [int(time * 7919) % 1009 for time in times]
            return {times[index] for index in chosen(times, [values], 3600.0, 300)}

        before, after = shown(0.0), shown(later)
        width = 3600.0 / 148
        both = {time for time in before | after if later + width < time < 3600.0 - width}
        assert len(both) > 100 * (1 - later / 3600)
        assert both <= before
        assert both <= after

    def test_a_row_of_equal_ones_is_its_ends(self) -> None:
        """Of 300 equal rows two stay; of a step, its corners."""
        times = [float(time) for time in range(300)]
        assert chosen(times, [[7] * 300], 300.0, 300) == [0, 299]
        assert chosen(times, [[7] * 100 + [9] * 200], 300.0, 300) == [0, 99, 100, 299]
