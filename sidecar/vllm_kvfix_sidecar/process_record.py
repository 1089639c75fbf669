# SPDX-License-Identifier: Apache-2.0
"""All that is known of one process: what its ring told, and what the process table shows, as one history.

Bounded whatever a ring says: the figures are those of ``events.SCOPES``; containers at most ``MOST_CONTAINERS``, the
first that came; one that was not seen for ``UNSEEN_S`` makes room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.events import SCOPES, Census, Container, Figures, Unread
from vllm_kvfix_sidecar.history import Track
from vllm_kvfix_sidecar.observed import ContainerHistory, Limit, ProcessHistory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from vllm_kvfix.events import ProcessEvent
    from vllm_kvfix_sidecar.host_memory import ProcessView
    from vllm_kvfix_sidecar.observed import Series
    from vllm_kvfix_sidecar.process_table import ProcessKey

MOST_CONTAINERS = 300
MOST_SHOWN = 30
UNSEEN_S = 600.0
# How long a figure stands for the present when none came after it. smaps of a huge process is read once in an hour.
STANDS_S = dict.fromkeys(SCOPES, 300.0) | {"smaps": 3 * 3600.0}
# What only runs up, so that what was there before us is not ours to tell.
RUNNING_UP = frozenset(
    f"{scope}.{name}"
    for scope, name in (
        *(("cgroup", name) for name in SCOPES["cgroup"] if name.endswith(("_count", "_us"))),
        ("python", "collections_count"),
    )
)
_COLUMNS = ("length", "size", "members", "added", "removed", "orphans")
_FLOORS = 2  # of length and size; the others run up, or hardly change
_SIZE = _COLUMNS.index("size")


class Told(NamedTuple):
    """What a scope said last, and when (s)."""

    time: float
    values: Mapping[str, int]


class Rows(NamedTuple):
    """Some columns at the same times (s)."""

    times: Sequence[float]
    columns: Sequence[Sequence[float]]


class NotRead(NamedTuple):
    """Why a scope could not be read, and when that was (s)."""

    time: float
    reason: str


class _Container:
    """A container that censuses found; ``last`` is what the last one said."""

    __slots__ = ("last", "seen", "track")

    def __init__(self) -> None:
        self.track = Track(len(_COLUMNS), _FLOORS)
        self.last: Container | None = None
        self.seen = 0.0


@dataclass(frozen=True)
class ProcessState:
    """What is known of a process now, as a copy that nobody changes.

    ``figures``: by scope, as far as they stand; a scope has its figures, or a reason in ``unread``, or neither.
    ``first``: what each figure that only runs up stood at when it was first seen. ``containers``: the largest and those
    that grow fastest. ``ring``: its file's name, empty where there is none; ``started_ns``: unix time.
    """

    key: ProcessKey
    role: str
    name: str
    ring: str
    started_ns: int
    cgroup: str | None
    figures: Mapping[str, Told]
    unread: Mapping[str, str]
    first: Mapping[str, int]
    containers: tuple[Container, ...]
    census: Census | None


@dataclass
class ProcessRecord:
    """One process, as it is kept. ``ended``: when it was found to be gone (s)."""

    key: ProcessKey
    role: str
    name: str
    started: float = 0.0
    started_ns: int = 0
    root: ProcessKey | None = None
    ring: str = ""
    cgroup: str | None = None
    vllm_version: str = ""
    patch_state: str = "unknown"
    ended: float | None = None
    judged: float | None = None
    refused_containers: int = 0
    _memory: dict[str, Track] = field(default_factory=dict)
    _told: dict[str, Told] = field(default_factory=dict)
    _not_read: dict[str, NotRead] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)
    _containers: dict[str, _Container] = field(default_factory=dict)
    _census: Census | None = None
    _limit: int | None = None
    _limit_of: tuple[str, str | None] = ("", None)
    _usage: Track = field(default_factory=Track)

    def hear(self, event: ProcessEvent) -> None:
        """Take what its ring told."""
        time = event.time / 1e9
        if isinstance(event, Figures):
            self._tell(event.scope, time, event.values)
            if event.scope == "cgroup":
                self._own_limit(time, event.values)
        elif isinstance(event, Unread):
            if event.scope in SCOPES:
                self._not_read[event.scope] = NotRead(time, event.reason)
        elif isinstance(event, Container):
            self._count(event, time)
        else:
            self._census = event
            self._forget_unseen(time)

    def see(self, view: ProcessView, now: float) -> None:
        """Take what the process table shows."""
        self.role, self.name, self.started = view.role, view.name, view.started
        self.root, self.cgroup, self.ended = view.root, view.cgroup, None
        scopes: dict[str, dict[str, int]] = {}
        for name, value in view.figures.items():
            scope, _, figure = name.partition(".")
            scopes.setdefault(scope, {})[figure] = value
        for scope, values in scopes.items():
            self._tell(scope, now, values)
        for scope, reason in view.unread.items():
            told = self._told.get(scope)
            # Its ring may tell what the table does not show.
            if scope in SCOPES and (told is None or now - told.time > STANDS_S[scope]):
                self._not_read[scope] = NotRead(now, reason)
        if view.limit is not None:
            self._limited(view.limit, (view.of, view.limiter))
            if view.usage is not None:
                self._usage.add(now, view.usage)

    def tells(self, scope: str, now: float) -> bool:
        """Whether figures of a scope came that still stand."""
        told = self._told.get(scope)
        return told is not None and now - told.time <= STANDS_S[scope]

    def _tell(self, scope: str, time: float, values: Mapping[str, int]) -> None:
        known = SCOPES.get(scope, ())
        values = {name: value for name, value in values.items() if name in known}
        told = self._told.get(scope)
        if not values or (told is not None and time < told.time):
            return
        self._told[scope] = Told(time, values)
        for figure, value in values.items():
            name = f"{scope}.{figure}"
            track = self._memory.get(name)
            if track is None:
                track = self._memory[name] = Track()
                if name in RUNNING_UP:
                    self._first[name] = value
            track.add(time, value)

    def _own_limit(self, time: float, values: Mapping[str, int]) -> None:
        """What its ring says of its cgroup stands where the process table does not say which that is."""
        if self._limit_of[0] not in {"", "ring"} or "limit" not in values or "usage" not in values:
            return
        self._limited(values["limit"], ("ring", None))
        # The kernel takes back files, but shared memory is counted among them, and that it cannot.
        files = max(0, values.get("file", 0) - values.get("shmem", 0))
        self._usage.add(time, max(0, values["usage"] - files))

    def _limited(self, limit: int, of: tuple[str, str | None]) -> None:
        if of != self._limit_of:
            self._limit_of, self._usage = of, Track()
        self._limit = limit

    def _count(self, event: Container, time: float) -> None:
        found = self._containers.pop(event.path, None)
        if found is None:
            if len(self._containers) >= MOST_CONTAINERS and not self._make_room(time):
                self.refused_containers += 1
                return
            found = _Container()
        self._containers[event.path] = found  # the last seen is the last in the dict
        if found.track.add(time, *[getattr(event, name) for name in _COLUMNS]):
            found.last, found.seen = event, time

    def _make_room(self, time: float) -> bool:
        path, oldest = next(iter(self._containers.items()))
        if time - oldest.seen <= UNSEEN_S:
            return False
        del self._containers[path]
        return True

    def _forget_unseen(self, time: float) -> None:
        for path, found in list(self._containers.items()):
            if time - found.seen <= UNSEEN_S:
                return
            del self._containers[path]

    def absorb(self, other: ProcessRecord) -> None:
        """Take over what another record holds of the same process: its ring was not known to be this one's."""
        self._memory = other._memory | self._memory
        self._told = other._told | self._told
        self._not_read = other._not_read | self._not_read
        self._first = other._first | self._first
        self._containers = other._containers | self._containers
        self._census = self._census or other._census
        if self._limit is None:
            self._limit, self._limit_of, self._usage = other._limit, other._limit_of, other._usage
        self.adopt(other.ring, other.vllm_version)

    def adopt(self, ring: str, vllm_version: str) -> None:
        """It has this ring, too."""
        self.ring, self.vllm_version = self.ring or ring, self.vllm_version or vllm_version

    @property
    def usage(self) -> tuple[int, float | None, str] | None:
        """Limit, latest usage that counts against it, and whose they are; None: no limit is known."""
        return None if self._limit is None else (self._limit, self._usage.latest(), self._limiter)

    @property
    def _limiter(self) -> str:
        return "cgroup" if self._limit_of[0] == "ring" else self._limit_of[0]

    def history(self, load: Mapping[str, Series]) -> ProcessHistory:
        """All that a verdict stands on; ``load`` is that of its deployment."""
        limit = None
        if self._limit is not None and self._usage.last is not None:
            limit = Limit(float(self._limit), self._usage.series(), self._limiter)
        return ProcessHistory(
            pid=self.key.pid,
            role=self.role,
            name=self.name,
            started=self.started,
            memory={name: track.series() for name, track in self._memory.items()},
            containers=tuple(self._container_histories()),
            load=load,
            limit=limit,
            unread=self.unread,
            vllm_version=self.vllm_version,
            patch_state=self.patch_state,
        )

    def _container_histories(self) -> Iterator[ContainerHistory]:
        for path, found in self._containers.items():
            if found.last is not None:
                series = dict(zip(_COLUMNS, found.track.all_series(), strict=True))
                yield ContainerHistory(path, found.last.capacity, found.last.orphan_age / 1e9, **series)

    def figures_since(self, since: float, names: Collection[str] | None = None) -> dict[str, Rows]:
        """Times from ``since`` on and values then, of each figure (``SCOPE.FIGURE``), or of those that are named."""
        found = {}
        for name, track in self._memory.items():
            if names is None or name in names:
                times, (values,) = track.rows_since(since)
                found[name] = Rows(times, (values,))
        return found

    def usage_since(self, since: float) -> Rows:
        """What counts against the limit."""
        times, (values,) = self._usage.rows_since(since)
        return Rows(times, (values,))

    def containers_since(self, since: float, paths: Collection[str]) -> dict[str, Rows]:
        """Of these containers lengths and sizes."""
        found = {}
        for path in paths:
            container = self._containers.get(path)
            if container is not None:
                times, columns = container.track.rows_since(since)
                found[path] = Rows(times, columns[: _SIZE + 1])
        return found

    def largest(self, most: int, always: Collection[str] = ()) -> list[Container]:
        """The latest of each of the largest containers, the largest first; those of these paths whatever they hold."""
        last = sorted(
            (found.last for found in self._containers.values() if found.last is not None), key=lambda each: -each.size
        )
        kept = sum(each.path in always for each in last[most:])
        return [each for at, each in enumerate(last) if at < most - kept or each.path in always]

    @property
    def unread(self) -> dict[str, str]:
        """Why scopes could not be read, those that were not read since."""
        return {
            scope: found.reason
            for scope, found in self._not_read.items()
            if scope not in self._told or found.time > self._told[scope].time
        }

    def state(self, now: float) -> ProcessState:
        """What is known of it now."""
        unread = self.unread
        figures = {
            scope: told
            for scope, told in self._told.items()
            if scope not in unread and now - told.time <= STANDS_S[scope]
        }
        return ProcessState(
            self.key,
            self.role,
            self.name,
            self.ring,
            self.started_ns,
            self.cgroup,
            figures,
            unread,
            dict(self._first),
            self._shown(),
            self._census,
        )

    def _shown(self) -> tuple[Container, ...]:
        if len(self._containers) <= MOST_SHOWN:
            chosen = list(self._containers.values())
        else:
            by_size = sorted(self._containers.values(), key=lambda found: -(found.last.size if found.last else 0))
            large, rest = by_size[: MOST_SHOWN // 2], by_size[MOST_SHOWN // 2 :]
            rest.sort(key=lambda found: -found.track.rise(_SIZE))
            chosen = large + rest[: MOST_SHOWN // 2]
        return tuple(found.last for found in chosen if found.last is not None)
