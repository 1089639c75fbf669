# SPDX-License-Identifier: Apache-2.0
"""What people run beside or instead of vLLM's own classes, reduced to what matters to the back-port.

Schedulers that override `schedule()` whole, coordinators and cache managers that skip `super().__init__()`, and
plugins that wrap the same methods as ours. Made for the release in this process, when called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from tests.contract import running_release

if TYPE_CHECKING:
    from collections.abc import Iterator

WRAPPED = (
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "__init__"),
    ("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", "__init__"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", "__init__"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", "allocate_new_blocks"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", "take_new_block_ids"),
)


@contextlib.contextmanager
def installed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced for a while, as a plugin from outside would for ever."""
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@functools.cache
def accepted_by_managers() -> frozenset[str]:
    """Names of the arguments that this release's single-type managers take; asked first while all is stock."""
    module = running_release.module("vllm.v1.core.single_type_kv_cache_manager")
    functions = (module.get_manager_for_kv_cache_spec, module.SingleTypeKVCacheManager.__init__)
    return frozenset(name for f in functions for name in inspect.signature(f).parameters)


@functools.cache
def accepted_by_coordinators() -> frozenset[str]:
    """Names of the arguments that this release's coordinators take; asked first while all is stock."""
    return frozenset(
        inspect.signature(
            running_release.module("vllm.v1.core.kv_cache_coordinator").get_kv_cache_coordinator
        ).parameters
    )


def scheduler_class(*, starts_steps: bool) -> Any:
    """A scheduler that overrides `schedule()` whole: first come first served, no preemption, never `super()`.

    Like vLLM's it takes the ids to zero if the model needs that, and leaves them alone if not.

    Args:
        starts_steps: Whether it calls `new_step_starts()`; some do, some do not.
    """
    base = running_release.module("vllm.v1.core.sched.scheduler").Scheduler
    outputs = running_release.module("vllm.v1.core.sched.output")
    running = running_release.module("vllm.v1.request").RequestStatus.RUNNING

    class OwnScheduler(base):  # type: ignore[misc, valid-type]  # vLLM is Any here
        def schedule(self, *_args: Any, **_kwargs: Any) -> Any:
            cache = self.kv_cache_manager
            if starts_steps:
                cache.new_step_starts()
            budget = self.max_num_scheduled_tokens
            scheduled: dict[str, int] = {}
            for request in list(self.running):
                wanted = min(request.num_tokens - request.num_computed_tokens, budget)
                if wanted > 0 and cache.allocate_slots(request, wanted) is not None:
                    scheduled[request.request_id] = wanted
                    budget -= wanted
            while self.waiting and budget > 0 and len(self.running) < self.max_num_running_reqs:
                request = self.waiting.peek_request()
                wanted = min(request.num_tokens, budget)
                if cache.allocate_slots(request, wanted) is None:
                    break
                self.waiting.pop_request()
                request.status = running
                self.running.append(request)
                scheduled[request.request_id] = wanted
                budget -= wanted
            output = outputs.SchedulerOutput.make_empty()
            output.num_scheduled_tokens = scheduled
            output.total_num_scheduled_tokens = sum(scheduled.values())
            output.finished_req_ids = self.finished_req_ids
            if self.needs_kv_cache_zeroing:
                output.new_block_ids_to_zero = cache.take_new_block_ids() or None
            self._update_after_schedule(output)
            return output

    return OwnScheduler


def coordinator_class() -> Any:
    """A coordinator, without prefix cache, that makes its managers itself and never calls `super().__init__()`."""
    coordinators = running_release.module("vllm.v1.core.kv_cache_coordinator")
    managers = running_release.module("vllm.v1.core.single_type_kv_cache_manager")
    pools = running_release.module("vllm.v1.core.block_pool")

    class OwnCoordinator(coordinators.KVCacheCoordinatorNoPrefixCache):  # type: ignore[misc, name-defined]  # Any
        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)
            self.enable_caching = False
            self.eagle_group_ids: set[int] = set()
            self.retention_interval = None
            config = self.kv_cache_config
            self.block_pool = running_release.fitting(
                pools.BlockPool,
                num_gpu_blocks=config.num_blocks,
                enable_caching=False,
                hash_block_size=given["hash_block_size"],
                enable_kv_cache_events=False,
            )
            for_all = {k: v for k, v in given.items() if k in accepted_by_managers()}
            for_all |= {"enable_caching": False, "block_pool": self.block_pool}
            self.single_type_managers = tuple(
                managers.get_manager_for_kv_cache_spec(kv_cache_spec=g.kv_cache_spec, kv_cache_group_id=i, **for_all)
                for i, g in enumerate(config.kv_cache_groups)
            )
            self.num_single_type_manager = len(self.single_type_managers)

    return OwnCoordinator


def cache_manager_class() -> Any:
    """A `KVCacheManager` that sets itself up and never calls `super().__init__()`."""
    module = running_release.module("vllm.v1.core.kv_cache_manager")

    class OwnCacheManager(module.KVCacheManager):  # type: ignore[misc, name-defined]  # vLLM is Any here
        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)
            self.prefix_cache_stats = None
            self.watermark_blocks = 0
            self.kv_cache_event_metadata = ()
            for_coordinator = {k: v for k, v in given.items() if k in accepted_by_coordinators()}
            self.coordinator = module.get_kv_cache_coordinator(**for_coordinator)
            self.block_pool = self.coordinator.block_pool
            self.num_kv_cache_groups = len(self.kv_cache_config.kv_cache_groups)
            self.empty_kv_cache_blocks = module.KVCacheBlocks(tuple(() for _ in range(self.num_kv_cache_groups)))

    return OwnCacheManager


@contextlib.contextmanager
def installed_classes(*, coordinator: bool, cache_manager: bool) -> Iterator[None]:
    """The classes from outside in place of vLLM's, where vLLM looks them up."""
    with contextlib.ExitStack() as stack:
        if coordinator:
            module = running_release.module("vllm.v1.core.kv_cache_manager")
            stack.enter_context(installed(module, "get_kv_cache_coordinator", coordinator_class()))
        if cache_manager:
            module = running_release.module("vllm.v1.core.sched.scheduler")
            stack.enter_context(installed(module, "KVCacheManager", cache_manager_class()))
        yield


def _wrapper(original: Any, calls: list[str], *, wraps: bool) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return functools.wraps(original)(replacement) if wraps else replacement


@contextlib.contextmanager
def wrapped(*, wraps: bool) -> Iterator[list[str]]:
    """Another plugin's wrappers around every method of `WRAPPED`; gives the names of the methods called so far.

    Args:
        wraps: Whether it uses `functools.wraps`; not all do.
    """
    calls: list[str] = []
    with contextlib.ExitStack() as stack:
        for module, cls, name in WRAPPED:
            owner = getattr(running_release.module(module), cls)
            stack.enter_context(installed(owner, name, _wrapper(owner.__dict__[name], calls, wraps=wraps)))
        yield calls
