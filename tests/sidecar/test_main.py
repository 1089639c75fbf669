# SPDX-License-Identifier: Apache-2.0
"""The command: a process that starts, is asked, is told to end, and ends as it says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.sidecar.collectors import over_grpc, over_http, wait_until
from tests.sidecar.fake_engine import FakeEngine, life
from vllm_kvfix.events import Figures
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.service import _destination

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sidecar.collectors import Collector

WAIT_S = 120.0


class Sidecar:
    """A running command; ``log`` is what it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def log(self) -> str:
        """All lines."""
        return "".join(self._lines)

    def url(self) -> str:
        """Where it listens, when it does."""
        wait_until(lambda: "listen=" in self.log or self.process.poll() is not None)
        found = re.search(r"listen=(\S+)", self.log)
        assert found, self.log
        return found[1]

    def get(self, path: str) -> str:
        """A page, whatever its status."""
        try:
            with urllib.request.urlopen(self.url() + path, timeout=WAIT_S) as response:  # noqa: S310  # our own
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def end(self, *signals: int) -> int:
        """Send signals; the exit code."""
        for number in signals:
            self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code


def clean(**environ: str) -> dict[str, str]:
    """This environment without what would configure a sidecar, and with ``environ``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VLLM_KVFIX_"))}
    return kept | environ


@contextmanager
def running(folder: Path, *arguments: str, **environ: str) -> Iterator[Sidecar]:
    """The command on a free port, killed at the end if it has not ended."""
    command = [sys.executable, "-m", "vllm_kvfix_sidecar", "--ring-dir", str(folder), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, *arguments], env=clean(**environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Sidecar(process)
        finally:
            process.kill()


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    command = [sys.executable, "-m", "vllm_kvfix_sidecar", *arguments]
    return subprocess.run(command, env=clean(**environ), capture_output=True, text=True, timeout=WAIT_S, check=False)


def run_without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end, in an interpreter that cannot import ``missing``."""
    code = (
        "import sys; sys.modules[sys.argv.pop(1)] = None; import vllm_kvfix_sidecar.__main__ as it; sys.exit(it.main())"
    )
    command = [sys.executable, "-c", code, missing, *arguments]
    return subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=WAIT_S, check=False)


def pointing_to(collector: Collector, protocol: str = "grpc") -> dict[str, str]:
    """The environment that exports there, by no clock."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20secret",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "3600000",
        "OTEL_METRIC_EXPORT_INTERVAL": "3600000",
    }


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    """An engine that has finished three requests."""
    made = FakeEngine(tmp_path / "a.ring")
    for number in (1, 2, 3):
        made.write(*life(number))
    return made


class TestLife:
    """From start to end."""

    def test_a_signal_flushes_and_ends_with_0(self, engine: FakeEngine) -> None:
        """SIGTERM: what was in the ring at that moment is exported, the accounts are said, and no secret is."""
        with (
            over_http() as collector,
            running(engine.path.parent, **pointing_to(collector, "http/protobuf")) as sidecar,
        ):
            wait_until(lambda: '"stop": 3' in sidecar.get("/readyz"))
            engine.write(*life(4))
            assert sidecar.end(signal.SIGTERM) == 0
            assert len(collector.spans) == 4
            assert {headers["authorization"] for headers in collector.headers} == {"Bearer secret"}
            (point,) = collector.last_metrics()[conventions.SPANS_PENDING.name].sum.data_points
            assert point.as_int == 0
        assert "spans_exported=4 spans_failed=0 spans_dropped=0" in sidecar.log.splitlines()[-1]
        assert 'traces="otlp (http/protobuf) to http://127.0.0.1:' in sidecar.log
        assert "secret" not in sidecar.log

    @pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
    def test_the_end_is_bounded_though_the_receiver_hangs(self, engine: FakeEngine, protocol: str) -> None:
        """With a receiver that never answers, the process ends with 0, and says what was dropped."""
        with over_grpc() if protocol == "grpc" else over_http() as collector:
            collector.released.clear()
            environ = pointing_to(collector, protocol)
            with running(engine.path.parent, "--shutdown-timeout", "1", **environ) as sidecar:
                wait_until(lambda: '"stop": 3' in sidecar.get("/readyz"))
                assert sidecar.end(signal.SIGINT) == 0
        last = sidecar.log.splitlines()[-1]
        assert last.startswith("WARNING")
        assert "stopped before everything was flushed spans_exported=0 spans_failed=0 spans_dropped=3" in last

    def test_a_second_signal_ends_at_once_with_1(self, engine: FakeEngine) -> None:
        """While the first one's flush hangs, the second one does not wait for it."""
        with over_grpc() as collector:
            collector.released.clear()
            environ = pointing_to(collector)
            with running(engine.path.parent, "--shutdown-timeout", "600", **environ) as sidecar:
                wait_until(lambda: '"stop": 3' in sidecar.get("/readyz"))
                sidecar.process.send_signal(signal.SIGTERM)
                assert collector.waiting.acquire(timeout=WAIT_S)
                assert sidecar.end(signal.SIGTERM) == 1
        assert "stopped" not in sidecar.log

    def test_metrics_are_served_without_any_export(self, engine: FakeEngine) -> None:
        """With OTEL_SDK_DISABLED nothing is sent, /metrics is there, and the log is JSON where it is asked for."""
        environ = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        with running(engine.path.parent, **environ) as sidecar:
            wait_until(lambda: 'finish_reason="stop"} 3.0' in sidecar.get("/metrics"))
            assert json.loads(sidecar.get("/healthz"))["status"] == "ok"
            assert sidecar.end(signal.SIGTERM) == 0
        assert "traces=none metrics=none events=none disabled_by=OTEL_SDK_DISABLED" in sidecar.log
        assert "warning" not in sidecar.log.lower()

    def test_the_memory_of_an_engine_is_served(self, engine: FakeEngine) -> None:
        """Its RSS, read from the real process table, and what its ring tells, are in /metrics, with a verdict."""
        engine.write(Figures(time.monotonic_ns(), "malloc", {"in_use": 12345}))
        wanted = {"process_pid": str(os.getpid()), "vllm_kvfix_process_role": "engine core"}

        def values(text: str, name: str) -> list[float]:
            samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
            return [s.value for s in samples if s.name == name and wanted.items() <= s.labels.items()]

        with running(engine.path.parent) as sidecar:
            wait_until(lambda: values(sidecar.get("/metrics"), "vllm_kvfix_verdict_alarming") == [0.0])
            text = sidecar.get("/metrics")
            told = json.loads(sidecar.get("/diagnosis"))
        (rss,) = values(text, "process_memory_usage_bytes")
        assert 0.5 < rss / psutil.Process().memory_info().rss < 2
        assert values(text, "vllm_kvfix_malloc_in_use_bytes") == [12345]
        assert sorted(values(text, "vllm_kvfix_verdict")) == [0, 0, 0, 0, 0, 1]
        assert os.getpid() in [process["pid"] for process in told["processes"]]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://u:secret@c:4317/x?key=secret"}, "otlp (grpc) to https://c:4317/x"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:1"},
            "otlp (grpc) to c:1",
        ),
        ({}, "otlp (grpc) to the default endpoint"),
    ],
)
def test_where_spans_go_is_told_without_secrets(environ: dict[str, str], told: str) -> None:
    """Neither user, password nor query of an endpoint is in the start line; the signal's own goes first."""
    assert _destination("otlp (grpc)", "TRACES", environ) == told


class TestOnce:
    """--once."""

    def test_it_prints_what_is_there_and_exports_it(self, engine: FakeEngine) -> None:
        """Standard output is one JSON object with the engine; its spans and metrics have arrived; the code is 0."""
        with over_grpc() as collector:
            done = run(
                "--once", "--ring-dir", str(engine.path.parent), "--log-format", "json", **pointing_to(collector)
            )
            assert len(collector.spans) == 3
            assert conventions.FINISHED.name in collector.last_metrics()
        assert done.returncode == 0, done.stderr
        (told,) = json.loads(done.stdout)["engines"]
        assert (told["ring"], told["finished"], told["pid"]) == ("a.ring", {"stop": 3}, os.getpid())
        assert [json.loads(line)["message"] for line in done.stderr.splitlines()][-1] == "stopped"

    def test_an_empty_folder_is_no_error(self, tmp_path: Path) -> None:
        """Without engines the list is empty, and the code 0."""
        done = run("--once", "--ring-dir", str(tmp_path))
        assert (done.returncode, json.loads(done.stdout)["engines"]) == (0, [])


class TestRefusals:
    """What it does not start with."""

    def test_a_port_that_is_taken_is_said_with_1(self, tmp_path: Path) -> None:
        """The log names the address and the way out."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            done = run("--listen", address, "--ring-dir", str(tmp_path))
        assert done.returncode == 1
        assert f"cannot listen on {address}: Address already in use; choose another by --listen" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "environ", "said"),
        [
            ([], {"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin cannot be used"),
            ([], {"OTEL_CONFIG_FILE": "x.yaml"}, "OTEL_CONFIG_FILE is not supported"),
            ([], {"OTEL_SPAN_LINK_COUNT_LIMIT": "many"}, "OTEL_SPAN_LINK_COUNT_LIMIT"),
            (["--listen", "nowhere"], {}, "--listen nowhere cannot be used"),
            (["--wrong"], {}, "--wrong"),
        ],
    )
    def test_what_cannot_be_used_is_said_with_2(
        self, arguments: list[str], environ: dict[str, str], said: str, tmp_path: Path
    ) -> None:
        """One sentence, and no traceback."""
        done = run("--ring-dir", str(tmp_path), *arguments, **environ)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("missing", ["opentelemetry", "prometheus_client"])
    def test_without_its_dependencies_it_says_what_to_install(self, missing: str) -> None:
        """A missing package is a sentence with the extra's name, and code 1."""
        done = run_without(missing)
        assert done.returncode == 1
        assert done.stderr.strip().endswith("pip install 'vllm-kvfix[sidecar]'")
        assert "Traceback" not in done.stderr

    def test_an_address_that_others_reach_is_warned_of(self, tmp_path: Path) -> None:
        """It works, and the log says so at level warning."""
        with running(tmp_path, "--listen", "0.0.0.0:0") as sidecar:
            wait_until(lambda: "WARNING" in sidecar.log)
            assert sidecar.end(signal.SIGTERM) == 0
        assert "everybody who can reach this address can read what is served" in sidecar.log

    def test_a_token_is_asked_for_instead(self, tmp_path: Path) -> None:
        """With one, there is no warning: nobody reads a figure who does not know it."""
        file = tmp_path / "token"
        file.write_text("0123456789abcdef")
        with running(tmp_path, "--listen", "0.0.0.0:0", VLLM_KVFIX_TOKEN_FILE=str(file)) as sidecar:
            assert "wants the token" in sidecar.get("/metrics")
            assert sidecar.end(signal.SIGTERM) == 0
        assert "everybody who can reach" not in sidecar.log

    def test_help_needs_no_dependency(self) -> None:
        """--help ends with 0 although OpenTelemetry cannot be imported."""
        done = run_without("opentelemetry", "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert "examples:" in done.stdout
