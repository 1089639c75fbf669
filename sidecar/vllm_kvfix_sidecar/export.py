# SPDX-License-Identifier: Apache-2.0
"""Sends spans: the SDK's own batches and exporters, under an account in which no span is missing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult

from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.deadline import within
from vllm_kvfix_sidecar.exporters import make

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler

    from vllm_kvfix_sidecar.metrics import SpanCounts
    from vllm_kvfix_sidecar.telemetry_settings import Signal, Telemetry

    T = TypeVar("T")

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
    return make(signal, "spans", ("trace_exporter", "OTLPSpanExporter"), ConsoleSpanExporter)


class Accounts:
    """The account of a queue of at most ``most`` spans, or events, before exporters of the SDK.

    ``emitted = exported + failed + dropped + pending`` at any time. A batch counts as exported if every exporter
    took it. ``what`` names the pieces in the log.
    """

    def __init__(self, counts: SpanCounts, most: int, what: str) -> None:
        self._counts = counts
        self._most = most
        self._what = what
        self._queued = 0
        self._closed = False

    def enter(self, *, fit: bool = True) -> bool:
        """Count one more; whether it may go into the processor's queue: that is not full, and the account open."""
        counts = self._counts
        with counts.lock:
            counts.emitted += 1
            if self._closed or not fit or self._queued >= self._most:
                counts.dropped += 1
                return False
            self._queued += 1
        return True

    def hand_on(self, batch: Sequence[T], exports: Sequence[Callable[[Sequence[T]], bool]]) -> bool:
        """Give a batch to all exporters, count what became of it; never raises: one bad batch stops nothing."""
        with self._counts.lock:
            self._queued -= len(batch)
        results = [self._export(export, batch) for export in exports]  # each gets it, whatever the others say
        done = all(results)
        with self._counts.lock:
            if self._closed:  # they have been counted as dropped already
                return done
            if done:
                self._counts.exported += len(batch)
            else:
                self._counts.failed += len(batch)
        return done

    def _export(self, export: Callable[[Sequence[T]], bool], batch: Sequence[T]) -> bool:
        try:
            return export(batch)
        except Exception:  # noqa: BLE001  # an exporter of any make, in the thread that all batches go through
            _log.exception("the exporter of %s failed", self._what)
            return False

    def close(self, timeout_s: float, flush: Callable[[], object]) -> bool:
        """Export what is queued, for so long at most; what is left is dropped. Whether all was settled in time."""
        done = within(timeout_s, flush, f"flush of {self._what}")
        with self._counts.lock:
            self._closed = True
            self._counts.dropped += self._counts.pending
        return done


class _Counting(SpanExporter):
    """Hands batches on and has it counted what became of each."""

    def __init__(self, exporters: Sequence[SpanExporter], accounts: Accounts) -> None:
        self._exporters = exporters
        self._exports = [_span_export(exporter) for exporter in exporters]
        self._accounts = accounts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        done = self._accounts.hand_on(spans, self._exports)
        return SpanExportResult.SUCCESS if done else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        for exporter in self._exporters:
            exporter.shutdown()


def _span_export(exporter: SpanExporter) -> Callable[[Sequence[ReadableSpan]], bool]:
    return lambda spans: exporter.export(spans) is SpanExportResult.SUCCESS


class BatchSink:
    """Queues spans for the exporters under an account; never waits, holds at most ``queue`` spans and one batch."""

    def __init__(self, exporters: Sequence[SpanExporter], counts: SpanCounts, telemetry: Telemetry) -> None:
        self._accounts = Accounts(counts, telemetry.queue, "spans")
        self._processor = BatchSpanProcessor(
            _Counting(exporters, self._accounts),
            max_queue_size=telemetry.queue,
            max_export_batch_size=telemetry.batch,
            schedule_delay_millis=telemetry.batch_delay_ms,
        )

    def emit(self, span: ReadableSpan) -> bool:
        """Queue a span; False where the queue is full, the sink is closed, or the span is not sampled."""
        context = span.get_span_context()
        # The processor would pass over an unsampled span without a word, and drop its oldest when it is full.
        sampled = context is not None and context.trace_flags.sampled
        if not self._accounts.enter(fit=sampled):
            return False
        self._processor.on_end(span)
        return True

    def flush(self) -> None:
        """Export what is queued, and wait for that: never to be called by who may not be held up."""
        self._processor.force_flush()

    def close(self, timeout_s: float) -> bool:
        """Export what is queued, for so long at most; what is left is dropped. Whether all was settled in time."""
        return self._accounts.close(timeout_s, self._processor.shutdown)
