# SPDX-License-Identifier: Apache-2.0
"""The alerts: who must be woken, by what, and where it says what to do.

They ask the sidecar's verdicts, which have told a leak from a warm-up already, rather than judge memory anew.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvfix.ring.layout import API_SERVER, ENGINE_CORE, WORKER
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar.engines import LIVE, UNKNOWN
from vllm_kvfix_sidecar.monitoring.promql import INSTANCE, JOB, among, equals, label, labels, select, word
from vllm_kvfix_sidecar.verdict import Kind

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.conventions import Metric, Name

RUNBOOKS = "https://github.com/vllm-kvfix/vllm-kvfix/blob/main/docs/runbooks/"
GROUP = "vllm-kvfix"
CRITICAL, WARNING = "critical", "warning"
DAY_S, CRITICAL_S = 24 * 3600, 4 * 3600
# Of what is sent or written, so much may be lost before it is worth a person.
LOSS = 0.01
# Shorter than their alerts wait, or what happened once would be in sight for as long as they do.
RECENT = "5m"

_WIDTH = 116


@dataclass(frozen=True)
class Alert:
    """One alert. ``lasts``: how long the condition must hold, and ``reason``: why so long. ``runbook``: a page's name.

    ``summary`` and ``description`` are templates of Prometheus.
    """

    name: str
    expression: str
    lasts: str
    reason: str
    severity: str
    summary: str
    description: str
    runbook: str

    @property
    def summary_in_words(self) -> str:
        """The summary, of any process."""
        return self.summary.replace(_of(names.ATTR_PROCESS_NAME), "a process")

    @property
    def runbook_url(self) -> str:
        """Where it says what to do."""
        return f"{RUNBOOKS}{self.runbook}.md"

    def rule(self) -> dict[str, Any]:
        """As Prometheus, and a PrometheusRule, have it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": self.runbook_url,
            },
        }


def _of(name: Name) -> str:
    """The value of a label, in a template."""
    return f"{{{{ $labels.{label(name)} }}}}"


_PROCESS = f"{_of(names.ATTR_PROCESS_NAME)} (pid {_of(names.ATTR_PID)}) at {{{{ $labels.{INSTANCE} }}}}"
_SIDECAR = f"The sidecar at {{{{ $labels.{INSTANCE} }}}}"


def _asked(metric: Metric, text: str, *more: str) -> str:
    """A text with another metric of the same process in it, as a template; nothing where there is none."""
    same = (JOB, INSTANCE, label(names.ATTR_PID))
    matchers = ",".join((*(f"{name}=%q" for name in same), *more))
    values = " ".join(f"$labels.{name}" for name in same)
    return f"{{{{ range printf `topk(1, {metric.series}{{{matchers}}})` {values} | query }}}}{text}{{{{ end }}}}"


_GROWS = _asked(names.VERDICT_SLOPE, " by {{ . | value | humanize1024 }}B an hour", equals(names.ATTR_BOUND, "best"))
_OWNER = _asked(
    names.VERDICT_CULPRIT,
    f" Most of it is {{{{ .Labels.{label(names.ATTR_CONTAINER_PATH)} }}}}.",
)
_ENDS = _asked(
    names.VERDICT_TIME_TO_LIMIT,
    " The limit is reached in {{ . | value | humanizeDuration }}.",
    equals(names.ATTR_BOUND, "best"),
)


def _is(kind: Kind) -> str:
    return f"{select(names.VERDICT, equals(names.ATTR_VERDICT_KIND, word(kind.value)))} == 1"


def _limit_within(seconds: int) -> str:
    """A warm-up is fast while it lasts; what it would reach at that pace says nothing."""
    left = select(names.VERDICT_TIME_TO_LIMIT, equals(names.ATTR_BOUND, "best"))
    return (
        f"{left} < {seconds}\n"
        f"unless ignoring ({labels(names.ATTR_BOUND, names.ATTR_VERDICT_KIND)})\n"
        f"{_is(Kind.WARMING)}"
    )


def _backlog_grows() -> str:
    """Its least of now is above its most of before: a list that is drained falls again, however fast it fills."""
    now = f"min_over_time({select(names.BACKLOG, window='10m')})"
    before = f"max_over_time({select(names.BACKLOG, window='10m')} offset 20m)"
    return (
        f"sum without ({label(names.ATTR_GROUP)}) (\n  {now}\n  - {before} > 0\n)\n"
        f"and ignoring ({label(names.ATTR_STATE)})\n"
        f"{select(names.PATCH_STATE, among(names.ATTR_STATE, 'refused', 'off', 'unknown'))} == 1"
    )


def _engines() -> str:
    alive = select(names.ENGINES, among(names.ATTR_STATE, LIVE, UNKNOWN))
    return f"sum without ({label(names.ATTR_STATE)}) ({alive})"


def _unlike() -> str:
    seen = select(names.PROCESSES, equals(names.ATTR_ROLE, ENGINE_CORE))
    return f"sum without ({label(names.ATTR_ROLE)}) ({seen})\n- {_engines()} > 0"


def _down() -> str:
    """Only what was ours is asked for, whatever its job is called."""
    return f"up == 0\nand on ({JOB}, {INSTANCE})\nlast_over_time({select(names.ENGINES, window='6h')})"


def _unreadable() -> str:
    """Of vLLM's own processes: a compiler's smaps is no loss; a libc without mallinfo2 has nothing to tell."""
    roles = among(names.ATTR_ROLE, ENGINE_CORE, WORKER, API_SERVER)
    scopes = among(names.ATTR_SCOPE_READ, "status", "smaps", "cgroup")
    reasons = among(names.ATTR_UNREAD_REASON, "not_permitted", "other_namespace", "malformed", "other")
    return f"{select(names.UNREAD, roles, scopes, reasons)} == 1"


def _lost() -> str:
    lost, dropped, published = (
        f"increase({select(metric, window=RECENT)})"
        for metric in (names.RING_LOST, names.RING_DROPPED, names.RING_PUBLISHED)
    )
    return f"{lost}\n+ {dropped}\n> {LOSS} * {published}"


def _not_sent() -> str:
    def share(metric: Metric) -> str:
        bad = select(metric, among(names.ATTR_OUTCOME, "failed", "dropped"), window=RECENT)
        every = select(metric, among(names.ATTR_OUTCOME, "exported", "failed", "dropped"), window=RECENT)
        without = f"sum without ({label(names.ATTR_OUTCOME)})"
        return f"{without} (increase({bad}))\n  / {without} (increase({every})) > {LOSS}"

    return "\nor ".join(share(metric) for metric in (names.SPANS, names.METRIC_EXPORTS, names.GROWTH_EVENT_EXPORTS))


ALERTS = (
    Alert(
        name="VllmKvfixUnboundedGrowth",
        expression=_is(Kind.UNBOUNDED),
        lasts="5m",
        reason="the verdict waits by itself until it is sure; this rides out one that is taken back",
        severity=WARNING,
        summary=f"{_of(names.ATTR_PROCESS_NAME)} leaks host memory",
        description=f"{_PROCESS} grows{_GROWS}, and nothing bounds it.{_OWNER}{_ENDS}",
        runbook="unbounded-growth",
    ),
    Alert(
        name="VllmKvfixUnexplainedGrowth",
        expression=_is(Kind.UNEXPLAINED),
        lasts="15m",
        reason="it took the verdict hours; a quarter of one more costs nothing and spares a flapping alert",
        severity=WARNING,
        summary=f"{_of(names.ATTR_PROCESS_NAME)} grows and nothing that was counted is the cause",
        description=f"{_PROCESS} has grown{_GROWS} for hours, and no container that was counted owns it.{_ENDS}",
        runbook="unexplained-growth",
    ),
    Alert(
        name="VllmKvfixTimeToLimitShort",
        expression=_limit_within(DAY_S),
        lasts="15m",
        reason="a day is left, and a burst of load that looks like one must not wake anybody",
        severity=WARNING,
        summary=f"{_of(names.ATTR_PROCESS_NAME)} reaches its memory limit within a day",
        description=f"{_PROCESS} reaches the limit of its memory in {{{{ $value | humanizeDuration }}}} if it goes on "
        f"growing{_GROWS}.{_OWNER} Beyond the limit the kernel kills it.",
        runbook="time-to-limit-short",
    ),
    Alert(
        name="VllmKvfixTimeToLimitShort",
        expression=_limit_within(CRITICAL_S),
        lasts="5m",
        reason="hours are left: enough to drain and restart by plan, too few to wait for the morning",
        severity=CRITICAL,
        summary=f"{_of(names.ATTR_PROCESS_NAME)} reaches its memory limit within hours",
        description=f"{_PROCESS} reaches the limit of its memory in {{{{ $value | humanizeDuration }}}} if it goes on "
        f"growing{_GROWS}.{_OWNER} Beyond the limit the kernel kills it.",
        runbook="time-to-limit-short",
    ),
    Alert(
        name="VllmKvfixBacklogGrowing",
        expression=_backlog_grows(),
        lasts="5m",
        reason="the expression looks back half an hour already",
        severity=WARNING,
        summary="an engine without the fix leaks block ids",
        description=f"new_block_ids of the engine with pid {_of(names.ATTR_PID)} at {{{{ $labels.{INSTANCE} }}}} grew "
        "by {{ $value | humanize }} ids or more in half an hour and was not emptied in between: the leak of vLLM "
        "0.17.1 to 0.25.1, and the fix is not in force.",
        runbook="backlog-growing",
    ),
    Alert(
        name="VllmKvfixEngineSilent",
        expression=_unlike(),
        lasts="30m",
        reason="an engine core opens its ring when its model is loaded, which may take that long",
        severity=WARNING,
        summary="an engine core does not tell of itself",
        description=f"{_SIDECAR} sees engine cores in the process table that do not tell of themselves by a ring, "
        "{{ $value }} of them: the plugin is not loaded there, or the ring lies elsewhere. They are neither fixed, for "
        "all we know, nor watched.",
        runbook="expected-but-absent",
    ),
    Alert(
        name="VllmKvfixNoEngine",
        expression=f"{_engines()} == 0",
        lasts="30m",
        reason="as long as a model may take to load, or a rolling update to come to this node",
        severity=WARNING,
        summary="a sidecar has no engine to follow",
        description=f"{_SIDECAR} has followed no engine for half an hour: vLLM does not run there, does not load the "
        "plugin, or writes its rings to another folder.",
        runbook="expected-but-absent",
    ),
    Alert(
        name="VllmKvfixNoSidecar",
        expression=f"absent({select(names.ENGINES)})",
        lasts="30m",
        reason="as VllmKvfixNoEngine",
        severity=WARNING,
        summary="no sidecar is scraped at all",
        description="These rules are loaded, but not one sidecar tells anything: it is not deployed, or no scrape "
        "configuration (PodMonitor, ServiceMonitor) selects it.",
        runbook="expected-but-absent",
    ),
    Alert(
        name="VllmKvfixSidecarDown",
        expression=_down(),
        lasts="10m",
        reason="a restart takes seconds, a new image some minutes; the engine does not need it",
        severity=WARNING,
        summary="a sidecar cannot be scraped",
        description=f"{_SIDECAR} ({{{{ $labels.{JOB} }}}}) answered within the last six hours and does not now. vLLM "
        "is not affected, and the fix holds; nobody watches its memory.",
        runbook="sidecar-blind",
    ),
    Alert(
        name="VllmKvfixSidecarBlind",
        expression=_unreadable(),
        lasts="15m",
        reason="a scope that a process tells of itself stands for five minutes when it is not told anew",
        severity=WARNING,
        summary="memory of a process cannot be read",
        description=f"{_of(names.ATTR_SCOPE_READ)} of {_PROCESS} cannot be read "
        f"({_of(names.ATTR_UNREAD_REASON)}), and the process does not tell it. A growth may go unseen or unexplained.",
        runbook="sidecar-blind",
    ),
    Alert(
        name="VllmKvfixRingRefused",
        expression=f"{select(names.FILES_REFUSED)} > 0",
        lasts="30m",
        reason="a ring that is being made is refused for a moment",
        severity=WARNING,
        summary="ring files are not followed",
        description=f"{_SIDECAR} does not follow some files in its ring folders ({{{{ $value }}}}): another user's, of "
        "another version, or damaged. If one of them is a live engine's, nobody watches that.",
        runbook="sidecar-blind",
    ),
    Alert(
        name="VllmKvfixEventsLost",
        expression=_lost(),
        lasts="15m",
        reason="a burst that overtakes the ring costs some spans and no total; only one that lasts does",
        severity=WARNING,
        summary="events are lost between an engine and its sidecar",
        description=f"{{{{ $value | humanize }}}} events of the engine with pid {_of(names.ATTR_PID)} at "
        f"{{{{ $labels.{INSTANCE} }}}} were lost in five minutes, more than one in a hundred. Totals are right all the "
        "same; spans and histograms lack requests.",
        runbook="sidecar-blind",
    ),
    Alert(
        name="VllmKvfixExportFailing",
        expression=_not_sent(),
        lasts="15m",
        reason="exporters try again by themselves; a receiver's restart takes minutes",
        severity=WARNING,
        summary="a sidecar cannot send what it has",
        description=f"{_SIDECAR} could not send {{{{ $value | humanizePercentage }}}} of its spans, metrics or events "
        "in five minutes.",
        runbook="sidecar-blind",
    ),
    Alert(
        name="VllmKvfixAssessmentErrors",
        expression=f"increase({select(names.ASSESSMENT_ERRORS, window='1h')}) > 0",
        lasts="5m",
        reason="one is enough, since it is a fault of ours; the window keeps it in sight",
        severity=WARNING,
        summary="the sidecar has made errors in watching memory",
        description=f"{_SIDECAR} met errors of its own in the last hour ({{{{ $value | humanize }}}}); verdicts may be "
        "missing. Its log has the first of each kind.",
        runbook="sidecar-blind",
    ),
)


def rules() -> dict[str, Any]:
    """What a file of rules holds, and the ``spec`` of a PrometheusRule alike."""
    return {"groups": [{"name": GROUP, "rules": [alert.rule() for alert in ALERTS]}]}


def as_table() -> str:
    """The table of docs/monitoring.md."""
    head = "| alert | severity | for | because |\n|---|---|---|---|\n"
    return head + "".join(
        f"| [`{alert.name}`](runbooks/{alert.runbook}.md): {alert.summary_in_words} | {alert.severity} | {alert.lasts} "
        f"| {alert.reason} |\n"
        for alert in ALERTS
    )


def as_yaml() -> str:
    """The same as a file for people: expressions on several lines, and why each waits as long as it does."""
    head = "# Made by `python -m vllm_kvfix_sidecar.monitoring`; change that, not this.\n"
    return head + f"groups:\n  - name: {GROUP}\n    rules:\n" + "\n".join(_as_yaml(alert) for alert in ALERTS)


def _as_yaml(alert: Alert) -> str:
    rule = alert.rule()
    labels_said = "".join(f"          {name}: {text}\n" for name, text in rule["labels"].items())
    said = "".join(f"          {name}: {_quoted(text)}\n" for name, text in rule["annotations"].items())
    return (
        f"      - alert: {alert.name}\n"
        f"        expr: |-\n{textwrap.indent(alert.expression, ' ' * 10)}\n"
        f"{textwrap.indent(textwrap.fill(alert.reason, _WIDTH - 10), ' ' * 8 + '# ')}\n"
        f"        for: {alert.lasts}\n"
        f"        labels:\n{labels_said}"
        f"        annotations:\n{said}"
    )


def _quoted(text: str) -> str:
    doubled = text.replace("'", "''")
    return f"'{doubled}'"
