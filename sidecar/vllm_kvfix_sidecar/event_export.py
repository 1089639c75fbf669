# SPDX-License-Identifier: Apache-2.0
"""Sends events as log records: the SDK's own batches and exporters, under the same account as spans.

The logs of the SDK are named ``_logs`` because they may still change. What is used of them is small: a record, a
batch processor, and the exporters of the packages that spans need anyway. Not the SDK's ``Logger``: it makes each
record under one resource, and ours are of many processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import LogRecordLimits, ReadWriteLogRecord
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    ConsoleLogRecordExporter,
    LogRecordExporter,
    LogRecordExportResult,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, set_span_in_context

from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.export import Accounts
from vllm_kvfix_sidecar.exporters import make

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AttributeValue

    from vllm_kvfix_sidecar.metrics import SpanCounts
    from vllm_kvfix_sidecar.telemetry_settings import Signal, Telemetry

_SCOPE = InstrumentationScope(conventions.SCOPE_NAME, conventions.SCOPE_VERSION)


class Sink(Protocol):
    """Takes events that are to be exported."""

    def emit(self, record: ReadWriteLogRecord) -> bool:
        """Take an event, at once; False: it was dropped, and counted so."""


def exporters(signal: Signal) -> list[LogRecordExporter]:
    """The exporters that are asked for.

    Raises:
        SettingError: The environment has what an exporter cannot use.
    """
    return make(signal, "events", ("_log_exporter", "OTLPLogExporter"), ConsoleLogRecordExporter)


def event(  # noqa: PLR0913  # a record's parts
    name: str,
    time_ns: int,
    *,
    alarming: bool,
    body: str,
    attributes: Mapping[str, AttributeValue],
    span: SpanContext,
    resource: Resource,
) -> ReadWriteLogRecord:
    """An event that belongs to ``span``; what is too much by ``OTEL_LOGRECORD_*_LIMIT`` is left out."""
    severity = SeverityNumber.WARN if alarming else SeverityNumber.INFO
    record = LogRecord(
        timestamp=time_ns,
        observed_timestamp=time_ns,
        context=set_span_in_context(NonRecordingSpan(span), Context()),
        severity_text=severity.name,
        severity_number=severity,
        body=body,
        attributes=dict(attributes),
        event_name=name,
    )
    return ReadWriteLogRecord(record, resource, _SCOPE, LogRecordLimits())


class _Counting(LogRecordExporter):
    """Hands batches on and has it counted what became of each."""

    def __init__(self, exporters: Sequence[LogRecordExporter], accounts: Accounts) -> None:
        self._exporters = exporters
        self._exports = [_export(exporter) for exporter in exporters]
        self._accounts = accounts

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        done = self._accounts.hand_on(batch, self._exports)
        return LogRecordExportResult.SUCCESS if done else LogRecordExportResult.FAILURE

    def shutdown(self) -> None:
        for exporter in self._exporters:
            exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK's, without a return type

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back here."""
        return all(exporter.force_flush(timeout_millis) for exporter in self._exporters)


def _export(exporter: LogRecordExporter) -> Callable[[Sequence[ReadableLogRecord]], bool]:
    return lambda batch: exporter.export(batch) is LogRecordExportResult.SUCCESS


class EventSink:
    """Queues events for the exporters under an account; never waits, holds at most one queue and one batch."""

    def __init__(self, exporters: Sequence[LogRecordExporter], counts: SpanCounts, telemetry: Telemetry) -> None:
        batches = telemetry.events
        self._accounts = Accounts(counts, batches.queue, "events")
        self._processor = BatchLogRecordProcessor(
            _Counting(exporters, self._accounts),
            schedule_delay_millis=batches.delay_ms,
            max_export_batch_size=batches.batch,
            max_queue_size=batches.queue,
        )

    def emit(self, record: ReadWriteLogRecord) -> bool:
        """Queue an event; False where the queue is full or the sink is closed."""
        if not self._accounts.enter():
            return False
        self._processor.on_emit(record)
        return True

    def flush(self) -> None:
        """Export what is queued, and wait for that: never to be called by who may not be held up."""
        self._processor.force_flush()

    def close(self, timeout_s: float) -> bool:
        """Export what is queued, for so long at most; what is left is dropped. Whether all was settled in time."""
        return self._accounts.close(timeout_s, self._processor.shutdown)
