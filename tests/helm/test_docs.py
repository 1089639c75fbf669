# SPDX-License-Identifier: Apache-2.0
"""docs/kubernetes.md: its commands are commands, its values are values, and what it quotes is what is said."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.helm import values_table
from tests.helm.test_injection import INJECTIONS, VLLM, pod_of
from tests.helm.test_permissions import READS
from tests.helm.tools import CHART, POLICY_API, helm, kubectl
from tests.support import ROOT
from vllm_kvfix.cli import main
from vllm_kvfix_sidecar.injection.patch import patch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DOC = ROOT / "docs" / "kubernetes.md"
TEXT = DOC.read_text()
README = CHART / "README.md"
NOWHERE = "http://127.0.0.1:1"
# They have no server to ask, and are run on the chart itself.
RENDERED = {"install", "upgrade", "template"}
NOT_RENDERED = {"--create-namespace", "--reuse-values"}


def commands(text: str, program: str) -> list[list[str]]:
    """Those in the blocks that a shell is to run, as words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.strip().removesuffix("&")) for line in lines]
    return [found for found in words if found and found[0] == program]


KUBECTL = [*commands(TEXT, "kubectl"), *commands(README.read_text(), "kubectl")]
HELM = [*commands(TEXT, "helm"), *commands(README.read_text(), "helm")]


def run(command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """In the repository's root, as somebody who has no cluster."""
    environ: Mapping[str, str] = {**os.environ, "HOME": str(home), "KUBECONFIG": os.devnull}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)


def refused(command: list[str], home: Path) -> bool:
    """Whether the command was understood, and failed for want of a server only."""
    done = run(command, home)
    return done.returncode != 0 and "refused" in done.stderr


@pytest.mark.parametrize("words", KUBECTL, ids=" ".join)
def test_a_kubectl_command_gets_as_far_as_the_server(words: list[str], tmp_path: Path) -> None:
    """The verb, the options and the files are known; what is lacking is a server."""
    command = [str(kubectl()), f"--server={NOWHERE}", *words[1:]]
    assert refused(command, tmp_path), run(command, tmp_path).stderr


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize("words", HELM, ids=" ".join)
def test_a_helm_command_works_on_the_chart(words: list[str], major: int, tmp_path: Path) -> None:
    """What installs or upgrades is rendered, with the same options; the others get as far as the server."""
    verb, *rest = words[1:]
    if verb not in RENDERED:
        command = [str(helm(major)), verb, *rest, f"--kube-apiserver={NOWHERE}"]
        assert refused(command, tmp_path), run(command, tmp_path).stderr
        return
    options = [word for word in rest if word not in NOT_RENDERED]
    done = run([str(helm(major)), "template", *options, POLICY_API], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kind:" in done.stdout
    for word in NOT_RENDERED.intersection(rest):
        assert word in run([str(helm(major)), verb, "--help"], tmp_path).stdout


def test_the_two_programs_tell_a_wrong_command(tmp_path: Path) -> None:
    """An unknown verb or option is no refused connection: so the commands above have been understood."""
    assert not refused([str(kubectl()), f"--server={NOWHERE}", "rollout", "restart", "--now"], tmp_path)
    assert not refused([str(helm(4)), "uninstall", "x", "--now", f"--kube-apiserver={NOWHERE}"], tmp_path)
    assert not refused([str(kubectl()), f"--server={NOWHERE}", "relabel", "namespace", "llm"], tmp_path)


@pytest.mark.parametrize("option", ["injection.mode=none", "injection.mode=webhook", "injection.select=containerName"])
def test_what_helm_says_after_an_installation_can_be_run(option: str, tmp_path: Path) -> None:
    """Each kubectl command of NOTES.txt gets as far as the server, and the objects that it names are the chart's."""
    options = ["--namespace=kvfix", "--dry-run=client", "--set=injection.mode=webhook", f"--set={option}"]
    done = run([str(helm(4)), "install", "vllm-kvfix", str(CHART), *options], tmp_path)
    assert done.returncode == 0, done.stderr
    objects, _, notes = done.stdout.partition("NOTES:\n")
    found = [shlex.split(line, comments=True) for line in notes.splitlines() if line.startswith("  kubectl ")]
    assert found
    for words in found:
        assert refused([str(kubectl()), f"--server={NOWHERE}", *words[1:]], tmp_path), words
        assert "configmap" not in words or f"name: {words[words.index('configmap') + 1]}\n" in objects


def test_there_are_ten_to_the_dashboard() -> None:
    """As it says."""
    (block,) = re.findall(r"Then ten commands.*?^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(block.replace("\\\n", " ").splitlines()) == 10


def test_values_that_are_named_exist() -> None:
    """Whatever is written as `section.key` is one of the chart's."""
    sections = values_table.defaults()
    named = {path for path in re.findall(r"`(\w+(?:\.\w+)+)(?:: \S+)?`", TEXT) if path.split(".")[0] in sections}
    assert {"injection.mode", "otlp.endpoint"} <= named
    for path in named:
        values_table.default(path)


def test_reasons_are_quoted_as_they_are_said() -> None:
    """Each row of its table is what the annotation says."""
    quoted = re.findall(r"^\| `([^`]+)` \| (?:annotate|make|take)", TEXT, re.MULTILINE)
    from_elsewhere = {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}
    pods: list[dict[str, Any]] = [
        pod_of({"name": "server", "image": "i"}),
        pod_of({**VLLM, "env": [from_elsewhere]}),
        pod_of(VLLM, volumes=[{"name": "vllm-kvfix-rings", "emptyDir": {}}]),
    ]
    assert quoted == [patch(pod, INJECTIONS["default"]).reason for pod in pods]


def test_the_table_of_permissions_is_what_a_kernel_said() -> None:
    """Row by row, what test_permissions.py holds against real containers."""
    rows = re.findall(r"^\| ([^|]+) \| (yes|no) \| (yes|no) \| (yes|no) \|$", TEXT, re.MULTILINE)
    told = {
        name.replace("`", "").removesuffix(" (the default)"): tuple(word == "yes" for word in words)
        for name, *words in rows
    }
    assert told == READS


def test_what_is_run_in_a_pod_is_a_command_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """What stands behind `--` is understood by our own program."""
    found = [words[words.index("--") + 1 :] for words in KUBECTL if "--" in words]
    assert found
    for program, *rest in found:
        assert program == "vllm-kvfix"
        with pytest.raises(SystemExit) as ended:
            main([*rest, "--help"])
        assert ended.value.code == 0
    assert "usage: vllm-kvfix diagnose" in capsys.readouterr().out


def test_files_that_are_linked_exist() -> None:
    """Of this page and of the chart's README."""
    for page in (DOC, README):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target
