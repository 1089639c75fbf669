# SPDX-License-Identifier: Apache-2.0
"""What was found of each case against what was to be found, and the totals that are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.labelled.cases import TOTALS, Case
from vllm_kvfix_sidecar.verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ALARMS = frozenset({Kind.UNBOUNDED.name, Kind.UNEXPLAINED.name})
FOUND = ALARMS | {Kind.RETAINED.name}
# How far bytes for each unit of the load may lie from what the case leaked.
TOLERANCE = 0.10


@dataclass(frozen=True)
class Outcome:
    """A case, and what was found of it.

    Attributes:
        case: What was to be found.
        truth: What the case knows of itself, see `run_cases.play`.
        moments: The time (s) and, by role, the verdict in short; see `judging.judge`.
        last: By role, the last verdict in full.
    """

    case: Case
    truth: Mapping[str, Any]
    moments: Sequence[tuple[float, Mapping[str, Any]]]
    last: Mapping[str, Mapping[str, Any]]

    @property
    def verdict(self) -> Mapping[str, Any]:
        """The last verdict on the process of the case."""
        return self.last[self.case.role]

    @property
    def accused(self) -> set[str]:
        """The roles of the processes that are said, at the end, to lose memory."""
        return {role for role, verdict in self.last.items() if verdict["kind"] in FOUND}

    @property
    def alarms(self) -> list[str]:
        """Each alarm that was false, at whatever time: nothing leaks, or not in that process."""
        return [
            f"{role} after {time / 60:.0f} min: {verdict['kind']} {[path for path, _ in verdict['culprits']]}"
            for time, verdicts in self.moments
            for role, verdict in verdicts.items()
            if verdict["kind"] in ALARMS and not (self.case.leak and role == self.case.role)
        ]

    @property
    def right_process(self) -> bool:
        """Whether it is the one that is accused, and alone; where nothing leaks, whether none is."""
        return self.accused == {self.case.role} if self.case.leak else not self.alarms

    @property
    def right_kind(self) -> bool:
        """Whether the last verdict is one of those that it may be."""
        return Kind[self.verdict["kind"]] in self.case.kinds

    @property
    def right_category(self) -> bool:
        """Whether the mappings that grow are named."""
        return bool(self.verdict["category"] == self.case.category)

    @property
    def culprit(self) -> str | None:
        """The path of the first culprit."""
        culprits = self.verdict["culprits"]
        return culprits[0]["path"] if culprits else None

    @property
    def right_container(self) -> bool:
        """Whether the first culprit is the container that leaks; where none does, whether none is accused."""
        if not self.case.containers:
            return self.culprit is None
        return self.culprit is not None and self.culprit.endswith(self.case.containers)

    @property
    def right_driver(self) -> bool:
        """Whether the load that it follows is named, where that matters."""
        return self.case.follows is None or self.verdict["follows"] == self.case.follows

    @property
    def bytes_off(self) -> float | None:
        """How far bytes for each unit of the load lie from the truth, as a share of it; None: not known."""
        driver = self.case.unit or self.case.follows
        if driver is None or not self.truth["leaked"]:
            return None
        culprits = self.verdict["culprits"]
        per = (culprits[0] if culprits else self.verdict)["per"] or {}
        true = self.truth["leaked"] / self.truth["load"][TOTALS[driver]]
        return float(per[driver] / true - 1) if driver in per else 1.0

    @property
    def first_found(self) -> float | None:
        """Simulated seconds until the process was first said to lose memory, and went on being so."""
        since = None
        for time, verdicts in self.moments:
            if verdicts[self.case.role]["kind"] not in FOUND:
                since = None
            elif since is None:
                since = time
        return since


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else 1.0


def scores(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The shares that are asked for, by name, each of 0 to 1."""
    leaks = [outcome for outcome in outcomes if outcome.case.leak]
    others = [outcome for outcome in outcomes if not outcome.case.leak]
    found = [outcome for outcome in leaks if outcome.case.role in outcome.accused]
    false = [outcome for outcome in outcomes if outcome.alarms]
    return {
        "process": _share([outcome.right_process for outcome in leaks]),
        "category": _share([outcome.right_category for outcome in leaks]),
        "container": _share([outcome.right_container for outcome in leaks]),
        "bounded against unbounded": _share([outcome.right_kind for outcome in outcomes]),
        "driver": _share([outcome.right_driver for outcome in leaks if outcome.case.follows]),
        "bytes": _share([abs(off) <= TOLERANCE for outcome in leaks if (off := outcome.bytes_off) is not None]),
        "precision": len(found) / max(1, len(found) + len(false)),
        "recall": len(found) / max(1, len(leaks)),
        "no false alarm": _share([not outcome.alarms for outcome in others]),
    }


GATES = {
    "process": 1.0,
    "category": 0.95,
    "container": 0.95,
    "bounded against unbounded": 0.95,
    "driver": 0.90,
    "bytes": 0.95,
    "precision": 0.95,
    "recall": 0.95,
    "no false alarm": 1.0,
}


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The table, and the totals below it."""
    yield f"{'case':26} {'kind':12} {'category':14} {'driver':16} {'bytes':>6} {'after':>7}  container"
    for outcome in outcomes:
        verdict, case = outcome.verdict, outcome.case
        off, after = outcome.bytes_off, outcome.first_found
        marks = [
            (verdict["kind"], outcome.right_kind),
            (verdict["category"], outcome.right_category or not case.leak),
            (verdict["follows"], outcome.right_driver),
        ]
        kind, category, driver = (f"{value}".lower() + ("" if right else " !") for value, right in marks)
        yield (
            f"{case.name:26} {kind:12} {category:14} {driver:16} {'' if off is None else f'{off:+.0%}':>6} "
            f"{'' if after is None else f'{after / 60:.0f} min':>7}  {outcome.culprit or ''}"
            f"{'' if outcome.right_container or not case.leak else ' !'}"
            f"{'' if outcome.right_process else f' process! {sorted(outcome.accused)}'}"
            f"{f' FALSE ALARMS {len(outcome.alarms)}, first: {outcome.alarms[0]}' if outcome.alarms else ''}"
        )
    found = scores(outcomes)
    yield ", ".join(f"{name} {share:.1%} (asked: {GATES[name]:.0%})" for name, share in found.items())
