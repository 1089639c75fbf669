# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together, runs them, and takes them down within the time there is."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, TextIO

from vllm_kvfix_sidecar import conventions, export, push
from vllm_kvfix_sidecar.health import Health
from vllm_kvfix_sidecar.logs import fields
from vllm_kvfix_sidecar.metrics import Metrics
from vllm_kvfix_sidecar.pipeline import Pipeline
from vllm_kvfix_sidecar.prometheus import Exposition
from vllm_kvfix_sidecar.readings import Reader
from vllm_kvfix_sidecar.server import Pages, Server
from vllm_kvfix_sidecar.spans import SpanMaker

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from vllm_kvfix_sidecar.health import Answer
    from vllm_kvfix_sidecar.settings import Settings

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
        sampler = export.sampler()
        self.metrics = Metrics()
        reader = Reader(self.metrics)
        exposition = Exposition(reader, resource.attributes, exemplars=telemetry.exemplars)
        self.server: Server | None = None
        if not settings.once:
            self.server = Server(settings.listen, Pages(exposition.body, self._alive, self._ready), clock)
        self._sink = export.BatchSink(span_exporters, self.metrics.spans, telemetry) if span_exporters else None
        self._pusher: push.Pusher | None = None
        if metric_exporters:
            converter = push.Converter(reader, resource, telemetry, time.time_ns())
            self._pusher = push.Pusher(converter, metric_exporters, self.metrics.exports, telemetry)
        spans = SpanMaker(sampler, resource, self._sink) if self._sink else None
        self.pipeline = Pipeline(settings.folders, self.metrics, spans, clock=clock)
        self.health = Health(self.pipeline, self.metrics, settings.folders, clock)
        self._say_start(environ)

    def _alive(self) -> Answer:
        return self.health.alive()

    def _ready(self) -> Answer:
        return self.health.ready()

    def _say_start(self, environ: Mapping[str, str]) -> None:
        settings, telemetry = self._settings, self._settings.telemetry
        address = self.server.address if self.server else None
        _log.info(
            "started",
            extra=fields(
                version=conventions.SCOPE_VERSION,
                listen=f"http://{address}" if address else "none",
                folders=", ".join(map(str, settings.folders)),
                traces=_destination(telemetry.traces.text, "TRACES", environ),
                metrics=_destination(telemetry.metrics.text, "METRICS", environ),
                **({"disabled_by": "OTEL_SDK_DISABLED"} if telemetry.disabled else {}),
            ),
        )
        if address and not address.is_loopback:
            _log.warning("everybody who can reach this address can read what is served", extra=fields(listen=address))

    def run(self, stop: threading.Event) -> None:
        """Serve and follow until told to stop."""
        if self.server:
            self.server.start()
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
        timeout = self._settings.shutdown_timeout_s
        deadline = self._clock() + timeout
        done = self._sink is None or self._sink.close(timeout * (1 - _METRICS_SHARE))
        if self._pusher is not None:
            done = self._pusher.close(deadline - self._clock()) and done
        if self.server:
            self.server.stop()
        self._say_end(done=done)
        return done

    def _say_end(self, *, done: bool) -> None:
        spans, exports = self.metrics.spans, self.metrics.exports
        _log.log(
            logging.INFO if done else logging.WARNING,
            "stopped" if done else "stopped before everything was flushed",
            extra=fields(
                spans_exported=spans.exported,
                spans_failed=spans.failed,
                spans_dropped=spans.dropped,
                spans_unsampled=spans.unsampled,
                metric_exports=exports.exported,
                metric_exports_failed=exports.failed,
            ),
        )


def _destination(text: str, signal: str, environ: Mapping[str, str]) -> str:
    """Where a signal goes; of an endpoint what is before any secret: no user, no path's query."""
    if "otlp" not in text:
        return text
    named = [environ.get(name.format(signal), "").strip() for name in reversed(_ENDPOINTS)]
    endpoint = next((name for name in named if name), "the default endpoint")
    scheme, separator, rest = endpoint.rpartition("://")
    return f"{text} to {scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"
