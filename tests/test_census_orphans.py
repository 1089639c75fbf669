# SPDX-License-Identifier: Apache-2.0
"""Orphans: keys that are those of no live request, how many there are at least, and how old they are."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_census import Clock, Thing, census_of, one_round
from vllm_kvfix import containers, live, orphans

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_kvfix import events
    from vllm_kvfix.census import Census

SECOND = 10**9


class Engine:
    """A table of live requests, a side table that is to be looked at, and a census of both with its own clock."""

    def __init__(self, side: Any, put: Callable[[Any, str], None]) -> None:
        self.clock = Clock()
        self.root = Thing(live={}, side=side)
        self.put = put
        self.census: Census = census_of(self.root, live_ids=lambda thing: thing.live, clock=self.clock)
        self.number = 0

    def arrive(self, count: int) -> list[str]:
        """So many requests come, and enter the side table too."""
        names = []
        for _ in range(count):
            self.number += 1
            names.append(f"req-{self.number}")
            self.root.live[names[-1]] = None
            self.put(self.root.side, names[-1])
        return names

    def leave(self, names: list[str]) -> None:
        """Requests end; the side table keeps them."""
        for name in names:
            del self.root.live[name]

    def look(self, seconds: float = 10) -> events.Container:
        """Time passes, and a round is made."""
        self.clock.now += int(seconds * SECOND)
        return one_round(self.census)[0]["root.side"]


def _dict(side: dict[str, int], name: str) -> None:
    side[name] = 1


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, str], None]]] = {
    "dict": (dict, _dict),
    "set": (set, lambda side, name: side.add(name)),
    "list": (list, lambda side, name: side.append(name)),
    "deque": (deque, lambda side, name: side.append(name)),
    "tuple first": (dict, lambda side, name: side.update({(name, 3): 1})),
    "tuple second": (dict, lambda side, name: side.update({(3, name): 1})),
    "prefix": (dict, lambda side, name: side.update({f"{name}_0": 1})),
    "suffix": (dict, lambda side, name: side.update({f"0_{name}": 1})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_no_live_request_are_orphans(kind: str) -> None:
    """In every kind of container, requests that ended and were left behind are counted, and no others."""
    make, put = KINDS[kind]
    engine = Engine(make(), put)
    first = engine.arrive(30)
    assert engine.look().orphans == 0
    engine.leave(first[::2])
    engine.look()
    one = engine.look()
    assert (one.length, one.orphans) == (30, 15)
    assert 10 * SECOND <= one.orphan_age < 11 * SECOND
    engine.leave(first[1::2])
    engine.look()
    one = engine.look()
    assert one.orphans == 30
    assert 30 * SECOND <= one.orphan_age < 31 * SECOND


def test_a_request_that_has_just_ended_is_no_orphan() -> None:
    """A key is an orphan once it was not live in two rounds that lie five seconds apart, not before."""
    engine = Engine({}, _dict)
    names = engine.arrive(10)
    engine.look()
    engine.leave(names[:5])
    assert engine.look(100).orphans == 0
    assert engine.look(2).orphans == 0
    assert engine.look(2).orphans == 0
    assert engine.look(2).orphans == 5


def test_a_table_that_lags_behind_has_no_orphans() -> None:
    """A table that forgets each request some rounds late, within five seconds, has none at any time."""
    engine = Engine({}, _dict)
    before: list[str] = []
    for _ in range(30):
        now = engine.arrive(100)
        engine.leave(before)
        assert engine.look(3).orphans == 0
        for name in before:
            del engine.root.side[name]
        before = now


@pytest.mark.parametrize("size", [200, 20_000, 60_000])
@pytest.mark.parametrize("kind", ["dict", "set"])
def test_the_bound_is_no_more_than_the_truth_and_near_it(kind: str, size: int) -> None:
    """Of many orphans in a large table, no more than there are is told, and with all old ones left, nearly all."""
    make, put = KINDS[kind]
    engine = Engine(make(), put)
    live: list[str] = []
    for _ in range(10):
        engine.leave(live[: len(live) - 20])
        live = live[len(live) - 20 :] if live else live
        live += engine.arrive(size // 10)
        truth = len(engine.root.side) - len(engine.root.live)
        assert engine.look().orphans <= truth
    engine.look()
    one = engine.look()
    truth = len(engine.root.side) - len(engine.root.live)
    assert one.orphans <= truth
    if kind == "dict":
        assert one.orphans >= truth - size // 10


def test_a_large_table_that_is_met_late_tells_its_orphans() -> None:
    """Where the front of a table cannot be read at once, what is more than the live requests counts, with its age."""
    engine = Engine({f"old-{number}": 1 for number in range(100_000)}, _dict)
    assert containers.hollow(engine.root.side, containers.shape_of(engine.root.side)) > containers.HOLLOW
    engine.arrive(100)
    assert engine.look().orphans == 0
    one = engine.look()
    assert one.orphans == 100_000
    assert 10 * SECOND <= one.orphan_age < 11 * SECOND


def test_the_oldest_keys_are_remembered_when_the_table_grows() -> None:
    """When a table gets so large that its front may be hollow, the oldest keys are still followed, each by itself."""
    engine = Engine({}, _dict)
    first = engine.arrive(64)
    engine.leave(first[:10])
    engine.look()
    engine.look()
    engine.arrive(100_000)
    assert engine.look().orphans == 10
    for name in first[:4]:
        del engine.root.side[name]
    assert engine.look().orphans == 6


@pytest.mark.parametrize(
    "side",
    [
        {f"model-{number}": 1 for number in range(100)},
        dict.fromkeys(range(100)),
        {f"layer_{number}": 1 for number in range(100)},
        [1.5] * 100,
        {b"req-1": 1, b"req-2": 2},
        {("a", "b"): 1, (1, 2): 2, (): 3},
        [],
    ],
)
def test_a_container_that_is_not_about_requests_has_no_orphans(side: Any) -> None:
    """Names of other things are no orphans, however long they stay."""
    engine = Engine(side, lambda *_: None)
    for _ in range(5):
        engine.leave(engine.arrive(50)[:40])
        assert engine.look().orphans == 0


def test_a_table_of_ended_requests_alone_is_about_requests() -> None:
    """A table that only gets the requests that were aborted is known to be about requests: they were live before."""
    engine = Engine({}, lambda *_: None)
    for _ in range(5):
        names = engine.arrive(8)
        engine.look()
        engine.leave(names)
        engine.root.side.update(dict.fromkeys(names[:3]))
    engine.look()
    assert engine.look().orphans == 15


def test_live_ids_are_those_of_all_roots() -> None:
    """A request that is alive in one root is no orphan in another."""
    first, second = Thing(live={"a": 1}, side={"a": 1, "b": 1}), Thing(live={"b": 1})
    clock = Clock()
    census = census_of(first, "first", lambda thing: thing.live, clock)
    census.add_root("second", second, lambda thing: thing.live)
    for _ in range(4):
        told = one_round(census)[0]
        clock.now += 10 * SECOND
    assert told["first.side"].orphans == 0
    second.live.clear()
    for _ in range(4):
        told = one_round(census)[0]
        clock.now += 10 * SECOND
    assert told["first.side"].orphans == 1


def test_what_is_remembered_is_bounded() -> None:
    """After 100,000 requests no more than so many ids, and of a container no more than 64 keys, are remembered."""
    engine = Engine({}, _dict)
    for _ in range(1000):
        names = engine.arrive(100)
        for _ in range(7):
            engine.census.turn(1)
        engine.leave(names)
    assert len(engine.census._live._recent) <= orphans.MOST_REMEMBERED
    one_round(engine.census)
    place = engine.census._roots["root"].children["side"]
    assert len(place.orphans._suspects) <= orphans.LOOKED_AT
    assert len(place.orphans._oldest) <= orphans.LOOKED_AT


@given(st.data(), st.sampled_from(sorted(KINDS)))
@settings(max_examples=60, deadline=None)
def test_never_more_than_the_truth(data: st.DataObject, kind: str) -> None:
    """Whatever comes, goes, and stays behind, no more orphans are told than there are, with an age there can be."""
    make, put = KINDS[kind]
    engine = Engine(make(), put)
    began = engine.clock.now
    live: list[str] = []
    for _ in range(data.draw(st.integers(1, 12))):
        live += engine.arrive(data.draw(st.integers(0, 90)))
        gone = data.draw(st.integers(0, len(live)))
        engine.leave(live[:gone])
        del live[:gone]
        one = engine.look(data.draw(st.sampled_from([1, 3, 6, 20])))
        assert one.orphans <= one.length - len(live)
        assert one.orphan_age <= engine.clock.now - began
        assert bool(one.orphans) == bool(one.orphan_age)


def test_five_seconds_make_an_orphan() -> None:
    """A key that was not live in two rounds that lie a little over five seconds apart is an orphan."""
    engine = Engine({}, _dict)
    names = engine.arrive(10)
    engine.look()
    engine.leave(names[:5])
    engine.look(1)
    assert engine.look(5.1).orphans == 5


@pytest.mark.parametrize(
    ("side", "put"),
    [
        ({}, lambda side, name, number: side.update({f"{name}_{number}": 1})),
        ([], lambda side, name, _: side.append(name)),
    ],
)
def test_more_keys_than_requests_are_no_orphans_where_a_request_may_have_several(
    side: Any, put: Callable[[Any, str, int], None]
) -> None:
    """Behind orphans that fill the front, the keys of live requests count as none, though there are several each."""
    engine = Engine(side, lambda side, name: put(side, name, 0))
    engine.leave(engine.arrive(100))
    for name in engine.arrive(300):
        for number in range(1, 4):
            put(side, name, number)
    for _ in range(4):
        one = engine.look()
    assert one.orphans == orphans.LOOKED_AT


def test_what_was_removed_of_many_orphans_is_told_at_once() -> None:
    """When half of the orphans of a large table go, no more than are left are told in the very next round."""
    engine = Engine({f"old-{number}": 1 for number in range(200_000)}, _dict)
    engine.arrive(100)
    engine.look()
    assert engine.look().orphans == 200_000
    for number in range(100_000):
        del engine.root.side[f"old-{number}"]
    assert engine.look(1).orphans <= 100_000


def test_a_table_that_was_in_order_meanwhile_begins_anew() -> None:
    """More keys than requests before, and again now, are no orphans where all keys were live in between."""
    engine = Engine({f"old-{number}": 1 for number in range(100_000)}, _dict)
    names = engine.arrive(100)
    assert engine.look().orphans == 0
    engine.root.side.clear()
    engine.root.side.update(dict.fromkeys(names))
    assert engine.look(3).orphans == 0
    engine.root.side.clear()
    engine.root.side.update({f"new-{number}": 1 for number in range(100_000)})
    assert engine.look(3).orphans == 0
    assert engine.look(6).orphans == 100_000 - len(names)


def test_an_id_that_is_live_makes_a_table_one_about_requests() -> None:
    """A table that has only keys of long-lived requests, which were never among the newest, is about requests."""
    engine = Engine({}, lambda *_: None)
    names = engine.arrive(1000)
    engine.root.side.update(dict.fromkeys(names[:10]))
    engine.look()
    engine.leave(names[:4])
    engine.look()
    assert engine.look().orphans == 4


@pytest.mark.parametrize("form", ["{}_0", "0_{}", "{}", "{}-1-0"])
def test_ids_that_have_the_separator_in_them(form: str) -> None:
    """An id is found in a key before the last separator, or behind the first, whatever is in it itself."""
    engine = Engine({}, lambda *_: None)
    names = [f"chat_cmpl_{number}" for number in range(10)] if "-" not in form else [f"a-{n}-1" for n in range(10)]
    keys = [form.format(name) if "-" not in form else f"{name}-0" for name in names]
    engine.root.live.update(dict.fromkeys(names))
    engine.root.side.update(dict.fromkeys(keys))
    engine.look()
    engine.leave(names[:6])
    engine.look()
    assert engine.look().orphans == 6


def test_the_latest_ids_stay_remembered() -> None:
    """Beyond the most that are remembered, the oldest alone are forgotten."""
    thing = Thing(live={})
    ids = orphans.LiveIds()
    ids.add("root", lambda: thing, lambda thing: thing.live)
    for number in range(orphans.MOST_REMEMBERED + 500):
        thing.live = {f"req-{number}": 1}
        ids.learn()
    known = [number for number in range(orphans.MOST_REMEMBERED + 500) if ids.was_live(f"req-{number}")]
    assert known == list(range(500, orphans.MOST_REMEMBERED + 500))


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_a_table_that_cannot_be_read_backwards_is_passed_over(error: type[Exception]) -> None:
    """Live ids that have no order, or change while they are read, are not learnt; nothing else happens."""

    class Table(dict[str, int]):
        def __reversed__(self) -> Any:
            raise error

    thing = Thing(live=Table(a=1))
    ids = orphans.LiveIds()
    ids.add("root", lambda: thing, lambda thing: thing.live)
    ids.learn()
    assert not ids.was_live("a")


def test_no_key_is_kept_by_an_audit() -> None:
    """The keys of a table that was audited have as many references as before."""
    engine = Engine({}, lambda *_: None)
    engine.leave(engine.arrive(20)[:10])
    keys = [f"req-{number}" for number in range(1, 21)]
    engine.root.side.update(dict.fromkeys(keys))
    before = [sys.getrefcount(key) for key in keys]
    for _ in range(3):
        engine.look()
    assert engine.look().orphans == 10
    assert [sys.getrefcount(key) for key in keys] == before


def test_the_table_of_live_requests_is_not_audited() -> None:
    """What says itself which requests are alive has no orphans, and costs no audit."""
    engine = Engine({}, _dict)
    engine.arrive(10)
    for _ in range(3):
        engine.look()
    children = engine.census._roots["root"].children
    assert not children["live"].orphans.is_about_requests
    assert children["side"].orphans.is_about_requests


# -- what is live, by vLLM's names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thing",
    [
        Thing(requests={"a": 1}),
        Thing(request_states={"a": 1}),
        Thing(req_states=Thing(req_id_to_index={"a": 1})),
        Thing(scheduler=Thing(requests={"a": 1})),
        Thing(output_processor=Thing(request_states={"a": 1})),
        Thing(model_runner=Thing(requests={"a": 1})),
        Thing(model_runner=Thing(req_states=Thing(req_id_to_index={"a": 1}))),
        Thing(worker=Thing(model_runner=Thing(requests={"a": 1}))),
        Thing(worker=Thing(model_runner=Thing(req_states=Thing(req_id_to_index={"a": 1})))),
    ],
    ids=lambda thing: " ".join(vars(thing)),
)
def test_the_live_requests_of_each_kind_of_root(thing: Any) -> None:
    """A scheduler, front end, worker or model runner gives its own table of live requests, not a copy."""
    ids = live.live_ids_of(thing)
    assert list(ids) == ["a"]
    assert ids is live.live_ids_of(thing)


@pytest.mark.parametrize("thing", [Thing(), Thing(requests=None), Thing(requests=[1]), Thing(model_runner=None), 5])
def test_an_object_without_such_a_table_has_no_live_requests(thing: Any) -> None:
    """Where no known table of live requests is, none is live."""
    assert not live.live_ids_of(thing)


def test_a_failing_table_of_live_requests_leaves_the_others() -> None:
    """If one root's live ids cannot be told, those of the others still count."""

    def fails(_: Any) -> Any:
        raise RuntimeError("no")

    first, second = Thing(), Thing(live={"a": 1})
    ids = orphans.LiveIds()
    ids.add("first", lambda: first, fails)
    ids.add("second", lambda: second, lambda thing: thing.live)
    assert [list(table) for table in ids.tables()] == [["a"]]


def test_vllm_s_own_bounds_hold_below_the_object_that_knows_them() -> None:
    """The block pool's number of blocks bounds what lies in it, also two steps below, and nothing else."""
    pool = type("BlockPool", (Thing,), {})(
        num_gpu_blocks=9, blocks=[1, 2], cached_block_hash_to_block=Thing(_cache={1: 2}), kv_event_queue=[1]
    )
    told = one_round(census_of(pool, "pool"))[0]
    assert {path: one.capacity for path, one in told.items()} == {
        "pool.blocks": 9, "pool.cached_block_hash_to_block._cache": 9, "pool.kv_event_queue": None,
    }  # fmt: skip
    batch = type("InputBatch", (Thing,), {})(max_num_reqs=3, _req_ids=[1], names={1: 1, 2: 2, 3: 3, 4: 4}, more=set())
    told = one_round(census_of(batch, "batch"))[0]
    assert {path: one.capacity for path, one in told.items()} == {
        "batch._req_ids": 3, "batch.names": None, "batch.more": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "free", "cached", "expected"),
    [
        (6400, 6400, {}, None),
        (6400, 6336, {"a": 1}, 100),
        (6400, 0, dict.fromkeys(range(100)), 100),
        (6400, 1, dict.fromkeys(range(100)), 101),
        (6400, 7000, {"a": 1}, None),
        (6400, None, {"a": 1}, None),
        (None, 1, {"a": 1}, None),
        (6400, -1, {"a": 1}, None),
    ],
)
def test_an_encoder_s_cache_holds_as_many_as_fit_of_what_is_in_it(
    size: Any, free: Any, cached: dict[Any, Any], expected: int | None
) -> None:
    """The bound on items is the size in embeddings over what one takes now, rounded up; none while nothing is known."""
    manager = type("EncoderCacheManager", (Thing,), {})(
        cache_size=size, num_free_slots=free, cached=cached, freeable={}, freed=[]
    )
    told = one_round(census_of(manager, "it"))[0]
    assert {path: one.capacity for path, one in told.items()} == {
        "it.cached": expected, "it.freeable": expected, "it.freed": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "expected"),
    [("vllm.config.model", True), ("vllm.config", True), ("vllm.v1.request", False), ("lmcache.config", False)],
)
def test_configuration_holds_no_state(module: str, *, expected: bool) -> None:
    """Packages of vLLM for configuration, models and the like are left out, by their place in vLLM alone."""
    assert live.stateless(module) is expected
