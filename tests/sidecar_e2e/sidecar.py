# SPDX-License-Identifier: Apache-2.0
"""The sidecar as a child process, and what it says of itself over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.sidecar_e2e.processes import Child, clean_environ
from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

_START_S = 120.0
_ANSWER_S = 60.0
# Failures within a second, batches five times a second, and no span dropped for want of room.
QUICK = {
    "OTEL_TRACES_SAMPLER": "always_on",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "OTEL_BSP_MAX_QUEUE_SIZE": "200000",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "512",
    "OTEL_BSP_EXPORT_TIMEOUT": "1000",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    "OTEL_METRIC_EXPORT_INTERVAL": "500",
    "OTEL_METRIC_EXPORT_TIMEOUT": "1000",
}
# A receiver that is well may need more than a second when the machine is busy, and would get the batch twice.
PATIENT = {**QUICK, "OTEL_BSP_EXPORT_TIMEOUT": "30000", "OTEL_EXPORTER_OTLP_TIMEOUT": "30"}


class Answer(NamedTuple):
    """What a page said."""

    status: int
    body: str


def otlp(protocol: str, endpoint: str, *, patient: bool = True) -> dict[str, str]:
    """The variables that send spans and metrics to ``endpoint``; ``protocol`` is grpc or http."""
    name = "grpc" if protocol == "grpc" else "http/protobuf"
    base = PATIENT if patient else QUICK
    return {**base, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": name}


class Sidecar(Child):
    """The sidecar over the folder ``rings``, once it listens on a port of its own choice.

    ``user``: runs as that user, with the interpreter ``python``, which that user must be able to run.
    """

    def __init__(
        self,
        folder: Path,
        rings: Path,
        environ: Mapping[str, str],
        *options: str,
        user: int | None = None,
        python: str = sys.executable,
    ) -> None:
        self._before = len(self._log_of(folder))
        command = [python, "-m", "vllm_kvfix_sidecar", "--ring-dir", str(rings), "--listen", "127.0.0.1:0"]
        path = [str(ROOT / "sidecar"), str(ROOT), *(entry for entry in sys.path if entry.endswith("site-packages"))]
        told = {**clean_environ(), "PYTHONPATH": os.pathsep.join(path), **environ}
        command += ["--log-format", "json", *options]
        super().__init__("sidecar", command, folder, told, cwd=Path("/"), user=user)
        self.wait_until(self._started, _START_S, "the sidecar listens")
        self.port = int(self._started()[0]["listen"].rpartition(":")[2])

    @staticmethod
    def _log_of(folder: Path) -> list[str]:
        path = folder / "sidecar.err"
        return path.read_text().splitlines(keepends=True) if path.exists() else []

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its log, from this start on; a line that is being written is left out."""
        lines = self._log_of(self.err.parent)[self._before :]
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def _started(self) -> list[dict[str, str]]:
        return [line["fields"] for line in self.lines if line["message"] == "started"]

    def get(self, path: str, **headers: str) -> Answer:
        """Ask for a page."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        try:
            client.request("GET", path, headers=headers)
            answer = client.getresponse()
            return Answer(answer.status, answer.read().decode())
        finally:
            client.close()

    def healthy(self) -> bool:
        """Whether it runs and says that it is well."""
        return self.alive() and self.get("/healthz").status == http.HTTPStatus.OK

    def ready(self) -> dict[str, Any]:
        """What it follows."""
        told: dict[str, Any] = json.loads(self.get("/readyz").body)
        return told

    def engine(self, ring: str) -> dict[str, Any] | None:
        """What it says of the engine of that ring; None where it does not know it."""
        found = [engine for engine in self.ready()["engines"] if engine["ring"] == ring]
        return found[0] if found else None

    def state(self, ring: str) -> str:
        """The state of a ring's engine; empty where it is not known."""
        return str((self.engine(ring) or {"state": ""})["state"])

    def finished(self, ring: str) -> int:
        """How many requests of that ring have ended."""
        engine = self.engine(ring)
        return sum(engine["finished"].values()) if engine else 0

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples ``name`` that have ``labels``, 0 where there are none."""
        families = text_string_to_metric_families(self.get("/metrics").body)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def spans(self, outcome: str) -> int:
        """How many spans were ``exported``, ``failed``, ``dropped`` or ``unsampled``."""
        return int(self.value("vllm_kvfix_sidecar_spans_total", vllm_kvfix_outcome=outcome))

    def metric_exports(self, outcome: str) -> int:
        """How many exports of metrics were ``exported``, or ``failed``."""
        return int(self.value("vllm_kvfix_sidecar_metric_exports_total", vllm_kvfix_outcome=outcome))

    def pending(self) -> int:
        """How many spans wait."""
        return int(self.value("vllm_kvfix_sidecar_spans_pending"))

    def resident(self) -> int:
        """Its resident bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
