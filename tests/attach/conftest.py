# SPDX-License-Identifier: Apache-2.0
"""A fake vLLM for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import copy_fake

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A copy of the fake vLLM."""
    return copy_fake(tmp_path / "site")
