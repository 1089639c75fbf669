# SPDX-License-Identifier: Apache-2.0
"""Every file that is made of the chart and kept in git, so that a review shows what a change of the chart does to it.

python -m tests.helm.derived           writes them
python -m tests.helm.derived --check   says which are not current
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import yaml

from tests.helm import own_pods, values_table
from tests.helm.deployments import DEPLOYMENTS, Deployment
from tests.helm.examples import EXAMPLES, golden, render
from tests.helm.tools import CHART
from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMMAND = "python -m tests.helm.derived"
_DOCS = ROOT / "docs" / "kubernetes"
_POLICY = CHART / "examples" / "policy.yaml"


def _injected(deployment: Deployment) -> str:
    text: str = yaml.safe_dump(deployment.injected(), sort_keys=False, width=200)
    return text


FILES: dict[Path, Callable[[], str]] = {
    **{golden(example): functools.partial(render, example) for example in EXAMPLES},
    golden(_POLICY, "v1beta1"): functools.partial(render, _POLICY, api="v1beta1"),
    **{found.injected_path: functools.partial(_injected, found) for found in DEPLOYMENTS},
    CHART / "README.md": values_table.readme,
    ROOT / "helm" / "kustomize" / "patch.yaml": own_pods.kustomize,
    _DOCS / "plain.yaml": own_pods.plain,
    _DOCS / "llm-d-modelservice.yaml": own_pods.llm_d,
    _DOCS / "production-stack.yaml": own_pods.production_stack,
    _DOCS / "kserve-llm.yaml": own_pods.kserve_llm,
    _DOCS / "kserve-runtime.yaml": own_pods.kserve_runtime,
}


def is_current(path: Path) -> bool:
    """Whether the file holds what would be written."""
    return path.exists() and path.read_text() == FILES[path]()


def main(arguments: list[str]) -> int:
    """Write, or check; 1 where a file is not current."""
    wrong = [path for path in FILES if not is_current(path)]
    for path in wrong:
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(FILES[path]())
    return 1 if wrong and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
