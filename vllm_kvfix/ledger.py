# SPDX-License-Identifier: Apache-2.0
"""Works up what the recorder noted between the lines of the scheduler into records for the ring.

Blocks are counted from vLLM's own tables: what a step appended stands in its ``SchedulerOutput``; what does not (blocks
of a request that was preempted in the step in which it got them, or that waits for a KV connector) is caught up with
when the request lets go of its blocks. Blocks that a window gives back early are noticed at the request's next
allocation.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_kvfix import events, live

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

TICK_SHIFT = 10  # held time is summed in ticks of 1,024 ns: a shift costs less than a division


# What the recorder notes, in the order in which it happened: plain tuples, since one is made for each thing between the
# lines of the scheduler. Times are in ns of the monotonic clock; ``lengths`` are the entries in a request's table of
# each group. No note holds a request or an output: that would put off its end to when the notes are worked up.
#
#   TURN        time, tokens, admissions, names, new, counts, free, cached, backlog, lookups
#               a step was scheduled: who began to run (see live.admissions); who ran on and got blocks, and which;
#               (running, waiting); blocks; new_block_ids; who was tried: {request: (blocks that the prefix
#               cache found, tokens)}
#   ARRIVAL     time, request id, trace headers or None, prompt tokens
#   END         time, request id, reason, output tokens, lengths    it is about to let go of its blocks
#   PREEMPTION  time, request id, lengths, block ids                as is this; ids only in a step
#   REFUSAL     request id                                          tried in this step, found too few free blocks
#   KEEPING     request id                                          that ended last: a connector still reads its blocks
#   FREEING     time, request id                                    no longer
TURN, ARRIVAL, END, PREEMPTION, REFUSAL, KEEPING, FREEING = range(7)
_ABORT = events.FINISH_REASONS.index("abort")
Note: TypeAlias = "tuple[Any, ...]"


class _Request:
    """A live request: what it has got, and what it holds."""

    # Defaults, so that making one sets few attributes.
    admission = peak = hit_tokens = external_tokens = preemptions = refusals = 0
    told_refused = False
    given: list[int] | None = None
    """What the prefix cache gave to it in this turn, of each group."""
    held = weighted = held_sum = 0
    """Blocks it holds, the sum of the ticks at which it got each, and the ticks times blocks of what it gave back."""

    def __init__(self, number: int, arrival: int, groups: int, identity: array[int], prompt_tokens: int) -> None:
        self.number = number
        self.arrival = arrival
        self.identity = identity
        self.prompt_tokens = prompt_tokens
        # Of each group: blocks got so far; entries in the table as far as counted, and null blocks at its front.
        self.new = [0] * groups
        self.reused = [0] * groups
        self.lengths = [0] * groups
        self.nulls = [0] * groups


class Ledger:
    """The live requests of one scheduler, and the running totals. What it raises, its caller must contain."""

    def __init__(self, cache: live.CacheView, *, connector: bool, backlogs: int) -> None:
        """``connector``: requests may hold blocks while they wait; ``backlogs``: managers that have one."""
        self._cache = cache
        self._connector = connector
        self._groups = cache.groups
        self._simple = self._groups == 1 and cache.keeping
        self._requests: dict[str, _Request] = {}
        self._kept: dict[str, int] = {}
        self._refused: list[int] = []
        self._victims: list[tuple[frozenset[int], list[int]]] = []
        self._words = array("Q")
        self._count = self._number = self._finished_at = 0
        # First words of the records whose length does not change, less the request's number.
        self._step_head = events.head(events.STEP, 16 + backlogs)
        self._allocated_head = events.head(events.ALLOCATED, self._groups + 1)
        self._admitted_head = events.head(events.ADMITTED, self._groups + 2)
        self._resumed_head = events.head(events.RESUMED, self._groups + 2)
        self._steps = self._tokens = self._new = self._reused = self._released = 0
        self._preemptions = self._refusals = self._queried = self._hit = 0
        self._finished = self._aborted = self._generated = 0

    def take(self) -> tuple[array[int], int]:
        """The records made since the last call, as words, and how many records they are."""
        taken = self._words, self._count
        self._words, self._count = array("Q"), 0
        return taken

    def work_up(self, notes: Sequence[Note]) -> None:
        """Make the records for what was noted; see :meth:`take`."""
        for note in notes:
            kind = note[0]
            if kind == TURN:
                self._turn(note)
            elif kind == ARRIVAL:
                self._arrival(note)
            elif kind == END:
                self._end(note)
            elif kind == REFUSAL:
                self._refusal(note[1])
            elif kind == PREEMPTION:
                self._preemption(note)
            else:
                self._keep_or_free(note)

    def _keep_or_free(self, note: Note) -> None:
        if note[0] == KEEPING:
            self._words[self._finished_at + 4] &= ~events.LOW
            self._kept[note[1]] = self._words[self._finished_at] & events.NUMBER_MASK
        elif number := self._kept.pop(note[2], 0):
            self._words.fromlist([events.head(events.FREED, 2, number), note[1]])
            self._count += 1

    # -- requests ------------------------------------------------------------------------------------------------

    def _know(self, identity: events.Identity, time: int, prompt_tokens: int) -> _Request:
        self._number += 1
        words = events.identity_words(identity)
        known = self._requests[identity.request_id] = _Request(self._number, time, self._groups, words, prompt_tokens)
        return known

    def adopt(self, request: Any, time: int, lengths: Sequence[int]) -> None:
        """Know a ``Request`` that was there before us; what it holds counts as new."""
        known = self._know(live.identity(request), time, request.num_prompt_tokens)
        self._catch_up(request.request_id, known, lengths, time >> TICK_SHIFT)

    def _find(self, request_id: str, time: int) -> _Request:
        return self._requests.get(request_id) or self._know(events.Identity(request_id), time, 0)

    def _arrival(self, note: Note) -> None:
        _, time, request_id, headers, prompt_tokens = note
        if request_id in self._requests:
            return  # the next piece of a session that streams its input
        known = self._know(live.identity_of(request_id, headers), time, prompt_tokens)
        identity = known.identity
        words = self._words
        words.fromlist([events.head(events.ARRIVED, 3 + len(identity), known.number), time, prompt_tokens])
        words.extend(identity)
        self._count += 1

    def _refusal(self, request_id: str) -> None:
        known = self._find(request_id, 0)
        self._refusals += 1
        known.refusals += 1
        if not known.told_refused:
            known.told_refused = True
            self._refused.append(known.number)

    def _preemption(self, note: Note) -> None:
        _, time, request_id, lengths, ids = note
        known = self._find(request_id, time)
        released = self._let_go(request_id, known, lengths, time)
        known.preemptions += 1
        self._preemptions += 1
        self._victims.append((ids, [events.head(events.PREEMPTED, 4, known.number), time, released, 0]))

    def _end(self, note: Note) -> None:
        _, time, request_id, reason, output_tokens, lengths = note
        known = self._find(request_id, time)
        self._let_go(request_id, known, lengths, time)
        del self._requests[request_id]
        self._finished += 1
        self._aborted += reason == _ABORT
        self._generated += output_tokens
        identity = known.identity
        words = self._words
        self._finished_at = len(words)
        words.fromlist(
            [
                events.head(events.FINISHED, 11 + self._groups + len(identity), known.number),
                time,
                known.arrival,
                known.admission,
                reason << events.HALF | 1,
                known.prompt_tokens << events.HALF | output_tokens,
                known.hit_tokens << events.HALF | known.external_tokens,
                known.peak,
                (known.held_sum << TICK_SHIFT) // 1000,
                known.preemptions << events.HALF | known.refusals & events.LOW,
                self._groups,
                *[r << events.HALF | n for r, n in zip(known.reused, known.new)],  # noqa: B905  # of one length
            ]
        )
        words.extend(identity)
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

    def _turn(self, note: Note) -> None:
        _, time, tokens, admissions, names, new, (running, waiting), free, cached, backlog, lookups = note
        tick = time >> TICK_SHIFT
        details: list[int] = []
        count = len(admissions) + len(names) + 1
        resumed: Collection[str] = ()
        if admissions:
            for admission in admissions:
                self._admitted(admission, time, lookups, details)
            resumed = {admission[0] for admission in admissions}
        requests = self._requests
        simple, head, total = self._simple, self._allocated_head, 0
        for request_id, ids in zip(names, new):  # noqa: B905  # of one length
            if request_id in resumed:
                count -= 1
                continue
            known = requests.get(request_id) or self._find(request_id, time)
            if simple:
                blocks = len(ids[0])
                known.new[0] += blocks
                known.lengths[0] += blocks
                known.held += blocks
                known.weighted += blocks * tick
                total += blocks
                details += (head | known.number, blocks)
            else:
                self._appended(request_id, known, ids, tick, details)
        self._new += total
        if self._connector and lookups:
            self._tried(lookups, tick)
        if self._refused:
            details += [events.head(events.REFUSED, 1, number) for number in self._refused]
            count += len(self._refused)
            self._refused = []
        if self._victims:
            count += self._preempted(names, new, details)
        self._steps += 1
        self._tokens += tokens
        self._words.fromlist(
            [
                self._step_head,
                time,
                running << events.HALF | waiting,
                free << events.HALF | cached,
                self._steps,
                self._tokens,
                self._new,
                self._reused,
                self._released,
                self._preemptions,
                self._refusals,
                self._queried,
                self._hit,
                self._finished,
                self._aborted,
                self._generated,
                *backlog,
                *details,
            ]
        )
        self._count += count

    def _appended(
        self, request_id: str, known: _Request, ids: Sequence[Sequence[int]], tick: int, details: list[int]
    ) -> None:
        held, got = known.held, 0
        details.append(self._allocated_head | known.number)
        for group, group_ids in enumerate(ids):
            blocks = self._cache.real_ids(group_ids)
            known.new[group] += blocks
            known.lengths[group] += len(group_ids)
            got += blocks
            details.append(blocks)
        self._new += got
        self._hold(request_id, known, tick)
        self._released += held + got - known.held

    def _admitted(
        self, admission: live.Admission, time: int, lookups: dict[str, tuple[Any, int]], details: list[int]
    ) -> None:
        request_id, ids, computed = admission
        known = self._find(request_id, time)
        found = lookups.pop(request_id, None)
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
            (self._resumed_head if known.admission else self._admitted_head) | known.number,
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
        self._hold(request_id, known, time >> TICK_SHIFT)
        known.admission = known.admission or time
        known.told_refused = False

    def _tried(self, lookups: dict[str, tuple[Any, int]], tick: int) -> None:
        """Of the requests that were looked up but did not run, count the blocks of those that wait for a connector."""
        for request_id, (found, tokens) in lookups.items():
            known = self._requests.get(request_id)
            if known is not None and known.given is None and any(tables := self._cache.ids(request_id)):
                self._give(known, found, tables)
                self._catch_up(request_id, known, [len(ids) for ids in tables], tick)
                known.hit_tokens = tokens
                self._hit += tokens

    def _preempted(self, names: Sequence[str], new: Sequence[Any], details: list[int]) -> int:
        """Add the records of the step's preemptions, each with the number of who got some of those blocks."""
        got = [
            (self._requests[request_id].number, {block for group in ids for block in group})
            for request_id, ids in zip(names, new)  # noqa: B905  # of one length
            if request_id in self._requests
        ]
        victims, self._victims = self._victims, []
        for lost, record in victims:
            record[3] = next((number for number, ids in got if lost & ids), 0)
            details += record
        return len(victims)
