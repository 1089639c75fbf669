# SPDX-License-Identifier: Apache-2.0
"""The ledger of processes: who belongs to a vLLM deployment, what memory each has, and against which limit."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from vllm_kvfix import host
from vllm_kvfix.host import Budget, UnreadableError
from vllm_kvfix_sidecar import deployments
from vllm_kvfix_sidecar.following import GONE, Following
from vllm_kvfix_sidecar.limits import Limits
from vllm_kvfix_sidecar.once import Once
from vllm_kvfix_sidecar.process_table import ProcessKey

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
    from pathlib import Path

    from vllm_kvfix_sidecar.deployments import Member
    from vllm_kvfix_sidecar.limits import Place, Reading, Standing

MOST_FOLLOWED = 512
# How long a process is believed to stay in its cgroup.
PLACES_S = 30.0
# Of the wall time, for smaps and for cgroups: 0.1 % in all.
SHARE = 0.0005
# A compiler that is over in a moment is not worth its smaps, and many of them would keep the others waiting.
OLD_ENOUGH_S = 20.0
# A second's read, some 14 ms a GiB, for which whoever looks would be held up.
LARGEST_SMAPS = 64 << 30

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass
class ProcessView:
    """One process of a deployment at one look.

    ``key`` as this process table counts, ``ring`` as the ring's header says, None: it has none; they differ where the
    process counts pids in a namespace of its own. A process that this table does not show has the ring's as its
    ``key``, and no figures. ``parent``: a pid, 0: not known. ``role``: one of ``layout.ROLES``, or ``child``. ``name``:
    a word for a person and a metric's attribute. ``root``: the server's process, the same for all of a deployment,
    None: not known. ``started``: seconds of the monotonic clock.

    ``figures``: ``SCOPE.FIGURE`` of ``events.SCOPES``, only what was read in this very look: ``status`` in each, others
    now and then. ``unread``: why a scope could not be read, until it can.

    ``cgroup``: the same for all processes of one cgroup, None: not known. ``limit``: the last known of what ends the
    growth, in bytes, None: not known; ``usage``: the bytes against it that cannot be reclaimed, None: not read in this
    look. ``of``: whose these two are: ``cgroup`` or ``host``; ``limiter``: which cgroup's, the same key as ``cgroup``.
    """

    key: ProcessKey
    parent: int
    role: str
    name: str
    figures: dict[str, int] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    cgroup: str | None = None
    limit: int | None = None
    usage: int | None = None
    of: str = "host"
    limiter: str | None = None
    ring: ProcessKey | None = None
    root: ProcessKey | None = None
    started: float = 0.0


@dataclass
class _Kept:
    """What is kept of a process between two looks."""

    since: float
    place: Place | None = None
    place_unread: str | None = None
    smaps_unread: str | None = None


class HostMemory:
    """Looks once a second at the processes of all deployments; see :meth:`look`."""

    def __init__(
        self, proc: Path, cgroups: Path, clock: Callable[[], float] = time.monotonic, most: int = MOST_FOLLOWED
    ) -> None:
        """Look at nothing yet.

        Args:
            proc: Where a process table is mounted.
            cgroups: Where the cgroups are mounted.
            clock: Steady seconds.
            most: Processes followed at a time.
        """
        self._proc = proc
        self._clock = clock
        self._following = Following(proc, clock, most)
        self._kept: dict[ProcessKey, _Kept] = {}
        self._smaps_budget = Budget(SHARE, 0.0, clock)
        self._smaps_turns: deque[ProcessKey] = deque()
        self._limits = Limits(proc, cgroups)
        self._places_due = clock()
        self._cgroup_budget = Budget(SHARE, 0.0, clock)
        self._cgroup_turns: deque[str] = deque()
        self._readings: dict[str, Reading] = {}
        self._once = Once(_log)
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._suspended = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()

    def look(
        self, engines: Collection[tuple[int, int, str]], silent: Collection[tuple[int, int]] = ()
    ) -> Sequence[ProcessView]:
        """What can be seen now of each process. Raises nothing: what cannot be read has its reason in ``unread``.

        Args:
            engines: (pid, start time, role) of each process that has a ring and lives, as the ring says.
            silent: (pid, start time) of those of them whose ring tells no figures: their smaps is read here.
        """
        now = self._clock()
        rings = {ProcessKey(pid, start_time): role for pid, start_time, role in engines}
        self._following.look(rings)
        self._kept = {key: self._kept.get(key) or _Kept(now) for key in self._following.members}
        ring_of = {key: ring for ring, key in self._following.processes.items()}
        views = [self._view(member, ring_of.get(key)) for key, member in list(self._following.members.items())]
        self._read_smaps(views, {ProcessKey(*ring) for ring in silent}, now)
        self._read_limits([view for view in views if view.key in self._following.members], now)
        seen = {view.key for view in views}
        unseen = [ring for ring in rings if ring not in self._following.processes and ring not in seen]
        return [*views, *(self._unseen(ring, rings[ring]) for ring in unseen)]

    def _view(self, member: Member, ring: ProcessKey | None) -> ProcessView:
        key, role, name, root = member
        view = ProcessView(key, 0, role, name, ring=ring, root=root, started=self._started(key))
        try:
            figures = host.status(key.pid, self._proc)
        except UnreadableError as error:
            figures, view.unread["status"] = {}, str(error)
        try:
            entry = self._following.table.again(key.pid)  # after the figures: were they this one's?
        except UnreadableError as error:
            view.unread["status"] = str(error)
            self._following.drop(key)
            return view
        if entry.key != key:
            view.unread["status"] = GONE
            self._following.drop(key)
            return view
        view.parent = entry.parent
        view.figures = {f"status.{figure}": value for figure, value in figures.items()}
        smaps_unread = self._kept[key].smaps_unread
        if smaps_unread is not None:
            view.unread["smaps"] = smaps_unread
        return view

    def _unseen(self, ring: ProcessKey, role: str) -> ProcessView:
        """Of this one, all is told by its ring."""
        name = deployments.NAMES.get(role, deployments.CHILD)
        unread = {"status": self._following.why_unseen(ring)}
        return ProcessView(ring, 0, role, name, unread=unread, ring=ring, started=self._started(ring))

    def _started(self, key: ProcessKey) -> float:
        return key.start_time / self._ticks - self._suspended

    def _read_smaps(self, views: Sequence[ProcessView], silent: Container[ProcessKey], now: float) -> None:
        """Read the smaps of one process, if that is due: in each round all in turn, small ones first."""
        if not self._smaps_budget.due():
            return
        own = {view.key: view for view in views if self._is_ours(view, silent, now)}
        by_size = sorted(own, key=lambda key: own[key].figures["status.rss"])
        key = _next(self._smaps_turns, own, by_size)
        if key is None:
            return
        view = own[key]
        view.unread.pop("smaps", None)
        with self._smaps_budget.spending():
            try:
                view.figures.update({f"smaps.{figure}": value for figure, value in self._smaps(view).items()})
            except UnreadableError as error:
                view.unread["smaps"] = str(error)
                self._warn_unread("smaps", view)
        self._kept[key].smaps_unread = view.unread.get("smaps")

    def _is_ours(self, view: ProcessView, silent: Container[ProcessKey], now: float) -> bool:
        """Whether smaps of this one is read from here, not by itself."""
        if "status.rss" not in view.figures or (view.ring is not None and view.ring not in silent):
            return False
        return view.role != deployments.CHILD or now - self._kept[view.key].since >= OLD_ENOUGH_S

    def _smaps(self, view: ProcessView) -> dict[str, int]:
        if view.figures["status.rss"] > LARGEST_SMAPS:
            raise UnreadableError(f"it has over {LARGEST_SMAPS >> 30} GiB, whose maps only it can read in small pieces")
        figures = host.smaps(view.key.pid, self._proc)
        if self._following.table.again(view.key.pid).key != view.key:
            raise UnreadableError(GONE)
        return figures

    def _read_limits(self, views: Sequence[ProcessView], now: float) -> None:
        """Say of each process against which limit it counts; read one cgroup, if that is due."""
        if now >= self._places_due:
            self._places_due = now + PLACES_S
            self._limits.forget()
            for kept in self._kept.values():
                kept.place = kept.place_unread = None
        places: dict[str, Place] = {}
        for view in views:
            place = self._place(view, self._kept[view.key])
            if place is not None:
                places[place.key] = place
                view.cgroup = place.key
        total = self._limits.host()
        fresh = self._read_cgroup(places, total.limit)
        self._readings = {key: reading for key, reading in self._readings.items() if key in places}
        for view in views:
            if view.cgroup in self._readings:
                _stand(view, self._readings[view.cgroup], total, is_fresh=view.cgroup == fresh)

    def _place(self, view: ProcessView, kept: _Kept) -> Place | None:
        """Where it is charged, as it was when it was asked last, which is a few seconds ago."""
        if kept.place is None and kept.place_unread is None:
            try:
                kept.place = self._limits.place(view.key.pid)
            except UnreadableError as error:
                kept.place_unread = str(error)
        if kept.place_unread is not None:
            view.unread["cgroup"] = kept.place_unread
            self._warn_unread("cgroup", view)
        return kept.place

    def _read_cgroup(self, places: Mapping[str, Place], host_total: int | None) -> str | None:
        """Read one in turn, if that is due; its key."""
        if not self._cgroup_budget.due():
            return None
        key = _next(self._cgroup_turns, places, places)
        if key is not None:
            with self._cgroup_budget.spending():
                reading = self._readings[key] = self._limits.read(places[key], host_total)
            if reading.unread is not None:
                path = places[key].cgroup.path
                self._once.warn("controller", reading.unread, f"cannot read the memory of {path}: {reading.unread}")
        return key

    def _warn_unread(self, scope: str, view: ProcessView) -> None:
        reason = view.unread[scope]
        if reason != GONE:  # it ended, as processes do
            text = f"cannot read the {scope} of process {view.key.pid}, {view.name}: {reason}"
            self._once.warn(scope, reason, text)


def _next(turns: deque[_T], all_of_them: Container[_T], round_of_them: Iterable[_T]) -> _T | None:
    """Whose turn it is: each once in a round, and whoever came meanwhile in the next one."""
    while turns and turns[0] not in all_of_them:
        turns.popleft()
    if not turns:
        turns.extend(round_of_them)
    return turns.popleft() if turns else None


def _stand(view: ProcessView, reading: Reading, total: Standing, *, is_fresh: bool) -> None:
    if reading.unread is not None:
        view.unread["cgroup"] = reading.unread
        return
    if is_fresh:
        view.figures.update({f"cgroup.{figure}": value for figure, value in reading.figures.items()})
    if reading.standing is None:
        view.limit, view.usage, view.of, view.limiter = total.limit, total.usage, total.of, None
        return
    standing = reading.standing
    view.limit, view.of, view.limiter = standing.limit, standing.of, standing.limiter
    view.usage = standing.usage if is_fresh else None
