# SPDX-License-Identifier: Apache-2.0
"""A real vLLM in a pod with a sidecar of each profile, and what was seen of them from its start to its end."""

from __future__ import annotations

import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jsonpatch

from tests.engine.harness import ENGINE_ARGUMENTS
from tests.helm.containers import BASE, IMAGE
from tests.helm.kubelet import Pod
from tests.helm.tools import injection_json
from tests.sidecar_e2e.processes import free_port, wait_until
from vllm_kvfix.demo.engine import MODEL_NAME, distribution_name, engine_environ
from vllm_kvfix.demo.environment import cache_folder
from vllm_kvfix.ring.layout import ENGINE_CORE, ROLES
from vllm_kvfix.ring.reader import RingReader
from vllm_kvfix_sidecar.injection.patch import Injection, patch

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path

    from tests.helm.containers import Podman
    from tests.sidecar_e2e.receiver import Receiver
    from tests.sidecar_e2e.telemetry import Point, Span
    from vllm_kvfix.demo.environment import Environment
    from vllm_kvfix.ring.reader import Header

RELEASE = "0.25.1"
PROFILES = ("minimal", "shared", "ptrace")
OURS, VLLM, PLUGIN = "vllm-kvfix", "vllm", "vllm-kvfix-plugin"
REQUESTS = 24
LIMIT = 6 << 30
_RINGS = "vllm-kvfix-rings"
_SCRATCH = "scratch"
_TOKENS = 60
_START_S = 400.0
_TOLD_S = 90.0
# A span for each request, and all at once: the defaults would make the test wait.
_QUICK = {"OTEL_TRACES_SAMPLER": "always_on", "OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_METRIC_EXPORT_INTERVAL": "1000"}
# What a ring tells soon; maps are told more rarely.
OF_ITSELF = {"status", "malloc", "cgroup"}
# The sidecar reads the maps of a process without a ring so rarely that a test would wait for minutes.
_MAPS = """
import json, os
from vllm_kvfix import host

def why_not(pid):
    try:
        host.smaps(pid)
    except host.UnreadableError as error:
        return str(error)
    return ""

found = {}
for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
    title = open(f"/proc/{pid}/cmdline").read().replace(chr(0), " ").strip()
    if any(word in title for word in ("VLLM::", "vllm serve", "resource_tracker")):
        found[title] = why_not(pid)
print(json.dumps(found))
"""


def before(profile: str, environment: Environment, folder: Path, port: int) -> dict[str, Any]:
    """A pod that serves, as an API server hands it to the webhook, with vLLM and its Python from this machine."""
    home, scratch = str(cache_folder() / "vllm"), f"/{_SCRATCH}"
    python = environment.python.resolve().parents[1]
    readable = {"usr": "/usr", "environment": environment.path, "python": python, "model": folder / "model"}
    readable["metadata"] = distribution_name(environment, folder / "metadata")
    volumes: list[dict[str, Any]] = [{"name": n, "hostPath": {"path": str(path)}} for n, path in readable.items()]
    mounts: list[dict[str, Any]] = [
        {"name": n, "mountPath": str(path), "readOnly": True} for n, path in readable.items()
    ]
    for name, path in (("home", home), (_SCRATCH, scratch)):
        volumes.append({"name": name, "emptyDir": {}})
        mounts.append({"name": name, "mountPath": path})
    ours = {name: value for name, value in engine_environ({}, ()).items() if name not in os.environ}
    variables = {**ours, "TMPDIR": scratch, "PYTHONPATH": str(readable["metadata"])}
    serve = ["--host=127.0.0.1", f"--port={port}", f"--served-model-name={MODEL_NAME}", "--enforce-eager"]
    vllm = {
        "name": VLLM,
        "image": BASE,
        "command": [str(environment.path / "bin" / "vllm")],
        "args": ["serve", str(readable["model"]), *serve, *ENGINE_ARGUMENTS],
        "env": [{"name": name, "value": value} for name, value in sorted(variables.items())],
        "resources": {"limits": {"memory": f"{LIMIT >> 20}Mi"}},
        "volumeMounts": mounts,
    }
    metadata = {
        "name": f"llama-{profile}",
        "namespace": "llm",
        "uid": f"0b5f7c1e-0000-4000-8000-{PROFILES.index(profile):012}",
        "labels": {"app.kubernetes.io/instance": "llama"},
    }
    spec = {"nodeName": "node-1", "volumes": volumes, "containers": [vllm]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def injected(profile: str, pod: dict[str, Any], endpoint: str) -> dict[str, Any]:
    """The pod as the chart's patch leaves it."""
    repository, _, tag = IMAGE.rpartition(":")
    extra = [{"name": name, "value": value} for name, value in _QUICK.items()]
    values = {"injection.profile": profile, "image.repository": repository, "image.tag": tag}
    values |= {"sidecar.port": str(free_port()), "otlp.endpoint": endpoint}
    told = [f"--set={name}={value}" for name, value in values.items()]
    injection = Injection.of_json(injection_json(*told, f"--set-json=sidecar.extraEnv={json.dumps(extra)}"))
    made = patch(pod, injection)
    assert made.operations, made.reason
    changed: dict[str, Any] = jsonpatch.apply_patch(pod, list(made.operations))
    return changed


@dataclass(frozen=True)
class Seen:
    """What one sidecar showed: its page's data, its metrics, what it exported, and what came of attach in it.

    ``maps``: by the name of each process of vLLM that it sees, why it cannot read its maps; empty where it can.
    """

    pod: dict[str, Any]
    alive: bool
    now: dict[str, Any]
    ready: dict[str, Any]
    metrics: str
    spans: list[Span]
    points: list[Point]
    maps: dict[str, str]
    dry_run: subprocess.CompletedProcess[str]
    exit_code: int

    def processes(self, *roles: str) -> list[dict[str, Any]]:
        """Those of these roles."""
        return [process for process in running(self.now) if process["role"] in roles]

    @property
    def engine(self) -> dict[str, Any]:
        """The engine core."""
        (found,) = self.processes(ENGINE_CORE)
        return found


@dataclass(frozen=True)
class Deployment:
    """What was seen of the engine and, by profile, of its sidecars."""

    log: str
    headers: list[Header]
    installed: list[str]
    by_profile: Mapping[str, Seen]
    attached: subprocess.CompletedProcess[str]
    left: list[str]


class Scene:
    """The pods of the three profiles, with one engine in them all."""

    def __init__(self, podman: Podman, environment: Environment, folder: Path, receiver: Receiver) -> None:
        self.port = free_port()
        self._environment = environment
        self._receiver = receiver
        plain = {profile: before(profile, environment, folder, self.port) for profile in PROFILES}
        self._told = {profile: injected(profile, plain[profile], receiver.grpc_endpoint) for profile in PROFILES}
        self._pods: dict[str, Pod] = {}
        self._podman = podman
        self._volumes = folder / "volumes"

    def start(self) -> None:
        """Start all, the sidecars before the engine, as a kubelet does, and wait until it serves."""
        for profile in ("shared", "ptrace", "minimal"):
            made = Pod(self._podman, self._told[profile], self._volumes, self._pods.get("shared"))
            self._pods[profile] = made
            made.init(*([PLUGIN] if profile == "shared" else []), OURS)
        self._engine.start(VLLM)
        wait_until(self._serves, _START_S, lambda: self._engine.log(VLLM)[-4000:])

    @property
    def _engine(self) -> Pod:
        return self._pods["shared"]

    def _serves(self) -> bool:
        assert self._engine.running(VLLM), self._engine.log(VLLM)[-6000:]
        return self._engine.get(VLLM, "/health", self.port) is not None

    def remove(self) -> None:
        """End what is left."""
        for pod in self._pods.values():
            pod.remove()

    def observe(self) -> Deployment:
        """Put requests on it, look, attach, put requests on it again, look, and end it in order."""
        complete(self.port)
        for profile, pod in self._pods.items():
            self._wait_until_seen(profile, pod)
        maps = {
            profile: json.loads(pod.execute(OURS, "python3", "-c", _MAPS).stdout) for profile, pod in self._pods.items()
        }
        dry_run = [OURS, "vllm-kvfix", "attach", "--dry-run", "--all", "--json"]
        dry_runs = {profile: pod.execute(*dry_run) for profile, pod in self._pods.items()}
        attached = self._pods["ptrace"].execute(OURS, "vllm-kvfix", "attach", "--all", "--json")
        complete(self.port)
        for profile, pod in self._pods.items():
            wait_until(lambda: _finished(_now(pod)) == 2 * REQUESTS, _TOLD_S, lambda: pod.log(OURS)[-3000:])  # noqa: B023  # called at once
            self._wait_for_spans(profile, 2 * REQUESTS)
        pages = {profile: _pages(pod) for profile, pod in self._pods.items()}
        headers = [RingReader(path).header for path in sorted(self._engine.volume(_RINGS).rglob("*.ring"))]
        log = self._engine.log(VLLM)
        self._engine.stop(VLLM)
        return Deployment(
            log=log,
            headers=headers,
            installed=[path.name for path in self._environment.site_packages.iterdir() if "kvfix" in path.name],
            by_profile={
                profile: Seen(
                    pod=self._told[profile],
                    spans=self._spans(profile),
                    points=[p for p in self._receiver.metrics if self._is_of(profile, p)],
                    maps=maps[profile],
                    dry_run=dry_runs[profile],
                    exit_code=pod.stop(OURS),
                    **pages[profile],
                )
                for profile, pod in self._pods.items()
            },
            attached=attached,
            left=[path.name for path in self._engine.volume(_SCRATCH).iterdir() if "kvfix" in path.name],
        )

    def _wait_until_seen(self, profile: str, pod: Pod) -> None:
        """Until every process with a ring has told something of itself, and all requests are counted."""

        def has_seen() -> bool:
            now = _now(pod)
            told = {process["role"] for process in now["processes"] if process["memory"].keys() >= OF_ITSELF}
            return _finished(now) >= REQUESTS and told >= set(ROLES)

        wait_until(has_seen, _TOLD_S, lambda: f"{json.dumps(_now(pod)['processes'])}\n{pod.log(OURS)[-3000:]}")
        self._wait_for_spans(profile, REQUESTS)

    def _wait_for_spans(self, profile: str, least: int) -> None:
        self._receiver.wait_for(lambda _: len(self._spans(profile)) >= least, _TOLD_S)

    def _spans(self, profile: str) -> list[Span]:
        return [span for span in self._receiver.spans if self._is_of(profile, span)]

    def _is_of(self, profile: str, told: Span | Point) -> bool:
        return told.resource.get("k8s.pod.name") == self._pods[profile].name


def running(now: dict[str, Any]) -> list[dict[str, Any]]:
    """The processes that have not ended: vLLM starts short ones, too."""
    return [process for process in now["processes"] if process["ended_unix_s"] is None]


def complete(port: int) -> None:
    """Have it answer requests of several blocks each."""

    def ask(number: int) -> int:
        asked = {"model": MODEL_NAME, "prompt": [number % 500 + 1] * 70, "max_tokens": _TOKENS, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as answer:
            return int(json.loads(answer.read())["usage"]["completion_tokens"])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(REQUESTS))) == [_TOKENS] * REQUESTS


def _now(pod: Pod) -> dict[str, Any]:
    now: dict[str, Any] = json.loads(pod.get(OURS, "/api/now", "kvfix-metrics") or '{"processes": [], "engines": []}')
    return now


def _finished(now: dict[str, Any]) -> int:
    return sum(sum(engine["requests"]["finished"].values()) for engine in now["engines"])


def _pages(pod: Pod) -> dict[str, Any]:
    return {
        "alive": pod.get(OURS, "/healthz", "kvfix-metrics") is not None,
        "now": _now(pod),
        "ready": json.loads(pod.get(OURS, "/readyz", "kvfix-metrics") or "{}"),
        "metrics": pod.get(OURS, "/metrics", "kvfix-metrics") or "",
    }
