# SPDX-License-Identifier: Apache-2.0
"""Joins what rings tell and what the process table shows, and has each process judged in turn.

One thread calls it, the pipeline's; what others may ask takes the lock. Nothing it is told, and nothing that fails in
it, leaves it: faults are counted in ``errors``, and each place's first is said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_kvfix import host
from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix_sidecar import load, verdict
from vllm_kvfix_sidecar.load import EngineLoad
from vllm_kvfix_sidecar.observed import Series
from vllm_kvfix_sidecar.process_record import ProcessRecord
from vllm_kvfix_sidecar.process_table import ProcessKey

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from vllm_kvfix.events import Container, ProcessEvent, Step
    from vllm_kvfix_sidecar.host_memory import ProcessView
    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.process_record import ProcessState
    from vllm_kvfix_sidecar.verdict import Verdict

LOOK_S = 1.0
JUDGE_S = 15.0
LOAD_S = 10.0
KEEP_ENDED_S = 300.0
# A ring that has told no smaps by then will not; the process table is asked instead.
SILENT_S = 60.0
MOST_PROCESSES = 512
# A ring that speaks of the future would keep what is true from being heard.
FUTURE_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_log = logging.getLogger(__name__)


class Looker(Protocol):
    """What is asked of :class:`vllm_kvfix_sidecar.host_memory.HostMemory`."""

    def look(
        self, engines: Collection[tuple[int, int, str]], silent: Collection[tuple[int, int]] = ()
    ) -> Sequence[ProcessView]:
        """What can be seen of each process now."""


class Listener(Protocol):
    """Is told each verdict, and of each process that is gone; ``now`` in seconds of the monotonic clock."""

    def judged(self, key: ProcessKey, verdict: Verdict, history: ProcessHistory, now: float) -> None:
        """A process was judged."""

    def ended(self, key: ProcessKey, now: float) -> None:
        """A process is gone."""


class Judged(NamedTuple):
    """A process, its latest verdict, and of its history the first and the last of each figure."""

    key: ProcessKey
    history: ProcessHistory
    verdict: Verdict


class Kept(NamedTuple):
    """A process that runs, or that ended within ``KEEP_ENDED_S``: what is known of it now, or was in the end.

    ``usage``: its limit, what counts against it, and whose they are. ``ended``: when (s), None: it runs.
    """

    judged: Judged
    state: ProcessState
    patch_state: str
    usage: tuple[int, float | None, str] | None
    containers: Sequence[Container]
    ended: float | None


class EngineFeed(NamedTuple):
    """What an engine has done, by whose ring tells it (pid there, file name), and its process in the table."""

    ring: tuple[int, str]
    key: ProcessKey
    load: EngineLoad


class Feed:
    """What one ring tells goes in here; ``key`` as the ring counts."""

    def __init__(self, owner: Assessment, key: ProcessKey, role: str, ring: str, record: ProcessRecord) -> None:
        self.key = key
        self.role = role
        self.ring = ring
        self.record = record
        self.began = owner.now()
        self.load = EngineLoad()
        self.live = True
        self._owner = owner

    def hear(self, event: ProcessEvent) -> None:
        """An event that tells of the process."""
        if self._owner.is_past(event.time):
            with self._owner.guarded("hear"), self._owner.lock:
                self.record.hear(event)

    def step(self, step: Step) -> None:
        """The state of an engine core after a step."""
        if self.role == ENGINE_CORE and self._owner.is_past(step.time):
            with self._owner.guarded("step"), self._owner.lock:
                self.load.take(step)

    def patch(self, state: str) -> None:
        """What the ring's header says of the fix; once that changes, the last verdict is an old one."""
        if state != self.record.patch_state:
            self.record.patch_state, self.record.judged = state, None

    def end(self) -> None:
        """The ring is not followed any more: its process has ended, or it cannot be read."""
        self.live = False
        self.load.ended = True


class Assessment:
    """What is known of all processes, and the latest verdict on each."""

    def __init__(
        self,
        memory: Looker,
        *,
        judge: Callable[[ProcessHistory, float], Verdict] = verdict.judge,
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Look at nothing yet.

        Args:
            memory: Looks at the process table.
            judge: Makes a verdict of a history and a time.
            listeners: Are told the verdicts.
            clock: Steady seconds; that of the rings' times.
            wall: Seconds since the epoch.
        """
        self.errors = 0
        self._memory = memory
        self._judge = judge
        self._listeners = tuple(listeners)
        self._clock = clock
        self._epoch_s = wall() - clock()
        self.lock = threading.RLock()
        self._records: dict[ProcessKey, ProcessRecord] = {}
        self._feeds: list[Feed] = []
        self._judged: dict[ProcessKey, Judged] = {}
        self._loads: dict[object, tuple[float, Mapping[str, Series]]] = {}
        self._next_look = clock()
        self._said: set[str] = set()

    # -- what the pipeline tells

    def follow(self, pid: int, start_time: int, role: str, ring: str, vllm_version: str) -> Feed:
        """A ring was found; what it tells goes into what this returns."""
        key = ProcessKey(pid, start_time)
        with self.lock:
            for feed in self._feeds:
                if (feed.key, feed.ring) == (key, ring):  # it could not be read for a while
                    feed.live, feed.load.ended = True, False
                    return feed
            record = self._records.get(key)
            if record is None:
                record = ProcessRecord(key, role, role)
                self._place(record, start_time / _TICKS_PER_S)
                if len(self._records) < MOST_PROCESSES or self._make_room():
                    self._records[key] = record
            record.adopt(ring, vllm_version)
            feed = Feed(self, key, role, ring, record)
            self._feeds.append(feed)
            return feed

    def now(self) -> float:
        """Seconds of the clock."""
        return self._clock()

    def is_past(self, time_ns: int) -> bool:
        """Whether a ring may say that something happened then."""
        return time_ns / 1e9 <= self._clock() + FUTURE_S

    @contextlib.contextmanager
    def guarded(self, place: str) -> Iterator[None]:
        """A fault is counted, and said once a place."""
        try:
            yield
        except Exception:  # noqa: BLE001  # spans and metrics must go on whatever is wrong here
            self.errors += 1
            if place not in self._said:
                self._said.add(place)
                _log.exception("the assessment of processes failed (%s); it goes on, and this is said once", place)

    def turn(self, now: float) -> None:
        """Look at the processes if that is due, and judge one."""
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            with self.guarded("look"):
                self.look(now)
        with self.guarded("judge"):
            self.tick(now)

    # -- looking

    def look(self, now: float) -> None:
        """Bring together what the table shows with what the rings told, and forget who is long gone."""
        live = [feed for feed in self._feeds if feed.live]
        silent = [feed.key for feed in live if now - feed.began >= SILENT_S and not feed.record.tells("smaps", now)]
        rings = {feed.key: (feed.key.pid, feed.key.start_time, feed.role) for feed in live}
        views = self._memory.look(tuple(rings.values()), silent)  # may take long, so without the lock
        # One whose parent does not notice its end, as in a container without an init, stays in the table for good.
        views = [view for view in views if view.unread.get("status") != host.ENDED_REASON]
        with self.lock:
            for view in views:
                record = self._record_of(view)
                if record is not None:
                    record.see(view, now)
            for feed in live:
                feed.load.look(now)
            ended = self._forget({view.key for view in views}, now)
        for key in ended:
            for listener in self._listeners:
                with self.guarded("end"):
                    listener.ended(key, now)

    def _record_of(self, view: ProcessView) -> ProcessRecord | None:
        record = self._records.get(view.key)
        if record is None and view.ring is not None:
            record = self._records.get(view.ring)
        if record is None:
            if len(self._records) >= MOST_PROCESSES and not self._make_room():
                return None
            record = ProcessRecord(view.key, view.role, view.name)
        if view.ring is not None and view.ring != view.key:
            self._rename(view.ring, record)
        if view.key not in self._records or record.key != view.key:
            self._records.pop(record.key, None)
            self._judged.pop(record.key, None)
            record.key = view.key
            self._records[view.key] = record
        self._place(record, view.started)
        return record

    def _rename(self, ring: ProcessKey, record: ProcessRecord) -> None:
        """The process of a ring, which counts pids in a namespace of its own, was found in the table."""
        other = self._records.get(ring)
        if other is None or other is record or not any(feed.record is other for feed in self._feeds):
            return
        record.absorb(other)
        del self._records[ring]
        self._judged.pop(ring, None)
        for feed in self._feeds:
            if feed.record is other:
                feed.record = record

    def _place(self, record: ProcessRecord, started: float) -> None:
        if not record.started_ns:  # once: a counter whose start moves looks as if it began anew
            record.started = started
            record.started_ns = max(0, round((started + self._epoch_s) * 1e9))

    def _make_room(self) -> bool:
        gone = next((key for key, record in self._records.items() if record.ended is not None), None)
        if gone is None:
            return False
        self._drop(gone)
        return True

    def _forget(self, seen: Collection[ProcessKey], now: float) -> list[ProcessKey]:
        """Notice who has ended, and forget who did so long ago; who has ended now."""
        held = {id(feed.record) for feed in self._feeds if feed.live}
        ended = []
        for key, record in list(self._records.items()):
            if key in seen or id(record) in held:
                continue
            if record.ended is None:
                record.ended = now
                ended.append(key)
            elif now - record.ended > KEEP_ENDED_S:
                self._drop(key)
        return ended

    def _drop(self, key: ProcessKey) -> None:
        record = self._records.pop(key)
        self._judged.pop(key, None)
        self._feeds = [feed for feed in self._feeds if feed.live or feed.record is not record]

    # -- judging

    def tick(self, now: float) -> None:
        """Judge the process whose last verdict is the oldest, if it is older than ``JUDGE_S``."""
        due = [
            record
            for record in self._records.values()
            if record.ended is None and (record.judged is None or now - record.judged >= JUDGE_S)
        ]
        if not due:
            return
        record = min(due, key=lambda record: -1.0 if record.judged is None else record.judged)
        record.judged = now  # before it: one that cannot be judged must not keep the others waiting
        with self.lock:
            history = record.history(self._load_of(record, now))
        found = self._judge(history, now)
        with self.lock:
            self._judged[record.key] = Judged(record.key, _ends_of(history), found)
        for listener in self._listeners:
            with self.guarded("tell"):
                listener.judged(record.key, found, history, now)

    def _load_of(self, record: ProcessRecord, now: float) -> Mapping[str, Series]:
        """The load of the engines that a process works for: those of its deployment, or, if that is not known, its own.

        Who has no engine and is in no process table works for all the engines that are in none either.
        """
        of: object = record.root
        engines = [feed for feed in self._feeds if feed.role == ENGINE_CORE]
        if record.root is not None:
            engines = [feed for feed in engines if feed.record.root == record.root]
        else:
            own = [feed for feed in engines if feed.record is record]
            of = record.key if own else None
            engines = own or [feed for feed in engines if feed.record.root is None]
        at, known = self._loads.get(of, (0.0, {}))
        if of not in self._loads or now - at >= LOAD_S:
            self._loads = {key: value for key, value in self._loads.items() if now - value[0] < LOAD_S}
            known = load.combined([feed.load for feed in engines])
            self._loads[of] = (now, known)
        return known

    # -- what others ask

    @property
    def verdicts(self) -> Mapping[ProcessKey, Verdict]:
        """The latest verdict on each process, those that ended within ``KEEP_ENDED_S`` among them."""
        with self.lock:
            return {key: judged.verdict for key, judged in self._judged.items()}

    def judged(self) -> list[Judged]:
        """The latest verdict on each process that runs, and what it stands on in short."""
        with self.lock:
            return [found for key, found in self._judged.items() if self._records[key].ended is None]

    def histories(self) -> dict[ProcessKey, ProcessHistory]:
        """All that is known of each process that runs; it takes some 20 ms a process, and holds up nobody longer."""
        with self.lock:
            keys = [key for key, record in self._records.items() if record.ended is None]
        found = {}
        for key in keys:
            with self.lock:
                record = self._records.get(key)
                if record is not None:
                    found[key] = record.history(self._load_of(record, self._clock()))
        return found

    def states(self) -> list[tuple[ProcessState, Verdict | None]]:
        """What is known now of each process that runs, and the latest verdict on it."""
        with self.lock:
            now = self._clock()
            return [
                (record.state(now), self._judged[key].verdict if key in self._judged else None)
                for key, record in self._records.items()
                if record.ended is None
            ]

    def known(self) -> list[ProcessKey]:
        """The processes that run, and those that ended within ``KEEP_ENDED_S``."""
        with self.lock:
            return list(self._records)

    @contextlib.contextmanager
    def reading(self, key: ProcessKey) -> Iterator[ProcessRecord | None]:
        """What is kept of a process, None if nothing is; nobody writes into it meanwhile, so be quick."""
        with self.lock:
            yield self._records.get(key)

    def culprits(self, key: ProcessKey) -> set[str]:
        """The containers that the latest verdict on a process blames."""
        with self.lock:
            judged = self._judged.get(key)
        return {culprit.path for culprit in judged.verdict.culprits} if judged is not None else set()

    def kept(self, most_containers: int) -> list[Kept]:
        """Each process that was judged, with its largest containers and those that are to blame."""
        found = []
        for key in self.known():
            with self.reading(key) as record:
                judged = self._judged.get(key)
                if record is None or judged is None:
                    continue
                found.append(
                    Kept(
                        judged,
                        record.state(self._clock() if record.ended is None else record.ended),
                        record.patch_state,
                        record.usage,
                        record.largest(most_containers, self.culprits(key)),
                        record.ended,
                    )
                )
        return found

    def engine_feeds(self) -> list[EngineFeed]:
        """Each engine whose ring is or was followed."""
        with self.lock:
            return [
                EngineFeed((feed.key.pid, feed.ring), feed.record.key, feed.load)
                for feed in self._feeds
                if feed.role == ENGINE_CORE
            ]


def _ends_of(history: ProcessHistory) -> ProcessHistory:
    """Without what lies between, which is much."""
    memory = {name: _ends(series) for name, series in history.memory.items() if len(series.times)}
    limit = history.limit and replace(history.limit, usage=_ends(history.limit.usage))
    return replace(history, memory=memory, containers=(), load={}, limit=limit)


def _ends(series: Series) -> Series:
    ends = (0, -1) if len(series.times) > 1 else (0,)
    return Series(*(tuple(column[at] for at in ends) for column in (series.times, series.values, series.floors)))
