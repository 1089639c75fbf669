# SPDX-License-Identifier: Apache-2.0
"""Puts the events of one engine together: a record for each request that has given its blocks back.

What is kept is bounded, whatever a ring says: ``MOST_LIVE`` requests (beyond, the oldest are forgotten; their Finished
still makes a whole record, but without details), ``MOST_DETAILS`` events a request, ``MOST_DETAILS_IN_ALL`` an engine.
A request that has that many keeps its first 64; of the later ones, allocations next to each other are merged two by
two, again and again: blocks stay exact, times grow coarser. What cannot be merged is left out and counted.
"""

from __future__ import annotations

from hashlib import sha256
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvfix import events
from vllm_kvfix.events import Admitted, Allocated, Arrived, Blocks, Finished, Freed, Preempted, Refused
from vllm_kvfix_sidecar.copying import copied
from vllm_kvfix_sidecar.details import Detail, merged, unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_LIVE = 50_000
MOST_DETAILS = 128
MOST_DETAILS_IN_ALL = 400_000
MOST_TAKERS = 32
ENGINE_ENDED = "engine_ended"


class Taker(NamedTuple):
    """A request that got blocks of a preempted one; the ids are 0 where its caller is not known."""

    number: int
    trace_id: int
    span_id: int


class RequestRecord(NamedTuple):
    """All about a request that is over; times in ns of the engine's monotonic clock.

    ``reason`` is one of ``events.FINISH_REASONS``, or ``engine_ended``: then the engine died with the request in it,
    and the sums are those of the events that were seen. ``admission`` is 0 where it never ran; ``freed_at`` is when its
    blocks were given back. ``arrival <= admission <= end <= freed_at`` holds, whatever the ring said.
    """

    number: int
    request_id: str
    context: events.TraceContext | None
    trace_id: int
    span_id: int
    arrival: int
    admission: int
    end: int
    freed_at: int
    reason: str
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    external_tokens: int
    new_blocks: int
    reused_blocks: int
    peak_blocks: int
    held_block_us: int
    preemptions: int
    refusals: int
    groups: tuple[Blocks, ...]
    details: tuple[Detail, ...]
    dropped_details: int
    takers: tuple[Taker, ...]
    took_blocks: bool


class Holder(NamedTuple):
    """A request that is not over, and what it holds; times in ns of the engine's monotonic clock, 0: not known.

    ``state``: ``waiting`` (it never ran), ``running``, ``preempted``, or ``finished`` where only its blocks are left.
    ``request_id`` and ``trace_id`` are None where its arrival was not seen. ``blocks`` and ``peak`` are those that it
    got: more than it holds where a sliding window gave some back.
    """

    request_id: str | None
    trace_id: int | None
    span_id: int
    state: str
    blocks: int
    peak: int
    arrival: int
    admission: int
    preemptions: int


class SpanIds:
    """Ids of trace and span of each request of one ring: the same for whoever reads that ring, and whenever.

    They are bits of SHA-256 over the ring's process (boot id, pid, start time), its file name, and the number.
    """

    def __init__(self, boot_id: bytes, pid: int, start_time: int, ring: str) -> None:
        self._seed = sha256(b"\0".join((boot_id, b"%d %d" % (pid, start_time), ring.encode(errors="replace"), b"span")))

    def of(self, number: int, context: events.TraceContext | None) -> tuple[int, int]:
        """(trace id, span id) of a request; the trace is the caller's if it has one."""
        digest = self._seed.copy()
        digest.update(number.to_bytes(8, "big"))
        data = digest.digest()
        trace_id = context.trace_id if context else int.from_bytes(data[8:24], "big") or 1
        return trace_id, int.from_bytes(data[:8], "big") or 1


class _Live:
    """What is known of a request that is not over."""

    __slots__ = ("arrived", "blocks", "details", "dropped", "finished", "heard", "peak", "takers", "took")

    def __init__(self, heard: int) -> None:
        self.arrived: Arrived | None = None
        self.finished: Finished | None = None
        self.details: list[Detail] = []
        self.dropped = 0
        self.takers: list[Taker] = []
        self.took = False
        self.heard = heard
        self.blocks = 0
        self.peak = 0


class RequestTracker:
    """Follows the requests of one engine.

    ``config`` and ``step`` are the latest; ``malformed`` counts payloads given up; ``forgotten`` requests of which
    nothing can be told: too many lived, or the ring lost what became of them.
    """

    def __init__(
        self, ids: SpanIds, most_live: int = MOST_LIVE, of_process: Callable[[Any], None] = lambda _: None
    ) -> None:
        """``of_process`` is called with each event that tells of the process, not of its requests."""
        self.config: events.Config | None = None
        self.step: events.Step | None = None
        self.malformed = 0
        self.forgotten = 0
        self._ids = ids
        self._most_live = most_live
        self._live: dict[int, _Live] = {}
        self._details = 0
        self._gaps = 0
        self._done: list[RequestRecord] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Config: self._configured,
            events.Step: self._stepped,
            Arrived: self._arrived,
            Admitted: self._got,
            Allocated: self._got,
            Refused: self._refused,
            Preempted: self._preempted,
            Finished: self._finished,
            Freed: self._freed,
            **dict.fromkeys((events.Figures, events.Unread, events.Census, events.Container), of_process),
        }

    @property
    def live(self) -> int:
        """Requests that are not over."""
        return len(self._live)

    def holders(self, most: int) -> list[Holder]:
        """The requests that hold most blocks now, most first; any thread may ask."""
        # Of one that was not heard of since a gap nobody knows whether it is over.
        live = [(number, live) for number, live in copied(self._live.items) if live.heard == self._gaps]
        return [self._holder(*found) for found in nlargest(most, live, key=lambda found: found[1].blocks)]

    def _holder(self, number: int, live: _Live) -> Holder:
        details, arrived, finished = tuple(live.details), live.arrived, live.finished
        identity = arrived.identity if arrived else finished.identity if finished else None
        trace_id, span_id = self._ids.of(number, identity.context if identity else None)
        admission = next((detail.time for detail in details if isinstance(detail, Admitted)), 0)
        moves = [detail for detail in details if isinstance(detail, Admitted | Preempted)]
        preempted = bool(moves) and isinstance(moves[-1], Preempted)
        state = "finished" if finished else "preempted" if preempted else "running" if live.blocks else "waiting"
        return Holder(
            identity.request_id if identity else None,
            trace_id if identity else None,
            span_id,
            state,
            live.blocks,
            live.peak,
            arrived.time if arrived else finished.arrival if finished else 0,
            admission,
            sum(isinstance(detail, Preempted) for detail in moves),
        )

    def consume(self, payload: Sequence[int]) -> list[RequestRecord]:
        """Take the events of a frame; the records of the requests that are over now."""
        done = self._done = []
        handlers = self._handlers
        try:
            for event in events.decode(payload):
                handlers[type(event)](event)
        except events.MalformedError:
            self.malformed += 1
        return done

    def gap(self) -> None:
        """Events were lost here: a request that is not heard of again may be over."""
        self._gaps += 1

    def abandon(self, time_ns: int) -> list[RequestRecord]:
        """The engine has ended at ``time_ns``, and its requests with it: their records.

        Not of those whose arrival was not seen, nor of those not heard of after a gap; they count as forgotten.
        """
        done = [self._abandoned(number, live, time_ns) for number, live in self._live.items()]
        self._live.clear()
        self._details = 0
        told = [record for record in done if record is not None]
        self.forgotten += len(done) - len(told)
        return told

    def _abandoned(self, number: int, live: _Live, time_ns: int) -> RequestRecord | None:
        if live.finished is not None:
            return self._record(live.finished, live, time_ns)
        if live.arrived is None or live.heard != self._gaps:
            return None
        finished = unfinished(number, live.arrived, live.details, time_ns)
        return self._record(finished, live, finished.time)._replace(reason=ENGINE_ENDED)

    def _configured(self, event: events.Config) -> None:
        self.config = event

    def _stepped(self, event: events.Step) -> None:
        self.step = event

    def _of(self, number: int) -> _Live:
        live = self._live.get(number)
        if live is None:
            if len(self._live) >= self._most_live:
                self._forget_oldest()
            live = self._live[number] = _Live(self._gaps)
        live.heard = self._gaps
        return live

    def _forget_oldest(self) -> None:
        # Many at once: to find the first key of a dict whose first keys were deleted takes ever longer.
        for number in list(islice(self._live, self._most_live // 16 + 1)):
            self._details -= len(self._live.pop(number).details)
            self.forgotten += 1

    def _arrived(self, event: Arrived) -> None:
        self._of(event.number).arrived = event

    def _got(self, event: Admitted | Allocated) -> None:
        live = self._detail(event)
        live.blocks += sum(map(sum, event.groups)) if isinstance(event, Admitted) else sum(event.groups)
        live.peak = max(live.peak, live.blocks)

    def _refused(self, event: Refused) -> None:
        self._detail(event)

    def _detail(self, event: Detail) -> _Live:
        live = self._of(event.number)
        if len(live.details) >= MOST_DETAILS:
            before = len(live.details)
            live.details = merged(live.details)
            self._details -= before - len(live.details)
        if len(live.details) >= MOST_DETAILS or self._details >= MOST_DETAILS_IN_ALL:
            live.dropped += 1
            return live
        live.details.append(event)
        self._details += 1
        return live

    def _preempted(self, event: Preempted) -> None:
        self._detail(event).blocks = 0
        if not event.taker:
            return
        taker = self._of(event.taker)
        taker.took = True
        takers = self._of(event.number).takers
        if len(takers) < MOST_TAKERS and all(known.number != event.taker for known in takers):
            known = taker.arrived is not None
            context = taker.arrived.identity.context if taker.arrived else None
            takers.append(Taker(event.taker, *(self._ids.of(event.taker, context) if known else (0, 0))))

    def _finished(self, event: Finished) -> None:
        if not event.freed:
            self._of(event.number).finished = event
            return
        live = self._live.pop(event.number, None)
        self._details -= len(live.details) if live else 0
        self._done.append(self._record(event, live, event.time))

    def _freed(self, event: Freed) -> None:
        live = self._live.get(event.number)
        if live is not None and live.finished is not None:
            del self._live[event.number]
            self._details -= len(live.details)
            self._done.append(self._record(live.finished, live, event.time))

    def _record(self, event: Finished, live: _Live | None, freed_at: int) -> RequestRecord:
        request_id, context = event.identity
        trace_id, span_id = self._ids.of(event.number, context)
        arrival, admission, end = event.arrival, event.admission, event.time
        if (admission and not arrival <= admission <= end) or arrival > end:  # a ring that lies
            arrival, admission = min(arrival, end), admission and min(max(admission, min(arrival, end)), end)
        groups = event.groups
        return RequestRecord(
            event.number,
            request_id,
            context,
            trace_id,
            span_id,
            arrival,
            admission,
            end,
            max(end, freed_at),
            event.reason,
            event.prompt_tokens,
            event.output_tokens,
            event.hit_tokens,
            event.external_tokens,
            groups[0].new if len(groups) == 1 else sum(blocks.new for blocks in groups),
            groups[0].reused if len(groups) == 1 else sum(blocks.reused for blocks in groups),
            event.peak,
            event.held,
            event.preemptions,
            event.refusals,
            groups,
            tuple(live.details) if live else (),
            live.dropped if live else 0,
            tuple(live.takers) if live else (),
            live.took if live else False,
        )
