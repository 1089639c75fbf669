# SPDX-License-Identifier: Apache-2.0
"""The ways of deploying vLLM that must work: a pod of each as its own chart makes it, and the same pod injected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

from tests.helm.pod_security import BASELINE, RESTRICTED
from tests.helm.tools import injection_json
from vllm_kvfix_sidecar.injection.patch import Injection, patch

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Deployment:
    """A way of deploying: ``options`` of our chart that it needs, and the level of PodSecurity that its pod passes."""

    name: str
    level: str
    options: tuple[str, ...] = ()

    def pod(self) -> dict[str, Any]:
        """As its chart makes it; written by hand."""
        pod: dict[str, Any] = yaml.safe_load((_FOLDER / f"{self.name}.yaml").read_text())
        return pod

    @property
    def injected_path(self) -> Path:
        """The file with the pod as it is injected."""
        return _FOLDER / "injected" / f"{self.name}.yaml"

    def injected(self) -> dict[str, Any]:
        """By the webhook's function, from what the chart makes of the options."""
        pod = self.pod()
        operations = patch(pod, Injection.of_json(injection_json(*self.options))).operations
        changed: dict[str, Any] = jsonpatch.apply_patch(pod, list(operations))
        return changed


DEPLOYMENTS = (
    # It lets nobody set labels of pods.
    Deployment("vllm-example-chart", BASELINE, ("--set=injection.select=containerName",)),
    Deployment("production-stack", BASELINE),
    Deployment("kserve-llm", RESTRICTED),
    Deployment("kserve-runtime", BASELINE),
    Deployment("llm-d", BASELINE),
    Deployment("plain", RESTRICTED),
)
