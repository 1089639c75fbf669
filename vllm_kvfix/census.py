# SPDX-License-Identifier: Apache-2.0
"""Sizes of all containers that can be reached from a process's roots (scheduler, engine, output processor, worker).

A breadth-first walk along attributes and entries, cut into pieces of some microseconds: :meth:`Census.turn` does as
many as fit its time. What is walked are *places*, not objects: a place is a path such as
``scheduler.requests[*].block_hashes``, and ``[*]`` stands for all entries of a container, of which a few are looked
at. Between two pieces only places are remembered, and each piece finds its objects anew from the root: so nothing is
kept alive, and no reference count is changed, longer than a piece takes. It may all run in a thread beside the
engine's; :mod:`vllm_kvfix.containers` says how each read is safe.

*Rounds.* A walk over all places costs too much to be made each few seconds. So it is spread over some rounds: each
first counts the containers that the last walk found, and then goes on with the walk that is under way. Containers that
are small and stay as they are, and those with ``[*]`` in their path, are told by walks alone. A new root is walked at
once. Every round ends in a :class:`~vllm_kvfix.events.Census`, which speaks of the last walk.

*Sizes.* A container's bytes are those of its own structure and of what it alone refers to, estimated from a sample of
entries that grows from round to round. So the bytes of ``x[*]`` are among those of ``x`` where ``x`` owns them.
*Added and removed* entries come from lengths alone: a container that loses as many as it gains between two looks has
gained none. Where ``[*]`` is in the path, lengths are estimates too.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_kvfix import containers, events, live
from vllm_kvfix.containers import contained, is_container, shape_of
from vllm_kvfix.orphans import LiveIds, Orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

MOST_DEPTH = 8  # steps from a root
MOST_CONTAINERS = 512  # told in a walk
MOST_PLACES = 4096  # visited in a walk, and remembered
ROUNDS = 12  # that a walk is spread over
LEAST_AT_ONCE = 24  # pieces of a walk in a round
MOST_RECOUNTED = 96  # containers that are counted in a round, beside the walk
SMALL, FEW = 64 * 1024, 1000  # bytes and entries of a container that matters only if it grows
FORGOTTEN = 16  # walks after which a place where nothing was found is forgotten
STEPS_AT_ONCE = 10  # from an object on, in a piece
LOOKED_AT = 6  # entries of a container that stand for all
WEIGHED = 6  # entries of a container that are weighed in a walk, each in a piece of its own
INDEXED = 16  # a list of at most so many objects is looked at one by one, unless they are about a request each
AIM = (6, 10)  # of a turn's time: a piece that finds nothing in the processor's caches takes five times as long
ENOUGH_WEIGHED = 24  # entries that an average is of, so that it need not be bettered in each walk
SELDOM = 4  # walks in one of which what hardly changes is looked at
LEARNT_EVERY = 8  # places after which some of the live requests are remembered
MOST_WEIGHED = 512  # entries that an average is of, at most, so that it can change
RELEARNT = 2  # walks after which classes are looked at anew


class Place:
    """A path from a root, and what the censuses so far found there.

    ``step`` leads here from the ``parent``: the name of an attribute, an index, or ``None`` for all entries.
    """

    __slots__ = (
        "added", "as_before", "bounds", "capacity", "children", "depth", "indexed", "keys_owned", "kind", "length",
        "members", "object_id", "orphans", "owned", "parent", "path", "rank", "removed", "size", "starred", "step",
        "structure", "walk", "walked_length",
    )  # fmt: skip

    def __init__(self, parent: Place | None, step: str | int | None, path: str, root: Any = None) -> None:
        self.parent = parent
        self.step: Any = root if parent is None else step
        self.path = path
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.starred: bool = parent is not None and (parent.starred or step is None)
        self.children: dict[str | int | None, Place] = {}
        self.rank = 0
        self.bounds: dict[str, int] = {}
        self.indexed = True  # whether the entries of a short list here are looked at one by one
        self.walk = 0  # in which something was found here last
        self.kind = 0  # the id of the class of what is here
        self.object_id = 0
        self.members = 0.0
        self.length: int | None = None  # entries; None: no container was found here yet
        self.walked_length: int | None = None  # as the last walk found it
        self.as_before = False  # it was the same in the walk before that
        self.added = self.removed = self.structure = self.size = 0
        self.capacity: int | None = None
        self.owned, self.keys_owned = Mean(), Mean()  # bytes of an entry, or of a table's value, and of its key
        self.orphans = Orphans()

    def things(self) -> tuple[list[Any], float]:
        """Objects that stand for all at this place, and how many those are."""
        parent = self.parent
        if parent is None:
            root = self.step()
            return ([] if root is None else [root]), 1.0
        above, members = parent.things()
        if self.step is None:
            return _entries(above, members)
        missing = containers.MISSING
        if type(self.step) is int:
            found = [value for thing in above if (value := _entry(thing, self.step)) is not missing]
        else:
            found = [value for thing in above if (value := containers.attribute(thing, self.step)) is not missing]
        return found, members * len(found) / len(above) if above else 0.0

    def thing(self) -> Any:
        """As :meth:`things`, of a path without ``[*]``: the one object there is, or ``MISSING``."""
        if self.parent is None:
            root = self.step()
            return containers.MISSING if root is None else root
        above = self.parent.thing()
        if above is containers.MISSING:
            return above
        return _entry(above, self.step) if type(self.step) is int else containers.attribute(above, self.step)


class Mean:
    """An average that is bettered by and by, and follows what changes."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: float) -> None:
        """Take one more value."""
        self.count = min(self.count + 1, MOST_WEIGHED)
        self.value += (value - self.value) / self.count


def _entries(above: list[Any], members: float) -> tuple[list[Any], float]:
    found: list[Any] = []
    total = 0
    most = max(2, LOOKED_AT // max(1, len(above)))
    for thing in above:
        container = contained(thing)
        shape = shape_of(container)
        if shape.reads is not None:
            total += shape.reads.length(container)
            found += containers.sample(container, shape, most)
    return found, members * total / len(above) if above else 0.0


def _entry(thing: Any, index: int) -> Any:
    shape = shape_of(thing)
    builtin = tuple if shape.record else list
    if shape.record or shape.builtin is list:
        try:
            return builtin.__getitem__(thing, index)
        except IndexError:
            pass
    return containers.MISSING


class Census:
    """Counts, round after round, what the roots' containers hold.

    ``resting``: a round is over, and the next begins when :meth:`turn` is called again.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, rounds: int = ROUNDS) -> None:
        """``clock`` gives nanoseconds; a walk is spread over so many ``rounds``: over one, it makes up the round."""
        self.resting = True
        self._clock = clock
        self._rounds = rounds
        self._roots: dict[str, Place] = {}
        self._live = LiveIds()
        self._work: Iterator[events.Container | events.Census | None] | None = None
        self._slowest = 0
        self._spent = 0
        self._walking: Iterator[events.Container | None] | None = None
        self._at_once = LEAST_AT_ONCE  # pieces of a walk in a round
        self._anew = True  # the next round is a whole walk
        self._walk = 0  # its number
        self._pieces = 0  # that it took so far
        self._last: tuple[int, bool] = 0, False  # containers that the last walk told, and whether it left nothing out
        self._recounted: list[Place] = []
        self._next = self._audits = 0  # of those, where the next round begins; and how many were audited
        self._complete = True
        self._seen: dict[int, Place] = {}
        self._walkers: dict[int, Place] = {}  # by the id of a class: the place with [*] where such objects are walked
        self._visited = self._told = self._places = 0
        self._found: list[Place] = []
        self._scores = [0] * 64  # how many containers of the walk have a score of so many bits
        self._least_score = self._room = 0

    def add_root(self, name: str, thing: Any, live_ids: Callable[[Any], Collection[str]] | None = None) -> None:
        """Walk from an object, too, from the next round on; its paths begin with ``name``.

        It is held weakly, and dropped once it is gone. ``live_ids`` gives the ids of the requests alive in it, as
        something that tests membership and length at once and without a copy.

        Raises:
            TypeError: No weak reference to the object can be made.
        """
        reference = weakref.ref(thing)
        self._roots[name] = Place(None, None, name, reference)
        self._live.add(name, reference, live_ids)
        self._anew = True

    def turn(self, budget_ns: int = 100_000) -> list[events.Container | events.Census]:
        """Go on with the round, for at most so many nanoseconds but at least by one piece; what is finished."""
        began = now = self._clock()
        end = began + budget_ns * AIM[0] // AIM[1]
        told: list[events.Container | events.Census] = []
        if self._work is None:
            self._work = self._round()
            self.resting = False
        # The first piece finds the processor's caches full of other things, and says nothing of those after it.
        longest, is_first = self._slowest * 15 // 16, True
        while True:
            before = now
            try:
                event = next(self._work, None)
            except BaseException:
                self._work, self._walking, self.resting = None, None, True  # the next turn begins anew
                raise
            now = self._clock()
            if event is not None:
                told.append(event)
                if type(event) is events.Census:
                    told[-1] = event._replace(time=now, spent=self._spent + now - began)
                    self._work, self._spent, self.resting = None, 0, True
                    return told
            longest, is_first = longest if is_first else max(longest, now - before), False
            if now + longest >= end:
                break
        self._slowest = min(longest, budget_ns // 2)
        self._spent += now - began
        return told

    # -- one round -----------------------------------------------------------------------------------------------------

    def _round(self) -> Iterator[events.Container | events.Census | None]:
        """A round, a piece at a time."""
        for name, place in list(self._roots.items()):
            if place.step() is None:
                del self._roots[name]
        self._live.begin(self._clock())
        yield None
        self._live.learn()
        yield None
        whole, self._anew = self._anew or self._rounds == 1, False
        if not whole:
            yield from self._recount()
        if self._walking is None or whole:
            self._walking = self._walk_all()
        for number, event in enumerate(self._walking, 1):
            self._pieces += 1
            yield event
            if number >= self._at_once and not whole:
                break
        else:
            self._walking = None
        yield events.Census(0, self._last[0], 0, self._last[1])

    def _walk_all(self) -> Iterator[events.Container | None]:
        """A walk over all places."""
        self._begin()
        roots = list(self._roots.values())
        queue: deque[Place] = deque(roots)
        yield None
        if self._walk % RELEARNT == 0:
            for _ in containers.learn_again(every=self._walk % (RELEARNT * SELDOM) == 0):
                yield None
        while queue and self._visited < MOST_PLACES:
            place = queue.popleft()
            self._visited += 1
            if self._visited % LEARNT_EVERY == 0:
                self._live.learn()
                yield None
            yield from self._visit(place, queue)
        self._complete = self._complete and not queue
        yield from self._forget()
        self._last = self._told, self._complete
        self._recounted = [place for place in self._found if not _is_calm(place)]
        self._at_once = max(LEAST_AT_ONCE, self._pieces // self._rounds)

    def _begin(self) -> None:
        self._walk += 1
        self._pieces = 0
        count, bits = 0, 63
        while bits and count + self._scores[bits] <= MOST_CONTAINERS:
            count += self._scores[bits]
            bits -= 1
        self._least_score, self._room = bits, MOST_CONTAINERS - count
        self._scores = [0] * 64
        self._complete = True
        self._visited = self._told = 0
        self._found = []
        self._seen.clear()
        self._walkers.clear()

    def _visit(self, place: Place, queue: deque[Place]) -> Iterator[events.Container | None]:
        try:
            things, _ = place.things()
            is_here = self._is_here(place, things)
            del things
            yield None
            if not is_here:
                return
            if self._count(place):
                yield None
                if not place.starred:
                    self._bound(place)
                    yield None
                yield from self._weigh(place)
                if not place.starred:
                    yield from self._audit(place)
                yield self._tell(place)
            yield None
            reached = 0
            while (reached := self._expand(place, reached)) >= 0:
                yield None
            if place.depth < MOST_DEPTH:
                queue.extend(sorted(place.children.values(), key=_rank))
            elif place.children:
                self._complete = False
        except Exception:  # noqa: BLE001  whatever one object does, the others are counted
            self._complete = False
        yield None

    def _turn_of(self, place: Place) -> bool:
        """Whether this is the walk, of a few, in which what hardly changes is looked at; not the same for all."""
        return (self._walk + len(place.path)) % SELDOM == 0

    def _count(self, place: Place) -> bool:
        """Find how many entries there are at a place; whether it is a container."""
        things, members = place.things()
        if not things:
            return False
        boxes, length, structure, first = 0, 0, 0, None
        for thing in things:
            box, shape = thing, shape_of(thing)
            if shape.wraps is not None:
                box = contained(thing)
                shape = shape_of(box)
            if shape.reads is not None:
                first = box if first is None else first
                boxes += 1
                length += shape.reads.length(box)
                structure += containers.own_bytes(box, shape)
        if first is None:
            return False
        scale = members / len(things)
        length = round(scale * length)
        place.as_before, place.walked_length = length == place.walked_length, length
        self._follow(place, length, 0 if place.starred else id(first))
        place.members = scale * boxes
        place.structure = round(scale * structure)
        return True

    def _recount(self) -> Iterator[events.Container | None]:
        """Count again what the last walk found and what may change; of the tables about requests, audit one."""
        places = self._recounted
        for number in range(min(len(places), MOST_RECOUNTED)):
            if number % LEARNT_EVERY == LEARNT_EVERY - 1:
                self._live.learn()
                yield None
            place = places[(self._next + number) % len(places)]
            event = None
            with suppress(Exception):  # a container that changed meanwhile, or is gone
                event = self._count_again(place)
            yield event
        self._next += MOST_RECOUNTED
        audited = [place for place in places if place.orphans.is_about_requests]
        if audited:
            self._audits += 1
            with suppress(Exception):
                yield from self._audit(audited[self._audits % len(audited)])

    def _count_again(self, place: Place) -> events.Container | None:
        thing = place.thing()
        box = contained(thing)
        shape = shape_of(box)
        if shape.reads is None:
            return None
        length = shape.reads.length(box)
        self._follow(place, length, id(box))
        place.structure = containers.own_bytes(box, shape)
        if place.capacity is not None and length > place.capacity:
            place.capacity = None
        return self._record(place)

    def _is_here(self, place: Place, things: list[Any]) -> bool:
        """Whether there is something that was not found at another place in this round; if so, its place is here."""
        if not things:
            return False
        here = False
        seen = self._seen
        others: dict[int, list[Any]] = {}
        for thing in things:
            shape = shape_of(thing)
            if not shape.transparent:
                continue
            other = seen.get(id(thing))
            if other is not None and other is not place:
                # An object that is gone may have left its id to this one.
                there = others[id(other)] if id(other) in others else others.setdefault(id(other), other.things()[0])
                if any(found is thing for found in there):
                    continue
            here = True
            if not shape.record:
                seen[id(thing)] = place
        if here:
            place.walk, place.kind = self._walk, id(type(things[0]))
        return here

    @staticmethod
    def _follow(place: Place, length: int, object_id: int) -> None:
        before = place.length
        if before is not None:
            if object_id != place.object_id:
                place.removed += before
                before = 0
            place.added += max(0, length - before)
            place.removed += max(0, before - length)
        place.length, place.object_id = length, object_id

    @staticmethod
    def _bound(place: Place) -> None:
        """Find the most entries of a container, as itself or an object above it says."""
        place.capacity = None
        thing = place.thing()
        box = contained(thing)
        length = place.length or 0
        own = containers.own_capacity(box, length)
        if own is None and box is not thing:
            own = containers.owner_capacity(thing, length)
        name, below, above = "", place, place.parent
        while own is None and above is not None and type(below.step) is str:
            name = f"{below.step}.{name}" if name else below.step
            bound = above.bounds.get(name, above.bounds.get("*") if above is place.parent else None)
            if bound is not None:
                place.capacity = bound if bound >= length else None
                return
            below, above = above, above.parent
        if own is None and place.parent is not None and type(place.step) is str:
            own = containers.owner_capacity(place.parent.thing(), length)
        place.capacity = own

    def _weigh(self, place: Place) -> Iterator[None]:
        """Better the estimate of what an entry owns by a few more of them."""
        if not place.length or (place.owned.count >= ENOUGH_WEIGHED and not self._turn_of(place)):
            return
        # Where nothing was owned, little is expected.
        most = WEIGHED if place.owned.count < WEIGHED or place.owned.value or place.keys_owned.value else 2
        for number in range(min(most, place.length)):
            for weigh, mean in (containers.weigh, place.owned), (containers.weigh_key, place.keys_owned):
                things, _ = place.things()
                if things:
                    at = self._walk * WEIGHED + number
                    found = weigh(contained(things[at % len(things)]), at)
                    if found is not None:
                        mean.add(found)
                    elif mean is place.keys_owned:
                        break  # no table
                del things
                yield None

    def _audit(self, place: Place) -> Iterator[None]:
        """Look for keys of no live request."""
        return place.orphans.look(lambda: contained(place.thing()), self._live)

    def _tell(self, place: Place) -> events.Container | None:
        """The record of a place, if it is one of the most that are told."""
        event = self._record(place)
        score = min(63, (place.size + 64 * abs(place.added - place.removed)).bit_length())
        self._scores[score] += 1
        self._room -= score == self._least_score
        if score < self._least_score or self._room < 0 == score - self._least_score or self._told >= MOST_CONTAINERS:
            self._complete = False
            return None
        self._told += 1
        self._found.append(place)
        return event

    def _record(self, place: Place) -> events.Container:
        length = place.length or 0
        place.size = place.structure + round((place.owned.value + place.keys_owned.value) * length)
        return events.Container(
            self._clock(),
            place.path,
            length,
            max(1, round(place.members)),
            place.capacity,
            place.size,
            place.added,
            place.removed,
            min(place.orphans.count, length),
            place.orphans.age,
        )

    # -- where to go on ------------------------------------------------------------------------------------------------

    def _expand(self, place: Place, start: int) -> int:
        """Find some of the places below one, from so manieth step on; the step to go on with, or -1 after the last."""
        things, _ = place.things()
        if not things:
            return -1
        learnt, children = containers.learnt(), place.children
        # Of many, the oldest and the newest in turn.
        steps = islice(self._steps(place, things[-(self._walk % 2)]), start, None)
        for number, (step, label, value) in enumerate(steps, start + 1):
            if step not in children and shape_of(value).transparent:
                self._enter(place, step, label, value)
            if number - start >= STEPS_AT_ONCE or containers.learnt() > learnt:
                return number
        return -1

    def _steps(self, place: Place, thing: Any) -> Iterator[tuple[str | int | None, str, Any]]:
        """The ways from an object: attributes, fields, entries."""
        shape = shape_of(thing)
        if shape.record:
            yield from containers.fields(thing, shape)
            return
        if shape.wraps is None and self._walks(place, shape):
            if shape.vars_of is not None and not place.starred:
                place.bounds = live.known_bounds(shape.name, shape.vars_of(thing))
            found = containers.attributes(thing, shape)
            if len(found) > containers.MOST_ATTRIBUTES:
                self._complete = False
            for name, value in found:
                if type(name) is str and (name.isidentifier() or name.startswith("<")):
                    yield name, f".{name}", value
        box = contained(thing)
        if is_container(box):
            yield from self._entry_steps(place, box)

    def _walks(self, place: Place, shape: containers.Shape) -> bool:
        """Whether the attributes of an object are looked at here: of those that are many, at one place alone."""
        if shape.reads is not None or shape.is_function:
            return True
        walker = self._walkers.get(id(shape.cls))
        if walker is None and place.starred:
            walker = self._walkers[id(shape.cls)] = place
        return walker is None or walker is place

    @staticmethod
    def _entry_steps(place: Place, box: Any) -> Iterator[tuple[str | int | None, str, Any]]:
        shape = shape_of(box)
        entries = containers.sample(box, shape, INDEXED)
        if place.indexed and entries:
            few = shape.builtin is list and containers.length(box) <= INDEXED
            place.indexed = few and not place.starred and all(map(_is_fixture, entries))
            if not place.indexed:
                place.children = {step: child for step, child in place.children.items() if type(step) is not int}
        if place.indexed:
            for at, value in enumerate(entries):
                yield at, f"[{at}]", value
            return
        for value in entries:
            if shape_of(value).transparent:
                yield None, "[*]", value
                return

    def _enter(self, place: Place, step: str | int | None, label: str, value: Any) -> None:
        """Have what a step leads to visited, if there may be a container."""
        shape = shape_of(value)
        above: Place | None = place
        while above is not None and shape.reads is None and not shape.record:
            if above.kind == id(shape.cls) and above.step == step:
                return  # the third of a chain of objects alike
            above = above.parent
        if self._places >= MOST_PLACES:
            self._complete = False
            return
        self._places += 1
        child = place.children[step] = Place(place, step, place.path + label)
        child.walk = self._walk
        child.rank = 0 if shape.builtin is dict else 1 if shape.reads is not None else 2

    def _forget(self) -> Iterator[None]:
        """Drop the places where nothing was found for long."""
        if self._walk % FORGOTTEN:
            return
        old = self._walk - FORGOTTEN
        stack = list(self._roots.values())
        count = 0
        while stack:
            place = stack.pop()
            count += 1
            place.children = {step: child for step, child in place.children.items() if child.walk >= old}
            stack += place.children.values()
            yield None
        self._places = count


def _is_calm(place: Place) -> bool:
    """Whether a container need not be counted before the next walk."""
    return place.starred or (place.as_before and place.size < SMALL and (place.length or 0) < FEW)


def _rank(place: Place) -> int:
    # Of two ways to the same objects that are as long, the one by key comes first: it has them all.
    return place.rank


def _is_fixture(thing: Any) -> bool:
    """Whether an entry of a list is an object, and not about a request: a manager, a layer, a connector."""
    shape = shape_of(thing)
    return shape.transparent and shape.reads is None and not shape.record and not containers.is_about_request(thing)
