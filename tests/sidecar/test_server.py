# SPDX-License-Identifier: Apache-2.0
"""server, prometheus and health: what is asked for is answered in its format; nobody holds the others up."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.sidecar.collectors import wait_until
from tests.sidecar.test_metrics import KEY, SPAN, engine_of, record
from vllm_kvfix_sidecar import conventions, server
from vllm_kvfix_sidecar.conventions import Kind
from vllm_kvfix_sidecar.health import STALE_S, Answer, Health
from vllm_kvfix_sidecar.metrics import EngineKey, Metrics
from vllm_kvfix_sidecar.prometheus import Exposition
from vllm_kvfix_sidecar.readings import Reader
from vllm_kvfix_sidecar.server import LONGEST_S, MOST_CONNECTIONS, Pages, Server
from vllm_kvfix_sidecar.settings import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def some_metrics() -> Metrics:
    """Two engines of one pid, and one request with an exported span."""
    metrics = Metrics()
    engine_of(metrics).finished(record(), 1_700_000_000 * 10**9, SPAN)
    engine_of(metrics, EngineKey(KEY.pid, KEY.index, "b.ring"))
    return metrics


def exposition(*, exemplars: bool = True) -> Exposition:
    """What /metrics shows of them."""
    return Exposition(Reader(some_metrics()), {"service.name": 's\n"x'}, exemplars=exemplars)


PAGES = Pages(exposition().body, lambda: Answer(True, {"status": "ok"}), lambda: Answer(False, {"status": "no"}))  # noqa: FBT003  # a field


@contextlib.contextmanager
def serving(
    pages: Pages = PAGES, host: str = "127.0.0.1", clock: Callable[[], float] | None = None
) -> Iterator[Server]:
    """A server on any free port."""
    made = Server(Address(host, 0), pages, clock or Clock())
    made.start()
    try:
        yield made
    finally:
        made.stop()


def ask(at: Server, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", at.address.port, timeout=20)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


class TestFormats:
    """The exposition."""

    def test_the_text_format_is_one_that_prometheus_parses(self) -> None:
        """Each metric is there under its name in Prometheus, with each engine's series once."""
        body, content_type = exposition().body("")
        assert content_type.startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in parse_text(body.decode())}
        assert set(families) == {"target_info"} | {metric.prometheus for metric in conventions.METRICS}
        for metric in conventions.METRICS:
            family = families[metric.prometheus]
            expected = {Kind.COUNTER: "counter", Kind.HISTOGRAM: "histogram"}.get(metric.kind, "gauge")
            assert (family.type, family.documentation) == (expected, metric.description)
            series = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
            assert len(series) == len(set(series))
        rings = {s.labels["vllm_kvfix_ring_file"] for s in families["vllm_kvfix_scheduler_steps"].samples}
        assert rings == {"a.ring", "b.ring"}
        (info,) = families["target_info"].samples
        assert info.labels == {"service_name": 's\n"x'}

    def test_openmetrics_has_the_exemplars(self) -> None:
        """The span of a bucket is its exemplar, with value and time; buckets run up to the count."""
        body, content_type = exposition().body(OPENMETRICS)
        assert content_type.startswith("application/openmetrics-text")
        families = {family.name: family for family in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]  # theirs
        samples = [
            s
            for s in families["vllm_kvfix_request_peak_blocks"].samples
            if s.labels.get("vllm_kvfix_ring_file") == "a.ring"
        ]
        (exemplar,) = [s.exemplar for s in samples if s.exemplar]
        assert exemplar.labels == {"trace_id": f"{0xABC:032x}", "span_id": f"{0xDEF:016x}"}
        assert (exemplar.value, float(exemplar.timestamp)) == (7.0, 1_700_000_000)
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
        assert buckets == [(bound, float(bound >= 7)) for bound in (*conventions.PEAK_BLOCKS.bounds, float("inf"))]
        assert {s.name.rpartition("_")[2]: s.value for s in samples} | {"bucket": 0} == {
            "bucket": 0,
            "count": 1,
            "sum": 7,
        }

    def test_exemplars_can_be_switched_off(self) -> None:
        """Without them no sample has one."""
        body, _ = exposition(exemplars=False).body(OPENMETRICS)
        assert b"trace_id" not in body


class TestHttp:
    """Requests."""

    def test_what_is_served(self) -> None:
        """Metrics in the format that was asked for, probes as JSON with their status, else a list of what there is."""
        with serving() as here:
            response, body = ask(here, "/metrics?x=1", Accept=OPENMETRICS)
            assert (response.status, body.splitlines()[-1]) == (200, b"# EOF")
            response, body = ask(here, "/healthz")
            assert (response.status, json.loads(body)) == (200, {"status": "ok"})
            response, body = ask(here, "/readyz")
            assert (response.status, json.loads(body)) == (503, {"status": "no"})
            response, body = ask(here, "/etc/passwd")
            assert (response.status, body) == (404, b"there are /metrics, /healthz and /readyz\n")
            assert response.getheader("Server") == "vllm-kvfix"

    def test_a_body_is_zipped_for_who_takes_it(self) -> None:
        """Gzip comes where it is accepted, and unzips to the same kind of text."""
        with serving() as here:
            response, body = ask(here, "/metrics", **{"Accept-Encoding": "gzip"})
            assert response.getheader("Content-Encoding") == "gzip"
            assert b"vllm_kvfix_scheduler_steps_total" in gzip.decompress(body)
            response, body = ask(here, "/metrics")
            assert response.getheader("Content-Encoding") is None

    def test_head_has_the_headers_alone(self) -> None:
        """The length is that of the body which GET would give."""
        with serving() as here:
            response, _ = ask(here, "/healthz", "HEAD")
            assert int(response.getheader("Content-Length") or 0) == len(ask(here, "/healthz")[1])
            with socket.create_connection(("127.0.0.1", here.address.port), timeout=20) as client:
                client.sendall(b"HEAD /healthz HTTP/1.1\r\n\r\n")
                answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\n")

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
    def test_other_methods_are_refused(self, method: str) -> None:
        """405, and which there are."""
        with serving() as here:
            response, _ = ask(here, "/metrics", method)
        assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")

    @pytest.mark.parametrize(
        ("bound", "host", "status"),
        [
            ("127.0.0.1", "localhost:9464", 200),
            ("127.0.0.1", "127.0.0.1", 200),
            ("127.0.0.1", "[::1]:9464", 200),
            ("127.0.0.1", "evil.example:9464", 403),
            ("127.0.0.1", "127.0.0.1.evil.example", 403),
            ("127.0.0.1", "[", 403),
            ("127.0.0.1", "", 403),
            ("0.0.0.0", "node-7.example:9464", 200),  # noqa: S104  # for the moment of a test
        ],
    )
    def test_a_web_page_cannot_read_loopback_by_dns(self, bound: str, host: str, status: int) -> None:
        """On loopback, only hosts of loopback are answered; elsewhere, any."""
        with serving(host=bound) as here:
            assert ask(here, "/healthz", Host=host)[0].status == status

    def test_an_error_of_ours_shows_no_traceback(self, caplog: pytest.LogCaptureFixture) -> None:
        """The client is told 500 and to look into the log; the log has the exception."""

        def fail(_: str) -> tuple[bytes, str]:
            raise RuntimeError("secret detail")

        with serving(PAGES._replace(metrics=fail)) as here:
            response, body = ask(here, "/metrics")
        assert response.status == 500
        assert b"secret" not in body
        assert b"Traceback" not in body
        assert "secret detail" in caplog.text

    @given(st.binary(max_size=200))
    def test_garbage_is_answered_or_dropped(self, garbage: bytes) -> None:
        """Whatever bytes come, the server says no traceback and serves the next."""
        with socket.create_connection(("127.0.0.1", _shared.address.port), timeout=20) as client:
            with contextlib.suppress(OSError):  # it may have hung up on us already
                client.sendall(garbage + b"\r\n\r\n")
                client.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := client.recv(4096):
                    answer += part
        assert b"Traceback" not in answer
        assert ask(_shared, "/healthz")[0].status == 200

    def test_a_port_that_is_taken_is_an_oserror(self) -> None:
        """The second server on a port is not made."""
        with serving() as here, pytest.raises(OSError, match="in use"):
            Server(here.address, PAGES)

    def test_port_zero_is_a_free_one_and_is_told(self) -> None:
        """The address has the port that was found, for IPv6 as well."""
        with serving() as here:
            assert here.address.port > 0
        if socket.has_ipv6:
            with serving(host="::1") as here:
                assert str(here.address) == f"[::1]:{here.address.port}"


_shared = Server(Address("127.0.0.1", 0), PAGES)


@pytest.fixture(scope="module", autouse=True)
def _serve_shared() -> Iterator[None]:
    _shared.start()
    yield
    _shared.stop()


class TestSlowClients:
    """Clients that say nothing, or little."""

    def connect(self, here: Server) -> socket.socket:
        """A connection that has sent half a request line."""
        client = socket.create_connection(("127.0.0.1", here.address.port), timeout=20)
        client.sendall(b"GET /met")
        return client

    def test_many_slow_clients_do_not_hold_up_a_quick_one(self) -> None:
        """With twice as many idle connections as there may be, a scrape is answered; threads stay bounded."""
        with serving() as here, contextlib.ExitStack() as clients:
            before = threading.active_count()
            for _ in range(2 * MOST_CONNECTIONS):
                clients.enter_context(self.connect(here))
            assert ask(here, "/metrics")[0].status == 200
            # Connections are taken in their order: when the last was answered, all had been.
            assert len(here._open) == MOST_CONNECTIONS - 1
            wait_until(lambda: threading.active_count() <= before + MOST_CONNECTIONS, within_s=LONGEST_S / 2)

    def test_who_is_too_slow_is_cut_off(self) -> None:
        """After LONGEST_S of the clock the connection ends, though the client goes on to send now and then."""
        clock = Clock()
        with serving(clock=clock) as here, self.connect(here) as client:
            wait_until(lambda: len(here._open) == 1)
            clock.now += LONGEST_S - 0.1
            here.service_actions()
            assert len(here._open) == 1
            clock.now += 0.2
            here.service_actions()
            assert not here._open
            assert client.recv(100) == b""

    def test_a_client_that_went_away_is_no_error(self, caplog: pytest.LogCaptureFixture) -> None:
        """A connection that is reset leaves no warning."""
        caplog.set_level(logging.WARNING)
        with serving() as here:
            client = self.connect(here)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            wait_until(lambda: not here._open)
            assert ask(here, "/healthz")[0].status == 200
        assert caplog.records == []


class TestHealth:
    """Probes."""

    def health(self, clock: Clock, **changed: object) -> Health:
        """The health of a pipeline that has turned at 1000 s, with one engine and one refused file."""
        engine = SimpleNamespace(key=KEY, vllm_version="0.25.1", state="live")
        usual = {
            "last_turn": 1000.0,
            "folders_readable": True,
            "scanned": True,
            "engines": [engine],
            "refused": {Path("/r/x.ring"): "is no ring file"},
        }
        follower = SimpleNamespace(**(usual | changed))
        return Health(follower, some_metrics(), [Path("/r")], clock)

    def test_it_is_alive_while_the_pipeline_turns(self) -> None:
        """Up to STALE_S after the last turn, not from then on."""
        clock = Clock()
        health = self.health(clock)
        clock.now += STALE_S - 0.1
        assert health.alive().good
        clock.now += 0.2
        assert health.alive() == Answer(False, {"status": "stuck", "last_turn_age_s": 10.1})  # noqa: FBT003  # a field

    @pytest.mark.parametrize(
        ("changed", "status"),
        [
            ({}, "ok"),
            ({"scanned": False}, "not looked yet"),
            ({"folders_readable": False}, "no ring folder is readable yet"),
        ],
    )
    def test_it_is_ready_when_it_has_looked_into_a_folder(self, changed: dict[str, object], status: str) -> None:
        """No engine need be there, but a folder that can be read."""
        answer = self.health(Clock(), **changed).ready()
        assert (answer.good, answer.body["status"]) == (status == "ok", status)

    def test_the_body_says_what_is_followed(self) -> None:
        """Folders, engines with their state and counts, refused files with the reason; all of it is JSON."""
        body = json.loads(json.dumps(self.health(Clock()).ready().body))
        assert body["folders"] == ["/r"]
        assert body["refused"] == {"/r/x.ring": "is no ring file"}
        (engine,) = body["engines"]
        assert (engine["pid"], engine["index"], engine["ring"], engine["state"]) == (100, 1, "a.ring", "live")
        assert engine["blocks"] == {"pool": 1000, "free": 700, "cached": 200}
        assert engine["events"] == {"published": 11, "dropped": 2, "lost": 5, "malformed_frames": 6}
        assert (engine["patch"], engine["backlog"], engine["finished"]) == ("not affected", [7, 0], {"stop": 1})

    def test_to_ask_does_not_bring_an_engine_back_that_is_no_longer_shown(self) -> None:
        """An engine whose numbers have expired is told of without any, and /metrics does not show it again."""
        metrics = Metrics()
        engine = SimpleNamespace(key=KEY, vllm_version="0.25.1", state="ended")
        follower = SimpleNamespace(last_turn=0.0, folders_readable=True, scanned=True, engines=[engine], refused={})
        told = Health(follower, metrics, [Path("/r")], Clock()).summary()["engines"]
        assert isinstance(told, list)
        assert told[0]["events"]["published"] is None
        assert KEY not in metrics._engines


def test_the_limits_are_those_that_the_tests_use() -> None:
    """The module's docstring speaks of the constants that bound it."""
    assert "MOST_CONNECTIONS" in (server.__doc__ or "")
    assert "LONGEST_S" in (server.__doc__ or "")
