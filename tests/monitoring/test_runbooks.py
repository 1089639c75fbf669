# SPDX-License-Identifier: Apache-2.0
"""runbooks: what they tell a tired person to type is there, and does what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.monitoring.deployment import deployment
from tests.monitoring.test_alerts import RUNBOOKS
from tests.sidecar.test_diagnose import clean
from tests.sidecar_e2e.processes import WAIT_S, NotInTimeError, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.monitoring.deployment import Deployment

PAGES = sorted(RUNBOOKS.glob("*.md"))
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTS = ("What it means", "First look", "Decide", "When it is a false alarm", "Escalate")
# Of what they may type beside our own commands: each was run, or its options looked up, by whoever wrote the page.
PROGRAMS = {"curl", "kubectl", "ls", "memray", "pgrep", "pip", "tr", "vllm-kvfix"}


def typed(page: Path) -> list[str]:
    """What stands behind a prompt in a page."""
    return [line[2:] for block in BLOCK.findall(page.read_text()) for line in block.splitlines() if line[:2] == "$ "]


def said(page: Path) -> list[str]:
    """Every command of ours that a page names, in a block or in a line."""
    named = [text for text in re.findall(r"`([^`\n]+)`", page.read_text()) if text.startswith("vllm-kvfix ")]
    return [line for line in (*typed(page), *named) if line.startswith("vllm-kvfix ")]


ASKED = sorted({line for page in PAGES for line in typed(page) if line.startswith("curl ")})
OURS = sorted({line.partition(" > ")[0] for page in PAGES for line in said(page)})


@cache
def help_of(command: str) -> str:
    """What a command says of itself."""
    words = [sys.executable, "-m", "vllm_kvfix", command, "--help"]
    return subprocess.run(words, env=clean(), capture_output=True, text=True, check=True, timeout=WAIT_S).stdout


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment that has everything."""
    with deployment(tmp_path_factory.mktemp("runbooks")) as found:
        yield found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page: Path) -> None:
    """What it means, a first look, what to decide and mend, false alarms, whom to tell: in this order."""
    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    kept = [heading for heading in headings if heading.startswith(PARTS)]
    assert [heading.startswith(part) for heading, part in zip(kept, PARTS, strict=True)] == [True] * len(PARTS)
    assert any("mend" in heading.lower() for heading in headings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_leads_to_pages_that_there_are(page: Path) -> None:
    """Each link to another runbook is one; each command in it is of a program that was tried."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        assert (page.parent / target).is_file(), target
    assert typed(page)
    assert {line.split()[0] for line in typed(page)} <= PROGRAMS


@pytest.mark.parametrize("line", OURS)
def test_a_command_of_ours_knows_its_options(line: str) -> None:
    """The sub-command is there, and its help has each option that the page gives it."""
    _, command, *words = line.split()
    told = help_of(command)
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", told), f"{command} knows no {word}"


@pytest.mark.e2e
@pytest.mark.parametrize("line", ASKED)
def test_a_question_is_answered(running: Deployment, line: str) -> None:
    """Each curl in a page, asked of a sidecar that has something to tell, prints something, and jq understands it."""
    command = line.replace("127.0.0.1:9464", f"127.0.0.1:{running.sidecar.port}")
    assert command != line
    last: list[subprocess.CompletedProcess[str]] = []

    def answers() -> bool:
        words = ["bash", "-o", "pipefail", "-c", command]
        last[:] = [subprocess.run(words, capture_output=True, text=True, check=False, timeout=WAIT_S)]
        return last[0].returncode == 0 and bool(last[0].stdout.strip())

    try:
        wait_until(answers, WAIT_S, line)
    except NotInTimeError as error:
        raise AssertionError(f"{line}: {last[0].stdout}{last[0].stderr}") from error
