# SPDX-License-Identifier: Apache-2.0
"""A fake engine, named so: random requests that contend for a small pool of KV-cache blocks, step by step.

It is no model of vLLM's scheduler. What it keeps is what a recorder's events promise: a request's numbers add up, the
running totals are the sums of the events before them, and what happened in a step stands behind that step's ``Step``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix import events

if TYPE_CHECKING:
    import random

_REASONS = ("stop", "stop", "stop", "length", "length", "abort", "error", "repetition", "ignored")
_MOST_NEW = 6
_ABORTED_WAITING = 0.01
_UNKNOWN_TAKER = 0.1
_ENDLESS_SHARE = 4  # they hold no more than a quarter of the pool
_DELAY_STEPS = 3


@dataclass(frozen=True)
class Load:
    """What the requests are like.

    ``blocks`` in the pool; ``groups`` of the cache; shares of the requests in [0, 1]: with a ``traced`` context, with
    a prefix ``hit``, freed ``delayed``; ``life``: steps that one runs at most; ``never_end``: that many of the first
    requests never finish, and grow in each step; ``leaky``: the backlog grows as if the fix were missing.
    """

    blocks: int = 400
    groups: int = 2
    traced: float = 0.5
    hit: float = 0.3
    delayed: float = 0.05
    life: int = 12
    never_end: int = 0
    leaky: bool = False


@dataclass
class Request:
    """A request and its account; times in monotonic ns, ``held`` in block-microseconds, ``steps`` left to live."""

    number: int
    identity: events.Identity
    arrival: int
    prompt_tokens: int
    life: int
    endless: bool
    admission: int = 0
    hit_tokens: int = 0
    external_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    peak: int = 0
    held_ns: int = 0
    changed: int = 0
    preemptions: int = 0
    refusals: int = 0
    told_refused: bool = False
    end: int = 0
    freed_at: int = 0
    reason: str = ""
    groups: list[list[int]] = field(default_factory=list)
    takers: list[int] = field(default_factory=list)
    details: list[list[int | str]] = field(default_factory=list)

    def gain(self, time: int, reused: list[int], new: list[int]) -> None:
        """Account for blocks got at ``time``."""
        self.settle(time)
        for group, r, n in zip(self.groups, reused, new, strict=True):
            group[0] += r
            group[1] += n
        self.blocks += sum(reused) + sum(new)
        self.peak = max(self.peak, self.blocks)

    def settle(self, time: int) -> None:
        """Account for what was held until ``time``."""
        self.held_ns += self.blocks * (time - self.changed)
        self.changed = time


class Happened(NamedTuple):
    """What one step was: its events, and the requests that ended, whose blocks may follow later, and were freed."""

    events: list[events.Event]
    finished: list[Request]
    freed: list[Request]


class FakeEngine:
    """The engine; :meth:`step` is one turn of it."""

    def __init__(self, load: Load, random: random.Random) -> None:
        self.load = load
        self.totals = dict.fromkeys(
            (
                *("steps", "tokens", "new", "reused", "released", "preemptions", "refusals", "queried", "hit"),
                *("finished", "aborted", "generated"),
            ),
            0,
        )
        self.free = load.blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._random = random
        self._delayed: deque[tuple[int, Request]] = deque()
        self._numbers = 0
        self._cached = 0
        self._backlog = [0] * load.groups
        self._out: list[events.Event] = []

    def config(self) -> events.Config:
        """The first event of an engine."""
        groups = [events.Group(16, "FullAttentionSpec"), events.Group(16, "SlidingWindowSpec")]
        chosen = tuple(groups[i % 2] for i in range(self.load.groups))
        return events.Config(self.load.blocks, 1024, 8192, prefix_caching=True, groups=chosen)

    @property
    def open(self) -> list[Request]:
        """The requests whose account is still open."""
        return [*self.running, *self.waiting, *(request for _, request in self._delayed)]

    def step(self, time: int, arrivals: int) -> Happened:
        """``arrivals`` new requests come, running ones end or grow, waiting ones are admitted."""
        out: list[events.Event] = []
        self._out = out
        for _ in range(arrivals):
            self._arrive(time)
        finished = self._finish(time)
        freed = self._free_delayed(time)
        freed += [request for request in finished if request.freed_at]
        at = len(out)
        if not self._grow(time):  # who was preempted is not let in again in the same step
            self._admit(time)
        self.totals["steps"] += 1
        out.insert(at, self._state(time))  # behind what came between two steps, before what this one did
        return Happened(out, finished, freed)

    def _state(self, time: int) -> events.Step:
        backlog = tuple(self._backlog) if self.load.leaky else (0,) * self.load.groups
        queues = (len(self.running), len(self.waiting))
        return events.Step._make([time, *queues, self.free, self._cached, *self.totals.values(), backlog])

    def _arrive(self, time: int) -> None:
        self._numbers += 1
        rng = self._random
        name = f"cmpl-{rng.getrandbits(64):016x}-{rng.getrandbits(32):08x}"
        context = None
        if rng.random() < self.load.traced:
            context = events.TraceContext(rng.getrandbits(128) | 1, rng.getrandbits(64) | 1, rng.getrandbits(1))
        request = Request(
            number=self._numbers,
            identity=events.Identity(name, context),
            arrival=time,
            prompt_tokens=rng.randint(1, 16 * _MOST_NEW),
            life=rng.randint(1, self.load.life),
            endless=self._numbers <= self.load.never_end,
            groups=[[0, 0] for _ in range(self.load.groups)],
        )
        self.waiting.append(request)
        self._out.append(events.Arrived(request.number, time, request.prompt_tokens, request.identity))

    def _finish(self, time: int) -> list[Request]:
        ended = [request for request in self.running if request.life <= 0 and not request.endless]
        for request in ended:
            self.running.remove(request)
        if self.waiting and self._random.random() < _ABORTED_WAITING and not self.waiting[-1].endless:
            ended.append(self.waiting.pop())
        for request in ended:
            self._end(request, time)
        return ended

    def _end(self, request: Request, time: int) -> None:
        request.settle(time)
        request.end = time
        request.reason = self._random.choice(_REASONS) if request.life <= 0 else "abort"
        if request.blocks and self._random.random() < self.load.delayed:
            self._delayed.append((self.totals["steps"] + _DELAY_STEPS, request))
        else:
            self._release(request)
            request.freed_at = time
        self._out.append(told := finished_event(request))
        self.totals["finished"] += 1
        self.totals["aborted"] += told.reason == "abort"
        self.totals["generated"] += told.output_tokens

    def _free_delayed(self, time: int) -> list[Request]:
        freed = []
        while self._delayed and self._delayed[0][0] <= self.totals["steps"]:
            request = self._delayed.popleft()[1]
            self._release(request)
            request.freed_at = time
            self._out.append(events.Freed(request.number, time))
            freed.append(request)
        return freed

    def _release(self, request: Request) -> None:
        self.free += request.blocks
        self.totals["released"] += request.blocks
        request.blocks = 0

    def _grow(self, time: int) -> bool:
        preemptions = self.totals["preemptions"]
        for request in list(self.running):
            if not request.blocks:  # preempted in this very step
                continue
            request.life -= 1
            request.output_tokens += 1
            self.totals["tokens"] += 1
            if request.endless or self._random.random() < 0.5:  # half of them need no new block
                self._allocate(request, time)
        return self.totals["preemptions"] > preemptions

    def _allocate(self, request: Request, time: int) -> None:
        new = [self._random.randint(0, 1) for _ in request.groups]
        new[0] |= 1
        if request.endless and request.blocks * self.load.never_end * _ENDLESS_SHARE > self.load.blocks:
            self._slide(request, time, sum(new))
        while self.free < sum(new):
            victim = self.running[-1]
            if victim is request or victim.endless:
                return
            self._preempt(victim, request, time)
        self._take(request, time, [0] * len(new), new)
        request.details.append(["allocated", time, *new])
        self._out.append(events.Allocated(request.number, time, tuple(new)))

    def _slide(self, request: Request, time: int, n: int) -> None:
        """Give ``n`` blocks back as a sliding window does, or an endless request would take the whole pool."""
        request.settle(time)
        request.blocks -= n
        self.free += n
        self.totals["released"] += n

    def _preempt(self, victim: Request, taker: Request, time: int) -> None:
        victim.settle(time)
        released = victim.blocks
        self._release(victim)
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        victim.told_refused = False
        victim.preemptions += 1
        known = taker.number if self._random.random() > _UNKNOWN_TAKER else 0
        victim.takers += [known] if known else []
        victim.details.append(["preempted", time, released, known])
        self.totals["preemptions"] += 1
        self._out.append(events.Preempted(victim.number, time, released, known))

    def _take(self, request: Request, time: int, reused: list[int], new: list[int]) -> None:
        request.gain(time, reused, new)
        self.free -= sum(reused) + sum(new)
        self.totals["new"] += sum(new)
        self.totals["reused"] += sum(reused)
        self._cached = min(self.load.blocks, self._cached + sum(new))
        self._backlog = [held + n for held, n in zip(self._backlog, new, strict=True)]

    def _admit(self, time: int) -> None:
        while self.waiting:
            request = self.waiting[0]
            wanted = max(1, -(-request.prompt_tokens // 16))
            hit = self._random.randint(0, wanted - 1) if self._random.random() < self.load.hit else 0
            if wanted * len(request.groups) > self.free:
                self._refuse(request, time)
                return
            self.waiting.popleft()
            self._run(request, time, [hit] * len(request.groups), [wanted - hit] * len(request.groups))

    def _refuse(self, request: Request, time: int) -> None:
        request.refusals += 1
        self.totals["refusals"] += 1
        if not request.told_refused:
            request.told_refused = True
            request.details.append(["refused", time])
            self._out.append(events.Refused(request.number, time))

    def _run(self, request: Request, time: int, reused: list[int], new: list[int]) -> None:
        resumed = request.admission != 0
        hit_tokens = 16 * reused[0]
        external = self._random.choice((0, 0, 16))
        if not resumed:
            request.admission, request.hit_tokens, request.external_tokens = time, hit_tokens, external
        request.changed = time
        self._take(request, time, reused, new)
        self.running.append(request)
        self.totals["queried"] += request.prompt_tokens
        self.totals["hit"] += hit_tokens
        self.totals["tokens"] += request.prompt_tokens
        pairs = tuple(events.Blocks(r, n) for r, n in zip(reused, new, strict=True))
        request.details.append(
            ["resumed" if resumed else "admitted", time, sum(new), sum(reused), hit_tokens, external]
        )
        self._out.append(events.Admitted(request.number, time, resumed, hit_tokens, external, pairs))


def finished_event(request: Request) -> events.Finished:
    """What a recorder says at the end of ``request``."""
    return events.Finished(
        number=request.number,
        time=request.end,
        arrival=request.arrival,
        admission=request.admission,
        reason=request.reason,
        freed=request.freed_at != 0,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        hit_tokens=request.hit_tokens,
        external_tokens=request.external_tokens,
        peak=request.peak,
        held=request.held_ns // 1000,
        preemptions=request.preemptions,
        refusals=request.refusals,
        groups=tuple(events.Blocks(*group) for group in request.groups),
        identity=request.identity,
    )
