# SPDX-License-Identifier: Apache-2.0
"""A process that looks to us like an engine core: the fake vLLM's scheduler, driven as vLLM drives its own.

Arguments: how it is driven (``busy``, ``idle``, ``paced`` or ``script``), and ids that have leaked already. It prints
``up`` when it runs, and answers each line of its standard input with a JSON line: ``state`` with what is in it, ``steps
N`` after N more steps of an idle one.

It imports nothing of ours.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import queue
import select
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

STOCK = (vars(scheduler_module.Scheduler)["schedule"], vars(SingleTypeKVCacheManager)["take_new_block_ids"])


class Scheduler(scheduler_module.Scheduler):  # type: ignore[misc]  # the fake's, which has no types here
    """With what else an engine core calls; notes who was at work while a step was."""

    def __init__(self) -> None:
        super().__init__(KVCacheConfig([FullAttentionSpec()]))
        self.requests: dict[str, object] = {}
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=3))
        self.given: list[int] = []
        self.torn = 0

    def allocate(self) -> None:
        """Allocate, slowly enough to be caught at it; count how often the list changed hands meanwhile."""
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        before = manager.new_block_ids
        self.given += manager.allocate_new_blocks(2)
        time.sleep(0.0005)
        self.torn += manager.new_block_ids is not before

    def add_request(self) -> None:
        """A request."""

    def finish_requests(self) -> None:
        """Its end."""

    def update_from_output(self) -> None:
        """What follows a step."""

    def has_requests(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.requests)


class EngineCore:
    """Drives the scheduler from a queue, with a thread for its sockets."""

    def __init__(self, *, sockets: bool) -> None:
        self.scheduler = Scheduler()
        if sockets:
            self.input_queue: queue.Queue[int] = queue.Queue()
            threading.Thread(target=self.process_input_sockets, daemon=True).start()
        gc.collect()
        gc.freeze()

    def process_input_sockets(self) -> None:
        """Wait, as vLLM's threads for its sockets do."""
        select.select([], [], [])

    def run_busy_loop(self) -> None:
        """As many steps as the queue says."""
        while True:
            for _ in range(self.input_queue.get()):
                self.scheduler.has_requests()
                self.scheduler.add_request()
                self.scheduler.schedule()
                self.scheduler.update_from_output()

    def keep_pace(self) -> None:
        """As a data-parallel rank without a request does while others have some: it never sleeps in its queue."""
        while not self.scheduler.has_requests():
            time.sleep(0.001)


EngineCore.__module__ = "vllm.v1.engine.core"


class InprocClient:
    """What a script holds of an engine in its own process."""

    def __init__(self, engine_core: EngineCore) -> None:
        self.engine_core = engine_core


InprocClient.__module__ = "vllm.v1.engine.core_client"


def state(core: EngineCore) -> dict[str, Any]:
    """What a test asks for."""
    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    given = list(core.scheduler.given)
    now = (vars(scheduler_module.Scheduler)["schedule"], vars(SingleTypeKVCacheManager)["take_new_block_ids"])
    return {
        "stock": now[0] is STOCK[0] and now[1] is STOCK[1],
        "plain": type(manager.new_block_ids) is list,
        "backlog": len(manager.new_block_ids),
        "in_order": given == list(range(len(given))),
        "steps": len(given) // 2,
        "torn": core.scheduler.torn,
        "own": sorted(set(vars(core.scheduler)) & {"schedule", "add_request", "update_from_output"}),
        "manager": sorted(vars(manager)),
        "threads": sorted(thread.name for thread in threading.enumerate() if "kvfix" in thread.name),
        "main": sorted(name for name in vars(sys.modules["__main__"]) if name in {"run", "threading_", "link"}),
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "vllm_kvfix"),
        "meta_path": len(sys.meta_path),
    }


def main(drive: str, leaked: int) -> None:
    """Run until standard input ends."""
    core = EngineCore(sockets=drive != "script")
    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    manager.new_block_ids.extend(range(1 << 20, (1 << 20) + leaked))
    library = Path(vllm.__file__).with_name("_C.abi3.so")
    mapped = None
    if library.exists():
        with library.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    client = InprocClient(core)
    gc.freeze()  # in vLLM the client is made before its engine core freezes all there is

    def answer() -> None:
        for line in sys.stdin:
            word, _, count = line.strip().partition(" ")
            if word == "steps":
                wanted = len(core.scheduler.given) // 2 + int(count)
                core.input_queue.put(int(count))
                while len(core.scheduler.given) // 2 < wanted:
                    time.sleep(0.001)
            sys.stdout.write(json.dumps(state(core)) + "\n")
            sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=answer, daemon=True).start()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    if drive == "script":
        while client.engine_core or mapped:
            time.sleep(0.05)
    if drive == "paced":
        core.keep_pace()
    if drive == "busy":
        core.input_queue.put(1 << 60)
    core.run_busy_loop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
