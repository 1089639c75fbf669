# SPDX-License-Identifier: Apache-2.0
"""What a kubelet makes of a pod, made of podman's containers: of a pod's fields, those that ours and its test have.

All pods are on the host's network. ``sizeLimit`` of a volume, and requests of CPU and memory, have no effect here.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.helm.containers import Podman

    Object = dict[str, Any]

STOP_S = 120.0
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


class Pod:
    """A pod whose containers are started one after another, as the caller says.

    ``beside``: another one whose volumes it has, and whose processes too, if it shares processes: so that several
    sidecars can watch one engine.
    """

    def __init__(self, podman: Podman, pod: Object, folder: Path, beside: Pod | None = None) -> None:
        self.podman = podman
        self.spec: Object = pod["spec"]
        self.name: str = pod["metadata"]["name"]
        self._pod = pod
        self._folder: Path = beside._folder if beside else folder
        shares = self.spec.get("shareProcessNamespace", False)
        self._within: str = beside._within if beside and shares else self.name
        if self._within == self.name:
            share = "--share=net,ipc,pid" if shares else "--share=net,ipc"
            podman.run("pod", "create", f"--name={self.name}", share, "--network=host")

    def volume(self, name: str) -> Path:
        """The folder of a volume, as a kubelet makes it: anybody may write to an emptyDir."""
        (told,) = [volume for volume in self.spec["volumes"] if volume["name"] == name]
        if "hostPath" in told:
            path: Path = self._folder / told["hostPath"]["path"]
            return path
        assert "emptyDir" in told, told
        made = self._folder / name
        if not made.exists():
            made.mkdir(parents=True)
            made.chmod(0o777)
        return made

    def container(self, name: str) -> Object:
        """What the pod says of a container."""
        every = [*self.spec.get("initContainers", ()), *self.spec["containers"]]
        (found,) = [container for container in every if container["name"] == name]
        told: Object = found
        return told

    def init(self, *names: str) -> None:
        """Run these init containers in order: to their good end, or, if they stay, until they run."""
        for name in names:
            container = self.container(name)
            if container.get("restartPolicy") == "Always":
                self.start(name)
            else:
                self.run(name)

    def run(self, name: str) -> str:
        """Run a container to its good end; what it has written."""
        return self.podman.run("run", "--rm", *self._options(self.container(name))).stdout

    def start(self, name: str) -> None:
        """Start a container that stays."""
        container = self.container(name)
        self.podman.run("run", "--detach", f"--name={self._named(name)}", *self._options(container))

    def get(self, name: str, path: str, port: str | int) -> str | None:
        """A page of a container, None where it gives none; ``port``: its name or number."""
        numbers = {known["name"]: known["containerPort"] for known in self.container(name).get("ports", ())}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{numbers.get(port, port)}{path}", timeout=20) as answer:
                text: str = answer.read().decode()
                return text if answer.status == 200 else None
        except (OSError, urllib.error.URLError):
            return None

    def execute(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as ``kubectl exec`` does; it may fail."""
        return self.podman.run("exec", self._named(name), *command, check=False)

    def log(self, name: str) -> str:
        """All that a container has written."""
        done = self.podman.run("logs", self._named(name), check=False)
        return done.stdout + done.stderr

    def running(self, name: str) -> bool:
        """Whether a container runs."""
        return bool(self._state(name)["Status"] == "running")

    def stop(self, name: str) -> int:
        """Ask a container to end, as a kubelet does; its exit code. The test fails where a kubelet would kill it."""
        self.podman.run("kill", "--signal=TERM", self._named(name))
        return int(self.podman.run("wait", self._named(name), timeout_s=STOP_S).stdout)

    def remove(self) -> None:
        """End all that is left, at once."""
        self.podman.run("pod", "rm", "--force", "--time=0", self.name)

    def _state(self, name: str) -> Object:
        (found,) = json.loads(self.podman.run("inspect", self._named(name)).stdout)
        state: Object = found["State"]
        return state

    def _named(self, name: str) -> str:
        return f"{self.name}-{name}"

    def _options(self, container: Object) -> Sequence[str]:
        """The words behind ``podman run``."""
        words = [f"--pod={self._within}", *security(self.spec, container), *self._mounts(container)]
        words += [f"--env={name}={value}" for name, value in environment(self._pod, container).items()]
        if memory := container.get("resources", {}).get("limits", {}).get("memory"):
            words.append(f"--memory={size(memory)}")
        if "command" in container:
            words.append(f"--entrypoint={json.dumps(container['command'])}")
        return [*words, container["image"], *container.get("args", ())]

    def _mounts(self, container: Object) -> Iterator[str]:
        for mount in container.get("volumeMounts", ()):
            mode = "ro" if mount.get("readOnly") else "rw"
            yield f"--volume={self.volume(mount['name'])}:{mount['mountPath']}:{mode}"


def security(spec: Object, container: Object) -> Iterator[str]:
    """Words of podman for a container's security context.

    Raises:
        AssertionError: A kubelet would not start it: it must not be root, and is.
    """
    told = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    user, group = told.get("runAsUser"), told.get("runAsGroup", 0)
    assert not (told.get("runAsNonRoot") and not user), f"container {container['name']} would be root, which it forbids"
    if user is not None:
        yield f"--user={user}:{group}"
    capabilities = told.get("capabilities", {})
    yield from (f"--cap-drop={name}" for name in capabilities.get("drop", ()))
    yield from (f"--cap-add={name}" for name in capabilities.get("add", ()))
    if told.get("readOnlyRootFilesystem"):
        yield "--read-only"
        yield "--read-only-tmpfs=false"
    if not told.get("allowPrivilegeEscalation", True):
        yield "--security-opt=no-new-privileges"


def environment(pod: Object, container: Object) -> dict[str, str]:
    """A container's variables: fields of the pod looked up, $(NAME) of those before it put in."""
    found: dict[str, str] = {}
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            value: Any = pod
            for key in entry["valueFrom"]["fieldRef"]["fieldPath"].split("."):
                value = value[key]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda named: found.get(named[1], named[0]), entry.get("value", ""))
        found[entry["name"]] = value
    return found


def size(text: str) -> int:
    """Bytes of a quantity of Kubernetes, such as 256Mi."""
    return int(text[:-2]) * _UNITS[text[-2:]]
