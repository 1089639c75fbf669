# SPDX-License-Identifier: Apache-2.0
"""What tests saw and a person wants to read, at the end of a run, whichever process of pytest-xdist saw it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_TOLD = pytest.StashKey["list[tuple[str, Callable[[], Iterable[str]]]]"]()
_SENT = "summaries"


def tell(config: pytest.Config, title: str, lines: Callable[[], Iterable[str]]) -> None:
    """Print what ``lines`` gives in the end, under that title."""
    config.stash.setdefault(_TOLD, []).append((title, lines))


def told(config: pytest.Config) -> Mapping[str, list[str]]:
    """The lines by title."""
    found: dict[str, list[str]] = {}
    for title, lines in config.stash.get(_TOLD, []):
        found.setdefault(title, []).extend(lines())
    return found


def send(config: pytest.Config) -> None:
    """Hand what was told to the process that prints it, from one that does not."""
    output = getattr(config, "workeroutput", None)  # only a worker of pytest-xdist has it
    if output is not None:
        output[_SENT] = list(told(config).items())


def receive(config: pytest.Config, output: Mapping[str, list[tuple[str, list[str]]]]) -> None:
    """Take what another process sent."""
    for title, lines in output.get(_SENT, []):
        tell(config, title, lambda lines=lines: lines)  # type: ignore[misc]  # lines is bound
