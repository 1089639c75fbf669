# SPDX-License-Identifier: Apache-2.0
"""What holds of the verdict on any history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sidecar.histories import engine
from vllm_kvfix.events import SCOPES
from vllm_kvfix_sidecar.observed import ContainerHistory, Limit, ProcessHistory, Series
from vllm_kvfix_sidecar.verdict import judge

FIGURES = [f"{scope}.{name}" for scope, names in SCOPES.items() for name in names]
LOAD = ("requests", "aborts", "generated_tokens", "blocks", "steps", "running", "waiting")
STATES = ("unknown", "not affected", "applied", "refused", "off")
VALUES = st.one_of(st.integers(0, 1 << 64), st.floats(0, 1e18), st.sampled_from([0.0, float("nan"), float("inf")]))


@st.composite
def any_series(draw: Any) -> Series:
    """Series as they should not be: uneven, out of order, far too large, not numbers, of unequal lengths."""
    count = draw(st.integers(0, 40))
    times = draw(st.lists(st.floats(-1e6, 1e6), min_size=count, max_size=count))
    if draw(st.booleans()):
        times = sorted(set(times))
    values = draw(st.lists(VALUES, min_size=len(times), max_size=len(times) + draw(st.integers(0, 2))))
    return Series(times, values, values if draw(st.booleans()) else values[:3])


@st.composite
def any_container(draw: Any) -> ContainerHistory:
    """A container of such series."""
    path = draw(st.sampled_from(["scheduler.x", "scheduler.x[*]", "a.new_block_ids", "block_pool.blocks", ""]))
    series = [draw(any_series()) for _ in range(6)]
    return ContainerHistory(path, draw(st.none() | st.integers(0, 1 << 40)), draw(st.floats(0, 1e9)), *series)


@st.composite
def any_history(draw: Any) -> ProcessHistory:
    """A process of such series."""
    limit = draw(st.none() | st.builds(Limit, st.floats(0, 1e15), any_series()))
    return ProcessHistory(
        pid=1,
        role="worker",
        name="",
        started=draw(st.floats(-1e6, 1e6)),
        memory=draw(st.dictionaries(st.sampled_from(FIGURES), any_series(), max_size=8)),
        containers=draw(st.lists(any_container(), max_size=4)),
        load=draw(st.dictionaries(st.sampled_from(LOAD), any_series(), max_size=5)),
        limit=limit,
        vllm_version=draw(st.sampled_from(["", "0.25.1", "0.25.1+cu129", "main", "1!2.dev3"])),
        patch_state=draw(st.sampled_from(STATES)),
    )


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(any_history(), st.floats(-1e6, 2e6))
def test_it_never_raises_and_is_the_same_again(history: ProcessHistory, now: float) -> None:
    """Of whatever history, there is a verdict, and twice the same."""
    assert judge(history, now) == judge(history, now)


@st.composite
def lives(draw: Any) -> tuple[ProcessHistory, float]:
    """A plausible process: warm-up, leak, containers, by chance."""
    made = engine(draw(st.sampled_from([120.0, 600.0, 7200.0])))
    pace, warm = draw(st.sampled_from([0, 1000, 50_000])), draw(st.sampled_from([0, 10**8]))
    made.figures(status_anon=lambda time: 2**31 + pace * time + warm * time / (time + 300))
    made.container("scheduler.leak", lambda time: 73 * time, draw(st.sampled_from([1, 8, 512])))
    made.container("scheduler.cache", lambda time: 100 * time / (1 + time / 500), 64, capacity=10**6)
    if draw(st.booleans()):
        made.container("scheduler.table", lambda time: 40 + time, 256, orphans=lambda time: time, orphan_age=100.0)
    made.limited(2.0**34, lambda time: 2**31 + pace * time)
    return made.history(), made.now


def shifted(series: Series, by: float) -> Series:
    """The same, at another time."""
    return Series([time + by for time in series.times], series.values, series.floors)


def scaled(series: Series, by: float) -> Series:
    """The same, by so much larger."""
    return Series(series.times, [value * by for value in series.values], [value * by for value in series.floors])


@settings(max_examples=40, deadline=None)
@given(lives(), st.integers(-4000, 1 << 20))
def test_it_does_not_matter_when(life: tuple[ProcessHistory, float], by: int) -> None:
    """The same life some seconds later gets the same verdict."""
    history, now = life
    later = replace(
        history,
        started=history.started + by,
        memory={name: shifted(series, by) for name, series in history.memory.items()},
        load={name: shifted(series, by) for name, series in history.load.items()},
        limit=history.limit and replace(history.limit, usage=shifted(history.limit.usage, by)),
        containers=[
            replace(
                container,
                length=shifted(container.length, by),
                members=shifted(container.members, by),
                size=shifted(container.size, by),
                added=shifted(container.added, by),
                removed=shifted(container.removed, by),
                orphans=shifted(container.orphans, by),
            )
            for container in history.containers
        ],
    )
    assert judge(later, now + by) == judge(history, now)


@settings(max_examples=40, deadline=None)
@given(lives(), st.sampled_from([2.0, 16.0]))
def test_all_bytes_larger_is_the_same_growth_and_as_long_to_the_limit(
    life: tuple[ProcessHistory, float], by: float
) -> None:
    """With all bytes twice as many, what was an alarm is one, with the same owners and the same time to the limit."""
    history, now = life
    larger = replace(
        history,
        memory={name: scaled(series, by) for name, series in history.memory.items()},
        limit=history.limit
        and replace(history.limit, limit=history.limit.limit * by, usage=scaled(history.limit.usage, by)),
        containers=[replace(container, size=scaled(container.size, by)) for container in history.containers],
    )
    before, after = judge(history, now), judge(larger, now)
    if not before.alarming:  # a growth that is too small to matter may matter then
        return
    assert after.kind is before.kind
    assert before.culprits[0].path in [culprit.path for culprit in after.culprits]
    if len(before.culprits) == len(after.culprits):
        assert before.time_to_limit_s is not None
        assert after.time_to_limit_s is not None
        assert abs(after.time_to_limit_s.best / before.time_to_limit_s.best - 1) < 1e-6


@settings(max_examples=40, deadline=None)
@given(lives(), st.integers(1, 20))
def test_steady_containers_change_nothing(life: tuple[ProcessHistory, float], count: int) -> None:
    """Containers that stand still, however many, leave the verdict as it is."""
    history, now = life
    still = engine(now - history.started)
    for number in range(count):
        still.container(f"scheduler.still{number}", lambda _: 1000.0)
    among = replace(history, containers=[*still.containers, *history.containers])
    assert judge(among, now) == judge(history, now)
