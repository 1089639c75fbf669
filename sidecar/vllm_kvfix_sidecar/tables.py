# SPDX-License-Identifier: Apache-2.0
"""The conventions as the Markdown tables of the README; ``python -m vllm_kvfix_sidecar.conventions`` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import conventions

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
    name = f"`{metric.name}`<br>`{metric.series}`"
    return name, metric.kind.value, f"`{metric.unit}`", _attributes(metric), metric.description


def _usual() -> dict[str, tuple[Name, ...]]:
    """What many metrics have, and the words that stand for it in the table."""
    return {"an engine's": conventions.ENGINE_ATTRIBUTES, "a process's": conventions.PROCESS_ATTRIBUTES}


def _attributes(metric: Metric) -> str:
    usual = _usual()
    of = next((words for words, names in usual.items() if metric.attributes[: len(names)] == names), "")
    own = metric.attributes[len(usual.get(of, ())) :]
    optional = tuple(f"{_code((name,))} (if known)" for name in metric.optional)
    return ", ".join(part for part in (of, _code(own), *optional) if part)


def markdown_table() -> str:
    """The tables of the README: metrics, then what is in a span."""
    header = ("metric, and its name in Prometheus", "kind", "unit", "attributes", "meaning")
    return "\n".join(
        (
            "; ".join(f"{words}: {_code(names)}" for words, names in _usual().items()) + ".\n",
            _rows(header, [_metric_row(metric) for metric in conventions.METRICS]),
            _names("attribute of a metric", conventions.METRIC_ATTRIBUTES),
            _names(f"attribute of the span `{conventions.SPAN_NAME}`", conventions.SPAN_ATTRIBUTES),
            _names("attribute of its resource", conventions.RESOURCE_ATTRIBUTES),
            _names("event", conventions.EVENTS),
            _names("attribute of an event", conventions.EVENT_ATTRIBUTES),
            _names(f"`{conventions.LINK_KIND}` of a link", conventions.LINKS),
            _names(
                f"attribute of the span `{conventions.GROWTH_SPAN_NAME}` and of its events",
                conventions.GROWTH_ATTRIBUTES,
            ),
            _names("attribute of their resource", conventions.GROWTH_RESOURCE_ATTRIBUTES),
            _names("event, as a log record and in the span", conventions.GROWTH_EVENTS),
            _names(
                f"attribute of the span `{conventions.DEATH_SPAN_NAME}` and of its event, beside those of a growth",
                conventions.DEATH_ATTRIBUTES,
            ),
            _names("event, in the span", conventions.DEATH_EVENTS),
        )
    )
