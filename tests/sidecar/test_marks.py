# SPDX-License-Identifier: Apache-2.0
"""marks: what happened to whom, no more than the latest, and nothing of helpers."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.sdk.resources import Resource

from tests.sidecar.verdicts import history, leak
from vllm_kvfix_sidecar import episodes, marks
from vllm_kvfix_sidecar.episodes import Episodes
from vllm_kvfix_sidecar.marks import Marks
from vllm_kvfix_sidecar.process_table import ProcessKey
from vllm_kvfix_sidecar.verdict import Kind

KEY = ProcessKey(4242, 77)
OTHER = ProcessKey(4243, 78)
AT = 8000.0
CALM = leak(kind=Kind.STEADY)


def judged(made: Marks, state: str, now: float = AT, key: ProcessKey = KEY, role: str = "engine core") -> None:
    """A verdict on a process in which the fix is in that state."""
    made.judged(key, CALM, replace(history(), role=role, patch_state=state), now)


def told(made: Marks) -> list[tuple[float, str, int]]:
    """Time, kind and pid of each mark."""
    return [(mark.time, mark.kind, mark.key.pid) for mark in made.latest()]


class TestProcesses:
    """Who came and went."""

    def test_a_begin_and_an_end_are_told_once(self) -> None:
        """The begin at the time at which the process began, whenever it is judged; the end when it is noticed."""
        made = Marks()
        for now in (AT, AT + 15):
            judged(made, "applied", now)
        made.ended(KEY, AT + 20)
        made.ended(KEY, AT + 21)
        assert told(made) == [(history().started, "started", 4242), (AT + 20, "ended", 4242)]
        assert [mark.text for mark in made.latest()] == [
            "EngineCore (pid 4242) started",
            "EngineCore (pid 4242) ended",
        ]

    def test_helpers_are_left_out(self) -> None:
        """A compiler that comes and goes leaves no mark."""
        made = Marks()
        judged(made, "unknown", role="child")
        made.ended(KEY, AT)
        assert made.latest() == []

    def test_the_newest_stay(self) -> None:
        """Of more than MOST marks the first are forgotten, and so are processes that have ended."""
        made = Marks()
        for pid in range(marks.MOST):
            judged(made, "applied", key=ProcessKey(pid, 1))
            made.ended(ProcessKey(pid, 1), AT + pid)
        assert len(made.latest()) == marks.MOST
        assert made.latest()[-1].key.pid == marks.MOST - 1
        assert made.latest()[0].key.pid == marks.MOST // 2
        assert made._known == {}


class TestFix:
    """The state of the fix."""

    def test_a_change_is_told(self) -> None:
        """From refused to applied, and back to off: two marks at the times of the verdicts."""
        made = Marks()
        for at, state in enumerate(("refused", "refused", "applied", "off")):
            judged(made, state, AT + at)
        assert told(made)[1:] == [(AT + 2, "patch", 4242), (AT + 3, "patch", 4242)]
        assert made.latest()[1].text == "the fix in EngineCore (pid 4242): applied"

    def test_a_ring_that_is_found_is_no_change(self) -> None:
        """From unknown to refused is none, from unknown to applied is one: it came with the ring."""
        for state, kinds in (("refused", ["started"]), ("applied", ["started", "patch"])):
            made = Marks()
            judged(made, "unknown")
            judged(made, state, AT + 1)
            assert [kind for _, kind, _ in told(made)] == kinds

    def test_only_of_engine_cores(self) -> None:
        """A server's own copy of the fix does nothing there."""
        made = Marks()
        for state in ("refused", "applied"):
            judged(made, state, role="api server")
        assert [kind for _, kind, _ in told(made)] == ["started"]


class TestGrowth:
    """Episodes tell of growth."""

    def test_begin_and_end_of_an_episode(self) -> None:
        """The begin is that of the window, the end when it was calm first; each with a sentence."""
        made = Marks()
        listener = Episodes(Resource({}), None, None, marked=made.growth)
        window = leak().window_s
        listener.judged(KEY, leak(), history(), AT)
        listener.judged(KEY, leak(), history(), AT + 15)
        listener.judged(KEY, CALM, history(), AT + 30)
        listener.judged(KEY, CALM, history(), AT + 30 + episodes.CALM_S)
        began = max(history().started, AT - window)
        assert told(made) == [(began, "growth began", 4242), (AT + 30, "growth ended", 4242)]
        began_text, ended_text = (mark.text for mark in made.latest())
        assert began_text.startswith("EngineCore (pid 4242) leaks: ")
        assert not began_text.endswith(".")
        assert ended_text.startswith("EngineCore (pid 4242) grew for ")

    def test_a_process_that_dies_ends_its_growth(self) -> None:
        """Growth is over with its process; what lasts when the sidecar stops has no end."""
        made = Marks()
        listener = Episodes(Resource({}), None, None, marked=made.growth)
        listener.judged(KEY, leak(), history(), AT)
        listener.ended(KEY, AT + 9)
        listener.judged(OTHER, leak(), history(), AT)
        listener.close(AT + 20)
        assert [(kind, time) for time, kind, _ in told(made)][1::2] == [("growth ended", AT + 9)]
