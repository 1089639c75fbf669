# SPDX-License-Identifier: Apache-2.0
"""Makes up a day in the life of a process, as the sidecar would have seen it, with what is true of it.

Each class of ``CLASSES`` draws its parameters from wide ranges by its seed: the same seed, the same life. A sample each
10 s is kept for ten minutes, each 30 s for two hours, each five minutes for two days, with the least value in between;
the censuses come at other times than the load, the maps once a minute.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_kvfix_sidecar.observed import ContainerHistory, Limit, ProcessHistory, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = NDArray[np.float64]

STEP = 10
DAY = 86400
HOUR = 3600.0
MIB, GIB = float(1 << 20), float(1 << 30)
COUNT = DAY // STEP
TIME: Array = np.arange(COUNT, dtype=np.float64) * STEP
START = 1000.0  # on the clock of the series
# Samples, counted back from now, that are kept as they are, and in groups of so many.
FINE, MIDDLE = 60, 720
MIDDLE_GROUP, COARSE_GROUP = 3, 30
MAPS_EVERY = 6
ZEROS: Array = np.zeros(COUNT)


@dataclass(frozen=True)
class Truth:
    """What is so: is it a leak, which containers own it (none: it shows in none), in which categories, from when."""

    leak: bool
    containers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    onset: float = 0.0
    retained: bool = False


@dataclass(frozen=True)
class Held:
    """A container: entries at each sample, bytes an entry."""

    length: Array
    unit: float
    capacity: int | None = None
    orphans: Array | None = None
    members: Array | None = None
    oldest: float = DAY  # that an orphan becomes


@dataclass
class World:
    """A process while it is made up."""

    rng: np.random.Generator
    parts: dict[str, Array] = field(default_factory=dict)
    containers: dict[str, Held] = field(default_factory=dict)
    load: dict[str, Array] = field(default_factory=dict)
    outside_malloc: Array = field(default_factory=lambda: ZEROS)
    retained: Array = field(default_factory=lambda: ZEROS)
    noise: Array = field(default_factory=lambda: ZEROS)
    truth: Truth = field(default_factory=lambda: Truth(leak=False))
    arrivals: Array = field(default_factory=lambda: ZEROS)
    ends_at_limit: bool = False

    def uniform(self, low: float, high: float) -> float:
        """A number between the two."""
        return float(self.rng.uniform(low, high))

    def perhaps(self, chance: float) -> bool:
        """True with this chance."""
        return bool(self.rng.random() < chance)

    def spread(self, low: float, high: float) -> float:
        """A number between the two, each order of magnitude as likely as the next."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def grow(self, category: str, amount: Array, *, in_malloc: bool = True) -> None:
        """Add bytes to a category."""
        self.parts[category] = self.parts.get(category, ZEROS) + amount
        if not in_malloc:
            self.outside_malloc = self.outside_malloc + amount

    def hold(self, path: str, held: Held, category: str = "heap", overhead: float = 1.0) -> None:
        """Add a container, and what it takes, ``overhead`` times what is estimated, to a category."""
        self.containers[path] = held
        self.grow(category, held.length * held.unit * overhead)


class Life:
    """A world that is complete, and what can be seen of it at any sample."""

    def __init__(self, world: World) -> None:
        self.truth = world.truth
        self.containers = world.containers
        shared, files = world.parts.get("shared_memory", ZEROS), world.parts.get("files", ZEROS)
        in_anon = [part for category, part in world.parts.items() if category not in {"shared_memory", "files"}]
        used = np.sum(in_anon, axis=0)
        true_anon = used + world.retained
        self.anon: Array = np.maximum(4096.0, np.floor((true_anon + world.noise) / 4096) * 4096)
        others = world.uniform(0.1, 4) * GIB
        self.true_usage: Array = true_anon + shared + others
        self.usage: Array = self.anon + shared + others + world.rng.normal(0, MIB, COUNT)
        self.limit, self.reached_at = _limit(world, self.true_usage)
        figures: dict[str, Array] = {
            "status.anon": self.anon,
            "status.swap": ZEROS,
            "status.file": files,
            "status.shmem": shared,
            "malloc.in_use": np.maximum(0, used - world.outside_malloc),
            "malloc.retained": np.maximum(0, world.retained + 0.5 * world.noise),
        }
        self._memory = {name: _Kept(values) for name, values in figures.items()}
        for category, part in world.parts.items():
            more = world.noise + world.retained if category == "heap" else ZEROS
            self._memory[f"smaps.{category}"] = _Kept(np.maximum(0, part + more), MAPS_EVERY)
        self._usage = _Kept(self.usage)
        self._load = {name: _Kept(values) for name, values in world.load.items()}
        self._late = world.uniform(0, STEP - 1)
        self._held = {path: self._kept(held) for path, held in world.containers.items()}

    def _kept(self, held: Held) -> dict[str, _Kept]:
        """A container's series at the times of the censuses, which come a little later than the load's."""
        share = self._late / STEP

        def later(values: Array) -> Array:
            return np.floor(values + share * (np.append(values[1:], values[-1]) - values))

        length = later(held.length)
        series = {"length": length, "size": np.floor(length * held.unit)}
        if held.members is not None:
            series["members"] = later(held.members)
        if held.orphans is not None:
            series["orphans"] = later(held.orphans)
        return {name: _Kept(values) for name, values in series.items()}

    def history(self, k: int) -> tuple[ProcessHistory, float]:
        """What the sidecar knows just before sample ``k + 1``, and that time."""
        times, maps_times = _times(k, 1), _times(k, MAPS_EVERY)
        memory = _Cut(self._memory, k, {1: times, MAPS_EVERY: maps_times})
        now = START + float(TIME[k]) + STEP
        later = [time + self._late for time in times]
        history = ProcessHistory(
            pid=4711,
            role="engine core",
            name="VLLM::EngineCore",
            started=START,
            memory=memory,
            containers=[self._container(path, k, later) for path in self._held],
            load={name: kept.series(k, times) for name, kept in self._load.items()},
            limit=Limit(self.limit, self._usage.series(k, times)),
            vllm_version="0.30.0",
            patch_state="not affected",
        )
        return history, now

    def _container(self, path: str, k: int, times: list[float]) -> ContainerHistory:
        """``added`` and ``removed`` say what the length says, and are left out."""
        held = self.containers[path]
        none = Series(times, [0.0] * len(times), [0.0] * len(times))
        one = Series(times, [1.0] * len(times), [1.0] * len(times))
        found = {"members": one, "orphans": none, "added": Series(), "removed": Series()}
        found |= {name: kept.series(k, times) for name, kept in self._held[path].items()}
        age = 0.0
        if held.orphans is not None and held.orphans[k] > 0:
            age = min(held.oldest, float(TIME[k] - TIME[int(np.argmax(held.orphans > 0))]))
        return ContainerHistory(path, held.capacity, age, **found)


class _Cut(Mapping[str, Series]):
    """Figures up to a sample, each cut when it is asked for."""

    def __init__(self, kept: Mapping[str, _Kept], k: int, times: Mapping[int, list[float]]) -> None:
        self._kept, self._k, self._times = kept, k, times

    def __getitem__(self, name: str) -> Series:
        kept = self._kept[name]
        return kept.series(self._k, self._times[kept.every])

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class _Kept:
    """A figure, ready to be cut into what is kept of it at a sample."""

    def __init__(self, values: Array, every: int = 1) -> None:
        self.every = every
        self._fine: list[float] = values.tolist()
        self._middle = _grouped(values, MIDDLE_GROUP)
        self._coarse = _grouped(values, COARSE_GROUP)

    def series(self, k: int, times: list[float]) -> Series:
        """The samples up to ``k``."""
        coarse, middle = _cuts(k)
        c, m0, m1 = coarse // COARSE_GROUP, coarse // MIDDLE_GROUP, middle // MIDDLE_GROUP
        fine = self._fine[middle : k + 1 : self.every]
        return Series(
            times,
            self._coarse[0][:c] + self._middle[0][m0:m1] + fine,
            self._coarse[1][:c] + self._middle[1][m0:m1] + fine,
        )


def _grouped(values: Array, group: int) -> tuple[list[float], list[float]]:
    rows = values[: COUNT // group * group].reshape(-1, group)
    return rows[:, -1].tolist(), rows.min(axis=1).tolist()


def _cuts(k: int) -> tuple[int, int]:
    """The samples before which only coarse, and only middle groups are kept."""
    coarse = max(0, (k - MIDDLE) // COARSE_GROUP * COARSE_GROUP)
    return coarse, max(coarse, (k - FINE) // COARSE_GROUP * COARSE_GROUP)


def _times(k: int, every: int) -> list[float]:
    coarse, middle = _cuts(k)
    at = [*range(COARSE_GROUP - 1, coarse, COARSE_GROUP), *range(coarse + MIDDLE_GROUP - 1, middle, MIDDLE_GROUP)]
    return [START + i * STEP for i in (*at, *range(middle, k + 1, every))]


def _limit(world: World, usage: Array) -> tuple[float, float | None]:
    """A limit, and when it is reached: for a leak within the day, else never."""
    if not world.truth.leak:
        return float(usage.max()) * world.spread(1.15, 4), None
    first = min(DAY - HOUR, world.truth.onset + 8 * HOUR)
    when = int(world.uniform(first, DAY - 1) // STEP)
    limit = float(usage[: when + 1].max()) + MIB
    over = np.nonzero(usage >= limit)[0]
    return limit, float(TIME[over[0]]) if len(over) else float(DAY)


# ---- load ----


def add_load(world: World, *, diurnal: bool = False, idle: bool = False, level: float | None = None) -> None:
    """Requests that come, wait, run, end, and are aborted."""
    rng = world.rng
    rate = np.full(COUNT, level or world.spread(0.5, 60))
    if diurnal:
        phase = world.uniform(0, 2 * np.pi)
        rate *= 1 + world.uniform(0.4, 0.95) * np.sin(2 * np.pi * TIME / DAY + phase)
    if idle:
        for _ in range(int(rng.integers(1, 5))):
            begin = int(rng.integers(0, COUNT))
            rate[begin : begin + int(world.uniform(0.25, 3) * HOUR / STEP)] = 0
    rate *= np.exp(_wander(world, world.uniform(0.05, 0.3), world.uniform(60, 1200)))
    arrivals = rng.poisson(rate * STEP).astype(np.float64)
    lag = 1 + int(world.uniform(0, 5))
    ended = np.concatenate([np.zeros(lag), arrivals[:-lag]])
    aborts = rng.binomial(ended.astype(np.int64), world.uniform(0.01, 0.3)).astype(np.float64)
    tokens = world.spread(20, 800)
    generated = np.maximum(0, rng.normal(ended * tokens, np.sqrt(ended) * tokens * 0.6))
    prompt = world.spread(100, 4000)
    blocks = np.maximum(0, rng.normal(arrivals * prompt / 16, np.sqrt(arrivals) * prompt / 40))
    alive = np.cumsum(arrivals) - np.cumsum(ended)
    steps = np.where(alive > 0, rng.normal(STEP * world.uniform(15, 80), STEP, COUNT), 0)
    world.arrivals = arrivals
    world.load = {
        "requests": np.cumsum(ended),
        "aborts": np.cumsum(aborts),
        "generated_tokens": np.floor(np.cumsum(generated)),
        "blocks": np.floor(np.cumsum(blocks)),
        "steps": np.floor(np.cumsum(np.maximum(0, steps))),
        "running": np.minimum(alive, 256),
        "waiting": np.maximum(0, alive - 256),
    }


def _wander(world: World, sigma: float, seconds: float) -> Array:
    """Noise that comes back to 0, and stays about the same for some seconds."""
    keep = float(np.exp(-STEP / seconds))
    shocks = world.rng.normal(0, sigma * np.sqrt(1 - keep * keep), COUNT)
    # A first-order filter, as a product of a triangular matrix in blocks, since numpy has none.
    block = 240
    powers = keep ** np.arange(block)
    lower = np.tril(keep ** np.abs(np.subtract.outer(np.arange(block), np.arange(block))))
    out = np.empty(COUNT)
    last = float(world.rng.normal(0, sigma))
    for begin in range(0, COUNT, block):
        out[begin : begin + block] = lower @ shocks[begin : begin + block] + keep * powers * last
        last = float(out[begin + block - 1])
    return out


# ---- what every process does ----


def add_process(world: World) -> None:
    """A process with its warm start, its noise, and the containers that a healthy engine has."""
    base = world.spread(0.6, 12) * GIB
    world.grow("heap", np.full(COUNT, base * 0.4))
    world.grow("anonymous", np.full(COUNT, base * 0.6), in_malloc=False)
    world.grow("stacks", np.full(COUNT, 6 * MIB), in_malloc=False)
    world.grow("files", np.full(COUNT, world.uniform(100, 800) * MIB))
    world.grow("shared_memory", np.full(COUNT, world.uniform(0, 300) * MIB))
    _warm(world, world.uniform(20, 300) * MIB, world.uniform(30, 600))
    world.noise = (
        world.rng.normal(0, world.spread(0.05, 1.5) * MIB, COUNT)
        + _wander(world, world.spread(0.5, 12) * MIB, world.spread(120, 3600))
        + _bursts(world)
    )
    alive = world.load["running"] + world.load["waiting"]
    world.hold("scheduler.requests", Held(alive, 6000.0, orphans=ZEROS))
    world.hold("scheduler.running", Held(world.load["running"], 8.0))
    world.hold("scheduler.waiting", Held(world.load["waiting"], 8.0))
    world.hold("scheduler.kv_cache_config.kv_cache_groups", Held(np.full(COUNT, 4.0), 200.0))
    world.hold("scheduler.finished_req_ids", Held(world.rng.poisson(2, COUNT).astype(np.float64), 80.0))


def _warm(world: World, amount: float, seconds: float, category: str = "heap") -> None:
    world.grow(category, amount * (1 - np.exp(-TIME / seconds)))


def _bursts(world: World) -> Array:
    bursts = np.zeros(COUNT)
    period = int(world.spread(120, 7200) / STEP)
    height, width = world.spread(1, 60) * MIB, max(1, int(world.spread(10, 120) / STEP))
    for begin in range(int(world.uniform(0, period)), COUNT, period):
        bursts[begin : begin + width] = height
    return bursts


def _worked(world: World, load: str) -> Array:
    """A running total, from 0 to 1 over the day."""
    total = world.load[load]
    return total / max(1.0, float(total[-1]))


# ---- classes that are no leak ----


def steady(world: World) -> None:
    """Nothing but a short warm-up and noise."""
    add_load(world)
    add_process(world)


def warm_up(world: World) -> None:
    """One to three time constants, minutes to three hours, to a plateau."""
    add_load(world)
    add_process(world)
    for _ in range(int(world.rng.integers(1, 4))):
        _warm(
            world, world.spread(0.1, 4) * GIB, world.spread(180, 3 * HOUR), str(world.rng.choice(["heap", "anonymous"]))
        )


def sawtooth(world: World) -> None:
    """Something piles up and is cleared, again and again, sometimes not to the ground."""
    add_load(world)
    add_process(world)
    period, height = world.spread(300, 4 * HOUR), world.spread(30, 1500) * MIB
    world.grow("heap", height * ((TIME + world.uniform(0, period)) % period) / period)


def steps(world: World) -> None:
    """Compilations, model reloads: levels that change at once, mostly upwards."""
    add_load(world)
    add_process(world)
    level = np.zeros(COUNT)
    for _ in range(int(world.rng.integers(1, 9))):
        height = world.spread(30, 1500) * MIB * (1 if world.perhaps(0.75) else -0.5)
        ramp = world.spread(10, 180)
        level += height * np.clip((TIME - world.uniform(0, DAY)) / ramp, 0, 1)
    world.grow("anonymous", np.maximum(0, level), in_malloc=False)


def diurnal(world: World) -> None:
    """Memory that follows the load of the day up and down."""
    add_load(world, diurnal=True, idle=world.perhaps(0.5))
    add_process(world)
    busy = world.load["requests"] - np.concatenate([np.zeros(60), world.load["requests"][:-60]])
    world.grow("heap", world.spread(0.05, 2) * GIB * busy / max(1.0, float(busy.max())))


def mixed(world: World) -> None:
    """Warm-up, steps, sawtooth, a bounded cache and the day's load at once."""
    diurnal(world)
    _warm(world, world.spread(0.1, 2) * GIB, world.spread(180, 2.5 * HOUR))
    period = world.spread(300, 3 * HOUR)
    world.grow("heap", world.spread(20, 300) * MIB * (TIME % period) / period)
    for _ in range(int(world.rng.integers(0, 4))):
        height = world.spread(30, 400) * MIB
        world.grow("anonymous", height * np.clip((TIME - world.uniform(0, DAY)) / 60, 0, 1), in_malloc=False)
    _prefix_cache(world, world.spread(0.5, 8))


def _prefix_cache(world: World, hours: float) -> None:
    blocks = world.load["blocks"] * world.uniform(0.5, 1.0)
    capacity = max(100.0, float(np.interp(hours * HOUR, TIME, blocks)))
    cached = np.minimum(blocks, capacity)
    path = "scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block"
    world.hold(
        path, Held(np.floor(cached), world.uniform(150, 700), capacity=int(capacity)), overhead=world.spread(1, 4)
    )


def prefix_cache(world: World) -> None:
    """The prefix cache fills, to the number of blocks, within minutes or a day."""
    add_load(world, diurnal=world.perhaps(0.3))
    add_process(world)
    _prefix_cache(world, world.spread(0.1, 20))


def encoder_cache(world: World) -> None:
    """A cache of a few large entries fills and stays full."""
    add_load(world)
    add_process(world)
    capacity = int(world.spread(200, 20000))
    hours = world.spread(0.1, 10)
    length = np.minimum(capacity, _worked(world, "requests") * capacity * 24 / hours)
    unit = world.spread(0.2, 4) * GIB / capacity
    world.hold("scheduler.encoder_cache_manager.cached", Held(np.floor(length), unit, capacity=capacity))


def log_buffer(world: World) -> None:
    """A deque with a maxlen, of small entries or large ones."""
    add_load(world)
    add_process(world)
    capacity = int(world.spread(1000, 500_000))
    length = np.minimum(capacity, np.floor(world.load["steps"] * world.spread(0.01, 1)))
    world.hold("scheduler.log_stats.events", Held(length, world.spread(100, 4000), capacity=capacity))


def native_cache(world: World) -> None:
    """A cache in native code that no container shows: it fills with work, then stands."""
    add_load(world)
    add_process(world)
    size, hours = world.spread(0.1, 4) * GIB, world.spread(0.2, 6)
    work = _worked(world, "requests") * 24 / hours
    filled = 1 - np.exp(-2 * work) if world.perhaps(0.5) else np.minimum(1, work)
    world.grow(str(world.rng.choice(["heap", "anonymous"])), size * filled)


def hidden_capacity(world: World) -> None:
    """A container whose capacity nobody sees: it fills with distinct keys, ever more slowly, or until it is full."""
    add_load(world, diurnal=world.perhaps(0.3))
    add_process(world)
    requests = world.load["requests"]
    hours, shape = world.spread(0.1, 4), world.rng.random()
    most = max(50.0, float(np.interp(hours * HOUR, TIME, requests)))
    if shape < 0.6:  # noqa: PLR2004  # as many keys as there are, each as likely
        length = most * (1 - np.exp(-requests / most))
    elif shape < 0.8:  # noqa: PLR2004  # ever rarer new words
        length = most**0.4 * requests**0.6
    else:  # a fixed share of misses until it is full
        length = np.minimum(most, requests * world.uniform(0.1, 0.9))
    jitter = np.cumsum(world.rng.normal(0, 1, COUNT) * np.sqrt(np.maximum(0, np.diff(length, prepend=0.0))) * 0.5)
    length = np.maximum.accumulate(np.maximum(0, length + np.where(length < length[-1], jitter, jitter[-1])))
    unit = world.spread(50, 2000) * MIB / max(1.0, float(length[-1]))
    world.hold("scheduler.structured_output_manager.cache", Held(np.floor(length), unit))


def overload(world: World) -> None:
    """More requests come than are served for a time: they wait."""
    add_load(world)
    begin, long = world.uniform(0.1, 20) * HOUR, world.uniform(0.2, 3) * HOUR
    more = world.uniform(0.05, 0.5) * float(world.arrivals.mean())
    queued = np.clip(np.minimum(TIME - begin, 1.5 * (begin + 2 * long - TIME)) / STEP, 0, long / STEP) * more
    world.load["waiting"] = np.floor(world.load["waiting"] + queued)
    add_process(world)
    waiting = world.load["waiting"]
    unit = world.spread(2000, 60000)
    world.hold("scheduler.requests[*]._all_token_ids", Held(waiting * 500, unit / 500, members=waiting))


def gc_lag(world: World) -> None:
    """Garbage in cycles waits for the collector; a table of what ended is swept every minute or so."""
    add_load(world)
    add_process(world)
    period = world.uniform(30, 900)
    height = world.spread(10, 400) * MIB
    phase = (TIME % period) / period
    world.grow("heap", height * phase)
    sweep = world.uniform(20, 90)
    held = np.floor(world.load["requests"] - np.interp(TIME - TIME % sweep, TIME, world.load["requests"]))
    world.hold("scheduler.connector.ended", Held(held, 500.0, orphans=held, oldest=sweep))


def retained(world: World) -> None:
    """A burst of work; afterwards the allocator keeps most of what was freed."""
    add_load(world)
    add_process(world)
    begin, long = world.uniform(0.5, 18) * HOUR, world.uniform(0.05, 1) * HOUR
    height = world.spread(0.3, 6) * GIB
    rise = np.clip((TIME - begin) / 60, 0, 1)
    fall = np.clip((TIME - begin - long) / 60, 0, 1)
    world.grow("heap", height * (rise - fall))
    world.retained = world.retained + height * fall * world.uniform(0.75, 1.0)
    world.truth = Truth(leak=False, onset=begin + long, retained=True)


# ---- leaks ----


def _leak(world: World, per_hour: float, driver: str, onset: float = 0.0) -> tuple[Array, float]:
    """Units of a driver since the onset, and bytes a unit that make about so many bytes an hour."""
    total = world.load[driver]
    since = np.maximum(0, total - np.interp(onset, TIME, total))
    hours = max(1.0, (DAY - onset) / HOUR)
    return since, per_hour * hours / max(1.0, float(since[-1]))


def _rate(world: World) -> float:
    return world.spread(20, 2048) * MIB


def _onset(world: World) -> float:
    return 0.0 if world.perhaps(0.7) else world.uniform(0.5, 10) * HOUR


def _begin(world: World, **load: bool) -> None:
    add_load(world, **load)
    add_process(world)


def _owned(world: World, path: str, held: Held, onset: float) -> None:
    category = str(world.rng.choice(["heap", "anonymous"]))
    world.hold(path, held, category, overhead=world.uniform(0.95, 1.25))
    world.truth = Truth(leak=True, containers=(path,), categories=(category,), onset=onset)


def list_per_block(world: World) -> None:
    """A list that gets an entry a block and is never drained."""
    _begin(world)
    onset = _onset(world)
    blocks, unit = _leak(world, _rate(world), "blocks", onset)
    _owned(
        world, "scheduler.kv_cache_manager.coordinator.single_type_managers[0].ids", Held(np.floor(blocks), unit), onset
    )


def dict_of_aborts(world: World) -> None:
    """A table by request, in which aborts leave their entry."""
    _begin(world, idle=world.perhaps(0.3))
    onset = _onset(world)
    aborts, unit = _leak(world, _rate(world), "aborts", onset)
    alive = world.load["running"] + world.load["waiting"]
    _owned(world, "scheduler.connector.requests", Held(np.floor(aborts + alive), unit, orphans=np.floor(aborts)), onset)


def set_in_connector(world: World) -> None:
    """A set of request ids from which nothing is taken."""
    _begin(world, diurnal=world.perhaps(0.3))
    onset = _onset(world)
    requests, unit = _leak(world, _rate(world), "requests", onset)
    path = "scheduler.connector.finished_sending"
    _owned(world, path, Held(np.floor(requests), unit, orphans=np.floor(requests)), onset)


def deque_of_futures(world: World) -> None:
    """A deque of futures, one or a few a request, that nobody waits for."""
    _begin(world)
    onset = _onset(world)
    each = float(world.rng.choice([1, 1, 2, 0.5]))
    requests, unit = _leak(world, _rate(world), "requests", onset)
    _owned(world, "engine.output_queue.futures", Held(np.floor(requests * each), unit / each), onset)


def list_in_worker(world: World) -> None:
    """A list in a worker, with an entry a step."""
    _begin(world, idle=world.perhaps(0.3))
    onset = _onset(world)
    done, unit = _leak(world, _rate(world), "steps", onset)
    _owned(world, "model_runner.execute_model_state.history", Held(np.floor(done), unit), onset)


def _unseen(world: World, driver: str, category: str, *, in_malloc: bool) -> None:
    onset = _onset(world)
    done, unit = _leak(world, _rate(world), driver, onset)
    amount = np.floor(done * unit / 4096) * 4096
    world.grow(category, amount, in_malloc=in_malloc)
    world.truth = Truth(leak=True, categories=(category,), onset=onset)


def native_heap(world: World) -> None:
    """Native code that mallocs for each request and does not free."""
    _begin(world)
    _unseen(world, "requests", "heap", in_malloc=True)


def foreign_mmap(world: World) -> None:
    """A library that maps anonymous memory itself."""
    _begin(world)
    _unseen(world, "requests", "anonymous", in_malloc=False)


def by_token(world: World) -> None:
    """Pages by the tokens that are generated."""
    _begin(world)
    _unseen(world, "generated_tokens", "heap", in_malloc=True)


def under_load(world: World) -> None:
    """A native leak that follows the load of the day."""
    _begin(world, diurnal=True)
    _unseen(world, "requests", "heap", in_malloc=True)


def some_requests(world: World) -> None:
    """A table in which some requests, by chance, leave an entry; nothing tells whose it is."""
    _begin(world)
    onset = _onset(world)
    ended = np.diff(world.load["requests"], prepend=0.0).astype(np.int64)
    left = np.cumsum(world.rng.binomial(ended, world.uniform(0.1, 0.9))).astype(np.float64)
    world.load["left"] = left
    entries, unit = _leak(world, _rate(world), "left", onset)
    del world.load["left"]
    _owned(world, "scheduler.connector.metadata", Held(np.floor(entries), unit), onset)


def slow(world: World) -> None:
    """A leak of 20 MiB/h in a table."""
    _begin(world)
    aborts, unit = _leak(world, 20 * MIB, "aborts")
    _owned(world, "scheduler.connector.pending", Held(np.floor(aborts), unit, orphans=np.floor(aborts)), 0.0)


def fast(world: World) -> None:
    """A leak of 2 GiB/h in a list."""
    _begin(world)
    requests, unit = _leak(world, 2 * GIB, "requests")
    _owned(world, "output_processor.log", Held(np.floor(requests), unit), 0.0)


def all_at_once(world: World) -> None:
    """A leak under a warm-up, the load of the day, a cache that fills, and noise."""
    _begin(world, diurnal=True)
    _warm(world, world.spread(0.1, 2) * GIB, world.spread(180, 2 * HOUR))
    _prefix_cache(world, world.spread(0.3, 10))
    world.noise = world.noise * 2
    blocks, unit = _leak(world, world.spread(50, 2048) * MIB, "blocks")
    _owned(
        world, "scheduler.kv_cache_manager.coordinator.single_type_managers[0].ids", Held(np.floor(blocks), unit), 0.0
    )


HARMLESS: Mapping[str, Callable[[World], None]] = {
    "steady": steady,
    "warm-up + plateau": warm_up,
    "sawtooth": sawtooth,
    "steps": steps,
    "diurnal": diurnal,
    "mixed": mixed,
    "prefix cache fills": prefix_cache,
    "encoder cache fills": encoder_cache,
    "log buffer (maxlen)": log_buffer,
    "cache no container shows": native_cache,
    "capacity nobody sees": hidden_capacity,
    "queue under overload": overload,
    "collector lags": gc_lag,
    "retained after a burst": retained,
}
LEAKS: Mapping[str, Callable[[World], None]] = {
    "list per block": list_per_block,
    "dict, aborts": dict_of_aborts,
    "set in a connector": set_in_connector,
    "deque of futures": deque_of_futures,
    "list in a worker": list_in_worker,
    "some requests, by chance": some_requests,
    "slow: 20 MiB/h": slow,
    "fast: 2 GiB/h": fast,
    "leak + all the rest": all_at_once,
    "native heap": native_heap,
    "mmap outside malloc": foreign_mmap,
    "pages by token": by_token,
    "native, by day": under_load,
}
CLASSES = {**HARMLESS, **LEAKS}


def live(name: str, seed: int) -> Life:
    """The day of a process of a class."""
    world = World(np.random.default_rng([zlib.crc32(name.encode()), seed]))
    CLASSES[name](world)
    return Life(world)
