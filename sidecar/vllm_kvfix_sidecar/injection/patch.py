# SPDX-License-Identifier: Apache-2.0
"""What is changed in a pod so that its vLLM has the plugin and a sidecar: a JSON Patch (RFC 6902), as a pure function.

The chart's MutatingAdmissionPolicy does the same in CEL, made from the same object; a test runs both on the same pods.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DOMAIN = "vllm-kvfix.dev"
INJECTED = f"{DOMAIN}/injected"
NOT_INJECTED = f"{DOMAIN}/not-injected"
CONTAINER = f"{DOMAIN}/container"
SIDECAR_NAME = "vllm-kvfix"
BY_POD_LABEL, BY_CONTAINER_NAME = SELECTIONS = ("podLabel", "containerName")
# Where the name of the service comes from, in this order; without any it is vLLM's.
SERVICE_ANNOTATION = "resource.opentelemetry.io/service.name"
SERVICE_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/name")
SERVICE_DEFAULT = "vllm"

Object: TypeAlias = "dict[str, Any]"
Operation: TypeAlias = "dict[str, Any]"


class InjectionError(ValueError):
    """What is to be injected, or the pod, is not what it must be; the message says where."""


@dataclass(frozen=True)
class Injection:
    """What is put into a pod; the names are those of the JSON object that the chart makes.

    In the strings of ``initContainers`` the words @CONTAINER@ and @SERVICE@ stand for the name of vLLM's container
    and of the service.
    """

    version: str
    profile: str
    select: str
    containerNames: list[str]  # noqa: N815  # the chart's name
    pythonPath: str  # noqa: N815  # the chart's name
    shareProcessNamespace: bool  # noqa: N815  # the chart's name, which is Kubernetes'
    volumes: list[Object]
    initContainers: list[Object]  # noqa: N815  # the chart's name, which is Kubernetes'
    volumeMounts: list[Object]  # noqa: N815  # the chart's name, which is Kubernetes'
    env: list[Object]

    @classmethod
    def of_json(cls, text: str) -> Injection:
        """Read it.

        Raises:
            InjectionError: It is no JSON object with these keys, or a value is of another type.
        """
        try:
            told = json.loads(text)
        except ValueError as error:
            raise InjectionError(f"what is to be injected is no JSON: {error}") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(told, dict) or told.keys() != names:
            raise InjectionError(f"what is to be injected must have exactly the keys {', '.join(sorted(names))}")
        made = cls(**told)
        texts = (made.version, made.profile, made.pythonPath)
        lists = (made.volumes, made.initContainers, made.volumeMounts, made.env)
        sound = all(isinstance(text, str) for text in (*texts, *_list(made.containerNames)))
        sound = sound and all(isinstance(part, dict) for many in lists for part in _list(many))
        if not (sound and made.select in SELECTIONS and isinstance(made.shareProcessNamespace, bool)):
            raise InjectionError("what is to be injected has a value of another type than the chart makes")
        return made


@dataclass(frozen=True)
class Patch:
    """The operations, in their order; ``reason``: why the pod is left alone, empty where it is not."""

    operations: tuple[Operation, ...] = ()
    reason: str = ""


def patch(pod: Mapping[str, Any], injection: Injection) -> Patch:
    """How a pod is changed; nothing where it has been before, or is none of those that are asked for.

    Raises:
        InjectionError: It is no pod: what Kubernetes itself would refuse.
    """
    metadata, spec = _object(pod, "metadata"), _object(pod, "spec")
    annotations, labels = _object(metadata, "annotations"), _object(metadata, "labels")
    containers, init = _objects(spec, "containers"), _objects(spec, "initContainers")
    if INJECTED in annotations or SIDECAR_NAME in map(_name, init):
        return Patch()
    names = [_name(container) for container in containers]
    by_name = injection.select == BY_CONTAINER_NAME and CONTAINER not in annotations
    if by_name and not any(name in injection.containerNames for name in names):
        return Patch()
    wanted = [str(annotations[CONTAINER])] if CONTAINER in annotations else injection.containerNames
    target = next((name for name in wanted if name in names), None)
    reason = _reason(target, wanted, spec, containers, injection)
    operations = _missing(metadata, "/metadata", "annotations", {})
    if reason or target is None:
        return Patch((*operations, _add(f"/metadata/annotations/{_escaped(NOT_INJECTED)}", reason)), reason)
    operations += _marks(metadata, injection)
    operations += _of_pod(spec, injection, {"@CONTAINER@": target, "@SERVICE@": _service(annotations, labels)})
    operations += _of_container(containers[names.index(target)], names.index(target), injection)
    return Patch(tuple(operations))


def _reason(
    target: str | None,
    wanted: Sequence[str],
    spec: Mapping[str, Any],
    containers: Sequence[Mapping[str, Any]],
    injection: Injection,
) -> str:
    if target is None:
        return f"no container is named {' or '.join(wanted)}"
    container = next(container for container in containers if _name(container) == target)
    if any(_name(entry) == "PYTHONPATH" and "valueFrom" in entry for entry in _objects(container, "env")):
        return f"PYTHONPATH of container {target} comes from valueFrom, so that nothing can be put before it"
    ours = {_name(volume) for volume in injection.volumes}
    if any(_name(volume) in ours for volume in _objects(spec, "volumes")):
        return "it has a volume of our name already"
    return ""


def _marks(metadata: Mapping[str, Any], injection: Injection) -> list[Operation]:
    done = f"{injection.version} {injection.profile}"
    return [
        *_missing(metadata, "/metadata", "labels", {}),
        _add(f"/metadata/annotations/{_escaped(INJECTED)}", done),
        _add(f"/metadata/labels/{_escaped(INJECTED)}", "true"),
    ]


def _of_pod(spec: Mapping[str, Any], injection: Injection, words: Mapping[str, str]) -> list[Operation]:
    operations = []
    # Whoever said that processes are not shared meant it, and with the host's process table all are seen anyway.
    if injection.shareProcessNamespace and "shareProcessNamespace" not in spec and not spec.get("hostPID"):
        operations.append(_add("/spec/shareProcessNamespace", value=True))
    operations += _missing(spec, "/spec", "volumes", [])
    operations += [_add("/spec/volumes/-", _filled(volume, words)) for volume in injection.volumes]
    operations += _missing(spec, "/spec", "initContainers", [])
    # From the last to the first, each before all others: the first of ours is the first of all then.
    ours = reversed(injection.initContainers)
    return operations + [_add("/spec/initContainers/0", _filled(container, words)) for container in ours]


def _of_container(container: Mapping[str, Any], index: int, injection: Injection) -> list[Operation]:
    path = f"/spec/containers/{index}"
    env = _objects(container, "env")
    names = [_name(entry) for entry in env]
    operations = _missing(container, path, "volumeMounts", [])
    operations += [_add(f"{path}/volumeMounts/-", mount) for mount in injection.volumeMounts]
    operations += _missing(container, path, "env", [])
    operations += [_add(f"{path}/env/-", entry) for entry in injection.env if _name(entry) not in names]
    if "PYTHONPATH" not in names:
        return [*operations, _add(f"{path}/env/-", {"name": "PYTHONPATH", "value": injection.pythonPath})]
    at = names.index("PYTHONPATH")
    # A colon with nothing behind it would be the working directory.
    value = ":".join(part for part in (injection.pythonPath, str(env[at].get("value", ""))) if part)
    replaced = {"op": "replace", "path": f"{path}/env/{at}", "value": {"name": "PYTHONPATH", "value": value}}
    return [*operations, replaced]


def _service(annotations: Mapping[str, Any], labels: Mapping[str, Any]) -> str:
    if SERVICE_ANNOTATION in annotations:
        return str(annotations[SERVICE_ANNOTATION])
    return next((str(labels[name]) for name in SERVICE_LABELS if name in labels), SERVICE_DEFAULT)


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(part, words) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, words) for part in value]
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
    return value


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _missing(of: Mapping[str, Any], path: str, key: str, empty: Any) -> list[Operation]:
    return [] if of.get(key) is not None else [_add(f"{path}/{key}", empty)]


def _escaped(key: str) -> str:
    """A key within a JSON Pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _name(thing: Mapping[str, Any]) -> str:
    return str(thing.get("name", ""))


def _object(of: Mapping[str, Any], key: str) -> Object:
    found = of.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InjectionError(f"{key} is no object")
    return found


def _objects(of: Mapping[str, Any], key: str) -> list[Object]:
    found = of.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(part, dict) for part in found):
        raise InjectionError(f"{key} is no list of objects")
    return found


def _list(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise InjectionError("what is to be injected has no list where the chart makes one")
    return found
