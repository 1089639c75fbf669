# SPDX-License-Identifier: Apache-2.0
"""The one error of this package, and the words for what the system answers."""

from __future__ import annotations

import errno
import os


class UnreadableError(Exception):
    """Figures cannot be had; the message is the reason, for a person."""


def reason(error: OSError) -> str:
    """What an error about a file of a process means."""
    if error.errno in {errno.ENOENT, errno.ESRCH}:
        return "no such process"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return "permission denied (another user's process, or ptrace is not allowed)"
    return os.strerror(error.errno) if error.errno else "it cannot be read"
