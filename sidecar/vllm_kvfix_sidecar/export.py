# SPDX-License-Identifier: Apache-2.0
"""Sends spans: the SDK's own batches and exporters, under an account in which no span is missing.

Exporters are made without arguments, so that endpoints, headers, certificates and time limits are what the
environment says and nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult

from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.deadline import within
from vllm_kvfix_sidecar.telemetry_settings import CONSOLE, GRPC, SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler

    from vllm_kvfix_sidecar.metrics import SpanCounts
    from vllm_kvfix_sidecar.telemetry_settings import Signal, Telemetry

_log = logging.getLogger(__name__)


class SpanSink(Protocol):
    """Takes spans that are to be exported."""

    def emit(self, span: ReadableSpan) -> bool:
        """Take a span, at once; False: it was dropped, and counted so."""


def resource(environ: Mapping[str, str]) -> Resource:
    """The resource that the environment describes, under our service name unless it says another."""
    defaults = {SERVICE_VERSION: conventions.SCOPE_VERSION}
    made = Resource(defaults).merge(Resource.create())
    if environ.get("OTEL_SERVICE_NAME", "").strip() or _names_service(environ.get("OTEL_RESOURCE_ATTRIBUTES", "")):
        return made
    return made.merge(Resource({SERVICE_NAME: conventions.SERVICE_NAME}))


def _names_service(attributes: str) -> bool:
    return any(part.partition("=")[0].strip() == SERVICE_NAME for part in attributes.split(","))


def sampler() -> Sampler:
    """The sampler that ``OTEL_TRACES_SAMPLER`` and ``_ARG`` name, made by the SDK."""
    return TracerProvider(shutdown_on_exit=False).sampler


def span_exporters(signal: Signal) -> list[SpanExporter]:
    """The exporters that are asked for.

    Raises:
        SettingError: The environment has what an exporter cannot use.
    """
    try:
        return [_span_exporter(kind, signal.protocol) for kind in signal.exporters]
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingError(f"the exporter of spans cannot use its OTEL_EXPORTER_OTLP_* variables: {error}") from error


def _span_exporter(kind: str, protocol: str) -> SpanExporter:
    # Each protocol brings some 10 MiB of modules: only the one that is used is imported.
    if kind == CONSOLE:
        return ConsoleSpanExporter()
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415  # ^

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415  # ^

    return Http()


class _Counting(SpanExporter):
    """Hands batches on and says of each what became of it; never raises, so that one bad batch stops nothing."""

    def __init__(self, exporters: Sequence[SpanExporter], sink: BatchSink) -> None:
        self._exporters = exporters
        self._sink = sink

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._sink.taken(len(spans))
        results = [self._export(exporter, spans) for exporter in self._exporters]
        done = all(result is SpanExportResult.SUCCESS for result in results)
        self._sink.settled(len(spans), exported=done)
        return SpanExportResult.SUCCESS if done else SpanExportResult.FAILURE

    def _export(self, exporter: SpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            return exporter.export(spans)
        except Exception:  # noqa: BLE001  # an exporter of any make, in the thread that all batches go through
            _log.exception("the exporter of spans failed")
            return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        for exporter in self._exporters:
            exporter.shutdown()


class BatchSink:
    """Queues spans for the exporters; never waits, holds at most ``queue`` spans and one batch.

    ``emitted = exported + failed + dropped + pending`` at any time. A batch counts as exported if every exporter
    took it.
    """

    def __init__(self, exporters: Sequence[SpanExporter], counts: SpanCounts, telemetry: Telemetry) -> None:
        self._counts = counts
        self._most = telemetry.queue
        self._queued = 0
        self._closed = False
        self._processor = BatchSpanProcessor(
            _Counting(exporters, self),
            max_queue_size=telemetry.queue,
            max_export_batch_size=telemetry.batch,
            schedule_delay_millis=telemetry.batch_delay_ms,
        )

    def emit(self, span: ReadableSpan) -> bool:
        """Queue a span; False where the queue is full, the sink is closed, or the span is not sampled."""
        counts, context = self._counts, span.get_span_context()
        # The processor would pass over an unsampled span without a word, and drop its oldest when it is full.
        sampled = context is not None and context.trace_flags.sampled
        with counts.lock:
            counts.emitted += 1
            if self._closed or not sampled or self._queued >= self._most:
                counts.dropped += 1
                return False
            self._queued += 1
        self._processor.on_end(span)
        return True

    def taken(self, spans: int) -> None:
        """The processor has taken so many from its queue."""
        with self._counts.lock:
            self._queued -= spans

    def settled(self, spans: int, *, exported: bool) -> None:
        """So many were exported, or were not; after the end, they have been counted as dropped already."""
        with self._counts.lock:
            if self._closed:
                return
            if exported:
                self._counts.exported += spans
            else:
                self._counts.failed += spans

    def close(self, timeout_s: float) -> bool:
        """Export what is queued, for so long at most; what is left is dropped. Whether all was settled in time."""
        done = within(timeout_s, self._processor.shutdown, "flush of spans")
        with self._counts.lock:
            self._closed = True
            self._counts.dropped += self._counts.pending
        return done
