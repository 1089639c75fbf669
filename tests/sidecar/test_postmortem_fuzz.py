# SPDX-License-Identifier: Apache-2.0
"""A ring is hostile input: whatever it holds, a post-mortem is text and JSON that harm nobody, or an error in words."""

from __future__ import annotations

import json
import os
import random
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits

from tests.sidecar.fake_engine import FakeEngine, admitted, finished
from tests.sidecar.growing_engine import past
from vllm_kvfix import events
from vllm_kvfix.events import Arrived, Container, Figures, Finished, Identity, Step, Unread
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import RingError
from vllm_kvfix_sidecar import death, death_export, last_words, postmortem_json, postmortem_text

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_kvfix_sidecar.death import Death

TEXTS = st.text(max_size=60) | st.sampled_from(["\x1b[31m\n\x1b]0;x\x07", "\u202ereversed", "a\rb", "'; rm -rf /"])
WORDS = st.integers(0, layout.WORD_MASK)
NOT_PRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


def ring(path: Path, *frames: list[events.Event]) -> Path:
    """A ring of these frames whose process is gone."""
    engine = FakeEngine(path, boot=bytes(range(16)))
    for happened in frames:
        engine.write(*happened)
    os.close(engine.writer._descriptor)
    return path


def tell(path: Path) -> Death | None:
    """All that can be made of it; None: it is refused, in words that say why."""
    try:
        made = death.of(last_words.of(path))
    except RingError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert str(path) in refused
        return None
    now = time.time_ns()
    text = postmortem_text.text(made, now)
    assert not NOT_PRINTABLE.search(text)
    assert len(text.splitlines()) < 300
    told = json.loads(json.dumps(postmortem_json.of(made, now, 1), allow_nan=False))
    assert told["answer"] == text.splitlines()[0]
    span = death_export.span(made, Resource({}), SpanLimits())
    assert 0 <= (span.start_time or 0) <= (span.end_time or 0) < 1 << 64
    for value in (span.attributes or {}).values():
        assert not isinstance(value, int) or abs(value) < 1 << 63
    assert death_export.event(made, Resource({})).log_record.body
    return made


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a ring with all that there is in one."""
    now = time.monotonic_ns()
    arrival = Arrived(7, now, 100, Identity("cmpl-7-0a1b2c3d"))
    step = Step._make([now, 1, 0, 5, 5, *[9] * 12, (3,)])
    path = ring(
        tmp_path_factory.mktemp("sound") / "a.ring", *past(now, 90 << 20, 1 << 30)[:60], [arrival, step, admitted(7)]
    )
    return path.read_bytes()


def test_the_sound_one_is_told(tmp_path: Path, sound: bytes) -> None:
    """What the damage below is done to holds steps, figures, containers and a request."""
    (tmp_path / "a.ring").write_bytes(sound)
    made = tell(tmp_path / "a.ring")
    assert made is not None
    assert made.words.last_step is not None
    assert made.words.containers
    assert made.words.grown
    assert made.lost_requests == 1


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_ring(tmp_path: Path, sound: bytes, seed: int) -> None:
    """Cut anywhere, with bits and words turned anywhere, in the header above all."""
    chance = random.Random(seed)  # noqa: S311  # a test
    data = bytearray(sound)
    for _ in range(chance.choice((1, 3, 30))):
        at = chance.randrange(600) if chance.random() < 0.5 else chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
    for _ in range(chance.choice((0, 1, 4))):
        word = chance.randrange(2, 52) * layout.WORD
        data[word : word + layout.WORD] = chance.choice((b"\0" * 8, b"\xff" * 8, chance.randbytes(8)))
    if chance.random() < 0.3:
        del data[chance.randrange(len(data)) :]
    (tmp_path / "a.ring").write_bytes(data)
    tell(tmp_path / "a.ring")


def _figures(values: dict[str, int]) -> Figures:
    return Figures(5 * 10**9, "cgroup", values)


def _kept(number: int, words: list[int], name: str) -> Finished:
    """It was over, and its blocks were not given back."""
    few = [word & 0xFFFF for word in words[3:5]]
    return finished(
        number,
        time=words[0],
        arrival=words[1],
        admission=words[2],
        freed=False,
        prompt_tokens=few[0],
        output_tokens=few[1],
        peak=words[5],
        held=words[6],
        identity=Identity(name),
    )


EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(Arrived, st.integers(1, 5), WORDS, WORDS, st.builds(Identity, TEXTS)),
    st.builds(Container, WORDS, TEXTS, WORDS, WORDS, st.none() | st.integers(0, 1 << 62), *[WORDS] * 5),
    st.builds(Figures, WORDS, st.just("status"), st.dictionaries(st.sampled_from(events.SCOPES["status"]), WORDS)),
    st.builds(_figures, st.dictionaries(st.sampled_from(events.SCOPES["cgroup"]), WORDS)),
    st.builds(Unread, WORDS, st.sampled_from(list(events.SCOPES)), TEXTS),
    st.builds(lambda words: Step._make([*words[:17], (words[17],)]), st.lists(WORDS, min_size=18, max_size=18)),
    st.builds(_kept, st.integers(1, 5), st.lists(WORDS, min_size=9, max_size=9), TEXTS),
)


@settings(max_examples=150, deadline=None)
@given(frames=st.lists(st.lists(EVENTS, min_size=1, max_size=5), max_size=8), offset=WORDS, beat=WORDS, end=WORDS)
def test_a_ring_of_a_liars_making(
    tmp_path_factory: pytest.TempPathFactory, frames: list[list[events.Event]], offset: int, beat: int, end: int
) -> None:
    """Any figures, times and texts, whole and with right checksums."""
    path = tmp_path_factory.mktemp("liar") / "a.ring"
    engine = FakeEngine(path, boot=bytes(range(16)))
    for happened in frames:
        engine.write(*happened)
    engine.writer.end(layout.ENDED_BY_EXCEPTION, "\x1b[31mred\n")
    for word, value in (
        (layout.CLOCK_OFFSET_WORD, offset),
        (layout.HEARTBEAT_WORD, beat),
        (layout.END_TIME_WORD, end),
        (layout.START_TIME_WORD, offset),
        (layout.END_WORD, end % 5),
    ):
        engine.poke(word, value)
    os.close(engine.writer._descriptor)
    assert tell(path) is not None
