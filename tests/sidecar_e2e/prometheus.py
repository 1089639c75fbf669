# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus server as a child process that scrapes a target each second and answers queries, exemplars too."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, NamedTuple

from tests.debian import program
from tests.sidecar_e2e.processes import Child, free_port

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

_READY_S = 120.0
_ANSWER_S = 60.0
_CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
storage: {{exemplars: {{max_exemplars: 100000}}}}
scrape_configs:
  - job_name: target
    static_configs: [{{targets: ["{target}"]}}]
"""


class Sample(NamedTuple):
    """One element of a query's result."""

    labels: dict[str, str]
    value: float


class Exemplar(NamedTuple):
    """An exemplar that Prometheus has stored: of which series, with which labels of its own; ``time`` in unix s."""

    series: dict[str, str]
    labels: dict[str, str]
    value: float
    time: float


class Target(NamedTuple):
    """How the scraping goes: ``health`` is ``up``, ``down`` or ``unknown``."""

    url: str
    health: str
    error: str


class Check(NamedTuple):
    """What ``promtool check metrics`` says: its exit code and its complaints, one a line."""

    code: int
    complaints: tuple[str, ...]


def prometheus_binary(name: str = "prometheus") -> str:
    """The path of ``prometheus``, or of ``promtool``."""
    return program(name, "prometheus", "NO METRIC IS TESTED on a real server")


def check_metrics(exposition: str) -> Check:
    """Ask ``promtool check metrics`` about an exposition in the text format."""
    command = [prometheus_binary("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=exposition, capture_output=True, text=True, check=False, timeout=60)
    return Check(done.returncode, tuple((done.stdout + done.stderr).splitlines()))


class Prometheus:
    """The server, running from ``__enter__`` to ``__exit__``; ``target`` is ``HOST:PORT``, scraped at ``/metrics``."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self._target = target
        self._port = free_port()

    def __enter__(self) -> Self:
        config = self._folder / "prometheus.yml"
        config.write_text(_CONFIG.format(target=self._target))
        command = [
            prometheus_binary(),
            f"--config.file={config}",
            f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--enable-feature=exemplar-storage",
            "--log.level=warn",
        ]
        self._child = Child("prometheus", command, self._folder, os.environ)
        try:
            self._child.wait_until(self._ready, _READY_S, "Prometheus is ready")
        except BaseException:
            self._child.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.end()

    def _ready(self) -> bool:
        try:
            return b"Ready" in self._get("/-/ready")
        except OSError:
            return False

    def _get(self, path: str, **query: str) -> bytes:
        url = f"http://127.0.0.1:{self._port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:  # our own child on the loopback
            data: bytes = answer.read()
        return data

    def _data(self, path: str, **query: str) -> Any:
        return json.loads(self._get(f"/api/v1/{path}", **query))["data"]

    def query(self, expression: str) -> list[Sample]:
        """The instant vector that ``expression`` is now."""
        rows = self._data("query", query=expression)["result"]
        return [Sample(row["metric"], float(row["value"][1])) for row in rows]

    def exemplars(self, expression: str) -> list[Exemplar]:
        """All exemplars stored of the series that ``expression`` selects."""
        rows = self._data("query_exemplars", query=expression, start="0", end="9999999999")
        return [
            Exemplar(row["seriesLabels"], one["labels"], float(one["value"]), float(one["timestamp"]))
            for row in rows
            for one in row["exemplars"]
        ]

    def targets(self) -> list[Target]:
        """The targets scraped."""
        rows = self._data("targets", state="active")["activeTargets"]
        return [Target(row["scrapeUrl"], row["health"], row["lastError"]) for row in rows]
