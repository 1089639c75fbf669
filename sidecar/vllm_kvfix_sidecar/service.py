# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together, runs them, and takes them down within the time there is."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from vllm_kvfix_sidecar import bearer, conventions, ended, event_export, export, push, report, report_text, static_files
from vllm_kvfix_sidecar.alarms import Alarms
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.copying import copied
from vllm_kvfix_sidecar.deaths import Deaths
from vllm_kvfix_sidecar.episodes import Episodes
from vllm_kvfix_sidecar.gpu_memory import GpuMemory, GpuWatch
from vllm_kvfix_sidecar.health import Answer, Health
from vllm_kvfix_sidecar.host_memory import HostMemory
from vllm_kvfix_sidecar.logs import fields
from vllm_kvfix_sidecar.marks import Marks
from vllm_kvfix_sidecar.metrics import Metrics
from vllm_kvfix_sidecar.page_data import About, PageData
from vllm_kvfix_sidecar.pipeline import Pipeline
from vllm_kvfix_sidecar.process_readings import ProcessReadings
from vllm_kvfix_sidecar.processes import boot_id_of, sees_host_pids
from vllm_kvfix_sidecar.prometheus import Exposition
from vllm_kvfix_sidecar.readings import Reader
from vllm_kvfix_sidecar.server import Access, Pages, Server
from vllm_kvfix_sidecar.spans import SpanMaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm_kvfix_sidecar.readings import Point
    from vllm_kvfix_sidecar.settings import Settings
    from vllm_kvfix_sidecar.static_files import StaticFile

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of the time for the end, what is left for the last metrics, which tell what became of the spans.
_METRICS_SHARE = 0.25
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_{}_ENDPOINT")

_log = logging.getLogger(__name__)


class Service:
    """The sidecar, made of settings and the environment that the exporters read themselves."""

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make everything, start the exporters' threads, and listen unless it is for once.

        Raises:
            SettingError: An exporter cannot use what the environment says.
            OSError: The address to listen on is taken, or not this machine's.
        """
        self._settings = settings
        self._clock = clock
        telemetry = settings.telemetry
        resource = export.resource(environ)
        # All that may fail comes before the first thread.
        span_exporters = export.span_exporters(telemetry.traces)
        metric_exporters = push.metric_exporters(telemetry.metrics)
        event_exporters = event_export.exporters(telemetry.logs)
        sampler = export.sampler()
        self.metrics = Metrics()
        self._stop_gpus = threading.Event()
        self._gpus = GpuWatch(GpuMemory(clock=clock), self._stop_gpus)
        reader = Reader(self.metrics, more=self._process_points)
        exposition = Exposition(reader, resource.attributes, exemplars=telemetry.exemplars)
        self.server: Server | None = None
        if not settings.once:
            pages = Pages(exposition.body, self._alive, self._ready, self._diagnosis, self._now, self._history, _page())
            lets_in = bearer.TokenFile(settings.token_file).lets_in if settings.token_file else None
            self.server = Server(settings.listen, pages, clock, Access(settings.hosts, lets_in))
        self._sink = export.BatchSink(span_exporters, self.metrics.spans, telemetry) if span_exporters else None
        self._events: event_export.EventSink | None = None
        if event_exporters:
            self._events = event_export.EventSink(event_exporters, self.metrics.events, telemetry)
        spans = SpanMaker(sampler, resource, self._sink) if self._sink else None
        marks = Marks()
        self.episodes = Episodes(resource, spans, self._events, boot_id=boot_id_of(PROC), marked=marks.growth)
        listeners = (Alarms(), self.episodes, marks)
        self.assessment = Assessment(HostMemory(PROC, CGROUPS, clock), listeners=listeners, clock=clock)
        host_pids = sees_host_pids(PROC)
        self._processes = ProcessReadings(self.assessment, lambda: self._gpus.latest, host_pids=host_pids)
        sinks = [sink for sink in (self._sink, self._events) if sink is not None]
        deaths = Deaths(
            resource, spans, self._events, assessment=self.assessment, flush=sinks, proc=PROC, cgroups=CGROUPS
        )
        self.pipeline = Pipeline(
            settings.folders,
            self.metrics,
            spans,
            assessment=self.assessment,
            deaths=deaths,
            clock=clock,
            foreign=settings.foreign,
        )
        self.health = Health(self.pipeline, self.metrics, settings.folders, clock)
        self._destinations = {
            "traces": _destination(telemetry.traces.text, "TRACES", environ),
            "metrics": _destination(telemetry.metrics.text, "METRICS", environ),
            "events": _destination(telemetry.logs.text, "LOGS", environ),
        }
        about = About(str(self.server.address) if self.server else "", settings.folders, self._destinations)
        self._page = PageData(
            self.pipeline,
            self.assessment,
            self.metrics,
            self.health,
            marks,
            about,
            gpus=lambda: self._gpus.latest,
            host_pids=host_pids,
            clock=clock,
        )
        self._pusher: push.Pusher | None = None
        if metric_exporters:
            converter = push.Converter(reader, resource, telemetry, time.time_ns())
            self._pusher = push.Pusher(converter, metric_exporters, self.metrics.exports, telemetry)
        self._say_start()

    def _process_points(self) -> Iterator[Point]:
        return self._processes.points()

    def _alive(self) -> Answer:
        return self.health.alive()

    def _ready(self) -> Answer:
        return self.health.ready()

    def _diagnosis(self) -> Answer:
        judged = [report.of(found.history, found.verdict) for found in self.assessment.judged()]
        refused = {str(path): reason for path, reason in self.pipeline.refused.items()}
        notes = self.health.notes()
        gone = ended.sentences(copied(lambda: self.pipeline.all), time.time_ns())
        made = report.make(judged, time.time(), source=report.SIDECAR, not_followed=refused, notes=notes, ended=gone)
        return Answer(good=True, body=report.as_json(made, report_text.answer(made)))

    def _now(self) -> bytes:
        return self._page.now_body()

    def _history(self, process: str | None, range_s: float, points: int) -> bytes:
        return self._page.history_body(process, range_s, points)

    def _say_start(self) -> None:
        settings, telemetry = self._settings, self._settings.telemetry
        address = self.server.address if self.server else None
        _log.info(
            "started",
            extra=fields(
                version=conventions.SCOPE_VERSION,
                listen=f"http://{address}" if address else "none",
                folders=", ".join(map(str, settings.folders)),
                **self._destinations,
                **({"disabled_by": "OTEL_SDK_DISABLED"} if telemetry.disabled else {}),
            ),
        )
        if address and not address.is_loopback and not settings.token_file:
            _log.warning(
                "everybody who can reach this address can read what is served; --token-file asks for a token",
                extra=fields(listen=address),
            )

    def run(self, stop: threading.Event) -> None:
        """Serve and follow until told to stop."""
        if self.server:
            self.server.start()
        self._gpus.start()
        self.pipeline.run(stop)

    def once(self, out: TextIO) -> None:
        """Read what is there and print what there is."""
        deadline = self._clock() + self._settings.shutdown_timeout_s
        while self.pipeline.poll() and self._clock() < deadline:
            pass
        out.write(json.dumps(self.health.summary(), indent=2) + "\n")
        out.flush()

    def close(self) -> bool:
        """Read the rings a last time, flush, and say the accounts; whether all was done in time."""
        self.pipeline.close()
        self.episodes.close(self._clock())
        self._stop_gpus.set()
        timeout = self._settings.shutdown_timeout_s
        deadline = self._clock() + timeout
        flushed_by = deadline - timeout * _METRICS_SHARE
        done = self._sink is None or self._sink.close(timeout * (1 - _METRICS_SHARE))
        if self._events is not None:
            done = self._events.close(max(0.0, flushed_by - self._clock())) and done
        if self._pusher is not None:
            done = self._pusher.close(deadline - self._clock()) and done
        if self.server:
            self.server.stop()
        self._say_end(done=done)
        return done

    def _say_end(self, *, done: bool) -> None:
        spans, events, exports = self.metrics.spans, self.metrics.events, self.metrics.exports
        _log.log(
            logging.INFO if done else logging.WARNING,
            "stopped" if done else "stopped before everything was flushed",
            extra=fields(
                spans_exported=spans.exported,
                spans_failed=spans.failed,
                spans_dropped=spans.dropped,
                spans_unsampled=spans.unsampled,
                events_exported=events.exported,
                events_failed=events.failed,
                events_dropped=events.dropped,
                metric_exports=exports.exported,
                metric_exports_failed=exports.failed,
            ),
        )


def _page() -> Mapping[str, StaticFile]:
    """The files of the live page; none, with a warning, where they are not installed: all else works without."""
    try:
        return static_files.load()
    except static_files.PageMissingError as error:
        _log.warning("%s", error)
        return {}


def _destination(text: str, signal: str, environ: Mapping[str, str]) -> str:
    """Where a signal goes; of an endpoint what is before any secret: no user, no path's query."""
    if "otlp" not in text:
        return text
    named = [environ.get(name.format(signal), "").strip() for name in reversed(_ENDPOINTS)]
    endpoint = next((name for name in named if name), "the default endpoint")
    scheme, separator, rest = endpoint.rpartition("://")
    return f"{text} to {scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"
