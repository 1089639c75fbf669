# SPDX-License-Identifier: Apache-2.0
"""Builds a page of Grafana's: panels that place themselves, variables, links; knows none of our metrics.

The schema is Grafana 10.4's, which later releases read and migrate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEMA_VERSION = 39
COLUMNS = 24
METRICS_VARIABLE, TRACES_VARIABLE = "datasource", "traces"
PROMETHEUS, TEMPO = "prometheus", "tempo"
RATE = "$__rate_interval"
TAG = "vllm-kvfix"

Json: TypeAlias = "dict[str, Any]"


def source(kind: str = PROMETHEUS) -> Json:
    """The data source that the page's variable names."""
    variable = METRICS_VARIABLE if kind == PROMETHEUS else TRACES_VARIABLE
    return {"type": kind, "uid": f"${{{variable}}}"}


@dataclass(frozen=True)
class Query:
    """A query of Prometheus. ``legend``: a template. ``instant``: only the last value, as rows of a table."""

    expression: str
    legend: str = ""
    instant: bool = False
    heatmap: bool = False
    exemplars: bool = False

    def target(self, letter: str) -> Json:
        """As a panel has it."""
        shape = "table" if self.instant else "heatmap" if self.heatmap else "time_series"
        return {
            "refId": letter,
            "datasource": source(),
            "editorMode": "code",
            "expr": self.expression,
            "legendFormat": self.legend or "__auto",
            "format": shape,
            "instant": self.instant,
            "range": not self.instant,
            "exemplar": self.exemplars,
        }


@dataclass(frozen=True)
class Search:
    """A search of the trace store, in TraceQL."""

    expression: str
    most: int = 50

    def target(self, letter: str) -> Json:
        """As a panel has it."""
        return {
            "refId": letter,
            "datasource": source(TEMPO),
            "queryType": "traceql",
            "query": self.expression,
            "tableType": "spans",
            "limit": self.most,
            "spss": 1,
        }


@dataclass(frozen=True)
class Panel:
    """A panel; ``description`` names its metrics. ``width``: of 24 columns; ``height``: in units of some 30 pixels."""

    kind: str
    title: str
    description: str
    queries: Sequence[Query | Search]
    width: int = 12
    height: int = 8
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[Json] = ()
    transformations: Sequence[Json] = ()

    def at(self, number: int, x: int, y: int) -> Json:
        """The panel at its place."""
        found: Json = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": source(TEMPO if isinstance(self.queries[0], Search) else PROMETHEUS),
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": dict(self.defaults), "overrides": list(self.overrides)},
            "options": dict(self.options),
            "targets": [query.target(chr(ord("A") + at)) for at, query in enumerate(self.queries)],
        }
        if self.transformations:
            found["transformations"] = list(self.transformations)
        return found

    def stacked(self) -> Panel:
        """Its lines on top of each other; one that a legend calls a limit or a mark stands for itself."""
        custom = {**self.defaults["custom"], "stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 30}
        alone = {
            "matcher": {"id": "byRegexp", "options": ".*(limit|mark).*"},
            "properties": [
                {"id": "custom.stacking", "value": {"mode": "none"}},
                {"id": "custom.fillOpacity", "value": 0},
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
            ],
        }
        return replace(self, defaults={**self.defaults, "custom": custom}, overrides=(*self.overrides, alone))


def lines(title: str, description: str, *queries: Query, unit: str = "short", width: int = 12) -> Panel:
    """Lines over time."""
    return Panel(
        "timeseries",
        title,
        description,
        queries,
        width,
        defaults={
            "unit": unit,
            "min": 0,
            "color": {"mode": "palette-classic"},
            "custom": {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "showPoints": "auto", "spanNulls": False},
        },
        options={
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    )


def number(title: str, description: str, query: Query, unit: str, steps: Sequence[tuple[float | None, str]]) -> Panel:
    """One large number, coloured from each of ``steps`` on."""
    return Panel(
        "stat",
        title,
        description,
        (query,),
        width=6,
        height=4,
        defaults={
            "unit": unit,
            "color": {"mode": "thresholds"},
            "thresholds": {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]},
            "noValue": "none",
        },
        options={"colorMode": "background", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}},
    )


def heatmap(title: str, description: str, query: Query, unit: str, width: int = 12) -> Panel:
    """Buckets of a histogram over time."""
    return Panel(
        "heatmap",
        title,
        description,
        (query,),
        width,
        options={
            "calculate": False,
            "yAxis": {"unit": unit, "axisPlacement": "left"},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "cellGap": 1,
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "tooltip": {"mode": "single", "yHistogram": False},
            "legend": {"show": True},
        },
    )


def table(
    title: str, description: str, queries: Sequence[Query], columns: Mapping[str, str], units: Mapping[str, str]
) -> Panel:
    """Rows that all queries have in common; ``columns`` in order: a label, or ``Value #A``, and its heading."""
    return Panel(
        "table",
        title,
        description,
        queries,
        width=COLUMNS,
        defaults={"custom": {"align": "auto", "filterable": True}, "noValue": "-"},
        options={"showHeader": True, "cellHeight": "sm"},
        overrides=[
            {"matcher": {"id": "byName", "options": heading}, "properties": [{"id": "unit", "value": unit}]}
            for heading, unit in units.items()
        ],
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "filterFieldsByName", "options": {"include": {"names": list(columns)}}},
            {
                "id": "organize",
                "options": {
                    "renameByName": dict(columns),
                    "indexByName": {name: at for at, name in enumerate(columns)},
                    "excludeByName": {},
                },
            },
        ],
    )


@dataclass(frozen=True)
class Variable:
    """A choice among the values of a label, of the series that ``selector`` selects."""

    name: str
    title: str
    label: str
    selector: str

    def as_json(self) -> Json:
        """As a page has it."""
        asked = f"label_values({self.selector}, {self.label})"
        return {
            "type": "query",
            "name": self.name,
            "label": self.title,
            "datasource": source(),
            "definition": asked,
            "query": {"qryType": 1, "query": asked, "refId": f"variable-{self.name}"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
            "hide": 0,
            "options": [],
            "regex": "",
        }


def _choice_of_source(name: str, title: str, kind: str) -> Json:
    return {
        "type": "datasource",
        "name": name,
        "label": title,
        "query": kind,
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


@dataclass(frozen=True)
class Annotation:
    """Marks where a query has a value."""

    name: str
    expression: str
    title: str
    text: str
    color: str

    def as_json(self) -> Json:
        """As a page has it."""
        return {
            "name": self.name,
            "datasource": source(),
            "enable": True,
            "hide": False,
            "iconColor": self.color,
            "expr": self.expression,
            "step": "60s",
            "titleFormat": self.title,
            "textFormat": self.text,
            "useValueForTime": False,
        }


@dataclass(frozen=True)
class Page:
    """A page: rows of panels, each with a title. ``traces``: whether it asks the trace store."""

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[Variable]
    annotations: Sequence[Annotation] = ()
    traces: bool = False

    def as_json(self) -> Json:
        """As Grafana takes it."""
        sources = [_choice_of_source(METRICS_VARIABLE, "Metrics", PROMETHEUS)]
        if self.traces:
            sources.append(_choice_of_source(TRACES_VARIABLE, "Traces", TEMPO))
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["vllm", TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "type": "dashboards",
                    "title": "vllm-kvfix",
                    "tags": [TAG],
                    "asDropdown": False,
                    "includeVars": True,
                    "keepTime": True,
                    "targetBlank": False,
                    "icon": "external link",
                }
            ],
            "templating": {"list": [*sources, *(variable.as_json() for variable in self.variables)]},
            "annotations": {"list": [annotation.as_json() for annotation in self.annotations]},
            "panels": self._panels(),
        }

    def _panels(self) -> list[Json]:
        """From left to right, then on the next line, which begins below the highest of the one before."""
        found: list[Json] = []
        y = 0
        for title, panels in self.rows:
            found.append(_row(len(found) + 1, title, y))
            x, y, highest = 0, y + 1, 0
            for panel in panels:
                if x + panel.width > COLUMNS:
                    x, y, highest = 0, y + highest, 0
                found.append(panel.at(len(found) + 1, x, y))
                x, highest = x + panel.width, max(highest, panel.height)
            y += highest
        return found


def _row(number: int, title: str, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
