# SPDX-License-Identifier: Apache-2.0
"""Turns what is known of processes, cgroups and GPUs into points of the metrics in ``conventions``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeAlias

from vllm_kvfix.events import CATEGORIES
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar.metrics import LARGEST
from vllm_kvfix_sidecar.readings import Point
from vllm_kvfix_sidecar.verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vllm_kvfix_sidecar.gpu_memory import GpuDevice, GpuSnapshot
    from vllm_kvfix_sidecar.process_record import ProcessState
    from vllm_kvfix_sidecar.readings import Attributes
    from vllm_kvfix_sidecar.verdict import Interval, Verdict

    Known: TypeAlias = Sequence[tuple[ProcessState, Verdict | None]]

MOST_CULPRITS = 5
GPU = "gpu"
OTHER = "other"
# What reasons have in common, so that they make few series; the first that fits.
REASONS = (
    ("permission denied", "not_permitted"),
    ("namespace", "other_namespace"),
    ("cannot be seen", "other_namespace"),
    ("no such process", "gone"),
    ("ended", "gone"),
    ("ending", "gone"),
    ("removed", "gone"),
    ("took its pid", "gone"),
    ("malformed", "malformed"),
    ("not what a kernel writes", "malformed"),
    ("in no cgroup", "not_supported"),
    ("malloc", "not_supported"),
    ("libc", "not_supported"),
)


def _one(name: str, value: str | int) -> Attributes:
    return {name: value}


_NO_MORE: Attributes = {}
_PLAIN: tuple[tuple[str, str, names.Metric, Attributes], ...] = (
    ("status", "rss", names.PROCESS_MEMORY, _NO_MORE),
    *(
        ("status", state, names.MEMORY_STATE, _one(names.ATTR_MEMORY_STATE, state))
        for state in ("anon", "file", "shmem", "swap")
    ),
    ("status", "peak", names.MEMORY_PEAK, _NO_MORE),
    ("status", "threads_count", names.THREADS, _NO_MORE),
    ("smaps", "pss", names.MEMORY_PSS, _NO_MORE),
    ("smaps", "uss", names.MEMORY_USS, _NO_MORE),
    *(("smaps", name, names.MEMORY_CATEGORY, _one(names.ATTR_MEMORY_CATEGORY, name)) for name in CATEGORIES),
    ("malloc", "in_use", names.MALLOC_IN_USE, _NO_MORE),
    ("malloc", "retained", names.MALLOC_RETAINED, _NO_MORE),
    ("malloc", "mapped", names.MALLOC_MAPPED, _NO_MORE),
    ("python", "blocks_count", names.PYTHON_BLOCKS, _NO_MORE),
    *(("python", f"gen{at}_count", names.GC_COUNT, _one(names.ATTR_GC_GENERATION, at)) for at in range(3)),
    ("python", "collections_count", names.GC_COLLECTIONS, _NO_MORE),
)
_CGROUP: tuple[tuple[str, names.Metric, Attributes, float], ...] = (
    ("usage", names.CGROUP_USAGE, _NO_MORE, 1),
    *(
        (state, names.CGROUP_STATE, _one(names.ATTR_MEMORY_STATE, state), 1)
        for state in ("anon", "file", "shmem", "kernel", "swap")
    ),
    ("limit", names.CGROUP_LIMIT, _NO_MORE, 1),
    ("high", names.CGROUP_HIGH, _NO_MORE, 1),
    *(
        (f"{event}_count", names.CGROUP_EVENTS, _one(names.ATTR_CGROUP_EVENT, event), 1)
        for event in ("oom", "oom_kill", "high", "max")
    ),
    ("psi_some_us", names.CGROUP_PRESSURE, _one(names.ATTR_PRESSURE, "some"), 1e-6),
    ("psi_full_us", names.CGROUP_PRESSURE, _one(names.ATTR_PRESSURE, "full"), 1e-6),
)


class Processes(Protocol):
    """What is asked of :class:`vllm_kvfix_sidecar.assessment.Assessment`."""

    errors: int

    def states(self) -> Known:
        """What is known of each process that runs, and the latest verdict on it."""


class ProcessReadings:
    """Reads processes and GPUs.

    ``gpus`` gives the last look at the GPUs. ``host_pids``: whether pids of processes are the host's, as NVML's are.
    """

    def __init__(
        self,
        processes: Processes,
        gpus: Callable[[], GpuSnapshot | None] = lambda: None,
        *,
        host_pids: bool = False,
    ) -> None:
        self._processes = processes
        self._gpus = gpus
        self._host_pids = host_pids

    def points(self) -> Iterator[Point]:
        """Every point, each series once."""
        known = self._processes.states()
        by_pid: dict[int, Attributes] = {}
        for (state, verdict), attributes in zip(known, _attributes(known), strict=True):
            by_pid[state.key.pid] = attributes
            yield from _process_points(state, attributes)
            yield from _container_points(state, attributes)
            if verdict is not None:
                yield from _verdict_points(verdict, attributes)
        yield from _cgroup_points(known)
        yield from self._gpu_points(by_pid)
        roles = [state.role for state, _ in known]
        for role in dict.fromkeys(roles):
            yield Point(names.PROCESSES, {names.ATTR_ROLE: role}, roles.count(role))
        yield Point(names.ASSESSMENT_ERRORS, {}, self._processes.errors)

    def _gpu_points(self, by_pid: Mapping[int, Attributes]) -> Iterator[Point]:
        snapshot = self._gpus()
        if snapshot is None:
            return
        for device in snapshot.devices:
            attributes = _gpu_attributes(device)
            if device.used is not None:
                yield Point(names.GPU_USAGE, attributes, device.used)
            if device.total is not None:
                yield Point(names.GPU_LIMIT, attributes, device.total)
        if not self._host_pids:  # else another process of the same number might be taken for it
            return
        for process in snapshot.processes:
            if process.used is not None and process.pid in by_pid:
                yield Point(names.PROCESS_GPU, by_pid[process.pid] | {names.ATTR_HW_ID: process.device}, process.used)


def _gpu_attributes(device: GpuDevice) -> Attributes:
    attributes: Attributes = {names.ATTR_HW_ID: device.uuid, names.ATTR_HW_TYPE: GPU}
    if device.name:
        attributes[names.ATTR_HW_NAME] = device.name
    if device.parent is not None:
        attributes[names.ATTR_HW_PARENT] = device.parent
    return attributes


def _attributes(known: Known) -> list[Attributes]:
    """Of each process those that no other has: of two alike in two PID namespaces, the ring's name is told."""
    plain: list[Attributes] = [
        {
            names.ATTR_PID: min(state.key.pid, LARGEST),
            names.ATTR_ROLE: state.role,
            names.ATTR_PROCESS_NAME: state.name,
        }
        for state, _ in known
    ]
    return [
        attributes | {names.ATTR_RING_FILE: state.ring} if plain.count(attributes) > 1 else attributes
        for (state, _), attributes in zip(known, plain, strict=True)
    ]


def _process_points(state: ProcessState, attributes: Attributes) -> Iterator[Point]:
    for scope, figure, metric, more in _PLAIN:
        told = state.figures.get(scope)
        value = told.values.get(figure) if told is not None else None
        if value is None:
            continue
        if metric.kind is names.Kind.COUNTER:
            first = state.first.get(f"{scope}.{figure}", value)
            yield Point(metric, attributes | more, value, _source(state), state.started_ns, first)
        else:
            yield Point(metric, attributes | more, value)
    for scope, reason in state.unread.items():
        named = _one(names.ATTR_SCOPE_READ, scope) | _one(names.ATTR_UNREAD_REASON, code(reason))
        yield Point(names.UNREAD, attributes | named, 1)


def _source(state: ProcessState) -> str:
    return f"{state.key.pid} {state.key.start_time}"


def code(reason: str) -> str:
    """The few words that reasons are told by in an attribute."""
    return next((short for part, short in REASONS if part in reason), OTHER)


def _container_points(state: ProcessState, attributes: Attributes) -> Iterator[Point]:
    for container in state.containers:
        named = attributes | {names.ATTR_CONTAINER_PATH: container.path}
        yield Point(names.CONTAINER_LENGTH, named, container.length)
        if container.capacity is not None:
            yield Point(names.CONTAINER_CAPACITY, named, container.capacity)
        yield Point(names.CONTAINER_SIZE, named, container.size)
        yield Point(names.CONTAINER_ORPHANS, named, container.orphans)
        if container.orphans:
            yield Point(names.CONTAINER_ORPHAN_AGE, named, container.orphan_age / 1e9)
        if container.added:
            yield Point(names.CONTAINER_DRAINED, named, container.removed / container.added)
    census = state.census
    if census is not None:
        yield Point(names.CENSUS_CONTAINERS, attributes, census.containers)
        yield Point(names.CENSUS_TIME, attributes, census.spent / 1e9)
        yield Point(names.CENSUS_COMPLETE, attributes, int(census.complete))


def _verdict_points(verdict: Verdict, attributes: Attributes) -> Iterator[Point]:
    for kind in Kind:
        named = attributes | {names.ATTR_VERDICT_KIND: kind.value.replace(" ", "_")}
        yield Point(names.VERDICT, named, int(verdict.kind is kind))
    if verdict.category is not None:
        yield Point(names.VERDICT_CATEGORY, attributes | _one(names.ATTR_MEMORY_CATEGORY, verdict.category), 1)
    yield Point(names.VERDICT_ALARMING, attributes, int(verdict.alarming))
    yield from _interval_points(names.VERDICT_SLOPE, verdict.slope, attributes)
    if verdict.explained is not None and math.isfinite(verdict.explained):
        yield Point(names.VERDICT_EXPLAINED, attributes, verdict.explained)
    yield from _interval_points(names.VERDICT_TIME_TO_LIMIT, verdict.time_to_limit_s, attributes)
    slopes: dict[str, float] = {}
    for culprit in verdict.culprits[:MOST_CULPRITS]:
        slopes.setdefault(culprit.path, culprit.bytes_per_hour)
    for path, slope in slopes.items():
        if math.isfinite(slope):
            yield Point(names.VERDICT_CULPRIT, attributes | {names.ATTR_CONTAINER_PATH: path}, slope)


def _interval_points(metric: names.Metric, interval: Interval | None, attributes: Attributes) -> Iterator[Point]:
    if interval is None:
        return
    for bound, value in (("low", interval.low), ("best", interval.best), ("high", interval.high)):
        if math.isfinite(value):
            yield Point(metric, attributes | {names.ATTR_BOUND: bound}, float(value))


def _cgroup_points(known: Known) -> Iterator[Point]:
    """Of each cgroup once, whoever of its processes told of it last."""
    told: dict[str, list[ProcessState]] = {}
    for state, _ in known:
        if "cgroup" in state.figures:
            told.setdefault(_cgroup_of(state), []).append(state)
    for label, states in told.items():
        newest = max(states, key=lambda state: state.figures["cgroup"].time)
        start = min(state.started_ns for state in states)
        yield from _points_of_cgroup(label, newest, start)


def _cgroup_of(state: ProcessState) -> str:
    return f"ring {state.ring}" if state.cgroup is None else state.cgroup.rpartition(":")[0] or state.cgroup


def _points_of_cgroup(label: str, state: ProcessState, start: int) -> Iterable[Point]:
    values = state.figures["cgroup"].values
    for figure, metric, more, unit in _CGROUP:
        if figure not in values:
            continue
        value = values[figure] if unit == 1 else values[figure] * unit
        named = _one(names.ATTR_CGROUP, label) | more
        if metric.kind is names.Kind.COUNTER:
            first = state.first.get(f"cgroup.{figure}", values[figure]) * unit
            yield Point(metric, named, value, state.cgroup or label, start, first)
        else:
            yield Point(metric, named, value)
