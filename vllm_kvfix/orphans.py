# SPDX-License-Identifier: Apache-2.0
"""Which keys of a container are those of requests that are no longer alive.

A container is about requests if ids of live ones were found in it, or ids that were live a while ago; how an id stands
in a key (whole, first in a tuple, before or behind a separator) is learnt from what was found. Tables keep the order in
which entries came, so what was left behind gathers at the front, and the oldest keys tell. A key counts as an orphan
once no live request had its id in two censuses that lie some seconds apart.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_kvfix import containers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

LOOKED_AT = 60  # of the oldest keys
AT_ONCE = 12  # of those, in a piece
GRACE_NS = 5_000_000_000
MOST_REMEMBERED = 4096  # ids that were live
_LEARNT_AT_ONCE = 16


class LiveIds:
    """The ids of the requests that are alive in any of the roots, and hashes of some that were."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Callable[[], Any], Callable[[Any], Collection[str]]]] = {}
        self._recent: dict[int, None] = {}
        self._tables: list[Collection[str]] = []
        self.now = 0

    def add(self, name: str, reference: Callable[[], Any], live_ids: Callable[[Any], Collection[str]] | None) -> None:
        """Take the ids of one more root."""
        if live_ids is not None:
            self._sources[name] = (reference, live_ids)

    def begin(self, now: int) -> None:
        """A round begins at a time in nanoseconds."""
        self.now = now

    def tables(self) -> list[Collection[str]]:
        """What holds the live ids, asked for anew and not to be kept."""
        found = []
        for reference, live_ids in list(self._sources.values()):
            thing = reference()
            if thing is not None:
                try:
                    found.append(live_ids(thing))
                except Exception:  # noqa: BLE001, S112  whatever it is, the other roots have theirs
                    continue
        return found

    def learn(self) -> None:
        """Remember the newest of the live ids."""
        for table in self.tables():
            self._recent.update({hash(key): None for key in _newest(table) if type(key) is str})
        while len(self._recent) > MOST_REMEMBERED:
            del self._recent[next(iter(self._recent))]

    def was_live(self, key: str) -> bool:
        """Whether an id was seen live; many are not seen."""
        return hash(key) in self._recent


def _newest(table: Collection[str]) -> list[Any]:
    try:
        return list(islice(reversed(table), _LEARNT_AT_ONCE))  # type: ignore[call-overload]  # where it has an order
    except (TypeError, RuntimeError):
        return []


class Orphans:
    """What is known of the keys of one container: how many are orphans, at least, and the age of the oldest in ns."""

    __slots__ = ("_excesses", "_form", "_oldest", "_since", "_suspects", "age", "count")

    def __init__(self) -> None:
        self.count = self.age = 0
        self._form: Callable[[Any], str | None] | None = None
        self._suspects: dict[int, int] = {}  # hash of a key -> when it was first seen not to be live
        self._oldest: list[str] = []
        self._excesses: deque[tuple[int, int]] = deque(maxlen=16)
        self._since = 0

    @property
    def is_about_requests(self) -> bool:
        """Whether ids of requests were found in the container."""
        return self._form is not None

    def look(self, find: Callable[[], Any], live: LiveIds) -> Iterator[None]:
        """Look at the oldest keys of the container that ``find`` gives, a few in each piece.

        It is found anew in each piece, and nothing of it is kept in between.
        """
        if self._form is None:
            self._form = self._learn(find(), live)
            yield
        if self._form is None:
            return
        now, suspects, seen = live.now, dict[int, int](), 0
        for start in range(0, LOOKED_AT, AT_ONCE):
            looked_at, there, gone = self._gone(find(), start, live)
            suspects.update({key: self._suspects.get(key, now) for key in gone})
            seen += there
            yield
            if looked_at < AT_ONCE:
                break
        self._suspects = suspects
        self._conclude(find(), seen, live)
        yield

    def _gone(self, container: Any, start: int, live: LiveIds) -> tuple[int, int, list[int]]:
        """Some of the oldest keys: how many were looked for, how many there are, and hashes of those not live."""
        form, (looked_at, keys) = self._form, self._oldest_keys(container, start)
        gone = [found for key in keys if form is not None and (found := form(key)) is not None]
        for table in live.tables():
            gone = [found for found in gone if found not in table]
        return looked_at, len(keys), list(map(hash, gone))

    def _conclude(self, container: Any, seen: int, live: LiveIds) -> None:
        now, shape = live.now, containers.shape_of(container)
        ages = [age for since in self._suspects.values() if (age := now - since) >= GRACE_NS]
        self.count, self.age = len(ages), max(ages, default=0)
        if self.count == seen and self._form is _whole and shape.builtin in _UNIQUE:
            # All of the oldest are orphans, or cannot be seen. A live request has one key at most: there may be more.
            excess = containers.length(container) - sum(map(len, live.tables()))
            lasting, since = self._lasting_excess(excess, now)
            if lasting > self.count:
                self.count, self.age = lasting, max(self.age, now - since)
        else:
            self._excesses.clear()

    def _lasting_excess(self, excess: int, now: int) -> tuple[int, int]:
        """By how much there were more keys than live requests, all the time since some seconds ago, and since when."""
        kept = self._excesses
        if excess <= 0:
            kept.clear()
            return 0, now
        if not kept:
            self._since = now
        kept.append((now, excess))
        while len(kept) > 1 and now - kept[1][0] >= GRACE_NS:
            kept.popleft()
        return (min(count for _, count in kept) if now - kept[0][0] >= GRACE_NS else 0), self._since

    def _oldest_keys(self, container: Any, start: int) -> tuple[int, list[Any]]:
        """Some of the oldest keys of a container, and how many were looked for.

        Of a table where they are hard to find, those that were it before.
        """
        shape = containers.shape_of(container)
        if containers.hollow(container, shape) <= containers.HOLLOW:
            found = containers.oldest_keys(container, shape, AT_ONCE, start)
            # Copies, so that a census of what a table owns sees no more references than before.
            del self._oldest[start:]
            self._oldest += [(key + " ")[:-1] for key in found if type(key) is str and shape.builtin is dict]
            return len(found), found
        before = self._oldest[start : start + AT_ONCE] if shape.builtin is dict else []
        return len(before), [key for key in before if dict.__contains__(container, key)]

    @staticmethod
    def _learn(container: Any, live: LiveIds) -> Callable[[Any], str | None] | None:
        """How ids of requests stand in the keys of a container, None where there are none."""
        shape, tables = containers.shape_of(container), live.tables()
        if any(table is container for table in tables):
            return None  # it says itself what is alive
        keys = containers.newest_keys(container, shape, _TRIED) + containers.oldest_keys(container, shape, _TRIED)
        for key in keys:
            for form in _forms(key):
                found = form(key)
                if found is not None and (live.was_live(found) or any(found in table for table in tables)):
                    return form
        return None


def _forms(key: Any) -> Iterator[Callable[[Any], str | None]]:
    if type(key) is str:
        yield _whole
        for separator, forms in _AFFIXES.items():
            if separator in key:
                yield from forms
    elif type(key) is tuple:
        yield from _ENTRIES[: len(key)]


def _whole(key: Any) -> str | None:
    return key if type(key) is str else None


def _entry(at: int) -> Callable[[Any], str | None]:
    return lambda key: key[at] if type(key) is tuple and len(key) > at and type(key[at]) is str else None


def _before(separator: str) -> Callable[[Any], str | None]:
    return lambda key: key.rpartition(separator)[0] or None if type(key) is str else None


def _behind(separator: str) -> Callable[[Any], str | None]:
    return lambda key: key.partition(separator)[2] or None if type(key) is str else None


_UNIQUE = (dict, set, frozenset)
_TRIED = 4  # keys at either end
_AFFIXES = {separator: (_before(separator), _behind(separator)) for separator in "_-:/@#|."}
_ENTRIES = (_entry(0), _entry(1), _entry(2))
