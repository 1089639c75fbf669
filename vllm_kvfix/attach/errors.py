# SPDX-License-Identifier: Apache-2.0
"""The one error of attaching: every refusal and every failure, with its cause and what to do next."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """Why it was refused, or failed; the value is what ``--json`` prints."""

    DEAD = "dead"
    STOPPED = "stopped"
    TRACED = "traced"
    RIGHTS = "rights"
    NOT_PYTHON = "not python"
    OTHER_PYTHON = "other python"
    NOT_VLLM = "not vllm"
    FRONT_END = "front end"
    WORKER = "worker"
    NOT_AFFECTED = "not affected"
    UNKNOWN_SOURCE = "unknown source"
    NO_SCHEDULER = "no scheduler"
    OTHER_VERSION = "other version"
    NO_PLACE = "no place"
    NO_RING = "no ring"
    NO_TOOL = "no tool"
    NO_ANSWER = "no answer"
    NO_BOUNDARY = "no step boundary"
    FAILED = "failed"


# After this one the target may be changed, and we do not know; after all others it is as it was.
UNCERTAIN = frozenset({Reason.FAILED})


class AttachError(Exception):
    """Nothing was attached or detached; ``str()`` says why, ``next_step`` what to do (empty: nothing can be done)."""

    def __init__(self, reason: Reason, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.next_step = next_step
