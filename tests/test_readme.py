# SPDX-License-Identifier: Apache-2.0
"""README.md says what the code says."""

from __future__ import annotations

import re

from tests.support import ROOT
from vllm_kvfix import __version__
from vllm_kvfix.backports import BACKPORTS
from vllm_kvfix_sidecar.tables import markdown_table

README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The text between two markers."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
    assert found is not None
    return found[1]


def table() -> str:
    """The table of back-ports, from the tuple that the plugin applies."""
    rows = ["| back-port | upstream | for | fixed in |", "|---|---|---|---|"]
    for backport in BACKPORTS:
        number = backport.pull_request.rsplit("/", 1)[1]
        rows.append(
            f"| `{backport.name}` | [#{number}]({backport.pull_request}) | {', '.join(backport.affected)} "
            f"| {backport.first_fixed} |"
        )
    return "\n".join(rows) + "\n"


def test_the_table_of_back_ports_is_the_tuple() -> None:
    """The README's table is what BACKPORTS gives; a new back-port cannot be forgotten there."""
    assert block("backports") == table()


def test_the_tables_of_names_are_the_conventions() -> None:
    """The tables of metrics and attributes are those that `python -m vllm_kvfix_sidecar.conventions` prints."""
    assert block("conventions") == markdown_table()


def test_version_and_changelog_agree() -> None:
    """The log line in the README shows the version of the code."""
    assert f"INFO vllm-kvfix {__version__}: " in README


def test_every_link_into_the_repository_leads_somewhere() -> None:
    """No relative link or picture of the README is dead."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
