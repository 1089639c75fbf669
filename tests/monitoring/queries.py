# SPDX-License-Identifier: Apache-2.0
"""Takes queries apart: which series they select, by which labels, and which variables of a page they have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import promql_parser

from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import Kind, label_name
from vllm_kvfix_sidecar.monitoring.promql import BUCKET_BOUND, INSTANCE, JOB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Prometheus's own: whether a target answers.
UP = "up"
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
# A window that a Prometheus of a minute has seen, which scrapes each second.
RATE_INTERVAL = "20s"


@dataclass(frozen=True)
class Selector:
    """One selector in a query; ``text`` is the selector alone, without its range."""

    name: str
    labels: frozenset[str]
    text: str


def filled(expression: str, variables: Mapping[str, str]) -> str:
    """A query as Grafana sends it; a variable that is missing in ``variables`` is a KeyError."""
    return VARIABLE.sub(lambda found: variables[found[1]], expression)


def selectors(expression: str) -> Iterator[Selector]:
    """Each selector of a query without variables."""
    yield from _selectors(promql_parser.parse(expression))


def _selectors(node: Any) -> Iterator[Selector]:
    if isinstance(node, promql_parser.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql_parser.VectorSelector):
        matchers = [matcher for matcher in node.matchers.matchers if matcher.name != "__name__"]
        text = ", ".join(f"{matcher.name}{_sign(matcher)}{_quoted(matcher.value)}" for matcher in matchers)
        yield Selector(str(node.name), frozenset(matcher.name for matcher in matchers), f"{node.name}{{{text}}}")
        return
    for name in ("lhs", "rhs", "expr", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from _selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from _selectors(child)


def _sign(matcher: promql_parser.Matcher) -> str:
    signs = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
    return signs[str(matcher.op).rpartition(".")[2]]


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _known() -> dict[str, frozenset[str]]:
    """The labels that each series may have, by its name."""
    known = {UP: frozenset({JOB, INSTANCE})}
    for metric in conventions.METRICS:
        labels = {label_name(name) for name in (*metric.attributes, *metric.optional, conventions.ATTR_RING_FILE)}
        labels |= {JOB, INSTANCE}
        if metric.kind is Kind.HISTOGRAM:
            known[f"{metric.series}_bucket"] = frozenset(labels | {BUCKET_BOUND})
        else:
            known[metric.series] = frozenset(labels)
    return known


KNOWN = _known()
LABELS = frozenset().union(*KNOWN.values())
