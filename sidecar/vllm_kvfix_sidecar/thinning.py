# SPDX-License-Identifier: Apache-2.0
"""Chooses the rows of a series that draw its shape: few, real, and with every peak and floor."""

from __future__ import annotations

from bisect import bisect_left
from itertools import compress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def chosen(times: Sequence[float], columns: Sequence[Sequence[float]], span: float, most: int) -> list[int]:
    """The indices, rising, of at most ``most`` rows.

    First and last are among them, and of each of some even pieces of time the least and the greatest of each column; a
    row that equals both its neighbours draws nothing and is left out. The pieces lie where they lay at the last call
    with the same ``span``, so that a line does not flicker as time goes on.

    Args:
        times: Of the rows, rising (s).
        columns: Their values.
        span: No rows are farther apart (s).
        most: Rows, ten at least for up to two columns.
    """
    if len(times) <= most:
        kept: Sequence[int] = range(len(times))
    else:
        pieces = max(1, (most - 2) // (2 * len(columns)) - 1)
        kept = _extremes(times, columns, span / pieces)
    rows = list(zip(*([column[at] for at in kept] for column in columns), strict=True))
    bends = [not before == row == after for before, row, after in zip(rows, rows[1:], rows[2:], strict=False)]
    return list(compress(kept, (True, *bends, True)))


def _extremes(times: Sequence[float], columns: Sequence[Sequence[float]], width: float) -> list[int]:
    kept = {0, len(times) - 1}
    begin = 0
    while begin < len(times):
        end = max(begin + 1, bisect_left(times, (times[begin] // width + 1) * width, begin))
        for column in columns:
            values = column[begin:end]
            kept.add(begin + values.index(min(values)))
            kept.add(begin + values.index(max(values)))
        begin = end
    return sorted(kept)
