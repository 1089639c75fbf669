# SPDX-License-Identifier: Apache-2.0
"""What the page draws over time: memory of all processes and load of all engines, or all that is kept of one process.

The JSON form of both is in :mod:`vllm_kvfix_sidecar.page_data`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix_sidecar import thinning
from vllm_kvfix_sidecar.process_record import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_kvfix_sidecar.assessment import Assessment
    from vllm_kvfix_sidecar.metrics import EngineMetrics
    from vllm_kvfix_sidecar.process_table import ProcessKey
    from vllm_kvfix_sidecar.report import Object

MOST_CONTAINERS = 40
# What stands for the memory of a process: the first that is known, with swap where it leaves that out.
_SIZES = (("status.anon", "status.swap"), ("status.rss", None), ("smaps.rss", None))
_SIZE_NAMES = frozenset(name for pair in _SIZES for name in pair if name is not None)


def key_text(key: ProcessKey) -> str:
    """A process as the page names it: ``PID-STARTTICKS``."""
    return f"{key.pid}-{key.start_time}"


class Span(NamedTuple):
    """The time that is asked for: from ``since`` to ``until`` (s of the assessment's clock), in ``points`` at most.

    ``offset``: what makes unix time of that clock.
    """

    since: float
    until: float
    points: int
    offset: float

    def drawn(self, rows: Rows) -> Object:
        """One column as JSON."""
        return self.columns(rows, ("v",))

    def columns(self, rows: Rows, names: Sequence[str]) -> Object:
        """Columns under their names, at common times."""
        columns = rows.columns[: len(names)]
        at = thinning.chosen(rows.times, columns, self.until - self.since, self.points)
        told: Object = {"t": [round(rows.times[index] + self.offset, 1) for index in at]}
        for name, column in zip(names, columns, strict=True):
            told[name] = [int(column[index]) for index in at]
        return told


def overview(assessment: Assessment, engines: Mapping[tuple[int, str], EngineMetrics], span: Span) -> Object:
    """All processes and engines; ``engines`` by pid and ring's file name."""
    return {
        "processes": {key_text(key): told for key in assessment.known() if (told := _memory(assessment, key, span))},
        "engines": _engines(assessment, engines, span),
    }


def _memory(assessment: Assessment, key: ProcessKey, span: Span) -> Object:
    with assessment.reading(key) as record:
        if record is None:
            return {}
        figures = record.figures_since(span.since, _SIZE_NAMES)
        usage, used = record.usage, record.usage_since(span.since)
    told: Object = {"memory": span.drawn(_size(figures))}
    if usage is not None and math.isfinite(usage[0]):
        told |= {"limit_usage": span.drawn(used), "limit_bytes": usage[0]}
    return told


def _size(figures: Mapping[str, Rows]) -> Rows:
    for name, more in _SIZES:
        if name in figures:
            return _sum(figures[name], figures.get(more or ""))
    return Rows((), ((),))


def _sum(one: Rows, other: Rows | None) -> Rows:
    """Of both, at the times of the first and, where the second changes, at its own, too."""
    if other is None or not any(other.columns[0]):
        return one
    times = sorted({*one.times, *other.times})
    values = [a + b for a, b in zip(_at(one, times), _at(other, times), strict=True)]
    return Rows(times, (values,))


def _at(rows: Rows, times: Sequence[float]) -> list[float]:
    """The last value not after each time; before the first one, that."""
    found, at, last = [], 0, len(rows.times) - 1
    for time in times:
        while at < last and rows.times[at + 1] <= time:
            at += 1
        found.append(rows.columns[0][at])
    return found


def _engines(assessment: Assessment, engines: Mapping[tuple[int, str], EngineMetrics], span: Span) -> Object:
    told: Object = {}
    for feed in assessment.engine_feeds():
        with assessment.lock:
            times, columns = feed.load.shown_since(span.since)
        free = columns.pop("free")
        engine = engines.get(feed.ring)
        config = engine.settings if engine is not None else None
        if config is not None:
            columns["held"] = [max(0, config.blocks - value) for value in free]
        told[key_text(feed.key)] = {name: span.drawn(Rows(times, (values,))) for name, values in columns.items()}
    return told


def of_process(assessment: Assessment, key: ProcessKey, span: Span) -> Object | None:
    """All figures of a process, and its largest containers; None: nobody knows it."""
    culprits = assessment.culprits(key)
    with assessment.reading(key) as record:
        if record is None:
            return None
        figures = record.figures_since(span.since)
        largest = record.largest(MOST_CONTAINERS, culprits)
        containers = record.containers_since(span.since, [container.path for container in largest])
    capacity = {container.path: container.capacity for container in largest}
    return {
        "process": key_text(key),
        "series": {name: span.drawn(rows) for name, rows in figures.items()},
        "containers": {
            path: span.columns(rows, ("entries", "size")) | {"capacity": capacity[path]}
            for path, rows in containers.items()
        },
    }
