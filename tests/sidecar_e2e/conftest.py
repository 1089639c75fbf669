# SPDX-License-Identifier: Apache-2.0
"""What most of these tests need: a folder for rings, and a receiver that is well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.sidecar_e2e.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, so that they can be left out where minutes count."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    """An empty folder for rings."""
    folder = tmp_path / "rings"
    folder.mkdir()
    return folder


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    """A receiver that is well."""
    with Receiver(tmp_path) as found:
        yield found
