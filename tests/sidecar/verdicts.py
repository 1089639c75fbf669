# SPDX-License-Identifier: Apache-2.0
"""Histories and verdicts of processes as they could be, for tests of what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar.observed import Limit, ProcessHistory, Series
from vllm_kvfix_sidecar.remedies import Remedy
from vllm_kvfix_sidecar.verdict import Culprit, Interval, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB, GIB, DAY = 1 << 20, 1 << 30, 86400.0
BLOCK_IDS = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"
PULL = "https://github.com/vllm-project/vllm/pull/44490"
ACTION = "`pip install vllm-kvfix` beside vLLM and restart it"


def series(*values: float, last: float = 8000.0, every: float = 100.0) -> Series:
    """Values at even distances, the last at ``last``."""
    times = [last - every * (len(values) - 1 - at) for at in range(len(values))]
    return Series(times, list(values), list(values))


def history(
    pid: int = 4242,
    role: str = "engine core",
    name: str = "VLLM::EngineCore",
    figures: Mapping[str, float] | None = None,
    **changed: object,
) -> ProcessHistory:
    """A process that was watched for an hour, with these latest figures, under a limit of 16 GiB, 91 % of it used."""
    usual = {"status.rss": 9.5 * GIB, "status.anon": 9 * GIB, "status.swap": 0.0}
    found = ProcessHistory(
        pid=pid,
        role=role,
        name=name,
        started=1000.0,
        memory={key: series(value / 2, value, every=3600.0) for key, value in (figures or usual).items()},
        limit=Limit(16 * GIB, series(14 * GIB, 14.56 * GIB)),
        vllm_version="0.25.1",
        patch_state="refused",
    )
    return replace(found, **changed)  # type: ignore[arg-type]  # each field has its own type


def culprit(path: str = BLOCK_IDS, **changed: object) -> Culprit:
    """A container that grows by 88 MiB an hour, 154 bytes a request."""
    usual = Culprit(
        path=path,
        bytes_per_hour=88 * MIB,
        per={"request": 154.2, "block": 8.0},
        follows="request",
        capacity=None,
        why="it only grows: 7,561 were added and 0 removed",
    )
    return replace(usual, **changed)  # type: ignore[arg-type]  # as above


def leak(pid: int = 4242, **changed: object) -> Verdict:
    """An engine core that leaks."""
    usual = Verdict(
        pid=pid,
        role="engine core",
        name="VLLM::EngineCore",
        kind=Kind.UNBOUNDED,
        category="heap",
        culprits=(culprit(),),
        slope=Interval(85 * MIB, 90 * MIB, 95 * MIB),
        per={"request": 157.0},
        follows="request",
        explained=0.98,
        time_to_limit_s=Interval(3.1 * DAY, 3.5 * DAY, 4 * DAY),
        evidence=("its memory is 9 GiB and grew by 90 MiB an hour",),
        remedy=Remedy(ACTION, PULL, "0.26.0"),
        window_s=3600.0,
    )
    return replace(usual, **changed)  # type: ignore[arg-type]  # as above


def calm(
    pid: int = 17,
    role: str = "api server",
    name: str = "VLLM::APIServer",
    kind: Kind = Kind.STEADY,
    **changed: object,
) -> Verdict:
    """A process of which there is nothing to say."""
    return replace(Verdict(pid, role, name, kind, window_s=3600.0), **changed)  # type: ignore[arg-type]  # as above
