# SPDX-License-Identifier: Apache-2.0
"""Processes, views, verdicts and GPUs as they could be, without any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvfix.events import SCOPES, Census, Container
from vllm_kvfix_sidecar.gpu_memory import GpuDevice, GpuProcess, GpuSnapshot
from vllm_kvfix_sidecar.host_memory import ProcessView
from vllm_kvfix_sidecar.process_readings import ProcessReadings
from vllm_kvfix_sidecar.process_record import ProcessState, Told
from vllm_kvfix_sidecar.process_table import ProcessKey
from vllm_kvfix_sidecar.remedies import Remedy
from vllm_kvfix_sidecar.verdict import Culprit, Interval, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from vllm_kvfix_sidecar.readings import Point

SECOND = 10**9
ENGINE = ProcessKey(4242, 5000)
SERVER = ProcessKey(4200, 4900)
PATH = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"
GPU_SNAPSHOT = GpuSnapshot(
    devices=(
        GpuDevice("GPU-1", 0, "H200", 1000, 700, 300),
        GpuDevice("MIG-1", 0, "H200 MIG 1g", 100, 70, 30, parent="GPU-1"),
        GpuDevice("GPU-2", 1, reason="GPU is lost"),
    ),
    processes=(GpuProcess(4242, "GPU-1", 600), GpuProcess(77, "GPU-1", 1), GpuProcess(4242, "MIG-1", None)),
)


def container(path: str = PATH, time: float = 100.0, **changed: int | None) -> Container:
    """A list with 100 ids, 3 of them orphans for 7 s."""
    usual: dict[str, int | None] = {
        "length": 100,
        "members": 1,
        "capacity": 1000,
        "size": 800,
        "added": 150,
        "removed": 50,
        "orphans": 3,
        "orphan_age": 7 * SECOND,
    }
    return Container(round(time * SECOND), path, **(usual | changed))  # type: ignore[arg-type]  # only capacity is None


def figures(base: int = 1000) -> dict[str, Told]:
    """Every figure of every scope, each another number."""
    numbers = iter(range(base, base + 1000))
    return {scope: Told(100.0, {name: next(numbers) for name in names}) for scope, names in SCOPES.items()}


def state(**changed: object) -> ProcessState:
    """An engine of which everything is known, but for what is said."""
    usual: dict[str, object] = {
        "key": ENGINE,
        "role": "engine core",
        "name": "EngineCore",
        "ring": "a.ring",
        "started_ns": 50 * SECOND,
        "cgroup": "/sys/fs/cgroup/pod:77",
        "figures": figures(),
        "unread": {"gpu": "permission denied"},
        "first": {"cgroup.oom_count": 1, "cgroup.psi_some_us": 10, "python.collections_count": 5},
        "containers": (container(), container("scheduler.waiting", capacity=None, orphans=0)),
        "census": Census(100 * SECOND, 55, 3_000_000, complete=True),
    }
    return ProcessState(**(usual | changed))  # type: ignore[arg-type]  # each field has its own type


def leak(kind: Kind = Kind.UNBOUNDED, path: str = PATH, **changed: object) -> Verdict:
    """An engine that leaks, with a culprit and a remedy."""
    usual: dict[str, object] = {
        "pid": ENGINE.pid,
        "role": "engine core",
        "name": "EngineCore",
        "kind": kind,
        "category": "heap",
        "culprits": (Culprit(path, 9e7, {"request": 154.0}, "request", None, "It only grows."),),
        "slope": Interval(9.1e7, 9.2e7, 9.3e7),
        "per": {"request": 154.2},
        "follows": "request",
        "explained": 0.98,
        "time_to_limit_s": Interval(3600.0, 7200.0, float("inf")),
        "remedy": Remedy("Install the fix.", "https://example.invalid/1", "0.26.0"),
        "window_s": 600.0,
    }
    return Verdict(**(usual | changed))  # type: ignore[arg-type]  # each field has its own type


def steady() -> Verdict:
    """An engine that does nothing of note."""
    return Verdict(ENGINE.pid, "engine core", "EngineCore", Kind.STEADY)


class Known:
    """What an assessment would say."""

    def __init__(self, *known: tuple[ProcessState, Verdict | None]) -> None:
        self.errors = 2
        self._known = known or ((state(), leak()),)

    def states(self) -> Sequence[tuple[ProcessState, Verdict | None]]:
        """Them."""
        return self._known


def points(*known: tuple[ProcessState, Verdict | None]) -> Iterator[Point]:
    """All that is shown of these processes, by default of one of which everything is known, and of GPUs."""
    return ProcessReadings(Known(*known), lambda: GPU_SNAPSHOT, host_pids=True).points()


def view(key: ProcessKey = ENGINE, role: str = "engine core", **changed: object) -> ProcessView:
    """A process in the table, of a deployment of which ``SERVER`` is the root."""
    names = {"engine core": "EngineCore", "api server": "APIServer", "worker": "Worker_TP0"}
    usual: dict[str, object] = {
        "key": key,
        "parent": 1,
        "role": role,
        "name": names.get(role, role),
        "figures": {"status.rss": 1000, "status.anon": 700},
        "root": SERVER,
        "started": key.start_time / 100,
    }
    return ProcessView(**(usual | changed))  # type: ignore[arg-type]  # each field has its own type


class FakeMemory:
    """Shows the views that it is given; remembers what it was asked."""

    def __init__(self, *views: ProcessView) -> None:
        self.views = list(views)
        self.asked: list[tuple[Collection[tuple[int, int, str]], Collection[tuple[int, int]]]] = []

    def look(
        self, engines: Collection[tuple[int, int, str]], silent: Collection[tuple[int, int]] = ()
    ) -> Sequence[ProcessView]:
        """Them, and of each ring that is in no view one that knows nothing, as the real one does."""
        self.asked.append((engines, silent))
        known = {view.ring or view.key for view in self.views}
        unseen = [
            ProcessView(ProcessKey(pid, start), 0, role, role, unread={"status": "no such process"})
            for pid, start, role in engines
            if (pid, start) not in known
        ]
        for other in unseen:
            other.ring = other.key
        return [*self.views, *unseen]
