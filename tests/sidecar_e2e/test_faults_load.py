# SPDX-License-Identifier: Apache-2.0
"""Requests and clocks of unusual kinds: endless, a thousand at once, written faster than read, clocks that step."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.sidecar_e2e import ledger
from tests.sidecar_e2e.expectations import ID, by_id, differences, of_engine
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.sidecar import Sidecar, otlp

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sidecar_e2e.receiver import Receiver

MIB = 1 << 20

HOUR_NS = 3600 * 10**9


class TestTheLoad:
    """Requests of unusual kinds."""

    def test_a_request_that_never_ends_does_not_make_it_grow(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """20 requests of 10,000 allocations each take no more memory than the first 500; at the end they are spans."""
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            endless = ("--requests", "20", "--never-end", "20", "--capacity", "8388608", "--blocks", "20000", "--hold")
            ledger_of = _endless(tmp_path, rings / "warm.ring", sidecar, *endless, "--steps", "500")
            before = sidecar.resident()
            book = _endless(tmp_path, rings / "long.ring", sidecar, *endless, "--steps", "10000")
            assert sidecar.resident() - before < 24 * MIB
            assert sidecar.healthy()
            receiver.wait_for(lambda got: len(got.spans) >= 40, WAIT_S)
        assert len(ledger_of.open) == 20
        spans = by_id(receiver.spans)
        for line in book.open:
            span = spans[line["id"]]
            assert span.attributes["vllm_kvfix.kv_cache.groups.new"] == tuple(group[1] for group in line["groups"])
            allocated = [e.attributes for e in span.events if e.name == "vllm_kvfix.allocated"]
            got = sum(int(str(attributes["vllm_kvfix.kv_cache.blocks.new"])) for attributes in allocated)
            assert got == sum(sum(detail[2:]) for detail in line["details"] if detail[0] == "allocated")
            assert len(span.events) <= 128

    def test_a_thousand_admitted_in_one_step_are_all_told(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """One step admits 1,000 requests: each is a span."""
        with Sidecar(tmp_path, rings, otlp("http", receiver.http_endpoint)) as sidecar:
            options = ("--requests", "2000", "--per-step", "1000", "--blocks", "40000")
            book = ledger.fed_and_ended(tmp_path, rings / "a.ring", *options)
            receiver.wait_for(lambda got: len(got.spans) >= 2000, WAIT_S)
            assert sidecar.healthy()
        assert differences(receiver.spans, book) == []

    def test_an_engine_that_ends_while_the_sidecar_is_behind_is_told_to_its_end(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """Stopped in the midst of 12,000 requests, with more written meanwhile and the engine gone: nothing is lost."""
        options = ("--requests", "24000", "--rate", "6000", "--capacity", "4194304")
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            with ledger.Feeder(tmp_path, rings / "a.ring", *options) as feeder:
                wait_until(lambda: sidecar.engine("a.ring"), WAIT_S, "it follows")
                begun = sidecar.finished("a.ring")
                sidecar.signal(signal.SIGSTOP)
                wait_until(lambda: feeder.out.read_text().count("\n") > 12_000, WAIT_S, "much has piled up")
                sidecar.signal(signal.SIGCONT)
                wait_until(lambda: sidecar.finished("a.ring") > begun, WAIT_S, "it goes on")
                sidecar.signal(signal.SIGSTOP)
                assert feeder.wait(WAIT_S) == 0
            sidecar.signal(signal.SIGCONT)
            wait_until(lambda: sidecar.state("a.ring") == "ended", WAIT_S, "its end is seen")
            wait_until(lambda: sidecar.finished("a.ring") == 24_000, WAIT_S, "all are told")
            assert (sidecar.engine("a.ring") or {})["events"]["lost"] == 0

    def test_clocks_that_differ_and_step_leave_durations_true(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """Of an engine a day ahead and one an hour behind, spans lie at the own clock's time, as long as they were."""
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)) as sidecar:
            books = [
                ledger.fed_and_ended(tmp_path, rings / f"{i}.ring", "--requests", "200", "--clock-shift", str(shift))
                for i, shift in enumerate((24 * HOUR_NS, -HOUR_NS))
            ]
            receiver.wait_for(lambda got: len(got.spans) >= 400, WAIT_S)
            assert sidecar.healthy()
        for book in books:
            assert differences(of_engine(receiver.spans, book.engine["pid"]), book) == []

    def test_a_clock_that_steps_moves_the_spans_told_after_it(
        self, tmp_path: Path, rings: Path, receiver: Receiver
    ) -> None:
        """The wall clock steps back by an hour while requests run: no span is turned round, or an hour long."""
        load = ("--requests", "120", "--per-step", "20", "--rate", "60", "--never-end", "20")
        with Sidecar(tmp_path, rings, otlp("grpc", receiver.grpc_endpoint)):
            options = (*load, "--clock-step", str(-HOUR_NS), "--steps", "5", "--hold")
            with ledger.Feeder(tmp_path, rings / "a.ring", *options) as feeder:
                book = feeder.fed()
                feeder.kill()
            receiver.wait_for(lambda got: len(got.spans) >= 120, WAIT_S)
        assert all(0 <= span.end - span.start < 60 * 10**9 for span in receiver.spans)
        lines = {line["id"]: line for line in (*book.requests, *book.open)}
        offsets = {span.attributes[ID]: span.start - lines[span.attributes[ID]]["arrival"] for span in receiver.spans}
        steps = {name: round((offset - book.engine["offset"]) / HOUR_NS) for name, offset in offsets.items()}
        assert {steps[line["id"]] for line in book.open} == {-1}, "told after the step"
        assert 0 in steps.values(), "some were told before it"


def _endless(folder: Path, ring: Path, sidecar: Sidecar, *options: str) -> ledger.Ledger:
    """Feed requests that never end, wait until they are read, and kill the feeder."""
    with ledger.Feeder(folder, ring, *options) as feeder:
        book = feeder.fed()
        steps = book.totals["steps"]
        wait_until(lambda: (sidecar.engine(ring.name) or {}).get("steps") == steps, WAIT_S, "all is read")
        feeder.kill()
    wait_until(lambda: sidecar.state(ring.name) == "ended", WAIT_S, "its end is seen")
    return book
