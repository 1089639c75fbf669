# SPDX-License-Identifier: Apache-2.0
"""Remembers the latest moments to be marked on a time axis: processes that come and go, growth, and the fix's state."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.ring.layout import ENGINE_CORE, PATCH_STATES, ROLES
from vllm_kvfix_sidecar import report_text
from vllm_kvfix_sidecar.copying import copied
from vllm_kvfix_sidecar.report import NO_PATCH_STATE

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.process_table import ProcessKey
    from vllm_kvfix_sidecar.verdict import Verdict

MOST = 100
APPLIED = PATCH_STATES[2]
STARTED, ENDED, PATCH = "started", "ended", "patch"
GROWTH_BEGAN, GROWTH_ENDED = "growth began", "growth ended"


class Mark(NamedTuple):
    """What happened, to which process, and when, in seconds of the assessment's clock; ``text``: a sentence."""

    time: float
    kind: str
    key: ProcessKey
    text: str


class _Known(NamedTuple):
    """A process: what it is called, and the state of the fix in it."""

    who: str
    patch_state: str


class Marks:
    """Listens to an assessment, and to the episodes of growth. One thread tells it, any may copy what it holds.

    Helpers of vLLM, such as compilers, are left out: they come and go by the hundred.
    """

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=MOST)
        self._known: dict[ProcessKey, _Known] = {}

    def judged(self, key: ProcessKey, verdict: Verdict, history: ProcessHistory, now: float) -> None:
        """A verdict: the first one shows that the process is there."""
        if history.role not in ROLES:
            return
        who, state = report_text.who(verdict), history.patch_state
        known = self._known.get(key)
        if known is None:
            self._marks.append(Mark(history.started, STARTED, key, f"{who} started"))
        elif history.role == ENGINE_CORE and _is_news(known.patch_state, state):
            self._marks.append(Mark(now, PATCH, key, f"the fix in {who}: {state}"))
        self._known[key] = _Known(who, state)

    def ended(self, key: ProcessKey, now: float) -> None:
        """A process is gone."""
        known = self._known.pop(key, None)
        if known is not None:
            self._marks.append(Mark(now, ENDED, key, f"{known.who} ended"))

    def growth(self, key: ProcessKey, kind: str, time: float, text: str) -> None:
        """An episode of growth began or ended at ``time``."""
        self._marks.append(Mark(time, kind, key, text))

    def latest(self) -> list[Mark]:
        """The marks, the oldest first as they were told."""
        return copied(lambda: self._marks)


def _is_news(before: str, now: str) -> bool:
    """That a process's ring was found, which tells of the fix, is none, unless the fix came with it."""
    return now != before and (now == APPLIED or before != NO_PATCH_STATE)
