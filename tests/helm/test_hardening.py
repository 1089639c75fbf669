# SPDX-License-Identifier: Apache-2.0
"""A scan for hardening: what it finds is mended, or meant and said why."""

from __future__ import annotations

from typing import Any

import jsonpatch
import pytest
import yaml

from tests.helm.hardening import DEPLOYMENT, MEANT, POD, TEST, findings
from tests.helm.tools import injection_json, rendered
from vllm_kvfix_sidecar.injection.patch import Injection, patch

pytestmark = pytest.mark.e2e

NAMES = {
    "Deployment t-vllm-kvfix-webhook": DEPLOYMENT,
    "Pod t-vllm-kvfix-webhook-test": TEST,
    "Pod chat": POD,
}
# Of a container in which nothing is found: so what is found in its pod is ours.
VLLM: dict[str, Any] = {
    "name": "vllm",
    "image": f"registry.example/vllm@sha256:{'0' * 64}",
    "imagePullPolicy": "Always",
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "capabilities": {"drop": ["ALL"]},
    },
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
    "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}},
    "livenessProbe": {"httpGet": {"path": "/health", "port": 8000}},
}


def pod(name: str, **context: Any) -> dict[str, Any]:
    """In a namespace with a NetworkPolicy for it; ``context``: another one of its container."""
    metadata = {"name": name, "namespace": "llm", "labels": {"app": "chat"}}
    container = {**VLLM, "securityContext": context} if context else VLLM
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """What one scan finds in the chart, and in pods: as they were, injected, and with a privileged container."""
    folder = tmp_path_factory.mktemp("hardening")
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "llm", "namespace": "llm"},
        "spec": {"podSelector": {"matchLabels": {"app": "chat"}}},
    }
    made = patch(pod("chat"), Injection.of_json(injection_json()))
    injected = jsonpatch.apply_patch(pod("chat"), list(made.operations))
    pods = [injected, pod("before"), pod("bad", privileged=True)]
    objects = [policy, *pods, *rendered("--set=injection.mode=webhook")]
    (folder / "all.yaml").write_text(yaml.safe_dump_all(objects))
    return {(check, NAMES.get(name, name)) for check, name in findings(folder)}


def test_what_is_found_is_meant(found: set[tuple[str, str]]) -> None:
    """No finding is without a reason, and no reason is without its finding."""
    ours = {finding for finding in found if finding[1] not in {"Pod before", "Pod bad"}}
    assert ours - MEANT.keys() == set(), "mend it, or say in tests/helm/hardening.py why it stays"
    assert MEANT.keys() - ours == set(), "it is not found any more: take it out of tests/helm/hardening.py"


def test_the_scan_finds(found: set[tuple[str, str]]) -> None:
    """A privileged container; and nothing in the pod as it was, so what is found in the injected one is ours."""
    assert ("CKV_K8S_16", "Pod bad") in found
    assert "Pod before" not in {name for _, name in found}
