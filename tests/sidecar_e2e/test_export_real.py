# SPDX-License-Identifier: Apache-2.0
"""The sidecar's spans and metrics, through a real receiver and a real Prometheus, against the engine's ledger."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.sidecar_e2e import ledger
from tests.sidecar_e2e.certificates import self_signed
from tests.sidecar_e2e.expectations import REASON, WHY_KEPT, by_id, differences
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.prometheus import Prometheus, check_metrics
from tests.sidecar_e2e.receiver import Receiver
from tests.sidecar_e2e.sidecar import Sidecar, otlp

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sidecar_e2e.receiver import Received

PROTOCOLS = ["grpc", "http"]
TOTALS = {
    "vllm_kvfix.kv_cache.blocks.allocated": "new",
    "vllm_kvfix.kv_cache.blocks.reused": "reused",
    "vllm_kvfix.kv_cache.blocks.released": "released",
    "vllm_kvfix.prefix_cache.queried_tokens": "queried",
    "vllm_kvfix.prefix_cache.hit_tokens": "hit",
    "vllm_kvfix.scheduler.steps": "steps",
    "vllm_kvfix.scheduler.scheduled_tokens": "tokens",
    "vllm_kvfix.scheduler.preemptions": "preemptions",
    "vllm_kvfix.scheduler.refusals": "refusals",
    "vllm_kvfix.ring.published": "events",
    "vllm_kvfix.ring.dropped": "dropped",
}


def reasons(lines: list[dict[str, Any]]) -> Counter[object]:
    """How many requests ended for which reason."""
    return Counter(line["reason"] for line in lines)


def finished(received: Received, pid: int) -> Counter[object]:
    """How many requests ended for which reason, as the newest points of an engine say."""
    points = [p for p in received.latest("vllm_kvfix.request.finished") if p.attributes["process.pid"] == pid]
    return Counter({p.attributes[REASON]: int(p.value or 0) for p in points if p.value})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_are_the_ledger(tmp_path: Path, rings: Path, protocol: str) -> None:
    """Each request is one span: times, blocks, events, links, parent and status to the digit; none is missing."""
    with Receiver(tmp_path) as receiver:
        endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        with Sidecar(tmp_path, rings, otlp(protocol, endpoint)) as sidecar:
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "2000", "--seed", "11")
            receiver.wait_for(lambda got: len(got.spans) >= 2000, WAIT_S)
            wait_until(lambda: sidecar.spans("exported") == 2000, WAIT_S, "all are counted as exported")
            assert (sidecar.spans("failed"), sidecar.spans("dropped"), sidecar.pending()) == (0, 0, 0)
            assert sidecar.end() == 0
    assert differences(receiver.spans, book) == []
    assert any(span.links for span in receiver.spans)
    resource = receiver.spans[0].resource
    assert resource.items() >= {"service.name": "vllm-kvfix", "process.pid": book.engine["pid"]}.items()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metrics_are_the_ledger(tmp_path: Path, rings: Path, protocol: str) -> None:
    """Running totals, requests by reason and the histograms' counts and sums are the ledger's."""
    with Receiver(tmp_path) as receiver:
        endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        with Sidecar(tmp_path, rings, otlp(protocol, endpoint)):
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "2000", "--leaky")
            pid = book.engine["pid"]
            receiver.wait_for(lambda got: sum(finished(got, pid).values()) == 2000, WAIT_S)
    assert finished(receiver.received, pid) == reasons(book.requests)
    for name, total in TOTALS.items():
        (point,) = receiver.received.latest(name)
        assert point.value == book.totals[total], name
        assert (point.kind, point.monotonic, point.temporality) == ("sum", True, 2), name
    (lost,) = receiver.received.latest("vllm_kvfix.ring.lost")
    assert lost.value == 0
    backlog = receiver.received.latest("vllm_kvfix.kv_cache.new_block_ids.backlog")
    assert sum(point.value or 0 for point in backlog) == book.totals["new"]
    ran = [line for line in book.requests if line["admission"]]
    (peak,) = receiver.received.latest("vllm_kvfix.request.peak_blocks")
    (held,) = receiver.received.latest("vllm_kvfix.request.block_seconds")
    assert peak.histogram is not None
    assert held.histogram is not None
    assert (peak.histogram.total, peak.histogram.sum) == (len(ran), sum(line["peak"] for line in ran))
    assert held.histogram.sum == pytest.approx(sum(line["held"] for line in ran) / 1e6)
    wanted = [sum(low < line["peak"] <= high for line in ran) for low, high in between(peak.histogram.bounds)]
    assert list(peak.histogram.buckets) == wanted
    spans = {(span.trace_id, span.span_id): span for span in receiver.spans}
    assert peak.exemplars
    for exemplar in peak.exemplars:
        span = spans[exemplar.trace_id, exemplar.span_id]
        assert span.attributes["vllm_kvfix.kv_cache.blocks.peak"] == exemplar.value


def between(bounds: tuple[float, ...]) -> list[tuple[float, float]]:
    """The buckets between the bounds: (above, up to)."""
    edges = [float("-inf"), *bounds, float("inf")]
    return list(itertools.pairwise(edges))


def test_deltas_add_up_to_the_totals(tmp_path: Path, rings: Path) -> None:
    """With delta temporality the points of a counter add up to the ledger, each request counted in one of them."""
    with Receiver(tmp_path) as receiver:
        delta = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}
        with Sidecar(tmp_path, rings, {**otlp("http", receiver.http_endpoint), **delta}) as sidecar:
            # An engine is younger than the sidecar from the next tick of 10 ms on, and only then is all of it new.
            begun = time.monotonic()
            wait_until(lambda: time.monotonic() > begun + 0.05, WAIT_S, "the next tick")
            options = ("--requests", "1000", "--rate", "500")
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", *options)
            wait_until(lambda: sidecar.finished("a.ring") == 1000, WAIT_S, "all are counted")
            assert sidecar.end() == 0
        receiver.wait_for(lambda got: _sum(got, "vllm_kvfix.request.finished") == 1000, WAIT_S)
    points = [p for p in receiver.metrics if p.name == "vllm_kvfix.kv_cache.blocks.allocated"]
    assert len(points) > 2
    assert {p.temporality for p in points} == {1}
    assert _sum(receiver.received, "vllm_kvfix.kv_cache.blocks.allocated") == book.totals["new"]
    peaks = [p.histogram for p in receiver.metrics if p.name == "vllm_kvfix.request.peak_blocks" and p.histogram]
    assert sum(h.total for h in peaks) == sum(1 for line in book.requests if line["admission"])


def _sum(received: Received, name: str) -> float:
    return sum(point.value or 0 for point in received.metrics if point.name == name)


def test_engines_beside_each_other_are_told_apart(tmp_path: Path, rings: Path) -> None:
    """Three engines at once: each one's spans and totals are its own ledger's."""
    with Receiver(tmp_path) as receiver, Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
        options = ("--requests", "400", "--rate", "400")
        feeders = [
            ledger.Feeder(tmp_path, rings / f"{i}.ring", *options, "--index", str(i), "--seed", str(i))
            for i in range(3)
        ]
        books = []
        for feeder in feeders:
            with feeder:
                assert feeder.wait(WAIT_S) == 0
                books.append(ledger.read(feeder.out))
        receiver.wait_for(lambda got: len(got.spans) >= 1200, WAIT_S)
        wait_until(lambda: all(sidecar.finished(f"{i}.ring") == 400 for i in range(3)), WAIT_S, "all are counted")
        for index, book in enumerate(books):
            spans = [span for span in receiver.spans if span.resource["vllm_kvfix.engine.index"] == index]
            assert differences(spans, book) == []
            total = sidecar.value("vllm_kvfix_kv_cache_blocks_allocated_total", vllm_kvfix_engine_index=str(index))
            assert total == book.totals["new"]


def test_the_callers_decision_is_followed_but_for_trouble(tmp_path: Path, rings: Path) -> None:
    """By default a request whose caller is not sampled has no span, unless something went wrong with it."""
    with Receiver(tmp_path) as receiver:
        environ = {**otlp("grpc", receiver.grpc_endpoint), "OTEL_TRACES_SAMPLER": "parentbased_always_on"}
        with Sidecar(tmp_path, rings, environ) as sidecar:
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "1000", "--traced", "0.8")
            wait_until(lambda: sidecar.finished("a.ring") == 1000, WAIT_S, "all are counted")
            assert sidecar.end() == 0
        wanted = 1000 - sum(line["fields"].get("spans_unsampled", 0) for line in sidecar.lines if "fields" in line)
        receiver.wait_for(lambda got: len(got.spans) >= wanted, WAIT_S)
    found = by_id(receiver.spans)
    taken = {number for line in book.requests for number in line["takers"]}
    for line in book.requests:
        sampled = line["context"] is None or line["context"][2] == 1
        trouble = line["preemptions"] or line["refusals"] or line["reason"] in {"abort", "error"}
        span = found.get(line["id"])
        assert span is not None or not (sampled or trouble or line["number"] in taken), line
        if span is not None and not sampled:
            assert span.attributes[WHY_KEPT] != "sampler"
    assert len(found) < 1000, "some were left out"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_go_over_tls_to_a_certificate_that_is_trusted(tmp_path: Path, rings: Path, protocol: str) -> None:
    """OTEL_EXPORTER_OTLP_CERTIFICATE alone makes the sidecar trust the receiver; all arrives over TLS."""
    certificate = self_signed(tmp_path)
    with Receiver(tmp_path, tls=certificate) as receiver:
        endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        environ = {**otlp(protocol, endpoint), "OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificate.path)}
        with Sidecar(tmp_path, rings, environ):
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "100")
            receiver.wait_for(lambda got: len(got.spans) >= 100 and got.metrics, WAIT_S)
        assert sum(front.handshakes for front in receiver.fronts) >= 1
    assert differences(receiver.spans, book) == []


def test_a_real_prometheus_scrapes_the_ledger_and_its_exemplars(tmp_path: Path, rings: Path) -> None:
    """Queries give the ledger's totals; each exemplar is a span that arrived; promtool has no complaint."""
    with Receiver(tmp_path) as receiver, Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
        book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "500")
        receiver.wait_for(lambda got: len(got.spans) >= 500, WAIT_S)
        with Prometheus(tmp_path, f"127.0.0.1:{sidecar.port}") as server:
            bucket = "vllm_kvfix_request_peak_blocks_bucket"
            wait_until(lambda: server.exemplars(bucket), WAIT_S, lambda: f"exemplars; {server.targets()}")
            (allocated,) = server.query("vllm_kvfix_kv_cache_blocks_allocated_total")
            assert allocated.value == book.totals["new"]
            ended = server.query("vllm_kvfix_request_finished_total > 0")
            by_reason = {sample.labels["vllm_kvfix_request_finish_reason"]: sample.value for sample in ended}
            assert by_reason == reasons(book.requests)
            spans = {(f"{span.trace_id:032x}", f"{span.span_id:016x}") for span in receiver.spans}
            exemplars = server.exemplars('{__name__=~"vllm_kvfix.*"}')
            assert {(e.labels["trace_id"], e.labels["span_id"]) for e in exemplars} <= spans
            assert len({e.series["__name__"] for e in exemplars}) == 4
            assert [target.health for target in server.targets()] == ["up"]
        assert check_metrics(sidecar.get("/metrics").body) == (0, ())
