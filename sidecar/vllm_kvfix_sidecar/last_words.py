# SPDX-License-Identifier: Apache-2.0
"""What a ring holds of the last seconds of a process, on that process's own clock.

Nothing of it is believed unchecked: a ring may be cut, damaged, or written by somebody who means ill. What it holds is
bounded by the file's size, so all kept here is, too.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvfix.events import Admitted, Figures, Preempted
from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix.ring.reader import RingError, RingReader
from vllm_kvfix_sidecar import deployments, report, verdict
from vllm_kvfix_sidecar.details import blocks_of
from vllm_kvfix_sidecar.load import EngineLoad
from vllm_kvfix_sidecar.oom import Use
from vllm_kvfix_sidecar.process_record import ProcessRecord
from vllm_kvfix_sidecar.process_table import ProcessKey
from vllm_kvfix_sidecar.processes import boot_id_of, process_runs
from vllm_kvfix_sidecar.requests import ENGINE_ENDED, RequestTracker, SpanIds
from vllm_kvfix_sidecar.verdict import Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from vllm_kvfix.events import Census, Config, Container, Step
    from vllm_kvfix.ring.reader import Header
    from vllm_kvfix_sidecar.observed import ProcessHistory, Series
    from vllm_kvfix_sidecar.report import ProcessReport
    from vllm_kvfix_sidecar.requests import RequestRecord

DEFAULT_LAST_S = 10.0
MOST_ROWS = 30
PROC = Path("/proc")
LIVE, ENDED, UNKNOWN = "live", "ended", "unknown"
WAITING, RUNNING, PREEMPTED, KEPT = "waiting", "running", "preempted", "blocks kept"
# What is told of a time after the last sign of life by more than this is not of this process.
_LATE_NS = 2 * 10**9
_STALLS = "psi_full_us"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Row(NamedTuple):
    """What happened in one piece of the last seconds, which ended at ``time`` (ns): the state then, and the sums."""

    time: int
    seconds: float
    steps: int
    tokens: int
    running: int
    waiting: int
    free: int


class Grown(NamedTuple):
    """A figure, when the ring begins and at the end, and the seconds between."""

    first: float
    last: float
    seconds: float


@dataclass(frozen=True)
class Proof:
    """Whether a process has ended: ``LIVE``, ``ENDED`` or ``UNKNOWN``; and the sentences that say how that is known."""

    state: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Holding:
    """A request that was not over: its state at the end, and the blocks that it held, as far as is known."""

    record: RequestRecord
    state: str
    blocks: int


@dataclass(frozen=True)
class LastWords:
    """All that the ring says; times in ns of the process's monotonic clock.

    ``last``: the last sign of life. ``rows``: the last ``seconds``, the oldest first. ``unknown_requests``: of whose
    arrival the ring knows nothing any more. ``process``: figures and verdict at the end. ``grown`` by figure.
    """

    path: Path
    size: int
    header: Header
    proof: Proof
    seconds: float
    last: int
    config: Config | None
    last_step: Step | None
    rows: tuple[Row, ...]
    process: ProcessReport
    told_at: Mapping[str, float]
    grown: Mapping[str, Grown]
    containers: tuple[Container, ...]
    census: Census | None
    requests: tuple[Holding, ...]
    unknown_requests: int
    use: Use | None
    lost: int
    malformed: int
    notes: tuple[str, ...] = ()

    def unix_ns(self, time_ns: int) -> int:
        """A time of the process's clock, as unix time."""
        return max(0, time_ns + self.header.clock_offset_ns)

    @property
    def started_unix_ns(self) -> int:
        """When the process started; later by as long as the machine slept since its boot."""
        return self.unix_ns(self.header.start_time * 10**9 // _TICKS_PER_S)

    @property
    def end_ns(self) -> int:
        """When it said that it ends, else its last sign of life."""
        said = self.header.end_ns
        return said if self.last <= said <= self.last + 60 * 10**9 else self.last


def of(
    path: Path,
    *,
    seconds: float = DEFAULT_LAST_S,
    proc: Path = PROC,
    owners: Collection[int] | None = None,
    judge: Callable[[ProcessHistory, float], Verdict] = verdict.judge,
) -> LastWords:
    """Read a ring to its end.

    Args:
        path: The ring.
        seconds: How much of the end is told step by step.
        proc: Where a process table is mounted.
        owners: As of :class:`RingReader`.
        judge: Makes a verdict of a history and a time.

    Raises:
        RingError: It is no ring, or it cannot be read; the message says why.
        OSError: It cannot be opened.
    """
    reader = RingReader(path, owners)
    try:
        proof = prove(reader, proc)
        heard = _Heard(reader, seconds)
        return heard.words(proof, judge)
    finally:
        reader.close()


def prove(reader: RingReader, proc: Path) -> Proof:
    """Whether the process of a ring has ended."""
    header, gone = reader.header, reader.writer_is_gone()
    if gone is False:
        return Proof(LIVE, ("a process holds the lock on the ring",))
    said = ["no process holds the lock on the ring" if gone else "the ring's filesystem has no locks"]
    boot_id = boot_id_of(proc)
    if boot_id is not None and any(header.boot_id) and header.boot_id != boot_id:
        return Proof(ENDED, (*said, "the machine was started anew since"))
    if process_runs(proc, header.pid, header.start_time):
        return Proof(LIVE, (*said, f"but process {header.pid} runs, and started when the ring says"))
    said.append(f"no process {header.pid} that started when the ring says runs here")
    return Proof(ENDED if gone else UNKNOWN, tuple(said))


class _Heard:
    """Takes all that a ring holds."""

    def __init__(self, reader: RingReader, seconds: float) -> None:
        header = self._header = reader.header
        self._reader = reader
        self._seconds = seconds
        name = deployments.NAMES.get(header.role, header.role)
        self._record = ProcessRecord(ProcessKey(header.pid, header.start_time), header.role, name)
        self._record.started = header.start_time / _TICKS_PER_S
        self._record.adopt(reader.path.name, header.vllm_version)
        self._record.patch_state = header.patch_state
        self._load = EngineLoad()
        self._steps: deque[Step] = deque()
        self._stalls: deque[tuple[int, int]] = deque()
        ids = SpanIds(header.boot_id, header.pid, header.start_time, reader.path.name)
        self._tracker = RequestTracker(ids, of_process=self._of_process)
        self._notes: list[str] = []
        self._read()

    def _is_past(self, time_ns: int) -> bool:
        return time_ns <= self._header.heartbeat_ns + _LATE_NS

    def _of_process(self, event: Any) -> None:
        if not self._is_past(event.time):
            return
        self._record.hear(event)
        if isinstance(event, Figures) and _STALLS in event.values:
            self._stalls.append((event.time, event.values[_STALLS]))

    def _read(self) -> None:
        tracker, lost, told = self._tracker, 0, None
        try:
            for frame in self._reader.poll():
                if self._reader.lost != lost:
                    lost = self._reader.lost
                    tracker.gap()
                tracker.consume(frame.payload)
                if tracker.step is not None and tracker.step is not told:
                    told = tracker.step
                    self._step(told)
        except RingError as error:  # cut while it was read: what was read stands
            self._notes.append(str(error))
        self._header = self._reader.header

    def _step(self, step: Step) -> None:
        if not self._is_past(step.time) or (self._steps and step.time < self._steps[-1].time):
            return
        self._load.take(step)
        self._steps.append(step)
        oldest = step.time - int(self._seconds * 1e9)
        while len(self._steps) > 2 and self._steps[1].time <= oldest:  # noqa: PLR2004  # one before the last seconds stays
            self._steps.popleft()

    def words(self, proof: Proof, judge: Callable[[ProcessHistory, float], Verdict]) -> LastWords:
        header, record, tracker = self._header, self._record, self._tracker
        last = header.heartbeat_ns
        at = last / 1e9
        self._load.look(at)
        history = record.history(self._load.series() if header.role == ENGINE_CORE else {})
        process = report.of(history, self._judged(history, at, judge))
        state = record.state(at)
        live = tracker.live
        requests = [_holding(found) for found in tracker.abandon(last)]
        return LastWords(
            path=self._reader.path,
            size=self._reader.found.st_size,
            header=header,
            proof=proof,
            seconds=self._seconds,
            last=last,
            config=tracker.config,
            last_step=self._steps[-1] if self._steps else None,
            rows=tuple(_rows(list(self._steps), self._seconds)),
            process=process,
            told_at={scope: told.time for scope, told in state.figures.items()},
            grown=dict(_grown(history)),
            containers=state.containers,
            census=state.census,
            requests=tuple(sorted(requests, key=lambda found: (-found.blocks, found.record.number))),
            unknown_requests=live - len(requests),
            use=self._use(history, at),
            lost=self._reader.lost,
            malformed=tracker.malformed,
            notes=tuple(self._notes),
        )

    def _judged(self, history: ProcessHistory, at: float, judge: Callable[[ProcessHistory, float], Verdict]) -> Verdict:
        try:
            return judge(history, at)
        except Exception as error:  # noqa: BLE001  # figures that no process ever had; the rest is worth telling
            self._notes.append(f"The growth could not be judged: {error!r}.")
            return Verdict(history.pid, history.role, history.name, Kind.STEADY, evidence=("it could not be judged",))

    def _use(self, history: ProcessHistory, at: float) -> Use | None:
        limit = history.limit
        if limit is None or not limit.usage.times:
            return None
        return replace(use_of(limit.limit, limit.usage, limit.of, at), stalled_s=self._stalled())

    def _stalled(self) -> float | None:
        if not self._stalls:
            return None
        end, total = self._stalls[-1]
        before = [count for time, count in self._stalls if time <= end - int(self._seconds * 1e9)]
        first = before[-1] if before else self._stalls[0][1]
        return max(0, total - first) / 1e6


def use_of(limit: float, usage: Series, of: str, at: float) -> Use:
    """How much was used last, and would have been at ``at``."""
    time, value = usage.times[-1], usage.values[-1]
    earlier = [(then, was) for then, was in zip(usage.times, usage.values, strict=True) if time - 30 <= then < time]
    slope = max(0.0, (value - earlier[0][1]) / (time - earlier[0][0])) if earlier else 0.0
    age = max(0.0, at - time)
    return Use(value, limit, of, age, value + slope * min(age, 60.0))


def _grown(history: ProcessHistory) -> Iterator[tuple[str, Grown]]:
    for name, series in history.memory.items():
        if series.times:
            yield name, Grown(series.values[0], series.values[-1], series.times[-1] - series.times[0])


def _rows(steps: list[Step], seconds: float) -> Iterator[Row]:
    """The last seconds in pieces of a second or more, ``MOST_ROWS`` at most; none of a piece that had no step."""
    if len(steps) < 2:  # noqa: PLR2004  # a difference takes two
        return
    width = max(1.0, seconds / MOST_ROWS)
    end, before = steps[-1].time, steps[0]
    piece: Step | None = None
    for step in steps[1:]:
        if piece is not None and _piece(end, step, width) != _piece(end, piece, width):
            yield _row(before, piece)
            before, piece = piece, None
        if end - step.time <= seconds * 1e9:
            piece = step
        else:
            before = step
    if piece is not None:
        yield _row(before, piece)


def _piece(end: int, step: Step, width: float) -> int:
    return int((end - step.time) // int(width * 1e9))


def _row(before: Step, step: Step) -> Row:
    return Row(
        step.time,
        (step.time - before.time) / 1e9,
        max(0, step.steps - before.steps),
        max(0, step.tokens - before.tokens),
        step.running,
        step.waiting,
        step.free,
    )


def _holding(record: RequestRecord) -> Holding:
    if record.reason != ENGINE_ENDED:  # it was over, and a KV connector kept its blocks
        return Holding(record, KEPT, record.peak_blocks)
    state, blocks = WAITING, 0
    for detail in record.details:
        if isinstance(detail, Preempted):
            state, blocks = PREEMPTED, 0
        else:
            if isinstance(detail, Admitted):
                state = RUNNING
            blocks += sum(map(sum, blocks_of(detail)))
    return Holding(record, state, blocks)
