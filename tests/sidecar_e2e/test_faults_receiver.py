# SPDX-License-Identifier: Apache-2.0
"""The receiver is down, deaf, slow, overloaded or not to be trusted: counted, bounded, and over when that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sidecar_e2e import ledger
from tests.sidecar_e2e.certificates import TlsFront, self_signed
from tests.sidecar_e2e.expectations import differences, of_engine
from tests.sidecar_e2e.faulty import FOREVER, Plan, Refusing, Silent, faulty
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.sidecar import Sidecar, otlp

if TYPE_CHECKING:
    from pathlib import Path

PROTOCOLS = ["grpc", "http"]


MIB = 1 << 20


class TestTheReceiver:
    """The receiver is down, deaf, slow, overloaded, or not to be trusted."""

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("kind", [Refusing, Silent])
    def test_a_dead_one_costs_spans_and_nothing_else(
        self, tmp_path: Path, rings: Path, protocol: str, kind: type[Refusing | Silent]
    ) -> None:
        """Spans fail or are dropped, all are counted, /metrics goes on, and SIGTERM ends it in time."""
        with kind() as dead:
            environ = {**otlp(protocol, dead.endpoint, patient=False), "OTEL_BSP_MAX_QUEUE_SIZE": "512"}
            with Sidecar(tmp_path, rings, environ, "--shutdown-timeout", "2") as sidecar:
                book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "2000")
                wait_until(lambda: sidecar.finished("a.ring") == 2000, WAIT_S, "all are counted")
                wait_until(lambda: sidecar.spans("failed") > 0, WAIT_S, "a batch has failed")
                assert accounts(sidecar) == 2000
                assert sidecar.spans("dropped") >= 2000 - 512 - 512 - sidecar.spans("failed")
                assert sidecar.value("vllm_kvfix_kv_cache_blocks_allocated_total") == book.totals["new"]
                assert sidecar.healthy()
                assert sidecar.end(20.0) == 0

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_one_that_is_down_for_long_does_not_make_it_grow(self, tmp_path: Path, rings: Path, protocol: str) -> None:
        """30,000 spans to nobody: the resident memory stays, and once somebody listens the next spans arrive."""
        with faulty(protocol, Plan(failures=FOREVER)) as receiver:
            environ = {**otlp(protocol, receiver.endpoint, patient=False), "OTEL_BSP_MAX_QUEUE_SIZE": "2048"}
            with Sidecar(tmp_path, rings, environ) as sidecar:
                feed_and_wait(tmp_path, rings / "a.ring", sidecar, 10_000)
                before = sidecar.resident()
                for name in ("b.ring", "c.ring"):
                    feed_and_wait(tmp_path, rings / name, sidecar, 10_000)
                assert sidecar.resident() - before < 24 * MIB
                wait_until(lambda: sidecar.spans("failed") > 0, WAIT_S, "a batch has failed")
                # And at most one for each of the three feeders, whose end is a death.
                assert accounts(sidecar) - 30_000 in range(4)
                wait_until(lambda: sidecar.pending() <= 2048 + 512, WAIT_S, "the queue is bounded")
                receiver.plan = Plan()
                wait_until(lambda: sidecar.pending() == 0, WAIT_S, "the queue empties")
                book = ledger.fed_and_ended(tmp_path, rings / "d.ring", "--requests", "500")
                wait_until(lambda: len(of_engine(receiver.received.spans, book.engine["pid"])) >= 500, WAIT_S, "spans")
                assert accounts(sidecar) - 30_500 in range(5)
                assert sidecar.healthy()
            assert differences(of_engine(receiver.received.spans, book.engine["pid"]), book) == []

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_a_slow_one_loses_nothing(self, tmp_path: Path, rings: Path, protocol: str) -> None:
        """Answers after a second each: the turns go on meanwhile, and in the end all spans are there."""
        with (
            faulty(protocol, Plan(delay_s=1.0)) as slow,
            Sidecar(tmp_path, rings, otlp(protocol, slow.endpoint)) as sidecar,
        ):
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "1500")
            wait_until(lambda: sidecar.finished("a.ring") == 1500, WAIT_S, "all are counted")
            assert sidecar.healthy()
            wait_until(lambda: sidecar.spans("exported") == 1500, WAIT_S, "all are exported")
        assert differences(slow.received.spans, book) == []

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_one_that_is_overloaded_for_a_moment_loses_nothing(
        self, tmp_path: Path, rings: Path, protocol: str
    ) -> None:
        """Three failures that may be tried again, then health: all spans are there, once."""
        with faulty(protocol, Plan(failures=3)) as overloaded:
            environ = {**otlp(protocol, overloaded.endpoint), "OTEL_METRICS_EXPORTER": "none"}
            with Sidecar(tmp_path, rings, environ) as sidecar:
                book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "300")
                wait_until(lambda: sidecar.spans("exported") == 300, WAIT_S, "all are exported")
            assert overloaded.failed == 3
            assert differences(overloaded.received.spans, book) == []

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_one_whose_certificate_is_not_trusted_gets_nothing(
        self, tmp_path: Path, rings: Path, protocol: str
    ) -> None:
        """Nothing gets through; the spans are counted as failed, and the log does not fill."""
        with faulty(protocol, Plan()) as behind, TlsFront(self_signed(tmp_path), behind.port) as front:
            endpoint = f"https://127.0.0.1:{front.port}"
            environ = {**otlp(protocol, endpoint, patient=False), "OTEL_METRIC_EXPORT_INTERVAL": "100"}
            with Sidecar(tmp_path, rings, environ) as sidecar:
                ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "300")
                wait_until(lambda: sidecar.spans("failed") == 300, WAIT_S, "all have failed")
                wait_until(lambda: sidecar.metric_exports("failed") >= 16, WAIT_S, "many exports have failed")
                assert sidecar.healthy()
                assert len([line for line in sidecar.lines if line["level"] in {"warning", "error"}]) < 8
                assert front.refused >= 3, "it was tried again"
            assert (front.handshakes, behind.arrived) == (0, 0)


def accounts(sidecar: Sidecar) -> int:
    """Spans by what became of them, added up in one reading."""
    page = sidecar.get("/metrics").body.splitlines()
    lines = [
        line
        for line in page
        if line.startswith(("vllm_kvfix_sidecar_spans_total{", "vllm_kvfix_sidecar_spans_pending"))
    ]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if "unsampled" not in line))


def feed_and_wait(folder: Path, ring: Path, sidecar: Sidecar, requests: int) -> None:
    """Feed a ring and wait until the sidecar has counted its requests."""
    with ledger.Feeder(folder, ring, "--requests", str(requests), "--capacity", "4194304", "--hold") as feeder:
        feeder.fed()
        wait_until(lambda: sidecar.finished(ring.name) == requests, WAIT_S, "all are counted")
