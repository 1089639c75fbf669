# SPDX-License-Identifier: Apache-2.0
"""What is read off the live objects of vLLM: the attributes of its scheduler, cache managers, pools and requests.

The types are vLLM's, which cannot be imported here: hence ``Any``. What each name means is the same in every release
from 0.17.1 to the newest, unless it says otherwise.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_kvfix import events

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_REASONS = {
    status: events.FINISH_REASONS.index(reason)
    for status, reason in (
        ("FINISHED_STOPPED", "stop"),
        ("FINISHED_LENGTH_CAPPED", "length"),
        ("FINISHED_ABORTED", "abort"),
        ("FINISHED_ERROR", "error"),
        ("FINISHED_REPETITION", "repetition"),
        ("FINISHED_IGNORED", "ignored"),
    )
}
# Managers that give no block back before the request ends: their tables hold no null block.
_KEEPING = frozenset({"FullAttentionManager"})
# Managers that replace blocks by the null block from the front of the table on.
_FROM_THE_FRONT = frozenset({"FullAttentionManager", "SlidingWindowManager", "ChunkedLocalAttentionManager"})


Admission: TypeAlias = "tuple[str, list[list[int]], int]"
"""A request that began to run, or ran again: its id, the ids in its table of each group, the tokens computed before."""


def schedulers_below(thing: Any) -> list[tuple[Any, Any]]:
    """The schedulers that an object of vLLM's leads to, each with the ``EngineCore`` that holds it.

    ``thing`` is anything at all: of what is not vLLM's, no attribute is read, since that could run code.
    """
    if not any(str(base.__module__).partition(".")[0] == "vllm" for base in type(thing).__mro__):
        return []
    found = []
    for path in _TO_A_CORE:
        core = thing
        for name in path:
            core = _own(core).get(name)
        scheduler = _own(core).get("scheduler")
        if "kv_cache_manager" in _own(scheduler):
            found.append((scheduler, core))
    return found


def _own(thing: Any) -> Mapping[str, Any]:
    """What an object holds by itself, without running any code of its class."""
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, dict) else {}


# From an EngineCore, an InprocClient, an LLMEngine and an LLM.
_TO_A_CORE = ((), ("engine_core",), ("engine_core", "engine_core"), ("llm_engine", "engine_core", "engine_core"))


def waits_for_work(core: Any) -> bool | None:
    """Whether the thread that drives an ``EngineCore`` sleeps in its queue, and so is between two steps for sure.

    None where it has no such queue: the engine is driven by a script's own calls.
    """
    work = _own(core).get("input_queue")
    sleepers = getattr(getattr(work, "not_empty", None), "_waiters", None)
    return None if sleepers is None else len(sleepers) > 0


def engine_is_dead(front_end: Any) -> bool:
    """Whether the engine of an ``AsyncLLM`` has died, as that knows.

    Raises:
        AttributeError: It does not know: its engine is in its own process.
    """
    return bool(front_end.engine_core.resources.engine_dead)


STEP_METHODS = ("schedule", "add_request", "finish_requests", "update_from_output")
"""What others call of a ``Scheduler`` to have it work."""
IDLE_METHOD = "has_requests"
"""What the loop of an ``EngineCore`` asks its ``Scheduler`` at each turn, before a step.

A data-parallel rank of a mixture of experts that has no request keeps the pace of the others: it neither enters
``schedule()`` nor sleeps in its queue."""


def backlog(scheduler: Any) -> int:
    """Ids in the lists ``new_block_ids`` of a ``Scheduler``, all groups together."""
    return sum(len(manager.new_block_ids) for manager in managers(coordinator(cache_manager(scheduler))))


def cache_config(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The ``KVCacheConfig`` among the arguments of a coordinator's or cache manager's ``__init__``."""
    return keywords["kv_cache_config"] if "kv_cache_config" in keywords else arguments[0]


def zeroing_needed(cache_config: Any) -> bool:
    """Whether the workers zero new blocks of a cache with this ``KVCacheConfig``."""
    return bool(cache_config.needs_kv_cache_zeroing)


def coordinator(cache_manager: Any) -> Any:
    """The ``KVCacheCoordinator`` of a ``KVCacheManager``."""
    return cache_manager.coordinator


def managers(coordinator: Any) -> tuple[Any, ...]:
    """The ``SingleTypeKVCacheManager`` of each KV-cache group of a ``KVCacheCoordinator``."""
    return coordinator.single_type_managers  # type: ignore[no-any-return]  # vLLM's type


def cache_manager(scheduler: Any) -> Any:
    """The ``KVCacheManager`` of a ``Scheduler``."""
    return scheduler.kv_cache_manager


def has_connector(scheduler: Any) -> bool:
    """Whether a ``Scheduler`` has a connector: requests may hold blocks for it while they wait, or once they ended."""
    return scheduler.connector is not None or getattr(scheduler, "ec_connector", None) is not None


def engine_index(scheduler: Any) -> int:
    """The data-parallel rank of a ``Scheduler``, also of a model whose ranks know nothing of each other."""
    return int(scheduler.vllm_config.parallel_config.data_parallel_index)


def known_requests(scheduler: Any) -> dict[str, Any]:
    """Every ``Request`` that a ``Scheduler`` knows, by its id: waiting, running, or finished with blocks still held."""
    return scheduler.requests  # type: ignore[no-any-return]  # vLLM's type


def finish_reason(request: Any) -> int:
    """Why a ``Request`` ended: the index of it in ``events.FINISH_REASONS``."""
    return _REASONS.get(request.status.name, 0)


def identity(request: Any) -> events.Identity:
    """The id of a ``Request``, and the caller's trace context where the front end handed its headers on."""
    return identity_of(request.request_id, request.trace_headers)


def identity_of(request_id: str, headers: Mapping[str, str] | None) -> events.Identity:
    """As :func:`identity`, of a request's id and its ``trace_headers``."""
    context = events.parse_traceparent(headers.get("traceparent")) if headers else None
    return events.Identity(request_id, context)


def admissions(output: Any) -> list[Admission]:
    """Who began to run, or ran again, in the step of a ``SchedulerOutput``.

    The lists are copied: a worker in the same process extends vLLM's own later.
    """
    made = [
        (row.req_id, [list(ids) for ids in row.block_ids], row.num_computed_tokens) for row in output.scheduled_new_reqs
    ]
    rows = output.scheduled_cached_reqs
    resumed = rows.resumed_req_ids
    if resumed:
        made += [
            (name, [list(ids) for ids in tables], computed)
            for name, tables, computed in zip(rows.req_ids, rows.new_block_ids, rows.num_computed_tokens)  # noqa: B905
            if name in resumed
        ]
    return made


Levels: TypeAlias = "tuple[tuple[int, int], int, Sequence[int]]"
"""Requests (running, waiting); block hashes that the prefix cache would find; the length of ``new_block_ids`` of each
manager that has such a list."""


def levels_reader(scheduler: Any) -> Callable[[Any], Levels]:
    """What reads the :data:`Levels` of a ``Scheduler`` whenever it is called; it does not keep the scheduler alive.

    Of vLLM's own classes it reads what their methods would: between the lines of the scheduler, each call of a function
    that was not called for a while costs as much as reading three attributes.
    """
    pool = cache_manager(scheduler).block_pool
    singles = [single for single in managers(coordinator(cache_manager(scheduler))) if hasattr(single, "new_block_ids")]

    def ask(scheduler: Any) -> Levels:
        counts = scheduler.get_request_counts()
        return counts, len(pool.cached_block_hash_to_block), [len(single.new_block_ids) for single in singles]

    # Which queues vLLM counts differs by release: its own method names them.
    code = getattr(type(scheduler).get_request_counts, "__code__", None)
    named = sorted(set(code.co_names) - {"len", "running"}) if code else []
    queues: list[Any] = [getattr(scheduler, name, None) for name in named]
    own = all(type(queue).__name__ == "FCFSRequestQueue" and isinstance(queue, deque) for queue in queues)
    if not own or len(queues) not in {1, 2} or type(pool).__name__ != "BlockPool":
        return ask
    first, second = (*queues, deque())[:2]
    only, length = singles[0] if len(singles) == 1 else None, deque.__len__

    def read(scheduler: Any) -> Levels:
        counts = len(scheduler.running), length(first) + length(second)
        # After a reset of the prefix cache the map is another one.
        cached = len(pool.cached_block_hash_to_block._cache)  # noqa: SLF001  # what its method reads
        return counts, cached, (len(only.new_block_ids),) if only else [len(single.new_block_ids) for single in singles]

    try:
        return read if read(scheduler)[:2] == ask(scheduler)[:2] else ask
    except AttributeError:
        return ask


class CacheView:
    """The KV cache of one scheduler: its pool, and its table of blocks per request and group."""

    __slots__ = ("_free", "_managers", "_null", "_null_id", "_only", "_pool", "keeping")

    def __init__(self, scheduler: Any) -> None:
        manager = cache_manager(scheduler)
        self._pool = manager.block_pool
        self._null = self._pool.null_block
        self._null_id = self._null.block_id
        self._managers = tuple(managers(coordinator(manager)))
        self._only = self._managers[0] if len(self._managers) == 1 else None
        self._free = self._pool.free_block_queue if type(self._pool).__name__ == "BlockPool" else None
        self.keeping = all(type(single).__name__ in _KEEPING for single in self._managers)

    @property
    def groups(self) -> int:
        """Number of KV-cache groups."""
        return len(self._managers)

    def config(self, scheduler: Any) -> events.Config:
        """What does not change while the engine runs. The pool's null block is left out of its size."""
        return events.Config(
            blocks=self._pool.num_gpu_blocks - 1,
            max_requests=scheduler.max_num_running_reqs,
            max_tokens=scheduler.max_num_scheduled_tokens,
            prefix_caching=bool(self._pool.enable_caching),
            groups=tuple(events.Group(m.block_size, type(m.kv_cache_spec).__name__) for m in self._managers),
        )

    def free(self) -> int:
        """Blocks that can be taken; some may still be found by the prefix cache."""
        if self._free is not None:
            return self._free.num_free_blocks  # type: ignore[no-any-return]  # vLLM's type
        return self._pool.get_num_free_blocks()  # type: ignore[no-any-return]  # vLLM's type

    def lengths(self, request_id: str) -> tuple[int, ...]:
        """Entries in a request's table of each group, null blocks included."""
        if self._only is not None:
            return (len(self._only.req_to_blocks.get(request_id, ())),)
        return tuple(len(single.req_to_blocks.get(request_id, ())) for single in self._managers)

    def held(self, request_id: str, group: int, nulls: int) -> tuple[int, int]:
        """Blocks in a request's table that are not the null block, and the null blocks at the table's front.

        ``nulls`` of those were there before. A window gives blocks back from the front on, so what lies behind the
        first block that is left need not be looked at; every other kind of table is counted through.
        """
        single = self._managers[group]
        table = single.req_to_blocks.get(request_id, ())
        if type(single).__name__ not in _FROM_THE_FRONT:
            return sum(block is not self._null for block in table), 0
        while nulls < len(table) and table[nulls] is self._null:
            nulls += 1
        return len(table) - nulls, nulls

    def real_ids(self, ids: Sequence[int]) -> int:
        """How many of these block ids are not the null block's."""
        return len(ids) if self.keeping else len(ids) - ids.count(self._null_id)

    def real_since(self, request_id: str, group: int, start: int) -> int:
        """Entries of a request's table from ``start`` on that are not the null block."""
        table = self._managers[group].req_to_blocks.get(request_id, ())
        return sum(block is not self._null for block in table[start:])

    def reused(self, found: Sequence[Any], ids: Sequence[int]) -> int:
        """How many of the blocks that the prefix cache ``found`` stand in their places in a table with these ``ids``.

        vLLM may take fewer than it found, may copy the last one, and takes none that a window has left behind.
        """
        taken = len(found)
        if self.keeping and (not taken or (len(ids) >= taken and ids[taken - 1] == found[-1].block_id)):
            return taken
        pairs = zip(found, ids)  # noqa: B905  # the shorter counts
        return sum(block.block_id == block_id != self._null_id for block, block_id in pairs)

    def ids(self, request_id: str) -> list[list[int]]:
        """The ids in a request's table of each group, the null block's included."""
        return [[block.block_id for block in single.req_to_blocks.get(request_id, ())] for single in self._managers]

    def block_ids(self, request_id: str) -> frozenset[int]:
        """The ids of all blocks that a request holds."""
        return frozenset(block_id for ids in self.ids(request_id) for block_id in ids) - {self._null_id}


# -- for the census of containers -------------------------------------------------------------------------------------

# Packages of vLLM in which nothing is kept per request: configuration, models and their weights, compiled code.
_STATELESS = frozenset({
    "assets", "compilation", "config", "envs", "ir", "kernels", "logger", "logging_utils", "model_executor", "models",
    "platforms", "renderers", "sampling_params", "third_party", "tokenizers", "transformers_utils", "triton_utils",
    "usage",
})  # fmt: skip
REQUEST_ID_NAMES = frozenset({"request_id", "req_id", "external_req_id", "parent_req_id"})
"""Attributes by which an object is about one request."""


def stateless(module: str) -> bool:
    """Whether the objects of a class of this module hold no containers that are worth a look."""
    package, _, rest = module.partition(".")
    return package == "vllm" and rest.partition(".")[0] in _STATELESS


def live_ids_of(thing: Any) -> Collection[str]:
    """The ids of the requests that are alive in a scheduler, an engine core, a front end, a worker or a model runner.

    It is vLLM's own table, or a view of it, not a copy; empty where the object has none of those that are known.
    """
    for path in _LIVE_TABLES:
        found = thing
        for name in path:
            found = getattr(found, name, None)
            if found is None:
                break
        else:
            if isinstance(found, dict):
                return found
    return ()


# Where the table of live requests lies: from a Scheduler, an OutputProcessor, a GPUModelRunner of the first kind and of
# the second (also before its states were split off), and from what holds one of those.
_LIVE_TABLES = (
    ("requests",),
    ("request_states",),
    ("req_states", "req_id_to_index"),
    ("scheduler", "requests"),
    ("output_processor", "request_states"),
    ("model_runner", "requests"),
    ("model_runner", "req_states", "req_id_to_index"),
    ("worker", "model_runner", "requests"),
    ("worker", "model_runner", "req_states", "req_id_to_index"),
)


def known_bounds(class_name: str, attributes: Mapping[str, Any]) -> dict[str, int]:
    """The most entries of containers below an object of a class of vLLM's, by the path from that object on.

    ``attributes`` are the object's own. A path of ``*`` stands for all containers that it has itself.
    """
    if class_name == "EncoderCacheManager":
        return _encoder_bounds(attributes)
    source, names = _BOUNDS.get(class_name, ("", ()))
    bound = attributes.get(source)
    return dict.fromkeys(names, bound) if type(bound) is int and bound > 0 else {}


def _encoder_bounds(attributes: Mapping[str, Any]) -> dict[str, int]:
    """The size of an encoder's cache is in embeddings: as many items as fit if they are as large as those in it now."""
    size, free, cached = (attributes.get(name) for name in ("cache_size", "num_free_slots", "cached"))
    if type(size) is not int or type(free) is not int or not isinstance(cached, dict) or not 0 <= free < size:
        return {}
    number = dict.__len__(cached)
    return dict.fromkeys(("cached", "freeable"), -(-size * number // (size - free))) if number else {}


_BOUNDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "BlockPool": (
        "num_gpu_blocks",
        ("blocks", "cached_block_hash_to_block", "cached_block_hash_to_block._cache", "cached_block_hashes_by_block"),
    ),
    "Scheduler": ("max_num_running_reqs", ("running",)),
    "AsyncScheduler": ("max_num_running_reqs", ("running",)),
    "InputBatch": ("max_num_reqs", ("*",)),
    "RequestState": ("max_num_reqs", ("req_id_to_index", "index_to_req_id", "free_indices")),
}
