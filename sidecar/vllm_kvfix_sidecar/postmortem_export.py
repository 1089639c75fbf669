# SPDX-License-Identifier: Apache-2.0
"""Sends a post-mortem by OTLP: the span and the event of the end, and the spans of the requests that were lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import cursors, death_export, event_export, export, telemetry_settings
from vllm_kvfix_sidecar.metrics import SpanCounts
from vllm_kvfix_sidecar.spans import SpanMaker
from vllm_kvfix_sidecar.telemetry_settings import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_kvfix_sidecar.death import Death

TIMEOUT_S = 30.0


class NotSentError(Exception):
    """Not all was sent; the message says why, and what to do."""


def send(death: Death, environ: Mapping[str, str]) -> str:
    """Send it to where ``environ`` says; what was sent, in a sentence.

    Requests that a sidecar has told already are left out. The sampler decides about none: all of them failed.

    Raises:
        NotSentError: Nothing says where to, a variable cannot be used, or not all was taken.
    """
    try:
        telemetry = telemetry_settings.read(environ)
        span_exporters = export.span_exporters(telemetry.traces)
        event_exporters = event_export.exporters(telemetry.logs)
        sampler = export.sampler()
    except SettingError as error:
        raise NotSentError(str(error)) from error
    if not span_exporters and not event_exporters:
        raise NotSentError(
            "no variable says where to; set OTEL_EXPORTER_OTLP_ENDPOINT, such as http://127.0.0.1:4317"
            + (", and OTEL_SDK_DISABLED is set" if telemetry.disabled else "")
        )
    resource = export.resource(environ)
    spans, events = SpanCounts(), SpanCounts()
    if span_exporters:
        sink = export.BatchSink(span_exporters, spans, telemetry)
        maker = SpanMaker(sampler, resource, sink)
        sink.emit(death_export.span(death, resource, maker.limits))
        _requests(death, maker)
        sink.close(TIMEOUT_S)
    if event_exporters:
        event_sink = event_export.EventSink(event_exporters, events, telemetry)
        event_sink.emit(death_export.event(death, resource))
        event_sink.close(TIMEOUT_S)
    sent, all_of_them = spans.exported + events.exported, spans.emitted + events.emitted
    if sent < all_of_them:
        raise NotSentError(
            f"of {all_of_them} spans and events {sent} arrived; see that a collector takes them at "
            "OTEL_EXPORTER_OTLP_ENDPOINT, by the protocol of OTEL_EXPORTER_OTLP_PROTOCOL"
        )
    return f"Exported: {spans.exported} spans, {events.exported} events."


def _requests(death: Death, maker: SpanMaker) -> None:
    words = death.steps
    header = words.header
    if cursors.read(words.path, header).ended:
        return
    made = maker.engine(header.pid, header.engine_index, header.vllm_version)
    for found in words.requests:
        made.tell(found.record, header.clock_offset_ns)
