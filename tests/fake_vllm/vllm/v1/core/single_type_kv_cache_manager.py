# SPDX-License-Identifier: Apache-2.0
"""The manager of the fake, with the leak."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec


class BlockPool:
    """Hands out block ids for ever."""

    def __init__(self) -> None:
        self.next_id = 0

    def take(self, count: int) -> list[int]:
        """The next ``count`` ids."""
        first, self.next_id = self.next_id, self.next_id + count
        return list(range(first, self.next_id))


class SingleTypeKVCacheManager:
    """Records what it allocates if its spec is of one exact type."""

    def __init__(self, kv_cache_spec: Any, block_pool: BlockPool) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.new_block_ids: list[int] = []

    def allocate_new_blocks(self, count: int) -> list[int]:
        """Allocate ``count`` blocks."""
        blocks = self.block_pool.take(count)
        if type(self.kv_cache_spec) is FullAttentionSpec:
            self.new_block_ids.extend(block for block in blocks)
        return blocks

    def take_new_block_ids(self) -> list[int]:
        """Drain."""
        taken, self.new_block_ids = self.new_block_ids, []
        return taken


MAMBA = MambaSpec
