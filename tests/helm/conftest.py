# SPDX-License-Identifier: Apache-2.0
"""One podman, with the image built once, for all tests here that run containers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.containers import Podman

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    """Podman with our image; nothing of it remains afterwards."""
    with Podman() as made:
        yield made
