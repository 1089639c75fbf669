# SPDX-License-Identifier: Apache-2.0
"""The chart's examples, and what Helm makes of them in a form that stays the same."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helm.tools import CHART, run_helm

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
_POLICY_API = "--api-versions=admissionregistration.k8s.io/{}/MutatingAdmissionPolicy"
_CERTIFICATE = re.compile(r"^(\s*(?:ca\.crt|tls\.crt|tls\.key|caBundle|vllm-kvfix\.dev/made): )\S+$", re.MULTILINE)
# A file of the chart, that is made of the sidecar's metrics; here it would only hide what else changed.
_DASHBOARD = re.compile(r"^(  vllm-kvfix-[\w-]+\.json: \|-\n)(?:    .*\n|\n)+", re.MULTILINE)


def golden(example: Path, api: str = "v1") -> Path:
    """The file with what is made of it; the API of policies that the cluster has is part of its name but for v1."""
    return GOLDEN / (example.name if api == "v1" else f"{example.stem}-{api}.yaml")


def render(example: Path, major: int = 4, api: str = "v1") -> str:
    """By Helm; certificates, new each time, are left out, and dashboards."""
    options = ["--namespace", "kvfix", _POLICY_API.format(api), "--values", str(example)]
    done = run_helm(major, "template", "kvfix", str(CHART), *options)
    assert done.returncode == 0, done.stderr
    text = _CERTIFICATE.sub(r"\1LEFT-OUT", done.stdout)
    return _DASHBOARD.sub(r"\1    LEFT-OUT\n", text)
