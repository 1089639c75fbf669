# SPDX-License-Identifier: Apache-2.0
"""How many workloads, from which seed, and what each release showed, at the end of the session."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests import summaries
from tests.contract.fleet import Fleet
from vllm_kvfix.demo.plugin_folder import make_plugin_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAN = pytest.StashKey["Plan"]()


@dataclass(frozen=True)
class Plan:
    """What is drawn: the same seed and number draw the same workloads."""

    seed: int
    workloads: int


def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed, once for the session."""
    seed = config.getoption("--seed")
    config.stash[_PLAN] = Plan(secrets.randbelow(1_000_000) if seed is None else seed, config.getoption("--workloads"))


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Processes for the releases that this session tests, two at a time, with our built wheel in each."""
    plan = request.config.stash[_PLAN]
    names = [str(p["release"]) for p in map(_parameters, request.session.items) if "release" in p]
    package = make_plugin_folder(tmp_path_factory.mktemp("contract") / "plugin")
    with Fleet(list(dict.fromkeys(names)), package, seed=plan.seed, workloads=plan.workloads) as made:
        title = f"contract tests: seed {plan.seed}, {plan.workloads} workloads (--seed reproduces)"
        summaries.tell(request.config, title, made.summary)
        yield made


def _parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)  # only parametrised functions have one
    return {} if callspec is None else dict(callspec.params)
