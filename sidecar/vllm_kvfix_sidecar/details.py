# SPDX-License-Identifier: Apache-2.0
"""What happened to a request while it lived: kept short, and summed up where no Finished does that."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from vllm_kvfix.events import Admitted, Allocated, Arrived, Blocks, Finished, Preempted, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST_DETAILS = 64


class Merged(NamedTuple):
    """Allocations of ``steps`` steps from ``time`` to ``until``, summed up: new blocks of each group."""

    number: int
    time: int
    groups: tuple[int, ...]
    until: int
    steps: int


Detail: TypeAlias = Admitted | Allocated | Refused | Preempted | Merged


def merged(details: Sequence[Detail]) -> list[Detail]:
    """The first ``FIRST_DETAILS`` as they are; of the others, each two allocations next to each other as one."""
    kept, single = list(details[:FIRST_DETAILS]), False
    for detail in details[FIRST_DETAILS:]:
        last = kept[-1]
        mergeable = isinstance(detail, Allocated | Merged)
        if single and isinstance(detail, Allocated | Merged) and isinstance(last, Allocated | Merged):
            kept[-1], single = _sum(last, detail), False
        else:
            kept.append(detail)
            single = mergeable
    return kept


def _sum(one: Allocated | Merged, other: Allocated | Merged) -> Merged:
    groups = tuple(a + b for a, b in zip_longest(one.groups, other.groups, fillvalue=0))
    until = other.until if isinstance(other, Merged) else other.time
    return Merged(one.number, one.time, groups, until, _steps(one) + _steps(other))


def _steps(detail: Allocated | Merged) -> int:
    return detail.steps if isinstance(detail, Merged) else 1


def blocks_of(detail: Detail) -> tuple[Blocks, ...]:
    """The blocks of each group that a request got by it."""
    if isinstance(detail, Admitted):
        return detail.groups
    if isinstance(detail, Allocated | Merged):
        return tuple(Blocks(0, new) for new in detail.groups)
    return ()


def unfinished(number: int, arrived: Arrived, details: Sequence[Detail], time_ns: int) -> Finished:
    """What a Finished would say of a request that was cut off at ``time_ns``, as far as its details tell.

    Output tokens are not known (0), nor blocks that were given back while it ran; merged allocations count from their
    first step on. So ``peak`` and ``held`` are upper bounds. The reason is ``unknown``.
    """
    admissions = [detail for detail in details if isinstance(detail, Admitted)]
    first = admissions[0] if admissions else None
    end = max([time_ns, arrived.time, *(detail.time for detail in details[-1:])])
    peak, held = _peak_and_held(details, end)
    return Finished(
        number=number,
        time=end,
        arrival=arrived.time,
        admission=first.time if first else 0,
        reason="unknown",
        freed=True,
        prompt_tokens=arrived.prompt_tokens,
        output_tokens=0,
        hit_tokens=first.hit_tokens if first else 0,
        external_tokens=first.external_tokens if first else 0,
        peak=peak,
        held=held,
        preemptions=sum(isinstance(detail, Preempted) for detail in details),
        refusals=sum(isinstance(detail, Refused) for detail in details),
        groups=_totals(map(blocks_of, details)),
        identity=arrived.identity,
    )


def _totals(each: Iterable[tuple[Blocks, ...]]) -> tuple[Blocks, ...]:
    columns = zip_longest(*each, fillvalue=Blocks(0, 0))
    return tuple(Blocks(sum(b.reused for b in column), sum(b.new for b in column)) for column in columns)


def _peak_and_held(details: Sequence[Detail], end: int) -> tuple[int, int]:
    """Most blocks at a time, and block-microseconds up to ``end``."""
    now = peak = held_ns = last = 0
    for detail in details:
        held_ns += now * max(0, detail.time - last)
        last = detail.time
        now = 0 if isinstance(detail, Preempted) else now + sum(map(sum, blocks_of(detail)))
        peak = max(peak, now)
    return peak, (held_ns + now * max(0, end - last)) // 1000
