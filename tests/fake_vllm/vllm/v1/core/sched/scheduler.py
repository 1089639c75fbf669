# SPDX-License-Identifier: Apache-2.0
"""The scheduler of the fake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_manager import KVCacheManager

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Scheduler:
    """Allocates two blocks a group and step."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.needs_kv_cache_zeroing = kv_cache_config.needs_kv_cache_zeroing
        self.kv_cache_manager = KVCacheManager(kv_cache_config)

    def allocate(self) -> None:
        """What a step allocates."""
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager.allocate_new_blocks(2)

    def schedule(self) -> list[int] | None:
        """One step; returns the ids to zero."""
        self.allocate()
        return (self.kv_cache_manager.take_new_block_ids() or None) if self.needs_kv_cache_zeroing else None
