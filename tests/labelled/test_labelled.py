# SPDX-License-Identifier: Apache-2.0
"""The promises of the verdict on real leaks, and on what is none, with vLLM's own classes and real memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.labelled import cases, table

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAKS = [case.name for case in cases.CASES if case.leak]
OTHERS = [case.name for case in cases.CASES if not case.leak]


@pytest.mark.e2e
@pytest.mark.parametrize("name", LEAKS)
def test_leak(outcomes: Mapping[str, table.Outcome], name: str) -> None:
    """A leak is said to be one: in the one process, the mappings and the container that it is in."""
    outcome = outcomes[name]
    assert outcome.truth["category"] in {None, outcome.case.category}, "it did not lie where the case says it does"
    assert outcome.accused == {outcome.case.role}
    assert outcome.right_kind, outcome.verdict["evidence"]
    assert outcome.right_category, outcome.verdict["category"]
    assert outcome.right_container, outcome.culprit
    assert outcome.right_driver, outcome.verdict["follows"]
    assert outcome.bytes_off is None or abs(outcome.bytes_off) <= table.TOLERANCE
    assert outcome.alarms == []


@pytest.mark.e2e
@pytest.mark.parametrize("name", OTHERS)
def test_no_leak(outcomes: Mapping[str, table.Outcome], name: str) -> None:
    """What is no leak is at no time said to be one, and at its end it is called what it is."""
    outcome = outcomes[name]
    assert outcome.alarms == []
    assert outcome.right_kind, outcome.verdict["evidence"]


@pytest.mark.e2e
def test_totals(outcomes: Mapping[str, table.Outcome]) -> None:
    """Of all cases, so many are judged rightly as is asked for."""
    found = table.scores(list(outcomes.values()))
    missed = {name: share for name, share in found.items() if share < table.GATES[name]}
    assert missed == {}, f"asked: {table.GATES}"
    assert len(outcomes) == len(cases.CASES)
