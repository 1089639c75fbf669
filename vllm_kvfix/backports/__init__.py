# SPDX-License-Identifier: Apache-2.0
"""The upstream fixes that this package brings to older releases, one module each."""

from vllm_kvfix.backports.backport import Backport, Means, Site
from vllm_kvfix.backports.kv_cache_zeroing_gate import BACKPORT as KV_CACHE_ZEROING_GATE

BACKPORTS = (KV_CACHE_ZEROING_GATE,)

__all__ = ["BACKPORTS", "Backport", "Means", "Site"]
