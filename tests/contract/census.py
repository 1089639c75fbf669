# SPDX-License-Identifier: Apache-2.0
"""The census on a release's real scheduler: the leak is named, nothing is changed, and no request's id gets out.

Run by `run_release.py`; the fix is not in force here.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.contract import driver as d
from tests.contract import snapshots
from vllm_kvfix import events, live
from vllm_kvfix.census import Census

NAME = "kvfix-request-"
BACKLOG = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"
TABLE = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks"
POOL = "scheduler.kv_cache_manager.block_pool."
MOST_TURNS = 10_000


class Clock:
    """Nanoseconds, a thousand at each look, and as many as it is told to skip."""

    now = 10**12

    def __call__(self) -> int:
        """The time."""
        self.now += 1000
        return self.now


class Watched:
    """A scheduler and a census of it."""

    def __init__(self, *, spread: bool = False, **options: Any) -> None:
        """``spread``: a walk is spread over rounds, as in an engine; else each round is a walk."""
        self.driver = d.make_scheduler(**options)
        self.clock = Clock()
        self.census = Census(self.clock) if spread else Census(self.clock, rounds=1)
        self.census.add_root("scheduler", self.driver.scheduler, live.live_ids_of)

    def look(self, seconds: int = 0) -> dict[str, events.Container]:
        """One round, so much later."""
        self.clock.now += seconds * 10**9
        told: dict[str, events.Container] = {}
        for _ in range(MOST_TURNS):
            for event in self.census.turn():
                if isinstance(event, events.Census):
                    _expect(event.complete, expected=True, what="nothing is left out")
                    _expect([path for path in told if NAME in path], [], "no request's id is in a path")
                    return told
                told[event.path] = event
        raise AssertionError("the round does not end")


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: {found!r}, not {expected!r}")


def _load(driver: d.Driver, first: int, count: int) -> None:
    for number in range(first, first + count):
        driver.add_request(f"{NAME}{number}", prompt_seed=number, prompt_length=40, max_tokens=20)


def sizes(*, affected: bool) -> int:
    """Lengths and capacities are vLLM's own, and the leaking list is the one that only grows; containers told."""
    watched = Watched(num_blocks=200)
    scheduler = watched.driver.scheduler
    lengths = []
    for turn in range(4):
        _load(watched.driver, 10 * turn, 10)
        for _ in range(6):
            watched.driver.step()
        told = watched.look()
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        for path, real in {
            "scheduler.requests": scheduler.requests,
            "scheduler.running": scheduler.running,
            "scheduler.waiting": scheduler.waiting,
            TABLE: manager.req_to_blocks,
            f"{POOL}blocks": scheduler.kv_cache_manager.block_pool.blocks,
            **({BACKLOG: manager.new_block_ids} if hasattr(manager, "new_block_ids") else {}),
        }.items():
            _expect(told[path].length, len(real), path)
        _expect(told[f"{TABLE}[*]"].members, len(manager.req_to_blocks), "members")
        _expect(told["scheduler.running"].capacity, watched.driver.options.max_num_seqs, "most running requests")
        for name in ("blocks", "cached_block_hash_to_block._cache"):
            _expect(told[POOL + name].capacity, 200, f"the capacity of {name}")
        lengths.append(told[BACKLOG].length if BACKLOG in told else 0)
    if affected:
        _expect(told[BACKLOG].removed, 0, "what left the leaking list")
        _expect(told[BACKLOG].added, lengths[-1] - lengths[0], "what came to the leaking list")
        _expect([0, *lengths], sorted({0, *lengths}), "the lengths of the leaking list")
        watched.driver.run()
        left = {path for path, one in watched.look().items() if one.length > 50 and one.capacity is None}
        _expect(left, {BACKLOG}, "what is long when no request is left, and has no bound")
    return len(told)


def orphans() -> dict[str, int]:
    """A side table that aborts leave behind is told with its orphans, wherever in the scheduler it is; by path."""
    found = {}
    for where, connector in (("scheduler", None), ("kv_cache_manager", None), ("connector", "remote")):
        watched = Watched(connector=connector, num_blocks=200)
        scheduler = watched.driver.scheduler
        owner = scheduler if where == "scheduler" else getattr(scheduler, where)
        path = "scheduler.side" if where == "scheduler" else f"scheduler.{where}.side"
        owner.side = {}
        for turn in range(4):
            names = [f"{NAME}{number}" for number in range(10 * turn, 10 * turn + 10)]
            _load(watched.driver, 10 * turn, 10)
            owner.side.update(dict.fromkeys(names, turn))
            watched.driver.step()
            watched.look(10)
            watched.driver.abort(*names[:4])
            for name in names[4:]:
                owner.side.pop(name)
            watched.driver.step()
        watched.look(10)
        one = watched.look(10)[path]
        _expect((one.length, one.orphans), (16, 16), f"orphans in {path}")
        found[path] = one.orphans
    return found


def _turn(census: Census, _: Any = None) -> None:
    census.turn()


def nothing_changes() -> int:
    """The outputs of a scheduler that is walked between its steps, and within them, are those of one that is not."""
    compared = 0
    for options in ({"num_blocks": 40}, {"family": "full+mamba", "num_blocks": 120}, {"async_scheduling": True}):
        streams = []
        for walked in (False, True):
            watched = Watched(spread=True, **options)
            if walked:
                watched.driver.on_output = functools.partial(_turn, watched.census)
            _load(watched.driver, 0, 24)
            outputs = []
            for number in range(60):
                if number == 3:
                    watched.driver.abort(f"{NAME}1")
                outputs.append(snapshots.snapshot(watched.driver.step()))
                if walked:
                    _turn(watched.census)
            streams.append(outputs)
        _expect(streams[0] == streams[1], expected=True, what=f"the outputs are the same with {options}")
        compared += len(streams[0])
    return compared


def run(*, affected: bool) -> dict[str, Any]:
    """All of it; figures for the report.

    Raises:
        AssertionError: Something does not hold.
    """
    return {"containers": sizes(affected=affected), "orphans": orphans(), "outputs": nothing_changes()}
