# SPDX-License-Identifier: Apache-2.0
"""What a verdict stands on: the recent history of one process as series of numbers. No clock, no files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Series:
    """One figure over time.

    ``times`` in seconds of one steady clock, rising; they may lie at uneven distances, coarser with age. ``values`` at
    those times; ``floors``: the least value since the time before (the same as ``values`` where there was one sample).
    """

    times: Sequence[float] = ()
    values: Sequence[float] = ()
    floors: Sequence[float] = ()


@dataclass(frozen=True)
class ContainerHistory:
    """A container that a census found again and again; the names are those of :class:`vllm_kvfix.events.Container`.

    ``capacity``, ``orphan_age_s`` are the latest.
    """

    path: str
    capacity: int | None
    orphan_age_s: float
    length: Series
    members: Series
    size: Series
    added: Series
    removed: Series
    orphans: Series


@dataclass(frozen=True)
class Limit:
    """What ends the growth: ``limit`` and the ``usage`` that counts against it, in bytes; ``of``: whose they are.

    ``usage`` is that of everything in the cgroup (or on the host), less what the kernel can take back.
    """

    limit: float
    usage: Series
    of: str = "cgroup"


@dataclass(frozen=True)
class ProcessHistory:
    """One process.

    ``role`` is one of ``layout.ROLES`` or ``child``; ``started`` on the clock of the series. ``memory`` maps
    ``SCOPE.FIGURE`` of ``events.SCOPES`` (``status.anon``, ``smaps.heap``, ``malloc.retained``, ...) to its series; a
    figure that could not be read is not there, and ``unread`` says why by scope. ``load`` are running totals of the
    engines that the process works for: ``requests`` (ended), ``aborts``, ``generated_tokens``, ``blocks`` (allocated),
    ``steps``; and two levels: ``running`` and ``waiting`` requests.
    """

    pid: int
    role: str
    name: str
    started: float
    memory: Mapping[str, Series]
    containers: Sequence[ContainerHistory] = ()
    load: Mapping[str, Series] = field(default_factory=dict)
    limit: Limit | None = None
    unread: Mapping[str, str] = field(default_factory=dict)
    vllm_version: str = ""
    patch_state: str = "unknown"
