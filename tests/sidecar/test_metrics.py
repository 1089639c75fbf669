# SPDX-License-Identifier: Apache-2.0
"""metrics and readings: what was told comes out once, under attributes that no other series has."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanContext, TraceFlags

from tests.sidecar import fake_processes
from vllm_kvfix import host
from vllm_kvfix.events import Blocks, Config, Group, Step
from vllm_kvfix.ring.layout import PATCH_STATES
from vllm_kvfix.ring.reader import Header
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import ATTR_GROUP, ATTR_OUTCOME, ATTR_RING_FILE, ATTR_STATE, Metric
from vllm_kvfix_sidecar.metrics import KEEP_ENDED_S, LARGEST, REASONS, EngineKey, EngineMetrics, Histogram, Metrics
from vllm_kvfix_sidecar.readings import Cost, HistogramValue, Point, Reader, own_cost
from vllm_kvfix_sidecar.requests import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

KEY = EngineKey(100, 1, "a.ring")
SECOND = 10**9
SPAN = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1))
CONFIG = Config(1000, 8, 16, prefix_caching=True, groups=(Group(16, "FullAttentionSpec"), Group(1, "MambaSpec")))
STEP = Step(5, 3, 4, 700, 200, 10, 20, 30, 40, 50, 60, 70, 80, 90, 6, 2, 50, (7, 0))


def record(**changed: object) -> RequestRecord:
    """A request that waited 1 s, then held blocks for 2 s, up to 7 at a time, 9 block-seconds in all."""
    usual = RequestRecord(
        number=1,
        request_id="cmpl-1",
        context=None,
        trace_id=1,
        span_id=2,
        arrival=SECOND,
        admission=2 * SECOND,
        end=3 * SECOND,
        freed_at=4 * SECOND,
        reason="stop",
        prompt_tokens=1,
        output_tokens=1,
        hit_tokens=0,
        external_tokens=0,
        new_blocks=7,
        reused_blocks=0,
        peak_blocks=7,
        held_block_us=9_000_000,
        preemptions=0,
        refusals=0,
        groups=(Blocks(0, 7),),
        details=(),
        dropped_details=0,
        takers=(),
        took_blocks=False,
    )
    return usual._replace(**changed)  # type: ignore[arg-type]  # each field has its own type


def header(**changed: object) -> Header:
    """A header of a ring of an engine whose process began 50 s after the machine."""
    usual: dict[str, object] = {
        "capacity": 64,
        "pid": 100,
        "start_time": 5000,
        "boot_id": bytes(16),
        "clock_offset_ns": 1_000 * SECOND,
        "heartbeat_ns": 60 * SECOND,
        "claim": 0,
        "head": 0,
        "events": 11,
        "dropped": 2,
        "patch_state": "not affected",
        "engine_index": 1,
        "locked": True,
        "vllm_version": "v",
        "plugin_version": "p",
    }
    return Header(**(usual | changed))  # type: ignore[arg-type]  # each field has its own type


def read(metrics: Metrics, more: Callable[[], Iterable[Point]] = tuple) -> dict[Metric, list[Point]]:
    """All points, of a sidecar that has cost 1.5 s, 0.5 s and 7 bytes, 61.5 s after the machine began."""
    return Reader(metrics, lambda: Cost(1.5, 0.5, 7), lambda: 61 * SECOND + SECOND // 2, more).read()


def values(points: list[Point], attribute: str | None = None) -> dict[object, object]:
    """Value by one attribute's value."""
    return {point.attributes.get(attribute) if attribute else None: point.value for point in points}


def engine_of(metrics: Metrics, key: EngineKey = KEY) -> EngineMetrics:
    """An engine of which everything is known."""
    engine = metrics.engine(key)
    engine.config(CONFIG)
    engine.step(STEP)
    engine.ring(header(), 5, 6, "live")
    return engine


class TestHistogram:
    """Buckets."""

    @given(st.lists(st.floats(0, 1e6), max_size=50), st.sets(st.floats(0, 1e6), min_size=1, max_size=8))
    def test_each_value_is_in_the_first_bucket_that_takes_it(self, samples: list[float], bounds: set[float]) -> None:
        """A bucket's count is that of the values above the bound before it and not above its own."""
        made = Histogram(tuple(sorted(bounds)))
        for value in samples:
            made.record(value)
        edges = [-math.inf, *sorted(bounds), math.inf]
        expected = [sum(low < v <= high for v in samples) for low, high in itertools.pairwise(edges)]
        assert made.counts == expected
        assert made.sum == pytest.approx(sum(samples))


class TestFinished:
    """What a finished request adds."""

    def test_each_quantity_is_in_its_histogram_in_its_unit(self) -> None:
        """Peak in blocks, residency and queue in seconds, held in block-seconds."""
        engine = EngineMetrics(KEY)
        engine.finished(record(), 0, None)
        sums = [histogram.sum for histogram in (engine.peak, engine.residency, engine.block_seconds, engine.queue)]
        assert sums == pytest.approx([7, 2, 9, 1])
        assert engine.finished_by_reason["stop"] == 1

    def test_one_that_never_ran_is_counted_and_in_no_histogram(self) -> None:
        """Its reason is counted; it has neither waited for a run nor held blocks."""
        engine = EngineMetrics(KEY)
        engine.finished(record(admission=0, reason="abort"), 0, SPAN)
        assert engine.finished_by_reason["abort"] == 1
        assert sum(sum(h.counts) for h in (engine.peak, engine.residency, engine.block_seconds, engine.queue)) == 0

    def test_a_reason_that_no_engine_has_adds_no_series(self) -> None:
        """Any other word counts as unknown."""
        engine = EngineMetrics(KEY)
        engine.finished(record(reason="sabotage"), 0, None)
        assert set(engine.finished_by_reason) == set(REASONS)
        assert engine.finished_by_reason["unknown"] == 1

    def test_a_hostile_record_is_still_something_that_can_be_sent(self) -> None:
        """Times that run backwards count as no time; counts and times beyond the protocol's numbers do no harm."""
        engine = EngineMetrics(KEY)
        engine.finished(record(arrival=2**64, freed_at=0, peak_blocks=2**70, held_block_us=2**64), 2**70, SPAN)
        engine.finished(record(), -5, SPAN)
        assert (engine.residency.sum, engine.queue.sum) == pytest.approx((2, 1))
        found = [e for h in (engine.peak, engine.residency, engine.queue) for e in h.exemplars if e]
        assert all(0 <= exemplar.time <= LARGEST for exemplar in found)
        assert all(isinstance(exemplar.value, float) for exemplar in found)

    def test_the_last_exported_span_of_a_bucket_is_its_exemplar(self) -> None:
        """A request without a span leaves the exemplar alone; one with a span takes its place, in its bucket only."""
        engine = EngineMetrics(KEY)
        engine.finished(record(), 111, SPAN)
        engine.finished(record(), 222, None)
        engine.finished(record(peak_blocks=1000), 333, SPAN)
        found = [exemplar for exemplar in engine.peak.exemplars if exemplar]
        assert [(e.value, e.time, e.trace_id, e.span_id) for e in found] == [
            (7, 111, 0xABC, 0xDEF),
            (1000, 333, 0xABC, 0xDEF),
        ]


class TestReadings:
    """Points."""

    def test_the_state_of_the_pool(self) -> None:
        """Used and free add up to the limit; utilization is used by limit; each group has its backlog and size."""
        metrics = Metrics()
        engine_of(metrics)
        found = read(metrics)
        assert values(found[conventions.POOL_LIMIT]) == {None: 1000}
        assert values(found[conventions.POOL_USAGE], ATTR_STATE) == {"used": 300, "free": 700}
        assert values(found[conventions.POOL_UTILIZATION]) == {None: 0.3}
        assert values(found[conventions.CACHED_BLOCKS]) == {None: 200}
        assert values(found[conventions.BACKLOG], ATTR_GROUP) == {0: 7, 1: 0}
        assert values(found[conventions.BLOCK_SIZE], ATTR_GROUP) == {0: 16, 1: 1}
        assert values(found[conventions.REQUESTS], ATTR_STATE) == {"running": 3, "waiting": 4}

    def test_running_totals_are_taken_as_they_are(self) -> None:
        """Each counter of the engine shows the last step's total, since the process began, and remembers the first."""
        metrics = Metrics()
        engine = engine_of(metrics)
        engine.step(STEP._replace(new=33))
        found = read(metrics)
        shown = {metric: (points[0].value, points[0].base) for metric, points in found.items() if metric.from_engine}
        assert shown == {
            conventions.STEPS: (10, 10),
            conventions.SCHEDULED_TOKENS: (20, 20),
            conventions.BLOCKS_ALLOCATED: (33, 30),
            conventions.BLOCKS_REUSED: (40, 40),
            conventions.BLOCKS_RELEASED: (50, 50),
            conventions.PREEMPTIONS: (60, 60),
            conventions.REFUSALS: (70, 70),
            conventions.PREFIX_QUERIED: (80, 80),
            conventions.PREFIX_HIT: (90, 90),
            conventions.RING_PUBLISHED: (11, 11),
            conventions.RING_DROPPED: (2, 2),
        }
        assert {points[0].start for metric, points in found.items() if metric.from_engine} == {1_050 * SECOND}

    def test_the_ring_and_the_patch(self) -> None:
        """Age is that of the heartbeat; exactly one state of the patch is 1."""
        metrics = Metrics()
        engine_of(metrics)
        found = read(metrics)
        assert values(found[conventions.RING_AGE]) == {None: 1.5}
        assert values(found[conventions.RING_LOST]) == {None: 5}
        assert values(found[conventions.RING_MALFORMED]) == {None: 6}
        states = values(found[conventions.PATCH_STATE], ATTR_STATE)
        assert states == {state.replace(" ", "_"): int(state == "not affected") for state in PATCH_STATES}

    def test_the_sidecar_itself(self) -> None:
        """Spans by outcome, what is pending, exports, engines by state, refused files, its own cost."""
        metrics = Metrics()
        engine_of(metrics)
        spans = metrics.spans
        spans.emitted, spans.exported, spans.failed, spans.dropped, spans.unsampled = 20, 9, 4, 2, 100
        metrics.exports.failed, metrics.refused_files = 3, 8
        found = read(metrics)
        outcomes = values(found[conventions.SPANS], ATTR_OUTCOME)
        assert outcomes == {"exported": 9, "failed": 4, "dropped": 2, "unsampled": 100}
        assert values(found[conventions.SPANS_PENDING]) == {None: 5}
        assert values(found[conventions.METRIC_EXPORTS], ATTR_OUTCOME) == {"exported": 0, "failed": 3}
        assert values(found[conventions.ENGINES], ATTR_STATE) == {"live": 1, "ended": 0, "unknown": 0}
        assert values(found[conventions.FILES_REFUSED]) == {None: 8}
        assert values(found[conventions.PROCESS_MEMORY], conventions.ATTR_ROLE) == {"sidecar": 7}
        assert values(found[conventions.CPU_TIME], conventions.ATTR_CPU_MODE) == {"user": 1.5, "system": 0.5}

    def test_an_engine_of_which_nothing_is_known_yet_has_no_false_zero(self) -> None:
        """Without a configuration, a step or a header there is neither a pool nor a total nor a ring to tell of."""
        metrics = Metrics()
        metrics.engine(KEY)
        found = read(metrics)
        for metric in (conventions.POOL_LIMIT, conventions.POOL_USAGE, conventions.STEPS, conventions.RING_AGE):
            assert found[metric] == []

    def test_a_pool_without_blocks_has_no_utilization(self) -> None:
        """A configuration of 0 blocks divides by nothing."""
        metrics = Metrics()
        engine_of(metrics).config(CONFIG._replace(blocks=0))
        assert read(metrics)[conventions.POOL_UTILIZATION] == []

    @given(st.lists(st.integers(0, 2**64 - 1), min_size=17, max_size=17), st.integers(0, 2**64 - 1))
    def test_no_word_of_a_ring_is_too_large_to_send(self, words: list[int], pid: int) -> None:
        """Values and attributes fit a signed 64-bit number, whatever a ring says."""
        metrics = Metrics()
        engine = metrics.engine(EngineKey(pid, pid, "a.ring"))
        engine.config(CONFIG._replace(blocks=pid))
        engine.step(Step._make([*words, (pid,)]))
        engine.ring(header(events=pid, heartbeat_ns=pid, start_time=pid), pid, 0, "live")
        numbers = [point.value for points in read(metrics).values() for point in points]
        labels = [v for points in read(metrics).values() for point in points for v in point.attributes.values()]
        assert all(0 <= n <= LARGEST for n in (*numbers, *labels) if isinstance(n, int))
        assert all(point.start >= 0 for points in read(metrics).values() for point in points)

    def test_every_point_has_the_attributes_of_its_metric_and_every_metric_a_point(self) -> None:
        """No attribute is sent that the conventions do not list; of theirs only optional ones may be missing."""
        metrics = Metrics()
        engine_of(metrics).finished(record(), 1, SPAN)
        found = read(metrics, fake_processes.points)
        assert tuple(found) == conventions.METRICS
        for metric, points in found.items():
            assert points, metric.name
            for point in points:
                assert set(metric.attributes) <= set(point.attributes), metric.name
                assert set(point.attributes) <= {*metric.attributes, *metric.optional}, metric.name
            told = {name for point in points for name in point.attributes}
            assert told == {*metric.attributes, *metric.optional}, metric.name
            assert all(isinstance(point.value, HistogramValue) == bool(metric.bounds) for point in points)


class TestLifetimes:
    """Engines come and go."""

    def test_an_ended_engine_is_shown_for_five_minutes(self) -> None:
        """It is there at the last second and gone after it; a live one stays."""
        metrics = Metrics()
        engine_of(metrics)
        engine_of(metrics, EngineKey(200, 0, "b.ring"))
        metrics.ended(KEY, 1000.0)
        metrics.expire(1000.0 + KEEP_ENDED_S)
        assert len(read(metrics)[conventions.STEPS]) == 2
        metrics.expire(1000.1 + KEEP_ENDED_S)
        (left,) = read(metrics)[conventions.STEPS]
        assert left.attributes[conventions.ATTR_PID] == 200

    def test_a_live_engine_stands_for_the_one_before_it_that_had_its_pid(self) -> None:
        """A container's next engine has the pid of the last: one series, the live one's."""
        metrics = Metrics()
        engine_of(metrics)
        metrics.ended(KEY, 0.0)
        engine_of(metrics, EngineKey(100, 1, "b.ring")).step(STEP._replace(steps=3))
        (shown,) = read(metrics)[conventions.STEPS]
        assert (shown.value, shown.source) == (3, "b.ring")

    def test_of_ended_engines_of_one_pid_the_last_is_shown(self) -> None:
        """Three that ended one after the other are one series, the last one's, without a ring's name."""
        metrics = Metrics()
        for number in range(3):
            key = EngineKey(100, 1, f"{number}.ring")
            engine_of(metrics, key)
            metrics.ended(key, float(number))
        (shown,) = read(metrics)[conventions.STEPS]
        assert shown.source == "2.ring"
        assert ATTR_RING_FILE not in shown.attributes

    @given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 1), st.booleans()), max_size=8))
    def test_no_two_series_have_the_same_attributes(self, engines: list[tuple[int, int, bool]]) -> None:
        """Whichever engines share a pid, and whichever have ended, each series is there once; each live engine is."""
        metrics = Metrics()
        for number, (pid, index, ended) in enumerate(engines):
            key = EngineKey(pid, index, f"{number}.ring")
            engine_of(metrics, key)
            if ended:
                metrics.ended(key, 0.0)
        for points in read(metrics).values():
            series = [tuple(sorted(point.attributes.items())) for point in points]
            assert len(series) == len(set(series))
        live = [f"{number}.ring" for number, (_, _, ended) in enumerate(engines) if not ended]
        assert set(live) <= {point.source for point in read(metrics)[conventions.STEPS]}

    def test_a_rings_name_is_told_only_where_it_must_be(self) -> None:
        """Two live engines of one pid and index carry it, a third of its own pid does not."""
        metrics = Metrics()
        for key in (KEY, EngineKey(100, 1, "b.ring"), EngineKey(100, 0, "c.ring")):
            engine_of(metrics, key)
        told = [point.attributes.get(ATTR_RING_FILE) for point in read(metrics)[conventions.STEPS]]
        assert told == ["a.ring", "b.ring", None]


def test_the_sidecars_own_cost_is_told_or_missing() -> None:
    """Resident memory is this process's own, within a tenth; of a process that is gone it is not told, and not 0."""
    cost = own_cost()
    assert cost.resident == pytest.approx(host.status()["rss"], rel=0.1)
    assert cost.user_s > 0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        gone = psutil.Process(child.pid)
    assert own_cost(gone).resident is None
    found = Reader(Metrics(), lambda: own_cost(gone)).read()
    assert found[conventions.PROCESS_MEMORY] == []
    assert len(found[conventions.CPU_TIME]) == 2
