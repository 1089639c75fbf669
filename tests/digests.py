# SPDX-License-Identifier: Apache-2.0
"""Prints the digests of every target in the affected releases, as `vllm_kvfix/upstream.py` holds them.

Run `python -m tests.digests` after a change to the list of targets and paste what it prints.
"""

from __future__ import annotations

import sys

from tests.releases import sources
from vllm_kvfix import upstream


def known_digests(target: upstream.Target) -> dict[str, str]:
    """Digest -> first affected release whose source of ``target`` has it."""
    found: dict[str, str] = {}
    for release in upstream.AFFECTED:
        digest = upstream.Sources(sources(release) / upstream.PACKAGE).digest(target)
        if digest is not None:
            found.setdefault(digest, release)
    return found


if __name__ == "__main__":
    for one in upstream.TARGETS:
        sys.stdout.write(f"{one}: {known_digests(one)}\n")
