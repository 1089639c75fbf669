# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the verdict on a few days of each class: nothing that a few days can show is out of bounds."""

from __future__ import annotations

import pytest

from benchmarks import growth_series, verdict_quality
from benchmarks.growth_series import CLASSES, HARMLESS, LEAKS

SEEDS = 2


@pytest.fixture(scope="module")
def outcomes() -> list[verdict_quality.Outcome]:
    """Days that are judged every half hour, of seeds that the report does not use."""
    tasks = [(name, seed, 180) for name in CLASSES for seed in range(SEEDS)]
    return [verdict_quality.run(task) for task in tasks]


def test_no_day_without_a_leak_has_an_alarm(outcomes: list[verdict_quality.Outcome]) -> None:
    """But for containers whose capacity nobody can see, no class without a leak raises one."""
    false = [(o.name, o.seed) for o in outcomes if o.name in HARMLESS and o.alarm is not None]
    assert [found for found in false if found[0] != "capacity nobody sees"] == []


def test_each_leak_is_found_with_its_owner(outcomes: list[verdict_quality.Outcome]) -> None:
    """Every leak is found before its limit is reached, in the right process and container."""
    leaks = [o for o in outcomes if o.name in LEAKS]
    assert [(o.name, o.seed) for o in leaks if o.alarm is None or not o.in_time or o.early] == []
    assert [(o.name, o.seed) for o in leaks if not o.process or o.container is False] == []


def test_a_burst_that_the_allocator_keeps_is_told_as_such(outcomes: list[verdict_quality.Outcome]) -> None:
    """An hour after a burst, the verdict says that the allocator retains it."""
    assert all(o.retained for o in outcomes if o.name == "retained after a burst")


def test_the_tables_name_every_class_and_rule(outcomes: list[verdict_quality.Outcome]) -> None:
    """The report has a line for each class, and each usual rule beside the verdict."""
    report = verdict_quality.report(outcomes)
    assert [name for name in (*CLASSES, *verdict_quality.NAIVE) if name not in report] == []
    assert f"{len(CLASSES) * SEEDS:,} days" in report


def test_the_same_seed_is_the_same_day() -> None:
    """A day can be made up again from its class and seed."""
    first, second = (growth_series.live("mixed", 5).history(3000) for _ in range(2))
    assert first == second


def test_a_false_alarm_is_reported() -> None:
    """One alarm in two days of warm-up is more than is allowed, and said so."""
    days = [verdict_quality.Outcome("warm-up + plateau", seed, alarm=600.0 * seed or None) for seed in range(2)]
    assert any(line.startswith("warm-up + plateau") for line in verdict_quality.failures(days))
