# SPDX-License-Identifier: Apache-2.0
"""words: numbers become few words that keep their order, and no text of a stranger moves a cursor."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvfix_sidecar.verdict import Interval
from vllm_kvfix_sidecar.words import clean, duration, share, size, when

ANY = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(1 << 70), 1 << 70).map(float)
SIZES = st.floats(0, 2.0**69) | st.integers(0, 1 << 40).map(float)
TIMES = st.floats(0, 5e9) | st.integers(0, 200_000).map(float)
UNITS = {"bytes": 0, "byte": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5, "EiB": 6}
SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "year": 365.25 * 86400}


def bytes_of(words: str) -> float:
    """What a reader takes a size for."""
    if words.startswith("under "):
        return 0.0005
    number, unit = words.removeprefix("over ").split(" ")
    return float(number) * 1024.0 ** UNITS[unit] * (2 if words.startswith("over ") else 1)


def seconds_of(words: str) -> float:
    """What a reader takes a time for."""
    if words.startswith("under "):
        return 0.5
    number, unit = words.removeprefix("over ").split(" ")
    return float(number) * SECONDS[unit.rstrip("s")] * (2 if words.startswith("over ") else 1)


class TestSize:
    """Bytes."""

    @pytest.mark.parametrize(
        ("count", "words"),
        [
            (0, "0 bytes"),
            (1, "1 byte"),
            (154.2, "154 bytes"),
            (0.37, "0.37 bytes"),
            (0.0001, "under 0.001 bytes"),
            (999.4, "999 bytes"),
            (1000, "0.977 KiB"),
            (1536, "1.5 KiB"),
            (88 << 20, "88 MiB"),
            (16 << 30, "16 GiB"),
            (-(2 << 20), "-2 MiB"),
            (1 << 80, "over 999 EiB"),
            (math.inf, "over 999 EiB"),
            (-math.inf, "under -999 EiB"),
            (math.nan, "an unknown size"),
        ],
    )
    def test_the_words(self, count: float, words: str) -> None:
        """Binary units, three digits, no zeros behind."""
        assert size(count) == words

    @settings(deadline=None)
    @given(SIZES, SIZES)
    def test_more_is_never_less_in_words(self, one: float, other: float) -> None:
        """The words of two sizes, read as numbers, are in the order of the sizes."""
        less, more = sorted((one, other))
        assert bytes_of(size(less)) <= bytes_of(size(more))

    @settings(deadline=None)
    @given(st.floats(0.001, 2.0**68))
    def test_the_words_are_the_size_within_half_a_percent(self, count: float) -> None:
        """Three digits are that close; below a byte, a thousandth of one."""
        assert bytes_of(size(count)) == pytest.approx(count, rel=0.0051, abs=0.0006)

    @settings(deadline=None)
    @given(ANY)
    def test_they_are_short_and_never_nan(self, count: float) -> None:
        """Whatever the number: at most 17 characters, of which none says nan, inf or an exponent."""
        words = size(count)
        assert len(words) <= 17
        assert not re.search(r"nan|inf|\de", words)


class TestDuration:
    """Times."""

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [
            (-5, "under 1 second"),
            (0.2, "under 1 second"),
            (1, "1 second"),
            (89, "89 seconds"),
            (90, "1.5 minutes"),
            (120, "2 minutes"),
            (5400, "1.5 hours"),
            (36000, "10 hours"),
            (3.1 * 86400, "3.1 days"),
            (400 * 86400, "400 days"),
            (3 * 365.25 * 86400, "3 years"),
            (math.inf, "over 100 years"),
            (math.nan, "an unknown time"),
        ],
    )
    def test_the_words(self, seconds: float, words: str) -> None:
        """The unit that suits it, two digits."""
        assert duration(seconds) == words

    @settings(deadline=None)
    @given(TIMES, TIMES)
    def test_longer_is_never_shorter_in_words(self, one: float, other: float) -> None:
        """The words of two times, read as numbers, are in the order of the times."""
        less, more = sorted((one, other))
        assert seconds_of(duration(less)) <= seconds_of(duration(more))

    @settings(deadline=None)
    @given(ANY)
    def test_they_are_short_and_never_nan(self, seconds: float) -> None:
        """Whatever the number: at most 15 characters, of which none says nan, inf or an exponent."""
        words = duration(seconds)
        assert len(words) <= 15
        assert not re.search(r"nan|inf|\de", words)


class TestWhen:
    """Intervals."""

    @pytest.mark.parametrize(
        ("low", "high", "words"),
        [
            (3.1 * 86400, 4 * 86400, "in 3.1 to 4 days"),
            (2700, 7200, "in 45 minutes to 2 hours"),
            (60 * 60 * 24, 86400, "in about 24 hours"),
            (86400 * 3, math.inf, "in 3 days or more"),
            (math.inf, math.inf, "not within 100 years"),
            (0, 7200, "within 2 hours"),
            (0, 0, "now"),
            (-10, 0, "now"),
            (0, math.inf, "at any time"),
            (math.nan, 1, "at an unknown time"),
        ],
    )
    def test_the_words(self, low: float, high: float, words: str) -> None:
        """One unit where both ends have the same."""
        assert when(Interval(low, low, high)) == words

    @settings(deadline=None)
    @given(ANY, ANY)
    def test_they_are_short_and_never_nan(self, low: float, high: float) -> None:
        """Whatever the ends: at most 40 characters."""
        words = when(Interval(low, low, high))
        assert len(words) <= 40
        assert not re.search(r"nan|inf|\de", words)


class TestShare:
    """Parts of a whole."""

    @pytest.mark.parametrize(
        ("fraction", "words"),
        [
            (0, "0 %"),
            (0.004, "under 1 %"),
            (0.91, "91 %"),
            (1, "100 %"),
            (50, "over 999 %"),
            (math.nan, "an unknown share"),
        ],
    )
    def test_the_words(self, fraction: float, words: str) -> None:
        """Whole percents."""
        assert share(fraction) == words

    @settings(deadline=None)
    @given(ANY)
    def test_they_are_short_and_never_nan(self, fraction: float) -> None:
        """Whatever the number."""
        words = share(fraction)
        assert len(words) <= 16
        assert not re.search(r"nan|inf|\de", words)


class TestClean:
    """Texts of strangers."""

    @settings(deadline=None)
    @given(st.text(), st.integers(2, 80))
    def test_what_is_left_is_one_printable_line(self, text: str, most: int) -> None:
        """Whatever the text: no control character, no line end, no turn of direction, and no more than asked for."""
        cleaned = clean(text, most)
        assert cleaned.isprintable()
        assert len(cleaned) <= most

    @pytest.mark.parametrize("text", ["", "scheduler.waiting[*]", "Größe, ok"])
    def test_a_harmless_text_stays_as_it_is(self, text: str) -> None:
        """Letters of any language are no danger."""
        assert clean(text) == text

    @pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "a\rb", "\u202eabc", "\x9b31m", "a\u2028b", "\ud800"])
    def test_a_harmful_one_is_shown_for_what_it_is(self, text: str) -> None:
        """Escape sequences, line ends, overrides of direction and lone surrogates are written out."""
        assert "\\" in clean(text)
        assert clean(text).isascii()
