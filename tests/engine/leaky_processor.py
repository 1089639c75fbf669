# SPDX-License-Identifier: Apache-2.0
"""A logits processor that leaks, named so: real code of users runs in the engine core just so, and does leak.

vLLM's own interpreter imports it. While the file exists that ``KVFIX_TEST_LEAK`` names, each step leaves entries in a
list, ``BYTES_A_SECOND`` of them.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

BYTES_A_SECOND = 16 << 20
WORD = 8


class Leaky(LogitsProcessor):  # type: ignore[misc]  # of the engine's release, which is not seen here
    """Changes nothing, and remembers too much."""

    def __init__(self, *_: Any) -> None:
        self.history: list[None] = []
        self._then = time.monotonic()

    def apply(self, logits: Any) -> Any:
        """Leave the logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """It changes nothing."""
        return True

    def update_state(self, batch_update: Any) -> None:  # noqa: ARG002  # vLLM's signature
        """Called in each step."""
        now = time.monotonic()
        if os.path.exists(os.environ["KVFIX_TEST_LEAK"]):  # noqa: PTH110  # in each step
            self.history.extend([None] * int((now - self._then) * BYTES_A_SECOND / WORD))
        self._then = now
