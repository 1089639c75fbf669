# SPDX-License-Identifier: Apache-2.0
"""The chart under real Helm 3 and 4: it lints, refuses wrong values, and makes what Kubernetes takes strictly."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from tests.helm.tools import CHART, one, rendered, run_helm
from vllm_kvfix import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

MAJORS = (3, 4)
VERSIONS = ("1.29", "1.33", "1.36", "1.37")
# Of the operators of Prometheus and cert-manager: no part of Kubernetes, so nothing here knows their shape.
FOREIGN = {"PodMonitor", "PrometheusRule", "Issuer", "Certificate"}
# First release with the kind, where that is not the first we support.
SINCE = {"MutatingAdmissionPolicy": "1.36", "MutatingAdmissionPolicyBinding": "1.36"}
ALL = (
    "--set=podMonitor.enabled=true",
    "--set=podMonitor.labels.release=kps",
    "--set=prometheusRule.enabled=true",
    "--set=prometheusRule.labels.release=kps",
    "--set=dashboards.enabled=true",
    "--set=networkPolicy.denyingNamespaces={llm}",
    "--set=otlp.endpoint=http://collector.monitoring:4317",
    '--set-json=extraObjects=[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"{{ .Release.Name }}"}}]',
)
CASES = {
    "policy": (),
    "policy, all": ALL,
    "webhook": ("--set=injection.mode=webhook",),
    "webhook, all": ("--set=injection.mode=webhook", "--set=webhook.certManager.enabled=true", *ALL),
    "none": ("--set=injection.mode=none", *ALL),
}


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("case", CASES)
def test_it_lints(major: int, case: str) -> None:
    """Strictly: a warning fails."""
    api = "--kube-version=1.36.0"
    done = run_helm(major, "lint", "--strict", str(CHART), api, *(CASES[case] or ("--set=injection.mode=none",)))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(case: str, version: str) -> None:
    """Strictly, for each Kubernetes that has its kind; a kind that nothing knows is a failure, but for operators'."""
    objects = rendered(*CASES[case])
    assert objects or case == "none"
    for found in objects:
        if found["kind"] in FOREIGN or version < SINCE.get(found["kind"], "1"):
            continue
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_helm_3_and_4_make_the_same(case: str) -> None:
    """But for the certificate, which is new each time."""
    three, four = (_without_certificates(rendered(*CASES[case], major=major)) for major in MAJORS)
    assert three == four


def _without_certificates(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = json.dumps(sorted(objects, key=lambda found: (found["kind"], found["metadata"]["name"])))
    loaded: list[dict[str, Any]] = json.loads(
        re.sub(r'"(ca\.crt|tls\.crt|tls\.key|caBundle|vllm-kvfix\.dev/made)": "[^"]+"', r'"\1": ""', text)
    )
    return loaded


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--set=unknown=1", "unknown"),
        ("--set=injection.modus=webhook", "modus"),
        ("--set=injection.mode=operator", "mode"),
        ("--set=injection.profile=root", "profile"),
        ("--set=injection.fix=yes", "fix"),
        ("--set=injection.containerNames={}", "containerNames"),
        ("--set=injection.ring.sizeLimit=many", "sizeLimit"),
        ("--set=sidecar.port=0", "port"),
        ("--set=image.digest=latest", "digest"),
        ("--set=otlp.endpoint=collector:4317", "endpoint"),
        ("--set=webhook.replicas=0", "replicas"),
        ("--set=podMonitor.interval=often", "interval"),
    ],
)
def test_a_wrong_value_is_refused_by_name(major: int, option: str, named: str) -> None:
    """The schema says which value it is."""
    done = run_helm(major, "template", "t", str(CHART), "--set=injection.mode=none", option)
    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize("major", MAJORS)
def test_a_cluster_without_policies_is_told_the_other_modes(major: int) -> None:
    """Nothing is installed that could not work."""
    done = run_helm(major, "template", "t", str(CHART))
    assert done.returncode != 0
    assert "injection.mode=webhook" in done.stderr
    assert "injection.mode=none" in done.stderr


@pytest.mark.parametrize(("known", "chosen"), [(["v1"], "v1"), (["v1beta1"], "v1beta1"), (["v1beta1", "v1"], "v1")])
def test_the_newest_api_that_the_cluster_has_is_used(known: list[str], chosen: str) -> None:
    """v1 before v1beta1."""
    apis = [f"--api-versions=admissionregistration.k8s.io/{version}/MutatingAdmissionPolicy" for version in known]
    done = run_helm(4, "template", "t", str(CHART), *apis)
    found = [told["apiVersion"] for told in yaml.safe_load_all(done.stdout) if told]
    assert found == [f"admissionregistration.k8s.io/{chosen}"] * 2


def _containers(case: str) -> Iterator[dict[str, Any]]:
    for found in rendered(*CASES[case]):
        if found["kind"] in {"Deployment", "Pod"}:
            spec = found["spec"]["template"]["spec"] if found["kind"] == "Deployment" else found["spec"]
            assert spec["automountServiceAccountToken"] is False
            yield from spec["containers"]


def test_our_own_pods_are_held_to_the_least() -> None:
    """No root, no escalation, a read-only root, no capability, limits of memory; no token of the API server."""
    containers = list(_containers("webhook"))
    assert len(containers) == 2
    for container in containers:
        context = container["securityContext"]
        assert (context["runAsNonRoot"], context["readOnlyRootFilesystem"]) == (True, True)
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["resources"]["limits"]["memory"]


def test_what_fails_lets_pods_start() -> None:
    """Both ways ignore their own failure."""
    assert one(rendered(), "MutatingAdmissionPolicy")["spec"]["failurePolicy"] == "Ignore"
    (hook,) = one(rendered("--set=injection.mode=webhook"), "MutatingWebhookConfiguration")["webhooks"]
    assert hook["failurePolicy"] == "Ignore"
    assert hook["clientConfig"]["caBundle"]


def test_both_ways_select_the_same_pods() -> None:
    """The same labels of namespace and pod; by container name, every pod of the namespace is asked."""
    for more in ((), ("--set=injection.select=containerName",)):
        objects = rendered(*more)
        policy = one(objects, "MutatingAdmissionPolicy")["spec"]["matchConstraints"]
        binding = one(objects, "MutatingAdmissionPolicyBinding")["spec"]["matchResources"]
        (hook,) = one(rendered("--set=injection.mode=webhook", *more), "MutatingWebhookConfiguration")["webhooks"]
        assert hook["namespaceSelector"] == binding["namespaceSelector"]
        assert hook.get("objectSelector") == policy.get("objectSelector")


def test_monitors_have_the_labels_that_they_are_selected_by() -> None:
    """Those of the values, and the port that the sidecar names."""
    objects = rendered(*ALL)
    monitor = one(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "kps"
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "kvfix-metrics"
    rules = one(objects, "PrometheusRule")
    assert rules["metadata"]["labels"]["release"] == "kps"
    assert rules["spec"]["groups"]
    boards = [found for found in objects if found["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    assert {json.loads(next(iter(board["data"].values())))["uid"] for board in boards}
    assert len(boards) == len(list((CHART / "files" / "dashboards").glob("*.json")))


def test_the_chart_is_of_this_release() -> None:
    """Its version and the image's are the package's."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_every_value_is_documented() -> None:
    """A line that begins with ``# --`` stands before each value that is none of a section."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        key = re.fullmatch(r"\s*[A-Za-z][\w-]*:\s*(\S.*)?", line)
        section = key and not key[1]
        if key and not section and not re.match(r"\s*(cpu|memory|vllm-kvfix.dev/inject|grafana_dashboard)", line):
            assert before.strip().startswith("#"), f"values.yaml: {line!r} has no comment"
