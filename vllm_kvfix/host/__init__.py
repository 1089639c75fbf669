# SPDX-License-Identifier: Apache-2.0
"""Figures of a process and of its cgroup, from ``/proc``, ``/sys/fs/cgroup``, glibc and CPython.

For vLLM's own processes, where a thread asks that shares the GIL with the engine, and for the sidecar alike. What the
system does not tell is left out of an answer, never 0; where nothing can be told, :class:`UnreadableError` says why.
The names of the figures are those of :data:`vllm_kvfix.events.SCOPES`; amounts are bytes.
"""

from vllm_kvfix.host.budget import Budget
from vllm_kvfix.host.cgroup import Cgroup
from vllm_kvfix.host.errors import UnreadableError
from vllm_kvfix.host.own import malloc, python
from vllm_kvfix.host.procfs import ENDED_REASON, host_memory, start_time, status
from vllm_kvfix.host.smaps_file import smaps

__all__ = [
    "ENDED_REASON",
    "Budget",
    "Cgroup",
    "UnreadableError",
    "host_memory",
    "malloc",
    "python",
    "smaps",
    "start_time",
    "status",
]
