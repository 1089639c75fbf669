# SPDX-License-Identifier: Apache-2.0
"""The feeder: its ledger says what a plain reader finds in its ring."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, get_args

import pytest

from tests.sidecar_e2e import ledger
from tests.sidecar_e2e.feeder import start_time
from vllm_kvfix import events
from vllm_kvfix.ring.reader import RingReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[ledger.Ledger, list[events.Event]]:
    """The ledger of 3,000 requests, and the events in the ring."""
    folder = tmp_path_factory.mktemp("feeder")
    ring = folder / "a.ring"
    told = ledger.fed_and_ended(folder, ring, "--requests", "3000", "--never-end", "2", "--seed", "5")
    return told, [event for frame in RingReader(ring).poll() for event in events.decode(frame.payload)]


class TestFeeder:
    """The fake engine's ledger against a plain reader of its ring."""

    def test_the_ring_holds_what_the_ledger_says(self, told: tuple[ledger.Ledger, list[events.Event]]) -> None:
        """Each request's last event says what its line says; the last step is the totals; nothing is missing."""
        book, seen = told
        finished = {event.number: event for event in seen if isinstance(event, events.Finished)}
        freed = {event.number: event.time for event in seen if isinstance(event, events.Freed)}
        assert len(seen) == book.totals["events"]
        assert book.totals["dropped"] == 0
        assert [finished_of(line) for line in book.requests] == [
            finished[line["number"]]._replace(freed=line["number"] not in freed) for line in book.requests
        ]
        assert all(line["freed_at"] == freed.get(line["number"], line["end"]) for line in book.requests)
        assert len(finished) == len(book.requests) == 2998
        assert [line["number"] for line in book.open] == [1, 2]
        last = [event for event in seen if isinstance(event, events.Step)][-1]
        assert {name: getattr(last, name) for name in ("steps", "new", "released", "hit")} == {
            name: book.totals[name] for name in ("steps", "new", "released", "hit")
        }

    def test_the_details_are_those_in_the_ring(self, told: tuple[ledger.Ledger, list[events.Event]]) -> None:
        """What happened to each request, with its time and its blocks, stands in the ring in the ledger's order."""
        book, seen = told
        found: dict[int, list[list[int | str]]] = {}
        for event in seen:
            for number, detail in detail_of(event):
                found.setdefault(number, []).append(detail)
        for line in (*book.requests, *book.open):
            assert found.get(line["number"], []) == line["details"], line["number"]

    def test_the_running_totals_are_the_sums_of_the_events(
        self, told: tuple[ledger.Ledger, list[events.Event]]
    ) -> None:
        """Blocks that all requests got, and preemptions, add up to what the steps count."""
        book, seen = told
        lines = [*book.requests, *book.open]
        assert sum(group[1] for line in lines for group in line["groups"]) == book.totals["new"]
        assert sum(group[0] for line in lines for group in line["groups"]) == book.totals["reused"]
        assert sum(line["preemptions"] for line in lines) == book.totals["preemptions"]
        assert len(book.requests) == book.totals["finished"]
        assert sum(line["reason"] == "abort" for line in book.requests) == book.totals["aborted"]
        assert sum(line["refusals"] for line in lines) == book.totals["refusals"]
        steps = [event for event in seen if isinstance(event, events.Step)]
        assert all(step.new + step.reused - step.released + step.free == 400 for step in steps)
        assert all(later.time > step.time for step, later in itertools.pairwise(steps))

    def test_it_has_all_that_can_happen(self, told: tuple[ledger.Ledger, list[events.Event]]) -> None:
        """Every kind of event, every reason it uses, requests that never ran, and unknown takers are in the load."""
        book, seen = told
        of_requests = set(events._KIND_AND_FIELDS) - set(get_args(events.ProcessEvent))
        assert {type(event) for event in seen} == of_requests
        assert {line["reason"] for line in book.requests} == set(events.FINISH_REASONS) - {"unknown"}
        assert any(line["admission"] == 0 for line in book.requests)
        assert any(line["takers"] for line in book.requests)
        assert {event.taker == 0 for event in seen if isinstance(event, events.Preempted)} == {True, False}
        assert {line["context"] is None for line in book.requests} == {True, False}

    def test_the_same_seed_gives_the_same_requests(self, tmp_path: Path) -> None:
        """Two runs tell of the same ids and blocks; another seed of others."""

        def ids(name: str, seed: str) -> list[object]:
            told = ledger.fed_and_ended(tmp_path, tmp_path / name, "--requests", "50", "--seed", seed)
            return [(line["id"], line["groups"]) for line in told.requests]

        assert ids("a.ring", "1") == ids("b.ring", "1") != ids("c.ring", "2")

    def test_a_tiny_ring_loses_what_the_counts_say(self, tmp_path: Path) -> None:
        """Read afterwards, what is there and what the reader lost is all that was published."""
        ring = tmp_path / "a.ring"
        told = ledger.fed_and_ended(tmp_path, ring, "--requests", "500", "--per-step", "4", "--capacity", "1024")
        reader = RingReader(ring)
        read = sum(frame.events for frame in reader.poll())
        assert read > 0
        assert read + reader.lost == told.totals["events"]
        assert reader.lost > 1000

    def test_dropped_frames_are_in_the_ledger(self, tmp_path: Path) -> None:
        """A step too large for the ring is dropped whole: the header counts it, and no line says that it is written."""
        ring = tmp_path / "a.ring"
        options = ("--requests", "400", "--per-step", "100", "--capacity", "4096", "--blocks", "4000")
        told = ledger.fed_and_ended(tmp_path, ring, *options)
        assert RingReader(ring).header.dropped == told.totals["dropped"] > 400
        assert {line["written"] for line in told.requests} == {True, False}

    def test_it_lives_while_told_to_hold(self, tmp_path: Path) -> None:
        """Its lock says that the writer lives until its input ends; the header names the process."""
        with ledger.Feeder(tmp_path, tmp_path / "a.ring", "--hold", "--index", "3", "--leaky") as feeder:
            feeder.fed()
            reader = RingReader(feeder.ring)
            assert reader.writer_is_gone() is False
            assert (reader.header.pid, reader.header.engine_index) == (feeder.pid, 3)
            assert (reader.header.start_time, reader.header.patch_state) == (start_time(feeder.pid), "refused")
            feeder.close_stdin()
            assert feeder.wait(20) == 0
            assert reader.writer_is_gone() is True

    def test_its_clock_can_be_ahead_and_step(self, tmp_path: Path) -> None:
        """The offset in the header is ours, and a day more, and an hour more after the step."""
        hour, day = 3600 * 10**9, 86400 * 10**9
        ring = tmp_path / "a.ring"
        shifts = ("--clock-shift", str(day), "--clock-step", str(hour), "--steps", "3")
        told = ledger.fed_and_ended(tmp_path, ring, *shifts)
        ours = time.time_ns() - time.monotonic_ns()
        assert round((told.engine["offset"] - ours) / hour) == 24
        assert round((RingReader(ring).header.clock_offset_ns - ours) / hour) == 25


def finished_of(line: dict[str, Any]) -> events.Finished:
    """The event that a line of the ledger promises, freed at once."""
    context = line["context"] and events.TraceContext(
        int(line["context"][0], 16), int(line["context"][1], 16), line["context"][2]
    )
    same = {name: line[name] for name in events.Finished._fields if name in line and name != "groups"}
    groups = tuple(events.Blocks(*group) for group in line["groups"])
    identity = events.Identity(line["id"], context)
    freed = line["freed_at"] == line["end"]
    return events.Finished(time=line["end"], freed=freed, groups=groups, identity=identity, **same)


def detail_of(event: events.Event) -> Iterator[tuple[int, list[int | str]]]:
    """The detail in the ledger that an event is, with its request's number."""
    if isinstance(event, events.Admitted):
        name = "resumed" if event.resumed else "admitted"
        reused, new = (sum(column) for column in zip(*event.groups, strict=True))
        yield event.number, [name, event.time, new, reused, event.hit_tokens, event.external_tokens]
    elif isinstance(event, events.Allocated):
        yield event.number, ["allocated", event.time, *event.groups]
    elif isinstance(event, events.Refused):
        yield event.number, ["refused", event.time]
    elif isinstance(event, events.Preempted):
        yield event.number, ["preempted", event.time, event.released, event.taker]
