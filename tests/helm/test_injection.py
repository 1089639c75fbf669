# SPDX-License-Identifier: Apache-2.0
"""What is injected into a pod, by the webhook's function and by the chart's policy: the same, and what was promised."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helm.cel import Policy
from tests.helm.pods import pods
from tests.helm.tools import injection_json, one, rendered
from vllm_kvfix_sidecar.injection.patch import INJECTED, NOT_INJECTED, Injection, InjectionError, patch

VERSIONS = ("1.29", "1.33", "1.36", "1.37")
# Options of the chart that change what is injected.
VARIANTS = {
    "default": (),
    "minimal": ("--set=injection.profile=minimal", "--set=injection.fix=off"),
    "ptrace by name": ("--set=injection.profile=ptrace", "--set=injection.select=containerName"),
    "image volume, all of OTLP": (
        "--set=injection.delivery=imageVolume",
        "--set=otlp.endpoint=https://collector:4318",
        "--set=otlp.headersSecret=otlp",
        "--set=otlp.caSecret=ca",
        "--set=sidecar.tokenSecret=token",
        '--set-json=sidecar.extraEnv=[{"name":"OTEL_TRACES_SAMPLER","value":"a\\"b\\\\\\\\c<d>&\'"}]',
    ),
}
POLICIES = {name: Policy(one(rendered(*told), "MutatingAdmissionPolicy")) for name, told in VARIANTS.items()}
INJECTIONS = {name: Injection.of_json(injection_json(*told)) for name, told in VARIANTS.items()}
VLLM = {"name": "vllm", "image": "vllm/vllm-openai:v0.25.1"}


def pod_of(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A pod with those containers."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [*containers], **spec}}


def injected(pod: dict[str, Any], variant: str = "default") -> dict[str, Any]:
    """The pod after the patch."""
    made = patch(pod, INJECTIONS[variant])
    changed: dict[str, Any] = jsonpatch.apply_patch(pod, list(made.operations))
    return changed


@pytest.mark.parametrize("variant", VARIANTS)
@given(pod=pods)
@settings(max_examples=100, deadline=None)
def test_policy_and_webhook_inject_the_same(variant: str, pod: dict[str, Any]) -> None:
    """Whatever the pod: the policy's CEL, evaluated, gives the operations that the function gives, in their order."""
    assert POLICIES[variant].patch(pod) == list(patch(pod, INJECTIONS[variant]).operations)


@pytest.mark.parametrize("variant", VARIANTS)
@given(pod=pods)
@settings(max_examples=40, deadline=None)
def test_a_patch_can_be_applied_and_a_second_one_changes_nothing(variant: str, pod: dict[str, Any]) -> None:
    """The patched pod is left alone, as the annotation says; only a pod that was refused is told why again."""
    before = copy.deepcopy(pod)
    changed = injected(pod, variant)
    assert pod == before
    again = patch(changed, INJECTIONS[variant])
    if NOT_INJECTED not in changed["metadata"].get("annotations", {}):
        assert not again.operations
    else:
        assert jsonpatch.apply_patch(changed, list(again.operations)) == changed


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_injected_pod_is_valid(variant: str, version: str) -> None:
    """Strictly, for that Kubernetes; an image volume is known to those that have it alone."""
    changed = injected(pod_of(VLLM, {"name": "proxy", "image": "envoy:1"}), variant)
    if "imageVolume" in " ".join(VARIANTS[variant]) and version == "1.29":
        with pytest.raises(kubernetes_validate.ValidationError, match="image"):
            kubernetes_validate.validate(changed, version, strict=True)
    else:
        kubernetes_validate.validate(changed, version, strict=True)


def test_the_sidecar_is_first_in_line_and_stays() -> None:
    """Plugin, sidecar (restarted always), then the pod's own init containers; its containers keep their places."""
    changed = injected(pod_of(VLLM, initContainers=[{"name": "download", "image": "b"}]))
    found = changed["spec"]["initContainers"]
    assert [container["name"] for container in found] == ["vllm-kvfix-plugin", "vllm-kvfix", "download"]
    assert [container.get("restartPolicy") for container in found] == [None, "Always", None]
    assert [container["name"] for container in changed["spec"]["containers"]] == ["vllm"]


def test_pythonpath_is_put_before_what_was_there() -> None:
    """It is prefixed, not replaced; an empty one leaves no colon, which would be the working directory."""
    for before, after in ((None, ""), ("", ""), ("/a:/b", ":/a:/b")):
        env = [] if before is None else [{"name": "PYTHONPATH", "value": before}]
        (container,) = injected(pod_of({**VLLM, "env": env}))["spec"]["containers"]
        (found,) = [entry["value"] for entry in container["env"] if entry["name"] == "PYTHONPATH"]
        assert found == f"/opt/vllm-kvfix/plugin{after}"


def test_a_variable_that_the_pod_sets_stays() -> None:
    """Who switched the fix off for a pod is heard."""
    (container,) = injected(pod_of({**VLLM, "env": [{"name": "VLLM_KVFIX_PATCH", "value": "off"}]}))["spec"][
        "containers"
    ]
    assert [entry["value"] for entry in container["env"] if entry["name"] == "VLLM_KVFIX_PATCH"] == ["off"]


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            pod_of(
                {**VLLM, "env": [{"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]}
            ),
            "PYTHONPATH of container vllm comes from valueFrom, so that nothing can be put before it",
        ),
        (pod_of({"name": "server", "image": "i"}), "no container is named vllm or main"),
        (pod_of(VLLM, volumes=[{"name": "vllm-kvfix-rings", "emptyDir": {}}]), "it has a volume of our name already"),
    ],
)
def test_a_pod_that_cannot_be_changed_is_left_alone_and_told_why(pod: dict[str, Any], reason: str) -> None:
    """Nothing but an annotation with the reason."""
    changed = injected(pod)
    assert changed["metadata"].pop("annotations") == {NOT_INJECTED: reason}
    assert changed == pod


def test_an_annotation_names_the_container() -> None:
    """It goes before the default names."""
    pod = pod_of(VLLM, {"name": "engine", "image": "i"})
    pod["metadata"]["annotations"] = {"vllm-kvfix.dev/container": "engine"}
    first, second = injected(pod)["spec"]["containers"]
    assert first == VLLM
    assert any(entry["name"] == "PYTHONPATH" for entry in second["env"])


def test_by_container_name_other_pods_are_left_alone() -> None:
    """A pod without such a container is not even told."""
    assert not patch(pod_of({"name": "db", "image": "i"}), INJECTIONS["ptrace by name"]).operations


def test_processes_are_shared_as_the_profile_asks_and_the_pod_allows() -> None:
    """Not in the profile minimal, nor where the pod says no, nor with the host's processes: that is invalid."""
    assert injected(pod_of(VLLM))["spec"]["shareProcessNamespace"] is True
    assert "shareProcessNamespace" not in injected(pod_of(VLLM), "minimal")["spec"]
    assert injected(pod_of(VLLM, shareProcessNamespace=False))["spec"]["shareProcessNamespace"] is False
    assert "shareProcessNamespace" not in injected(pod_of(VLLM, hostPID=True))["spec"]


def test_the_pod_says_what_was_injected() -> None:
    """Version and profile in an annotation, and a label to find the pod by."""
    metadata = injected(pod_of(VLLM))["metadata"]
    assert metadata["annotations"][INJECTED] == f"{INJECTIONS['default'].version} shared"
    assert metadata["labels"][INJECTED] == "true"


@pytest.mark.parametrize(
    "pod", [{"spec": 1}, {"metadata": []}, {"spec": {"containers": {}}}, {"spec": {"containers": [1]}}]
)
def test_what_is_no_pod_is_refused(pod: dict[str, Any]) -> None:
    """It is an error with a name, not one of Python's own."""
    with pytest.raises(InjectionError):
        patch(pod, INJECTIONS["default"])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)
    )
)
def test_what_is_no_injection_is_refused(told: object) -> None:
    """Any JSON but the chart's is an error that has a name."""
    with pytest.raises(InjectionError):
        Injection.of_json(json.dumps(told))
