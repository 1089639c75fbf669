# SPDX-License-Identifier: Apache-2.0
"""As much of an API server as Helm asks while it renders an upgrade: what there is, and one Secret."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of the kinds that the chart makes, those that Helm looks up.
_KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "configmaps": "ConfigMap",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "admissionregistration.k8s.io/v1": {"mutatingwebhookconfigurations": "MutatingWebhookConfiguration"},
    "apps/v1": {"deployments": "Deployment"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
}


def _discovery() -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths, and what lies there."""
    yield "/version", {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}
    yield "/api", {"kind": "APIVersions", "versions": ["v1"]}
    groups = []
    for group_version, kinds in _KINDS.items():
        resources = [
            {
                "name": name,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": "webhook" not in name,
                "verbs": ["get"],
            }
            for name, kind in kinds.items()
        ]
        listed = {"kind": "APIResourceList", "groupVersion": group_version, "resources": resources}
        group, _, version = group_version.rpartition("/")
        yield f"/{'apis' if group else 'api'}/{group_version}", listed
        if group:
            told = {"groupVersion": group_version, "version": version}
            groups.append({"name": group, "versions": [told], "preferredVersion": told})
    yield "/apis", {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


@contextlib.contextmanager
def serving(secret: dict[str, Any] | None) -> Iterator[str]:
    """Its address; ``secret`` is the only object that it has."""
    answers = dict(_discovery())
    if secret is not None:
        metadata = secret["metadata"]
        answers[f"/api/v1/namespaces/{metadata['namespace']}/secrets/{metadata['name']}"] = secret

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
