# SPDX-License-Identifier: Apache-2.0
"""Notes what a scheduler does and publishes it in a ring: bounded, counting what it gives up, never raising.

It runs between two lines of vLLM's scheduler, so it waits for nothing, makes no system call but the clock's, and keeps
little. There it only notes: one tuple for each thing that happened. A thread, started at the first step, has the
:mod:`ledger <vllm_kvfix.ledger>` work the notes up every ``FLUSH_S``, while the engine waits for its model: in passing
that would cost several times as much as the notes, since code that runs a few times between long stretches of other
code always finds the processor's caches cold. A chunk of notes is small, so that the thread soon lets go of the
interpreter. Should it not get to run at all, the step path works a chunk up itself.

Where tables change under way (windows, Mamba, KV connectors), notes are worked up at once, on the step path.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from itertools import compress
from typing import TYPE_CHECKING, Any

from vllm_kvfix import events, faults, live, upstream
from vllm_kvfix.ledger import ARRIVAL, END, FREEING, KEEPING, PREEMPTION, REFUSAL, TURN, Ledger
from vllm_kvfix.ring import layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_kvfix.ledger import Note
    from vllm_kvfix.ring.writer import RingWriter

logger = logging.getLogger(upstream.LOGGER_NAME)

FLUSH_S = 0.02
IDLE_S = 0.25  # between two looks while nothing happens
MOST_NOTES = 128  # worked up in one go, in some 0.5 ms at most
CLOSING_S = 1.0  # to wait for the thread, where an engine ends
CROWDED = 8  # chunks that may wait for the thread
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
        self._notes: deque[Note] = deque()
        self._most_notes = min(MOST_NOTES, writer.largest // WORDS_OF_A_NOTE)
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        # Held by whoever works notes up; the step path asks for it and does not wait.
        self._working = threading.Lock()
        self._lookups = _NO_LOOKUPS
        self._kept: set[str] = set()
        for request in list(live.known_requests(scheduler).values()):
            self._ledger.adopt(request, clock(), self._cache.lengths(request.request_id))
        self._configured = self._faults = 0

    def arrived(self, request: Any) -> None:
        """A request joined the waiting queue."""
        if self.off:
            return
        try:
            now = self._clock()
            self._notes.append((ARRIVAL, now, request.request_id, request.trace_headers, request.num_prompt_tokens))
            if len(self._notes) > CROWDED * self._most_notes:
                self._publish()
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("add_request", error)

    def looked_up(self, request: Any, found: Any) -> None:
        """The prefix cache was asked for a waiting request, and found these (``KVCacheBlocks``, tokens, ...)."""
        if self.off:
            return
        if self._lookups is _NO_LOOKUPS:
            self._lookups = {}
        self._lookups[request.request_id] = (found[0], found[1])

    def refused(self, request: Any) -> None:
        """A waiting request was tried and found too few free blocks."""
        if not self.off:
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
        if not self.off:
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
            if self._at_once or len(self._notes) > CROWDED * self._most_notes:
                self._publish()
            elif self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllm-kvfix-recorder", daemon=True)
                self._thread.start()
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("schedule", error)

    def _run(self) -> None:
        pause = FLUSH_S
        while not self._end.wait(pause):
            worked = self._publish()
            # A chunk at a time: the engine may want the interpreter.
            pause = FLUSH_S / 16 if self._notes else FLUSH_S if worked else min(2 * pause, IDLE_S)

    def _work_up(self) -> int:
        """Work up one chunk of notes; returns how many notes that were."""
        notes = self._notes
        chunk = [notes.popleft() for _ in range(min(len(notes), self._most_notes))]
        try:
            self._ledger.work_up(chunk)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("ledger", error, len(chunk))
        return len(chunk)

    def _publish(self, *, wait: bool = False) -> bool:
        """Work up one chunk of notes and publish it; False where there was none, or somebody else is at it."""
        if not (self._working.acquire(timeout=CLOSING_S) if wait else self._working.acquire(blocking=False)):
            return False
        try:
            if not self._work_up() and not self._at_once:
                return False
            words, count = self._ledger.take()
            now = self._clock()
            if now - self._configured > CONFIG_NS:
                self._configured = now
                words, count = self._config + words, count + 1
            self.writer.write(words, count)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault("publish", error)
        finally:
            self._working.release()
        return True

    @property
    def largest(self) -> int:
        """Most words that :meth:`tell` takes at a time."""
        return self.writer.largest - layout.FRAME_HEADER_WORDS

    def tell(self, words: array[int], count: int) -> bool:
        """Publish so many events that tell of the process; False: nothing is recorded any more.

        Waits for whoever is at work on the ring: never to be called on the step path.
        """
        with self._working:
            if self.off:
                return False
            self.writer.write(words, count)
            return True

    def _fault(self, place: str, error: Exception, events: int = 1) -> None:
        """Contain an error of ours, which cost so many events; too many, and we stop watching."""
        faults.note(place, error)
        self.writer.drop(events)
        self._faults += 1
        if self._faults >= MOST_FAULTS and not self.off:
            self.off = True
            self._end.set()
            self._notes.clear()
            self._kept.clear()
            self._lookups = _NO_LOOKUPS
            logger.warning(
                "vllm-kvfix: watching stopped in this engine core after %d errors of its own; vLLM is not affected. "
                "Please report the error above; restart vLLM to watch again, or set VLLM_KVFIX_OBSERVE=off.",
                self._faults,
            )

    def close(self) -> None:
        """Publish the rest and let go of the ring; the file stays."""
        off, self.off = self.off, True
        self._end.set()
        if self._thread is threading.current_thread():
            return  # our own thread happened to collect the scheduler: what it holds goes with it
        if self._thread is not None:
            self._thread.join(CLOSING_S)
        while not off and self._notes and self._publish(wait=True):
            pass
        # Not to be had only where this very thread was at work on the ring when it happened to collect the scheduler.
        if self._working.acquire(timeout=CLOSING_S):
            self.writer.close()
            self._working.release()
