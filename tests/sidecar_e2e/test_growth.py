# SPDX-License-Identifier: Apache-2.0
"""A growth of memory, from a process's ring through the sidecar to a real OTLP receiver and to `diagnose`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.sidecar.growing_engine import PATH
from tests.sidecar.test_diagnose import clean, engine
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.sidecar import Sidecar, otlp
from vllm_kvfix_sidecar import conventions as names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sidecar_e2e.receiver import Receiver
    from tests.sidecar_e2e.telemetry import LogRecord, Span

PROTOCOLS = ["grpc", "http"]
ALWAYS_OFF = {"OTEL_TRACES_SAMPLER": "always_off", "OTEL_BLRP_SCHEDULE_DELAY": "100"}
WARN = 13


def events_of(receiver: Receiver, pid: int) -> list[LogRecord]:
    """What was said of a process while it lived."""
    of_it = [record for record in receiver.received.logs if record.resource.get(names.ATTR_PID) == pid]
    return [record for record in of_it if record.event != names.EVENT_DEATH]


def spans_of(receiver: Receiver, pid: int) -> list[Span]:
    """The growths of a process."""
    return [
        span
        for span in receiver.spans
        if span.name == names.GROWTH_SPAN_NAME and span.resource.get(names.ATTR_PID) == pid
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_leak_is_an_event_while_it_lasts_and_a_span_when_it_is_over(
    tmp_path: Path, rings: Path, receiver: Receiver, protocol: str
) -> None:
    """Both have the same ids, and name the container, the rate, what it follows and the remedy; no sampler is asked."""
    endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
    with Sidecar(tmp_path, rings, {**otlp(protocol, endpoint), **ALWAYS_OFF}) as sidecar:
        with engine(rings / "a.ring") as pid:
            receiver.wait_for(lambda _: events_of(receiver, pid), WAIT_S)
            told = json.loads(sidecar.get("/diagnosis").body)
            done = subprocess.run(
                [sys.executable, "-m", "vllm_kvfix", "diagnose", "--sidecar", f"127.0.0.1:{sidecar.port}"],
                env=clean(),
                capture_output=True,
                text=True,
                check=False,
                timeout=WAIT_S,
            )
            assert spans_of(receiver, pid) == []
        receiver.wait_for(lambda _: spans_of(receiver, pid), WAIT_S)
        receiver.wait_for(lambda _: len(events_of(receiver, pid)) >= 2, WAIT_S)
    (span,) = spans_of(receiver, pid)
    began, ended = events_of(receiver, pid)
    assert (began.event, began.severity, ended.event) == (names.EVENT_GROWTH_BEGAN, WARN, names.EVENT_GROWTH_ENDED)
    assert {(event.trace_id, event.span_id) for event in (began, ended)} == {(span.trace_id, span.span_id)}
    assert f"(pid {pid}) leaks: {PATH} grows by " in str(began.body)
    assert [event.name for event in span.events] == [began.event, ended.event]
    for attributes in (began.attributes, span.attributes):
        assert attributes[names.ATTR_GROWTH_KIND] == "unbounded_growth"
        assert attributes[names.ATTR_GROWTH_CONTAINERS] == (PATH,)
        assert attributes[names.ATTR_GROWTH_SLOPE] == pytest.approx(90 << 20, rel=0.1)
        assert attributes[names.ATTR_GROWTH_FIXED_IN] == "0.26.0"
        assert "vllm-kvfix" in str(attributes[names.ATTR_GROWTH_REMEDY])
        assert set(attributes) <= set(names.GROWTH_ATTRIBUTES)
    assert span.attributes[names.ATTR_GROWTH_END] == "process_ended"
    assert span.start < began.time <= span.end
    expected = {names.ATTR_PID: pid, names.ATTR_ROLE: "engine core", names.ATTR_VLLM_VERSION: "0.25.1"}
    for resource in (span.resource, began.resource):
        assert expected.items() <= resource.items()
        assert resource["service.name"] == names.SERVICE_NAME
    assert f"(pid {pid}) leaks: {PATH}" in done.stdout
    assert (done.returncode, told["exit_code"], told["source"]) == (1, 1, "sidecar")


def test_a_sidecar_that_is_started_anew_tells_the_same_growth(tmp_path: Path, rings: Path, receiver: Receiver) -> None:
    """Stopped while a process leaks, it sends the span so far; the next one sends it again under the same ids."""
    environ = {**otlp("http", receiver.http_endpoint), **ALWAYS_OFF}
    with engine(rings / "a.ring") as pid:
        for life in (1, 2):
            with Sidecar(tmp_path, rings, environ) as sidecar:
                receiver.wait_for(lambda _, life=life: len(events_of(receiver, pid)) >= life, WAIT_S)  # type: ignore[misc]  # a default
                sidecar.signal(signal.SIGTERM)
                assert sidecar.wait(WAIT_S) == 0
                last = sidecar.lines[-1]
                assert (last["fields"]["events_exported"], last["fields"]["events_dropped"]) == (1, 0)
                receiver.wait_for(lambda _, life=life: len(spans_of(receiver, pid)) >= life, WAIT_S)  # type: ignore[misc]  # a default
    told = spans_of(receiver, pid)
    assert len({(span.trace_id, span.span_id) for span in told}) == 1
    assert [span.attributes[names.ATTR_GROWTH_END] for span in told] == ["sidecar_stopped"] * 2
    assert [event.event for event in events_of(receiver, pid)] == [names.EVENT_GROWTH_BEGAN] * 2
    assert abs(told[0].start - told[1].start) < 120 * 10**9, "the ring's history gives both the same begin"


def test_a_receiver_without_logs_costs_no_span(tmp_path: Path, rings: Path, receiver: Receiver) -> None:
    """OTEL_LOGS_EXPORTER=none: the span carries the events, and nothing goes to the logs."""
    environ = {**otlp("http", receiver.http_endpoint), **ALWAYS_OFF, "OTEL_LOGS_EXPORTER": "none"}
    with Sidecar(tmp_path, rings, environ) as sidecar:
        with engine(rings / "a.ring") as pid:
            wait_until(
                lambda: any(
                    process["pid"] == pid and process["verdict"]["alarming"]
                    for process in json.loads(sidecar.get("/diagnosis").body)["processes"]
                ),
                WAIT_S,
                "the leak is found",
            )
        receiver.wait_for(lambda _: spans_of(receiver, pid), WAIT_S)
    assert receiver.received.logs == []
    (span,) = spans_of(receiver, pid)
    assert [event.name for event in span.events] == [names.EVENT_GROWTH_BEGAN, names.EVENT_GROWTH_ENDED]
