# SPDX-License-Identifier: Apache-2.0
"""The promises to the real scheduler of every release; what runs in a release's process is `run_release.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import releases
from vllm_kvfix.backports import BACKPORTS

if TYPE_CHECKING:
    from tests.contract.fleet import Fleet

REPLACED = {
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.__init__",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.__init__",
    "vllm.v1.core.sched.scheduler.Scheduler.schedule",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager.__init__",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager.take_new_block_ids",
}
# What watching wraps, on every release.
OBSERVED = {
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks",
    *(
        f"vllm.v1.core.sched.scheduler.Scheduler.{name}"
        for name in ("__init__", "schedule", "add_request", "_preempt_request", "_free_request", "_free_blocks")
    ),
}
# Where a waiting request is refused before `allocate_slots` is asked.
GATE = "vllm.v1.core.kv_cache_manager.KVCacheManager.can_fit_full_sequence"
GATED = ("0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2")


@pytest.mark.contract
@pytest.mark.parametrize("release", [r.version for r in releases.RELEASES])
def test_release(fleet: Fleet, release: str) -> None:
    """The leak is there without the back-port and gone with it, and nothing else changes: not one output's field."""
    outcome = fleet.outcome(release)
    result = outcome.result
    assert result is not None, f"exit code {outcome.code}, no result:\n{outcome.said}"
    assert result["failure"] is None, f"{result['failure']}\n--- it also said:\n{outcome.said}"
    assert result["uncovered"] == [], f"never happened in {result['workloads']} workloads: coverage is not what it says"
    assert result["distinct"] >= fleet.workloads, "too many of the workloads were the same"
    # vLLM's own failures end a workload early: a few are its business, many would mean that little was compared.
    assert sum(result["upstream_errors"].values()) * 10 <= result["workloads"], result["upstream_errors"]
    assert result["backlog_with"] == 0
    if releases.BY_VERSION[release].affected:
        assert result["backlog_without"] > 0, "the leak is not there: this proves nothing"
        assert set(result["replaced"]) == REPLACED
        assert result["scenarios"]
    else:
        assert result["backlog_without"] == 0
        assert result["replaced"] == [], "on a release that needs no fix, nothing may be replaced"
    gate = {GATE} if release in GATED else set()
    assert set(result["observed"]) == OBSERVED | gate
    assert result["watched"], "no scenario of watching was run"
    assert outcome.code == 0


def test_the_table_of_releases_is_the_back_ports_own() -> None:
    """Both name the same affected releases: neither can gain or lose one alone."""
    for backport in BACKPORTS:
        assert tuple(backport.affected) == releases.AFFECTED


def test_some_supported_release_is_still_affected() -> None:
    """Fails with "delete me" once no supported release needs the back-port."""
    supported = [r for r in releases.RELEASES if r.supported]
    assert any(r.affected for r in supported), "delete me: no supported release of vLLM is affected any more"
