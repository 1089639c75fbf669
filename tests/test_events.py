# SPDX-License-Identifier: Apache-2.0
"""events: what is encoded is what is decoded, and hostile words are refused."""

from __future__ import annotations

import contextlib
import re
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix import events

HALF = st.integers(0, events.LOW)
WORD = st.integers(0, events.WORD_MASK)
NUMBER = st.integers(0, events.NUMBER_MASK)
BLOCKS = st.tuples(HALF, HALF).map(lambda pair: events.Blocks(*pair))
GROUPS = st.lists(BLOCKS, max_size=7).map(tuple)
CONTEXT = st.builds(
    events.TraceContext, st.integers(1, (1 << 128) - 1), st.integers(1, events.WORD_MASK), st.integers(0, 255)
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=100)
IDENTITY = st.builds(events.Identity, TEXT, st.none() | CONTEXT)
GROUP = st.builds(events.Group, WORD, st.text("abcdefghijklmnopqrstuvwxyzABC", max_size=events.LONGEST_GROUP_KIND))
EVENT: st.SearchStrategy[Any] = st.one_of(
    st.builds(events.Config, WORD, HALF, HALF, st.booleans(), st.lists(GROUP, max_size=5).map(tuple)),
    st.builds(events.Arrived, NUMBER, WORD, WORD, IDENTITY),
    st.builds(events.Preempted, NUMBER, WORD, WORD, WORD),
    st.builds(
        events.Finished,
        *(
            NUMBER,
            WORD,
            WORD,
            WORD,
            st.sampled_from(events.FINISH_REASONS),
            st.booleans(),
            HALF,
            HALF,
            HALF,
            HALF,
            WORD,
        ),
        *(WORD, HALF, HALF, GROUPS, IDENTITY),
    ),
    st.builds(events.Freed, NUMBER, WORD),
    st.sampled_from(list(events.SCOPES)).flatmap(
        lambda scope: st.builds(
            events.Figures,
            WORD,
            st.just(scope),
            st.dictionaries(st.sampled_from(events.SCOPES[scope]), WORD),
        )
    ),
    st.builds(events.Unread, WORD, st.sampled_from(list(events.SCOPES)), TEXT),
    st.builds(events.Census, WORD, WORD, WORD, st.booleans()),
    st.builds(
        events.Container,
        *(WORD, TEXT, HALF, HALF, st.none() | st.integers(0, events.WORD_MASK - 1), WORD, WORD, WORD, WORD, WORD),
    ),
)
STEP = st.builds(events.Step, WORD, HALF, HALF, HALF, HALF, *[WORD] * 12, st.lists(WORD, max_size=7).map(tuple))
OF_A_STEP: st.SearchStrategy[Any] = st.one_of(
    st.builds(events.Admitted, NUMBER, st.just(0), st.booleans(), HALF, HALF, GROUPS),
    st.builds(events.Allocated, NUMBER, st.just(0), st.lists(WORD, max_size=7).map(tuple)),
    st.builds(events.Refused, NUMBER, st.just(0)),
)


@given(
    first=st.lists(EVENT, max_size=5),
    step=STEP,
    of_it=st.lists(OF_A_STEP, max_size=5),
    last=st.lists(EVENT, max_size=3),
)
def test_what_is_encoded_is_decoded(first: list[Any], step: events.Step, of_it: list[Any], last: list[Any]) -> None:
    """Every event comes back as it was, and what happened in a step has the step's time."""
    told = [*first, step, *(event._replace(time=step.time) for event in of_it), *last]
    words = [word for event in told for word in events.encode(event)]
    assert list(events.decode(array("Q", words))) == told


def test_the_worked_example_of_the_docstring_is_so() -> None:
    """The words in the docstring are those of the events that it names."""
    found = re.search(r"^    ((?:[0-9a-f]{2}[ \n]+)+)", (events.__doc__ or "").split("Worked example")[1], re.MULTILINE)
    assert found is not None
    shown = bytes.fromhex("".join(found[1].split()))
    words = [*events.encode(events.Allocated(7, 0, (2,))), *events.encode(events.Refused(9, 0))]
    assert shown == b"".join(word.to_bytes(8, "big") for word in words)


@given(st.lists(st.one_of(WORD, st.integers(1, 12).map(lambda kind: events.head(kind, 3))), max_size=40))
def test_hostile_words_are_events_or_malformed(words: list[int]) -> None:
    """Any words at all give events or MalformedError, and no text or tuple longer than its bound."""
    with contextlib.suppress(events.MalformedError):
        for event in events.decode(array("Q", words)):
            assert len(repr(event)) < 20_000


@given(event=EVENT, cut=st.integers(0, 200))
def test_a_cut_record_is_malformed(event: Any, cut: int) -> None:
    """A record that ends before its own length says is no event."""
    words = events.encode(event)
    if cut < len(words) - 1:
        with pytest.raises(events.MalformedError):
            list(events.decode(array("Q", words[: cut + 1])))


def test_a_kind_that_is_not_known_is_passed_over() -> None:
    """What a later recorder adds does not hide what is known."""
    words = [events.head(200, 3), 1, 2, *events.encode(events.Freed(5, 6))]
    assert list(events.decode(array("Q", words))) == [events.Freed(5, 6)]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", False),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", False),
        ("", False),
        (None, False),
    ],
)
def test_a_traceparent_is_taken_as_the_recommendation_says(text: str | None, *, good: bool) -> None:
    """A valid header gives its three numbers, every other one nothing."""
    found = events.parse_traceparent(text)
    wanted = events.TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, 1)
    assert found == (wanted if good else None)


def test_a_long_id_is_cut() -> None:
    """An id longer than the bound is told up to it."""
    (told,) = events.decode(array("Q", events.encode(events.Arrived(1, 2, 3, events.Identity("x" * 5000)))))
    assert isinstance(told, events.Arrived)
    assert told.identity.request_id == "x" * events.LONGEST_ID
