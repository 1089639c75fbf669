# SPDX-License-Identifier: Apache-2.0
"""The conventions as the Markdown tables of the README; ``python -m vllm_kvfix_sidecar.conventions`` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import Kind

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.conventions import Metric, Name


def _rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(names: tuple[Name, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _names(title: str, names: tuple[Name, ...]) -> str:
    return _rows((title, "type", "meaning"), [(f"`{name}`", name.type, name.description) for name in names])


def _metric_row(metric: Metric) -> tuple[str, ...]:
    total = "_total" if metric.kind is Kind.COUNTER else ""
    own = tuple(name for name in metric.attributes if name not in conventions.ENGINE_ATTRIBUTES)
    name = f"`{metric.name}`<br>`{metric.prometheus}{total}`"
    return name, metric.kind.value, f"`{metric.unit}`", _code(own), metric.description


def markdown_table() -> str:
    """The tables of the README: metrics, then what is in a span."""
    header = ("metric, and its name in Prometheus", "kind", "unit", "attributes", "meaning")
    return "\n".join(
        (
            f"Metrics of an engine have {_code(conventions.ENGINE_ATTRIBUTES)} besides.\n",
            _rows(header, [_metric_row(metric) for metric in conventions.METRICS]),
            _names(f"attribute of the span `{conventions.SPAN_NAME}`", conventions.SPAN_ATTRIBUTES),
            _names("attribute of its resource", conventions.RESOURCE_ATTRIBUTES),
            _names("event", conventions.EVENTS),
            _names("attribute of an event", conventions.EVENT_ATTRIBUTES),
            _names(f"`{conventions.LINK_KIND}` of a link", conventions.LINKS),
        )
    )
