# SPDX-License-Identifier: Apache-2.0
"""The sight, end to end: a real engine, the plugin, the sidecar, a real OTLP receiver, a real Prometheus."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine import sight_load
from tests.sidecar_e2e.processes import wait_until
from tests.sidecar_e2e.prometheus import Prometheus
from tests.sidecar_e2e.receiver import Receiver
from tests.sidecar_e2e.sidecar import Sidecar, otlp
from vllm_kvfix.demo.engine import Engine, EngineSettings, plugin_lines, read_samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.harness import Workshop
    from tests.engine.sight_load import Sent
    from tests.sidecar_e2e.prometheus import Exemplar, Sample
    from tests.sidecar_e2e.telemetry import Point, Span

pytestmark = pytest.mark.engine

# The last affected release over gRPC, the newest over HTTP.
CASES = (("0.25.1", "grpc"), ("0.32.0", "http"))
REQUESTS = 520
CONCURRENCY = 24
# Too few for two dozen of the longest requests: some wait, some are preempted.
BLOCKS = 128
BLOCK_SIZE = 32
ARGUMENTS = (
    "--dtype=float32",
    "--max-model-len=1024",
    f"--block-size={BLOCK_SIZE}",
    f"--num-gpu-blocks-override={BLOCKS}",
    "--max-num-seqs=24",
)
NAME = "kv_cache.request"


@dataclass(frozen=True)
class Seen:
    """What one engine did, and what the receivers were told of it."""

    release: str
    sent: list[Sent]
    spans: list[Span]
    theirs: list[Span]
    points: dict[str, list[Point]]
    allocated: int
    samples: dict[str, list[Sample]]
    exemplars: list[Exemplar]
    ready: dict[str, Any]
    lines: list[str]

    def by_request(self) -> dict[str, Span]:
        """Our spans by the id that vLLM's own span has."""
        return {str(span.attributes["gen_ai.request.id"]): span for span in self.spans}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def seen(
    request: pytest.FixtureRequest, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    """One engine a release, under load, with the sidecar beside it."""
    release, protocol = request.param
    work = tmp_path_factory.mktemp(f"sight-{release}")
    rings = work / "rings"
    rings.mkdir()
    with Receiver(work) as receiver:
        endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        with (
            Sidecar(work, rings, otlp(protocol, endpoint)) as sidecar,
            Prometheus(work, f"127.0.0.1:{sidecar.port}") as prometheus,
        ):
            yield _observe(workshop, release, work, receiver, sidecar, prometheus)


def _observe(  # noqa: PLR0913, PLR0917  # the parts of the picture
    workshop: Workshop, release: str, work: Path, receiver: Receiver, sidecar: Sidecar, prometheus: Prometheus
) -> Seen:
    settings = EngineSettings(
        workshop.model,
        work,
        name="engine",
        # vLLM's own exporter speaks gRPC without TLS, whatever the environment says.
        arguments=[*ARGUMENTS, f"--otlp-traces-endpoint={receiver.grpc_endpoint}"],
        environ={"VLLM_KVFIX_RING_DIR": str(work / "rings"), "OTEL_SERVICE_NAME": "vllm"},
        plugin_path=workshop.plugin,
    )
    with Engine(workshop.environment(release), settings) as engine:
        sent = sight_load.send_all(engine.url, REQUESTS, CONCURRENCY, seed=7)
        receiver.wait_for(lambda got: len(_ours(got.spans)) >= REQUESTS, timeout_s=60)
        # One more, alone: the probe writes its last count in the step of a request that comes a while after the others.
        before = len(read_samples(engine.probe_file))
        extra = _one_more(engine, before)
        sent += extra
        receiver.wait_for(lambda got: len(_ours(got.spans)) >= len(sent), timeout_s=60)
        receiver.wait_for(lambda got: len(_theirs(got.spans)) >= sum(not s.given_up for s in sent), timeout_s=60)
        allocated = read_samples(engine.probe_file)[-1].allocated
        wait_until(lambda: prometheus.query("vllm_kvfix_request_peak_blocks_count"), 30, lambda: "no histogram yet")
        wait_until(
            lambda: sum(s.value for s in prometheus.query("vllm_kvfix_request_finished_total")) >= len(sent),
            30,
            lambda: "Prometheus has not all requests",
        )
        wait_until(
            lambda: _latest(receiver, "vllm_kvfix.kv_cache.blocks.allocated") == allocated,
            30,
            lambda: f"of {allocated} blocks, told are {_latest(receiver, 'vllm_kvfix.kv_cache.blocks.allocated')}",
        )
        names = {point.name for point in receiver.metrics}
        return Seen(
            release,
            sent,
            _ours(receiver.spans),
            _theirs(receiver.spans),
            {name: receiver.received.latest(name) for name in names},
            allocated,
            {name: prometheus.query(name) for name in _QUERIES},
            prometheus.exemplars("vllm_kvfix_request_peak_blocks_bucket"),
            sidecar.ready(),
            plugin_lines(engine.log_text()),
        )


_QUERIES = (
    "vllm_kvfix_kv_cache_blocks_allocated_total",
    "vllm_kvfix_scheduler_preemptions_total",
    "vllm_kvfix_request_peak_blocks_count",
    "vllm_kvfix_kv_cache_pool_limit",
    'vllm_kvfix_kv_cache_pool_usage{vllm_kvfix_state="used"}',
    "vllm_kvfix_patch_state == 1",
    "vllm_kvfix_ring_lost_total",
    "vllm_kvfix_ring_dropped_total",
)


def _one_more(engine: Engine, before: int) -> list[Sent]:
    """Send single-token requests until the probe has written a sample since."""
    extra: list[Sent] = []

    def written() -> bool:
        extra.append(sight_load.send(engine.url, REQUESTS + len(extra), seed=7, short=True))
        return len(read_samples(engine.probe_file)) > before

    wait_until(written, 60, lambda: "the probe writes nothing")
    return extra


def _latest(receiver: Receiver, name: str) -> float:
    return sum(point.value or 0 for point in receiver.received.latest(name))


def _ours(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.name == NAME]


def _theirs(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.name == "llm_request"]


def _int(span: Span, name: str) -> int:
    value = span.attributes[name]
    assert isinstance(value, int)
    return value


def test_each_request_is_one_span_and_none_is_missing(seen: Seen) -> None:
    """As many spans as requests, no id twice, nothing lost or dropped."""
    assert sorted(seen.by_request()) == sorted(s.request_id for s in seen.sent)
    assert len({(span.trace_id, span.span_id) for span in seen.spans}) == len(seen.spans) == len(seen.sent)
    assert [s.value for s in seen.samples["vllm_kvfix_ring_lost_total"]] == [0]
    assert [s.value for s in seen.samples["vllm_kvfix_ring_dropped_total"]] == [0]


def test_the_blocks_of_the_spans_are_the_pools_own_account(seen: Seen) -> None:
    """New blocks of all spans add up to what the pool gave out, counted beside us; no peak is larger than the pool."""
    assert sum(_int(span, "vllm_kvfix.kv_cache.blocks.new") for span in seen.spans) == seen.allocated
    assert sum(_int(span, "vllm_kvfix.kv_cache.blocks.reused") for span in seen.spans) > 0
    assert all(0 <= _int(span, "vllm_kvfix.kv_cache.blocks.peak") < BLOCKS for span in seen.spans)
    told = sum(s.value for s in seen.samples["vllm_kvfix_kv_cache_blocks_allocated_total"])
    assert (
        told == sum(point.value or 0 for point in seen.points["vllm_kvfix.kv_cache.blocks.allocated"]) == seen.allocated
    )


def test_a_request_that_ran_through_held_the_blocks_of_its_tokens(seen: Seen) -> None:
    """Peak blocks of each request that was not given up are those that its tokens fill, and its tokens are told."""
    spans = seen.by_request()
    for sent in seen.sent:
        if sent.given_up:
            continue
        span = spans[sent.request_id]
        assert _int(span, "gen_ai.usage.input_tokens") == sent.prompt_tokens
        assert _int(span, "gen_ai.usage.output_tokens") == sent.output_tokens == sent.max_tokens
        # The last token is never computed, so it needs no slot; a step ahead of its answer may hold one block more.
        needed = -(-(sent.prompt_tokens + sent.max_tokens - 1) // BLOCK_SIZE)
        assert needed <= _int(span, "vllm_kvfix.kv_cache.blocks.peak") <= needed + 1


def test_the_ends_are_told_as_they_were(seen: Seen) -> None:
    """Given up means abort, or length where the engine was faster; all others ended by length."""
    spans = seen.by_request()
    reasons = Counter(str(span.attributes["vllm_kvfix.request.finish_reason"]) for span in seen.spans)
    assert set(reasons) == {"length", "abort"}
    assert all(
        spans[s.request_id].attributes["vllm_kvfix.request.finish_reason"] == "length"
        for s in seen.sent
        if not s.given_up
    )


def test_preemptions_have_taken_place_and_name_their_takers(seen: Seen) -> None:
    """Preempted requests have the event, are resumed after it, and link to a span that is there."""
    preempted = [span for span in seen.spans if _int(span, "vllm_kvfix.request.preemptions")]
    assert preempted, "nothing was preempted: this proves nothing"
    ids = {(span.trace_id, span.span_id) for span in seen.spans}
    for span in preempted:
        names = [event.name for event in span.events]
        assert "vllm_kvfix.preempted" in names
        assert {(link.trace_id, link.span_id) for link in span.links} <= ids
    assert any(span.links for span in preempted)
    told = sum(s.value for s in seen.samples["vllm_kvfix_scheduler_preemptions_total"])
    assert told == sum(_int(span, "vllm_kvfix.request.preemptions") for span in preempted)


def test_a_span_is_beside_vllms_own_in_the_callers_trace(seen: Seen) -> None:
    """Where the caller sent a context, both spans are children of its span; their times overlap."""
    theirs = {str(span.attributes["gen_ai.request.id"]): span for span in seen.theirs}
    ours = seen.by_request()
    both = 0
    for sent in seen.sent:
        span = ours[sent.request_id]
        if sent.context is None:
            assert span.parent_id == 0
            continue
        assert (span.trace_id, span.parent_id) == sent.context
        sibling = theirs.get(sent.request_id)
        if sibling is not None:
            assert (sibling.trace_id, sibling.parent_id) == sent.context
            assert span.start < sibling.end
            assert sibling.start < span.end
            both += 1
    assert both > REQUESTS // 2


def test_the_times_are_ordered(seen: Seen) -> None:
    """Start, each event, and end of a span follow each other."""
    for span in seen.spans:
        times = [span.start, *(event.time for event in span.events), span.end]
        assert times == sorted(times)


def test_prometheus_has_it_with_exemplars_that_lead_to_spans(seen: Seen) -> None:
    """A real Prometheus scraped pool, histogram and exemplars; each exemplar's trace is that of a span received."""
    assert [s.value for s in seen.samples["vllm_kvfix_request_peak_blocks_count"]] == [len(seen.sent)]
    assert [s.value for s in seen.samples["vllm_kvfix_kv_cache_pool_limit"]] == [BLOCKS - 1]
    assert [s.value for s in seen.samples['vllm_kvfix_kv_cache_pool_usage{vllm_kvfix_state="used"}']] == [0]
    traces = {f"{span.trace_id:032x}" for span in seen.spans}
    assert seen.exemplars
    assert {exemplar.labels["trace_id"] for exemplar in seen.exemplars} <= traces


def test_the_state_of_the_fix_is_shown(seen: Seen) -> None:
    """Applied on the affected release, not affected on the newest; so say metric, /readyz and the ring."""
    wanted = "applied" if seen.release == "0.25.1" else "not_affected"
    assert [s.labels["vllm_kvfix_state"] for s in seen.samples["vllm_kvfix_patch_state == 1"]] == [wanted]
    (engine,) = seen.ready["engines"]
    assert engine["patch"].replace(" ", "_") == wanted
    assert re.match(re.escape(seen.release), engine["vllm_version"])
    assert sum("watching the KV blocks" in line for line in seen.lines) == 1
