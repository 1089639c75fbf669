# SPDX-License-Identifier: Apache-2.0
"""The webhook as a process of its own, and what an API server does with it: reviews over one kept connection."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.helm.tools import injection_json
from tests.sidecar_e2e.certificates import Certificate, self_signed
from tests.sidecar_e2e.processes import Child, clean_environ
from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READY_S = 180.0


def review(pod: Any, **request: Any) -> dict[str, Any]:
    """What an API server sends for a new pod (admission.k8s.io/v1; the same fields from 1.29 to 1.37)."""
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    resource = {"group": "", "version": "v1", "resource": "pods"}
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": kind,
            "resource": resource,
            "requestKind": kind,
            "requestResource": resource,
            "namespace": "llm",
            "operation": "CREATE",
            "userInfo": {
                "username": "system:serviceaccount:kube-system:replicaset-controller",
                "uid": "d2a1",
                "groups": ["system:serviceaccounts", "system:authenticated"],
                "extra": {"authentication.kubernetes.io/credential-id": ["JTI=1"]},
            },
            "object": pod,
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1", "fieldManager": "controller"},
            **request,
        },
    }


class Client:
    """A connection to the webhook, kept for many reviews as an API server does."""

    def __init__(self, port: int, certificate: Certificate) -> None:
        self._port = port
        self.context = ssl.create_default_context(cafile=str(certificate.path))
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self._port, timeout=20, context=self.context)

    def post(self, body: bytes, path: str = "/inject") -> tuple[int, bytes]:
        """Status and body of the answer."""
        try:
            self._connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self._connection = self._connect()  # it ended the last one after a refusal, as it should
            self._connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
        return answer.status, answer.read()

    def get(self, path: str) -> int:
        """The status of a page."""
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status

    def review(self, told: object) -> dict[str, Any]:
        """The response in the review that came back."""
        status, body = self.post(json.dumps(told).encode())
        assert status == 200, body
        answer = json.loads(body)
        assert (answer["kind"], answer["apiVersion"]) == ("AdmissionReview", "admission.k8s.io/v1")
        response: dict[str, Any] = answer["response"]
        return response

    def close(self) -> None:
        """End it."""
        self._connection.close()


class Running:
    """A webhook in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.certificate = self_signed(folder)
        self.injection = folder / "injection.json"
        self.injection.write_text(injection_json())
        command = [sys.executable, "-m", "vllm_kvfix_sidecar.injection.webhook", f"--injection={self.injection}"]
        command += [f"--certificate={self.certificate.path}", f"--key={self.certificate.key}"]
        environ = {**clean_environ(), "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "sidecar")))}
        self.child = Child("webhook", [*command, "--host=127.0.0.1", "--port=0"], folder, environ)
        self.child.wait_until(lambda: "started" in self.child.log(), READY_S, "the webhook has started")
        (line,) = [line for line in self.child.log().splitlines() if "started" in line]
        self.port = int(json.loads(line)["fields"]["port"])

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A connection to it."""
        made = Client(self.port, self.certificate)
        try:
            yield made
        finally:
            made.close()
