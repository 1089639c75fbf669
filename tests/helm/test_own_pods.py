# SPDX-License-Identifier: Apache-2.0
"""Where nothing is injected: what is written into pods by hand does the same, in each chart's own shape."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from tests.helm.deployments import DEPLOYMENTS
from tests.helm.test_deployments import VERSIONS, assert_kept
from tests.helm.tools import CHART, helm, injection_json, kubectl, run_kubectl
from tests.support import ROOT
from vllm_kvfix_sidecar.injection.patch import Injection, patch

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs" / "kubernetes"
KUSTOMIZE = ROOT / "helm" / "kustomize"
INJECTION = Injection.of_json(injection_json())
PODS = {found.name: found.pod() for found in DEPLOYMENTS}
OURS = [container["name"] for container in INJECTION.initContainers]
ROUTER = {"name": "router", "image": "router:1"}


def deployment(template: dict[str, Any], name: str = "chat", **labels: str) -> dict[str, Any]:
    """A Deployment of such pods."""
    metadata = {key: value for key, value in template["metadata"].items() if key != "generateName"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": metadata["labels"]},
            "template": {"metadata": metadata, "spec": template["spec"]},
        },
    }


def assert_whole(template: dict[str, Any], before: dict[str, Any], target: str, *, sidecar: bool = True) -> None:
    """Plugin, rings and sidecar are in, nothing is lost, it is valid, and an injection beside it changes nothing."""
    kept = copy.deepcopy(before["spec"])
    for container in kept["containers"]:  # where lists are merged by name, a PYTHONPATH is replaced: the docs say so
        container["env"] = [entry for entry in container.get("env", []) if entry["name"] != "PYTHONPATH"]
    assert_kept(kept, template["spec"])
    spec = template["spec"]
    assert [found["name"] for found in spec["initContainers"] if found["name"] in OURS] == OURS[: 1 + sidecar]
    (container,) = [found for found in spec["containers"] if found["name"] == target]
    assert {entry["name"]: entry.get("value") for entry in container["env"]}["PYTHONPATH"] == INJECTION.pythonPath
    names = {volume["name"] for volume in INJECTION.volumes}
    assert names <= {volume["name"] for volume in spec["volumes"]}
    assert names <= {mount["name"] for mount in container["volumeMounts"]}
    if sidecar:
        assert spec["shareProcessNamespace"] is True
        assert [found.get("restartPolicy") for found in spec["initContainers"] if found["name"] in OURS] == [
            None,
            "Always",
        ]
        assert not patch(template, INJECTION).operations
    for version in VERSIONS:
        kubernetes_validate.validate(deployment(template), version, strict=True)


def loaded(name: str) -> dict[str, Any]:
    """A file of the docs."""
    found: dict[str, Any] = yaml.safe_load((DOCS / name).read_text())
    return found


def written(folder: Path, name: str, *objects: dict[str, Any]) -> Path:
    """A file with those objects."""
    path = folder / name
    path.write_text(yaml.safe_dump_all(objects))
    return path


def test_a_deployment_of_ones_own_by_kubectl_patch(tmp_path: Path) -> None:
    """By the command that the file itself says, run by kubectl without a server."""
    file = written(tmp_path, "deployment.yaml", deployment(PODS["plain"]))
    told = ["patch", "--local", "--filename", str(file), "--patch-file", str(DOCS / "plain.yaml"), "--output=yaml"]
    changed = yaml.safe_load(run_kubectl(*told))
    assert_whole(changed["spec"]["template"], PODS["plain"], "vllm")
    assert [found["name"] for found in changed["spec"]["template"]["spec"]["initContainers"]] == OURS


def test_the_component_changes_the_deployments_with_the_label_alone(tmp_path: Path) -> None:
    """By kubectl kustomize; a Deployment without the label stays as it was."""
    other = deployment({"metadata": {"labels": {"app": "router"}}, "spec": {"containers": [ROUTER]}}, "router")
    labelled = deployment(PODS["plain"], **{"vllm-kvfix.dev/inject": "true"})
    written(tmp_path, "deployments.yaml", labelled, other)
    component = os.path.relpath(KUSTOMIZE, tmp_path.resolve())
    written(tmp_path, "kustomization.yaml", {"resources": ["deployments.yaml"], "components": [component]})
    found = {made["metadata"]["name"]: made for made in yaml.safe_load_all(run_kubectl("kustomize", str(tmp_path)))}
    assert_whole(found["chat"]["spec"]["template"], PODS["plain"], "vllm")
    assert found["router"] == other


@pytest.mark.parametrize("name", ["vllm-example-chart", "production-stack"])
@pytest.mark.parametrize("major", [3, 4])
def test_a_chart_without_a_place_for_it_by_a_post_renderer(name: str, major: int, tmp_path: Path) -> None:
    """By Helm itself: as an executable for 3, as a plugin for 4; the chart's other Deployments stay as they were."""
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    written(chart, "Chart.yaml", {"apiVersion": "v2", "name": "other", "version": "0.1.0"})
    router = deployment({"metadata": {"labels": {"app": "router"}}, "spec": {"containers": [ROUTER]}}, "t-router")
    written(chart / "templates", "all.yaml", deployment(PODS[name], "t-deployment-vllm"), router)
    environ = {
        **os.environ,
        "HELM_DATA_HOME": str(tmp_path / "data"),
        "PATH": f"{kubectl().parent}:{os.environ['PATH']}",
    }
    renderer = str(KUSTOMIZE / "post-render.sh") if major == 3 else "vllm-kvfix"
    if major == 4:
        subprocess.run([helm(4), "plugin", "install", str(KUSTOMIZE)], env=environ, check=True, capture_output=True)
    command = [str(helm(major)), "template", "t", str(chart), "--post-renderer", renderer]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found = {made["metadata"]["name"]: made for made in yaml.safe_load_all(done.stdout) if made}
    assert_whole(found["t-deployment-vllm"]["spec"]["template"], PODS[name], "vllm")
    assert found["t-router"] == router


def test_production_stack_by_values_has_the_fix_alone() -> None:
    """Its one init container, variables, volumes and mounts come from an entry of modelSpec; a sidecar has no place."""
    (model,) = loaded("production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    template = copy.deepcopy(PODS["production-stack"])
    init = dict(model["initContainer"])
    init["volumeMounts"] = init.pop("extraVolumeMounts")
    template["spec"]["initContainers"] = [init]
    container = template["spec"]["containers"][0]
    container["env"] += model["env"]
    container["volumeMounts"] += model["extraVolumeMounts"]
    template["spec"]["volumes"] += model["extraVolumes"]
    assert_whole(template, PODS["production-stack"], "vllm", sidecar=False)


def test_llm_d_by_values() -> None:
    """Its lists are free; its own native sidecar comes before."""
    values = loaded("llm-d-modelservice.yaml")
    decode = values["decode"]
    template = copy.deepcopy(PODS["llm-d"])
    template["metadata"]["labels"] |= values["modelArtifacts"]["labels"]
    template["metadata"]["annotations"] |= decode["podAnnotations"]
    spec = template["spec"]
    spec |= decode["extraConfig"]
    spec["initContainers"] += decode["initContainers"]
    spec["volumes"] += decode["volumes"]
    (told,) = decode["containers"]
    assert told["name"] == "vllm"
    for key in ("env", "volumeMounts"):
        spec["containers"][0][key] += told[key]
    assert_whole(template, PODS["llm-d"], "vllm")


def merged(template: dict[str, Any], told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A pod merged as Kubernetes and KServe do, strategically, by kubectl."""
    pod = {**template, "metadata": {**template["metadata"], "name": "chat"}}
    pod["metadata"].pop("generateName")
    file = written(folder, "pod.yaml", pod)
    change = written(folder, "patch.yaml", told)
    options = ["--local", "--type=strategic", "--filename", str(file), "--patch-file", str(change), "--output=yaml"]
    found: dict[str, Any] = yaml.safe_load(run_kubectl("patch", *options))
    return found


def test_kserve_merges_the_template_of_an_llminferenceservice(tmp_path: Path) -> None:
    """Into its container `main`; labels and annotations beside the template are those of the pods."""
    told = loaded("kserve-llm.yaml")["spec"]
    change = {"metadata": {key: told[key] for key in ("labels", "annotations")}, "spec": told["template"]}
    assert_whole(merged(PODS["kserve-llm"], change, tmp_path), PODS["kserve-llm"], "main")


def test_kserve_merges_an_inferenceservice_into_its_runtime(tmp_path: Path) -> None:
    """`model` becomes the runtime's container, the rest of the predictor the pod."""
    predictor = dict(loaded("kserve-runtime.yaml")["spec"]["predictor"])
    container = {"name": "kserve-container", **predictor.pop("model")}
    change = {"spec": {**predictor, "containers": [container]}}
    assert_whole(merged(PODS["kserve-runtime"], change, tmp_path), PODS["kserve-runtime"], "kserve-container")


PARENT = """\
{{- $kvfix := include "vllm-kvfix.podTemplate" (dict "of" (index .Subcharts "vllm-kvfix") "container" "server"
      "service" "a \\"chat\\" of ours" "pythonPath" "/opt/plugins") | fromYaml }}
apiVersion: v1
kind: Pod
metadata:
  name: chat
  labels:
    {{- toYaml $kvfix.metadata.labels | nindent 4 }}
  annotations:
    {{- toYaml $kvfix.metadata.annotations | nindent 4 }}
spec:
  {{- omit $kvfix.spec "containers" | toYaml | nindent 2 }}
  containers:
    - name: server
      image: v
      {{- omit (first $kvfix.spec.containers) "name" | toYaml | nindent 6 }}
"""


@pytest.mark.parametrize("major", [3, 4])
def test_a_chart_that_has_ours_as_a_dependency_takes_it_from_there(major: int, tmp_path: Path) -> None:
    """By one named template, with values of its own for us; names and a PYTHONPATH of its own are put in."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart / "charts" / "vllm-kvfix")
    (chart / "templates").mkdir()
    (chart / "templates" / "pod.yaml").write_text(PARENT)
    written(chart, "Chart.yaml", {"apiVersion": "v2", "name": "parent", "version": "0.1.0"})
    values = {"vllm-kvfix": {"injection": {"mode": "none"}, "otlp": {"endpoint": "http://collector:4317"}}}
    written(chart, "values.yaml", values)
    done = subprocess.run(
        [str(helm(major)), "template", "t", str(chart)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (pod,) = [found for found in yaml.safe_load_all(done.stdout) if found and found["kind"] == "Pod"]
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)
    (server,) = pod["spec"]["containers"]
    assert {"name": "PYTHONPATH", "value": f"{INJECTION.pythonPath}:/opt/plugins"} in server["env"]
    env = {entry["name"]: entry.get("value") for entry in pod["spec"]["initContainers"][1]["env"]}
    assert env["OTEL_SERVICE_NAME"] == 'a "chat" of ours'
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
    assert str(env["OTEL_RESOURCE_ATTRIBUTES"]).endswith("k8s.container.name=server")
