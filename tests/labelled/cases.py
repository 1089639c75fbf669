# SPDX-License-Identifier: Apache-2.0
"""The cases, each with what is to be found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests import releases
from tests.labelled import harmless, leaks, native
from vllm_kvfix_sidecar.verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.labelled.scenes import Scene

HEAP, ANONYMOUS, SHARED = "heap", "anonymous", "shared_memory"
REQUEST, ABORT, TOKEN, BLOCK, STEP = "request", "abort", "generated_token", "block", "step"
TOTALS = {REQUEST: "requests", ABORT: "aborts", TOKEN: "generated_tokens", BLOCK: "blocks", STEP: "steps"}


@dataclass(frozen=True)
class Case:
    """A scene and what is to be found of it.

    Attributes:
        name: Its own, a file name.
        scene: What is played.
        kinds: What the verdict may be at the end; of a leak, at some time; none of them is an alarm where `leak` is
            false, and then no verdict may be one at any time.
        leak: Whether something is lost for ever.
        category: The mappings that grow, in the words of `events.CATEGORIES`; None: none is to be named. Held against
            where the scene's own objects lie, if it says so.
        containers: What a culprit's path may end with; none: no container is to blame.
        follows: The driver of the load that the growth follows; None: none, or it does not matter.
        unit: The driver whose bytes for each unit are compared with the truth; None: that which it follows.
        release: Of vLLM.
    """

    name: str
    scene: type[Scene]
    kinds: frozenset[Kind]
    leak: bool
    category: str | None = None
    containers: tuple[str, ...] = ()
    follows: str | None = None
    unit: str | None = None
    release: str = releases.ENGINE_RELEASE

    @property
    def role(self) -> str:
        """The process that it happens in."""
        return self.scene.role


def _leak(name: str, scene: type[Scene], category: str, *containers: str, follows: str | None, **more: str) -> Case:
    return Case(name, scene, frozenset({Kind.UNBOUNDED}), True, category, containers, follows, **more)  # noqa: FBT003  a field


def _native(name: str, scene: type[Scene], category: str, kind: Kind = Kind.UNEXPLAINED) -> Case:
    return Case(name, scene, frozenset({kind}), True, category, unit=None if kind is Kind.RETAINED else REQUEST)  # noqa: FBT003  a field


def _harmless(name: str, scene: type[Scene], *kinds: Kind) -> Case:
    return Case(name, scene, frozenset(kinds), False)  # noqa: FBT003  a field


_CALM = (Kind.STEADY, Kind.WARMING)
_FILLS = (Kind.STEADY, Kind.WARMING, Kind.BOUNDED)
_LIST = "single_type_managers[0].new_block_ids"

CASES: tuple[Case, ...] = (
    *(
        _leak(f"new-block-ids-{release}", leaks.NewBlockIds, ANONYMOUS, _LIST, follows=BLOCK, release=release)
        for release in ("0.17.1", "0.20.0", "0.23.0", "0.25.1")
    ),
    _leak("orphans-of-aborts", leaks.OrphansOfAborts, HEAP, "scheduler.transfer_states", follows=ABORT),
    _leak(
        "orphans-in-cache-manager",
        leaks.OrphansInCacheManager,
        HEAP,
        "kv_cache_manager.req_to_evicted",
        "kv_cache_manager.req_to_evicted[*]",
        follows=ABORT,
    ),
    _leak("orphans-in-api-server", leaks.OrphansInApiServer, HEAP, "output_processor.stream_states", follows=ABORT),
    _leak("connector-set", leaks.ConnectorSet, ANONYMOUS, "connector._saved_hashes", follows=REQUEST),
    _leak("deque-of-futures", leaks.DequeOfFutures, HEAP, "model_executor.pending", "pending[*]._result", follows=STEP),
    _leak("worker-list", leaks.WorkerList, HEAP, "worker.model_runner.step_records", follows=STEP),
    _leak("list-of-lists", leaks.ListOfLists, HEAP, "step_history", "step_history[*]", follows=STEP),
    _leak("defaultdict", leaks.DefaultDict, HEAP, "waiting_blocks", "waiting_blocks[*]", follows=REQUEST),
    _leak("unbounded-lru", leaks.UnboundedLru, HEAP, "grammar_cache", follows=REQUEST),
    _leak("array", leaks.ArrayOfTokens, ANONYMOUS, "scheduler.scores", follows=STEP),
    _leak("chain-of-slots", leaks.ChainOfSlots, ANONYMOUS, "coordinator.event_log", follows=TOKEN),
    _leak("closure", leaks.Closure, HEAP, "seen", follows=REQUEST),
    _leak("dict-in-dataclass", leaks.DictInDataclass, HEAP, "sessions[*].history", follows=REQUEST),
    _leak("per-token", leaks.PerToken, HEAP, "scheduler.logprob_records", follows=TOKEN),
    _leak("only-under-load", leaks.OnlyUnderLoad, HEAP, "scheduler.transfer_states", follows=ABORT),
    _leak("on-top-of-warm-up", leaks.OnTopOfWarmUp, HEAP, "scheduler.transfer_states", follows=ABORT),
    _leak("on-top-of-prefix-cache", leaks.OnTopOfPrefixCache, HEAP, "scheduler.transfer_states", follows=ABORT),
    _leak("events-in-block-pool", leaks.EventsInBlockPool, HEAP, "block_pool.event_log", follows=REQUEST),
    _leak("freed-pictures", leaks.FreedPictures, ANONYMOUS, "encoder_cache_manager.freed", follows=None),
    _native("malloc", native.Malloc, HEAP),
    _native("malloc-in-worker", native.MallocInWorker, HEAP),
    _native("malloc-in-thread", native.MallocInThread, HEAP),
    _native("mmap", native.AnonymousMmap, ANONYMOUS),
    _native("memfd", native.Memfd, SHARED),
    _native("retained-after-burst", native.RetainedAfterBurst, HEAP, Kind.RETAINED),
    _native("fragmentation", native.Fragmentation, HEAP, Kind.RETAINED),
    _harmless("steady", harmless.Steady, Kind.STEADY),
    _harmless("steady-api-server", harmless.SteadyApiServer, Kind.STEADY),
    _harmless("steady-worker", harmless.SteadyWorker, Kind.STEADY),
    _harmless("patched", harmless.Patched, Kind.STEADY, Kind.WARMING),
    _harmless("prefix-cache-fills", harmless.PrefixCache, Kind.BOUNDED),
    _harmless("prefix-cache-full", harmless.PrefixCacheFull, *_FILLS),
    _harmless("encoder-cache-fills", harmless.EncoderCache, Kind.BOUNDED),
    _harmless("encoder-cache-full", harmless.EncoderCacheFull, *_FILLS),
    _harmless("overload", harmless.Overload, *_FILLS, Kind.RETAINED),
    _harmless("warm-up", harmless.WarmUp, *_CALM),
    _harmless("steps", harmless.Steps, *_CALM),
    _harmless("gc-lag", harmless.GcLag, *_CALM),
    _harmless("rare-gc", harmless.RareGc, *_CALM),
    _harmless("sawtooth", harmless.Sawtooth, *_CALM),
    _harmless("sawtooth-in-container", harmless.SawtoothInContainer, *_CALM),
    _harmless("diurnal", harmless.Diurnal, *_FILLS),
    _harmless("log-buffers", harmless.LogBuffers, *_FILLS),
    _harmless("lru", harmless.RealLru, *_FILLS),
    _harmless("functools-lru", harmless.FunctoolsCache, *_FILLS),
)
BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}
