# SPDX-License-Identifier: Apache-2.0
"""Numbers for tired people: sizes, times, shares and intervals in a few words; and text of strangers made harmless."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.verdict import Interval

_SIZE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_YEAR = 365.25 * _DAY
# (seconds in the unit, its name, from how many seconds on the next unit is used)
_TIME_UNITS = (
    (1.0, "second", 1.5 * _MINUTE),
    (_MINUTE, "minute", 1.5 * _HOUR),
    (_HOUR, "hour", 2 * _DAY),
    (_DAY, "day", 2 * _YEAR),
    (_YEAR, "year", 100 * _YEAR),
)
_FOREVER = "over 100 years"
_NOW = "under 1 second"
_LEAST = 0.001
_MOST = 999.5  # rounds to four digits
_ELLIPSIS = "…"


def size(count: float) -> str:
    """Bytes in binary units with three significant digits: ``88 MiB``, ``1.53 KiB``, ``154 bytes``, ``-2 MiB``."""
    if math.isnan(count):
        return "an unknown size"
    sign, left = "-" if count < 0 else "", abs(count)
    if 0 < left < _LEAST:
        return "under 0.001 bytes"
    for unit in _SIZE_UNITS:
        if left < _MOST:
            number = _three_digits(left)
            return f"{sign}{number} {'byte' if unit == 'bytes' and number == '1' else unit}"
        left /= 1024
    return f"{'under -' if sign else 'over '}999 EiB"


def _three_digits(value: float) -> str:
    decimals = next((n for n, bound in ((3, 0.9995), (2, 9.995), (1, 99.95)) if value < bound), 0)
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def duration(seconds: float) -> str:
    """A time in the unit that suits it: ``20 seconds``, ``1.5 hours``, ``3.1 days``; negative ones are none."""
    if math.isnan(seconds):
        return "an unknown time"
    if seconds < 1:
        return _NOW
    for unit, name, end in _TIME_UNITS:
        if seconds < end:
            number = _two_digits(seconds / unit)
            return f"{number} {name}" if number == "1" else f"{number} {name}s"
    return _FOREVER


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0")  # noqa: PLR2004  # rounds to 10


def when(interval: Interval) -> str:
    """When something happens that takes so many seconds from now: ``in 3.1 to 4 days``, ``within 2 hours``."""
    low, high = duration(interval.low), duration(interval.high)
    if math.isnan(interval.low) or math.isnan(interval.high):
        return "at an unknown time"
    if low == _FOREVER:
        return "not within 100 years"
    if high == _FOREVER:
        return f"in {low} or more" if low != _NOW else "at any time"
    if low == high:
        return f"in about {low}" if low != _NOW else "now"
    if low == _NOW:
        return f"within {high}"
    number, _, unit = low.partition(" ")
    same = unit.rstrip("s") == high.partition(" ")[2].rstrip("s")
    return f"in {number if same else low} to {high}"


def share(fraction: float) -> str:
    """A fraction in percent: ``91 %``."""
    if math.isnan(fraction):
        return "an unknown share"
    if 0 < fraction < 0.01:  # noqa: PLR2004  # a percent
        return "under 1 %"
    percent = max(0.0, fraction * 100)
    return f"{percent:.0f} %" if percent < _MOST else "over 999 %"


def clean(text: str, most: int = 500) -> str:
    """One line of at most ``most`` characters that neither moves a cursor, nor colours, nor turns a line round.

    Names and paths come from engines, and from whoever answers at an address.
    """
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text[: most + 1]
    )
    return shown if len(shown) <= most else shown[: most - 1] + _ELLIPSIS
