# SPDX-License-Identifier: Apache-2.0
"""What to write into pods of one's own where nothing is injected: the chart's patch, and values for others' charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from tests.helm.tools import one, rendered

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN = """\
# For a Deployment of your own with a container `vllm`:
#   kubectl patch deployment NAME --patch-file docs/kubernetes/plain.yaml
# A PYTHONPATH that the container has is replaced: add it behind, after a colon. One that comes from valueFrom has to
# become a value first.
"""
_KUSTOMIZE = "# The same as docs/kubernetes/plain.yaml; kustomize wants a name, and does not look at it.\n"
_LLM_D = """\
# For llm-d-modelservice: `--values docs/kubernetes/llm-d-modelservice.yaml` after your own, for decode; prefill is the
# same. Helm replaces lists: where your values have one of these, write these entries into it.
"""
_PRODUCTION_STACK = """\
# For production-stack: the fix alone; its values have no place for a sidecar, which helm/kustomize brings
# (--post-renderer). Helm replaces lists: write these keys into each entry of your modelSpec. One that has an
# initContainer already keeps it: delivery imageVolume (Kubernetes 1.35) needs none.
"""
_KSERVE_LLM = """\
# For KServe's LLMInferenceService: KServe merges the template into its own. kubectl patches no list of a custom
# resource by name, so write it into your manifest; into `prefill` too, where there is one.
"""
_KSERVE_RUNTIME = """\
# For KServe's InferenceService with a ServingRuntime: `model` becomes the container `kserve-container`, what stands
# beside it is merged into the pod. For serverless ones Knative has to allow init containers, the downward API and
# shared processes.
"""


def template(container: str, *options: str) -> dict[str, Any]:
    """The chart's patch of a pod template."""
    told = rendered("--set=injection.mode=none", f"--set=injection.containerNames={{{container}}}", *options)
    patch = yaml.safe_load(one(told, "ConfigMap")["data"]["patch.yaml"])
    found: dict[str, Any] = patch["spec"]["template"]
    return found


def plain() -> str:
    """For `kubectl patch`."""
    return _PLAIN + _yaml({"spec": {"template": template("vllm")}})


def kustomize() -> str:
    """For kustomize."""
    head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "any"}}
    return _KUSTOMIZE + _yaml({**head, "spec": {"template": template("vllm")}})


def llm_d() -> str:
    """Values of llm-d-modelservice."""
    told = template("vllm")
    spec = told["spec"]
    decode = {
        "podAnnotations": told["metadata"]["annotations"],
        "extraConfig": {"shareProcessNamespace": spec["shareProcessNamespace"]},
        "initContainers": spec["initContainers"],
        "containers": spec["containers"],
        "volumes": spec["volumes"],
    }
    labels = {"modelArtifacts": {"labels": told["metadata"]["labels"]}}
    return _LLM_D + _yaml({**labels, "decode": decode})


def production_stack() -> str:
    """Values of production-stack."""
    told = template("vllm")
    spec = told["spec"]
    plugin = spec["initContainers"][0]
    (container,) = spec["containers"]
    model = {
        "initContainer": {
            "name": plugin["name"],
            "image": plugin["image"],
            "command": plugin["command"],
            "resources": plugin["resources"],
            "extraVolumeMounts": plugin["volumeMounts"],
        },
        "env": container["env"],
        "extraVolumes": spec["volumes"],
        "extraVolumeMounts": container["volumeMounts"],
    }
    return _PRODUCTION_STACK + _yaml({"servingEngineSpec": {"modelSpec": [model]}})


def kserve_llm() -> str:
    """An LLMInferenceService."""
    told = template("main")
    head = {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": "chat"},
    }
    return _KSERVE_LLM + _yaml({**head, "spec": {**told["metadata"], "template": told["spec"]}})


def kserve_runtime() -> str:
    """An InferenceService."""
    told = template("kserve-container")
    spec = dict(told["spec"])
    (container,) = spec.pop("containers")
    model = {key: value for key, value in container.items() if key != "name"}
    head = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", **told["metadata"]},
    }
    return _KSERVE_RUNTIME + _yaml({**head, "spec": {"predictor": {"model": model, **spec}}})


def _yaml(found: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(found, sort_keys=False, width=200)
    return text
