# SPDX-License-Identifier: Apache-2.0
"""The chart's README, whose table is made of the comments that begin with ``# --`` in its values."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import yaml

from tests.helm.tools import CHART

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = re.compile(r"(\s*)([A-Za-z][\w./-]*):(?:\s.*)?")
_HEAD = """\
# vllm-kvfix

Puts the plugin and the sidecar of vllm-kvfix into pods of vLLM, without a change of anybody's image or chart.

    helm install vllm-kvfix helm/vllm-kvfix --namespace vllm-kvfix --create-namespace
    kubectl label namespace llm vllm-kvfix.dev/inject=enabled

How it goes on, what is injected, and what to do if nothing is: [docs/kubernetes.md](../../docs/kubernetes.md).
Values for the usual cases: [examples](examples). Kubernetes 1.29 and later; Helm 3 and 4.

## Values

Made of the comments in [values.yaml](values.yaml). A key that is not here is refused.

| key | default | what it is |
|---|---|---|
"""


def documented() -> Iterator[tuple[str, str]]:
    """The path of each value that has a comment, and that."""
    path: list[tuple[int, str]] = []
    told: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            if stripped.startswith("# -- "):
                told = [stripped.removeprefix("# -- ")]
            elif told:
                told.append(stripped.removeprefix("# "))
            continue
        if key := _KEY.fullmatch(line):
            path = [*(part for part in path if part[0] < len(key[1])), (len(key[1]), key[2])]
            if told:
                yield ".".join(name for _, name in path), " ".join(told)
        told = []


def defaults() -> dict[str, Any]:
    """All values, as Helm has them."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def default(path: str) -> Any:
    """The value at a path.

    Raises:
        KeyError: There is none.
    """
    found: Any = defaults()
    for name in path.split("."):
        found = found[name]
    return found


def readme() -> str:
    """The whole file."""
    return _HEAD + "".join(
        f"| `{path}` | `{json.dumps(default(path))}` | {_cell(text)} |\n" for path, text in documented()
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
