# SPDX-License-Identifier: Apache-2.0
"""Remembers the figures of a process for a week in little memory: coarser with age, and only where they change.

Verdicts stand on the last two days, ``JUDGED_S``; a week is for who looks back.

*What it takes.* A row of a :class:`Track` is its time in 8 bytes, and 4 a number (8 from 2**32 on) for its columns and
their floors. All four levels hold 1,132 rows if each bucket brings something new, so a figure takes 18 KiB, and a
container, whose six figures share their times, 44 KiB: 300 containers in each of 20 processes 259 MiB if all of them
never stop changing. One that never changes takes two rows, 80 bytes, and some 900 with its Python objects.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vllm_kvfix_sidecar.observed import Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


# Of unsigned 32-bit numbers, or of doubles once one does not fit.
Rows: TypeAlias = "array[Any]"


class Level(NamedTuple):
    """Buckets of ``width`` for what is no older than ``span``; both in seconds."""

    width: float
    span: float


LEVELS = (Level(5.0, 600.0), Level(30.0, 7200.0), Level(300.0, 172_800.0), Level(1800.0, 604_800.0))
KEPT_S = LEVELS[-1].span
JUDGED = LEVELS[:3]
JUDGED_S = JUDGED[-1].span
# Rows farther apart than so many widths have others between them that were the same.
_FAR = 1.5


class Track:
    """Some figures that are always told together, as a bounded series each.

    A bucket keeps the last value, its time, and the least of each of the first ``floors`` columns (of the others, the
    floor is said to be the value). Of rows that are all the same, the first and the last are kept; :meth:`series` puts
    the others in again, evenly, so that a peak in between, within a bucket, is not seen. What grows too old for a level
    is merged into the next: nothing is forgotten before ``KEPT_S``. :meth:`series` reaches back ``JUDGED_S``,
    :meth:`rows_since` as far as there is anything.
    """

    __slots__ = ("_columns", "_floors", "_rows", "_stretched", "_times")

    def __init__(self, columns: int = 1, floors: int | None = None) -> None:
        self._columns = columns
        self._floors = columns if floors is None else floors
        # By level: the times, and flat, a row after another, the columns and the floors.
        self._times = [array("d") for _ in LEVELS]
        self._rows: list[Rows] = [array("I") for _ in LEVELS]
        self._stretched = 0  # a bit by level: two rows of it are far from each other

    def add(self, time: float, *values: float) -> bool:
        """Add a value of each column; False: the time (s) is not after the last one, and nothing was added."""
        last = self.last
        if last is not None and time <= last:
            return False
        self._put(0, time, _row((*values, *values[: self._floors])))
        return True

    @property
    def last(self) -> float | None:
        """The time of the last row; None: there is none."""
        times = self._times[0]
        return times[-1] if times else None

    def latest(self, column: int = 0) -> float | None:
        """The last value of a column; None: there is none."""
        rows = self._rows[0]
        return rows[column - self._stride] if rows else None

    def rows_since(self, since: float) -> tuple[Rows, list[Rows]]:
        """The times from ``since`` on, and each column then, as they are kept: of equal rows the first and the last.

        A row of equal ones that began before ``since`` begins there.
        """
        times, rows = self._joined_levels(LEVELS)
        at, n = bisect_left(times, since), self._stride
        within = 0 < at < len(times) and times[at] > since
        if within and self._goes_on(rows[(at - 1) * n : at * n], rows[at * n : (at + 1) * n]):
            at -= 1
            times[at] = since
        return times[at:], [rows[at * n + column :: n] for column in range(self._columns)]

    def _joined_levels(self, levels: Sequence[Level]) -> tuple[Rows, Rows]:
        """Times and rows of the first of the levels, the oldest rows first."""
        wide = any(rows.typecode == "d" for rows in self._rows[: len(levels)])
        times, rows = array("d"), array("d" if wide else "I")
        for level in reversed(range(len(levels))):
            times.extend(self._times[level])
            rows.extend(_as(rows.typecode, self._rows[level]))
        return times, rows

    def rise(self, column: int = 0) -> float:
        """By how much a column is higher than at the begin of the finest level."""
        rows = self._rows[0]
        return rows[column - self._stride] - rows[column] if rows else 0

    @property
    def _stride(self) -> int:
        return self._columns + self._floors

    def _put(self, level: int, time: float, row: Rows) -> None:
        """Put a row behind the others of a level, and hand what is too old for it on to the next."""
        width, span = LEVELS[level]
        n, times, rows = len(row), self._times[level], self._rows[level]
        last = rows[-n:]
        alike = len(times) > 1 and self._goes_on(rows[-2 * n : -n], last)
        if alike and self._goes_on(last, row):
            times[-1] = time
            self._stretched |= 1 << level
        elif times and not alike and times[-1] // width == time // width:
            least = map(min, last[self._columns :], row[self._columns :])
            rows = _joined(rows[:-n], _row((*row[: self._columns], *least)))
            times[-1] = time
        else:
            # The end of a row of equal ones stays, even in the bucket of this one: else a step became a slope.
            if times and time - times[-1] > _FAR * width:
                self._stretched |= 1 << level
            rows = _joined(rows, row)
            times.append(time)
        self._rows[level] = rows
        while len(times) > 1 and times[1] < self._times[0][-1] - span:
            if level + 1 < len(LEVELS):
                self._put(level + 1, times[0], rows[:n])
            del times[0], rows[:n]

    def _goes_on(self, before: Rows, row: Rows) -> bool:
        """Whether nothing has changed from one row to the next, nor sunk in between; that it rose is not known."""
        return before[: self._columns] == row[: self._columns] and row[: self._floors] == row[self._columns :]

    def series(self) -> Series:
        """The first column's."""
        return self.all_series()[0]

    def all_series(self) -> list[Series]:
        """Each column's."""
        n = self._stride
        times, rows = self._joined_levels(JUDGED)
        runs: list[tuple[int, list[float]]] = []
        end = 0
        for level in reversed(range(len(JUDGED))):
            first, end = max(0, end - 1), end + len(self._times[level])
            if self._stretched >> level & 1:
                runs += self._runs(times, rows, range(first, end), LEVELS[level].width)
        columns = [_filled(rows[at::n], runs, repeat=True) for at in range(n)]
        times = _filled(times, runs, repeat=False)
        old = bisect_left(times, times[-1] - JUDGED_S) if times else 0
        if old:
            times, columns = times[old:], [column[old:] for column in columns]
        values, floors = columns[: self._columns], columns[self._columns :]
        return [Series(times, value, floors[at] if at < self._floors else value) for at, value in enumerate(values)]

    def _runs(self, times: Rows, rows: Rows, of: range, width: float) -> Iterator[tuple[int, list[float]]]:
        """(index of a row, times to be put in before it), for each of the rows that equals one far before."""
        n, far = self._stride, _FAR * width
        for at, (before, time) in enumerate(pairwise(times[of.start : of.stop]), of.start):
            if time - before > far:
                row = at * n
                if self._goes_on(rows[row : row + n], rows[row + n : row + 2 * n]):
                    yield at + 1, _between(before, time, times[of.stop - 1])


def _row(numbers: Iterable[float]) -> Rows:
    numbers = tuple(numbers)
    try:
        return array("I", numbers)
    except (OverflowError, TypeError):
        return array("d", numbers)


def _as(typecode: str, rows: Rows) -> Rows:
    return rows if rows.typecode == typecode else array(typecode, rows)


def _joined(rows: Rows, more: Rows) -> Rows:
    if rows.typecode != more.typecode:
        rows, more = _as("d", rows), _as("d", more)
    rows.extend(more)
    return rows


def _between(start: float, end: float, newest: float) -> list[float]:
    """Times after ``start`` and before ``end``, as close to each other as their age asks."""
    found: list[float] = []
    for at in reversed(range(len(JUDGED))):
        width, span = JUDGED[at]
        first = max(start, newest - span)
        stop = min(end, newest - JUDGED[at - 1].span) if at else end
        count = int((stop - width / 2 - first) // width)
        if count > 0:
            found += [first + width * number for number in range(1, count + 1)]
            start = found[-1]
    return found


def _filled(column: Rows, runs: Sequence[tuple[int, list[float]]], *, repeat: bool) -> Rows:
    """With what the runs put in: the value that follows, again and again, or the times themselves."""
    if not runs:
        return column
    filled: Rows = array(column.typecode)
    done = 0
    for at, times in runs:
        filled.extend(column[done:at])
        filled.extend(column[at : at + 1] * len(times) if repeat else array("d", times))
        done = at
    filled.extend(column[done:])
    return filled
