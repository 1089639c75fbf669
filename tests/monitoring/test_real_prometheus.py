# SPDX-License-Identifier: Apache-2.0
"""Every query of the pages and every alert, asked of a real Prometheus that scrapes a real sidecar."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest

from tests.monitoring.deployment import deployment
from tests.monitoring.queries import RATE_INTERVAL, UP, filled, selectors
from tests.monitoring.test_alerts import told
from tests.monitoring.test_dashboards import ANY_VALUE, CHOSEN, DRAWN
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import Kind
from vllm_kvfix_sidecar.monitoring.alerts import ALERTS
from vllm_kvfix_sidecar.monitoring.promql import label

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.monitoring.deployment import Deployment
    from tests.sidecar_e2e.prometheus import Exemplar, Prometheus, Sample
    from vllm_kvfix_sidecar.monitoring.alerts import Alert

pytestmark = pytest.mark.e2e

SHOWN = {**ANY_VALUE, "__rate_interval": RATE_INTERVAL}
HISTOGRAMS = [metric for metric in conventions.METRICS if metric.kind is Kind.HISTOGRAM]
# What befalls the deployment while it runs; what befalls it when parts of it end; and what only promtool can show here:
# a limit that is hours away would take the memory of a machine, hours of growth hours, and a fault of ours a fault.
LIVING = {
    *("VllmKvfixUnboundedGrowth-warning", "VllmKvfixTimeToLimitShort-warning", "VllmKvfixBacklogGrowing-warning"),
    *("VllmKvfixEngineSilent-warning", "VllmKvfixSidecarBlind-warning", "VllmKvfixRingRefused-warning"),
    *("VllmKvfixEventsLost-warning", "VllmKvfixExportFailing-warning"),
}
ENDING = {"VllmKvfixNoEngine-warning", "VllmKvfixSidecarDown-warning", "VllmKvfixNoSidecar-warning"}
NOT_HERE = {
    *("VllmKvfixTimeToLimitShort-critical", "VllmKvfixUnexplainedGrowth-warning", "VllmKvfixAssessmentErrors-warning"),
}
BY_NAME = {told(alert): alert for alert in ALERTS}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment that has everything."""
    with deployment(tmp_path_factory.mktemp("deployment")) as found:
        yield found


def answer(prometheus: Prometheus, query: str) -> list[Sample]:
    """What a query finds, as soon as it finds any number; one that was not scraped for a moment comes again."""
    found: list[Sample] = []

    def has_numbers() -> bool:
        found[:] = [sample for sample in prometheus.query(query) if not math.isnan(sample.value)]
        return bool(found)

    wait_until(has_numbers, WAIT_S, f"a result of {query}")
    return found


def hurried(alert: Alert) -> str:
    """Its expression with windows that a deployment of seconds fills: a minute becomes a second."""
    return re.sub(r"(\[|offset )(\d+)m", r"\g<1>\g<2>s", alert.expression)


def test_each_alert_is_tried_somewhere() -> None:
    """Here, at the end of a deployment, or with promtool alone."""
    assert BY_NAME.keys() == LIVING | ENDING | NOT_HERE
    assert len(LIVING) + len(ENDING) + len(NOT_HERE) == len(BY_NAME)


@pytest.mark.parametrize("query", DRAWN)
def test_a_panel_shows_something(running: Deployment, query: str) -> None:
    """Its query, as Grafana sends it, finds numbers where there is what it shows."""
    assert answer(running.prometheus, filled(query, SHOWN))


@pytest.mark.parametrize("selector", CHOSEN)
def test_a_variable_has_choices(running: Deployment, selector: str) -> None:
    """There are series to take its values from."""
    assert answer(running.prometheus, filled(selector, SHOWN))


@pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda metric: metric.name)
def test_a_histogram_has_exemplars(running: Deployment, metric: conventions.Metric) -> None:
    """Prometheus stores traces' ids with its buckets, which the dots on a panel are made of."""
    found: list[Exemplar] = []

    def has_any() -> bool:
        found[:] = running.prometheus.exemplars(f"{metric.series}_bucket")
        return bool(found)

    wait_until(has_any, WAIT_S, f"exemplars of {metric.name}")
    assert all(re.fullmatch(r"[0-9a-f]{32}", one.labels["trace_id"]) for one in found)


@pytest.mark.parametrize("alert", ALERTS, ids=told)
def test_an_alert_asks_for_what_is_told(running: Deployment, alert: Alert) -> None:
    """Each selector in its expression and its words, values of labels included, finds series; else it never fires.

    A verdict has a series for each kind, whichever it is.
    """
    asked = [text.replace("=%q", '=~".+"') for text in re.findall(r"`topk\(1, (.*?)\)`", alert.description)]
    for text in (alert.expression, *asked):
        for selector in selectors(text):
            assert answer(running.prometheus, selector.text), selector


@pytest.mark.parametrize("name", sorted(LIVING))
def test_an_alert_fires(running: Deployment, name: str) -> None:
    """Its expression holds for what befalls this deployment."""
    assert answer(running.prometheus, hurried(BY_NAME[name]))


def test_the_leak_is_found_in_the_process_that_has_it(running: Deployment) -> None:
    """The alert has the leaking engine's pid; the engine with the fix, under load, has none."""
    found = answer(running.prometheus, hurried(BY_NAME["VllmKvfixUnboundedGrowth-warning"]))
    leaking = str(running.engines[0].pid)
    assert leaking in {sample.labels[label(conventions.ATTR_PID)] for sample in found}
    backlogs = answer(running.prometheus, hurried(BY_NAME["VllmKvfixBacklogGrowing-warning"]))
    assert {sample.labels[label(conventions.ATTR_PID)] for sample in backlogs} == {leaking}


def test_an_end_is_noticed(tmp_path: Path) -> None:
    """Engines end: no engine is left to follow; then the sidecar ends: it is down, and no other is there."""
    with deployment(tmp_path) as found:
        answer(found.prometheus, f"{UP} == 1")
        answer(found.prometheus, f"{conventions.ENGINES.series} > 0")
        assert found.prometheus.query(BY_NAME["VllmKvfixNoEngine-warning"].expression) == []
        assert found.prometheus.query(BY_NAME["VllmKvfixSidecarDown-warning"].expression) == []
        found.end_engines()
        answer(found.prometheus, BY_NAME["VllmKvfixNoEngine-warning"].expression)
        found.sidecar.kill()
        answer(found.prometheus, BY_NAME["VllmKvfixSidecarDown-warning"].expression)
        answer(found.prometheus, BY_NAME["VllmKvfixNoSidecar-warning"].expression)
