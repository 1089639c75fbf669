# SPDX-License-Identifier: Apache-2.0
"""The boundary that no exception of ours crosses into vLLM: each is counted, and each place speaks once."""

from __future__ import annotations

import logging
from collections import Counter

from vllm_kvfix import upstream

logger = logging.getLogger(upstream.LOGGER_NAME)
counts: Counter[str] = Counter()


def note(place: str, error: BaseException) -> None:
    """Count an exception caught at ``place``; the first one there is logged, with its traceback."""
    counts[place] += 1
    if counts[place] == 1:
        logger.warning(
            "vllm-kvfix: an error of its own in %s was contained, vLLM is not affected by it; further ones are only "
            "counted. Please report it: %r",
            place,
            error,
            exc_info=error,
        )
