# SPDX-License-Identifier: Apache-2.0
"""The webhook as an API server meets it: a process, over TLS, with reviews of every kind, the hostile ones too."""

from __future__ import annotations

import base64
import json
import signal
import socket
from typing import TYPE_CHECKING, Any

import jsonpatch
import kubernetes_validate
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helm.pods import pods
from tests.helm.test_injection import INJECTIONS, VLLM, pod_of
from tests.helm.webhook_process import READY_S, Client, Running, review
from tests.sidecar_e2e.certificates import self_signed
from tests.sidecar_e2e.processes import wait_until
from vllm_kvfix_sidecar.injection import webhook
from vllm_kvfix_sidecar.injection.patch import patch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
INJECTION = INJECTIONS["default"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for all tests: so that it is up after each is part of each test."""
    made = Running(tmp_path_factory.mktemp("webhook"))
    with made.child:
        yield made


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    """A connection to it, which must answer to the end."""
    with running.client() as made:
        yield made
    with running.client() as after:
        assert after.get("/healthz") == 200


@pytest.mark.parametrize("version", ["1.29", "1.32", "1.35", "1.37"])
def test_a_pod_gets_the_patch_and_is_valid_with_it(client: Client, version: str) -> None:
    """The answer's uid is the question's, and the patch, applied, makes a pod that Kubernetes takes strictly."""
    pod = pod_of(VLLM)
    response = client.review(review(pod))
    assert response["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    operations = json.loads(base64.b64decode(response["patch"]))
    assert operations == list(patch(pod, INJECTION).operations)
    kubernetes_validate.validate(jsonpatch.apply_patch(pod, operations), version, strict=True)


@given(pod=pods)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_pod_is_allowed_and_gets_what_the_function_says(client: Client, pod: dict[str, Any]) -> None:
    """No pod is ever denied; the patch that goes over the wire is the function's."""
    response = client.review(review(pod))
    assert response["allowed"] is True
    told = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    assert told == list(patch(pod, INJECTION).operations)


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "UPDATE"},
        {"operation": "DELETE", "object": None, "oldObject": pod_of(VLLM)},
        {"resource": {"group": "apps", "version": "v1", "resource": "deployments"}},
        {"subResource": "ephemeralcontainers"},
        {"object": None},
        {"object": "pod"},
    ],
)
def test_what_is_no_new_pod_is_let_through(client: Client, request_: dict[str, Any]) -> None:
    """Allowed, and unchanged."""
    response = client.review(review(pod_of(VLLM), **request_))
    assert response == {"uid": response["uid"], "allowed": True}


def test_a_pod_of_a_wrong_shape_is_let_through_with_a_warning(client: Client) -> None:
    """Whether it may start is for Kubernetes to say."""
    response = client.review(review({"metadata": {}, "spec": {"containers": "none"}}))
    assert response["allowed"] is True
    assert response["warnings"] == ["vllm-kvfix: left alone: containers is no list of objects"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 1_000_000,
        json.dumps(
            {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "u"}}
        ).encode(),
        json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}).encode(),
        json.dumps(review({}, uid=7)).encode(),
        json.dumps(review({}, uid="")).encode(),
    ],
)
def test_what_is_no_review_is_refused(client: Client, body: bytes) -> None:
    """400, in one line, without a traceback."""
    status, said = client.post(body)
    assert status == 400
    assert said.startswith(b"it ")
    assert b"Traceback" not in said


def test_a_huge_review_is_refused_unread(running: Running, client: Client) -> None:
    """413 by its length alone."""
    del client
    with running.client() as other:
        raw = other.context.wrap_socket(
            socket.create_connection(("localhost", running.port), 20), server_hostname="localhost"
        )
        with raw:
            raw.sendall(b"POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


@given(body=st.binary(max_size=300))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_no_tls_or_no_http_leave_it_up(running: Running, client: Client, body: bytes) -> None:
    """Whatever is sent, bare or after a handshake; the next review is answered."""
    with socket.create_connection(("localhost", running.port), 20) as bare:
        bare.sendall(body)
    with socket.create_connection(("localhost", running.port), 20) as inner:
        secured = client.context.wrap_socket(inner, server_hostname="localhost")
        secured.sendall(body + b"\r\n\r\n")
        secured.close()
    assert client.review(review(pod_of(VLLM)))["allowed"] is True


def test_who_says_nothing_holds_up_nobody(running: Running, client: Client) -> None:
    """With idle connections before the handshake, a review is answered."""
    idle = [socket.create_connection(("localhost", running.port), 20) for _ in range(20)]
    try:
        assert client.review(review(pod_of(VLLM)))["allowed"] is True
    finally:
        for connection in idle:
            connection.close()


def test_a_new_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    """Who trusts the new one alone is answered, once both files have changed; half a pair changes nothing."""
    first, second = self_signed(tmp_path, "first"), self_signed(tmp_path, "second")
    server = webhook.Webhook(("127.0.0.1", 0), INJECTION, first.path, first.key)
    try:
        before = server._known
        first.key.write_bytes(second.key.read_bytes())
        server._looked -= webhook.LOOK_S
        server.service_actions()
        assert server._known == before
        first.path.write_bytes(second.path.read_bytes())
        server._looked -= webhook.LOOK_S
        server.service_actions()
        assert server._known != before
    finally:
        server.server_close()


def test_it_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """SIGTERM: exit code 0, at once."""
    made = Running(tmp_path)
    with made.child:
        made.child.signal(signal.SIGTERM)
        assert made.child.wait(READY_S) == 0
        wait_until(lambda: "stopped" in made.child.log(), READY_S, "it says so")


@pytest.mark.parametrize(("text", "code"), [("{}", 2), ("no JSON", 2), (None, 1)])
def test_what_cannot_be_injected_is_said_at_the_start(
    text: str | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file and the cause are named."""
    file = tmp_path / "injection.json"
    if text is not None:
        file.write_text(text)
    assert webhook.main([f"--injection={file}", "--certificate=c", "--key=k"]) == code
    assert str(file) in capsys.readouterr().err
