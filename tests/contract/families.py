# SPDX-License-Identifier: Apache-2.0
"""Kinds of models as their KV-cache groups, and hand-made cache configs of them for the running release."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tests.contract.running_release import fitting, module


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of model, as its KV-cache groups.

    Attributes:
        name: What reports call it.
        specs: Class names in `vllm.v1.kv_cache_interface`, one per KV-cache group.
        zeroing: Whether vLLM zeroes new blocks for it, so that the ids are needed.
        flag_only: Whether the cache's config asks for that although no group has Mamba, as vendors' may.
        connector: Whether external computed blocks can be mixed in.
    """

    name: str
    specs: tuple[str, ...]
    zeroing: bool = False
    flag_only: bool = False
    connector: bool = False


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("full", ("FullAttentionSpec",), connector=True),
        Family("mla", ("MLAAttentionSpec",), connector=True),
        Family("turboquant", ("TQFullAttentionSpec",), connector=True),
        Family("hidden-state", ("HiddenStateCacheSpec",)),
        Family("sliding", ("SlidingWindowSpec",), connector=True),
        Family("chunked-local", ("ChunkedLocalAttentionSpec",)),
        Family("full+sliding", ("FullAttentionSpec", "SlidingWindowSpec")),
        Family("full+cross", ("FullAttentionSpec", "CrossAttentionSpec")),
        Family("full, zeroed", ("FullAttentionSpec",), zeroing=True, flag_only=True),
        Family("full+mamba", ("FullAttentionSpec", "MambaSpec"), zeroing=True),
    )
}


@functools.cache
def families() -> tuple[str, ...]:
    """Names of the families whose spec classes this release has."""
    interface = module("vllm.v1.kv_cache_interface")
    has_flag = hasattr(interface.KVCacheConfig, "needs_kv_cache_zeroing")
    return tuple(
        n for n, f in FAMILIES.items() if all(hasattr(interface, s) for s in f.specs) and (has_flag or not f.flag_only)
    )


def _spec(name: str, block_size: int, *, mamba_cache_mode: str, spec_tokens: int) -> Any:
    import torch  # noqa: PLC0415  only the release's process has it

    cls = getattr(module("vllm.v1.kv_cache_interface"), name)
    latent = name in {"MLAAttentionSpec", "HiddenStateCacheSpec"}
    if name == "MambaSpec":
        return fitting(
            cls,
            block_size=block_size,
            shapes=((16, 16),),
            dtypes=(torch.float32,),
            mamba_cache_mode=mamba_cache_mode,
            num_speculative_blocks=spec_tokens,
        )
    wanted: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 1 if latent else 2,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    if name == "TQFullAttentionSpec":
        wanted["tq_slot_size"] = 64
    if name == "SlidingWindowSpec":
        wanted["sliding_window"] = 3 * block_size
    if name == "ChunkedLocalAttentionSpec":
        wanted["attention_chunk_size"] = 3 * block_size
    return fitting(cls, **wanted)


def kv_cache_config(
    family: str, *, num_blocks: int, block_size: int, mamba_cache_mode: str = "none", spec_tokens: int = 0
) -> Any:
    """A hand-made `KVCacheConfig`: one group per spec of the family, one layer per group, no tensors."""
    interface = module("vllm.v1.kv_cache_interface")
    groups = [
        interface.KVCacheGroupSpec(
            [f"model.layers.{i}.attn"],
            _spec(name, block_size, mamba_cache_mode=mamba_cache_mode, spec_tokens=spec_tokens),
        )
        for i, name in enumerate(FAMILIES[family].specs)
    ]
    cls = interface.KVCacheConfig
    if FAMILIES[family].flag_only:
        cls = type("ZeroedKVCacheConfig", (cls,), {"needs_kv_cache_zeroing": property(lambda _: True)})
    return cls(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
