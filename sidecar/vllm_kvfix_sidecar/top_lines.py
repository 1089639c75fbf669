# SPDX-License-Identifier: Apache-2.0
"""Lines of styled text for a terminal that are never wider than it: wrapped, cut, and set in tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from unicodedata import east_asian_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ELLIPSIS = "…"
_SPARKS = "▁▂▃▄▅▆▇█"
# Less than that of the whole is noise, and drawn flat.
_FLAT = 0.01
_NARROWEST = 8
_WIDE_GAP, _GAP = 2, 1
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "reverse": "7"}
_ASCII = str.maketrans({ELLIPSIS: "~", "─": "-", "▲": "^", "▼": "v", **dict(zip(_SPARKS, "_.-~=+*#", strict=True))})

# (text, style): a style is words such as "bold red", or nothing.
Line: TypeAlias = "list[tuple[str, str]]"


class Column(NamedTuple):
    """``worth``: where there is no room the least goes first; ``least``: what its texts may be shortened to before."""

    title: str
    worth: int
    right: bool = True
    least: int | None = None


def line(text: str = "", style: str = "") -> Line:
    """A line of one style."""
    return [(text, style)]


def cells(text: str) -> int:
    """The columns that it takes; a combining mark is counted as one, so never too few."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def _head(text: str, width: int) -> str:
    """As much of its begin as there is room for."""
    taken = 0
    for at, char in enumerate(text):
        taken += cells(char)
        if taken > width:
            return text[:at]
    return text


def cut(text: str, width: int) -> str:
    """Its begin where there is no room for all."""
    if cells(text) <= width:
        return text
    return _head(text, width - 1) + ELLIPSIS if width > 0 else ""


def shortened(text: str, width: int) -> str:
    """Begin and end where there is no room for all: of a path the end says most."""
    if cells(text) <= width or width < _NARROWEST:
        return cut(text, width)
    first = (width - 1) // 3
    tail = _head(text[::-1], width - 1 - first)[::-1]
    return _head(text, first) + ELLIPSIS + tail


def fitted(told: Line, width: int) -> Line:
    """The line cut at the width."""
    found: Line = []
    left = width
    for text, style in told:
        shown = cut(text, left)
        found.append((shown, style))
        left -= cells(shown)
        if shown != text:
            break
    return found


def wrapped(text: str, width: int, first: str = "", style: str = "") -> list[Line]:
    """The words of one sentence behind an indent as wide as ``first``; a word that is too long is broken."""
    indent = " " * cells(first)
    room = max(1, width - len(indent))
    rows = [""]
    for whole in text.split():
        word = whole
        while cells(word) > room:
            left = room - cells(rows[-1]) - 1 if rows[-1] else room
            if left < _NARROWEST and rows[-1]:
                rows.append("")
                continue
            piece = _head(word, left) or word[:1]
            rows[-1] = f"{rows[-1]} {piece}".lstrip()
            word = word[len(piece) :]
            rows.append("")
        if not word:
            continue
        joined = f"{rows[-1]} {word}".lstrip()
        if cells(joined) > room:
            rows.append(word)
        else:
            rows[-1] = joined
    told = [row for row in rows if row] or [""]
    return [fitted([(first if at == 0 else indent, ""), (row, style)], width) for at, row in enumerate(told)]


def table(columns: Sequence[Column], rows: Sequence[Line], width: int) -> list[Line]:
    """A head and a line for each row, less the columns that there is no room for."""
    kept = list(range(len(columns)))
    while True:
        widths = {at: max([cells(columns[at].title), *(cells(row[at][0]) for row in rows)], default=0) for at in kept}
        gap = _WIDE_GAP if _total(widths.values(), _WIDE_GAP) <= width else _GAP
        _shrink(widths, columns, _total(widths.values(), gap) - width)
        if _total(widths.values(), gap) <= width or len(kept) == 1:
            break
        kept.remove(min(kept, key=lambda at: columns[at].worth))
    widths = {at: min(taken, width) for at, taken in widths.items()}
    head: Line = [(column.title, "bold") for column in columns]
    return [fitted(_row(row, columns, widths, gap), width) for row in (head, *rows)]


def _total(widths: Iterable[int], gap: int) -> int:
    widths = list(widths)
    return sum(widths) + gap * (len(widths) - 1)


def _shrink(widths: dict[int, int], columns: Sequence[Column], missing: int) -> None:
    for at in sorted(widths, key=lambda at: -widths[at]):
        least = columns[at].least
        if least is not None and missing > 0:
            taken = min(missing, max(0, widths[at] - max(least, cells(columns[at].title))))
            widths[at] -= taken
            missing -= taken


def _row(row: Line, columns: Sequence[Column], widths: dict[int, int], gap: int) -> Line:
    told: Line = []
    for at, width in widths.items():
        text, style = row[at]
        shown = shortened(text, width) if columns[at].least is not None else cut(text, width)
        space = " " * (width - cells(shown))
        if told:
            told.append((" " * gap, ""))
        told += [(space, ""), (shown, style)] if columns[at].right else [(shown, style), (space, "")]
    return told


def spark(values: Sequence[float], width: int) -> str:
    """A little chart of the newest values."""
    if len(values) < 2 or width < 1:  # noqa: PLR2004  # one is no course
        return ""
    step = max(1.0, len(values) / width)
    shown = [values[int(len(values) - 1 - at * step)] for at in range(min(width, len(values)))][::-1]
    low, high = min(shown), max(shown)
    if high - low <= _FLAT * abs(high):
        return _SPARKS[0] * len(shown)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in shown)


def plain(told: Sequence[Line], encoding: str, *, colour: bool) -> str:
    """Lines for a file or a terminal; without ``colour`` no control character but the line feeds."""
    rows = ("".join(_painted(text, style if colour else "") for text, style in row) for row in told)
    return "".join(f"{_encodable(row if colour else row.rstrip(), encoding)}\n" for row in rows)


def _painted(text: str, style: str) -> str:
    codes = ";".join(_CODES[word] for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


def _encodable(text: str, encoding: str) -> str:
    """The text with a character of the same width for each that the terminal has no code for."""
    try:
        text.encode(encoding)
    except (UnicodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode()
    return text
