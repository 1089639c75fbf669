# SPDX-License-Identifier: Apache-2.0
"""What a container may see of the processes of another one in its pod: the table of docs/kubernetes.md, by a kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.helm.containers import IMAGE
from tests.helm.kubelet import Pod
from tests.helm.tools import injection_json
from tests.sidecar_e2e.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helm.containers import Podman

pytestmark = pytest.mark.engine

DROP_ALL: dict[str, Any] = {"capabilities": {"drop": ["ALL"]}}
VLLM: dict[str, dict[str, Any]] = {
    "root, default capabilities": {"runAsUser": 0},
    "root, none": {"runAsUser": 0, **DROP_ALL},
    "user 1000": {"runAsUser": 1000, **DROP_ALL},
}
SIDECARS: dict[str, dict[str, Any]] = {
    "root, default capabilities": {"runAsUser": 0},
    "root, none": {"runAsUser": 0, **DROP_ALL},
    "root, SYS_PTRACE": {"runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}},
    "user 1000": {"runAsUser": 1000, **DROP_ALL},
    "user 10001": {"runAsUser": 10001, **DROP_ALL},
}
# Which sidecar reads smaps_rollup, and the files, of which vLLM: in the order of VLLM.
READS = {
    "root, default capabilities": (True, True, False),
    "root, none": (False, True, False),
    "root, SYS_PTRACE": (True, True, True),
    "user 1000": (False, False, True),
    "user 10001": (False, False, False),
}
CASES = [(sidecar, vllm, READS[sidecar][at]) for sidecar in SIDECARS for at, vllm in enumerate(VLLM)]
_VLLM = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""
# What the sidecar's own code makes of a process that tells nothing by itself, beside what the kernel lets it open.
_SIDECAR = """
import json, os, pathlib, sys
from vllm_kvfix import host
from vllm_kvfix_sidecar.host_memory import HostMemory

def may(ask):
    try:
        ask()
    except PermissionError:
        return False
    return True

def told(pid):
    process = pathlib.Path("/proc", str(pid))
    engine = (pid, host.start_time(pid))
    memory = HostMemory(pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup"))
    view = [view for view in memory.look([(*engine, "engine core")], [engine]) if view.key.pid == pid][0]
    return {
        "smaps_rollup": may(lambda: (process / "smaps_rollup").read_text()),
        "root": may(lambda: os.listdir(process / "root")),
        "status": may(lambda: (process / "status").read_text()),
        "statm": may(lambda: (process / "statm").read_text()),
        "figures": sorted(view.figures),
        "unread": view.unread,
    }

print(json.dumps({path.name: told(int(path.read_text())) for path in pathlib.Path("/pids").glob("?")}))
"""

# What attach needs, done without its vLLM: a folder of the target's, and code that runs in it.
_ATTACH = """
import pathlib, sys
from vllm_kvfix.attach import injection, rights
from vllm_kvfix.attach.meeting import Meeting

for path in sorted(pathlib.Path("/pids").glob("?")):
    pid = int(path.read_text())
    rights.check(pid)
    owner = pathlib.Path("/proc", str(pid)).stat()
    with Meeting(pid, ["/tmp"], (owner.st_uid, owner.st_gid), executable=True) as meeting:
        code = f"open('/pids/{path.name}-reached', 'w').close()"
        injection.inject(pid, sys.version_info[:2], code, meeting)
"""


def _container(name: str, security: dict[str, Any], script: str, *arguments: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": IMAGE,
        "command": ["python3", "-c", script],
        "args": list(arguments),
        "securityContext": security,
        "volumeMounts": [{"name": "pids", "mountPath": "/pids"}],
    }


@pytest.fixture(scope="module")
def pod(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """A pod in which each vLLM runs; its sidecars, and one of the chart's profile ptrace, can be run in it."""
    vllm = [_container(f"vllm-{at}", how, _VLLM, f"/pids/{at}") for at, how in enumerate(VLLM.values())]
    sidecars = [_container(f"sidecar-{at}", how, _SIDECAR) for at, how in enumerate(SIDECARS.values())]
    (ptrace,) = [
        container["securityContext"]
        for container in json.loads(injection_json("--set=injection.profile=ptrace"))["initContainers"]
        if container["name"] == "vllm-kvfix"
    ]
    containers = [*vllm, *sidecars, _container("attach", ptrace, _ATTACH)]
    spec = {"shareProcessNamespace": True, "volumes": [{"name": "pids", "emptyDir": {}}], "containers": containers}
    made = Pod(podman, {"metadata": {"name": "permissions"}, "spec": spec}, tmp_path_factory.mktemp("permissions"))
    try:
        for container in vllm:
            made.start(container["name"])
        pids = made.volume("pids")
        wait_until(lambda: sum(bool(path.read_text()) for path in pids.iterdir()) == len(VLLM), 60, "they do not run")
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def told(pod: Pod) -> dict[str, Any]:
    """What each sidecar tells of each vLLM."""
    return {name: json.loads(pod.run(f"sidecar-{at}")) for at, name in enumerate(SIDECARS)}


@pytest.mark.parametrize(("sidecar", "vllm", "reads"), CASES, ids=str)
def test_what_is_read_is_what_the_table_says(told: dict[str, Any], sidecar: str, vllm: str, reads: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """Its maps and its files, or neither; what /proc/PID/status tells, always."""
    seen = told[sidecar][str(list(VLLM).index(vllm))]
    assert (seen["smaps_rollup"], seen["root"]) == (reads, reads)
    assert (seen["status"], seen["statm"]) == (True, True)


@pytest.mark.parametrize(("sidecar", "vllm", "reads"), CASES, ids=str)
def test_what_cannot_be_read_is_absent_and_has_its_reason(
    told: dict[str, Any],
    sidecar: str,
    vllm: str,
    reads: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """The sidecar's own figures are those that the table allows: no figure is 0 for want of a right."""
    seen = told[sidecar][str(list(VLLM).index(vllm))]
    assert "status.anon" in seen["figures"]
    assert any(figure.startswith("smaps.") for figure in seen["figures"]) is reads
    assert ("permission denied" in seen["unread"].get("smaps", "")) is not reads


def test_the_profile_ptrace_reaches_every_vllm(told: dict[str, Any], pod: Pod) -> None:
    """Code of attach runs in each of them, whoever it is, and nothing is left in its folder for temporary files."""
    assert set(told) == set(SIDECARS)  # so that they have looked before anything is done
    pod.run("attach")
    reached = {path.name for path in pod.volume("pids").glob("*-reached")}
    assert reached == {f"{at}-reached" for at in range(len(VLLM))}
    assert [pod.execute(f"vllm-{at}", "ls", "-A", "/tmp").stdout for at in range(len(VLLM))] == [""] * len(VLLM)  # noqa: S108  # a container's
