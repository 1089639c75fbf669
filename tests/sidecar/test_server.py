# SPDX-License-Identifier: Apache-2.0
"""server, static_files, bearer, prometheus and health: each asker gets what it asked for, and no stranger anything."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import re
import socket
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.sidecar import fake_processes
from tests.sidecar.collectors import wait_until
from tests.sidecar.test_metrics import KEY, SPAN, engine_of, record
from vllm_kvfix_sidecar import conventions, server, static_files
from vllm_kvfix_sidecar.bearer import TokenFile
from vllm_kvfix_sidecar.conventions import Kind
from vllm_kvfix_sidecar.health import STALE_S, Answer, Health
from vllm_kvfix_sidecar.metrics import EngineKey, Metrics
from vllm_kvfix_sidecar.page_data import BadQueryError, UnknownProcessError
from vllm_kvfix_sidecar.prometheus import Exposition
from vllm_kvfix_sidecar.readings import Reader
from vllm_kvfix_sidecar.server import LONGEST_S, MOST_CONNECTIONS, Access, Pages, Server
from vllm_kvfix_sidecar.settings import Address
from vllm_kvfix_sidecar.static_files import StaticFile
from vllm_kvfix_sidecar.telemetry_settings import SettingError

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
    reader = Reader(some_metrics(), more=fake_processes.points)
    return Exposition(reader, {"service.name": 's\n"x'}, exemplars=exemplars)


def history(process: str | None, range_s: float, points: int) -> bytes:
    """A history, named so: knows the process ``1-2`` alone, no range over an hour, and tells what it was asked."""
    if process not in {None, "1-2"}:
        raise UnknownProcessError("known are: 1-2")
    if range_s > 3600:
        raise BadQueryError("range is 60 to 3600 seconds")
    return json.dumps({"process": process, "range_s": range_s, "points": points}).encode()


def file_of(text: str, content_type: str = "text/html; charset=utf-8") -> StaticFile:
    """A file of the page."""
    return StaticFile(text.encode(), gzip.compress(text.encode()), content_type, f'W/"{text[:3]}"')


PAGES = Pages(
    exposition().body,
    alive=lambda: Answer(good=True, body={"status": "ok"}),
    ready=lambda: Answer(good=False, body={"status": "no", "folders": ["/secret"]}),
    diagnosis=lambda: Answer(good=True, body={"exit_code": 1}),
    now=lambda: b'{"schema_version":1}',
    history=history,
    files={"/": file_of("<p>" + "page " * 1000), "/page/a.js": file_of("let a", "text/javascript; charset=utf-8")},
)
TOKEN = "0123456789abcdef"  # noqa: S105  # of a test
FIGURES = ["/api/now", "/api/history", "/diagnosis", "/metrics"]


@contextlib.contextmanager
def serving(
    pages: Pages = PAGES,
    host: str = "127.0.0.1",
    clock: Callable[[], float] | None = None,
    access: Access = Access(),  # noqa: B008  # it is immutable
) -> Iterator[Server]:
    """A server on any free port."""
    made = Server(Address(host, 0), pages, clock or Clock(), access)
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
            assert (response.status, json.loads(body)) == (503, {"status": "no", "folders": ["/secret"]})
            response, body = ask(here, "/diagnosis")
            assert (response.status, json.loads(body)) == (200, {"exit_code": 1}), "an alarm is a good answer"
            response, body = ask(here, "/etc/passwd")
            assert response.status == 404
            assert body == b"there are /, /api/now, /api/history, /diagnosis, /metrics, /healthz, /readyz\n"
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
        response, _ = ask(_shared, "/metrics", method)
        assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")

    @pytest.mark.parametrize("path", ["/nothing", "/metrics", "/api/now", "/", "/page/a.js"])
    def test_no_answer_opens_a_door(self, path: str) -> None:
        """Scripts from here alone, no frame, no guessed type, no referrer, no other origin: on whatever is answered."""
        response, _ = ask(_shared, path, Origin="http://evil.example")
        told = {name.lower(): value for name, value in response.getheaders()}
        policy = dict(part.strip().partition(" ")[::2] for part in told["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in told["content-security-policy"]
        assert told["x-content-type-options"] == "nosniff"
        assert told["referrer-policy"] == "no-referrer"
        assert told["cross-origin-opener-policy"] == told["cross-origin-resource-policy"] == "same-origin"
        assert not [name for name in told if name.startswith("access-control")]

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

    @settings(deadline=None)
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


class TestFigures:
    """What the live page asks for."""

    def test_now_is_json_that_no_cache_keeps(self) -> None:
        """The object as it is, to be asked for anew each time."""
        response, body = ask(_shared, "/api/now")
        assert (response.status, response.getheader("Content-Type")) == (200, "application/json")
        assert response.getheader("Cache-Control") == "no-store"
        assert json.loads(body) == {"schema_version": 1}

    @pytest.mark.parametrize(
        ("query", "process", "range_s", "points"),
        [
            ("", None, 3600, 300),
            ("?range=60&points=10", None, 60, 10),
            ("?process=1-2&range=3600&points=1000&more=1", "1-2", 3600, 1000),
        ],
    )
    def test_history_is_asked_as_it_was_asked(
        self, query: str, process: str | None, range_s: float, points: int
    ) -> None:
        """Process, range and points reach the history, each with a usual value; what it does not know is no matter."""
        response, body = ask(_shared, f"/api/history{query}")
        assert (response.status, json.loads(body)) == (
            200,
            {"process": process, "range_s": range_s, "points": points},
        )

    @pytest.mark.parametrize(
        ("query", "words"),
        [
            ("range=3601", "range is 60 to 3600 seconds"),
            ("range=nan", "range is no whole number"),
            ("range=1e3", "range is no"),
            ("range=-100", "range is no"),
            ("range=", "range is no"),
            ("range=%D9%A3600", "range is no"),
            ("points=99999999999999999999", "points is no"),
        ],
    )
    def test_what_cannot_be_answered_is_said(self, query: str, words: str) -> None:
        """400, and what would do."""
        response, body = ask(_shared, f"/api/history?{query}")
        assert (response.status, response.getheader("Content-Type")) == (400, "application/json")
        assert words in json.loads(body)["error"]

    def test_a_process_that_is_not_known_is_404(self) -> None:
        """With the history's own words."""
        response, body = ask(_shared, "/api/history?process=9-9")
        assert (response.status, json.loads(body)) == (404, {"error": "known are: 1-2"})

    @settings(deadline=None)
    @given(st.text(max_size=50))
    def test_any_query_is_answered(self, query: str) -> None:
        """Whatever stands there: an answer, a refusal, or no such process, each as JSON."""
        response, body = ask(_shared, f"/api/history?process={quote(query)}&{quote(query, safe='=&')}")
        assert response.status in {200, 400, 404}
        assert isinstance(json.loads(body), dict)


class TestFiles:
    """The page's own files."""

    def test_a_file_comes_whole_packed_or_not_at_all(self) -> None:
        """As it is, by gzip for who takes it, and as 304 for who has it already."""
        with serving() as here:
            response, body = ask(here, "/")
            assert (response.status, body) == (200, PAGES.files["/"].body)
            assert response.getheader("Content-Type") == "text/html; charset=utf-8"
            assert response.getheader("Cache-Control") == "no-cache"
            response, packed = ask(here, "/", **{"Accept-Encoding": "gzip"})
            assert gzip.decompress(packed) == body
            tag = response.getheader("ETag") or ""
            response, nothing = ask(here, "/", **{"If-None-Match": tag})
            assert (response.status, nothing, response.getheader("ETag")) == (304, b"", tag)
            assert ask(here, "/", **{"If-None-Match": 'W/"other"'})[0].status == 200

    @pytest.mark.parametrize(
        "path",
        [
            "/page/",
            "/page/b.js",
            "/page/../server.py",
            "/page/%2e%2e/server.py",
            "/page/..%2fserver.py",
            "/page//a.js",
            "/page/a.js/",
            "/page/a.js%00",
            "/page/vendor/../../server.py",
            "/index.html",
        ],
    )
    def test_only_the_names_of_the_table_are_served(self, path: str) -> None:
        """Nothing beside them, by whatever spelling."""
        assert ask(_shared, path)[0].status == 404

    def test_the_page_is_in_this_installation(self) -> None:
        """Its index, its scripts, the chart library and that one's licence, each with its type."""
        files = static_files.load()
        assert files["/"].body.lstrip().lower().startswith(b"<!doctype html>")
        assert b"uPlot" in files["/page/vendor/uPlot.iife.min.js"].body
        assert b"MIT" in files["/page/vendor/uPlot.LICENSE.txt"].body
        assert files["/page/vendor/uPlot.min.css"].content_type == "text/css; charset=utf-8"
        assert all(gzip.decompress(file.packed) == file.body for file in files.values())
        assert len({file.tag for file in files.values()}) == len(files)

    def test_no_file_of_the_page_is_left_out(self) -> None:
        """Each file in the package's folder is served, but for the record of what was fetched."""
        folder = Path(static_files.__file__).parent / "page"
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        served = {
            path.removeprefix("/page/").replace("/", "", path == "/") or "index.html" for path in static_files.load()
        }
        assert there - served == {"vendor/vendored.json"}

    def test_without_the_page_all_else_works(self, tmp_path: Path) -> None:
        """A folder that lacks a part of it is an error that says what to do; / is then 404, and metrics are served."""
        with pytest.raises(static_files.PageMissingError, match=r"index\.html is missing .*install it anew: pip"):
            static_files.load(tmp_path / "nowhere")
        (tmp_path / "index.html").write_text("x")
        with pytest.raises(static_files.PageMissingError, match=r"vendor/uPlot\.iife\.min\.js is missing"):
            static_files.load(tmp_path)
        with serving(PAGES._replace(files={})) as here:
            response, body = ask(here, "/")
            assert (response.status, b"no page" in body) == (404, True)
            assert ask(here, "/metrics")[0].status == 200


@contextlib.contextmanager
def made(host: str, access: Access) -> Iterator[Server]:
    """A server that listens, and does not serve."""
    server = Server(Address(host, 0), PAGES, access=access)
    try:
        yield server
    finally:
        server.server_close()


class TestHosts:
    """A web page from elsewhere whose name was made to lead here."""

    @pytest.mark.parametrize(
        ("bound", "host", "status"),
        [
            ("127.0.0.1", "localhost:9464", 200),
            ("127.0.0.1", "LocalHost", 200),
            ("127.0.0.1", "127.0.0.1", 200),
            ("127.0.0.1", "[::1]:9464", 200),
            ("127.0.0.1", "proxy.example", 200),
            ("127.0.0.1", "proxy.example.:80", 200),
            ("127.0.0.1", "evil.example:9464", 403),
            ("127.0.0.1", "127.0.0.1.evil.example", 403),
            ("127.0.0.1", "10.0.0.1", 403),
            ("127.0.0.1", "node-7", 403),
            ("127.0.0.1", "[", 403),
            ("127.0.0.1", "", 403),
            ("0.0.0.0", "10.1.2.3:9464", 200),  # noqa: S104  # for the moment of a test
            ("0.0.0.0", "[fd00::1]:9464", 200),  # noqa: S104  # ^
            ("0.0.0.0", "localhost:9464", 200),  # noqa: S104  # ^
            ("0.0.0.0", "node-7:9464", 200),  # noqa: S104  # ^
            ("0.0.0.0", "kvfix.monitoring.svc:9464", 200),  # noqa: S104  # ^
            ("0.0.0.0", "kvfix.monitoring.svc.cluster.local.", 200),  # noqa: S104  # ^
            ("0.0.0.0", "proxy.example", 200),  # noqa: S104  # ^
            ("0.0.0.0", "evil.example:9464", 403),  # noqa: S104  # ^
            ("0.0.0.0", "svc.evil.example:9464", 403),  # noqa: S104  # ^
            ("0.0.0.0", "10.1.2.3.evil.example", 403),  # noqa: S104  # ^
            ("0.0.0.0", "[", 403),  # noqa: S104  # ^
        ],
    )
    def test_a_name_that_anybody_can_register_is_refused(self, bound: str, host: str, status: int) -> None:
        """On loopback all but loopback's own, else all but addresses and this network's names; but what was allowed."""
        with made(bound, Access(frozenset({"proxy.example"}))) as here:
            assert here.is_for_us(host) is (status == 200)

    @pytest.mark.parametrize("path", ["/", "/page/a.js", "/healthz", "/metrics", "/api/now", "/nothing"])
    def test_a_refusal_is_for_every_page(self, path: str) -> None:
        """403 for whatever was asked by such a name, and never a word of the page."""
        response, body = ask(_shared, path, Host="evil.example")
        assert (response.status, b"--allow-host" in body) == (403, True)

    def test_our_own_name_is_ours(self) -> None:
        """Beyond loopback, the machine's name and the one that we were told to listen on are answered."""
        with made("0.0.0.0", Access()) as here:  # noqa: S104  # for the moment of a test
            here._own_name = "node-7.example"
            assert here.is_for_us("node-7.example:9464")
            here.address = Address("kvfix.example", 1)
            assert here.is_for_us("KVfix.example")

    def test_with_a_token_any_name_does(self) -> None:
        """Beyond loopback a page that does not know the token reads no figure; on loopback the name counts still."""
        for bound, good in (("0.0.0.0", True), ("127.0.0.1", False)):  # noqa: S104  # for the moment of a test
            with made(bound, Access(lets_in=lambda _: False)) as here:
                assert here.is_for_us("evil.example") is good
                assert not here.knows("x")

    def test_a_refusal_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """With the name, made harmless, and what to do; a thousand of them fill no disk."""
        with made("127.0.0.1", Access()) as here:
            assert not any(here.is_for_us(name) for name in ("e\x1bvil.example", "more.example"))
        (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert said.fields == {"host": "e\\x1bvil.example"}  # type: ignore[attr-defined]  # of our own log


def token_in(folder: Path) -> Path:
    """A file there that holds the token."""
    file = folder / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that wants the token."""
    with serving(access=Access(lets_in=TokenFile(token_in(tmp_path_factory.mktemp("token"))).lets_in)) as found:
        yield found


class TestToken:
    """Bearer tokens."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """A file with a token."""
        return token_in(tmp_path)

    @pytest.mark.parametrize("path", [*FIGURES, "/nothing"])
    @pytest.mark.parametrize(
        "header", ["", "Bearer", f"Basic {TOKEN}", "Bearer x", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ü"]
    )
    def test_no_figure_without_it(self, here: Server, path: str, header: str) -> None:
        """401 and how to ask, whatever is asked for; as JSON to who asks the API."""
        response, body = ask(here, path, **({"Authorization": header} if header else {}))
        assert response.status == 401
        assert (response.getheader("WWW-Authenticate") or "").startswith("Bearer")
        assert b"--token-file" in body
        assert TOKEN.encode() not in body
        assert (response.getheader("Content-Type") == "application/json") is path.startswith("/api/")

    @pytest.mark.parametrize("path", FIGURES)
    @pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer  {TOKEN} "])
    def test_all_figures_with_it(self, here: Server, path: str, header: str) -> None:
        """As without a token's being asked for; not by HEAD alone."""
        for method in ("GET", "HEAD"):
            assert ask(here, path, method, Authorization=header)[0].status == 200

    def test_the_page_and_the_probes_are_open(self, here: Server) -> None:
        """The page has no figure; a probe says its status, and the rest only to who has the token."""
        assert ask(here, "/")[0].status == ask(here, "/page/a.js")[0].status == 200
        assert json.loads(ask(here, "/healthz")[1]) == {"status": "ok"}
        assert json.loads(ask(here, "/readyz")[1]) == {"status": "no"}
        _, body = ask(here, "/readyz", Authorization=f"Bearer {TOKEN}")
        assert json.loads(body)["folders"] == ["/secret"]

    def test_a_new_token_counts_at_once(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The old one is none then; while the file is gone nobody is let in, which is said once."""
        access = TokenFile(file)
        file.write_text("f" * 32)
        assert (access.lets_in(f"Bearer {TOKEN}"), access.lets_in("Bearer " + "f" * 32)) == (False, True)
        file.unlink()
        assert not any(access.lets_in(header) for header in ("Bearer " + "f" * 32, "Bearer ", None))
        assert caplog.text.count("nobody is let in") == 1
        file.write_text(TOKEN)
        assert access.lets_in(f"Bearer {TOKEN}")

    @pytest.mark.parametrize(
        "text", ["", "short", "x" * 15, "x" * 5000, "two words of token", "ümläut" * 5, "a\0" * 16]
    )
    def test_what_is_no_token_is_refused(self, file: Path, text: str) -> None:
        """The message names the file, and what would do; it does not have what is in the file."""
        file.write_text(text)
        with pytest.raises(SettingError, match=re.escape(f"{file} cannot be used; allowed: one token")) as raised:
            TokenFile(file)
        assert not text or text not in str(raised.value).replace(str(file), "")

    @settings(deadline=None)
    @given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40) | st.text(max_size=40))
    def test_no_other_token_is_let_in(self, other: str) -> None:
        """Whatever the header is, but for the right one."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "token")
            file.write_text(TOKEN)
            assert TokenFile(file).lets_in(f"Bearer {other}") is (other.strip() == TOKEN)


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
            # Connections are taken in their order: when the last was answered, all had been; it is closed after that.
            wait_until(lambda: len(here._open) == MOST_CONNECTIONS - 1)
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
            "processes": [],
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
        follower = SimpleNamespace(
            last_turn=0.0, folders_readable=True, scanned=True, engines=[engine], processes=[], refused={}
        )
        told = Health(follower, metrics, [Path("/r")], Clock()).summary()["engines"]
        assert isinstance(told, list)
        assert told[0]["events"]["published"] is None
        assert KEY not in metrics._engines


def test_the_limits_are_those_that_the_tests_use() -> None:
    """The module's docstring speaks of the constants that bound it."""
    assert "MOST_CONNECTIONS" in (server.__doc__ or "")
    assert "LONGEST_S" in (server.__doc__ or "")
