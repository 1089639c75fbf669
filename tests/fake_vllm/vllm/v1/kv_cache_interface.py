# SPDX-License-Identifier: Apache-2.0
"""Specs and config of the fake."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FullAttentionSpec:
    """Records."""


@dataclass
class SinkFullAttentionSpec(FullAttentionSpec):
    """Does not record: the test is on the exact type."""


@dataclass
class SlidingWindowSpec:
    """Does not record."""


@dataclass
class MambaSpec:
    """Its presence makes the workers zero blocks."""


@dataclass
class KVCacheConfig:
    """The specs of a cache, one a group."""

    specs: list[object]

    @property
    def has_mamba_layers(self) -> bool:
        """Whether any group is Mamba's."""
        return any(isinstance(spec, MambaSpec) for spec in self.specs)

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether workers zero new blocks."""
        return self.has_mamba_layers
