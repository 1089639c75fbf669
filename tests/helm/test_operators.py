# SPDX-License-Identifier: Apache-2.0
"""PodMonitor, PrometheusRule, Issuer and Certificate are what the operators take."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from tests.helm.operators import wrong
from tests.helm.test_chart import ALL, CASES, FOREIGN
from tests.helm.tools import one, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "--set=sidecar.tokenSecret=token"  # noqa: S105  # the name of a Secret


def foreign(*options: str) -> Iterator[dict[str, Any]]:
    """The objects of operators that the chart makes with these options."""
    return (found for found in rendered(*options) if found["kind"] in FOREIGN)


def test_they_are_taken(tmp_path: Path) -> None:
    """Each kind, with every switch that changes it: nothing is wrong, and no field is unknown."""
    found = [*foreign(*CASES["webhook, all"]), *foreign(*ALL, TOKEN)]
    assert {made["kind"] for made in found} == FOREIGN
    assert wrong(found, tmp_path) == []


def _unknown(spec: dict[str, Any]) -> None:
    spec["podMetricsEndpoints"][0]["prot"] = spec["podMetricsEndpoints"][0].pop("port")


def _pattern(spec: dict[str, Any]) -> None:
    spec["podMetricsEndpoints"][0]["interval"] = "often"


def _missing(spec: dict[str, Any]) -> None:
    del spec["selector"]


def test_a_wrong_field_is_refused(tmp_path: Path) -> None:
    """An unknown, a malformed and a missing one, by name: so what is taken has been looked at."""
    monitors = [copy.deepcopy(one(rendered(*ALL), "PodMonitor")) for _ in range(3)]
    for monitor, broken in zip(monitors, (_unknown, _pattern, _missing), strict=True):
        broken(monitor["spec"])
    told = "\n".join(wrong(monitors, tmp_path))
    for named in ('"prot"', "interval must match", "must have required property selector"):
        assert named in told
