# SPDX-License-Identifier: Apache-2.0
"""The sidecar is stopped or killed, or its engine is: nothing is missed, and the dead are told from the living."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.sidecar_e2e import hostile, ledger
from tests.sidecar_e2e.expectations import ENGINE_ENDED, ID, REASON, by_id, differences, twice
from tests.sidecar_e2e.feeder import boot_id, start_time
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.sidecar import PATIENT, Sidecar, otlp
from vllm_kvfix.ring import layout

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sidecar_e2e.receiver import Receiver
    from tests.sidecar_e2e.telemetry import Span


PROTOCOLS = ["grpc", "http"]


class TestTheSidecarIsStopped:
    """Stopped, killed, started again."""

    def test_it_goes_on_after_a_stop(self, tmp_path: Path, rings: Path, receiver: Receiver) -> None:
        """Stopped by SIGSTOP while the engine writes and continued later, it misses nothing of a ring large enough."""
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            with ledger.Feeder(tmp_path, rings / "a.ring", "--requests", "1200", "--rate", "600") as feeder:
                wait_until(lambda: sidecar.finished("a.ring") > 100, WAIT_S, "it follows")
                sidecar.signal(signal.SIGSTOP)
                book = feeder.fed()
                sidecar.signal(signal.SIGCONT)
                receiver.wait_for(lambda got: len(got.spans) >= 1200, WAIT_S)
            assert sidecar.healthy()
        assert differences(receiver.spans, book) == []

    def test_ended_and_started_again_it_tells_each_span_once(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """SIGTERM in mid-flight and a new one: all spans, each once, with all their events."""
        environ = otlp("http", receiver.http_endpoint)
        with ledger.Feeder(tmp_path, rings / "a.ring", "--requests", "1500", "--rate", "500") as feeder:
            with Sidecar(tmp_path, rings, environ) as first:
                wait_until(lambda: first.finished("a.ring") > 300, WAIT_S, "the first follows")
                assert first.end() == 0
            with Sidecar(tmp_path, rings, environ):
                book = feeder.fed()
                receiver.wait_for(lambda got: len(got.spans) >= 1500, WAIT_S)
        assert differences(receiver.spans, book) == []

    def test_killed_and_started_again_it_misses_none(self, tmp_path: Path, rings: Path, receiver: Receiver) -> None:
        """SIGKILL in mid-flight: all spans; one that was on its way at the kill may come again, the very same."""
        environ = otlp("grpc", receiver.grpc_endpoint)
        with ledger.Feeder(tmp_path, rings / "a.ring", "--requests", "1500", "--rate", "500") as feeder:
            with Sidecar(tmp_path, rings, environ) as first:
                wait_until(lambda: len(receiver.spans) > 300, WAIT_S, "the first exports")
                first.kill()
            with Sidecar(tmp_path, rings, environ) as second:
                book = feeder.fed()
                receiver.wait_for(lambda got: len(by_id(got.spans)) >= 1500, WAIT_S)
                assert second.healthy()
        again = twice(receiver.spans)
        assert len(again) <= 512, "no more than a batch"
        once = {(span.trace_id, span.span_id): span for span in receiver.spans}
        assert all(_timeless(span) == _timeless(once[span.trace_id, span.span_id]) for span in receiver.spans)
        assert differences(list(once.values()), book) == []

    def test_an_engine_told_to_its_end_is_not_told_again(self, tmp_path: Path, rings: Path, receiver: Receiver) -> None:
        """Started twice over the ring of an engine that is gone, the second one sends no span."""
        book = ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "200")
        for _ in range(2):
            with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
                receiver.wait_for(lambda got: len(got.spans) >= 200, WAIT_S)
                wait_until(lambda: sidecar.state("a.ring") == "ended", WAIT_S, "it knows the engine")  # asked now
                assert sidecar.end() == 0
        assert differences(receiver.spans, book) == []


def _timeless(span: Span) -> tuple[object, ...]:
    """What does not move with the clocks' offset when a span is told again."""
    events = [(event.name, event.time - span.start, event.attributes) for event in span.events]
    return span.parent_id, span.attributes, events, span.end - span.start, span.links, span.status


class TestTheEngineIsKilled:
    """The engine dies."""

    def test_its_open_requests_are_told(self, tmp_path: Path, rings: Path, receiver: Receiver) -> None:
        """Killed by SIGKILL, the requests that it had are spans of reason engine_ended, with what they had got."""
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            options = ("--requests", "300", "--never-end", "4", "--hold")
            with ledger.Feeder(tmp_path, rings / "a.ring", *options) as feeder:
                book = feeder.fed()
                receiver.wait_for(lambda got: len(got.spans) == 296, WAIT_S)
                feeder.kill()
            receiver.wait_for(lambda got: len(got.spans) >= 300, WAIT_S)
            told = sidecar.engine("a.ring")
            assert told is not None
            assert (told["state"], told["finished"][ENGINE_ENDED]) == ("ended", 4)
            assert sidecar.healthy()
        ended = [span for span in receiver.spans if span.attributes[REASON] == ENGINE_ENDED]
        assert {span.attributes[ID] for span in ended} == {line["id"] for line in book.open}
        assert differences([span for span in receiver.spans if span not in ended], book) == []
        lines = {line["id"]: line for line in book.open}
        for span in ended:
            groups = lines[span.attributes[ID]]["groups"]
            assert span.attributes["vllm_kvfix.kv_cache.groups.new"] == tuple(group[1] for group in groups)
            assert span.status == 2
            assert span.end >= span.start

    def test_a_process_id_that_was_given_again_is_not_the_engine(self, tmp_path: Path, rings: Path) -> None:
        """A ring whose pid is a living process of another start time has ended; with that start time it is alive."""
        for name, began in (("reused.ring", start_time(os.getpid()) + 1), ("same.ring", start_time(os.getpid()))):
            ledger.fed_and_ended(tmp_path, rings / name, "--requests", "20")
            hostile.patch(rings / name, layout.PID_WORD, os.getpid())
            hostile.patch(rings / name, layout.START_TIME_WORD, began)
        with Sidecar(tmp_path, rings, PATIENT) as sidecar:
            wait_until(lambda: len(sidecar.ready()["engines"]) == 2, WAIT_S, "both are found")
            wait_until(lambda: sidecar.state("reused.ring") == "ended", WAIT_S, "the engine is found dead")
            assert sidecar.state("same.ring") == "live"

    def test_a_ring_of_another_boot_has_ended(self, tmp_path: Path, rings: Path) -> None:
        """Whatever runs under its pid now, the engine was of another boot of the machine."""
        ledger.fed_and_ended(tmp_path, rings / "a.ring", "--requests", "20")
        hostile.patch(rings / "a.ring", layout.PID_WORD, os.getpid())
        hostile.patch(rings / "a.ring", layout.START_TIME_WORD, start_time(os.getpid()))
        hostile.patch(
            rings / "a.ring", layout.BOOT_ID_BYTES.start // layout.WORD, int.from_bytes(boot_id()[:8], "big") ^ 1
        )
        with Sidecar(tmp_path, rings, PATIENT) as sidecar:
            wait_until(lambda: sidecar.state("a.ring") == "ended", WAIT_S, "the engine is found dead")
