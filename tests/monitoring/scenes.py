# SPDX-License-Identifier: Apache-2.0
"""Hours of a deployment, minute by minute, as the series that a sidecar would have told: what promtool is given.

The names are those of ``conventions``; a series has the labels that its metric has, or it cannot be made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tests.monitoring.queries import UP
from vllm_kvfix.ring.layout import ENGINE_CORE, PATCH_STATES, WORKER
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar.conventions import Metric, label_name
from vllm_kvfix_sidecar.readings import ENGINE_STATES
from vllm_kvfix_sidecar.verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

JOB, INSTANCE = "vllm", "10.0.0.7:9464"
PID = "17"
PATH = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"
MIB = 1 << 20
# As in promtool's notation: not scraped, and gone for good.
MISSING, STALE = "_", "stale"
OUTCOMES = ("exported", "failed", "dropped")

if TYPE_CHECKING:
    # A value, or one of the two marks above; or what it is in each minute.
    Value: TypeAlias = float | str
    Told: TypeAlias = Value | Callable[[int], Value]


class Firing(NamedTuple):
    """An alert that must fire: its name, severity, further labels, and words that its description must hold."""

    name: str
    severity: str
    labels: Mapping[str, str]
    says: tuple[str, ...]


class Scene:
    """Series of ``minutes`` minutes; each is a list with a value a minute."""

    def __init__(self, minutes: int, job: str = JOB, instance: str = INSTANCE) -> None:
        self.minutes = minutes
        self.series: dict[str, list[Value]] = {}
        self._target = {"job": job, "instance": instance}

    def tell(self, metric: Metric, value: Told, **attributes: str) -> str:
        """A series that has this value, or what a function says of each minute; returns its name.

        ``attributes`` by the end of their names, which must be those of the metric.
        """
        by_end = {name.rpartition(".")[2]: name for name in metric.attributes}
        assert attributes.keys() == by_end.keys(), f"{metric.name} has {sorted(by_end)}"
        labels = {label_name(by_end[end]): text for end, text in attributes.items()}
        return self._put(metric.series, labels, value)

    def up(self, value: Told) -> None:
        """Whether the target answers."""
        self._put(UP, {}, value)

    def _put(self, name: str, labels: Mapping[str, str], value: Told) -> str:
        inside = ",".join(f'{label}="{text}"' for label, text in {**self._target, **labels}.items())
        series = f"{name}{{{inside}}}"
        told = [value(minute) if callable(value) else value for minute in range(self.minutes + 1)]
        self.series[series] = told
        return series

    def hide(self, begin: int, end: int) -> None:
        """Nothing but ``up`` is told in these minutes."""
        for name, values in self.series.items():
            if not name.startswith(f"{UP}{{"):
                values[begin:end] = [STALE, *[MISSING] * (end - begin - 1)]

    def end(self, minute: int) -> None:
        """From then on the target is not there any more, nor anything that it told."""
        for values in self.series.values():
            values[minute:] = [STALE, *[MISSING] * (self.minutes - minute)]

    def add(self, other: Scene) -> None:
        """Another target's series beside these."""
        assert not self.series.keys() & other.series.keys()
        self.series |= other.series

    def inputs(self) -> list[dict[str, str]]:
        """As promtool takes them."""
        return [{"series": name, "values": " ".join(map(str, values))} for name, values in self.series.items()]


def engine(pid: str = PID) -> dict[str, str]:
    """The attributes of an engine's metrics, by the ends of their names."""
    return {"pid": pid, "index": "0"}


def process(pid: str = PID, role: str = ENGINE_CORE, name: str = "EngineCore") -> dict[str, str]:
    """Those of a process's."""
    return {"pid": pid, "role": role, "name": name}


def verdict(
    scene: Scene,
    kind: Callable[[int], Kind | None],
    *,
    slope: float = 0.0,
    left: Callable[[int], Value] | None = None,
    of: Mapping[str, str] | None = None,
) -> None:
    """What is said of a process: its verdict in each minute, its growth an hour, and the seconds to the limit."""
    of = process() if of is None else of
    for each in Kind:

        def one(minute: int, each: Kind = each) -> Value:
            now = kind(minute)
            return MISSING if now is None else int(now is each)

        scene.tell(names.VERDICT, one, kind=each.value.replace(" ", "_"), **of)
    alarming = {Kind.UNBOUNDED, Kind.UNEXPLAINED}
    scene.tell(
        names.VERDICT_ALARMING, lambda minute: MISSING if (now := kind(minute)) is None else int(now in alarming), **of
    )
    scene.tell(names.VERDICT_SLOPE, slope, bound="best", **of)
    if left is not None:
        scene.tell(names.VERDICT_TIME_TO_LIMIT, left, bound="best", **of)


def patch(scene: Scene, state: str, pid: str = PID) -> None:
    """The state that the fix is in."""
    for each in PATCH_STATES:
        scene.tell(names.PATCH_STATE, int(each == state), state=each.replace(" ", "_"), **engine(pid))


def backlog(scene: Scene, value: Told, pid: str = PID) -> None:
    """The length of new_block_ids."""
    scene.tell(names.BACKLOG, value, group="0", **engine(pid))


def engines(scene: Scene, live: Told, seen: Told | None = None) -> None:
    """How many engines have a ring and live, and how many engine cores the process table shows."""
    for state in ENGINE_STATES:
        scene.tell(names.ENGINES, live if state == "live" else 0, state=state)
    scene.tell(names.PROCESSES, live if seen is None else seen, role=ENGINE_CORE)
    scene.tell(names.PROCESSES, 1, role=WORKER)


def ring(scene: Scene, lost: Told = 0, pid: str = PID) -> None:
    """A thousand events a minute, and how many were lost so far."""
    scene.tell(names.RING_PUBLISHED, lambda minute: 1000 * minute, **engine(pid))
    scene.tell(names.RING_LOST, lost, **engine(pid))
    scene.tell(names.RING_DROPPED, 0, **engine(pid))


def sent(scene: Scene, metric: Metric, failed: Told = 0) -> None:
    """A hundred a minute, and how many failed so far."""
    for outcome in OUTCOMES:
        value = {"exported": lambda minute: 100 * minute, "failed": failed}.get(outcome, 0)
        scene.tell(metric, value, outcome=outcome)


def calm(minutes: int, instance: str = INSTANCE) -> Scene:
    """An engine with the fix that does nothing of note; what happens in other scenes takes the place of parts of it."""
    scene = Scene(minutes, instance=instance)
    scene.up(1)
    verdict(scene, lambda _: Kind.STEADY)
    verdict(scene, lambda _: Kind.STEADY, of=process("18", WORKER, "Worker_TP0"))
    patch(scene, "applied")
    backlog(scene, 0)
    engines(scene, 1)
    ring(scene)
    for metric in (names.SPANS, names.METRIC_EXPORTS, names.GROWTH_EVENT_EXPORTS):
        sent(scene, metric)
    scene.tell(names.FILES_REFUSED, 0)
    scene.tell(names.ASSESSMENT_ERRORS, 0)
    return scene


def rises(minute: int, since: int, by: float) -> float:
    """What rises by so much each minute from ``since`` on."""
    return max(0, minute - since) * by


# ---- nobody must be called ----


def nothing() -> Scene:
    """A quiet afternoon."""
    return calm(240)


def warm_up() -> Scene:
    """Caches and heaps fill fast for an hour; at that pace the limit would be reached in half an hour."""
    scene = calm(240)
    verdict(
        scene,
        lambda minute: Kind.WARMING if minute < 60 else Kind.STEADY,
        slope=20 * 1024 * MIB,
        left=lambda minute: 1800 if minute < 60 else STALE if minute == 60 else MISSING,
    )
    return scene


def cache_fill() -> Scene:
    """A prefix cache fills for hours, and it fits."""
    scene = calm(360)
    verdict(scene, lambda minute: Kind.BOUNDED if minute < 300 else Kind.STEADY, slope=1024 * MIB)
    return scene


def drained_list() -> Scene:
    """A hybrid model whose engine is not patched: the list fills and is drained, in each step or rarely."""
    scene = calm(240)
    patch(scene, "off")
    backlog(scene, lambda minute: minute % 10 * 5000)
    return scene


def slow_drain() -> Scene:
    """As that, with so long a period that the list rises for twenty minutes at a time."""
    scene = drained_list()
    backlog(scene, lambda minute: minute % 20 * 5000)
    return scene


def unaffected() -> Scene:
    """A release without the leak, whose list is long now and then; a verdict would say if it leaked."""
    scene = calm(240)
    patch(scene, "not affected")
    backlog(scene, lambda minute: rises(minute, 30, 1000))
    return scene


def taken_back() -> Scene:
    """For four minutes it looks like a leak with hours left; then more is known, and the verdict is another."""
    scene = calm(240)

    def early(minute: int) -> bool:
        return 60 <= minute < 64

    verdict(
        scene,
        lambda minute: Kind.UNBOUNDED if early(minute) else Kind.BOUNDED if 64 <= minute < 120 else Kind.STEADY,
        slope=1024 * MIB,
        left=lambda minute: 7200 if early(minute) else STALE if minute == 64 else MISSING,
    )
    return scene


def left_over() -> Scene:
    """An idle engine without the fix: what has leaked lies there and does not grow."""
    scene = drained_list()
    backlog(scene, 4_000_000)
    return scene


def restart() -> Scene:
    """The engine dies at minute 60 and comes again, under another pid, after a load of twelve minutes."""
    scene = calm(240)
    patch(scene, "off")
    backlog(scene, lambda minute: minute % 10 * 100)
    for name, values in scene.series.items():
        if f'process_pid="{PID}"' in name:
            values[60:] = [STALE, *[MISSING] * (scene.minutes - 60)]
    later = Scene(scene.minutes)
    verdict(later, lambda m: None if m < 74 else Kind.WARMING if m < 90 else Kind.STEADY, of=process("99"))
    patch(later, "off", "99")
    backlog(later, lambda minute: rises(minute, 74, 100) % 1000, "99")
    scene.add(later)
    engines(scene, lambda minute: int(not 60 <= minute < 74), seen=lambda minute: int(not 60 <= minute < 62))
    return scene


def restart_under_the_same_pid() -> Scene:
    """A container whose engine always is pid 17: counters and the list begin again at 0."""
    scene = calm(240)
    patch(scene, "off")
    backlog(scene, lambda minute: 900_000 if minute < 60 else minute % 7 * 10)
    verdict(scene, lambda minute: Kind.WARMING if 60 <= minute < 80 else Kind.STEADY)
    scene.tell(names.RING_PUBLISHED, lambda minute: 1000 * (minute % 60), **engine())
    return scene


def sidecar_restart() -> Scene:
    """The sidecar is away for three minutes, and counts what it counts itself from 0."""
    scene = calm(240)
    sent(scene, names.SPANS, failed=lambda minute: 5 if minute < 60 else 0)
    scene.up(lambda minute: int(not 60 <= minute < 63))
    scene.hide(60, 63)
    return scene


def rolling_update() -> Scene:
    """The pod goes, another comes: its port answers after two minutes, its engine tells after fifteen."""
    scene = calm(240)
    scene.end(60)
    new = calm(240, "10.0.0.8:9464")
    verdict(new, lambda m: None if m < 75 else Kind.WARMING if m < 95 else Kind.STEADY, slope=8 * 1024 * MIB)
    engines(new, lambda minute: int(minute >= 75), seen=lambda minute: int(minute >= 64))
    for values in new.series.values():
        values[:61] = [MISSING] * 61
    new.up(lambda minute: MISSING if minute < 61 else int(minute >= 63))
    new.hide(61, 63)
    scene.add(new)
    return scene


def burst() -> Scene:
    """A burst overtakes the ring once, and the receiver is restarted."""
    scene = calm(240)
    ring(scene, lost=lambda minute: 500 if minute >= 60 else 0)
    sent(scene, names.SPANS, failed=lambda minute: min(rises(minute, 60, 100), 300))
    scene.tell(names.FILES_REFUSED, lambda minute: int(minute in {60, 61}))
    return scene


def compiler() -> Scene:
    """A child's maps, and malloc of an engine with another libc, cannot be read: nothing is missed."""
    scene = calm(240)
    scene.tell(names.UNREAD, 1, scope="smaps", reason="not_permitted", **process("40", "child", "cc1plus"))
    scene.tell(names.UNREAD, 1, scope="malloc", reason="not_supported", **process())
    scene.tell(names.UNREAD, 1, scope="smaps", reason="gone", **process())
    return scene


QUIET = (
    *(
        nothing,
        warm_up,
        cache_fill,
        drained_list,
        slow_drain,
        unaffected,
        taken_back,
        left_over,
        restart,
        restart_under_the_same_pid,
    ),
    *(sidecar_restart, rolling_update, burst, compiler),
)


# ---- somebody must ----

SINCE = 30
PROCESS_LABELS = {"process_pid": PID, "vllm_kvfix_process_role": ENGINE_CORE, "vllm_kvfix_process_name": "EngineCore"}
ENGINE_LABELS = {"process_pid": PID, "vllm_kvfix_engine_index": "0"}
WHO = f"EngineCore (pid {PID}) at {INSTANCE}"
VERDICT_LABEL, BOUND_LABEL = label_name(names.ATTR_VERDICT_KIND), label_name(names.ATTR_BOUND)


def _grows(kind: Kind, left: float | None, slope: float = 90 * MIB) -> Scene:
    scene = calm(SINCE + 60)
    verdict(
        scene,
        lambda minute: kind if minute >= SINCE else Kind.WARMING,
        slope=slope,
        left=None if left is None else lambda _: left,
    )
    if kind is Kind.UNBOUNDED:
        scene.tell(names.VERDICT_CULPRIT, 0.9 * slope, path=PATH, **process())
        scene.tell(names.VERDICT_CULPRIT, 0.1 * slope, path="scheduler.other", **process())
    return scene


def _unbounded(*says: str) -> Firing:
    labels = {**PROCESS_LABELS, VERDICT_LABEL: "unbounded_growth"}
    return Firing("VllmKvfixUnboundedGrowth", "warning", labels, (WHO, "by 90MiB an hour", PATH, *says))


def _short(severity: str, *says: str) -> Firing:
    labels = {**PROCESS_LABELS, BOUND_LABEL: "best"}
    return Firing("VllmKvfixTimeToLimitShort", severity, labels, (WHO, *says))


def leak() -> tuple[Scene, list[Firing]]:
    """The leak of #44175: eleven days are left."""
    return _grows(Kind.UNBOUNDED, 11 * 86400.0), [_unbounded("reached in 11d 0h 0m 0s")]


def leak_without_a_limit() -> tuple[Scene, list[Firing]]:
    """No limit is known."""
    return _grows(Kind.UNBOUNDED, None), [_unbounded()]


def leak_with_a_day_left() -> tuple[Scene, list[Firing]]:
    """It is a warning before it wakes anybody."""
    return _grows(Kind.UNBOUNDED, 20 * 3600.0), [_unbounded(), _short("warning", "in 20h 0m 0s", PATH)]


def leak_with_hours_left() -> tuple[Scene, list[Firing]]:
    """And then it does."""
    fires = [_unbounded(), _short("warning", "in 2h 0m 0s"), _short("critical", "in 2h 0m 0s", "by 90MiB an hour")]
    return _grows(Kind.UNBOUNDED, 7200.0), fires


def unexplained() -> tuple[Scene, list[Firing]]:
    """Native memory."""
    labels = {**PROCESS_LABELS, VERDICT_LABEL: "unexplained_growth"}
    says = (WHO, "by 90MiB an hour", "reached in 5d 0h 0m 0s")
    return _grows(Kind.UNEXPLAINED, 5 * 86400.0), [Firing("VllmKvfixUnexplainedGrowth", "warning", labels, says)]


def cache_too_large() -> tuple[Scene, list[Firing]]:
    """A cache has an end, which lies beyond the limit."""
    return _grows(Kind.BOUNDED, 7200.0), [_short("warning", "in 2h"), _short("critical", "in 2h")]


def allocator_keeps_too_much() -> tuple[Scene, list[Firing]]:
    """What the allocator keeps fills the limit, too."""
    return _grows(Kind.RETAINED, 10 * 3600.0), [_short("warning", "in 10h 0m 0s")]


def _unpatched(state: str) -> tuple[Scene, list[Firing]]:
    scene = calm(SINCE + 60)
    patch(scene, state)
    backlog(scene, lambda minute: 1000 + rises(minute, SINCE, 20_000))
    says = (f"pid {PID} at {INSTANCE}", "ids or more", "is not in force")
    return scene, [Firing("VllmKvfixBacklogGrowing", "warning", ENGINE_LABELS, says)]


def backlog_refused() -> tuple[Scene, list[Firing]]:
    """The plugin did not know the source."""
    return _unpatched("refused")


def backlog_off() -> tuple[Scene, list[Firing]]:
    """Somebody switched it off."""
    return _unpatched("off")


def backlog_undecided() -> tuple[Scene, list[Firing]]:
    """An engine that only the recorder was attached to."""
    return _unpatched("unknown")


def silent_engine() -> tuple[Scene, list[Firing]]:
    """One of two engines runs without the plugin."""
    scene = calm(SINCE + 60)
    engines(scene, 1, seen=lambda minute: 2 if minute >= SINCE else 1)
    return scene, [Firing("VllmKvfixEngineSilent", "warning", {}, (f"at {INSTANCE} sees engine cores", "1 of them"))]


def no_engine() -> tuple[Scene, list[Firing]]:
    """The sidecar looks into an empty folder."""
    scene = calm(SINCE + 60)
    engines(scene, lambda minute: int(minute < SINCE))
    return scene, [Firing("VllmKvfixNoEngine", "warning", {}, (f"at {INSTANCE} has followed no engine",))]


def no_sidecar() -> tuple[Scene, list[Firing]]:
    """The pod monitor was deleted, and nobody noticed."""
    scene = calm(SINCE + 60)
    scene.end(SINCE)
    return scene, [Firing("VllmKvfixNoSidecar", "warning", {"job": "", "instance": ""}, ("not one sidecar",))]


def down() -> tuple[Scene, list[Firing]]:
    """One of two sidecars crashes again and again; a target of somebody else's is down as well, which is not ours."""
    scene = calm(SINCE + 60)
    scene.up(lambda minute: int(minute < SINCE))
    scene.hide(SINCE, scene.minutes + 1)
    scene.add(calm(scene.minutes, "10.0.0.8:9464"))
    foreign = Scene(scene.minutes, job="node", instance="10.0.0.7:9100")
    foreign.up(0)
    scene.add(foreign)
    return scene, [Firing("VllmKvfixSidecarDown", "warning", {}, (f"at {INSTANCE} ({JOB})",))]


def blind() -> tuple[Scene, list[Firing]]:
    """The worker does not tell its maps, and the sidecar may not read them."""
    scene = calm(SINCE + 60)
    of = process("18", WORKER, "Worker_TP0")
    told = {"scope": "smaps", "reason": "not_permitted"}
    scene.tell(names.UNREAD, lambda minute: MISSING if minute < SINCE else 1, **told, **of)
    labels = {
        "process_pid": "18",
        "vllm_kvfix_process_role": WORKER,
        "vllm_kvfix_process_name": "Worker_TP0",
        "vllm_kvfix_scope": "smaps",
        "vllm_kvfix_unread_reason": "not_permitted",
    }
    says = (f"smaps of Worker_TP0 (pid 18) at {INSTANCE} cannot be read (not_permitted)",)
    return scene, [Firing("VllmKvfixSidecarBlind", "warning", labels, says)]


def refused() -> tuple[Scene, list[Firing]]:
    """Three rings of another user."""
    scene = calm(SINCE + 60)
    scene.tell(names.FILES_REFUSED, lambda minute: 3 if minute >= SINCE else 0)
    return scene, [Firing("VllmKvfixRingRefused", "warning", {}, (f"at {INSTANCE} does not follow some files", "(3)"))]


def lost() -> tuple[Scene, list[Firing]]:
    """One event in ten."""
    scene = calm(SINCE + 60)
    ring(scene, lost=lambda minute: rises(minute, SINCE, 100))
    return scene, [Firing("VllmKvfixEventsLost", "warning", ENGINE_LABELS, (f"pid {PID} at {INSTANCE}",))]


def _unsent(metric: Metric) -> tuple[Scene, list[Firing]]:
    scene = calm(SINCE + 60)
    sent(scene, metric, failed=lambda minute: rises(minute, SINCE, 10))
    return scene, [Firing("VllmKvfixExportFailing", "warning", {}, (f"at {INSTANCE} could not send", "%"))]


def spans_unsent() -> tuple[Scene, list[Firing]]:
    """The receiver is gone."""
    return _unsent(names.SPANS)


def metrics_unsent() -> tuple[Scene, list[Firing]]:
    """It takes no metrics."""
    return _unsent(names.METRIC_EXPORTS)


def events_unsent() -> tuple[Scene, list[Firing]]:
    """It takes no logs."""
    return _unsent(names.GROWTH_EVENT_EXPORTS)


def errors() -> tuple[Scene, list[Firing]]:
    """A fault of ours."""
    scene = calm(SINCE + 60)
    scene.tell(names.ASSESSMENT_ERRORS, lambda minute: int(minute > SINCE))
    return scene, [Firing("VllmKvfixAssessmentErrors", "warning", {}, (f"at {INSTANCE} met errors",))]


LOUD = (
    *(leak, leak_without_a_limit, leak_with_a_day_left, leak_with_hours_left, unexplained, cache_too_large),
    *(allocator_keeps_too_much, backlog_refused, backlog_off, backlog_undecided, silent_engine, no_engine),
    *(no_sidecar, down, blind, refused, lost, spans_unsent, metrics_unsent, events_unsent, errors),
)
