# SPDX-License-Identifier: Apache-2.0
"""Plays the cases that a session asks for, once, and has the table printed at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import summaries
from tests.labelled import cases, fleet, table
from vllm_kvfix.demo.plugin_folder import make_plugin_folder

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, table.Outcome]:
    """What was found of each case that this session tests; of all of them where it asks for the totals."""
    asked = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    wants_all = any(item.name == "test_totals" for item in request.session.items)
    names = [name for name in cases.BY_NAME if wants_all or name in asked]
    folder = tmp_path_factory.mktemp("labelled")
    package = make_plugin_folder(folder / "plugin")
    found = {outcome.case.name: outcome for outcome in fleet.play(names, package, folder)}
    title = "labelled suite ('!': not what was to be found)"
    summaries.tell(request.config, title, lambda: table.lines(list(found.values())))
    return found
