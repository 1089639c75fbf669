# SPDX-License-Identifier: Apache-2.0
"""What is known of all processes at one moment, as one object that can be sent, and read again by who trusts nobody.

The JSON form, ``schema_version`` 1. What is not known is ``null`` or missing; never 0, NaN or infinite::

    {"schema_version": 1, "tool": "vllm-kvfix 0.2.0", "source": "sidecar", "time_unix_s": 1796050000.0,
     "exit_code": 1, "answer": "EngineCore (pid 4242) leaks: ...",
     "notes": ["..."], "ended": ["..."], "not_followed": {"/tmp/vllm-kvfix-0/1.ring": "why this file is not followed"},
     "processes": [
       {"pid": 4242, "role": "engine core", "name": "VLLM::EngineCore", "vllm_version": "0.25.1",
        "patch_state": "refused", "watched_s": 7200.0,
        "memory": {"status": {"rss_bytes": 1, "anon_bytes": 1, "threads_count": 9}, "smaps": {"heap_bytes": 1}},
        "limit": {"limit_bytes": 17179869184, "usage_bytes": 15633680957, "of": "cgroup"},
        "unread": {"malloc": "why this could not be read"},
        "verdict": {
          "kind": "unbounded growth", "alarming": true, "window_s": 7200.0, "category": "heap",
          "slope_bytes_per_hour": {"low": 9.1e7, "best": 9.2e7, "high": 9.3e7},
          "bytes_per": {"request": 154.2}, "follows": "request", "explained_ratio": 0.98,
          "time_to_limit_s": {"low": 267840.0, "best": 302400.0, "high": null},
          "culprits": [{"path": "scheduler...", "bytes_per_hour": 9.2e7, "bytes_per": {"request": 154.2},
                        "follows": "request", "capacity_entries": null, "full_bytes": null, "full_in_s": null,
                        "why": "..."}],
          "evidence": ["..."],
          "remedy": {"action": "...", "issue": "https://...", "fixed_in": "0.26.0"}}}]}

``kind`` is a value of :class:`~vllm_kvfix_sidecar.verdict.Kind`; ``memory`` has the names of
``vllm_kvfix.events.SCOPES`` with their unit behind them; ``high`` is ``null`` where an interval has no end. New keys
may come in any release of one schema version.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_kvfix import __version__
from vllm_kvfix.events import SCOPES
from vllm_kvfix.ring.layout import PATCH_STATES
from vllm_kvfix_sidecar.remedies import Remedy
from vllm_kvfix_sidecar.verdict import Culprit, Interval, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeVar

    from vllm_kvfix_sidecar.observed import ProcessHistory

    T = TypeVar("T")

SCHEMA_VERSION = 1
TOOL = f"vllm-kvfix {__version__}"
NOTHING_ALARMING, ALARMING, CANNOT_TELL = 0, 1, 2
SIDECAR, WATCH = "sidecar", "watch"
# Less than that says nothing of growth, whatever the figures did.
SHORTEST_S = 60.0
MOST_PROCESSES = 1024
MOST_PARTS = 256
LONGEST_TEXT = 2000
NO_PATCH_STATE = PATCH_STATES[0]
_PLAIN_UNITS = ("_count", "_us")
_BYTES = "_bytes"
# From the gravest on: what an answer begins with.
GRAVITY = (Kind.UNBOUNDED, Kind.UNEXPLAINED, Kind.RETAINED, Kind.BOUNDED, Kind.WARMING, Kind.STEADY)

Object: TypeAlias = "dict[str, Any]"


class MalformedReportError(ValueError):
    """Something is no report; the message says where, and what to do where that is known."""


@dataclass(frozen=True)
class Usage:
    """What a process's memory counts against: ``limit`` and ``usage`` in bytes, of the ``of`` (cgroup, host)."""

    limit: float
    usage: float | None = None
    of: str = "cgroup"

    @property
    def share(self) -> float | None:
        """The used part of the limit."""
        return None if self.usage is None or self.limit <= 0 else self.usage / self.limit


@dataclass(frozen=True)
class ProcessReport:
    """One process: the verdict and the latest figures (``SCOPE.FIGURE``); ``watched_s``: seconds they go back."""

    verdict: Verdict
    figures: Mapping[str, int] = field(default_factory=dict)
    usage: Usage | None = None
    unread: Mapping[str, str] = field(default_factory=dict)
    vllm_version: str = ""
    patch_state: str = NO_PATCH_STATE
    watched_s: float = 0.0

    @property
    def memory(self) -> int | None:
        """Bytes of anonymous memory, swapped ones included, which is what verdicts are about; None: not readable."""
        anon = self.figures.get("status.anon")
        return None if anon is None else anon + self.figures.get("status.swap", 0)

    @property
    def is_readable(self) -> bool:
        """Whether any figure tells how large the process is."""
        return any(name in self.figures for name in ("status.anon", "status.rss", "smaps.rss"))

    @property
    def has_ring(self) -> bool:
        """Whether the process tells of itself; else neither its containers nor its load are known."""
        return bool(self.vllm_version) or self.patch_state != NO_PATCH_STATE

    @property
    def order(self) -> tuple[int, float, float]:
        """Sorts the gravest first, among them who reaches the limit first, then who grows fastest."""
        verdict = self.verdict
        left = verdict.time_to_limit_s.best if verdict.time_to_limit_s else math.inf
        return GRAVITY.index(verdict.kind), left, -verdict.slope.best if verdict.slope else 0.0


@dataclass(frozen=True)
class Report:
    """All that is known, the gravest verdict first.

    ``not_followed``: files that were refused, and why; ``notes``: sentences about the report itself; ``ended``: of the
    processes that ended in the last minutes.
    """

    processes: tuple[ProcessReport, ...]
    time_unix_s: float
    source: str = WATCH
    not_followed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tool: str = TOOL
    ended: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """``NOTHING_ALARMING``, ``ALARMING`` or ``CANNOT_TELL``."""
        if any(process.verdict.alarming for process in self.processes):
            return ALARMING
        if not any(process.is_readable for process in self.processes) or self.watched_s < SHORTEST_S:
            return CANNOT_TELL
        return NOTHING_ALARMING

    @property
    def watched_s(self) -> float:
        """The seconds over which the best known process was watched."""
        return max((process.watched_s for process in self.processes), default=0.0)


def make(  # noqa: PLR0913  # a report's parts
    processes: Iterable[ProcessReport],
    time_unix_s: float,
    *,
    source: str = WATCH,
    not_followed: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
    ended: tuple[str, ...] = (),
) -> Report:
    """The report of some processes; no more of anything than can be read again."""
    processes = sorted(processes, key=lambda process: process.order)
    refused = dict(islice((not_followed or {}).items(), MOST_PARTS))
    return Report(tuple(processes[:MOST_PROCESSES]), time_unix_s, source, refused, notes, ended=ended)


def of(history: ProcessHistory, verdict: Verdict) -> ProcessReport:
    """What is to be reported of one process."""
    known = {name: series for name, series in history.memory.items() if series.times}
    limit = history.limit
    usage = None
    if limit is not None and math.isfinite(limit.limit):
        usage = Usage(limit.limit, limit.usage.values[-1] if limit.usage.values else None, limit.of)
    return ProcessReport(
        verdict=verdict,
        figures={name: int(series.values[-1]) for name, series in known.items()},
        usage=usage,
        unread=dict(history.unread),
        vllm_version=history.vllm_version,
        patch_state=history.patch_state,
        watched_s=max((series.times[-1] - series.times[0] for series in known.values()), default=0.0),
    )


def as_json(report: Report, answer: str) -> Object:
    """The JSON form; ``answer``: its first line in plain words."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": report.tool,
        "source": report.source,
        "time_unix_s": report.time_unix_s,
        "exit_code": report.exit_code,
        "answer": answer,
        "notes": list(report.notes),
        "ended": list(report.ended),
        "not_followed": dict(report.not_followed),
        "processes": [process_json(process) for process in report.processes],
    }


def process_json(process: ProcessReport) -> Object:
    """The JSON form of one process."""
    verdict, usage = process.verdict, process.usage
    return {
        "pid": verdict.pid,
        "role": verdict.role,
        "name": verdict.name,
        "vllm_version": process.vllm_version,
        "patch_state": process.patch_state,
        "watched_s": process.watched_s,
        "memory": _memory_json(process.figures),
        "limit": usage and {"limit_bytes": usage.limit, "usage_bytes": _finite(usage.usage), "of": usage.of},
        "unread": dict(process.unread),
        "verdict": _verdict_json(verdict),
    }


def _memory_json(figures: Mapping[str, int]) -> Object:
    told: Object = {}
    for name, value in figures.items():
        scope, _, figure = name.partition(".")
        told.setdefault(scope, {})[_with_unit(figure)] = value
    return told


def _with_unit(figure: str) -> str:
    return figure if figure.endswith(_PLAIN_UNITS) else figure + _BYTES


def _verdict_json(verdict: Verdict) -> Object:
    remedy = verdict.remedy
    return {
        "kind": verdict.kind.value,
        "alarming": verdict.alarming,
        "window_s": verdict.window_s,
        "category": verdict.category,
        "slope_bytes_per_hour": _interval_json(verdict.slope),
        "bytes_per": None if verdict.per is None else _numbers_json(verdict.per),
        "follows": verdict.follows,
        "explained_ratio": _finite(verdict.explained),
        "time_to_limit_s": _interval_json(verdict.time_to_limit_s),
        "culprits": [_culprit_json(culprit) for culprit in verdict.culprits[:MOST_PARTS]],
        "evidence": list(verdict.evidence[:MOST_PARTS]),
        "remedy": remedy and {"action": remedy.action, "issue": remedy.issue, "fixed_in": remedy.fixed_in},
    }


def _culprit_json(culprit: Culprit) -> Object:
    return {
        "path": culprit.path,
        "bytes_per_hour": _finite(culprit.bytes_per_hour),
        "bytes_per": _numbers_json(culprit.per),
        "follows": culprit.follows,
        "capacity_entries": culprit.capacity,
        "full_bytes": _finite(culprit.full_bytes),
        "full_in_s": _finite(culprit.full_in_s),
        "why": culprit.why,
    }


def _interval_json(interval: Interval | None) -> Object | None:
    if interval is None:
        return None
    return {"low": _finite(interval.low), "best": _finite(interval.best), "high": _finite(interval.high)}


def _numbers_json(numbers: Mapping[str, float]) -> Object:
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def parse(data: bytes) -> Report:
    """The report that somebody sent; what is in it may still hold any character, and is not to be printed as it is.

    Raises:
        MalformedReportError: It is no JSON, or no report that this release can read.
    """
    told = read_object(data)
    processes = _list(told, "processes", read_process, MOST_PROCESSES)
    return Report(
        processes=tuple(sorted(processes, key=lambda process: process.order)),
        time_unix_s=_number(told, "time_unix_s"),
        source=_text(told, "source"),
        not_followed=_texts(told, "not_followed"),
        notes=tuple(_list(told, "notes", _as_text)),
        tool=_text(told, "tool"),
        # Of a sidecar from before it told of that: nothing.
        ended=tuple(_list(told, "ended", _as_text)) if "ended" in told else (),
    )


def read_object(data: bytes) -> Object:
    """An object of this schema; all in it is still to be checked.

    Raises:
        MalformedReportError: It is none.
    """
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedReportError(f"what came is no JSON: {error}") from error
    told = _object(told, "the whole")
    version = told.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise MalformedReportError(
            f"the report has schema version {str(version)[:20]!r}, this command knows {SCHEMA_VERSION}; "
            "use the same release of vllm-kvfix as the sidecar"
        )
    return told


def read_process(told: object) -> ProcessReport:
    """A process of a report.

    Raises:
        MalformedReportError: It is none.
    """
    process = _object(told, "a process")
    usage = process.get("limit")
    return ProcessReport(
        verdict=_read_verdict(process),
        figures=_read_memory(process),
        usage=None if usage is None else _read_usage(_object(usage, "limit")),
        unread=_texts(process, "unread"),
        vllm_version=_text(process, "vllm_version"),
        patch_state=_text(process, "patch_state"),
        watched_s=_number(process, "watched_s"),
    )


def _read_usage(told: Object) -> Usage:
    return Usage(_number(told, "limit_bytes"), _maybe_number(told, "usage_bytes"), _text(told, "of"))


def _read_memory(process: Object) -> dict[str, int]:
    """The figures that this release knows."""
    found = {}
    memory = _object(process.get("memory"), "memory")
    for scope, figures in SCOPES.items():
        values = _object(memory.get(scope, {}), scope)
        for figure in figures:
            value = _maybe_number(values, _with_unit(figure))
            if value is not None:
                found[f"{scope}.{figure}"] = int(value)
    return found


def _read_verdict(process: Object) -> Verdict:
    told = _object(process.get("verdict"), "verdict")
    kinds = {kind.value: kind for kind in Kind}
    kind = _text(told, "kind")
    if kind not in kinds:
        raise MalformedReportError(f"there is no verdict {kind[:50]!r}")
    slope, left, remedy = told.get("slope_bytes_per_hour"), told.get("time_to_limit_s"), told.get("remedy")
    return Verdict(
        pid=int(_number(process, "pid")),
        role=_text(process, "role"),
        name=_text(process, "name"),
        kind=kinds[kind],
        category=_maybe_text(told, "category"),
        culprits=tuple(_list(told, "culprits", _read_culprit)),
        slope=None if slope is None else _read_interval(slope),
        per=None if told.get("bytes_per") is None else _numbers(told, "bytes_per"),
        follows=_maybe_text(told, "follows"),
        explained=_maybe_number(told, "explained_ratio"),
        time_to_limit_s=None if left is None else _read_interval(left),
        evidence=tuple(_list(told, "evidence", _as_text)),
        remedy=None if remedy is None else _read_remedy(_object(remedy, "remedy")),
        window_s=_number(told, "window_s"),
    )


def _read_culprit(told: object) -> Culprit:
    culprit = _object(told, "a culprit")
    capacity = _maybe_number(culprit, "capacity_entries")
    return Culprit(
        path=_text(culprit, "path"),
        bytes_per_hour=_number(culprit, "bytes_per_hour"),
        per=_numbers(culprit, "bytes_per"),
        follows=_maybe_text(culprit, "follows"),
        capacity=None if capacity is None else int(capacity),
        why=_text(culprit, "why"),
        full_bytes=_maybe_number(culprit, "full_bytes"),
        full_in_s=_maybe_number(culprit, "full_in_s"),
    )


def _read_remedy(told: Object) -> Remedy:
    return Remedy(_text(told, "action"), _maybe_text(told, "issue"), _maybe_text(told, "fixed_in"))


def _read_interval(told: object) -> Interval:
    interval = _object(told, "an interval")
    low, best, high = (_maybe_number(interval, key) for key in ("low", "best", "high"))
    most = math.inf if high is None else high
    return Interval(-math.inf if low is None else low, most if best is None else best, most)


def _object(told: object, what: str) -> Object:
    if not isinstance(told, dict):
        raise MalformedReportError(f"{what} is no object")
    return told


def _list(told: Object, key: str, read: Callable[[object], T], most: int = MOST_PARTS) -> list[T]:
    found = told.get(key)
    if not isinstance(found, list) or len(found) > most:
        raise MalformedReportError(f"{key} is no list of at most {most} parts")
    return [read(part) for part in found]


def _as_text(told: object) -> str:
    if not isinstance(told, str):
        raise MalformedReportError("a sentence is no text")
    return told[:LONGEST_TEXT]


def _text(told: Object, key: str) -> str:
    found = told.get(key)
    if not isinstance(found, str):
        raise MalformedReportError(f"{key} is no text")
    return found[:LONGEST_TEXT]


def _maybe_text(told: Object, key: str) -> str | None:
    return None if told.get(key) is None else _text(told, key)


def _number(told: Object, key: str) -> float:
    found = told.get(key)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise MalformedReportError(f"{key} is no number")
    # A float of Python's JSON may be infinite or NaN, an int too large for a float; none can be counted with.
    if not abs(found) < 1 << 100:
        raise MalformedReportError(f"{key} is too large a number")
    return found


def _maybe_number(told: Object, key: str) -> float | None:
    return None if told.get(key) is None else _number(told, key)


def _parts(told: Object, key: str) -> Object:
    found = _object(told.get(key), key)
    if len(found) > MOST_PARTS:
        raise MalformedReportError(f"{key} has more than {MOST_PARTS} parts")
    return found


def _numbers(told: Object, key: str) -> dict[str, float]:
    found = _parts(told, key)
    return {name[:LONGEST_TEXT]: _number(found, name) for name in found}


def _texts(told: Object, key: str) -> dict[str, str]:
    found = _parts(told, key)
    return {name[:LONGEST_TEXT]: _text(found, name) for name in found}
