# SPDX-License-Identifier: Apache-2.0
"""What most of these tests need: a folder for rings, and a receiver that is well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sidecar_e2e.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
