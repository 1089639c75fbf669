# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002, D102  # a scene overrides hooks of Scene, which says what each is for
"""Real leaks, each of a kind of its own, at the places where vLLM and what is plugged into it have had them."""

from __future__ import annotations

import array
import collections
import dataclasses
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from tests.contract.running_release import module
from tests.labelled import truth
from tests.labelled.clock import MINUTES, SIX_HOURS, TEN_HOURS
from tests.labelled.scenes import API_SERVER, STANDARD, WORKER, Scene
from tests.labelled.stage import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.labelled.stage import Stage


def blob(size: int, number: int = 1) -> bytes:
    """So many bytes, not zero, that nothing else shares."""
    return (number & 0xFF or 1).to_bytes(1, "little") * size


class NewBlockIds(Scene):
    """#44490 itself: the ids of all blocks that were ever allocated."""

    pace = MINUTES
    patched = False
    options: ClassVar[dict[str, Any]] = STANDARD | {
        "num_blocks": 512 * 70,
        "max_num_batched_tokens": 1 << 19,
        "max_model_len": 1 << 14,
    }
    traffic = Load(requests=50, prompt=6000, answer=4)

    def set_up(self, stage: Stage) -> None:
        self._manager = stage.driver.managers[0]

    def after_tick(self, stage: Stage, tick: int) -> None:
        self.leaked = 8 * len(self._manager.new_block_ids)

    def addresses(self) -> list[int]:
        return [truth.items_of(self._manager.new_block_ids)]


@dataclasses.dataclass
class TransferState:
    """What somebody wants to know of a request as long as it lives."""

    name: str
    payload: bytes


class OrphansOfAborts(Scene):
    """A side table by request id, which only the normal end of a request clears."""

    traffic = Load(requests=50, aborted=0.3)

    def set_up(self, stage: Stage) -> None:
        self.table: dict[str, TransferState] = {}
        stage.scheduler.transfer_states = self.table

    def arrived(self, stage: Stage, name: str) -> None:
        self.table[name] = TransferState(name, blob(16_000))

    def finished(self, stage: Stage, name: str) -> None:
        del self.table[name]

    def aborted(self, stage: Stage, name: str) -> None:
        self.lost(truth.size_of(name, self.table[name].payload))

    def addresses(self) -> list[int]:
        return [id(state.payload) for state in self.table.values()]


class OrphansInCacheManager(Scene):
    """On the KV-cache manager: numbers of blocks by request id, left behind by aborts."""

    traffic = Load(requests=60, aborted=0.3)

    def set_up(self, stage: Stage) -> None:
        self.table: dict[str, list[int]] = {}
        stage.scheduler.kv_cache_manager.req_to_evicted = self.table

    def arrived(self, stage: Stage, name: str) -> None:
        self.table[name] = [0] * 2000

    def finished(self, stage: Stage, name: str) -> None:
        del self.table[name]

    def aborted(self, stage: Stage, name: str) -> None:
        self.lost(truth.size_of(name, self.table[name]))

    def addresses(self) -> list[int]:
        return [truth.items_of(blocks) for blocks in self.table.values()]


class OrphansInApiServer(OrphansOfAborts):
    """In the API server: the same beside the output processor's own states."""

    role = API_SERVER

    def set_up(self, stage: Stage) -> None:
        self.table = {}
        stage.roots["output_processor"].stream_states = self.table


class ConnectorSet(Scene):
    """A KV connector remembers the hash of every block that it saved."""

    options: ClassVar[dict[str, Any]] = STANDARD | {"connector": "remote"}
    traffic = Load(requests=40, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._saved: set[bytes] = set()
        self._number = 0
        stage.scheduler.connector._saved_hashes = self._saved

    def finished(self, stage: Stage, name: str) -> None:
        for _ in range(80):
            self._number += 1
            key = self._number.to_bytes(8, "little") * 8
            self._saved.add(key)

    def after_tick(self, stage: Stage, tick: int) -> None:
        self.leaked = truth.size_of(self._saved) + len(self._saved) * truth.size_of(bytes(64))

    def addresses(self) -> list[int]:
        return [id(key) for key in self._saved]


class Executor:
    """Runs the model, and keeps what it will answer."""

    def __init__(self) -> None:
        self.pending: collections.deque[Future[list[int]]] = collections.deque()


class EngineCore:
    """What lies around a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.model_executor = Executor()


class DequeOfFutures(Scene):
    """An executor keeps the future of each step, and nobody takes it."""

    def set_up(self, stage: Stage) -> None:
        self._core = EngineCore(stage.scheduler)
        stage.roots["engine_core"] = self._core

    def stepped(self, stage: Stage) -> None:
        future: Future[list[int]] = Future()
        future.set_result([0] * 5000)
        self._core.model_executor.pending.append(future)

    def addresses(self) -> list[int]:
        return [truth.items_of(future.result()) for future in self._core.model_executor.pending]


class WorkerList(Scene):
    """In a worker: a list of what was measured at each step."""

    role = WORKER

    def set_up(self, stage: Stage) -> None:
        self._records: list[bytes] = []
        stage.roots["worker"].model_runner.step_records = self._records

    def stepped(self, stage: Stage) -> None:
        self._records.append(blob(40_000))
        self.lost(truth.size_of(self._records[-1]) + 8)

    def addresses(self) -> list[int]:
        return [id(record) for record in self._records]


class ListOfLists(Scene):
    """A history of all steps: a list of lists, whose numbers live elsewhere, too."""

    def set_up(self, stage: Stage) -> None:
        self._numbers = list(range(1000, 6000))
        self._history: list[list[int]] = []
        stage.scheduler.step_history = self._history

    def stepped(self, stage: Stage) -> None:
        self._history.append(self._numbers[:])
        self.lost(truth.size_of(self._history[-1]) + 8)

    def addresses(self) -> list[int]:
        return [truth.items_of(step) for step in self._history]


class DefaultDict(Scene):
    """A defaultdict that is asked about a request once more, after the request was removed from it."""

    traffic = Load(requests=40, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._table: collections.defaultdict[str, list[bytes]] = collections.defaultdict(list)
        stage.scheduler.kv_cache_manager.waiting_blocks = self._table

    def arrived(self, stage: Stage, name: str) -> None:
        self._table[name].append(b"")

    def finished(self, stage: Stage, name: str) -> None:
        del self._table[name]
        self._table[name].append(blob(8000))
        self.lost(truth.size_of(name, self._table[name], self._table[name][0]))

    def aborted(self, stage: Stage, name: str) -> None:
        del self._table[name]

    def addresses(self) -> list[int]:
        return [id(value[0]) for value in self._table.values()]


class UnboundedLru(Scene):
    """Called a cache, moved to its end at each use, and never evicted from."""

    traffic = Load(requests=40, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._cache: collections.OrderedDict[bytes, bytes] = collections.OrderedDict()
        stage.scheduler.grammar_cache = self._cache

    def arrived(self, stage: Stage, name: str) -> None:
        key, value = name.encode(), blob(8000)
        self._cache[key] = value
        self._cache.move_to_end(key)
        self.lost(truth.size_of(key, value))

    def addresses(self) -> list[int]:
        return [id(value) for value in self._cache.values()]


class ArrayOfTokens(Scene):
    """An array of all numbers that were ever computed."""

    def set_up(self, stage: Stage) -> None:
        self._scores = array.array("d")
        stage.scheduler.scores = self._scores

    def stepped(self, stage: Stage) -> None:
        self._scores.extend([1.0] * 6000)
        self.leaked = 8 * len(self._scores)

    def addresses(self) -> list[int]:
        return [self._scores.buffer_info()[0]]


class Link:
    """An event with slots, which knows the one before it."""

    __slots__ = ("before", "name", "stamp", "what")

    def __init__(self, before: Link | None, name: str) -> None:
        self.before = before
        self.name = name
        self.stamp = float(len(name))
        self.what = (name, self.stamp)


class ChainOfSlots(Scene):
    """Small objects with slots, chained, in a list."""

    def set_up(self, stage: Stage) -> None:
        self._chain: list[Link] = []
        stage.scheduler.kv_cache_manager.coordinator.event_log = self._chain

    def generated(self, stage: Stage, name: str, tokens: int) -> None:
        for _ in range(20 * tokens):
            link = Link(self._chain[-1] if self._chain else None, name)
            self._chain.append(link)
            self.lost(truth.size_of(link, link.stamp, link.what) + 8)

    def addresses(self) -> list[int]:
        return [id(link) for link in self._chain]


def _counter_of_finished() -> Callable[[str], int]:
    seen: list[bytes] = []

    def on_finished(name: str) -> int:
        seen.append(name.encode() * 200)
        return len(seen)

    return on_finished


class Closure(Scene):
    """A callback whose closure remembers all that it was called with."""

    traffic = Load(requests=40, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        stage.scheduler.on_finished = _counter_of_finished()

    def finished(self, stage: Stage, name: str) -> None:
        stage.scheduler.on_finished(name)
        self.lost(len(name) * 200 + 33 + 8)


@dataclasses.dataclass
class Session:
    """What is kept of a tenant."""

    tenant: str
    history: dict[str, bytes] = dataclasses.field(default_factory=dict)


class DictInDataclass(Scene):
    """A dict in a dataclass in a dict of objects: what tenants have asked."""

    traffic = Load(requests=40, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._sessions = {f"tenant-{number}": Session(f"tenant-{number}") for number in range(12)}
        stage.scheduler.sessions = self._sessions

    def finished(self, stage: Stage, name: str) -> None:
        tenant = f"tenant-{stage.totals.requests % 12}"
        self._sessions[tenant].history[name] = blob(8000)
        self.lost(truth.size_of(name, self._sessions[tenant].history[name]))

    def addresses(self) -> list[int]:
        return [id(value) for session in self._sessions.values() for value in session.history.values()]


class PerToken(Scene):
    """Something of each generated token stays."""

    traffic = Load(requests=20, aborted=0.1, answer=12, spread=0.7)

    def set_up(self, stage: Stage) -> None:
        self._logprobs: list[bytes] = []
        stage.scheduler.logprob_records = self._logprobs

    def generated(self, stage: Stage, name: str, tokens: int) -> None:
        for _ in range(tokens):
            self._logprobs.append(blob(1000))
            self.lost(truth.size_of(self._logprobs[-1]) + 8)

    def addresses(self) -> list[int]:
        return [id(record) for record in self._logprobs]


class OnlyUnderLoad(OrphansOfAborts):
    """The side table again, with an hour of load and two idle hours in turn."""

    pace = TEN_HOURS
    busy = Load(requests=60, aborted=0.3)
    idle = Load(requests=0)

    def load(self, tick: int) -> Load:
        return self.busy if self.pace.hours(tick) % 3 < 1 else self.idle


class OnTopOfWarmUp(OrphansOfAborts):
    """The side table again, below caches that fill in the first minutes and are larger than what is lost by then."""

    def set_up(self, stage: Stage) -> None:
        super().set_up(stage)
        self._caches: dict[str, bytes] = {}
        stage.scheduler.kernel_cache = self._caches

    def before_tick(self, stage: Stage, tick: int) -> None:
        for number in range(len(self._caches), round(5000 * (1 - 0.8 ** (tick + 1)))):
            self._caches[f"kernel-{number}"] = blob(8000)


class OnTopOfPrefixCache(OrphansOfAborts):
    """The side table again, while the prefix cache fills."""

    pace = SIX_HOURS
    options: ClassVar[dict[str, Any]] = STANDARD | {"num_blocks": 200_000, "prefix_caching": True}
    traffic = Load(requests=40, aborted=0.3, prompt=320, distinct=True)


class EventsInBlockPool(Scene):
    """Beside caches that have an end, in the block pool: events of requests that nobody publishes."""

    traffic = Load(requests=40, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._events: list[tuple[str, bytes]] = []
        stage.scheduler.kv_cache_manager.block_pool.event_log = self._events

    def finished(self, stage: Stage, name: str) -> None:
        self._events.append((name, blob(8000)))
        self.lost(truth.size_of(self._events[-1], *self._events[-1]) + 8)

    def addresses(self) -> list[int]:
        return [id(event[1]) for event in self._events]


class Picture:
    """An item of a multimodal prompt, as the encoder cache knows it."""

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier


class PictureRequest:
    """A request with one picture, as the encoder cache sees it."""

    embeds = 64

    def __init__(self, number: int) -> None:
        self.request_id = f"picture-{number}"
        self.mm_features = [Picture(f"{number:064x}")]

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Of one picture."""
        del input_id
        return self.embeds


def cache_pictures(cache: Any, numbers: range) -> None:
    """Have the real encoder cache take pictures that nobody had before, of requests that end at once."""
    for number in numbers:
        request = PictureRequest(number)
        if not cache.check_and_update_cache(request, 0):
            if not cache.can_allocate(request, 0, 1 << 30, 0):
                raise AssertionError("no room in the encoder cache")
            cache.allocate(request, 0)
        cache.free(request)


class FreedPictures(Scene):
    """A second encoder cache of vLLM's own class, at a connector that never asks what was evicted."""

    options: ClassVar[dict[str, Any]] = STANDARD | {"connector": "remote"}
    per_tick: ClassVar[int] = 2500

    def set_up(self, stage: Stage) -> None:
        manager = module("vllm.v1.core.encoder_cache_manager").EncoderCacheManager
        self._cache = manager(2000 * PictureRequest.embeds)
        stage.scheduler.connector.encoder_cache_manager = self._cache
        cache_pictures(self._cache, range(2000))

    def before_tick(self, stage: Stage, tick: int) -> None:
        begin = (tick + 1000) * self.per_tick
        cache_pictures(self._cache, range(begin, begin + self.per_tick))
        self.leaked = len(self._cache.freed) * (truth.size_of("0" * 64) + 8)

    def addresses(self) -> list[int]:
        return [id(name) for name in self._cache.freed]
