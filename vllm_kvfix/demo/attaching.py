# SPDX-License-Identifier: Apache-2.0
"""Brings the fix into the demo's running engine, as ``vllm-kvfix attach`` does."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """``done``: the fix is in; ``said``: the details, or why it is not in, in one line; ``took_s``: seconds."""

    done: bool
    said: str
    took_s: float


def attach_fix(pid: int) -> Attempt:
    """Try to bring the fix, and nothing else, into the engine core ``pid``.

    It is called in this process and not as a command: where the kernel lets only ancestors trace a process (Yama), we
    are one.
    """
    from vllm_kvfix import attach  # noqa: PLC0415  the parts that the tests share do without the extra

    began = time.monotonic()
    try:
        outcome = attach.attach_to(pid, fix=True, observe=False)
    except attach.AttachError as error:
        told = f"{error}; next step: {error.next_step}" if error.next_step else str(error)
        return Attempt(done=False, said=" ".join(told.split()), took_s=time.monotonic() - began)
    waited = f"the engine waited {outcome.held_s * 1000:.0f} ms for it"
    said = f"fix {outcome.fix}, {waited}, confirmed by {outcome.confirmed_by}"
    return Attempt(done=True, said=said, took_s=time.monotonic() - began)
