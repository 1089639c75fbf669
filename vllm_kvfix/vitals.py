# SPDX-License-Identifier: Apache-2.0
"""Tells of this process's own memory and containers, a little at a time, from a thread of its own.

A thread, because nothing here belongs on the step path: a turn holds the interpreter for some 100 us at most, ten times
a second, mostly while the engine waits for its model. What is dear is rationed: a scope of figures is read again only
when its last reading has cost less than a thousandth of the time since.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from typing import TYPE_CHECKING, Protocol

from vllm_kvfix import events, faults, host, upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vllm_kvfix.census import Census

logger = logging.getLogger(upstream.LOGGER_NAME)

PAUSE_S = 0.1
FIRST_PAUSE_S = 0.025  # until containers have been counted twice, which is when a growth can first be seen
FIRST_ROUNDS = 2
CENSUS_S = 5.0  # from the beginning of a round of the census to that of the next
TURN_NS = 100_000
SHARE = 0.001
MOST_FAULTS = 10


class Sink(Protocol):
    """Where events go."""

    @property
    def largest(self) -> int:
        """Most words at a time."""

    def tell(self, words: array[int], count: int) -> bool:
        """Publish so many events; False: nothing can be told here any more."""


def _yield_interpreter() -> None:
    """Let a thread of vLLM's that waits for the interpreter have it."""
    time.sleep(0)


def _smaps() -> dict[str, int]:
    return host.smaps("self", pause=_yield_interpreter)


def _cgroup() -> dict[str, int]:
    return host.Cgroup.of("self").read()


# What is read, and the least seconds between two readings.
READERS: Mapping[str, tuple[Callable[[], dict[str, int]], float]] = {
    "status": (host.status, 1.0),
    "cgroup": (_cgroup, 5.0),
    "malloc": (host.malloc, 10.0),
    "python": (host.python, 30.0),  # some ms in which the engine waits for the interpreter
    "smaps": (_smaps, 30.0),
}


class Vitals:
    """What one process tells of itself; :meth:`turn` is one small piece of it."""

    def __init__(
        self,
        census: Census,
        readers: Mapping[str, tuple[Callable[[], dict[str, int]], float]] = READERS,
        clock: Callable[[], int] = time.monotonic_ns,
        meter: Callable[[], float] = time.thread_time,
    ) -> None:
        """``readers`` as ``READERS``; ``clock`` gives ns of the monotonic clock, ``meter`` seconds of work."""
        self._census = census
        self._clock = clock
        self._readers = [
            (scope, read, host.Budget(SHARE, least, lambda: clock() / 1e9, meter))
            for scope, (read, least) in readers.items()
        ]
        self._census_due = 0
        self._rounds = 0

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next turn."""
        return PAUSE_S if self._rounds >= FIRST_ROUNDS else min(PAUSE_S, FIRST_PAUSE_S)

    def turn(self) -> Sequence[events.ProcessEvent]:
        """Read one scope that is due, or else go on with the census; what there is to tell of it."""
        for scope, read, budget in self._readers:
            if budget.due():
                return (self._read(scope, read, budget),)
        if self._census.resting:
            now = self._clock()
            if now < self._census_due:
                return ()
            self._census_due = now + int(CENSUS_S * 1e9)
        told = self._census.turn(TURN_NS)
        self._rounds += bool(told) and isinstance(told[-1], events.Census)
        return told

    def _read(self, scope: str, read: Callable[[], dict[str, int]], budget: host.Budget) -> events.ProcessEvent:
        time_ns = self._clock()
        try:
            with budget.spending():
                return events.Figures(time_ns, scope, read())
        except host.UnreadableError as error:
            return events.Unread(time_ns, scope, str(error))


class Voice:
    """The thread that gives a process's vitals to the newest of its sinks, for as long as it has one."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._sinks: list[Sink] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._faults = 0

    def start(self, sink: Sink) -> None:
        """Tell ``sink``, in place of those before it; to be called in the process that shall be told of."""
        if sink in self._sinks or self._faults >= MOST_FAULTS:
            return
        self._sinks.append(sink)
        if self._thread is None or not self._thread.is_alive():
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._end,), name="vllm-kvfix-vitals", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Tell nobody any more."""
        self._sinks.clear()
        self._end.set()

    def _run(self, end: threading.Event) -> None:
        while self._sinks and not end.wait(self._vitals.pause_s):
            self._turn()

    def _turn(self) -> None:
        try:
            self._tell(self._vitals.turn())
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        faults.note("vitals", error)
        self._faults += 1
        if self._faults >= MOST_FAULTS:
            self.stop()
            logger.warning(
                "vllm-kvfix: no longer telling of this process's memory after %d errors of its own; vLLM is not "
                "affected. Please report the error above.",
                self._faults,
            )

    def _tell(self, told: Sequence[events.ProcessEvent]) -> None:
        sinks = self._sinks
        while told and sinks:
            sink = sinks[-1]
            if all(sink.tell(words, count) for words, count in frames(told, sink.largest)):
                return
            with contextlib.suppress(ValueError):  # all were given up meanwhile
                sinks.remove(sink)


def frames(told: Sequence[events.ProcessEvent], largest: int) -> Iterator[tuple[array[int], int]]:
    """The words of these events in pieces of ``largest`` words at most, each with its number of events."""
    words, count = array("Q"), 0
    for event in told:
        record = events.encode(event)
        if count and len(words) + len(record) > largest:
            yield words, count
            words, count = array("Q"), 0
        words.fromlist(record)
        count += 1
    if count:
        yield words, count
