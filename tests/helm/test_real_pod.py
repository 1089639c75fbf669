# SPDX-License-Identifier: Apache-2.0
"""The injected pod with real containers: a real vLLM that has nothing of ours but what the chart's patch gives it.

One engine for all three profiles: vLLM's container is the same in each. The sidecar of ``minimal`` shares no processes
with it, those of the two others do.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.harness import Workshop
from tests.helm.kubelet import size
from tests.helm.serving import LIMIT, OF_ITSELF, OURS, PROFILES, RELEASE, REQUESTS, VLLM, Deployment, Scene, running
from tests.sidecar_e2e.receiver import Receiver
from vllm_kvfix import __version__
from vllm_kvfix.demo.engine import plugin_lines
from vllm_kvfix.demo.model import make_model
from vllm_kvfix.ring.layout import API_SERVER, ENGINE_CORE, ROLES
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar.deployments import CHILD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helm.containers import Podman

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def deployment(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three sidecars beside one engine that has answered some requests, and has ended."""
    folder = tmp_path_factory.mktemp("pod")
    workshop = Workshop(make_model(folder / "model"), folder, folder)
    with Receiver(folder) as receiver:
        scene = Scene(podman, workshop.environment(RELEASE), folder, receiver)
        try:
            scene.start()
            yield scene.observe()
        finally:
            scene.remove()


def test_vllms_container_is_the_same_in_every_profile(deployment: Deployment) -> None:
    """A profile changes the sidecar and whether processes are shared, nothing of vLLM: so one engine does for all."""
    specs = [deployment.by_profile[profile].pod["spec"] for profile in PROFILES]
    for alike in ("containers", "volumes"):
        assert specs[0][alike] == specs[1][alike] == specs[2][alike]
    assert specs[0]["initContainers"][0] == specs[1]["initContainers"][0] == specs[2]["initContainers"][0]
    assert [spec.get("shareProcessNamespace", False) for spec in specs] == [False, True, True]


def test_vllm_finds_the_plugin_and_is_fixed(deployment: Deployment) -> None:
    """Its environment has nothing of ours: by PYTHONPATH alone the entry point is found, and engine and ring say so."""
    assert deployment.installed == []
    lines = plugin_lines(deployment.log)
    assert any(f"{__version__}: the host-memory leak of vLLM {RELEASE} is fixed" in line for line in lines), lines
    core, server = (next(h for h in deployment.headers if h.role == role) for role in (ENGINE_CORE, API_SERVER))
    assert core.patch_state == "applied"
    assert (core.vllm_version.partition("+")[0], core.plugin_version) == (RELEASE, __version__)
    assert server.plugin_version == __version__


@pytest.mark.parametrize("profile", PROFILES)
def test_the_sidecar_follows_the_engine(deployment: Deployment, profile: str) -> None:
    """It is alive and ready, has every request, lost no event, and the list that leaks has been empty at each step."""
    seen = deployment.by_profile[profile]
    assert seen.alive
    assert seen.ready["status"] == "ok"
    (engine,) = seen.ready["engines"]
    assert (engine["state"], engine["patch"]) == ("live", "applied")
    assert sum(engine["finished"].values()) == 2 * REQUESTS
    assert engine["steps"] > REQUESTS
    assert set(engine["backlog"]) == {0}
    assert engine["events"]["dropped"] == engine["events"]["lost"] == engine["events"]["malformed_frames"] == 0


@pytest.mark.parametrize("profile", PROFILES)
def test_the_limit_is_that_of_vllms_container(deployment: Deployment, profile: str) -> None:
    """Not the sidecar's own, which is another cgroup, nor the machine's."""
    limit = deployment.by_profile[profile].engine["limit"]
    assert (limit["limit_bytes"], limit["of"]) == (LIMIT, "cgroup")


def test_minimal_tells_what_the_engine_tells_of_itself(deployment: Deployment) -> None:
    """Figures of the processes that have a ring, though it sees none of them; and no word of any other process."""
    seen = deployment.by_profile["minimal"]
    assert {process["role"] for process in running(seen.now)} == set(ROLES)
    for process in running(seen.now):
        assert process["memory"].keys() >= OF_ITSELF
        assert not process["unread"]
    assert seen.maps == {}


def test_shared_tells_the_processes_without_a_ring_too(deployment: Deployment) -> None:
    """What anybody may read of them, and why their maps stay closed to another user."""
    seen = deployment.by_profile["shared"]
    for process in seen.processes(*ROLES):
        assert process["memory"].keys() >= OF_ITSELF
        assert process["unread"].keys() <= {"smaps"}  # until its ring has told them
    children = seen.processes(CHILD)
    assert children
    for child in children:
        assert child["memory"]["status"]["anon_bytes"] > 0
        assert "smaps" not in child["memory"]
    assert len(seen.maps) > len(ROLES)
    assert {"permission denied" in why_not for why_not in seen.maps.values()} == {True}


def test_ptrace_tells_all_of_every_process(deployment: Deployment) -> None:
    """Nothing is unread but the cgroup of who has no ring, which no other container can see."""
    seen = deployment.by_profile["ptrace"]
    assert seen.processes(CHILD)
    for process in running(seen.now):
        assert "status" in process["memory"]
        assert process["unread"].keys() <= ({"cgroup"} if process["role"] == CHILD else set())
    assert len(seen.maps) > len(ROLES)
    assert set(seen.maps.values()) == {""}


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_exported_says_whose_it_is(deployment: Deployment, profile: str) -> None:
    """Each span and each point that a foreign receiver got has the pod's attributes; a span for each request."""
    seen = deployment.by_profile[profile]
    metadata = seen.pod["metadata"]
    resource = {
        "service.name": "llama",
        "k8s.namespace.name": "llm",
        "k8s.node.name": "node-1",
        "k8s.pod.name": metadata["name"],
        "k8s.pod.uid": metadata["uid"],
        "k8s.container.name": VLLM,
    }
    assert len(seen.spans) == 2 * REQUESTS
    assert {point.name for point in seen.points} >= {names.BACKLOG.name}
    for told in [*(span.resource for span in seen.spans), *(point.resource for point in seen.points)]:
        assert resource.items() <= told.items()


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_finds_its_metrics_at_the_named_port(deployment: Deployment, profile: str) -> None:
    """At the port that the PodMonitor names, the engine's backlog among them."""
    families = text_string_to_metric_families(deployment.by_profile[profile].metrics)
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    (backlog,) = [value for name, value in samples.items() if name.endswith("new_block_ids_backlog")]
    assert backlog == 0


def test_attach_reaches_the_engine_from_the_profile_ptrace(deployment: Deployment) -> None:
    """In its other mount namespace, by its own TMPDIR: a dry run, then code that finds all there already."""
    dry_run = json.loads(deployment.by_profile["ptrace"].dry_run.stdout)
    assert (dry_run["dry_run"], dry_run["vllm_version"].partition("+")[0]) == (True, RELEASE)
    assert deployment.attached.returncode == 0, deployment.attached.stdout
    attached = json.loads(deployment.attached.stdout)
    assert (attached["fix"], attached["observe"]) == ("already there", "already there")
    assert deployment.left == []


def test_attach_is_refused_elsewhere(deployment: Deployment) -> None:
    """With shared processes for want of a right, which the next step grants; without, there is no engine to be seen."""
    shared, minimal = (json.loads(deployment.by_profile[p].dry_run.stdout) for p in ("shared", "minimal"))
    assert [deployment.by_profile[p].dry_run.returncode for p in ("shared", "minimal")] == [1, 1]
    assert shared["refused"] == "rights"
    assert "without CAP_SYS_PTRACE" in shared["message"]
    assert "kubectl debug" in shared["next_step"]
    assert minimal["refused"] == "dead"
    assert "no engine core" in minimal["message"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_sidecar_is_small_and_ends_in_order(deployment: Deployment, profile: str) -> None:
    """It stays well below the chart's limit, and at SIGTERM, as PID 1 too, it ends by itself with 0."""
    seen = deployment.by_profile[profile]
    (limit,) = [c["resources"]["limits"]["memory"] for c in seen.pod["spec"]["initContainers"] if c["name"] == OURS]
    print(f"{profile}: the sidecar has {seen.now['sidecar']['rss_bytes'] >> 20} MiB")  # noqa: T201  # shown by -rP
    assert seen.now["sidecar"]["rss_bytes"] < size(limit) / 2
    assert seen.exit_code == 0
