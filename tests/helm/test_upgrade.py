# SPDX-License-Identifier: Apache-2.0
"""Upgrade and removal, as far as the chart decides them: nothing is left behind, and nothing changes its name."""

from __future__ import annotations

import copy
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.helm.api_server import serving
from tests.helm.test_chart import CASES
from tests.helm.tools import CHART, helm, one, rendered

if TYPE_CHECKING:
    from pathlib import Path

WEBHOOK = "--set=injection.mode=webhook"
CHANGED = ("--set=image.tag=9.9.9", "--set=injection.profile=minimal", "--set=webhook.certificateDays=30")


def names(*options: str) -> list[tuple[str, str]]:
    """Kind and name of every object."""
    return [(found["kind"], found["metadata"]["name"]) for found in rendered(*options)]


@pytest.mark.parametrize("case", CASES)
def test_all_of_it_goes_with_the_release(case: str) -> None:
    """No object is kept at removal, none is made by a hook but the test's, and that goes when it has passed."""
    for found in rendered(*CASES[case]):
        annotations = found["metadata"].get("annotations", {})
        assert "helm.sh/resource-policy" not in annotations
        assert found["kind"] != "CustomResourceDefinition"
        if "helm.sh/hook" in annotations:
            assert annotations["helm.sh/hook"] == "test"
            assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"


@pytest.mark.parametrize("mode", ["policy", "webhook", "none"])
def test_an_upgrade_changes_objects_in_place(mode: str) -> None:
    """With other values the same objects are there, by the same names; none is removed and made anew."""
    assert names(f"--set=injection.mode={mode}", *CHANGED) == names(f"--set=injection.mode={mode}")


def test_another_mode_takes_the_old_ones_objects_away() -> None:
    """No object of one mode is made in another, so none of the old way stays in force."""
    policy, webhook, none = (set(names(f"--set=injection.mode={mode}")) for mode in ("policy", "webhook", "none"))
    assert not policy & webhook
    assert not policy & none
    assert not webhook & none


def upgraded(secret: dict[str, Any] | None, home: Path, major: int = 4) -> list[dict[str, Any]]:
    """What an upgrade makes where that Secret is there already, as Helm finds it by asking."""
    with serving(secret) as address:
        command = [
            "template",
            "t",
            str(CHART),
            "--namespace=kvfix",
            WEBHOOK,
            "--dry-run=server",
            "--disable-openapi-validation",
        ]
        environ = {**os.environ, "HOME": str(home), "KUBECONFIG": os.devnull}
        done = subprocess.run(
            [str(helm(major)), *command, f"--kube-apiserver={address}"],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize(("days", "kept"), [(0, True), (182, True), (183, False), (4000, False), (None, False)])
def test_a_certificate_is_kept_for_half_its_days(days: int | None, kept: bool, major: int, tmp_path: Path) -> None:  # noqa: FBT001  # a column of the table
    """Then, or where none is there, there is a new one; what the API server trusts is always what signs it."""
    secret = copy.deepcopy(one(rendered(WEBHOOK), "Secret"))
    made = 0 if days is None else int(time.time()) - days * 86_400
    owner = {"meta.helm.sh/release-name": "t", "meta.helm.sh/release-namespace": "kvfix"}
    secret["metadata"]["annotations"] = {"vllm-kvfix.dev/made": str(made), **owner}
    objects = upgraded(None if days is None else secret, tmp_path, major)
    now = one(objects, "Secret")
    assert (now["data"] == secret["data"]) is kept
    assert now["data"].keys() == secret["data"].keys()
    assert kept or not set(now["data"].values()) & set(secret["data"].values())
    assert (now["metadata"]["annotations"] == {"vllm-kvfix.dev/made": str(made)}) is kept
    (hook,) = one(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert hook["clientConfig"]["caBundle"] == now["data"]["ca.crt"]


def test_a_new_certificate_restarts_no_server() -> None:
    """They notice it by themselves: their Deployment is the same."""
    first, second = (rendered(WEBHOOK, f"--set=webhook.timeoutSeconds={seconds}") for seconds in (5, 6))
    assert one(first, "Secret") != one(second, "Secret")
    assert one(first, "Deployment") == one(second, "Deployment")


def test_another_injection_starts_the_servers_anew() -> None:
    """They read it at their start: so their pods' template changes with it."""
    before, after = (one(rendered(WEBHOOK, *more), "Deployment") for more in ((), ("--set=injection.fix=off",)))
    assert before["spec"]["template"] != after["spec"]["template"]
    assert before["spec"]["selector"] == after["spec"]["selector"]


@pytest.mark.parametrize("options", [(), CHANGED, ("--set=image.tag=9.9.9",)])
def test_the_selector_of_the_servers_never_changes(options: tuple[str, ...]) -> None:
    """Kubernetes refuses to change it: no version of the chart or of the image is in it."""
    deployment = one(rendered(WEBHOOK, *options), "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "vllm-kvfix",
        "app.kubernetes.io/instance": "t",
        "app.kubernetes.io/component": "webhook",
    }
