# SPDX-License-Identifier: Apache-2.0
"""conventions: each name is there once, is well-formed, and is told in the README's tables."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import ROOT
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import Kind, Metric, Name
from vllm_kvfix_sidecar.tables import markdown_table

MODULES = sorted(set((ROOT / "sidecar" / "vllm_kvfix_sidecar").rglob("*.py")) - {Path(conventions.__file__)})
DEFINED = [value for value in vars(conventions).values() if isinstance(value, Name)]
METRICS = [value for value in vars(conventions).values() if isinstance(value, Metric)]


def test_every_metric_is_listed_once() -> None:
    """METRICS holds each metric of the module under a name, here and in Prometheus, that no other has."""
    assert tuple(METRICS) == conventions.METRICS
    for names in ([metric.name for metric in METRICS], [metric.prometheus for metric in METRICS]):
        assert max(Counter(names).values()) == 1


def test_no_two_names_mean_the_same() -> None:
    """Each attribute, event and kind of link has a name of its own, and a meaning."""
    assert max(Counter(DEFINED).values()) == 1
    assert all(name.description for name in DEFINED)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_keeps_the_rules_of_names(metric: Metric) -> None:
    """Dotted lower case under a prefix that we use, no _total, a UCUM unit, few-valued attributes, rising bounds."""
    assert re.fullmatch(r"(vllm_kvfix|process|container|hw)(\.[a-z][a-z_]*)+", metric.name)
    assert not metric.name.endswith("total")
    assert re.fullmatch(r"1|s|By|By/h|\{[a-z]+\}(\.s)?", metric.unit)
    assert conventions.ATTR_REQUEST_ID not in metric.attributes
    assert conventions.ATTR_ENGINE_REQUEST_ID not in metric.attributes
    assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert metric.description.endswith(".")


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (conventions.PROCESS_MEMORY, "process_memory_usage_bytes"),
        (conventions.VERDICT_SLOPE, "vllm_kvfix_verdict_slope_bytes_per_hour"),
        (conventions.VERDICT_EXPLAINED, "vllm_kvfix_verdict_explained_ratio"),
        (conventions.CPU_TIME, "process_cpu_time_seconds"),
        (conventions.POOL_UTILIZATION, "vllm_kvfix_kv_cache_pool_utilization_ratio"),
        (conventions.PATCH_STATE, "vllm_kvfix_patch_state"),
        (conventions.BLOCK_SECONDS, "vllm_kvfix_request_block_seconds"),
        (conventions.RESIDENCY, "vllm_kvfix_request_block_residency_seconds"),
    ],
)
def test_names_in_prometheus_are_those_of_the_specification(metric: Metric, name: str) -> None:
    """Units become words, braces are dropped, and only a gauge of unit 1 is a ratio."""
    assert metric.prometheus == name


def test_the_series_of_a_counter_are_totals() -> None:
    """In Prometheus, a counter's series are called _total, and no other metric's are."""
    for metric in METRICS:
        assert metric.series == metric.prometheus + ("_total" if metric.kind is Kind.COUNTER else "")


@pytest.mark.parametrize(
    ("engine", "caller"),
    [
        ("cmpl-7f-0-0a1b2c3d", "cmpl-7f-0"),
        ("chatcmpl-abc", "chatcmpl-abc"),
        ("my-0A1B2C3D", "my-0A1B2C3D"),
        ("a-0a1b2c3d-0a1b2c3d", "a-0a1b2c3d"),
        ("a-0a1b2c3d\n", "a-0a1b2c3d\n"),
        ("", ""),
    ],
)
def test_the_callers_id_is_the_engines_less_its_random_end(engine: str, caller: str) -> None:
    """Exactly one "-" with 8 lower-case hex digits at the very end is taken off."""
    assert conventions.caller_id(engine) == caller


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_other_module_holds_a_name(path: Path) -> None:
    """A string that is one of our names stands in conventions.py alone."""
    names = {str(name) for name in DEFINED if "." in name} | {metric.name for metric in METRICS}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in names, f"line {node.lineno}"
            assert not re.fullmatch(r"(vllm_kvfix|gen_ai)(\.\w+)+", node.value), f"line {node.lineno}: {node.value}"


def test_the_module_prints_tables_with_every_name() -> None:
    """Run as a module, it prints Markdown in which each metric and each part of a span has a row."""
    printed = subprocess.run(
        [sys.executable, "-m", "vllm_kvfix_sidecar.conventions"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed == markdown_table()
    told = re.findall(r"^\| `([^`]+)`", printed, re.MULTILINE)
    expected = [metric.name for metric in conventions.METRICS] + [*conventions.METRIC_ATTRIBUTES]
    expected += [*conventions.SPAN_ATTRIBUTES, *conventions.RESOURCE_ATTRIBUTES, *conventions.EVENTS]
    expected += [*conventions.EVENT_ATTRIBUTES, conventions.LINK_KIND, *conventions.LINKS]
    growth = [*conventions.GROWTH_ATTRIBUTES, *conventions.GROWTH_RESOURCE_ATTRIBUTES, *conventions.GROWTH_EVENTS]
    assert told == [*expected, *growth, *conventions.DEATH_ATTRIBUTES, *conventions.DEATH_EVENTS]
    for line in printed.splitlines():
        assert not line.startswith("|") or line.count("|") in {4, 6}


def test_the_attributes_of_metrics_are_those_that_metrics_have() -> None:
    """METRIC_ATTRIBUTES holds each once, and beside them only the ring's file name, which is told where it must be."""
    had = {name for metric in METRICS for name in (*metric.attributes, *metric.optional)}
    assert had | {conventions.ATTR_RING_FILE} == set(conventions.METRIC_ATTRIBUTES)
    assert len(set(conventions.METRIC_ATTRIBUTES)) == len(conventions.METRIC_ATTRIBUTES)


def test_every_name_is_in_some_list() -> None:
    """No attribute or event is defined that neither a metric, nor a span, nor a growth has."""
    used = set(conventions.METRIC_ATTRIBUTES)
    used |= {*conventions.SPAN_ATTRIBUTES, *conventions.RESOURCE_ATTRIBUTES, *conventions.EVENTS, *conventions.LINKS}
    used |= {*conventions.EVENT_ATTRIBUTES, conventions.LINK_KIND}
    used |= {*conventions.GROWTH_ATTRIBUTES, *conventions.GROWTH_RESOURCE_ATTRIBUTES, *conventions.GROWTH_EVENTS}
    used |= {*conventions.DEATH_ATTRIBUTES, *conventions.DEATH_EVENTS}
    assert set(DEFINED) == used
