# SPDX-License-Identifier: Apache-2.0
"""Works up what the recorder noted between the lines of the scheduler into records for the ring.

Blocks are counted from vLLM's own tables: what a step appended stands in its ``SchedulerOutput``; what does not (blocks
of a request that was preempted in the step in which it got them, or that waits for a KV connector) is caught up with
when the request lets go of its blocks. Blocks that a window gives back early are noticed at the request's next
allocation.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vllm_kvfix import events, live

if TYPE_CHECKING:
    from collections.abc import Sequence

TICK_SHIFT = 10  # held time is summed in ticks of 1,024 ns: a shift costs less than a division


# -- what the recorder notes, in the order in which it happened; times in ns of the monotonic clock ------------------


class Arrival(NamedTuple):
    """A ``Request`` joined the waiting queue."""

    time: int
    request: Any
    prompt_tokens: int


class Refusal(NamedTuple):
    """A waiting ``Request`` was tried in this step, and found too few free blocks."""

    request: Any


class Preemption(NamedTuple):
    """A running ``Request`` is about to lose its blocks: entries in its table of each group; in a step, their ids."""

    time: int
    request: Any
    lengths: tuple[int, ...]
    ids: frozenset[int]


class End(NamedTuple):
    """A ``Request`` has ended and is about to let go of its blocks: of each group, entries in its table."""

    time: int
    request: Any
    reason: int
    output_tokens: int
    lengths: tuple[int, ...]


class Keeping(NamedTuple):
    """The blocks of the request that ended last were not freed: a KV connector still reads them."""

    request: Any


class Freeing(NamedTuple):
    """They were freed now."""

    time: int
    request: Any


class Turn(NamedTuple):
    """A step was scheduled.

    ``lookups``: of each request that was tried, what the prefix cache found, blocks and tokens. ``lengths``: of each
    row of a new request, the entries of its tables in this step; a worker in the same process extends the lists later.
    """

    time: int
    output: Any
    lengths: list[list[int]]
    counts: tuple[int, int]
    free: int
    cached: int
    backlog: Sequence[int]
    lookups: dict[str, tuple[Any, int]]


Note: TypeAlias = Arrival | Refusal | Preemption | End | Keeping | Freeing | Turn


class _Request:
    """A live request: what it has got, and what it holds."""

    __slots__ = (
        "admission", "allocated_head", "arrival", "external_tokens", "given", "held", "held_sum", "hit_tokens",
        "identity", "lengths", "new", "nulls", "number", "peak", "preemptions", "prompt_tokens", "refusals", "reused",
        "told_refused", "weighted",
    )  # fmt: skip

    def __init__(self, number: int, arrival: int, groups: int, identity: list[int], prompt_tokens: int) -> None:
        self.number = number
        self.arrival = arrival
        self.identity = identity
        self.prompt_tokens = prompt_tokens
        self.allocated_head = events.head(events.ALLOCATED, groups + 1, number)
        # Of each group: blocks got so far; entries in the table as far as counted, and null blocks at its front.
        self.new = [0] * groups
        self.reused = [0] * groups
        self.lengths = [0] * groups
        self.nulls = [0] * groups
        # Blocks it holds, the sum of the ticks at which it got each, and the ticks times blocks of what it gave back.
        self.held = self.weighted = self.held_sum = 0
        # What the prefix cache gave to it in this turn, of each group.
        self.given: list[int] | None = None
        self.admission = self.peak = self.hit_tokens = self.external_tokens = 0
        self.preemptions = self.refusals = 0
        self.told_refused = False


class Ledger:
    """The live requests of one scheduler, and the running totals. What it raises, its caller must contain."""

    def __init__(self, cache: live.CacheView, *, connector: bool) -> None:
        """``connector``: requests may hold blocks while they wait, so notes are worked up at once."""
        self._cache = cache
        self._connector = connector
        self._groups = cache.groups
        self._simple = self._groups == 1 and cache.keeping
        self._requests: dict[str, _Request] = {}
        self._kept: dict[str, int] = {}
        self._refused: list[int] = []
        self._victims: list[tuple[frozenset[int], list[int]]] = []
        self._words: list[int] = []
        self._count = self._number = self._finished_at = 0
        self._step_head = events.head(events.STEP, 13 + len(cache.backlog()))
        self._steps = self._tokens = self._new = self._reused = self._released = 0
        self._preemptions = self._refusals = self._queried = self._hit = 0

    def take(self) -> tuple[list[int], int]:
        """The records made since the last call, as words, and how many records they are."""
        taken = self._words, self._count
        self._words, self._count = [], 0
        return taken

    def work_up(self, notes: Sequence[Note], scheduler: Any) -> None:
        """Make the records for what was noted; see :meth:`take`."""
        for note in notes:
            if isinstance(note, Turn):
                self._turn(note, scheduler)
            elif isinstance(note, Arrival):
                self._arrival(note)
            elif isinstance(note, End):
                self._end(note)
            else:
                self._rare(note)

    def _rare(self, note: Refusal | Preemption | Keeping | Freeing) -> None:
        if isinstance(note, Refusal):
            self._refusal(note)
        elif isinstance(note, Preemption):
            self._preemption(note)
        elif isinstance(note, Keeping):
            self._words[self._finished_at + 4] &= ~events.LOW
            self._kept[note.request.request_id] = self._words[self._finished_at] & events.NUMBER_MASK
        elif number := self._kept.pop(note.request.request_id, 0):
            self._words += (events.head(events.FREED, 2, number), note.time)
            self._count += 1

    # -- requests ------------------------------------------------------------------------------------------------

    def _know(self, identity: events.Identity, time: int, prompt_tokens: int) -> _Request:
        self._number += 1
        words = events.identity_words(identity)
        known = self._requests[identity.request_id] = _Request(self._number, time, self._groups, words, prompt_tokens)
        return known

    def _find(self, request: Any, time: int) -> _Request:
        """The state of a request, of one too that was there before us."""
        known = self._requests.get(request.request_id)
        return known or self._know(live.identity(request), time, request.num_prompt_tokens)

    def _arrival(self, note: Arrival) -> None:
        if note.request.request_id in self._requests:
            return  # the next piece of a session that streams its input
        known = self._know(live.identity(note.request), note.time, note.prompt_tokens)
        identity = known.identity
        self._words += (
            events.head(events.ARRIVED, 3 + len(identity), known.number),
            note.time,
            note.prompt_tokens,
            *identity,
        )
        self._count += 1

    def _refusal(self, note: Refusal) -> None:
        known = self._find(note.request, 0)
        self._refusals += 1
        known.refusals += 1
        if not known.told_refused:
            known.told_refused = True
            self._refused.append(known.number)

    def _preemption(self, note: Preemption) -> None:
        known = self._find(note.request, note.time)
        released = self._let_go(note.request.request_id, known, note.lengths, note.time)
        known.preemptions += 1
        self._preemptions += 1
        self._victims.append((note.ids, [events.head(events.PREEMPTED, 4, known.number), note.time, released, 0]))

    def _end(self, note: End) -> None:
        request_id = note.request.request_id
        known = self._find(note.request, note.time)
        self._let_go(request_id, known, note.lengths, note.time)
        del self._requests[request_id]
        identity = known.identity
        self._finished_at = len(self._words)
        self._words += (
            events.head(events.FINISHED, 11 + self._groups + len(identity), known.number),
            note.time,
            known.arrival,
            known.admission,
            note.reason << events.HALF | 1,
            known.prompt_tokens << events.HALF | note.output_tokens,
            known.hit_tokens << events.HALF | known.external_tokens,
            known.peak,
            (known.held_sum << TICK_SHIFT) // 1000,
            known.preemptions << events.HALF | known.refusals & events.LOW,
            self._groups,
            *[r << events.HALF | n for r, n in zip(known.reused, known.new)],  # noqa: B905  # of one length
            *identity,
        )
        self._count += 1

    # -- blocks --------------------------------------------------------------------------------------------------

    def _let_go(self, request_id: str, known: _Request, lengths: Sequence[int], time: int) -> int:
        """Account for the end of what a request holds; returns how many blocks that are."""
        tick = time >> TICK_SHIFT
        self._catch_up(request_id, known, lengths, tick)
        held = known.held
        known.held_sum += held * tick - known.weighted
        known.held = known.weighted = 0
        known.lengths = [0] * self._groups
        known.nulls = [0] * self._groups
        known.given = None
        self._released += held
        return held

    def _catch_up(self, request_id: str, known: _Request, lengths: Sequence[int], tick: int) -> None:
        """Count the entries of a request's tables that no step has told."""
        for group, length in enumerate(lengths):
            told = known.lengths[group]
            if length != told:
                unseen = length - told if self._cache.keeping else self._cache.real_since(request_id, group, told)
                known.new[group] += unseen
                known.lengths[group] = length
                self._new += unseen
        self._hold(request_id, known, tick)

    def _hold(self, request_id: str, known: _Request, tick: int) -> None:
        """Bring up to date what a request holds, once its entries are counted."""
        if self._cache.keeping:
            held = sum(known.lengths)
        else:
            held = 0
            for group, nulls in enumerate(known.nulls):
                here, known.nulls[group] = self._cache.held(request_id, group, nulls)
                held += here
        known.weighted += (held - known.held) * tick
        known.held = held
        known.peak = max(known.peak, held)

    def _give(self, known: _Request, found: Any, tables: Sequence[Sequence[int]]) -> list[int]:
        """Count what the prefix cache gave as reused, and no longer as new, which all of the table is counted as."""
        given = [self._cache.reused(blocks, ids) for blocks, ids in zip(found.blocks, tables)]  # noqa: B905  # of one length
        for group, blocks in enumerate(given):
            if blocks:
                known.reused[group] += blocks
                known.new[group] -= blocks
                self._reused += blocks
                self._new -= blocks
        known.given = given
        return given

    # -- steps ---------------------------------------------------------------------------------------------------

    def _turn(self, note: Turn, scheduler: Any) -> None:
        now, output = note.time, note.output
        details: list[int] = []
        count = self._scheduled(note, scheduler, details)
        self._steps += 1
        self._tokens += output.total_num_scheduled_tokens
        running, waiting = note.counts
        self._words += (
            self._step_head,
            now,
            running << events.HALF | waiting,
            note.free << events.HALF | note.cached,
            self._steps,
            self._tokens,
            self._new,
            self._reused,
            self._released,
            self._preemptions,
            self._refusals,
            self._queried,
            self._hit,
            *note.backlog,
        )
        self._words += details
        self._count += count + 1

    def _scheduled(self, note: Turn, scheduler: Any, details: list[int]) -> int:
        """Add the records of what a step gave to whom; returns how many."""
        tick = note.time >> TICK_SHIFT
        count = 0
        for data, lengths in zip(note.output.scheduled_new_reqs, note.lengths):  # noqa: B905  # of one length
            ids = [group_ids[:length] for group_ids, length in zip(data.block_ids, lengths)]  # noqa: B905  # as above
            self._admitted(note, scheduler, data.req_id, ids, data.num_computed_tokens, details)
            count += 1
        rows = note.output.scheduled_cached_reqs
        resumed = rows.resumed_req_ids
        requests = self._requests
        # Most rows got nothing in a step: the two iterators pass over those without a turn of this loop.
        for request_id, ids in zip(  # noqa: B905  # as many as there are true rows
            compress(rows.req_ids, rows.new_block_ids), filter(None, rows.new_block_ids)
        ):
            count += 1
            if request_id in resumed:
                computed = rows.num_computed_tokens[rows.req_ids.index(request_id)]
                self._admitted(note, scheduler, request_id, ids, computed, details)
                continue
            known = requests.get(request_id)
            if known is None:
                known = self._adopt(scheduler, request_id, note.time)
            elif self._simple:
                blocks = len(ids[0])
                known.new[0] += blocks
                known.lengths[0] += blocks
                known.held += blocks
                known.weighted += blocks * tick
                self._new += blocks
                details += (known.allocated_head, blocks)
                continue
            self._appended(request_id, known, ids, tick, details)
        if self._connector and note.lookups:
            self._tried(note)
        if self._refused:
            details += [events.head(events.REFUSED, 1, number) for number in self._refused]
            count += len(self._refused)
            self._refused = []
        if self._victims:
            count += self._preempted(rows, details)
        return count

    def _adopt(self, scheduler: Any, request_id: str, time: int) -> _Request:
        """Know a request that ran before us; what it holds counts as new, less what this step gave to it."""
        request = live.known_requests(scheduler).get(request_id)
        if request is None:
            return self._know(events.Identity(request_id), time, 0)
        return self._know(live.identity(request), time, request.num_prompt_tokens)

    def _appended(
        self, request_id: str, known: _Request, ids: Sequence[Sequence[int]], tick: int, details: list[int]
    ) -> None:
        held, got = known.held, 0
        details.append(known.allocated_head)
        for group, group_ids in enumerate(ids):
            blocks = self._cache.real_ids(group_ids)
            known.new[group] += blocks
            known.lengths[group] += len(group_ids)
            got += blocks
            details.append(blocks)
        self._new += got
        self._hold(request_id, known, tick)
        self._released += held + got - known.held

    def _admitted(  # noqa: PLR0913, PLR0917  # the columns of vLLM's row, and where to write
        self,
        note: Turn,
        scheduler: Any,
        request_id: str,
        ids: Sequence[Sequence[int]],
        computed: int,
        details: list[int],
    ) -> None:
        known = self._requests.get(request_id) or self._adopt(scheduler, request_id, note.time)
        found = note.lookups.pop(request_id, None)
        given = known.given
        if found is not None:
            given = self._give(known, found[0], ids)
            known.hit_tokens = min(found[1], computed)
            self._hit += known.hit_tokens
        elif given is None:
            given = [0] * self._groups
        self._queried += known.prompt_tokens
        known.external_tokens = computed - known.hit_tokens
        details += (
            events.head(events.RESUMED if known.admission else events.ADMITTED, 2 + self._groups, known.number),
            known.hit_tokens << events.HALF | known.external_tokens,
        )
        for group, group_ids in enumerate(ids):
            told = known.lengths[group]
            real = self._cache.real_ids(group_ids)
            blocks = self._cache.real_ids(group_ids[told:]) if told else real
            known.new[group] += blocks
            known.lengths[group] = len(group_ids)
            self._new += blocks
            details.append(given[group] << events.HALF | real - given[group])
        self._hold(request_id, known, note.time >> TICK_SHIFT)
        known.admission = known.admission or note.time
        known.told_refused = False

    def _tried(self, note: Turn) -> None:
        """Of the requests that were looked up but did not run, count the blocks of those that wait for a connector."""
        for request_id, (found, tokens) in note.lookups.items():
            known = self._requests.get(request_id)
            if known is not None and known.given is None and any(tables := self._cache.ids(request_id)):
                self._give(known, found, tables)
                self._catch_up(request_id, known, [len(ids) for ids in tables], note.time >> TICK_SHIFT)
                known.hit_tokens = tokens
                self._hit += tokens

    def _preempted(self, rows: Any, details: list[int]) -> int:
        """Add the records of the step's preemptions, each with the number of who got some of those blocks."""
        got = [
            (self._requests[request_id].number, {block for group in ids for block in group})
            for request_id, ids in zip(rows.req_ids, rows.new_block_ids)  # noqa: B905  # of one length
            if ids and request_id in self._requests
        ]
        victims, self._victims = self._victims, []
        for lost, record in victims:
            record[3] = next((number for number, ids in got if lost & ids), 0)
            details += record
        return len(victims)
