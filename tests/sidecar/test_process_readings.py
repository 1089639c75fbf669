# SPDX-License-Identifier: Apache-2.0
"""process_readings: each figure that is known is one point, what is not known is none, and no series is there twice."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.sidecar.fake_processes import (
    ENGINE,
    GPU_SNAPSHOT,
    PATH,
    SECOND,
    Known,
    container,
    figures,
    leak,
    points,
    steady,
)
from tests.sidecar.fake_processes import state as state_of
from vllm_kvfix.events import CATEGORIES, SCOPES
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar.metrics import Metrics
from vllm_kvfix_sidecar.process_readings import MOST_CULPRITS, OTHER, REASONS, ProcessReadings, code
from vllm_kvfix_sidecar.process_record import Told
from vllm_kvfix_sidecar.process_table import ProcessKey
from vllm_kvfix_sidecar.prometheus import Exposition
from vllm_kvfix_sidecar.readings import Reader
from vllm_kvfix_sidecar.verdict import Interval, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_kvfix_sidecar.readings import Point

ATTRIBUTES = {names.ATTR_PID: 4242, names.ATTR_ROLE: "engine core", names.ATTR_PROCESS_NAME: "EngineCore"}


def of(metric: names.Metric, found: Iterable[Point], attribute: str | None = None) -> dict[object, object]:
    """The values of a metric by one attribute's value."""
    return {
        point.attributes.get(attribute) if attribute else None: point.value for point in found if point.metric is metric
    }


class TestFigures:
    """What scopes say."""

    def test_every_figure_of_every_scope_is_shown_once(self) -> None:
        """Each number of each scope is some point's value, but for those of smaps that status has, too."""
        told = figures(base=5000)
        values = {point.value for point in points((state_of(figures=told, first={}), None))}
        left_out = {"smaps": {"rss", "swap"}}
        for scope, found in told.items():
            for figure, value in found.values.items():
                shown = value * 1e-6 if figure.endswith("_us") else value
                assert (shown in values) != (figure in left_out.get(scope, ())), f"{scope}.{figure}"

    def test_what_is_not_known_is_absent(self) -> None:
        """A process of which nothing is known has not one point with a value; 0 is a value."""
        nothing = state_of(figures={}, unread={}, containers=(), census=None)
        found = list(ProcessReadings(Known((nothing, None))).points())
        assert [point.metric for point in found] == [names.PROCESSES, names.ASSESSMENT_ERRORS]
        zero = state_of(figures={"status": Told(1.0, {"swap": 0})}, unread={}, containers=(), census=None)
        assert of(names.MEMORY_STATE, points((zero, None)), names.ATTR_MEMORY_STATE) == {"swap": 0}

    def test_memory_by_state_and_by_category(self) -> None:
        """RSS under the standard name, its parts by state, categories by name, all with the process's attributes."""
        found = list(points())
        numbers = figures()["status"].values
        assert of(names.PROCESS_MEMORY, found) == {None: numbers["rss"]}
        states = {name: numbers[name] for name in ("anon", "file", "shmem", "swap")}
        assert of(names.MEMORY_STATE, found, names.ATTR_MEMORY_STATE) == states
        categories = of(names.MEMORY_CATEGORY, found, names.ATTR_MEMORY_CATEGORY)
        assert categories == {name: figures()["smaps"].values[name] for name in CATEGORIES}
        (rss,) = (point for point in found if point.metric is names.PROCESS_MEMORY)
        assert rss.attributes == ATTRIBUTES

    def test_a_counter_knows_its_start_and_what_it_met(self) -> None:
        """Collections run since the process began; what was there when the sidecar came is the base."""
        (point,) = (point for point in points() if point.metric is names.GC_COLLECTIONS)
        value = figures()["python"].values["collections_count"]
        assert (point.value, point.base, point.start) == (value, 5, 50 * SECOND)

    def test_what_is_unread_has_its_reason_in_few_words(self) -> None:
        """One point a scope, of value 1."""
        unread = {"smaps": "permission denied (another user's process)", "malloc": "malloc is not glibc's"}
        found = [point for point in points((state_of(unread=unread), None)) if point.metric is names.UNREAD]
        told = {point.attributes[names.ATTR_SCOPE_READ]: point.attributes[names.ATTR_UNREAD_REASON] for point in found}
        assert told == {"smaps": "not_permitted", "malloc": "not_supported"}
        assert [point.value for point in found] == [1, 1]

    @pytest.mark.parametrize(
        ("reason", "short"),
        [
            ("permission denied (another user's process, or ptrace is not allowed)", "not_permitted"),
            ("no such process", "gone"),
            ("it has ended, which its parent did not notice yet (a zombie)", "gone"),
            ("its process is not in this process table; it may be in another PID namespace", "other_namespace"),
            ("its cgroup /a cannot be seen under /sys/fs/cgroup", "other_namespace"),
            ("its stat file is malformed", "malformed"),
            ("it is in no cgroup whose memory controller can be seen", "not_supported"),
            ("something never heard of", OTHER),
        ],
    )
    def test_reasons_are_few(self, reason: str, short: str) -> None:
        """Each reason that there is has a short form, and an unknown one is other."""
        assert code(reason) == short
        description = names.ATTR_UNREAD_REASON.description
        assert all(word in description for word in {short for _, short in REASONS} | {OTHER})


class TestContainers:
    """The census."""

    def test_a_container_is_told_by_its_path(self) -> None:
        """Length, size and orphans of each; capacity and age of orphans only where there are such."""
        found = list(points())
        waiting = "scheduler.waiting"
        assert of(names.CONTAINER_LENGTH, found, names.ATTR_CONTAINER_PATH) == {PATH: 100, waiting: 100}
        assert of(names.CONTAINER_SIZE, found, names.ATTR_CONTAINER_PATH) == {PATH: 800, waiting: 800}
        assert of(names.CONTAINER_CAPACITY, found, names.ATTR_CONTAINER_PATH) == {PATH: 1000}
        assert of(names.CONTAINER_ORPHANS, found, names.ATTR_CONTAINER_PATH) == {PATH: 3, waiting: 0}
        assert of(names.CONTAINER_ORPHAN_AGE, found, names.ATTR_CONTAINER_PATH) == {PATH: 7}
        assert of(names.CONTAINER_DRAINED, found, names.ATTR_CONTAINER_PATH) == {PATH: 50 / 150, waiting: 50 / 150}
        assert of(names.CENSUS_CONTAINERS, found) == {None: 55}
        assert of(names.CENSUS_TIME, found) == {None: 0.003}
        assert of(names.CENSUS_COMPLETE, found) == {None: 1}

    def test_a_container_that_nothing_came_to_is_not_said_to_be_drained(self) -> None:
        """No entry came: there is no share of those that left."""
        found = list(points((state_of(containers=(container(added=0, removed=0),)), None)))
        assert not of(names.CONTAINER_DRAINED, found, names.ATTR_CONTAINER_PATH)


class TestCgroups:
    """Of each once."""

    def test_processes_of_one_cgroup_tell_of_it_once(self) -> None:
        """The newest figures stand, from the start of the oldest process on, under the path without its inode."""
        older = state_of(key=ProcessKey(1, 1), name="APIServer", started_ns=40 * SECOND)
        newer = state_of(figures={"cgroup": Told(101.0, {"usage": 7, "oom_count": 4})})
        found = [point for point in points((older, None), (newer, None)) if names.ATTR_CGROUP in point.attributes]
        assert of(names.CGROUP_USAGE, found, names.ATTR_CGROUP) == {"/sys/fs/cgroup/pod": 7}
        (oom,) = (point for point in found if point.metric is names.CGROUP_EVENTS)
        assert (oom.value, oom.base, oom.start) == (4, 1, 40 * SECOND)
        assert of(names.CGROUP_LIMIT, found) == {}

    def test_a_cgroup_that_is_not_known_is_told_by_the_ring(self) -> None:
        """Two processes in unknown cgroups are two."""
        one = state_of(cgroup=None)
        other = state_of(key=ProcessKey(1, 1), cgroup=None, ring="b.ring")
        told = of(names.CGROUP_USAGE, points((one, None), (other, None)), names.ATTR_CGROUP)
        assert set(told) == {"ring a.ring", "ring b.ring"}

    def test_pressure_is_in_seconds(self) -> None:
        """From microseconds, the base as well."""
        told = {"cgroup": Told(1.0, {"psi_some_us": 2_500_000})}
        found = points((state_of(figures=told, first={"cgroup.psi_some_us": 500_000}), None))
        (point,) = (point for point in found if point.metric is names.CGROUP_PRESSURE)
        assert (point.value, point.base) == pytest.approx((2.5, 0.5))


class TestVerdicts:
    """What the memory does."""

    def test_one_kind_is_one_and_the_others_are_zero(self) -> None:
        """The state set of a verdict, whether it alarms, its slope, and its culprit."""
        found = list(points())
        kinds = of(names.VERDICT, found, names.ATTR_VERDICT_KIND)
        assert kinds == {kind.value.replace(" ", "_"): int(kind is Kind.UNBOUNDED) for kind in Kind}
        assert of(names.VERDICT_ALARMING, found) == {None: 1}
        assert of(names.VERDICT_SLOPE, found, names.ATTR_BOUND) == {"low": 9.1e7, "best": 9.2e7, "high": 9.3e7}
        assert of(names.VERDICT_EXPLAINED, found) == {None: 0.98}
        assert of(names.VERDICT_CATEGORY, found, names.ATTR_MEMORY_CATEGORY) == {"heap": 1}
        assert of(names.VERDICT_CATEGORY, points((state_of(), steady()))) == {}
        assert of(names.VERDICT_CULPRIT, found, names.ATTR_CONTAINER_PATH) == {PATH: 9e7}
        described = names.ATTR_VERDICT_KIND.description
        assert all(str(kind) in described for kind in kinds)

    def test_a_bound_that_there_is_not_is_absent(self) -> None:
        """Time to the limit without an upper end has two points; with none at all, or NaN, no point."""
        assert of(names.VERDICT_TIME_TO_LIMIT, points(), names.ATTR_BOUND) == {"low": 3600, "best": 7200}
        nan = leak(time_to_limit_s=None, explained=math.nan, slope=Interval(math.nan, -math.inf, math.inf))
        found = list(points((state_of(), nan)))
        for metric in (names.VERDICT_TIME_TO_LIMIT, names.VERDICT_EXPLAINED, names.VERDICT_SLOPE):
            assert of(metric, found) == {}

    def test_culprits_are_few_and_each_is_there_once(self) -> None:
        """Five at most; two of one path are one."""
        (culprit,) = leak().culprits
        many = [leak(path=f"p{number}").culprits[0] for number in range(9)]
        found = of(names.VERDICT_CULPRIT, points((state_of(), leak(culprits=many))), names.ATTR_CONTAINER_PATH)
        assert len(found) == MOST_CULPRITS
        twice = [point for point in points((state_of(), leak(culprits=(culprit, culprit)))) if _is_culprit(point)]
        assert len(twice) == 1


def _is_culprit(point: Point) -> bool:
    return point.metric is names.VERDICT_CULPRIT


class TestGpus:
    """NVML."""

    def test_devices_and_parts_of_them(self) -> None:
        """Used and total of each; a part says of which GPU it is; a device that tells nothing is absent."""
        found = list(points())
        assert of(names.GPU_USAGE, found, names.ATTR_HW_ID) == {"GPU-1": 700, "MIG-1": 70}
        assert of(names.GPU_LIMIT, found, names.ATTR_HW_ID) == {"GPU-1": 1000, "MIG-1": 100}
        assert of(names.GPU_USAGE, found, names.ATTR_HW_PARENT) == {None: 700, "GPU-1": 70}

    def test_a_process_has_what_the_driver_says_of_its_pid(self) -> None:
        """Only where the pids are the host's, only of processes that are followed, and only what is known."""
        (point,) = (point for point in points() if point.metric is names.PROCESS_GPU)
        assert (point.attributes, point.value) == (ATTRIBUTES | {names.ATTR_HW_ID: "GPU-1"}, 600)
        inside = ProcessReadings(Known(), lambda: GPU_SNAPSHOT, host_pids=False).points()
        assert of(names.PROCESS_GPU, inside) == {}


class TestIdentity:
    """No series twice."""

    def test_two_alike_of_two_pid_namespaces_are_told_apart_by_their_rings(self) -> None:
        """Both carry the ring's name, a third of its own pid does not; no two points have the same attributes."""
        known = [
            (state_of(), leak()),
            (state_of(key=ProcessKey(ENGINE.pid, 1), ring="b.ring"), leak()),
            (state_of(key=ProcessKey(5, 1), ring="c.ring"), None),
        ]
        found = list(points(*known))
        series = Counter((point.metric.name, *sorted(point.attributes.items())) for point in found)
        assert max(series.values()) == 1
        rings = [point.attributes.get(names.ATTR_RING_FILE) for point in found if point.metric is names.PROCESS_MEMORY]
        assert rings == ["a.ring", "b.ring", None]

    @given(st.text(), st.text(), st.text())
    def test_names_of_strangers_do_no_harm(self, path: str, name: str, cgroup: str) -> None:
        """Whatever a container, a process or a cgroup is called, /metrics can be parsed, and says it."""
        known = state_of(containers=(container(path),), name=name, cgroup=f"{cgroup}:1")
        reader = Reader(Metrics(), more=lambda: points((known, leak(path=path))))
        body, _ = Exposition(reader, {}, exemplars=False).body("")
        families = {family.name: family for family in text_string_to_metric_families(body.decode())}
        (sample,) = families["vllm_kvfix_container_length"].samples
        assert sample.labels["vllm_kvfix_container_path"] == path
        assert sample.labels["vllm_kvfix_process_name"] == name

    def test_processes_are_counted_by_role(self) -> None:
        """And the assessment's errors are told."""
        known = [(state_of(), None), (state_of(key=ProcessKey(1, 1)), None), (state_of(role="child"), None)]
        found = list(points(*known))
        assert of(names.PROCESSES, found, names.ATTR_ROLE) == {"engine core": 2, "child": 1}
        assert of(names.ASSESSMENT_ERRORS, found) == {None: 2}

    def test_a_container_and_a_scope_are_of_the_process_that_tells_of_them(self) -> None:
        """Whatever is told of a process has its attributes."""
        for point in points():
            if names.PROCESS_ATTRIBUTES[0] in point.metric.attributes:
                assert ATTRIBUTES.items() <= point.attributes.items()
        assert container().path == PATH
        assert set(SCOPES) == set(figures())
