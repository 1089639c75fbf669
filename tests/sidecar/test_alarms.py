# SPDX-License-Identifier: Apache-2.0
"""alarms: the log says once what grows, once what it turned out to be, and once that it is over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.sidecar.fake_processes import ENGINE, PATH, leak, steady
from vllm_kvfix_sidecar.alarms import AGAIN_S, CALM_S, Alarms
from vllm_kvfix_sidecar.logs import PlainFormatter
from vllm_kvfix_sidecar.observed import ProcessHistory
from vllm_kvfix_sidecar.verdict import Kind

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.verdict import Verdict

HISTORY = ProcessHistory(ENGINE.pid, "engine core", "EngineCore", 0.0, {})


@pytest.fixture(autouse=True)
def _every_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def levels(caplog: pytest.LogCaptureFixture, *told: tuple[float, Verdict]) -> list[tuple[str, float]]:
    """What was said, and when, of verdicts that came at these times."""
    alarms, said = Alarms(), []
    for now, verdict in told:
        before = len(caplog.records)
        alarms.judged(ENGINE, verdict, HISTORY, now)
        said += [(record.levelname, now) for record in caplog.records[before:]]
    return said


def test_one_that_goes_on_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A leak that is found every 15 s for a day is one line."""
    assert levels(caplog, *[(15.0 * turn, leak()) for turn in range(5760)]) == [("WARNING", 0.0)]


def test_the_line_says_what_one_would_ask(caplog: pytest.LogCaptureFixture) -> None:
    """Who, what, the container, when, what to do; and figures for a machine."""
    levels(caplog, (0.0, leak()))
    line = PlainFormatter().format(caplog.records[0])
    for text in ("4242", "EngineCore", "heap", PATH, "Install the fix.", "kind=", "bytes_per_hour=92000000", "0.26.0"):
        assert text in line
    assert "seconds_to_limit=7200" in line


def test_a_quiet_process_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    """Steady, warming, bounded and retained are no alarm."""
    quiet = [Kind.STEADY, Kind.WARMING, Kind.BOUNDED, Kind.RETAINED]
    assert levels(caplog, *[(15.0 * at, leak(kind)) for at, kind in enumerate(quiet)]) == []


@pytest.mark.parametrize("changed", [leak(Kind.UNEXPLAINED), leak(path="other")])
def test_a_change_is_said(caplog: pytest.LogCaptureFixture, changed: Verdict) -> None:
    """Another kind, or another container, is said, once."""
    told = levels(caplog, (0.0, leak()), (AGAIN_S, changed), (2 * AGAIN_S, changed))
    assert told == [("WARNING", 0.0), ("WARNING", AGAIN_S)]


def test_one_that_wavers_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Two culprits that take turns every 15 s for an hour are said every five minutes at most."""
    told = [(15.0 * turn, leak(path=str(turn % 2))) for turn in range(240)]
    assert len(levels(caplog, *told)) <= 3600 / AGAIN_S + 1


def test_its_end_is_said_when_it_was_calm_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """A moment's calm is no end; CALM_S are, and are said once; a new growth is an alarm again."""
    told = levels(
        caplog,
        (0.0, leak()),
        (15.0, steady()),
        (30.0, leak()),
        (15.0 + CALM_S, steady()),
        (15.0 + 2 * CALM_S, steady()),
        (30.0 + 2 * CALM_S, steady()),
        (45.0 + 2 * CALM_S, leak()),
    )
    assert told == [("WARNING", 0.0), ("INFO", 15.0 + 2 * CALM_S), ("WARNING", 45.0 + 2 * CALM_S)]


def test_the_end_of_a_process_ends_its_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """It is said of one that grew, and of no other."""
    alarms = Alarms()
    alarms.ended(ENGINE, 1.0)
    alarms.judged(ENGINE, leak(), HISTORY, 2.0)
    alarms.ended(ENGINE, 3.0)
    alarms.ended(ENGINE, 4.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "has ended" in caplog.text
