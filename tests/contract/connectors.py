# SPDX-License-Identifier: Apache-2.0
"""KV connectors for the drivers: vLLM's own benchmark connector, and a minimal one that loads asynchronously."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from typing import Any

from tests.contract.running_release import code, module


@functools.cache
def _remote_connector() -> Any:  # noqa: C901  one small class, made when vLLM is there
    """A connector class that holds the tokens that a request names and loads them asynchronously."""
    base = module("vllm.distributed.kv_transfer.kv_connector.v1.base")

    @dataclasses.dataclass
    class RemoteMetadata(base.KVConnectorMetadata):  # type: ignore[misc, name-defined]  # vLLM is Any here
        loads: list[tuple[str, tuple[tuple[int, ...], ...], int]]

    class RemoteConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc, name-defined]  # as above
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            self._asked: set[str] = set()
            self._loads: list[tuple[str, tuple[tuple[int, ...], ...], int]] = []

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            wanted = (request.kv_transfer_params or {}).get("external", 0)
            if request.request_id in self._asked:
                return 0, False
            found = min(wanted, request.num_tokens - 1) - num_computed_tokens
            if found <= 0:
                return 0, False
            return found, code("async", request.request_id) % 3 > 0

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                self._asked.add(request.request_id)
                ids = tuple(tuple(group) for group in blocks.get_block_ids())
                self._loads.append((request.request_id, ids, num_external_tokens))

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            del scheduler_output
            loads, self._loads = self._loads, []
            return RemoteMetadata(loads)

        def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            del request, block_ids
            return False, None

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            del request, block_ids
            return False, None

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

        def wait_for_layer_load(self, layer_name: str) -> None: ...

        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

        def wait_for_save(self) -> None: ...

    return RemoteConnector


@functools.cache
def connector_config(kind: str) -> Any:
    """The `KVTransferConfig` of "bench" (vLLM's DecodeBenchConnector) or "remote" (the class above)."""
    factory = module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    name = "DecodeBenchConnector"
    if kind == "remote":
        name = "KvfixRemoteConnector"
        made = types.ModuleType("kvfix_remote_connector")
        made.KvfixRemoteConnector = _remote_connector()  # type: ignore[attr-defined]  # made for the factory
        sys.modules[made.__name__] = made
        if name not in factory._registry:
            factory.register_connector(name, made.__name__, name)
    return module("vllm.config").KVTransferConfig(kv_connector=name, kv_role="kv_both", engine_id="contract")
