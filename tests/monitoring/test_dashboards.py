# SPDX-License-Identifier: Apache-2.0
"""dashboards: pages that Grafana can take, whose every name is one of the conventions, and files that are current."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest

from tests.monitoring.queries import KNOWN, LABELS, VARIABLE, filled, selectors
from tests.support import ROOT
from vllm_kvfix_sidecar import conventions
from vllm_kvfix_sidecar.conventions import Name
from vllm_kvfix_sidecar.monitoring import __main__ as command
from vllm_kvfix_sidecar.monitoring import dashboards, grafana
from vllm_kvfix_sidecar.monitoring.promql import INSTANCE, JOB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCES = sorted((ROOT / "sidecar" / "vllm_kvfix_sidecar" / "monitoring").glob("*.py"))
SHIPPED = ROOT / "helm" / "vllm-kvfix" / "files"
# Of Grafana's own, in 10.4: https://grafana.com/docs/grafana/v10.4/dashboards/variables/add-template-variables/
BUILT_IN = {"__rate_interval": "1m"}
KINDS = {"row", "stat", "table", "timeseries", "heatmap"}
UNITS = {"short", "bytes", "s", "percentunit", "reqps"}
PAGES = [page().as_json() for page in dashboards.PAGES]
ANY_VALUE = {**BUILT_IN, **dict.fromkeys(("job", "instance", "process", "engine"), ".*")}


def panels(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, rows apart."""
    return (panel for panel in page["panels"] if panel["type"] != "row")


def drawn(page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each query of PromQL that a page draws, with what asks it."""
    for panel in panels(page):
        yield from ((panel["title"], target["expr"]) for target in panel["targets"] if "expr" in target)
    yield from ((one["name"], one["expr"]) for one in page["annotations"]["list"])


def chosen(page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The series whose labels make the choices of a variable."""
    for variable in page["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            assert asked[2] in LABELS
            yield variable["name"], asked[1]


def sources(node: Any) -> Iterator[Any]:
    """Every data source that is named anywhere in a page."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "datasource")
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from sources(child)


def named(page: dict[str, Any], found: Iterator[tuple[str, str]]) -> list[Any]:
    """Each as a case of its own."""
    return [pytest.param(text, id=f"{page['uid']}-{who}-{at}") for at, (who, text) in enumerate(found)]


DRAWN = [case for page in PAGES for case in named(page, drawn(page))]
CHOSEN = [case for page in PAGES for case in named(page, chosen(page))]
PANELS = [pytest.param(panel, id=f"{page['uid']}-{panel['title']}") for page in PAGES for panel in panels(page)]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page["uid"])


class TestNames:
    """Where names come from."""

    @pytest.mark.parametrize("text", [*DRAWN, *CHOSEN])
    def test_a_query_asks_for_what_the_sidecar_tells(self, text: str) -> None:
        """It can be parsed, and each series and label in it is one of the conventions."""
        query = filled(text, ANY_VALUE)
        assert promql_parser.parse(query) is not None
        found = list(selectors(query))
        assert found
        for selector in found:
            assert selector.labels <= KNOWN[selector.name], selector
        grouped = re.findall(r"(?:by|without|on|ignoring) \(([a-z_, ]+)\)", query)
        assert {name for group in grouped for name in group.split(", ")} <= LABELS

    @pytest.mark.parametrize("text", DRAWN)
    def test_a_query_keeps_to_the_chosen_targets(self, text: str) -> None:
        """Each selector asks for the job and the instance that were chosen."""
        for selector in selectors(filled(text, ANY_VALUE)):
            assert {JOB, INSTANCE} <= selector.labels, selector

    @pytest.mark.parametrize("panel", PANELS)
    def test_a_legend_shows_labels_that_there_are(self, panel: dict[str, Any]) -> None:
        """So do the columns of a table, and they come from a query that the panel has."""
        letters = {f"Value #{target['refId']}" for target in panel["targets"]}
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))) <= LABELS
        for transformation in panel.get("transformations", []):
            columns = set(transformation["options"].get("renameByName", {}))
            columns |= set(transformation["options"].get("include", {}).get("names", []))
            assert columns <= LABELS | letters

    @pytest.mark.parametrize("panel", PANELS)
    def test_a_description_names_the_metrics(self, panel: dict[str, Any]) -> None:
        """Of each query the metric stands in the description, so that it can be asked for elsewhere."""
        for target in panel["targets"]:
            if "expr" in target:
                names = {
                    selector.name.removesuffix("_bucket") for selector in selectors(filled(target["expr"], ANY_VALUE))
                }
                said = set(re.findall(r"\w+", panel["description"]))
                assert names & said, f"{names} are not in {panel['description']!r}"

    def test_a_search_asks_for_attributes_of_our_spans(self) -> None:
        """Each ``span.NAME`` in TraceQL is an attribute of the span that it searches for."""
        searched = [
            target["query"]
            for page in PAGES
            for panel in panels(page)
            for target in panel["targets"]
            if "query" in target
        ]
        assert searched
        for query in searched:
            assert f'name = "{conventions.SPAN_NAME}"' in query
            assert set(re.findall(r"span\.([\w.]+)", query)) <= set(conventions.SPAN_ATTRIBUTES)

    @pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
    def test_no_module_holds_a_name(self, path: Path) -> None:
        """A string with a metric's or an attribute's name in it stands in conventions.py alone."""
        names = {str(value) for value in vars(conventions).values() if isinstance(value, Name) and "." in value}
        names |= (
            {metric.name for metric in conventions.METRICS} | (KNOWN.keys() - {"up"}) | (LABELS - {"le", JOB, INSTANCE})
        )
        tree = ast.parse(path.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
                found = set(re.findall(r"[\w.]+", node.value)) & names
                assert not found, f"line {node.lineno}: {found}"


class TestShape:
    """What Grafana needs."""

    def test_pages_can_be_told_apart(self) -> None:
        """Their uids, which links and bookmarks hold, are these; titles differ, too."""
        assert [page["uid"] for page in PAGES] == ["vllm-kvfix-on-call", "vllm-kvfix-requests"]
        assert len({page["title"] for page in PAGES}) == len(PAGES)

    @by_page
    def test_a_page_is_of_a_schema_that_grafana_10_4_reads(self, page: dict[str, Any]) -> None:
        """Schema 39 is 10.4's; every panel's kind and unit is one that it has."""
        assert page["schemaVersion"] == 39
        assert {panel["type"] for panel in page["panels"]} <= KINDS
        assert {panel["fieldConfig"]["defaults"].get("unit", "short") for panel in panels(page)} <= UNITS

    @by_page
    def test_panels_have_ids_of_their_own(self, page: dict[str, Any]) -> None:
        """No id is there twice, nor is a title among the panels, nor a letter among a panel's queries."""
        for kept in ([panel["id"] for panel in page["panels"]], [panel["title"] for panel in panels(page)]):
            assert max(Counter(kept).values()) == 1
        for panel in panels(page):
            assert max(Counter(target["refId"] for target in panel["targets"]).values()) == 1

    @by_page
    def test_panels_lie_beside_each_other(self, page: dict[str, Any]) -> None:
        """None reaches over the 24 columns, and no two share a place."""
        places = [panel["gridPos"] for panel in page["panels"]]
        for place in places:
            assert place["x"] >= 0
            assert place["w"] > 0
            assert place["h"] > 0
            assert place["x"] + place["w"] <= 24
        for one, other in combinations(places, 2):
            apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert apart_x or apart_y, (one, other)

    @by_page
    def test_every_variable_is_defined(self, page: dict[str, Any]) -> None:
        """Each that is used is in the list, before those that use it, or is Grafana's own; each in the list is used."""
        listed = [variable["name"] for variable in page["templating"]["list"]]
        assert max(Counter(listed).values()) == 1
        for at, variable in enumerate(page["templating"]["list"]):
            assert set(VARIABLE.findall(json.dumps(variable))) <= {*listed[:at], "__all"}
        rest = {**page, "templating": {}}
        used = set(VARIABLE.findall(json.dumps(rest)))
        assert used <= {*listed, *BUILT_IN}
        assert used | set(VARIABLE.findall(json.dumps(page["templating"]))) >= set(listed)

    @by_page
    def test_every_source_is_a_variable(self, page: dict[str, Any]) -> None:
        """No panel, query, annotation or variable names a data source that only one Grafana has."""
        found = list(sources(page))
        assert len(found) > len(page["panels"])
        assert all(source in (grafana.source(), grafana.source(grafana.TEMPO)) for source in found)
        kinds = {
            variable["name"]: variable["query"]
            for variable in page["templating"]["list"]
            if variable["type"] == "datasource"
        }
        assert kinds.items() <= {"datasource": "prometheus", "traces": "tempo"}.items()

    @by_page
    def test_pages_lead_to_each_other(self, page: dict[str, Any]) -> None:
        """Each links to all with a tag that all have, and takes time and choices along."""
        (link,) = page["links"]
        assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
        assert all(set(link["tags"]) <= set(other["tags"]) for other in PAGES)

    def test_exemplars_are_asked_for_where_there_are_any(self) -> None:
        """A query of a histogram's buckets asks for them, and no other does."""
        for page in PAGES:
            for panel in panels(page):
                for target in panel["targets"]:
                    if "expr" in target:
                        assert target["exemplar"] is ("_bucket" in target["expr"]), panel["title"]


class TestFiles:
    """The command that writes them."""

    def run(self, *options: str | Path) -> subprocess.CompletedProcess[str]:
        """Run it as users do."""
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sidecar")])}
        return subprocess.run(
            [sys.executable, "-m", "vllm_kvfix_sidecar.monitoring", *map(str, options)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def test_those_of_the_chart_are_current(self, capsys: pytest.CaptureFixture[str]) -> None:
        """What lies in helm/vllm-kvfix/files is what this version writes."""
        assert command.main(["--output", str(SHIPPED), "--check"]) == 0, capsys.readouterr().out

    def test_what_is_written_is_current(self, tmp_path: Path) -> None:
        """It writes a file a page and one of rules, names them, and finds nothing to say of them afterwards."""
        written = self.run("--output", tmp_path / "new")
        checked = self.run("--output", tmp_path / "new", "--check")
        assert (written.returncode, checked.returncode, checked.stdout) == (0, 0, "")
        assert len(written.stdout.splitlines()) == len(PAGES) + 1
        for page in PAGES:
            assert json.loads((tmp_path / "new" / "dashboards" / f"{page['uid']}.json").read_text()) == page

    @pytest.mark.parametrize("damage", ["changed", "missing", "extra"])
    def test_what_differs_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
        """A file that was changed, is missing, or is of a page that is no more: exit code 1, and its path."""
        assert command.main(["--output", str(tmp_path)]) == 0
        path = tmp_path / "dashboards" / f"{PAGES[0]['uid']}.json"
        if damage == "changed":
            path.write_text(path.read_text().replace("bytes", "bits", 1))
        elif damage == "missing":
            path.unlink()
        else:
            path = tmp_path / "dashboards" / "old.json"
            path.write_text("{}")
        capsys.readouterr()
        assert command.main(["--output", str(tmp_path), "--check"]) == 1
        first, last = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{path}: ")
        assert last.endswith(f"--output {tmp_path}")

    def test_a_folder_that_cannot_be_written_is_said(self, tmp_path: Path) -> None:
        """Exit code 2, one line with the path and the next step, no traceback."""
        (tmp_path / "file").write_text("")
        done = self.run("--output", tmp_path / "file")
        assert done.returncode == 2
        assert str(tmp_path / "file") in done.stderr
        assert done.stderr.endswith("choose another folder by --output\n")
        assert len(done.stderr.splitlines()) == 1

    def test_it_teaches(self) -> None:
        """--help says what is written, the exit codes, and an example of each use."""
        done = self.run("--help")
        assert done.returncode == 0
        for word in ("dashboards/", "rules/", "--check", "exit codes", "promtool"):
            assert word in done.stdout
        assert self.run().returncode == 2
