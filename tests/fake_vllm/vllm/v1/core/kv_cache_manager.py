# SPDX-License-Identifier: Apache-2.0
"""The cache manager of the fake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core import kv_cache_coordinator

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVCacheManager:
    """Owns a coordinator."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.coordinator = kv_cache_coordinator.KVCacheCoordinator(kv_cache_config)

    def take_new_block_ids(self) -> list[int]:
        """Drain every manager."""
        return [i for manager in self.coordinator.single_type_managers for i in manager.take_new_block_ids()]
