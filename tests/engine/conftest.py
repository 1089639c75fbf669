# SPDX-License-Identifier: Apache-2.0
"""The plugin as installed from our own wheel, a tiny model, and one set of engines for all tests here."""

from __future__ import annotations

import pytest

from tests import summaries
from tests.engine.harness import Workshop
from vllm_kvfix.demo.model import make_model
from vllm_kvfix.demo.plugin_folder import make_plugin_folder


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Workshop:
    """Everything that an engine test needs; what it saw is printed at the end of the session."""
    folder = tmp_path_factory.mktemp("engines")
    plugin = make_plugin_folder(folder / "plugin")
    made = Workshop(make_model(folder / "model"), plugin, folder)
    summaries.tell(request.config, "real engines", lambda: made.summary)
    return made
