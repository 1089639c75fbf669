# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002, D102  # a scene overrides hooks of Scene, which says what each is for
"""What grows, jumps or swings and is no leak."""

from __future__ import annotations

import collections
import functools
import gc
import math
from typing import TYPE_CHECKING, Any, ClassVar

from tests.contract.running_release import module
from tests.labelled.clock import DAY, FOUR_HOURS, SIX_HOURS, TEN_HOURS, THREE_HOURS
from tests.labelled.leaks import PictureRequest, blob, cache_pictures
from tests.labelled.scenes import API_SERVER, STANDARD, WORKER, Scene
from tests.labelled.stage import Load

if TYPE_CHECKING:
    from tests.labelled.stage import Stage


class Steady(Scene):
    """Nothing happens but the load."""

    pace = TEN_HOURS


class SteadyApiServer(Steady):
    """The same, in an API server."""

    role = API_SERVER


class SteadyWorker(Steady):
    """The same, in a worker."""

    role = WORKER


class Patched(Scene):
    """The load under which #44490 leaks, with the back-port in force."""

    pace = THREE_HOURS
    options: ClassVar[dict[str, Any]] = STANDARD | {
        "num_blocks": 512 * 70,
        "max_num_batched_tokens": 1 << 19,
        "max_model_len": 1 << 14,
    }
    traffic = Load(requests=50, prompt=6000, answer=4)


class PrefixCache(Scene):
    """The prefix cache fills: prompts that nobody had before, and a pool that holds them for a day."""

    pace = DAY
    options: ClassVar[dict[str, Any]] = STANDARD | {"num_blocks": 450_000, "prefix_caching": True}
    traffic = Load(requests=50, aborted=0.1, prompt=480, distinct=True)


class PrefixCacheFull(PrefixCache):
    """The same in a pool that is full after two hours."""

    pace = SIX_HOURS
    options: ClassVar[dict[str, Any]] = STANDARD | {"num_blocks": 90_000, "prefix_caching": True}


class EncoderCache(Scene):
    """The encoder cache fills with pictures that nobody had before."""

    pace = SIX_HOURS
    entries: ClassVar[int] = 200_000
    traffic = Load(requests=12, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        manager = module("vllm.v1.core.encoder_cache_manager").EncoderCacheManager
        self._cache = manager(self.entries * PictureRequest.embeds)
        stage.scheduler.encoder_cache_manager = self._cache

    def before_tick(self, stage: Stage, tick: int) -> None:
        cache_pictures(self._cache, range((tick + 1000) * 600, (tick + 1001) * 600))
        self._cache.get_freed_mm_hashes()


class EncoderCacheFull(EncoderCache):
    """The same, full after two hours and a half."""

    entries: ClassVar[int] = 45_000


class Overload(Scene):
    """More comes than is served, the queue grows to thousands; then less comes, and it is served."""

    pace = FOUR_HOURS

    def load(self, tick: int) -> Load:
        more = 0.5 <= self.pace.hours(tick) < 1.8
        return Load(requests=120 if more else 4, prompt=900, distinct=True, aborted=0.05, most_steps=4)


class WarmUp(Scene):
    """Caches that fill in the first ten minutes, as kernels are compiled and templates are met; then nothing more."""

    pace = FOUR_HOURS

    def set_up(self, stage: Stage) -> None:
        self._kernels: dict[str, bytes] = {}
        self._native: list[bytearray] = []
        stage.scheduler.kernel_cache = self._kernels

    def before_tick(self, stage: Stage, tick: int) -> None:
        share = 1 - 0.5 ** max(0, tick + 1)
        for number in range(len(self._kernels), round(3000 * share)):
            self._kernels[f"kernel-{number}"] = blob(8000)
        for _ in range(len(self._native), round(600 * share)):
            self._native.append(bytearray(b"\1" * 100_000))


class Steps(Scene):
    """A graph is compiled after half an hour, another after two hours; both stay."""

    pace = FOUR_HOURS

    def set_up(self, stage: Stage) -> None:
        self._graphs: list[bytearray] = []

    def before_tick(self, stage: Stage, tick: int) -> None:
        if tick in {15, 60}:
            self._graphs.append(bytearray(b"\1" * (80 << 20)))


class Cycle:
    """What a request leaves that only the collector finds."""

    def __init__(self, size: int) -> None:
        self.itself = self
        self.parts = [[number] for number in range(400)]
        self.payload = blob(size)


class GcLag(Scene):
    """Each request leaves a reference cycle, old enough that only a full collection takes it."""

    pace = FOUR_HOURS

    def set_up(self, stage: Stage) -> None:
        self._recent: collections.deque[Cycle] = collections.deque(maxlen=400)

    def finished(self, stage: Stage, name: str) -> None:
        self._recent.append(Cycle(4000))


class RareGc(GcLag):
    """The same where the collector was told to come rarely."""

    pace = SIX_HOURS

    def set_up(self, stage: Stage) -> None:
        super().set_up(stage)
        gc.set_threshold(10_000, 10, 5)


class Sawtooth(Scene):
    """Buffers that no container of vLLM's holds, grown for 50 minutes and dropped."""

    pace = SIX_HOURS

    def set_up(self, stage: Stage) -> None:
        self._buffers: list[bytearray] = []

    def before_tick(self, stage: Stage, tick: int) -> None:
        if tick % 25 == 0:
            self._buffers.clear()
        self._buffers.append(bytearray(b"\1" * (2 << 20)))


class SawtoothInContainer(Scene):
    """A list of statistics that is filled for an hour and then sent and cleared."""

    pace = SIX_HOURS

    def set_up(self, stage: Stage) -> None:
        self._pending: list[bytes] = []
        stage.scheduler.pending_stats = self._pending

    def finished(self, stage: Stage, name: str) -> None:
        self._pending.append(blob(30_000))

    def after_tick(self, stage: Stage, tick: int) -> None:
        if tick % 30 == 0:
            self._pending.clear()


class Diurnal(Scene):
    """A day's load, and buffers of the requests that live."""

    pace = DAY

    def set_up(self, stage: Stage) -> None:
        self._buffers: dict[str, bytes] = {}
        stage.scheduler.kv_cache_manager.request_buffers = self._buffers

    def load(self, tick: int) -> Load:
        rate = 6 - 5 * math.cos(2 * math.pi * self.pace.hours(tick) / 24)
        return Load(requests=round(rate), answer=40, most_steps=8, aborted=0.1)

    def arrived(self, stage: Stage, name: str) -> None:
        self._buffers[name] = blob(500_000)

    def finished(self, stage: Stage, name: str) -> None:
        del self._buffers[name]

    def aborted(self, stage: Stage, name: str) -> None:
        del self._buffers[name]


class LogBuffers(Scene):
    """The last lines of a log, in a deque of a given length and in a list that is cut when it is long."""

    pace = SIX_HOURS
    traffic = Load(requests=12, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=300)
        self._rotating: list[bytes] = []
        stage.scheduler.log_lines = self._lines
        stage.scheduler.recent_records = self._rotating

    def stepped(self, stage: Stage) -> None:
        self._lines.append(blob(60_000))
        self._rotating.append(blob(200_000))
        if len(self._rotating) > 75:
            del self._rotating[:40]


class RealLru(Scene):
    """vLLM's own LRU cache, which fills and then evicts."""

    pace = SIX_HOURS
    traffic = Load(requests=20, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        self._cache = module("vllm.utils.cache").LRUCache(6000)
        stage.scheduler.grammar_cache = self._cache

    def arrived(self, stage: Stage, name: str) -> None:
        self._cache.put(name, blob(12_000))


class FunctoolsCache(Scene):
    """A function whose results are cached, at most so many."""

    pace = DAY
    traffic = Load(requests=20, aborted=0.1)

    def set_up(self, stage: Stage) -> None:
        stage.scheduler.tokens_of = functools.lru_cache(maxsize=5000)(lambda name: blob(12_000, len(name)))

    def arrived(self, stage: Stage, name: str) -> None:
        stage.scheduler.tokens_of(name)
