# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001  a folder for PYTHONPATH, not a package
"""Watches from inside the engine core how long ``new_block_ids`` is: a measuring tool of the demo and of the tests.

A vLLM plugin of its own, which needs nothing else of this package, so that runs with and without the fix are measured
alike. It appends one JSON line to the file named by ``KVFIX_PROBE_FILE``, at most each ``INTERVAL_S`` and at the end
of a scheduler step, when no list is half written: ``{"time": Unix seconds, "pid": …, "steps": scheduler steps so far,
"allocated": blocks handed out so far, "backlog": [length of new_block_ids of each manager]}``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

FILE_VARIABLE = "KVFIX_PROBE_FILE"
INTERVAL_S = 0.5


class _Counts:
    """What has happened in this process so far."""

    def __init__(self) -> None:
        self.steps = 0
        self.allocated = 0
        self.next_write = 0.0


_counts = _Counts()


def register() -> None:
    """Count and sample from now on, if the environment names a file; the entry point that vLLM calls."""
    file = os.environ.get(FILE_VARIABLE)
    if file and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(file))


def _watch_pool(module: ModuleType) -> None:
    get_new_blocks = module.BlockPool.get_new_blocks

    @functools.wraps(get_new_blocks)
    def counted(self: Any, num_blocks: int) -> Any:
        _counts.allocated += num_blocks
        return get_new_blocks(self, num_blocks)

    module.BlockPool.get_new_blocks = counted


def _watch_scheduler(module: ModuleType, file: str) -> None:
    update_from_output = module.Scheduler.update_from_output

    @functools.wraps(update_from_output)
    def sampled(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update_from_output(self, *args, **kwargs)
        _counts.steps += 1
        now = time.time()
        if now >= _counts.next_write:
            _counts.next_write = now + INTERVAL_S
            _write(file, now, self)
        return result

    module.Scheduler.update_from_output = sampled


def _write(file: str, now: float, scheduler: Any) -> None:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    sample = {
        "time": now,
        "pid": os.getpid(),
        "steps": _counts.steps,
        "allocated": _counts.allocated,
        "backlog": [len(manager.new_block_ids) for manager in managers],
    }
    # One short write to a file opened for appending: lines of several engine cores do not mix.
    with open(file, "a", encoding="utf-8") as lines:  # noqa: PTH123  no more modules than needed in vLLM's process
        lines.write(json.dumps(sample) + "\n")


class _Finder:
    """Lets the other finders find the two modules, and acts once they have run."""

    def __init__(self, file: str) -> None:
        self._asking = False
        self._waiting: dict[str, Callable[[ModuleType], None]] = {
            "vllm.v1.core.block_pool": _watch_pool,
            "vllm.v1.core.sched.scheduler": functools.partial(_watch_scheduler, file=file),
        }
        for name in [name for name in self._waiting if name in sys.modules]:
            self._waiting.pop(name)(sys.modules[name])

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return what the other finders say, with a loader that calls us when the module has run."""
        del path, target
        if self._asking or name not in self._waiting:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                act = self._waiting.pop(name, None)
                if act is not None:
                    act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # the loader is this module's own
        return spec
