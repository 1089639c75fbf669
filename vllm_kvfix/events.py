# SPDX-License-Identifier: Apache-2.0
"""What the recorder tells and the sidecar understands: one small type an event, as words in a frame of the ring.

A frame's payload is a row of records. Every record begins with one word::

    bits 56-63  kind, a value of KINDS
    bits 40-55  words in the record, this one included
    bits 0-39   the request's number, from 1 on in the order of arrival; 0 where the record is about no request

and goes on with the fields below, a word each, ``a:b`` being ``a << 32 | b``. G is the number of KV-cache groups::

    1 CONFIG     blocks, most requests:most tokens a step, flags, G x (block size, bytes, the kind's name)
    2 STEP       time, running:waiting, free:cached, steps, tokens, new blocks, reused blocks, released blocks,
                 preemptions, refusals, queried tokens, hit tokens, finished requests, aborted ones among them,
                output tokens of finished requests, G x backlog
    3 ARRIVED    time, prompt tokens, IDENTITY
    4 ADMITTED   hit tokens:external tokens, G x (reused:new)
    5 RESUMED    as ADMITTED
    6 ALLOCATED  G x new
    7 REFUSED
    8 PREEMPTED  time, released blocks, number of the request that took them
    9 FINISHED   time, arrival, admission, reason:freed, prompt tokens:output tokens, hit tokens:external tokens,
                 peak, held block-microseconds, preemptions:refusals, G, G x (reused:new), IDENTITY
    10 FREED     time
    11 FIGURES   time, scope:count, count x (index of the figure in its scope, value)
    12 UNREAD    time, scope, TEXT
    13 CENSUS    time, containers, nanoseconds spent, 1: nothing was left out
    14 CONTAINER time, length:members, capacity + 1 or 0, bytes, added, removed, orphans, their age, TEXT

IDENTITY is 128 bits of trace id (high word first), the parent's span id, ``trace flags << 32 | bytes of the id``, and
the id's UTF-8, padded with NUL to whole words. No trace context: the three words are 0. TEXT is its bytes and its
UTF-8, padded alike. FIGURES to CONTAINER tell of the process and are of every process that has a ring. Times are
``CLOCK_MONOTONIC`` in nanoseconds. ADMITTED, RESUMED, ALLOCATED and REFUSED happened at the time of the STEP before
them, which is always in the same frame. The counts in STEP run since the recorder began, so that a reader that
missed frames has missed no amount. FINISHED says all about its request again, so that a span needs nothing else.

*Worked example.* Request 7 got two new blocks in the one group there is, then 9 was refused::

    06 00 02 00 00 00 00 07  00 00 00 00 00 00 00 02  07 00 01 00 00 00 00 09      (high byte first)
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

KINDS = tuple(range(1, 15))
CONFIG, STEP, ARRIVED, ADMITTED, RESUMED, ALLOCATED, REFUSED, PREEMPTED, FINISHED, FREED = KINDS[:10]
FIGURES, UNREAD, CENSUS, CONTAINER = KINDS[10:]

KIND_SHIFT = 56
LENGTH_SHIFT = 40
NUMBER_MASK = (1 << LENGTH_SHIFT) - 1
MOST_WORDS = (1 << KIND_SHIFT - LENGTH_SHIFT) - 1
HALF = 32
LOW = (1 << HALF) - 1
WORD_MASK = (1 << 64) - 1
LONGEST_ID = 512
LONGEST_GROUP_KIND = 64
MOST_GROUPS = 64
LONGEST_TEXT = 512

# What is told of a process's memory: the scopes, which are read one at a time, and the figures in each, in bytes unless
# the name ends in _count or _us. Only ever add to the ends: a ring holds the indices.
SCOPES: dict[str, tuple[str, ...]] = {
    # /proc/PID/status
    "status": ("rss", "anon", "file", "shmem", "swap", "peak", "threads_count"),
    # /proc/PID/smaps; from "heap" on the categories that partition its RSS
    "smaps": (
        "rss", "pss", "uss", "swap",
        "heap", "anonymous", "stacks", "shared_memory", "files", "ring", "driver", "rest",
    ),
    # The memory controller of the process's cgroup, v1 or v2; a limit of "max" is left out
    "cgroup": (
        "usage", "limit", "high", "swap", "anon", "file", "shmem", "kernel",
        "oom_count", "oom_kill_count", "high_count", "max_count", "psi_some_us", "psi_full_us",
    ),
    # glibc's mallinfo2, all arenas: what is handed out, mapped pieces included; what it keeps of freed memory
    "malloc": ("in_use", "retained", "mapped"),
    # CPython: sys.getallocatedblocks, gc.get_count, collections so far
    "python": ("blocks_count", "gen0_count", "gen1_count", "gen2_count", "collections_count"),
}  # fmt: skip
CATEGORIES = SCOPES["smaps"][4:]
_SCOPE_NAMES = tuple(SCOPES)

FINISH_REASONS = ("unknown", "stop", "length", "abort", "error", "repetition", "ignored")


class MalformedError(ValueError):
    """A payload is not what a recorder writes; the message says where."""


class Group(NamedTuple):
    """A KV-cache group: tokens in one of its blocks, and vLLM's name of its kind (``FullAttentionSpec``, ...)."""

    block_size: int
    kind: str


class Config(NamedTuple):
    """What the engine is. ``blocks`` in the pool, the null block left out; most requests and tokens in a step."""

    blocks: int
    max_requests: int
    max_tokens: int
    prefix_caching: bool
    groups: tuple[Group, ...]


class Step(NamedTuple):
    """The state after one ``schedule()``, and what has happened since the recorder began.

    ``time`` in ns of the monotonic clock; ``running`` and ``waiting`` requests; ``free`` and ``cached`` blocks, which
    overlap: a free block may still be found by the prefix cache. All further fields but ``backlog`` run up:
    ``steps``, ``tokens`` scheduled, blocks taken ``new`` from the pool, ``reused`` from the prefix cache, and
    ``released`` by requests; ``preemptions``, ``refusals``, tokens ``queried`` in the prefix cache and ``hit`` there;
    requests ``finished``, those of them that were ``aborted``, and the tokens ``generated`` for finished ones.
    ``backlog``: the length of ``new_block_ids`` of each group's manager.
    """

    time: int
    running: int
    waiting: int
    free: int
    cached: int
    steps: int
    tokens: int
    new: int
    reused: int
    released: int
    preemptions: int
    refusals: int
    queried: int
    hit: int
    finished: int
    aborted: int
    generated: int
    backlog: tuple[int, ...]


class TraceContext(NamedTuple):
    """A W3C trace context: what ``traceparent`` holds."""

    trace_id: int
    parent_id: int
    flags: int


class Identity(NamedTuple):
    """The engine's id of a request, cut after ``LONGEST_ID`` bytes, and the caller's trace context if there is one."""

    request_id: str
    context: TraceContext | None = None


class Arrived(NamedTuple):
    """A request joined the waiting queue."""

    number: int
    time: int
    prompt_tokens: int
    identity: Identity


class Blocks(NamedTuple):
    """Blocks of one group that a request got: ``reused`` from the prefix cache, ``new`` from the pool."""

    reused: int
    new: int


class Admitted(NamedTuple):
    """A request began to run, or ran again after a preemption (``resumed``); ``time`` is the step's.

    ``hit_tokens`` were found in the prefix cache, ``external_tokens`` came from a KV connector.
    """

    number: int
    time: int
    resumed: bool
    hit_tokens: int
    external_tokens: int
    groups: tuple[Blocks, ...]


class Allocated(NamedTuple):
    """A running request got new blocks, so many of each group."""

    number: int
    time: int
    groups: tuple[int, ...]


class Refused(NamedTuple):
    """A waiting request found too few free blocks; told once each time it waits, counted each time it is tried."""

    number: int
    time: int


class Preempted(NamedTuple):
    """A running request lost its blocks, ``released`` in all; ``taker`` got some of them in that step, 0: unknown."""

    number: int
    time: int
    released: int
    taker: int


class Finished(NamedTuple):
    """A request ended; all about it.

    ``admission`` is 0 where it never ran. ``freed``: its blocks were given back at once; else a ``Freed`` follows.
    ``peak`` blocks at a time, ``held`` block-microseconds from its first block to ``time``; ``groups``: what it got.
    """

    number: int
    time: int
    arrival: int
    admission: int
    reason: str
    freed: bool
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    external_tokens: int
    peak: int
    held: int
    preemptions: int
    refusals: int
    groups: tuple[Blocks, ...]
    identity: Identity


class Freed(NamedTuple):
    """The blocks of a request that had finished before were given back (a KV connector had kept them)."""

    number: int
    time: int


class Figures(NamedTuple):
    """What one scope of ``SCOPES`` says of the process at a ``time``: only what could be read, by the figure's name."""

    time: int
    scope: str
    values: dict[str, int]


class Unread(NamedTuple):
    """A scope of ``SCOPES`` could not be read, and why."""

    time: int
    scope: str
    reason: str


class Census(NamedTuple):
    """A round is over: the ``CONTAINER`` records of those that may have changed since the last one came before this.

    ``spent``: nanoseconds that the round took in all. ``containers`` there are, and ``complete``: nothing was left out
    for its depth or number, as of the last walk over everything, which is spread over several rounds.
    """

    time: int
    containers: int
    spent: int
    complete: bool


class Container(NamedTuple):
    """One container, or a class of containers alike (``members`` of them), as a census found it.

    ``path`` from a root on, such as ``scheduler.waiting``; ``[*]`` in it stands for every member. ``length``: entries
    in all members. ``capacity``: most entries that there can be, None: nothing bounds it. ``size``: estimated bytes
    that would be free without it. ``added`` and ``removed``: entries that came and went, as far as lengths told, since
    the first census. ``orphans``: keys of no live request, at least; ``orphan_age``: ns since the oldest of them was
    first seen to be one.
    """

    time: int
    path: str
    length: int
    members: int
    capacity: int | None
    size: int
    added: int
    removed: int
    orphans: int
    orphan_age: int


RequestEvent: TypeAlias = Config | Step | Arrived | Admitted | Allocated | Refused | Preempted | Finished | Freed
ProcessEvent: TypeAlias = Figures | Unread | Census | Container
Event: TypeAlias = RequestEvent | ProcessEvent


def head(kind: int, words: int, number: int = 0) -> int:
    """The first word of a record that has ``words`` words in all."""
    return kind << KIND_SHIFT | words << LENGTH_SHIFT | number & NUMBER_MASK


def pair(high: int, low: int) -> int:
    """Two numbers in one word, each cut to what fits."""
    return (high & LOW) << HALF | low & LOW


def identity_words(identity: Identity) -> array[int]:
    """The words of an IDENTITY."""
    data = identity.request_id.encode(errors="replace")[:LONGEST_ID]
    context = identity.context
    if context is None:
        words = array("Q", (0, 0, 0, len(data)))
    else:
        high, low = context.trace_id >> 64 & WORD_MASK, context.trace_id & WORD_MASK
        words = array("Q", (high, low, context.parent_id & WORD_MASK, pair(context.flags, len(data))))
    words += _text_words(data)
    return words


def _text_words(data: bytes) -> array[int]:
    return array("Q", data.ljust(-(-len(data) // 8) * 8, b"\0"))


def encode(event: Event) -> list[int]:
    """The record of an event; of ADMITTED, RESUMED, ALLOCATED and REFUSED without the time, which is the last STEP's.

    The recorder writes the frequent ones itself, word for word as here.
    """
    number = getattr(event, "number", 0)
    kind, fields = _KIND_AND_FIELDS[type(event)](event)
    return [head(kind, len(fields) + 1, number), *fields]


def _config_fields(config: Config) -> tuple[int, list[int]]:
    words = [config.blocks, pair(config.max_requests, config.max_tokens), int(config.prefix_caching)]
    for group in config.groups[:MOST_GROUPS]:
        data = group.kind.encode(errors="replace")[:LONGEST_GROUP_KIND]
        words += [group.block_size, len(data), *_text_words(data)]
    return CONFIG, words


def _step_fields(step: Step) -> tuple[int, list[int]]:
    time, running, waiting, free, cached, *totals, backlog = step
    return STEP, [time, pair(running, waiting), pair(free, cached), *totals, *backlog]


def _arrived_fields(event: Arrived) -> tuple[int, list[int]]:
    return ARRIVED, [event.time, event.prompt_tokens, *identity_words(event.identity)]


def _admitted_fields(event: Admitted) -> tuple[int, list[int]]:
    tokens = pair(event.hit_tokens, event.external_tokens)
    return RESUMED if event.resumed else ADMITTED, [tokens, *_block_words(event.groups)]


def _block_words(groups: Iterable[Blocks]) -> list[int]:
    return [pair(blocks.reused, blocks.new) for blocks in groups]


def _finished_fields(event: Finished) -> tuple[int, list[int]]:
    return FINISHED, [
        event.time,
        event.arrival,
        event.admission,
        pair(FINISH_REASONS.index(event.reason), event.freed),
        pair(event.prompt_tokens, event.output_tokens),
        pair(event.hit_tokens, event.external_tokens),
        event.peak,
        event.held,
        pair(event.preemptions, event.refusals),
        len(event.groups),
        *_block_words(event.groups),
        *identity_words(event.identity),
    ]


def _figures_fields(event: Figures) -> tuple[int, list[int]]:
    names = SCOPES[event.scope]
    words = [event.time, pair(_SCOPE_NAMES.index(event.scope), len(event.values))]
    for name, value in event.values.items():
        words += [names.index(name), min(max(0, value), WORD_MASK)]
    return FIGURES, words


def _container_fields(event: Container) -> tuple[int, list[int]]:
    return CONTAINER, [
        event.time,
        pair(min(event.length, LOW), min(event.members, LOW)),
        0 if event.capacity is None else event.capacity + 1,
        event.size,
        event.added,
        event.removed,
        event.orphans,
        event.orphan_age,
        *_long_text(event.path),
    ]


def _long_text(text: str) -> list[int]:
    data = text.encode(errors="replace")[:LONGEST_TEXT]
    return [len(data), *_text_words(data)]


_KIND_AND_FIELDS: dict[type, Callable[..., tuple[int, list[int]]]] = {
    Config: _config_fields,
    Step: _step_fields,
    Arrived: _arrived_fields,
    Admitted: _admitted_fields,
    Allocated: lambda event: (ALLOCATED, list(event.groups)),
    Refused: lambda _: (REFUSED, []),
    Preempted: lambda event: (PREEMPTED, [event.time, event.released, event.taker]),
    Finished: _finished_fields,
    Freed: lambda event: (FREED, [event.time]),
    Figures: _figures_fields,
    Unread: lambda event: (UNREAD, [event.time, _SCOPE_NAMES.index(event.scope), *_long_text(event.reason)]),
    Census: lambda event: (CENSUS, [event.time, event.containers, event.spent, int(event.complete)]),
    Container: _container_fields,
}


def parse_traceparent(text: str | None) -> TraceContext | None:
    """The context in a ``traceparent`` header (W3C Trace Context, level 1); None where it is none.

    A later version's further fields are ignored, as the recommendation asks.
    """
    parts = text.strip().split("-") if isinstance(text, str) else []
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2]:  # noqa: PLR2004  # the header's fields
        return None
    if parts[0] == "ff" or (parts[0] == "00" and len(parts) > 4):  # noqa: PLR2004  # as above
        return None
    if not all(set(part) <= set("0123456789abcdef") for part in parts[:4]):
        return None
    context = TraceContext(*(int(part, 16) for part in parts[1:4]))
    return context if context.trace_id and context.parent_id else None


def decode(payload: Sequence[int]) -> Iterator[Event]:
    """The events in a frame's payload, in their order; records of a kind that is not known are passed over.

    Raises:
        MalformedError: A record is cut, or holds what no recorder writes. What came before it was yielded.
    """
    at, time = 0, 0
    while at < len(payload):
        first = payload[at]
        kind, words = first >> KIND_SHIFT, first >> LENGTH_SHIFT & MOST_WORDS
        if words == 0 or at + words > len(payload):
            raise MalformedError(f"the record at word {at} says {words} words, {len(payload) - at} are left")
        parse = _PARSERS.get(kind)
        if parse is not None:
            try:
                event = parse(first & NUMBER_MASK, payload[at + 1 : at + words], time)
            except (IndexError, ValueError) as error:
                raise MalformedError(f"the record of kind {kind} at word {at} is malformed: {error}") from error
            if kind == STEP:
                time = event.time  # type: ignore[union-attr]  # a Step
            yield event
        at += words


def _config(_: int, fields: Sequence[int], __: int) -> Config:
    groups = []
    at = 3
    while at < len(fields):
        block_size, size = fields[at], fields[at + 1]
        words = _words_of(size, LONGEST_GROUP_KIND)
        groups.append(Group(block_size, _text(fields[at + 2 : at + 2 + words], size)))
        at += 2 + words
    if len(groups) > MOST_GROUPS:
        raise ValueError(f"{len(groups)} groups")
    return Config(fields[0], fields[1] >> HALF, fields[1] & LOW, bool(fields[2]), tuple(groups))


def _step(_: int, fields: Sequence[int], __: int) -> Step:
    return Step(
        fields[0],
        fields[1] >> HALF,
        fields[1] & LOW,
        fields[2] >> HALF,
        fields[2] & LOW,
        fields[3],
        fields[4],
        fields[5],
        fields[6],
        fields[7],
        fields[8],
        fields[9],
        fields[10],
        fields[11],
        fields[12],
        fields[13],
        fields[14],
        tuple(_few(fields[15:])),
    )


def _arrived(number: int, fields: Sequence[int], _: int) -> Arrived:
    return Arrived(number, fields[0], fields[1], _identity(fields[2:]))


def _admitted(number: int, fields: Sequence[int], time: int) -> Admitted:
    return Admitted(number, time, False, fields[0] >> HALF, fields[0] & LOW, _blocks(fields[1:]))  # noqa: FBT003  # a field


def _resumed(number: int, fields: Sequence[int], time: int) -> Admitted:
    return Admitted(number, time, True, fields[0] >> HALF, fields[0] & LOW, _blocks(fields[1:]))  # noqa: FBT003  # a field


def _allocated(number: int, fields: Sequence[int], time: int) -> Allocated:
    return Allocated(number, time, tuple(_few(fields)))


def _refused(number: int, _: Sequence[int], time: int) -> Refused:
    return Refused(number, time)


def _preempted(number: int, fields: Sequence[int], _: int) -> Preempted:
    return Preempted(number, fields[0], fields[1], fields[2])


def _finished(number: int, fields: Sequence[int], _: int) -> Finished:
    groups = fields[9]
    reason = fields[3] >> HALF
    blocks = fields[10 : 10 + groups]
    if len(blocks) < groups:
        raise ValueError(f"{groups} groups")
    return Finished(  # by position, in the order of its fields: by name it takes half as long again
        number,
        fields[0],
        fields[1],
        fields[2],
        FINISH_REASONS[reason if reason < len(FINISH_REASONS) else 0],
        bool(fields[3] & LOW),
        fields[4] >> HALF,
        fields[4] & LOW,
        fields[5] >> HALF,
        fields[5] & LOW,
        fields[6],
        fields[7],
        fields[8] >> HALF,
        fields[8] & LOW,
        _blocks(blocks),
        _identity(fields[10 + groups :]),
    )


def _freed(number: int, fields: Sequence[int], _: int) -> Freed:
    return Freed(number, fields[0])


def _few(fields: Sequence[int]) -> Sequence[int]:
    if len(fields) > MOST_GROUPS:
        raise ValueError(f"{len(fields)} groups")
    return fields


def _blocks(fields: Sequence[int]) -> tuple[Blocks, ...]:
    return tuple([Blocks(word >> HALF, word & LOW) for word in _few(fields)])


def _words_of(size: int, most: int) -> int:
    if size > most:
        raise ValueError(f"a text of {size} bytes")
    return -(-size // 8)


def _text(words: Sequence[int], size: int) -> str:
    data = (words if isinstance(words, array) else array("Q", words)).tobytes()
    if len(data) < size:
        raise ValueError("a text is cut")
    return data[:size].decode(errors="replace")


def _identity(fields: Sequence[int]) -> Identity:
    trace_id, size = fields[0] << 64 | fields[1], fields[3] & LOW
    text = _text(fields[4 : 4 + _words_of(size, LONGEST_ID)], size)
    context = TraceContext(trace_id, fields[2], fields[3] >> HALF & 0xFF) if trace_id and fields[2] else None
    return Identity(text, context)


def _figures(_: int, fields: Sequence[int], __: int) -> Figures:
    scope, count = fields[1] >> HALF, fields[1] & LOW
    if scope >= len(_SCOPE_NAMES):
        return Figures(fields[0], "", {})  # of a newer recorder
    if 2 + 2 * count > len(fields):
        raise ValueError(f"{count} figures")
    names = SCOPES[_SCOPE_NAMES[scope]]
    pairs = ((fields[at], fields[at + 1]) for at in range(2, 2 + 2 * count, 2))
    return Figures(fields[0], _SCOPE_NAMES[scope], {names[at]: value for at, value in pairs if at < len(names)})


def _unread(_: int, fields: Sequence[int], __: int) -> Unread:
    scope = _SCOPE_NAMES[fields[1]] if fields[1] < len(_SCOPE_NAMES) else ""
    return Unread(fields[0], scope, _parse_text(fields[2:]))


def _census(_: int, fields: Sequence[int], __: int) -> Census:
    return Census(fields[0], fields[1], fields[2], bool(fields[3]))


def _container(_: int, fields: Sequence[int], __: int) -> Container:
    return Container(
        time=fields[0],
        path=_parse_text(fields[8:]),
        length=fields[1] >> HALF,
        members=fields[1] & LOW,
        capacity=fields[2] - 1 if fields[2] else None,
        size=fields[3],
        added=fields[4],
        removed=fields[5],
        orphans=fields[6],
        orphan_age=fields[7],
    )


def _parse_text(fields: Sequence[int]) -> str:
    return _text(fields[1 : 1 + _words_of(fields[0], LONGEST_TEXT)], fields[0])


_PARSERS: dict[int, Callable[[int, Sequence[int], int], Event]] = {
    CONFIG: _config,
    STEP: _step,
    ARRIVED: _arrived,
    ADMITTED: _admitted,
    RESUMED: _resumed,
    ALLOCATED: _allocated,
    REFUSED: _refused,
    PREEMPTED: _preempted,
    FINISHED: _finished,
    FREED: _freed,
    FIGURES: _figures,
    UNREAD: _unread,
    CENSUS: _census,
    CONTAINER: _container,
}
