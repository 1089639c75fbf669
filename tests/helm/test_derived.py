# SPDX-License-Identifier: Apache-2.0
"""What is made of the chart and kept in git is what the chart makes today; Helm 3 makes the same of the examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kubernetes_validate
import pytest
import yaml

from tests.helm import derived, values_table
from tests.helm.examples import EXAMPLES, golden, render
from tests.helm.test_chart import FOREIGN, SINCE, _without_certificates
from tests.helm.tools import CHART, run_helm
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("path", derived.FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_is_current(path: Path) -> None:
    """The file is there, and holds what is made of the chart."""
    assert derived.is_current(path), f"{path.relative_to(ROOT)} is not current; if that is meant: {derived.COMMAND}"


@pytest.mark.parametrize("folder", ["tests/helm/golden", "tests/helm/deployments/injected"])
def test_nothing_else_lies_there(folder: str) -> None:
    """A file that nothing makes is left over."""
    assert set((ROOT / folder).iterdir()) <= derived.FILES.keys()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_helm_3_makes_the_same_objects(example: Path) -> None:
    """As in the file that Helm 4 made, in whatever order."""
    three, four = (
        _without_certificates([found for found in yaml.safe_load_all(text) if found])
        for text in (render(example, 3), golden(example).read_text())
    )
    assert three == four


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_lints(major: int, example: Path) -> None:
    """Strictly. Policies are for clusters that lint knows nothing of, so their examples are linted as a webhook's."""
    mode = "none" if example.stem == "none" else "webhook"
    done = run_helm(major, "lint", "--strict", str(CHART), "--values", str(example), f"--set=injection.mode={mode}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_an_example_is_valid(example: Path, version: str) -> None:
    """Strictly, for each Kubernetes that has the kind."""
    for found in yaml.safe_load_all(golden(example).read_text()):
        if found and found["kind"] not in FOREIGN and version >= SINCE.get(found["kind"], "1"):
            kubernetes_validate.validate(found, version, strict=True)


def test_every_value_is_in_the_readme() -> None:
    """Each leaf of the values, or the section that it is in, has a row; so the table leaves none out."""
    rows = {path for path, _ in values_table.documented()}
    for leaf in _leaves("", values_table.defaults()):
        above = leaf.split(".")
        assert any(".".join(above[:count]) in rows for count in range(1, len(above) + 1)), leaf


def _leaves(path: str, found: object) -> list[str]:
    if not isinstance(found, dict) or not found:
        return [path]
    return [leaf for key, value in found.items() for leaf in _leaves(f"{path}.{key}".lstrip("."), value)]


def test_the_check_names_what_is_not_current(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --check the exit code is 1, the file is named, and nothing is written."""
    path = CHART / "README.md"
    before = path.read_text()
    monkeypatch.setattr(derived, "FILES", {path: lambda: "other"})
    assert derived.main(["--check"]) == 1
    assert capsys.readouterr().out == "helm/vllm-kvfix/README.md\n"
    assert path.read_text() == before
