# SPDX-License-Identifier: Apache-2.0
"""The coordinator of the fake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import BlockPool, SingleTypeKVCacheManager

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVCacheCoordinator:
    """Makes a manager a group."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.block_pool = BlockPool()
        self.single_type_managers = tuple(
            SingleTypeKVCacheManager(spec, self.block_pool) for spec in kv_cache_config.specs
        )
