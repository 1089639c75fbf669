# SPDX-License-Identifier: Apache-2.0
"""The one clock of the sidecar: each turn takes what every ring has published to metrics, spans and the assessment."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix.ring.reader import RingError
from vllm_kvfix_sidecar.cursors import Cursor
from vllm_kvfix_sidecar.engines import ENDED, LIVE, Engine, Engines, trusted_owners
from vllm_kvfix_sidecar.metrics import EngineMetrics
from vllm_kvfix_sidecar.requests import RequestTracker, SpanIds

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from vllm_kvfix_sidecar.assessment import Assessment, Feed
    from vllm_kvfix_sidecar.deaths import Deaths
    from vllm_kvfix_sidecar.metrics import Metrics
    from vllm_kvfix_sidecar.requests import RequestRecord
    from vllm_kvfix_sidecar.spans import EngineSpans, SpanMaker

SCAN_S = 1.0
CURSOR_S = 1.0
PAUSE_S = 0.2  # each turn costs, and nobody looks at a span sooner
# Events of one ring in one turn, some 0.1 s: however much has piled up, no ring and no stop waits long.
MOST_EVENTS = 20_000
LAST_POLL_S = 2.0

_log = logging.getLogger(__name__)


class _Follower:
    """What is kept of an engine beside its ring."""

    def __init__(self, engine: Engine, metrics: EngineMetrics, spans: EngineSpans | None, feed: Feed | None) -> None:
        self.metrics = metrics
        self.feed = feed
        ids = SpanIds(engine.boot_id, engine.pid, engine.start_time, engine.path.name)
        self.tracker = RequestTracker(ids, of_process=feed.hear) if feed is not None else RequestTracker(ids)
        self.spans = spans
        self.written = engine.cursor
        self.written_at: float | None = None
        # (spans accepted so far, cursor): the cursor is safe once so many spans were exported or have failed.
        self.unsafe: deque[tuple[int, Cursor]] = deque()
        self.safe = engine.cursor
        self.settled = 0
        self.dropped = 0

    def reach(self, cursor: Cursor, accepted: int) -> None:
        """The ring was read so far, when the sink had accepted so many spans."""
        newest = self.unsafe[-1][1] if self.unsafe else self.safe
        if cursor == newest:
            return
        if self.unsafe and self.unsafe[-1][0] == accepted:
            self.unsafe.pop()
        self.unsafe.append((accepted, cursor))

    def settle(self, settled: int) -> bool:
        """So many spans were exported or have failed; whether that is more than before."""
        while self.unsafe and self.unsafe[0][0] <= settled:
            self.safe = self.unsafe.popleft()[1]
        before, self.settled = self.settled, settled
        return settled != before


class Pipeline:
    """From ring files to calls on the metrics and the span maker; see :meth:`poll`.

    A cursor is written when the spans of what it covers were exported, so that a sidecar that is killed tells them
    again, under the same ids, rather than never.
    """

    def __init__(  # noqa: PLR0913  # its parts
        self,
        folders: Sequence[Path],
        metrics: Metrics,
        spans: SpanMaker | None,
        *,
        assessment: Assessment | None = None,
        deaths: Deaths | None = None,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
        read_only: bool = False,
        foreign: bool = False,
    ) -> None:
        """Do nothing yet.

        Args:
            folders: Where rings lie.
            metrics: What is told of engines and requests.
            spans: Makes and hands on spans; None: no traces.
            assessment: Is told of processes, and turned; None: nobody asks what grows.
            deaths: Is told who lives and who has ended, and turned; None: nobody asks how they end.
            proc: Where a process table is mounted.
            clock: Steady seconds.
            read_only: Leave the cursors as they are: another sidecar's.
            foreign: Follow the rings of other users, too.
        """
        self.last_turn = clock()
        self.scanned = False
        self._finder = Engines(folders, proc, owners=None if foreign else trusted_owners(), read_only=read_only)
        self._read_only = read_only
        self._followers: dict[Engine, _Follower] = {}
        self._metrics = metrics
        self._spans = spans
        self._assessment = assessment
        self._deaths = deaths
        self._clock = clock
        self._next_scan = self.last_turn

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines that are known."""
        return tuple(engine for engine in self._finder.all if _is_engine(engine))

    @property
    def processes(self) -> Sequence[Engine]:
        """The other processes whose rings are followed."""
        return tuple(engine for engine in self._finder.all if not _is_engine(engine))

    @property
    def all(self) -> Sequence[Engine]:
        """Engines and other processes, those that ended included, as long as their rings are there."""
        return self._finder.all

    @property
    def followed(self) -> Sequence[tuple[Engine, RequestTracker]]:
        """Each engine core that is followed, and what is known of its requests."""
        followers = tuple(self._followers.items())
        return tuple((engine, follower.tracker) for engine, follower in followers if _is_engine(engine))

    @property
    def folders_readable(self) -> bool:
        """Whether the last scan could look into a folder."""
        return self._finder.folders_readable

    @property
    def refused(self) -> Mapping[Path, str]:
        """Why a file is not followed, for each such file."""
        return self._finder.refused

    def poll(self) -> int:
        """One turn: new rings, new frames, ended engines, cursors. Events consumed; no one ring's fault leaves it."""
        now = self._clock()
        if now >= self._next_scan:
            self._scan(now)
            self._next_scan = now + SCAN_S
        else:
            self._finder.look()
        consumed = sum(self._turn(engine, now) for engine in self._finder.all if not engine.closed)
        if self._spans is not None:
            self._metrics.spans.unsampled = self._spans.unsampled
        if self._assessment is not None:
            self._assessment.turn(now)
        if self._deaths is not None:
            self._deaths.turn(now)
        self.last_turn = self._clock()
        return consumed

    def run(self, stop: threading.Event) -> None:
        """Turn until told to stop."""
        while not stop.is_set():
            self.poll()
            if not any(engine.behind for engine in self._finder.all):
                stop.wait(PAUSE_S)

    def close(self) -> None:
        """Read what is left, for ``LAST_POLL_S`` at most, write cursors of all that was told, close the files."""
        deadline = self._clock() + LAST_POLL_S
        self._next_scan = self._clock()
        self.poll()
        while any(engine.behind for engine in self._finder.all) and self._clock() < deadline:
            self.poll()
        for engine in list(self._followers):
            if not engine.closed:
                self._write(engine, _cursor(engine), self._clock())
                engine.close()
        self._followers.clear()
        if self._deaths is not None:
            self._deaths.close(self._clock())

    def _scan(self, now: float) -> None:
        self._finder.scan(now)
        known = set(self._finder.all)
        self._followers = {engine: follower for engine, follower in self._followers.items() if engine in known}
        if self._deaths is not None:
            for engine, follower in self._followers.items():
                if engine.state == LIVE and not engine.closed:
                    self._deaths.lives(engine, follower.feed)
        self._metrics.refused_files = len(self._finder.refused)
        self._metrics.expire(now)
        self.scanned = True

    def _turn(self, engine: Engine, now: float) -> int:
        ended = engine.state == ENDED  # before reading: what is read then is all
        try:
            follower = self._followers.get(engine) or self._follow(engine)
            consumed = self._read(engine, follower)
        except (RingError, OSError) as error:
            self._give_up(engine, str(error), now)
            return 0
        if ended and not engine.behind:
            self._end(engine, follower, now)
        else:
            self._keep_cursor(engine, follower, now)
        follower.metrics.ring(engine.header, engine.lost, follower.tracker.malformed, engine.state)
        if follower.feed is not None:
            follower.feed.patch(engine.header.patch_state)
        return consumed

    def _follow(self, engine: Engine) -> _Follower:
        # Of another process than an engine nothing is shown under an engine's name.
        metrics = self._metrics.engine(engine.key) if _is_engine(engine) else EngineMetrics(engine.key)
        metrics.ended_s = None  # its ring may have been given up before
        spans = self._spans.engine(engine.pid, engine.engine_index, engine.vllm_version) if self._spans else None
        follower = self._followers[engine] = _Follower(engine, metrics, spans, self._feed(engine))
        if self._deaths is not None:
            self._deaths.lives(engine, follower.feed)
        return follower

    def _feed(self, engine: Engine) -> Feed | None:
        """Where its process's figures go; one that ended before we came has no present, and maybe another clock."""
        if self._assessment is None or engine.state == ENDED:
            return None
        role, ring = engine.header.role, engine.path.name
        with self._assessment.guarded("follow"):
            return self._assessment.follow(engine.pid, engine.start_time, role, ring, engine.vllm_version)
        return None

    def _read(self, engine: Engine, follower: _Follower) -> int:
        tracker, before, lost, feed = follower.tracker, engine.consumed, engine.lost, follower.feed
        step, config = tracker.step, tracker.config
        told = step
        events = 0
        for frame, replayed in engine.frames(MOST_EVENTS):
            if engine.lost != lost:
                lost = engine.lost
                tracker.gap()
            events += frame.events
            records = tracker.consume(frame.payload)
            if feed is not None and tracker.step is not None and tracker.step is not told:
                told = tracker.step
                feed.step(told)
            if records and not replayed:
                self._tell(engine, follower, records)
        if not engine.behind and engine.header.dropped != follower.dropped:
            # A frame was given up by the engine, before or after any of those read: all that live may be over.
            follower.dropped = engine.header.dropped
            tracker.gap()
        if engine.consumed != before:
            metrics = follower.metrics
            # First, so that nobody who asks meanwhile is told of steps and not of the ring that they came from.
            metrics.ring(engine.header, engine.lost, tracker.malformed, engine.state)
            if tracker.config is not None and tracker.config is not config:
                metrics.config(tracker.config)
            if tracker.step is not None and tracker.step is not step:
                metrics.step(tracker.step)
        return events

    def _tell(self, engine: Engine, follower: _Follower, records: Sequence[RequestRecord]) -> None:
        finished = follower.metrics.finished
        offset = engine.header.clock_offset_ns
        spans = follower.spans
        for record in records:
            span = spans.tell(record, offset) if spans is not None else None
            finished(record, record.end + offset, span)

    def _end(self, engine: Engine, follower: _Follower, now: float) -> None:
        """The engine is gone and its ring is read: what it left unfinished is over, too."""
        if engine.end():
            follower.tracker.gap()
        records = follower.tracker.abandon(engine.header.heartbeat_ns)
        self._tell(engine, follower, records)
        if _is_engine(engine):
            text = "engine %d of process %d has ended; it left %d requests"
            _log.info(text, engine.engine_index, engine.pid, len(records))
        else:
            _log.info("%s of process %d has ended", engine.header.role, engine.pid)
        self._write(engine, _cursor(engine)._replace(ended=True), now)
        engine.told = True
        if self._deaths is not None:
            self._deaths.ended(engine, follower.feed, now)
        engine.close()
        self._ended(engine, follower, now)

    def _give_up(self, engine: Engine, reason: str, now: float) -> None:
        self._write(engine, _cursor(engine), now)
        self._finder.give_up(engine, reason, now)
        if self._deaths is not None:
            self._deaths.forget(engine)
        self._ended(engine, self._followers.pop(engine, None), now)

    def _ended(self, engine: Engine, follower: _Follower | None, now: float) -> None:
        if _is_engine(engine):
            self._metrics.ended(engine.key, now)
        if follower is not None and follower.feed is not None:
            follower.feed.end()

    def _keep_cursor(self, engine: Engine, follower: _Follower, now: float) -> None:
        """Write how far the ring was told, as far as that is safe: when spans got out, else once a second."""
        accepted, settled = self._accounts()
        follower.reach(_cursor(engine), accepted)
        at_once = follower.settle(settled)
        due = follower.written_at is None or now - follower.written_at >= CURSOR_S
        if follower.safe != follower.written and (at_once or due):
            self._write(engine, follower.safe, now)

    def _accounts(self) -> tuple[int, int]:
        """(spans accepted by the sink, those of them that were exported or have failed)."""
        if self._spans is None:
            return 0, 0
        return self._spans.accepted, self._metrics.spans.exported + self._metrics.spans.failed

    def _write(self, engine: Engine, cursor: Cursor, now: float) -> None:
        if not self._read_only:
            engine.save(cursor)
        follower = self._followers.get(engine)
        if follower is not None:
            follower.written, follower.written_at = cursor, now


def _is_engine(engine: Engine) -> bool:
    return engine.header.role == ENGINE_CORE


def _cursor(engine: Engine) -> Cursor:
    return Cursor(max(engine.consumed, engine.cursor.events), engine.lost)
