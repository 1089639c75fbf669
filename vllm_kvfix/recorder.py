# SPDX-License-Identifier: Apache-2.0
"""Notes what a scheduler does and publishes it in a ring: bounded, counting what it gives up, never raising.

It runs between two lines of vLLM's scheduler, so it takes no lock, makes no system call but the clock's, and keeps
little. There it only notes: one tuple for each thing that happened. Every ``FLUSH_NS``, at the end of a step, the
:mod:`ledger <vllm_kvfix.ledger>` works the notes up in one go, which costs a third of what it would in passing: code
that runs a few times between long stretches of other code always finds the processor's caches cold.
"""

from __future__ import annotations

import logging
import time
from array import array
from itertools import compress
from typing import TYPE_CHECKING, Any

from vllm_kvfix import events, faults, live, upstream
from vllm_kvfix.ledger import ARRIVAL, END, FREEING, KEEPING, PREEMPTION, REFUSAL, TURN, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_kvfix.ledger import Note
    from vllm_kvfix.ring.writer import RingWriter

logger = logging.getLogger(upstream.LOGGER_NAME)

FLUSH_NS = 20_000_000
MOST_NOTES = 128  # worked up in some 0.5 ms at most
WORDS_OF_A_NOTE = 40  # at most, nearly always: so that what a small ring is given at once fits in
CONFIG_NS = 5_000_000_000
MOST_FAULTS = 10
_NOBODY: frozenset[int] = frozenset()
_NO_LOOKUPS: dict[str, tuple[Any, int]] = {}


class Recorder:
    """Watches one scheduler and writes to one ring. Its methods are called by the hooks, and none of them raises."""

    def __init__(self, scheduler: Any, writer: RingWriter, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """``clock`` gives nanoseconds of the monotonic clock."""
        self.writer = writer
        self.inside_step = False
        self.off = False
        self._clock = clock
        self._cache = live.CacheView(scheduler)
        self._config = array("Q", events.encode(self._cache.config(scheduler)))
        connector = live.has_connector(scheduler)
        self._levels = live.levels_reader(scheduler)
        self._ledger = Ledger(self._cache, connector=connector, backlogs=len(self._levels(scheduler)[2]))
        # Tables in which blocks are replaced, and those of requests that wait for a connector, must be looked at in the
        # step that told of them.
        self._at_once = connector or not self._cache.keeping
        self._notes: list[Note] = []
        self._most_notes = min(MOST_NOTES, writer.largest // WORDS_OF_A_NOTE)
        self._lookups = _NO_LOOKUPS
        self._kept: set[str] = set()
        for request in live.known_requests(scheduler).values():
            self._ledger.adopt(request, clock(), self._cache.lengths(request.request_id))
        self._flushed = self._configured = self._faults = 0

    def arrived(self, request: Any) -> None:
        """A request joined the waiting queue."""
        if self.off:
            return
        try:
            now = self._clock()
            self._notes.append((ARRIVAL, now, request.request_id, request.trace_headers, request.num_prompt_tokens))
            if (
                len(self._notes) > self._most_notes and not self.inside_step
            ):  # arrivals without end while the engine pauses
                self._flush(now)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("add_request", error)

    def looked_up(self, request: Any, found: Any) -> None:
        """The prefix cache was asked for a waiting request, and found these (``KVCacheBlocks``, tokens, ...)."""
        if self._lookups is _NO_LOOKUPS:
            self._lookups = {}
        self._lookups[request.request_id] = (found[0], found[1])

    def refused(self, request: Any) -> None:
        """A waiting request was tried and found too few free blocks."""
        self._notes.append((REFUSAL, request.request_id))

    def preempting(self, request: Any) -> None:
        """A running request is about to lose its blocks."""
        if self.off:
            return
        try:
            request_id = request.request_id
            # Outside a step a whole cache is reset, and nobody in particular takes its blocks.
            ids = self._cache.block_ids(request_id) if self.inside_step else _NOBODY
            self._notes.append((PREEMPTION, self._clock(), request_id, self._cache.lengths(request_id), ids))
            if self._at_once:
                self._work_up()
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("_preempt_request", error)

    def finishing(self, request: Any) -> None:
        """A request has ended, and its blocks are about to be freed."""
        if self.off:
            return
        try:
            request_id = request.request_id
            self._notes.append(
                (
                    END,
                    self._clock(),
                    request_id,
                    live.finish_reason(request),
                    request.num_output_tokens,
                    self._cache.lengths(request_id),
                )
            )
            if self._at_once:
                self._work_up()
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("_free_request", error)

    def kept(self, request: Any) -> None:
        """After :meth:`finishing`: vLLM did not free the blocks, a KV connector still reads them."""
        self._kept.add(request.request_id)
        self._notes.append((KEEPING, request.request_id))

    def freed(self, request: Any) -> None:
        """Blocks of a request were freed; news only if they had been kept."""
        if self._kept and request.request_id in self._kept:
            self._kept.discard(request.request_id)
            self._notes.append((FREEING, self._clock(), request.request_id))

    def after_step(self, scheduler: Any, output: Any) -> None:
        """A step was scheduled; ``output`` is its ``SchedulerOutput``."""
        self.inside_step = False
        if self.off:
            return
        try:
            now = self._clock()
            counts, cached, backlog = self._levels(scheduler)
            lookups, self._lookups = self._lookups, _NO_LOOKUPS
            rows = output.scheduled_cached_reqs
            admissions = live.admissions(output) if output.scheduled_new_reqs or rows.resumed_req_ids else ()
            # Most rows got nothing in a step. Noting those that did keeps little of vLLM's memory from being reused.
            new = rows.new_block_ids
            given = list(filter(None, new))
            self._notes.append(
                (
                    TURN,
                    now,
                    output.total_num_scheduled_tokens,
                    admissions,
                    list(compress(rows.req_ids, new)) if given else given,
                    given,
                    counts,
                    self._cache.free(),
                    cached,
                    backlog,
                    lookups,
                )
            )
            if now - self._flushed > FLUSH_NS or self._at_once or len(self._notes) > self._most_notes or not counts[0]:
                self._flush(now)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("schedule", error)

    def _work_up(self) -> None:
        notes, self._notes = self._notes, []
        self._ledger.work_up(notes)

    def _flush(self, now: int) -> None:
        """Publish what was noted."""
        self._work_up()
        words, count = self._ledger.take()
        self._flushed = now
        if now - self._configured > CONFIG_NS:
            self._configured = now
            words, count = self._config + words, count + 1
        self.writer.write(words, count)

    def _fault(self, place: str, error: Exception) -> None:
        """Contain an error of ours; too many, and we stop watching."""
        faults.note(place, error)
        self.writer.drop(len(self._notes) or 1)
        self._notes = []
        self._faults += 1
        if self._faults >= MOST_FAULTS:
            self.off = True
            logger.warning(
                "vllm-kvfix: watching stopped in this engine core after %d errors of its own; vLLM is not affected. "
                "Please report the error above; restart vLLM to watch again, or set VLLM_KVFIX_OBSERVE=off.",
                self._faults,
            )

    def close(self) -> None:
        """Publish the rest and let go of the ring; the file stays."""
        if not self.off:
            self.off = True
            try:
                self._flush(self._clock())
            except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
                self._fault("close", error)
        self.writer.close()
