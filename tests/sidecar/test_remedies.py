# SPDX-License-Identifier: Apache-2.0
"""Which remedy is given for which release and container."""

from __future__ import annotations

import pytest

from tests import releases
from vllm_kvfix_sidecar import remedies

PATH = "scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids"


@pytest.mark.parametrize("release", releases.AFFECTED)
def test_each_affected_release_has_the_leak(release: str) -> None:
    """On each release that leaks, the list is known, and the remedy is ours, or the release that fixed it."""
    assert remedies.known_leak(PATH, release, "off") is not None
    remedy = remedies.for_container(PATH, release, "off")
    assert "pip install vllm-kvfix" in remedy.action
    assert remedy.issue == "https://github.com/vllm-project/vllm/pull/44490"
    assert remedy.fixed_in == "0.26.0"


@pytest.mark.parametrize("release", ["0.16.0", "0.17.0", "0.26.0", "0.32.0", "", "main", "0.26.0.dev1"])
def test_other_releases_have_it_not(release: str) -> None:
    """Where the leak is not, or the version cannot be read, nobody is told to install anything."""
    assert remedies.known_leak(PATH, release, "unknown") is None
    assert "pip install" not in remedies.for_container(PATH, release, "unknown").action


@pytest.mark.parametrize("release", ["0.25.1+cu129", "0.18.1.dev3", "0.25.2.dev3+gabc", "0.17.1.dev1"])
def test_builds_of_an_affected_release_have_it(release: str) -> None:
    """Local and development parts of a version do not hide the leak."""
    assert remedies.known_leak(PATH, release, "off") is not None


@pytest.mark.parametrize(
    ("state", "says"), [("off", "VLLM_KVFIX_PATCH"), ("refused", "vllm-kvfix status"), ("applied", "please report")]
)
def test_the_state_of_the_patch_is_told(state: str, says: str) -> None:
    """Installed, but off; installed, but refused; applied in vain: each has its own advice."""
    assert says in remedies.for_container(PATH, "0.25.1", state).action


def test_applied_it_is_no_known_leak() -> None:
    """Once the fix is applied, the list is judged as any other."""
    assert remedies.known_leak(PATH, "0.25.1", "applied") is None


@pytest.mark.parametrize("path", ["scheduler.new_block_ids_log", "scheduler.my_new_block_ids", "new_block_ids[0]"])
def test_other_containers_are_not_it(path: str) -> None:
    """Only the list of this very name is the known leak."""
    assert remedies.known_leak(path, "0.25.1", "off") is None


def test_caches_that_end_by_design_say_which_setting_bounds_them() -> None:
    """The prefix cache is bounded by its blocks, the processor's cache by its gigabytes; of others nothing is said."""
    blocks = remedies.for_bounded("scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block")
    assert blocks is not None
    assert "--gpu-memory-utilization" in blocks.action
    pictures = remedies.for_bounded("async_llm.processor.mm_processor_cache._cache")
    assert pictures is not None
    assert "--mm-processor-cache-gb" in pictures.action
    assert remedies.for_bounded("scheduler.something") is None
    assert remedies.is_expected("scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache")
    assert not remedies.is_expected("scheduler.kv_cache_manager.block_pool.free_list")


def test_the_allocator_would_give_back_what_it_keeps() -> None:
    """The amount stands in the advice, and none where it was not read."""
    assert "100 MiB" in remedies.for_allocator(100 * 2**20).action
    assert "MiB" not in remedies.for_allocator(None).action


def test_where_to_look_depends_on_where_it_grew() -> None:
    """Outside malloc: native libraries; shared memory: /dev/shm; else: a profiler."""
    assert "native libraries" in remedies.for_unexplained("anonymous", in_malloc=False).action
    assert "/dev/shm" in remedies.for_unexplained("shared_memory", in_malloc=None).action  # noqa: S108  # the words
    assert "memray" in remedies.for_unexplained("heap", in_malloc=True).action
