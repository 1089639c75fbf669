# SPDX-License-Identifier: Apache-2.0
"""The death of a process, through the sidecar or the command to a real OTLP receiver."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.sidecar.dying_engine import CONTEXT, IDS, dying_engine
from tests.sidecar.test_diagnose import clean
from tests.sidecar_e2e.processes import WAIT_S
from tests.sidecar_e2e.sidecar import Sidecar, otlp
from vllm_kvfix_sidecar import conventions as names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sidecar_e2e.receiver import Receiver
    from tests.sidecar_e2e.telemetry import LogRecord, Span

ERROR = 2


def deaths(receiver: Receiver) -> list[Span]:
    """The spans of ends."""
    return receiver.received.deaths


def requests(receiver: Receiver) -> list[Span]:
    """Those of requests."""
    return [span for span in receiver.spans if span.name == names.SPAN_NAME]


def events(receiver: Receiver) -> list[LogRecord]:
    """The events of ends."""
    return [record for record in receiver.received.logs if record.event == names.EVENT_DEATH]


def export(ring: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command."""
    command = [sys.executable, "-m", "vllm_kvfix", "postmortem", str(ring), "--export"]
    return subprocess.run(command, env=clean(**environ), capture_output=True, text=True, check=False, timeout=WAIT_S)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_command_sends_what_a_sidecar_would(rings: Path, receiver: Receiver, protocol: str) -> None:
    """Span, event, and the spans of the lost requests, each with its true time, in the caller's trace."""
    endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
    with dying_engine(rings / "a.ring") as process:
        at = time.time_ns()
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    done = export(rings / "a.ring", **otlp(protocol, endpoint), OTEL_SERVICE_NAME="mine")
    assert done.returncode == 1, done.stderr
    assert "Exported: 4 spans, 1 events." in done.stdout
    receiver.wait_for(
        lambda _: len(receiver.spans) == 3 and len(deaths(receiver)) == 1 and len(receiver.received.logs) == 1, WAIT_S
    )
    (span,), (event,) = deaths(receiver), events(receiver)
    assert (span.trace_id, span.span_id) == (event.trace_id, event.span_id)
    assert span.resource["service.name"] == "mine"
    assert span.status == ERROR
    assert abs(span.end - at) < 10**9
    assert {one.attributes[names.ATTR_ENGINE_REQUEST_ID] for one in requests(receiver)} == set(IDS)
    of_caller = next(one for one in requests(receiver) if one.parent_id)
    assert (of_caller.trace_id, of_caller.parent_id) == (CONTEXT.trace_id, CONTEXT.parent_id)
    assert {one.end for one in requests(receiver)} == {span.end}


@pytest.mark.alone  # five seconds mean something only where nothing else takes the processor
def test_what_the_sidecar_has_told_is_the_same_span_again(tmp_path: Path, rings: Path, receiver: Receiver) -> None:
    """The sidecar tells the death within five seconds whatever the delay of batches; the command repeats no request."""
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "60000",
        "OTEL_BLRP_SCHEDULE_DELAY": "60000",
    }
    with dying_engine(rings / "a.ring") as process, Sidecar(tmp_path, rings, environ) as sidecar:
        sidecar.wait_until(lambda: sidecar.state("a.ring") == "live", WAIT_S, "it follows the ring")
        process.send_signal(signal.SIGKILL)
        receiver.wait_for(lambda _: deaths(receiver) and events(receiver), timeout_s=5)
        receiver.wait_for(lambda _: len(requests(receiver)) == 3, timeout_s=5)
        lines = [line["fields"] for line in sidecar.lines if "requests_lost" in line.get("fields", {})]
    assert len(lines) == 1
    assert lines[0]["more"] == f"vllm-kvfix postmortem {rings / 'a.ring'}"
    done = export(rings / "a.ring", **environ)
    assert "Exported: 1 spans, 1 events." in done.stdout, done.stderr
    receiver.wait_for(lambda _: len(deaths(receiver)) == 2, WAIT_S)
    assert len({(span.trace_id, span.span_id) for span in deaths(receiver)}) == 1
    assert len(requests(receiver)) == 3
