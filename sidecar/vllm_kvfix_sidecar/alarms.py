# SPDX-License-Identifier: Apache-2.0
"""Says in the log when a process begins to grow without a known end, when that changes, and when it is over."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import report, report_text, words
from vllm_kvfix_sidecar.logs import fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.process_table import ProcessKey
    from vllm_kvfix_sidecar.verdict import Verdict

# One that wavers between two culprits is said once in so long.
AGAIN_S = 300.0
CALM_S = 60.0

_log = logging.getLogger(__name__)


@dataclass
class _Said:
    """What was said last of a process: the verdict, when, and since when it is calm."""

    verdict: Verdict
    at: float
    calm_since: float | None = None


class Alarms:
    """Remembers what was said of which process; ``now`` in seconds of one steady clock."""

    def __init__(self) -> None:
        self._said: dict[ProcessKey, _Said] = {}

    def judged(self, key: ProcessKey, verdict: Verdict, history: ProcessHistory, now: float) -> None:
        """A new verdict on a process: say it if it is news."""
        said = self._said.get(key)
        if verdict.alarming:
            if said is None:
                self._warn(key, verdict, history, now)
                return
            said.calm_since = None
            if _gist(verdict) != _gist(said.verdict) and now - said.at >= AGAIN_S:
                self._warn(key, verdict, history, now)
        elif said is not None:
            said.calm_since = now if said.calm_since is None else said.calm_since
            if now - said.calm_since >= CALM_S:
                self._over(key, f"it is over, now: {verdict.kind.value}")

    def ended(self, key: ProcessKey, now: float) -> None:  # noqa: ARG002  # as listeners are called
        """The process is gone, and its growth with it."""
        if key in self._said:
            self._over(key, "the process has ended")

    def _warn(self, key: ProcessKey, verdict: Verdict, history: ProcessHistory, now: float) -> None:
        self._said[key] = _Said(verdict, now)
        told = report_text.sentence(report.of(history, verdict))
        remedy = f"; {verdict.remedy.action}" if verdict.remedy is not None else ""
        _log.warning("%s%s", told, remedy, extra=fields(**dict(_figures(verdict))))

    def _over(self, key: ProcessKey, how: str) -> None:
        verdict = self._said.pop(key).verdict
        figures = fields(pid=verdict.pid, role=verdict.role, kind=verdict.kind.value)
        _log.info("%s of %s: %s", verdict.kind.value, report_text.who(verdict), how, extra=figures)


def _gist(verdict: Verdict) -> tuple[object, ...]:
    return verdict.kind, verdict.culprits[0].path if verdict.culprits else None


def _figures(verdict: Verdict) -> Iterator[tuple[str, object]]:
    """What a machine would look for in the line."""
    yield "pid", verdict.pid
    yield "role", verdict.role
    yield "kind", verdict.kind.value
    if verdict.category:
        yield "category", verdict.category
    if verdict.slope and math.isfinite(verdict.slope.best):
        yield "bytes_per_hour", round(verdict.slope.best)
    if verdict.time_to_limit_s and math.isfinite(verdict.time_to_limit_s.best):
        yield "seconds_to_limit", round(verdict.time_to_limit_s.best)
    if verdict.culprits:
        yield "container", words.clean(verdict.culprits[0].path)
    if verdict.remedy and verdict.remedy.issue:
        yield "issue", verdict.remedy.issue
    if verdict.remedy and verdict.remedy.fixed_in:
        yield "fixed_in", verdict.remedy.fixed_in
