# SPDX-License-Identifier: Apache-2.0
"""Compares what the recorder told with what happened: the pool's own account, the outputs, vLLM's own counters."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contract import driver as d
from tests.contract import families
from vllm_kvfix import events
from vllm_kvfix.ring.reader import RingReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Tables that move a block from one place to another, or copy one: what appears in them is more than the pool gave.
_MOVING = frozenset({"MambaSpec"})


class AccountError(AssertionError):
    """What was recorded is not what happened."""


@dataclasses.dataclass
class Account:
    """What a ring says.

    Attributes:
        told: Every event, in its order.
        lost: Events that were overwritten before they were read.
        dropped: Events that the recorder gave up.
    """

    told: list[events.Event]
    lost: int
    dropped: int

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one type."""
        return [event for event in self.told if isinstance(event, kind)]


@contextmanager
def ring_folder() -> Iterator[Path]:
    """A folder for the rings of one workload."""
    with tempfile.TemporaryDirectory(prefix="kvfix-contract-") as folder:
        yield Path(folder)


def run_scenarios(scenarios: Iterable[Callable[[Path], None]]) -> list[str]:
    """Run each scenario in a folder of its own for rings; their names.

    Raises:
        AssertionError: One does not hold; the message begins with its name.
    """
    names = []
    for scenario in scenarios:
        with ring_folder() as folder:
            try:
                scenario(folder)
            except Exception as error:
                raise AssertionError(f"{scenario.__name__}: {type(error).__name__}: {error}") from error
        names.append(scenario.__name__)
    return names


def read(folder: Path) -> Account:
    """What the one ring in a folder says, from its oldest frame on."""
    (path,) = folder.glob("*.ring")
    reader = RingReader(path)
    try:
        told = [event for frame in reader.poll() for event in events.decode(frame.payload)]
        return Account(told, reader.lost, reader.header.dropped)
    finally:
        reader.close()


def check(account: Account, driver: d.Driver, outputs: list[Any]) -> Counter[str]:
    """Compare an account with the driver, whose requests have all ended; returns how much was compared.

    Args:
        account: What the ring says.
        driver: Made with `count=True`.
        outputs: Of each step: (free blocks, running, waiting, ids preempted) right after `schedule()`.

    Raises:
        AccountError: They differ.
    """
    finished: list[events.Finished] = account.of(events.Finished)
    steps: list[events.Step] = account.of(events.Step)
    _equal("events lost or dropped", (account.lost, account.dropped), (0, 0))
    _equal("requests", sorted(f.identity.request_id for f in finished), sorted(driver.requests))
    _equal("arrivals", sorted(a.identity.request_id for a in account.of(events.Arrived)), sorted(driver.requests))
    _equal("(free, running, waiting)", [(s.free, s.running, s.waiting) for s in steps], [o[:3] for o in outputs])
    last = steps[-1]
    new = tuple(sum(f.groups[g].new for f in finished) for g in range(len(driver.managers)))
    if not _MOVING & set(families.FAMILIES[driver.options.family].specs):
        _equal("new blocks of each group", new, d.allocated(driver))
    reused = sum(g.reused for f in finished for g in f.groups)
    _equal("running totals (new, reused)", (last.new, last.reused), (sum(new), reused))
    if driver.options.family not in _GIVING_BACK:
        _equal("blocks released", last.released, sum(new) + reused)
    preempted = {name: r.num_preemptions for name, r in driver.requests.items()}
    _equal("preemptions", {f.identity.request_id: f.preemptions for f in finished}, preempted)
    _equal("preemptions in all", (last.preemptions, len(account.of(events.Preempted))), (sum(preempted.values()),) * 2)
    reasons = {f.identity.request_id: f.reason for f in finished}
    _equal("reasons", reasons, {name: _REASON[r.status.name] for name, r in driver.requests.items()})
    tokens = {f.identity.request_id: (f.prompt_tokens, f.output_tokens) for f in finished}
    _equal("tokens", tokens, {n: (r.num_prompt_tokens, r.num_output_tokens) for n, r in driver.requests.items()})
    ended = len(finished), list(reasons.values()).count("abort"), sum(f.output_tokens for f in finished)
    _equal("running totals (finished, aborted, generated)", (last.finished, last.aborted, last.generated), ended)
    _details(account, finished)
    return Counter(
        {
            "recorded: blocks": sum(new),
            "recorded: reused blocks": reused,
            "recorded: refusals": last.refusals,
            "recorded: takers": sum(bool(p.taker) for p in account.of(events.Preempted)),
            "recorded: refused again": sum(
                n > 1 for n in Counter(r.number for r in account.of(events.Refused)).values()
            ),
            "recorded: freed later": len(account.of(events.Freed)),
        }
    )


_REASON = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}
_GIVING_BACK = frozenset({"sliding", "chunked-local", "full+sliding", "full+mamba"})


def _details(account: Account, finished: list[events.Finished]) -> None:
    """The small events of a request add up to its last one, but for blocks that never showed in an output."""
    seen: Counter[int] = Counter()
    for event in account.told:
        if isinstance(event, events.Admitted):
            seen[event.number] += sum(g.new for g in event.groups)
        elif isinstance(event, events.Allocated):
            seen[event.number] += sum(event.groups)
    for request in finished:
        new = sum(g.new for g in request.groups)
        if seen[request.number] > new:
            raise AccountError(f"{request.identity.request_id}: {seen[request.number]} blocks told, {new} at the end")
        if request.peak > new + sum(g.reused for g in request.groups):
            raise AccountError(f"{request.identity.request_id}: peak {request.peak} of {request.groups}")
        if bool(request.held) != bool(request.peak and request.time > (request.admission or request.arrival)):
            raise AccountError(f"{request.identity.request_id}: held {request.held}, peak {request.peak}")
        if not request.arrival <= (request.admission or request.arrival) <= request.time:
            raise AccountError(f"{request.identity.request_id}: times {request}")


def _equal(what: str, told: Any, true: Any) -> None:
    if told != true:
        raise AccountError(f"{what}: the recorder says {told}, but it is {true}")
