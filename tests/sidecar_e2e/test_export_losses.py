# SPDX-License-Identifier: Apache-2.0
"""Spans that the sidecar cannot tell, since events were overwritten or dropped: counted, and none made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sidecar_e2e import ledger
from tests.sidecar_e2e.expectations import REASON, by_id, twice
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.receiver import Receiver
from tests.sidecar_e2e.sidecar import Sidecar, otlp
from vllm_kvfix import events
from vllm_kvfix.ring.reader import RingReader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sidecar_e2e.ledger import Ledger
    from tests.sidecar_e2e.telemetry import Span


def test_a_ring_too_small_loses_exactly_what_is_counted(tmp_path: Path, rings: Path) -> None:
    """Of a ring overwritten before the sidecar came there are the spans of what is left; the rest is counted."""
    ring = rings / "a.ring"
    book = ledger.fed_and_ended(tmp_path, ring, "--requests", "1000", "--per-step", "4", "--capacity", "8192")
    reader = RingReader(ring)
    left = [event for frame in reader.poll() for event in events.decode(frame.payload)]
    ended = {event.number for event in left if isinstance(event, events.Finished)}
    with Receiver(tmp_path) as receiver, Sidecar(tmp_path, rings, otlp("http", receiver.http_endpoint)) as sidecar:
        receiver.wait_for(lambda got: len(got.spans) >= len(ended), WAIT_S)
        wait_until(lambda: sidecar.finished("a.ring") >= len(ended), WAIT_S, "all are counted")
        told = sidecar.engine("a.ring")
        assert told is not None
        assert told["events"] == {
            "published": book.totals["events"],
            "dropped": 0,
            "lost": reader.lost,
            "malformed_frames": 0,
        }
        assert reader.lost + len(left) == book.totals["events"]
        assert sidecar.value("vllm_kvfix_kv_cache_blocks_allocated_total") == book.totals["new"], "totals miss nothing"
    assert 0 < len(ended) < 500
    assert {line["number"] for line in book.requests if line["id"] in by_id(receiver.spans)} == ended
    assert len(receiver.spans) == len(ended)


def test_a_sidecar_that_cannot_keep_up_counts_what_it_missed(tmp_path: Path, rings: Path) -> None:
    """With a tiny ring written at full speed, spans are missing, events are lost, and no span is wrong or twice."""
    with Receiver(tmp_path) as receiver, Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
        options = ("--requests", "12000", "--rate", "4000", "--capacity", "4096", "--hold")
        with ledger.Feeder(tmp_path, rings / "a.ring", *options) as feeder:
            book = feeder.fed()
            wait_until(lambda: _caught_up(sidecar, book), WAIT_S, "the sidecar has read the last frame")
            told = sidecar.engine("a.ring")
            assert told is not None
            complete = sidecar.finished("a.ring")
            receiver.wait_for(lambda got: len(got.spans) >= complete, WAIT_S)
            assert 200 < complete < 12_000, "more than one turn's"
            assert told["events"]["lost"] >= 12_000 - complete
            assert sidecar.value("vllm_kvfix_kv_cache_blocks_allocated_total") == book.totals["new"]
        wait_until(lambda: _ended(sidecar, book), WAIT_S, "the engine's end is seen")
        wait_until(lambda: sidecar.pending() == 0, WAIT_S, "all is exported")
    assert [span for span in receiver.spans if _died(span)] == [], "all have ended well, lost or not"
    assert twice(receiver.spans) == []
    lines = {line["id"]: line for line in book.requests}
    for span in receiver.spans:
        line = lines[span.attributes["vllm_kvfix.request.engine_id"]]
        assert span.attributes["vllm_kvfix.kv_cache.blocks.peak"] == line["peak"]
        assert span.attributes["vllm_kvfix.kv_cache.block_seconds"] == line["held"] / 1e6
        assert span.attributes[REASON] == line["reason"]


def _caught_up(sidecar: Sidecar, book: Ledger) -> bool:
    told = sidecar.engine("a.ring")
    return told is not None and told.get("steps") == book.totals["steps"]


def test_what_the_engine_dropped_is_counted_and_nothing_is_made_up(tmp_path: Path, rings: Path) -> None:
    """What the engine gave up is counted as dropped; no request that ended well is said to have died."""
    options = ("--requests", "1000", "--drop-every", "10")
    with Receiver(tmp_path) as receiver, Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
        book = ledger.fed_and_ended(tmp_path, rings / "a.ring", *options)
        wait_until(lambda: _ended(sidecar, book), WAIT_S, "the engine's end is seen and its ring is read")
        told = sidecar.engine("a.ring")
        assert told is not None
        assert told["events"]["dropped"] == book.totals["dropped"] > 0
        assert told["events"]["lost"] == 0, "not overwritten as well"
        receiver.wait_for(lambda got: len(got.spans) >= sidecar.finished("a.ring"), WAIT_S)
    written = {line["id"] for line in book.requests if line["written"]}
    assert 0 < len(written) < 1000
    died = {span.attributes["vllm_kvfix.request.engine_id"] for span in receiver.spans if _died(span)}
    assert died == set()
    assert set(by_id(receiver.spans)) == written


def _died(span: Span) -> bool:
    return span.attributes[REASON] == "engine_ended"


def _ended(sidecar: Sidecar, book: Ledger) -> bool:
    told = sidecar.engine("a.ring")
    return told is not None and told["state"] == "ended" and told.get("steps") == book.totals["steps"]
