# SPDX-License-Identifier: Apache-2.0
"""alerts: each fires on what it is for, is silent on what only looks like it, and says what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import promql_parser
import pytest
import yaml

from tests.monitoring import scenes
from tests.monitoring.promtool import check_rules, fired
from tests.monitoring.queries import KNOWN, LABELS, selectors
from tests.support import ROOT
from vllm_kvfix_sidecar.monitoring import alerts
from vllm_kvfix_sidecar.monitoring.alerts import ALERTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.monitoring.scenes import Firing, Scene
    from vllm_kvfix_sidecar.monitoring.alerts import Alert

RUNBOOKS = ROOT / "docs" / "runbooks"
NAMES = sorted({alert.name for alert in ALERTS})
MINUTES = {"m": 1, "h": 60}


def told(alert: Alert) -> str:
    """An alert's name and severity, for the ids of tests."""
    return f"{alert.name}-{alert.severity}"


def lasts(alert: Alert) -> int:
    """Minutes that its condition must hold."""
    return int(alert.lasts[:-1]) * MINUTES[alert.lasts[-1]]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The file of rules."""
    path = tmp_path / "rules.yaml"
    path.write_text(alerts.as_yaml())
    return path


class TestWords:
    """What an alert says, whatever happens."""

    def test_the_file_says_what_the_rules_say(self) -> None:
        """The file for people, read as YAML, is the object that a PrometheusRule has as its spec."""
        assert yaml.safe_load(alerts.as_yaml()) == alerts.rules()

    def test_no_two_have_the_same_name_and_severity(self) -> None:
        """They could not be told apart."""
        assert len({told(alert) for alert in ALERTS}) == len(ALERTS)

    @pytest.mark.parametrize("alert", ALERTS, ids=told)
    def test_each_says_how_grave_what_and_what_to_do(self, alert: Alert) -> None:
        """Severity, summary, description and runbook are there, and the page exists and names the alert."""
        assert alert.severity in {"critical", "warning"}
        assert re.fullmatch(r"\d+[mh]", alert.lasts)
        assert alert.reason
        assert 0 < len(alert.summary) < 100
        assert alert.description.endswith((".", "{{ end }}"))
        assert alert.name in (RUNBOOKS / f"{alert.runbook}.md").read_text()
        rule = alert.rule()
        assert rule["labels"] == {"severity": alert.severity}
        assert rule["annotations"] == {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{alerts.RUNBOOKS}{alert.runbook}.md",
        }

    def test_the_table_of_the_documentation_is_that_of_the_alerts(self) -> None:
        """docs/monitoring.md lists each alert, its severity and how long it waits."""
        text = (ROOT / "docs" / "monitoring.md").read_text()
        assert text.partition("<!-- alerts -->\n")[2].partition("<!-- /alerts -->")[0] == alerts.as_table()

    def test_no_runbook_is_without_an_alert(self) -> None:
        """A page that no alert leads to is found by nobody."""
        assert {path.stem for path in RUNBOOKS.glob("*.md")} == {alert.runbook for alert in ALERTS}

    @pytest.mark.parametrize("alert", ALERTS, ids=told)
    def test_each_name_in_it_is_one_of_the_conventions(self, alert: Alert) -> None:
        """Its expression has a type, and selects and groups by what the sidecar tells."""
        assert promql_parser.parse(alert.expression) is not None
        found = list(selectors(alert.expression))
        assert found
        for selector in found:
            assert selector.labels <= KNOWN[selector.name], selector
        grouped = re.findall(r"(?:by|without|on|ignoring) \(([a-z_, ]+)\)", alert.expression)
        assert {name for group in grouped for name in group.split(", ")} <= LABELS

    @pytest.mark.parametrize("alert", ALERTS, ids=told)
    def test_each_name_in_its_words_is_one_of_the_conventions(self, alert: Alert) -> None:
        """So are the labels that it prints, and the series that it asks for beside."""
        words = alert.summary + alert.description
        assert set(re.findall(r"[$.]labels\.(\w+)", words, re.IGNORECASE)) <= LABELS
        for asked in re.findall(r"`topk\(1, (.*?)\)`", words):
            for selector in selectors(asked.replace("%q", '"x"')):
                assert selector.labels <= KNOWN[selector.name], selector


@pytest.mark.e2e
class TestPromtool:
    """What Prometheus's own tool makes of them."""

    def test_the_rules_are_in_order(self, rules: Path) -> None:
        """Promtool, with all its lints, finds as many rules as there are, and no fault."""
        assert f"{len(ALERTS)} rules found" in check_rules(rules)

    @pytest.mark.parametrize("scene", scenes.QUIET, ids=lambda scene: scene.__name__)
    def test_nobody_is_called(self, rules: Path, tmp_path: Path, scene: Callable[[], Scene]) -> None:
        """In none of its minutes does any alert fire."""
        made = scene()
        assert fired(rules, made, range(0, made.minutes + 1, 2), NAMES, tmp_path) == []

    @pytest.mark.parametrize("scene", scenes.LOUD, ids=lambda scene: scene.__name__)
    def test_somebody_is_called(
        self, rules: Path, tmp_path: Path, scene: Callable[[], tuple[Scene, list[Firing]]]
    ) -> None:
        """Just the alerts that are for it fire, with the labels of what it befell, in words that say it."""
        made, expected = scene()
        found = fired(rules, made, [made.minutes], NAMES, tmp_path)
        target = {"job": scenes.JOB, "instance": scenes.INSTANCE}
        wanted = [
            {"alertname": one.name, "severity": one.severity}
            | {label: text for label, text in (target | dict(one.labels)).items() if text}
            for one in expected
        ]
        assert sorted(sorted(one.labels.items()) for one in found) == sorted(
            sorted(labels.items()) for labels in wanted
        )
        for one in expected:
            (said,) = (
                each.annotations["description"]
                for each in found
                if (each.labels["alertname"], each.labels["severity"]) == (one.name, one.severity)
            )
            assert all(words in said for words in one.says), said
            assert "<" not in said, "a template that failed"
            assert "{{" not in said

    @pytest.mark.parametrize("scene", scenes.LOUD, ids=lambda scene: scene.__name__)
    def test_it_is_not_called_too_soon(
        self, rules: Path, tmp_path: Path, scene: Callable[[], tuple[Scene, list[Firing]]]
    ) -> None:
        """Until the condition has held for as long as the rule says, no alert fires."""
        made, expected = scene()
        soonest = min(lasts(alert) for alert in ALERTS if alert.name in {one.name for one in expected})
        before = range(scenes.SINCE - 1, scenes.SINCE + soonest)
        assert fired(rules, made, before, NAMES, tmp_path) == []

    def test_each_alert_fires_in_some_scene(self) -> None:
        """There is none of which nobody knows whether it can fire."""
        proven = {(one.name, one.severity) for scene in scenes.LOUD for one in scene()[1]}
        assert proven == {(alert.name, alert.severity) for alert in ALERTS}
