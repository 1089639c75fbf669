# SPDX-License-Identifier: Apache-2.0
"""Back-port of vLLM PR #44490: KV-cache block ids are kept only where somebody zeroes the blocks.

*What goes wrong, and how does a user see it?* Since PR #35219 each ``SingleTypeKVCacheManager`` appends the id of every
block it allocates to ``new_block_ids``, for the workers to zero. Only models with Mamba layers zero blocks, and only
for them does ``Scheduler.schedule`` drain the list. For all others it grows by 8 bytes a block until the process ends:
host memory creeps up for days. ``gc.freeze()`` hides the list from heap tools.

*Why patch rather than upgrade?* Drivers, validated model quality and vendor builds pin releases.

*Which upstream change, and how does this differ?* PR #44490, first released in 0.26.0, in four parts: the managers take
``needs_kv_cache_zeroing`` and derive ``_record_new_block_ids``; recording asks it; the coordinator hands the flag on;
``schedule`` drains each step. Here the gate is the list itself: a manager that must not record holds a list that keeps
nothing, so the recording lines stay upstream's own, and cost less where they record many. Managers also learn it from
``KVCacheManager.__init__``, for coordinators from outside vLLM that skip the base class; and a manager whom nobody
told anything still records beside a Mamba manager of the same block pool.

*What is replaced, and why not less?* Three constructors, ``take_new_block_ids`` (stock, it swaps in a plain list, and
one stray call would bring the leak back) and ``Scheduler.schedule`` (reaches engines that were built before us).
No body of upstream's is copied.

*How do we notice that it is obsolete?* tests/contract fails with "delete me" once no supported release is affected.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from vllm_kvfix import faults, live, upstream
from vllm_kvfix.backports.backport import Backport, Means, Site
from vllm_kvfix.patching import class_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import SupportsIndex

    from vllm_kvfix.upstream import Sources

# Ids given back a step where a list had already grown: some 0.2 ms of work; 50 million at once took half a second.
RELEASED_PER_STEP = 65_536


class DiscardedBlockIds(list[int]):
    """The ``new_block_ids`` of a manager that must not record: always empty, whatever is added."""

    __slots__ = ()

    def append(self, _: int, /) -> None:
        """Keep nothing."""

    def extend(self, _: Iterable[int], /) -> None:
        """Keep nothing, and do not run the generator."""

    def insert(self, _: SupportsIndex, __: int, /) -> None:
        """Keep nothing."""

    def __iadd__(self, _: Iterable[int]) -> DiscardedBlockIds:  # type: ignore[override,misc]  # noqa: PYI034  # Self is 3.11
        """Keep nothing."""
        return self


class Gate:
    """Decides which managers record, and holds what is left of lists that had grown before it came."""

    def __init__(self, announce: Callable[[], None]) -> None:
        """``announce`` is called once, when the gate is first in force: a manager is made, or a grown list is cut."""
        self._announce: Callable[[], None] | None = announce
        self._leftovers: list[list[int]] = []
        self._pool_managers: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
        self.recorded_types: tuple[type, ...] = ()
        self.mamba_type: type = type(None)

    def set(self, manager: Any, *, needs_zeroing: bool) -> None:
        """Tell ``manager`` whether the workers zero its new blocks, as upstream's ``__init__`` does from 0.26.0 on."""
        records = needs_zeroing and type(manager.kv_cache_spec) in self.recorded_types
        ids = manager.new_block_ids
        if records and type(ids) is DiscardedBlockIds:
            manager.new_block_ids = []
        elif not records and type(ids) is not DiscardedBlockIds:
            manager.new_block_ids = DiscardedBlockIds()
            if type(ids) is list and ids:
                self._leftovers.append(ids)
        manager._record_new_block_ids = records  # noqa: SLF001  # the attribute that the pull request adds
        if self._announce is not None:
            announce, self._announce = self._announce, None
            announce()

    def set_untold(self, manager: Any) -> None:
        """Have ``manager`` record only beside a Mamba manager of its block pool; whoever knows the flag sets it later.

        A pool's groups are made one after another, so a Mamba manager opens the gate of those made before it.
        """
        siblings = self._pool_managers.setdefault(manager.block_pool, WeakSet())
        siblings.add(manager)
        if any(isinstance(sibling.kv_cache_spec, self.mamba_type) for sibling in siblings):
            for sibling in siblings:
                self.set(sibling, needs_zeroing=True)
        else:
            self.set(manager, needs_zeroing=False)

    def set_all(self, cache_config: Any, coordinator: Any) -> None:
        """Hand the flag of a ``KVCacheConfig`` to every manager of a coordinator."""
        needs_zeroing = live.zeroing_needed(cache_config)
        for manager in live.managers(coordinator):
            self.set(manager, needs_zeroing=needs_zeroing)

    def before_zeroing_step(self, scheduler: Any) -> None:
        """Have managers record whose scheduler says that blocks are zeroed, should its cache's config say otherwise."""
        try:
            for manager in live.managers(live.coordinator(scheduler.kv_cache_manager)):
                shut = type(manager.new_block_ids) is DiscardedBlockIds
                if shut and type(manager.kv_cache_spec) in self.recorded_types:
                    self.set(manager, needs_zeroing=True)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            faults.note("Scheduler.schedule", error)

    def after_step(self, scheduler: Any) -> None:
        """Empty every list of a scheduler that zeroes nothing; whoever had one to empty gets its gate closed.

        Runs after every step, so it goes straight along the attributes: accessors would double its cost.
        """
        try:
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
                if manager.new_block_ids:
                    self.set(manager, needs_zeroing=False)
            if self._leftovers:
                self.release()
        except AttributeError:
            # A cache manager from outside vLLM without these parts: the call that upstream makes is all there is.
            self._drain_whole(scheduler)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            faults.note("Scheduler.schedule", error)

    @staticmethod
    def _drain_whole(scheduler: Any) -> None:
        try:
            scheduler.kv_cache_manager.take_new_block_ids()
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            faults.note("Scheduler.schedule", error)

    def release(self) -> int:
        """Give back some of what piled up before we came, ``RELEASED_PER_STEP`` ids a call; returns how many are left.

        The step path and another thread may both call it.
        """
        with contextlib.suppress(IndexError, ValueError):  # the other one was faster
            ids = self._leftovers[-1]
            del ids[-RELEASED_PER_STEP:]
            if not ids:
                self._leftovers.remove(ids)
        return sum(map(len, self._leftovers))

    def heal(self, scheduler: Any) -> None:
        """Tell the managers of a live scheduler what they would have been told, had they been made under the gate."""
        for manager in live.managers(live.coordinator(live.cache_manager(scheduler))):
            self.set(manager, needs_zeroing=scheduler.needs_kv_cache_zeroing)

    @staticmethod
    def unheal(scheduler: Any) -> None:
        """Have the managers of a live scheduler record as stock."""
        for manager in live.managers(live.coordinator(live.cache_manager(scheduler))):
            if type(manager.new_block_ids) is DiscardedBlockIds:
                manager.new_block_ids = []
            vars(manager).pop(upstream.GATE, None)


def _manager_init(
    gate: Gate, spec_names: tuple[str, ...], module: ModuleType, original: Callable[..., Any]
) -> Callable[..., Any]:
    gate.recorded_types = tuple(class_of(module, name) for name in spec_names)
    gate.mamba_type = class_of(module, upstream.MAMBA_SPEC_CLASS)

    def __init__(self: Any, *args: Any, needs_kv_cache_zeroing: bool = False, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        try:
            if needs_kv_cache_zeroing:
                gate.set(self, needs_zeroing=True)
            else:
                gate.set_untold(self)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            faults.note("SingleTypeKVCacheManager.__init__", error)

    signature = _signature(original)
    flag = inspect.Parameter(upstream.FLAG, inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
    parameters = sorted([*signature.parameters.values(), flag], key=lambda parameter: parameter.kind)
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # PEP 362
    return __init__


def _signature(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """The signature of ``function``; ``(*args, **kwargs)`` where it tells none, as compiled wrappers may."""
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: (args, kwargs))


def _take_new_block_ids(_: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    def take_new_block_ids(self: Any) -> list[int]:
        if type(self.new_block_ids) is DiscardedBlockIds:
            return []
        return original(self)  # type: ignore[no-any-return]  # vLLM's function

    return take_new_block_ids


def _coordinator_init(gate: Gate, _: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        try:
            gate.set_all(live.cache_config(args, kwargs), self)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            faults.note("KVCacheCoordinator.__init__", error)

    return __init__


def _cache_manager_init(gate: Gate, _: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        try:
            gate.set_all(live.cache_config(args, kwargs), live.coordinator(self))
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            faults.note("KVCacheManager.__init__", error)

    return __init__


def _schedule(gate: Gate, _: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    # Passing arguments on by * and ** costs more than all the rest, so the two signatures of the affected releases have
    # a wrapper each; whatever another plugin may have put there has the third.
    def without_arguments(self: Any) -> Any:
        if self.needs_kv_cache_zeroing:
            gate.before_zeroing_step(self)
            return original(self)
        output = original(self)
        gate.after_step(self)
        return output

    def with_throttle(self: Any, throttle_prefills: bool = False) -> Any:  # noqa: FBT001,FBT002  # upstream's own
        if self.needs_kv_cache_zeroing:
            gate.before_zeroing_step(self)
            return original(self, throttle_prefills)
        output = original(self, throttle_prefills)
        gate.after_step(self)
        return output

    def with_any(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.needs_kv_cache_zeroing:
            gate.before_zeroing_step(self)
            return original(self, *args, **kwargs)
        output = original(self, *args, **kwargs)
        gate.after_step(self)
        return output

    # Of the function itself: a wrapper of another plugin's may take more than what it wraps.
    parameters = _signature(original, follow_wrapped=False).parameters.values()
    match [(parameter.name, parameter.default) for parameter in parameters]:
        case [("self", _)]:
            return without_arguments
        case [("self", _), ("throttle_prefills", False)]:
            return with_throttle
        case _:
            return with_any


def _prepare(sources: Sources, announce: Callable[[], None]) -> Means:
    gate = Gate(announce)
    manager_init = partial(_manager_init, gate, upstream.recorded_specs(sources))
    sites = (
        Site(upstream.MANAGERS_MODULE, upstream.MANAGER_CLASS, "__init__", manager_init),
        Site(upstream.MANAGERS_MODULE, upstream.MANAGER_CLASS, "take_new_block_ids", _take_new_block_ids),
        Site(upstream.COORDINATOR_MODULE, "KVCacheCoordinator", "__init__", partial(_coordinator_init, gate)),
        Site(upstream.CACHE_MANAGER_MODULE, "KVCacheManager", "__init__", partial(_cache_manager_init, gate)),
        Site(upstream.SCHEDULER_MODULE, "Scheduler", "schedule", partial(_schedule, gate)),
    )
    return Means(sites, gate.heal, gate.unheal, gate.release)


BACKPORT = Backport(
    name="kv-cache-zeroing-gate",
    pull_request=upstream.PULL_REQUEST,
    issue=upstream.ISSUE,
    why="host memory of the engine core grows with every KV-cache block allocated, until it is OOM-killed",
    affected=upstream.AFFECTED,
    first_fixed=upstream.FIRST_FIXED,
    targets=upstream.TARGETS,
    missing_features=upstream.missing_features,
    prepare=_prepare,
)
