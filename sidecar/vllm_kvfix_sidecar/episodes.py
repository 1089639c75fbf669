# SPDX-License-Identifier: Apache-2.0
"""Tells each growth of a process's memory as an episode: a span when it is over, and events while it lasts.

An episode begins with the window in which a verdict first was unbounded, unexplained, or retained by the allocator. It
is over when the verdict has been another one for ``CALM_S``, when the process has ended, or when the sidecar stops. A
cache that fills is none: what has an end needs no alarm. Spans of episodes are kept whatever the sampler says.

The ids of a span are made from the process and the number of the episode in it. So a sidecar that starts anew while
a process grows tells the same span again, under the same ids, when the growth is over; its events come a second time.
What cannot be had without a memory that outlives the sidecar: a process whose first growth was over before the restart
gets, for a second growth after it, the ids of the first.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from vllm_kvfix_sidecar import conventions, event_export, report, report_text
from vllm_kvfix_sidecar.marks import GROWTH_BEGAN, GROWTH_ENDED
from vllm_kvfix_sidecar.requests import SpanIds
from vllm_kvfix_sidecar.verdict import Kind
from vllm_kvfix_sidecar.words import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.util.types import AttributeValue

    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.process_table import ProcessKey
    from vllm_kvfix_sidecar.report import ProcessReport
    from vllm_kvfix_sidecar.spans import SpanMaker
    from vllm_kvfix_sidecar.verdict import Interval, Verdict

GROWING = frozenset({Kind.UNBOUNDED, Kind.UNEXPLAINED, Kind.RETAINED})
# A verdict may waver; an episode that is torn in two would be two alarms.
CALM_S = 300.0
# No more than one change a minute is told of one episode.
CHANGE_S = 60.0
MOST_OPEN = 256
MOST_EVENTS = 64
MOST_PATHS = 8
CALM, PROCESS_ENDED, SIDECAR_STOPPED = "calm", "process_ended", "sidecar_stopped"
_END_WORDS = {CALM: "does so no longer", PROCESS_ENDED: "has ended"}
_SCOPE = InstrumentationScope(conventions.SCOPE_NAME, conventions.SCOPE_VERSION)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_MOST_INT = (1 << 63) - 1
# No ring has this name, so that no request's span has the same ids.
_OF_GROWTH = "growth"

_log = logging.getLogger(__name__)


class _Shape(NamedTuple):
    """What is told again when it changes."""

    kind: Kind
    category: str | None
    path: str | None


def _shape(verdict: Verdict) -> _Shape:
    path = verdict.culprits[0].path if verdict.culprits else None
    return _Shape(verdict.kind, verdict.category, path)


@dataclass
class _Episode:
    """One episode; times in unix ns, ``told_at`` and ``calm_since`` in seconds of the pipeline's clock.

    ``process``: the latest report that grew. ``calm``: no report has grown since ``calm_since``.
    """

    context: SpanContext
    resource: Resource
    began_ns: int
    process: ProcessReport
    events: BoundedList[Event]
    told: _Shape
    told_at: float
    calm_since: float | None = field(default=None)


class Episodes:
    """Follows the verdicts of all processes.

    ``spans``: None, no spans are made; ``events``: None, no events. ``marked`` is told each begin and end: the process,
    which of both, when (s of the clock of the histories), and a sentence without its full stop.
    """

    def __init__(  # noqa: PLR0913  # whom it tells
        self,
        resource: Resource,
        spans: SpanMaker | None,
        events: event_export.Sink | None,
        *,
        boot_id: bytes | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
        marked: Callable[[ProcessKey, str, float, str], None] = lambda *_: None,
    ) -> None:
        self._resource = resource
        self._spans = spans
        self._events = events
        self._boot_id = boot_id or b""
        self._unix_ns = unix_ns
        self._marked = marked
        self._open: dict[ProcessKey, _Episode] = {}
        self._numbers: dict[ProcessKey, int] = {}
        self._said_full = False

    @property
    def open(self) -> int:
        """How many episodes last."""
        return len(self._open)

    def judged(self, key: ProcessKey, verdict: Verdict, history: ProcessHistory, now: float) -> None:
        """Take a new verdict; ``now`` in seconds of the clock of the history."""
        episode = self._open.get(key)
        if verdict.kind in GROWING:
            process = report.of(history, verdict)
            if episode is None:
                self._begin(key, process, history.started, now)
            else:
                self._go_on(episode, process, now)
        elif episode is not None:
            self._calm(key, episode, now)

    def ended(self, key: ProcessKey, now: float) -> None:
        """A process is gone, and so is what grew in it."""
        if key in self._open:
            self._end(key, now, now, PROCESS_ENDED)
        self._numbers.pop(key, None)

    def close(self, now: float) -> None:
        """The sidecar stops: what lasts is told as far as it is known, by spans alone, since it may go on."""
        for key in list(self._open):
            self._end(key, now, now, SIDECAR_STOPPED)

    def _begin(self, key: ProcessKey, process: ProcessReport, started: float, now: float) -> None:
        if len(self._open) >= MOST_OPEN:
            if not self._said_full:
                _log.warning("more than %d processes grow; the growth of further ones is not told", MOST_OPEN)
            self._said_full = True
            return
        verdict = process.verdict
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        trace_id, span_id = SpanIds(self._boot_id, key.pid, key.start_time, _OF_GROWTH).of(number, None)
        began = max(started, now - verdict.window_s)
        episode = self._open[key] = _Episode(
            context=SpanContext(trace_id, span_id, False, _SAMPLED),  # noqa: FBT003  # its signature
            resource=self._resource.merge(Resource(_resource_attributes(process))),
            began_ns=self._at(began, now),
            process=process,
            events=BoundedList(MOST_EVENTS),
            told=_shape(verdict),
            told_at=now,
        )
        self._say(episode, conventions.EVENT_GROWTH_BEGAN)
        self._marked(key, GROWTH_BEGAN, began, report_text.sentence(process))

    def _go_on(self, episode: _Episode, process: ProcessReport, now: float) -> None:
        episode.process, episode.calm_since = process, None
        shape = _shape(process.verdict)
        if shape != episode.told and now - episode.told_at >= CHANGE_S:
            episode.told, episode.told_at = shape, now
            self._say(episode, conventions.EVENT_GROWTH_CHANGED)

    def _calm(self, key: ProcessKey, episode: _Episode, now: float) -> None:
        if episode.calm_since is None:
            episode.calm_since = now
        elif now - episode.calm_since >= CALM_S:
            self._end(key, episode.calm_since, now, CALM)

    def _say(self, episode: _Episode, name: str) -> None:
        """That it began, or changed."""
        verdict = episode.process.verdict
        body = f"{report_text.sentence(episode.process)}."
        self._emit(episode, name, body, growth_attributes(verdict), alarming=verdict.alarming)

    def _emit(
        self,
        episode: _Episode,
        name: str,
        body: str,
        attributes: Mapping[str, AttributeValue],
        *,
        alarming: bool,
    ) -> None:
        """As an event, and in the span to come."""
        now = self._unix_ns()
        episode.events.append(Event(name, attributes, now))
        if self._events is None:
            return
        self._events.emit(
            event_export.event(
                name,
                now,
                alarming=alarming,
                body=body,
                attributes=attributes,
                span=episode.context,
                resource=episode.resource,
            )
        )

    def _end(self, key: ProcessKey, end: float, now: float, why: str) -> None:
        episode = self._open.pop(key)
        verdict = episode.process.verdict
        attributes = {**growth_attributes(verdict), conventions.ATTR_GROWTH_END: why}
        end_ns = max(episode.began_ns, self._at(end, now))
        if why != SIDECAR_STOPPED:
            lasted = duration((end_ns - episode.began_ns) / 1e9)
            body = f"{report_text.who(verdict)} grew for {lasted}, and {_END_WORDS[why]}"
            self._emit(episode, conventions.EVENT_GROWTH_ENDED, f"{body}.", attributes, alarming=False)
            self._marked(key, GROWTH_ENDED, end, body)
        if self._spans is not None:
            self._spans.hand_on(self._span(episode, end_ns, attributes, self._spans))

    @staticmethod
    def _span(
        episode: _Episode, end_ns: int, attributes: Mapping[str, AttributeValue], maker: SpanMaker
    ) -> ReadableSpan:
        limits = maker.limits
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        told = [_bounded(event, limits.max_event_attributes, limits.max_attribute_length) for event in episode.events]
        events = BoundedList.from_seq(limits.max_events, told)
        events.dropped += episode.events.dropped
        return ReadableSpan(
            name=conventions.GROWTH_SPAN_NAME,
            context=episode.context,
            resource=episode.resource,
            attributes=BoundedAttributes(most, dict(attributes), max_value_len=longest),
            events=events,
            kind=SpanKind.INTERNAL,
            start_time=episode.began_ns,
            end_time=end_ns,
            instrumentation_scope=_SCOPE,
        )

    def _at(self, moment: float, now: float) -> int:
        """A moment of the histories' clock in unix ns, when it is ``now`` by that clock."""
        return max(0, self._unix_ns() - int((now - moment) * 1e9))


def _bounded(event: Event, most: int | None, longest: int | None) -> Event:
    return Event(
        event.name, BoundedAttributes(most, dict(event.attributes or {}), max_value_len=longest), event.timestamp
    )


def _resource_attributes(process: ProcessReport) -> dict[str, AttributeValue]:
    verdict = process.verdict
    attributes: dict[str, AttributeValue] = {
        conventions.ATTR_PID: min(verdict.pid, _MOST_INT),
        conventions.ATTR_ROLE: verdict.role,
    }
    if process.vllm_version:
        attributes[conventions.ATTR_VLLM_VERSION] = process.vllm_version
    return attributes


def growth_attributes(verdict: Verdict) -> dict[str, AttributeValue]:
    """What a span and an event say of a growth; what is not known is not there."""
    remedy = verdict.remedy
    follows, per_unit = _driver(verdict)
    told: dict[str, AttributeValue | None] = {
        conventions.ATTR_GROWTH_KIND: verdict.kind.value.replace(" ", "_"),
        conventions.ATTR_GROWTH_CATEGORY: verdict.category,
        conventions.ATTR_GROWTH_CONTAINERS: tuple(culprit.path for culprit in verdict.culprits[:MOST_PATHS]) or None,
        **_interval(
            verdict.slope,
            conventions.ATTR_GROWTH_SLOPE_LOW,
            conventions.ATTR_GROWTH_SLOPE,
            conventions.ATTR_GROWTH_SLOPE_HIGH,
        ),
        conventions.ATTR_GROWTH_FOLLOWS: follows,
        conventions.ATTR_GROWTH_PER_UNIT: _finite(per_unit),
        conventions.ATTR_GROWTH_EXPLAINED: _finite(verdict.explained),
        **_interval(
            verdict.time_to_limit_s,
            conventions.ATTR_TIME_TO_LIMIT_LOW,
            conventions.ATTR_TIME_TO_LIMIT,
            conventions.ATTR_TIME_TO_LIMIT_HIGH,
        ),
        conventions.ATTR_GROWTH_REMEDY: remedy.action if remedy else None,
        conventions.ATTR_GROWTH_ISSUE: remedy.issue if remedy else None,
        conventions.ATTR_GROWTH_FIXED_IN: remedy.fixed_in if remedy else None,
    }
    return {name: value for name, value in told.items() if value is not None}


def _driver(verdict: Verdict) -> tuple[str | None, float | None]:
    """What the growth follows, and the bytes for each; of the one container if it is one."""
    if len(verdict.culprits) == 1:
        culprit = verdict.culprits[0]
        follows, per = culprit.follows, culprit.per
    else:
        follows, per = verdict.follows, verdict.per or {}
    return follows, per.get(follows) if follows else None


def _interval(interval: Interval | None, low: str, best: str, high: str) -> dict[str, AttributeValue | None]:
    if interval is None:
        return {}
    return {low: _finite(interval.low), best: _finite(interval.best), high: _finite(interval.high)}


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
