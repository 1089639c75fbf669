# SPDX-License-Identifier: Apache-2.0
"""Which level of the Pod Security Standards a pod passes: what an API server would let into a namespace of that level.

Of the standards' controls those that a pod of vLLM can meet or break; sysctls, AppArmor, SELinux, procMount and Windows
are in none of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PRIVILEGED, BASELINE, RESTRICTED = LEVELS = ("privileged", "baseline", "restricted")
_ADDED_BASELINE = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)
_ADDED_RESTRICTED = frozenset({"NET_BIND_SERVICE"})
_VOLUMES_RESTRICTED = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_SECCOMP = frozenset({"RuntimeDefault", "Localhost"})


def level(pod: dict[str, Any]) -> str:
    """The strictest level that it passes."""
    if any(_against_baseline(pod["spec"])):
        return PRIVILEGED
    return BASELINE if any(_against_restricted(pod["spec"])) else RESTRICTED


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def _context(of: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = of.get("securityContext", {})
    return found


def _added(container: dict[str, Any]) -> set[str]:
    return set(_context(container).get("capabilities", {}).get("add", []))


def _seccomp(spec: dict[str, Any], container: dict[str, Any]) -> str | None:
    own: str | None = _context(container).get("seccompProfile", {}).get("type")
    return own or _context(spec).get("seccompProfile", {}).get("type")


def _against_baseline(spec: dict[str, Any]) -> Iterator[bool]:
    yield any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    yield any("hostPath" in volume for volume in spec.get("volumes", []))
    for container in _containers(spec):
        yield bool(_context(container).get("privileged"))
        yield not _added(container) <= _ADDED_BASELINE
        yield any(port.get("hostPort") for port in container.get("ports", []))
        yield _seccomp(spec, container) == "Unconfined"


def _against_restricted(spec: dict[str, Any]) -> Iterator[bool]:
    yield any(not (volume.keys() - {"name"}) <= _VOLUMES_RESTRICTED for volume in spec.get("volumes", []))
    of_pod = _context(spec)
    for container in _containers(spec):
        own = _context(container)
        yield own.get("allowPrivilegeEscalation") is not False
        yield "ALL" not in own.get("capabilities", {}).get("drop", [])
        yield not _added(container) <= _ADDED_RESTRICTED
        yield own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True
        yield own.get("runAsUser", of_pod.get("runAsUser")) == 0
        yield _seccomp(spec, container) not in _SECCOMP
