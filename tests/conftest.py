# SPDX-License-Identifier: Apache-2.0
"""What holds for the whole run: what was seen is said at the end, and what was not tested is, loudly."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

from tests import summaries

# How long an example takes says more of what else this machine does than of what is tested.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


# The size of a terminal that is not there: pytest-xdist sets it for its workers, and a child would believe it.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the contract tests: here, since pytest asks only the outermost conftest of a whole run."""
    group = parser.getgroup("contract tests")
    group.addoption("--seed", type=int, help="draw the random workloads of that seed again")
    group.addoption("--workloads", type=int, default=25, help="random workloads per release (%(default)s)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand on what this process saw, if another one prints it."""
    summaries.send(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker of pytest-xdist saw; one that crashed has sent nothing."""
    summaries.receive(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was seen, and name each skip's reason under a heading of its own."""
    for title, lines in summaries.told(config).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = sorted({str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped})
    if reasons:
        terminalreporter.section("NOT TESTED ON THIS MACHINE", sep="!", yellow=True, bold=True)
        for reason in reasons:
            terminalreporter.line(f"  {reason}")
