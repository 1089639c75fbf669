# SPDX-License-Identifier: Apache-2.0
"""What the live page shows, as JSON: what there is now, and how it came to that.

``schema_version`` 1. What is not known is ``null`` or missing; never 0, NaN or infinite. Times are unix seconds.
:meth:`PageData.now`::

    {"schema_version": 1, "tool": "vllm-kvfix 0.2.0", "time_unix_s": 1796050000.0, "refresh_s": 2.0,
     "exit_code": 1, "answer": "EngineCore (pid 4242) leaks: ...", "notes": [],
     "ended": [], "not_followed": {},
     "processes": [
       {...all that vllm_kvfix_sidecar.report tells of a process, figures of this moment, and
        "key": "4242-1234567", "title": "EngineCore", "sentence": "...", "to_do": "...",
        "started_unix_s": 1796040000.0, "ended_unix_s": null,
        "containers": [{"path": "scheduler...", "entries": 1, "members": 1, "size_bytes": 8, "capacity_entries": null,
                        "added": 1, "removed": 0, "drain_ratio": 0.0, "orphans": 0, "orphan_age_s": null}],
        "gpus": [{"device": "GPU-...", "index": 0, "used_bytes": 1}]}],
     "engines": [
       {"key": "4242-1234567", "pid": 4242, "engine_index": 0, "vllm_version": "0.25.1", "patch_state": "refused",
        "state": "live", "pool": {"limit": 4096, "held": 100, "free": 3996, "cached": 0},
        "block_size_tokens": [16], "backlog": [267330],
        "requests": {"running": 8, "waiting": 0, "finished": {"length": 447}},
        "totals": {"allocated": 1, "reused": 1, "released": 1, "steps": 1, "scheduled_tokens": 1, "preemptions": 0,
                   "refusals": 0},
        "peak_blocks": {"bounds": [1, 2, 4], "counts": [0, 1, 5, 2]},
        "ring": {"published": 1, "dropped": 0, "lost": 0, "malformed": 0, "age_s": 0.1}}],
     "requests": [
       {"request_id": "cmpl-...", "engine_request_id": "cmpl-...-0a1b2c3d", "engine": "4242-1234567",
        "trace_id": "32 hex", "span_id": "16 hex", "state": "running", "blocks": 38, "peak_blocks": 38, "held_s": 1.2,
        "queued_s": 0.1, "preemptions": 0}],
     "sidecar": {"version": "0.2.0", "pid": 1, "uptime_s": 1.0, "rss_bytes": 1, "cpu_ratio": 0.01,
                 "listen": "127.0.0.1:9464", "folders": ["..."], "errors": 0,
                 "spans": {"exported": 1, "failed": 0, "dropped": 0, "unsampled": 0},
                 "events": {"exported": 1, "failed": 0, "dropped": 0}, "metric_exports": {"exported": 1, "failed": 0},
                 "destinations": {"traces": "none", "metrics": "none", "events": "none"},
                 "alive": true, "ready": true, "why_not": []},
     "marks": [{"time_unix_s": 1.0, "kind": "ended", "key": "4242-1234567", "text": "EngineCore (pid 4242) ended"}]}

Processes that ended stay for ``assessment.KEEP_ENDED_S``, behind those that run; the answer does not speak of them.
Containers are the ``MOST_CONTAINERS`` largest, those to blame among them; requests the ``MOST_REQUESTS`` that hold
most blocks. ``held_s`` counts from the first admission. :meth:`PageData.history` of all, and of one process::

    {"schema_version": 1, "time_unix_s": 1.0, "range_s": 3600.0,
     "processes": {"4242-1234567": {"memory": {"t": [1.0], "v": [1]}, "limit_usage": {"t": [], "v": []},
                                    "limit_bytes": 1}},
     "engines": {"4242-1234567": {"held": {"t": [], "v": []}, "running": {}, "waiting": {}, "backlog": {}}}}

    {..., "process": "4242-1234567", "series": {"status.rss": {"t": [], "v": []}},
     "containers": {"scheduler...": {"t": [], "entries": [], "size": [], "capacity": null}}}

``memory`` is anonymous memory with swap, which verdicts are about, else RSS. New keys may come in any release.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix import __version__
from vllm_kvfix_sidecar import ended, live_requests, page_history, report, report_text
from vllm_kvfix_sidecar.copying import copied
from vllm_kvfix_sidecar.page_history import MOST_CONTAINERS, Span, key_text
from vllm_kvfix_sidecar.readings import own_cost
from vllm_kvfix_sidecar.report import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vllm_kvfix.events import Container
    from vllm_kvfix_sidecar.assessment import Assessment, Kept
    from vllm_kvfix_sidecar.gpu_memory import GpuSnapshot
    from vllm_kvfix_sidecar.health import Health
    from vllm_kvfix_sidecar.marks import Marks
    from vllm_kvfix_sidecar.metrics import EngineMetrics, Metrics, SpanCounts
    from vllm_kvfix_sidecar.pipeline import Pipeline
    from vllm_kvfix_sidecar.process_table import ProcessKey
    from vllm_kvfix_sidecar.readings import Cost
    from vllm_kvfix_sidecar.report import Object, ProcessReport

REFRESH_S = 2.0
FRESH_S = 1.0
MOST_REQUESTS = 20
MOST_CACHED = 16
DEFAULT_RANGE_S, LEAST_RANGE_S, MOST_RANGE_S = 3600.0, 60.0, 604_800.0
DEFAULT_POINTS, LEAST_POINTS, MOST_POINTS = 300, 10, 1000
# Over how long the sidecar's share of a core is measured, at least.
_CPU_S = 10.0
# The wall clock may be set; by less than this it is only read unevenly, and nothing on the page need move.
_SET_S = 0.5


class BadQueryError(ValueError):
    """No such history can be made; the message says what can."""


class UnknownProcessError(LookupError):
    """Nothing is known of the process; the message says which are known."""


@dataclass(frozen=True)
class About:
    """What the sidecar was asked to do: where it listens, what folders it follows, where each signal goes."""

    listen: str = ""
    folders: Sequence[Path] = ()
    destinations: Mapping[str, str] = field(default_factory=dict)


class _Spent(NamedTuple):
    """CPU seconds of this process up to a time (s)."""

    time: float
    cpu_s: float


class _Fresh(NamedTuple):
    """An answer, and when it was made (s)."""

    time: float
    body: bytes


class PageData:
    """Answers any number of threads while the pipeline turns; each answer is made once in ``FRESH_S``."""

    def __init__(  # noqa: PLR0913, PLR0917  # all that the page shows
        self,
        pipeline: Pipeline,
        assessment: Assessment,
        metrics: Metrics,
        health: Health,
        marks: Marks,
        about: About,
        *,
        gpus: Callable[[], GpuSnapshot | None] = lambda: None,
        host_pids: bool = False,
        cost: Callable[[], Cost] = own_cost,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Ask nothing yet.

        Args:
            pipeline: Whose engines and requests are shown.
            assessment: What is known of processes.
            metrics: What is known of engines, and of what was exported.
            health: Whether the sidecar works.
            marks: What happened; it must be among the assessment's listeners.
            about: What else there is to say of the sidecar.
            gpus: Gives the last look at the GPUs.
            host_pids: Whether pids of processes are the host's, as NVML's are.
            cost: Reads what this process has cost.
            clock: Steady seconds; those of the assessment, and of the rings' times.
            wall: Seconds since the epoch.
        """
        self._pipeline = pipeline
        self._assessment = assessment
        self._metrics = metrics
        self._health = health
        self._marks = marks
        self._about = about
        self._gpus = gpus
        self._host_pids = host_pids
        self._cost = cost
        self._clock = clock
        self._wall = wall
        self._offset = wall() - clock()
        self._began = clock()
        self._spent = self._newer = _Spent(self._began, _cpu_s(cost()))
        self._lock = threading.Lock()
        self._bodies: OrderedDict[tuple[object, ...], _Fresh] = OrderedDict()

    # -- what the server asks

    def now_body(self) -> bytes:
        """:meth:`now` as it is sent; the same object as long as it is fresh."""
        return self._fresh(("now",), self.now)

    def history_body(self, process: str | None, range_s: float, points: int) -> bytes:
        """:meth:`history` as it is sent.

        Raises:
            BadQueryError, UnknownProcessError: As :meth:`history`.
        """
        return self._fresh(("history", process, range_s, points), lambda: self.history(process, range_s, points))

    def _fresh(self, key: tuple[object, ...], make: Callable[[], Object]) -> bytes:
        """What was made within ``FRESH_S``; others wait for who makes it, so that ten cost what one does."""
        with self._lock:
            found = self._bodies.get(key)
            if found is not None and 0 <= self._clock() - found.time < FRESH_S:
                return found.body
            body = json.dumps(make(), allow_nan=False, separators=(",", ":")).encode()
            self._bodies[key] = _Fresh(self._clock(), body)
            self._bodies.move_to_end(key)
            while len(self._bodies) > MOST_CACHED:
                self._bodies.popitem(last=False)
            return body

    # -- now

    def now(self) -> Object:
        """All that is known at this moment."""
        kept = self._assessment.kept(MOST_CONTAINERS)
        keys = {feed.ring: key_text(feed.key) for feed in self._assessment.engine_feeds()}
        return {
            **self._processes(kept),
            "refresh_s": REFRESH_S,
            "engines": [self._engine(engine, keys) for engine, _ in copied(self._metrics.shown)],
            "requests": self._requests(keys),
            "sidecar": self._sidecar(),
            "marks": [
                {"time_unix_s": self._unix(mark.time), "kind": mark.kind, "key": key_text(mark.key), "text": mark.text}
                for mark in self._marks.latest()
            ],
        }

    def _processes(self, kept: Sequence[Kept]) -> Object:
        """A report of those that run, with more of each, and those that have ended behind them."""
        of = [(_report(each), each) for each in kept]
        by_report = {id(process): each for process, each in of}
        gone = sorted((pair for pair in of if pair[1].ended is not None), key=lambda pair: -(pair[1].ended or 0))
        made = report.make(
            (process for process, each in of if each.ended is None),
            self._wall(),
            source=report.SIDECAR,
            not_followed={str(path): reason for path, reason in copied(self._pipeline.refused.items)},
            notes=self._health.notes(),
            ended=ended.sentences(copied(lambda: self._pipeline.all), round(self._wall() * 1e9)),
        )
        told = report.as_json(made, report_text.answer(made))
        gpus = self._gpus_by_pid()
        shown = [(process, by_report[id(process)]) for process in made.processes] + gone
        told["processes"] = [self._process(process, each, gpus) for process, each in shown]
        return told

    def _process(self, process: ProcessReport, kept: Kept, gpus: Mapping[int, list[Object]]) -> Object:
        state = kept.state
        return report.process_json(process) | {
            "key": key_text(state.key),
            "title": report_text.title(process.verdict),
            "sentence": report_text.sentence(process),
            "to_do": report_text.to_do(process),
            "started_unix_s": state.started_ns / 1e9 if state.started_ns else None,
            "ended_unix_s": self._unix(kept.ended) if kept.ended is not None else None,
            "containers": [_container(container) for container in kept.containers],
            "gpus": gpus.get(state.key.pid, []) if kept.ended is None else [],
        }

    def _gpus_by_pid(self) -> dict[int, list[Object]]:
        snapshot = self._gpus()
        if snapshot is None or not self._host_pids:  # else another process of the same number might be taken for it
            return {}
        indices = {device.uuid: device.index for device in snapshot.devices}
        found: dict[int, list[Object]] = {}
        for process in snapshot.processes:
            told = {"device": process.device, "index": indices.get(process.device), "used_bytes": process.used}
            found.setdefault(process.pid, []).append(told)
        return found

    def _engine(self, engine: EngineMetrics, keys: Mapping[tuple[int, str], str]) -> Object:
        header, step, config = engine.header, engine.last_step, engine.settings
        return {
            "key": _engine_key(engine, keys),
            "pid": engine.key.pid,
            "engine_index": engine.key.index,
            "vllm_version": header.vllm_version if header else None,
            "patch_state": header.patch_state if header else None,
            "state": engine.state,
            "pool": {
                "limit": config.blocks if config else None,
                "held": max(0, config.blocks - step.free) if config and step else None,
                "free": step.free if step else None,
                "cached": step.cached if step else None,
            },
            "block_size_tokens": [group.block_size for group in config.groups] if config else None,
            "backlog": list(step.backlog) if step else None,
            "requests": {
                "running": step.running if step else None,
                "waiting": step.waiting if step else None,
                "finished": {reason: count for reason, count in engine.finished_by_reason.items() if count},
            },
            "totals": step
            and {
                "allocated": step.new,
                "reused": step.reused,
                "released": step.released,
                "steps": step.steps,
                "scheduled_tokens": step.tokens,
                "preemptions": step.preemptions,
                "refusals": step.refusals,
            },
            "peak_blocks": {"bounds": list(engine.peak.bounds), "counts": list(engine.peak.counts)},
            "ring": {
                "published": header.events if header else None,
                "dropped": header.dropped if header else None,
                "lost": engine.lost,
                "malformed": engine.malformed,
                "age_s": round(max(0.0, self._clock() - header.heartbeat_ns / 1e9), 3) if header else None,
            },
        }

    def _requests(self, keys: Mapping[tuple[int, str], str]) -> list[Object]:
        followed = [
            (keys.get((engine.pid, engine.key.ring), f"{engine.pid}-{engine.start_time}"), tracker)
            for engine, tracker in copied(lambda: self._pipeline.followed)
        ]
        return live_requests.most_held(followed, self._clock(), MOST_REQUESTS)

    def _sidecar(self) -> Object:
        alive, ready = self._health.alive(), self._health.ready()
        now, cost = self._clock(), self._cost()
        cpu_s = _cpu_s(cost)
        share = (cpu_s - self._spent.cpu_s) / (now - self._spent.time) if now > self._spent.time else None
        if now - self._newer.time >= _CPU_S:
            self._spent, self._newer = self._newer, _Spent(now, cpu_s)
        exports = self._metrics.exports
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(now - self._began, 1),
            "rss_bytes": cost.resident,
            "cpu_ratio": round(share, 4) if share is not None else None,
            "listen": self._about.listen,
            "folders": [str(folder) for folder in self._about.folders],
            "errors": self._assessment.errors,
            "spans": _counts(self._metrics.spans) | {"unsampled": self._metrics.spans.unsampled},
            "events": _counts(self._metrics.events),
            "metric_exports": {"exported": exports.exported, "failed": exports.failed},
            "destinations": dict(self._about.destinations),
            "alive": alive.good,
            "ready": ready.good,
            "why_not": [str(answer.body["status"]) for answer in (alive, ready) if not answer.good],
        }

    # -- history

    def history(
        self, process: str | None = None, range_s: float = DEFAULT_RANGE_S, points: int = DEFAULT_POINTS
    ) -> Object:
        """What was kept of the last ``range_s`` seconds, of all processes, or more of one, that is named by its key.

        Raises:
            BadQueryError: Range or points are none that can be had.
            UnknownProcessError: There is no such process (any more).
        """
        if not LEAST_RANGE_S <= range_s <= MOST_RANGE_S:
            raise BadQueryError(f"range is {LEAST_RANGE_S:.0f} to {MOST_RANGE_S:.0f} seconds")
        if not LEAST_POINTS <= points <= MOST_POINTS:
            raise BadQueryError(f"points are {LEAST_POINTS} to {MOST_POINTS}")
        now = self._clock()
        span = Span(now - range_s, now, points, self._unix(0.0))
        told: Object = {"schema_version": SCHEMA_VERSION, "time_unix_s": self._wall(), "range_s": range_s}
        if process is None:
            engines = {(engine.key.pid, engine.key.ring): engine for engine in copied(self._metrics.engines)}
            return told | page_history.overview(self._assessment, engines, span)
        found = page_history.of_process(self._assessment, self._key(process), span)
        if found is None:
            raise self._unknown()
        return told | found

    def _key(self, text: str) -> ProcessKey:
        for key in self._assessment.known():
            if key_text(key) == text:
                return key
        raise self._unknown()

    def _unknown(self) -> UnknownProcessError:
        known = ", ".join(map(key_text, self._assessment.known()[:10]))
        return UnknownProcessError(f"no such process is known; known are: {known or 'none'}")

    def _unix(self, time: float) -> float:
        offset = self._wall() - self._clock()
        if abs(offset - self._offset) > _SET_S:
            self._offset = offset
        return time + self._offset


def _cpu_s(cost: Cost) -> float:
    return cost.user_s + cost.system_s


def _counts(counts: SpanCounts) -> dict[str, int]:
    with counts.lock:
        return {"exported": counts.exported, "failed": counts.failed, "dropped": counts.dropped}


def _engine_key(engine: EngineMetrics, keys: Mapping[tuple[int, str], str]) -> str:
    """Its process's; of one that ended before we came, as its ring counts."""
    header = engine.first_header
    own = f"{engine.key.pid}-{header.start_time if header else 0}"
    return keys.get((engine.key.pid, engine.key.ring), own)


def _report(kept: Kept) -> ProcessReport:
    """What was judged, with the figures of now."""
    state, found = kept.state, report.of(kept.judged.history, kept.judged.verdict)
    figures = {f"{scope}.{name}": value for scope, told in state.figures.items() for name, value in told.values.items()}
    usage = found.usage
    if kept.usage is not None and math.isfinite(kept.usage[0]):
        usage = report.Usage(*kept.usage)
    return replace(found, figures=figures, usage=usage, unread=state.unread, patch_state=kept.patch_state)


def _container(container: Container) -> Object:
    return {
        "path": container.path,
        "entries": container.length,
        "members": container.members,
        "size_bytes": container.size,
        "capacity_entries": container.capacity,
        "added": container.added,
        "removed": container.removed,
        "drain_ratio": round(container.removed / container.added, 4) if container.added else None,
        "orphans": container.orphans,
        "orphan_age_s": round(container.orphan_age / 1e9, 1) if container.orphans else None,
    }
