# SPDX-License-Identifier: Apache-2.0
"""Each way of deploying vLLM: a pod as its chart makes it, before and after (deployments/injected)."""

from __future__ import annotations

from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
import yaml

from tests.helm.cel import Policy
from tests.helm.deployments import DEPLOYMENTS, Deployment
from tests.helm.pod_security import PRIVILEGED, RESTRICTED, level
from tests.helm.tools import injection_json, one, rendered
from vllm_kvfix_sidecar.injection.patch import Injection, patch

ALL = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda found: found.name)
VERSIONS = ("1.29", "1.37")


def after(deployment: Deployment) -> dict[str, Any]:
    """The pod that was looked at in a review; test_derived.py holds it against what is made now."""
    pod: dict[str, Any] = yaml.safe_load(deployment.injected_path.read_text())
    return pod


@ALL
def test_the_policy_injects_the_same_pod(deployment: Deployment) -> None:
    """Its selector lets the pod in, and its CEL, evaluated and applied, makes the pod that the webhook makes."""
    told = one(rendered(*deployment.options), "MutatingAdmissionPolicy")
    pod = deployment.pod()
    wanted = told["spec"]["matchConstraints"].get("objectSelector", {}).get("matchLabels", {})
    assert wanted.items() <= pod["metadata"]["labels"].items()
    assert jsonpatch.apply_patch(pod, Policy(told).patch(pod)) == after(deployment)


@ALL
@pytest.mark.parametrize("version", VERSIONS)
def test_before_and_after_are_valid(deployment: Deployment, version: str) -> None:
    """Strictly."""
    for pod in (deployment.pod(), after(deployment)):
        kubernetes_validate.validate(pod, version, strict=True)


@ALL
def test_a_namespace_that_let_it_in_still_does(deployment: Deployment) -> None:
    """The level of PodSecurity is the same after; but with the profile ptrace, which only `privileged` lets in."""
    assert level(deployment.pod()) == deployment.level
    assert level(after(deployment)) == deployment.level
    traced = Injection.of_json(injection_json("--set=injection.profile=ptrace", *deployment.options))
    pod = deployment.pod()
    assert level(jsonpatch.apply_patch(pod, list(patch(pod, traced).operations))) == PRIVILEGED


@ALL
def test_nothing_of_the_pod_is_lost(deployment: Deployment) -> None:
    """Containers, volumes, variables and mounts are there as they were and in their order, ours beside them."""
    assert_kept(deployment.pod()["spec"], after(deployment)["spec"])


def test_our_own_pods_are_let_in_by_every_namespace() -> None:
    """The webhook's and the test's pass the strictest level."""
    for found in rendered("--set=injection.mode=webhook"):
        if found["kind"] in {"Deployment", "Pod"}:
            assert level(found if found["kind"] == "Pod" else found["spec"]["template"]) == RESTRICTED


def assert_kept(before: Any, now: Any, path: str = "") -> None:
    """Whatever was there is there now; a list may have more, a PYTHONPATH more before it."""
    if isinstance(before, dict):
        for key, value in before.items():
            assert_kept(value, now[key], f"{path}.{key}")
    elif isinstance(before, list) and before and isinstance(before[0], dict):
        names = [_name(found) for found in now]
        found = [names.index(_name(part)) for part in before]
        assert found == sorted(found), path
        for part, index in zip(before, found, strict=True):
            assert_kept(part, now[index], f"{path}[{_name(part)}]")
    elif path.endswith("[PYTHONPATH].value"):
        assert now.endswith(f":{before}")
    else:
        assert before in (now, []), path


def _name(found: dict[str, Any]) -> str:
    return str(found.get("name") or found.get("containerPort") or found)
