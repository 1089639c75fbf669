# SPDX-License-Identifier: Apache-2.0
"""Pods as hypothesis makes them up: every shape that decides what is injected."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

names = st.sampled_from(["vllm", "main", "proxy", "log-agent"])
texts = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
env_names = st.sampled_from(["PYTHONPATH", "VLLM_KVFIX_PATCH", "VLLM_KVFIX_RING_DIR", "HF_HOME", "VLLM_PLUGINS"])
env = st.one_of(
    st.fixed_dictionaries({"name": env_names, "value": texts}),
    st.fixed_dictionaries({"name": env_names}),
    st.fixed_dictionaries({"name": env_names, "valueFrom": st.just({"fieldRef": {"fieldPath": "metadata.name"}})}),
)
mounts = st.fixed_dictionaries({"name": st.just("models"), "mountPath": st.just("/models")})


def _with(required: dict[str, Any], optional: dict[str, Any]) -> Any:
    return st.fixed_dictionaries(required, optional=optional)


def _containers(least: int) -> Any:
    container = _with(
        {"name": names, "image": st.just("vllm/vllm-openai:v0.25.1")},
        {
            "env": st.lists(env, max_size=3, unique_by=lambda entry: entry["name"]),
            "volumeMounts": st.lists(mounts, max_size=1),
        },
    )
    return st.lists(container, min_size=least, max_size=3, unique_by=lambda found: found["name"])


annotations = _with(
    {},
    {
        "vllm-kvfix.dev/container": names,
        "vllm-kvfix.dev/injected": texts,
        "resource.opentelemetry.io/service.name": texts,
        "a/b~c": texts,
    },
)
labels = _with({}, {"app.kubernetes.io/instance": texts, "app.kubernetes.io/name": texts, "app": texts})
volumes = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["models", "vllm-kvfix-rings"]), "emptyDir": st.just({})}),
    max_size=2,
    unique_by=lambda volume: str(volume["name"]),
)
init = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["download", "vllm-kvfix"]), "image": st.just("busybox:1")}),
    max_size=2,
    unique_by=lambda found: found["name"],
)
pods = _with(
    {
        "apiVersion": st.just("v1"),
        "kind": st.just("Pod"),
        "metadata": _with({"name": st.just("p")}, {"annotations": annotations, "labels": labels}),
        "spec": _with(
            {"containers": _containers(1)},
            {
                "volumes": volumes,
                "initContainers": init,
                "shareProcessNamespace": st.booleans(),
                "hostPID": st.just(True),  # noqa: FBT003  # a value of the pod
            },
        ),
    },
    {},
)
