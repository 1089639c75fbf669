# SPDX-License-Identifier: Apache-2.0
"""Every name the sidecar sends: metrics, span, attributes, events, links, each with its unit and what it means.

Names of the OpenTelemetry semantic conventions where they have one, ``vllm_kvfix.*`` else. No other module holds a
name. ``python -m vllm_kvfix_sidecar.conventions`` prints the tables of the README.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from enum import Enum

from vllm_kvfix import __version__

SCOPE_NAME = "vllm_kvfix_sidecar"
SCOPE_VERSION = __version__
SERVICE_NAME = "vllm-kvfix"

# The engine's own id of a request may be the caller's with "-" and 8 hex digits behind it; vLLM's span has it without.
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


def caller_id(request_id: str) -> str:
    """The request id as vLLM's own span has it in ``gen_ai.request.id``."""
    return _RANDOM_SUFFIX.sub("", request_id)


def label_name(name: str) -> str:
    """The name of an attribute as a label in Prometheus."""
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in name)


class Name(str):
    """The name of an attribute, an event or a link's kind, usable as the string that it is."""

    __slots__ = ("description", "type")
    type: str
    description: str

    def __new__(cls, name: str, type_: str, description: str) -> Name:  # noqa: PYI034  # Self is of Python 3.11
        """``type_``: what values it has, with their unit in braces or brackets; empty where there is no value."""
        made = super().__new__(cls, name)
        made.type = type_
        made.description = description
        return made


# Of the engine: on every metric of an engine, and in the resource of its spans.
ATTR_PID = Name("process.pid", "int", "the process; an engine's as its own PID namespace counts")
ATTR_ENGINE_INDEX = Name("vllm_kvfix.engine.index", "int", "data-parallel rank of the engine")
ATTR_VLLM_VERSION = Name("vllm_kvfix.vllm.version", "string", "version of the vLLM that the engine runs")
ATTR_RING_FILE = Name(
    "vllm_kvfix.ring.file",
    "string",
    "file name of a ring; only where two live ones of two PID namespaces share pid and index, or name",
)

# Of metrics.
ATTR_STATE = Name("vllm_kvfix.state", "string", "used, free; running, waiting; a state of an engine or of the patch")
ATTR_GROUP = Name("vllm_kvfix.kv_cache.group", "int", "index of the KV-cache group")
ATTR_GROUP_KIND = Name("vllm_kvfix.kv_cache.group.kind", "string", "vLLM's name of the group's kind")
ATTR_OUTCOME = Name("vllm_kvfix.outcome", "string", "exported, failed, dropped or unsampled")
ATTR_CPU_MODE = Name("cpu.mode", "string", "user or system")

# Of metrics of a process. Its pid and role are those of a growth, too.
ATTR_PROCESS_NAME = Name(
    "vllm_kvfix.process.name", "string", "how the process calls itself, in short: EngineCore, Worker_TP0, APIServer"
)
ATTR_MEMORY_STATE = Name("vllm_kvfix.memory.state", "string", "anon, file, shmem, kernel or swap")
ATTR_MEMORY_CATEGORY = Name(
    "vllm_kvfix.memory.category",
    "string",
    "heap, anonymous, stacks, shared_memory, files, ring, driver or rest; anon, file or shmem if maps cannot be read",
)
ATTR_GC_GENERATION = Name("vllm_kvfix.gc.generation", "int", "0, 1 or 2")
ATTR_CONTAINER_PATH = Name(
    "vllm_kvfix.container.path", "string", "where a container is found; [*] in it stands for every member"
)
ATTR_CGROUP = Name(
    "vllm_kvfix.cgroup", "string", "path of the cgroup, or the ring that told of it where the path is not known"
)
ATTR_CGROUP_EVENT = Name("vllm_kvfix.cgroup.event", "string", "oom, oom_kill, high or max")
ATTR_PRESSURE = Name("vllm_kvfix.cgroup.pressure", "string", "some or full, as the kernel's PSI has them")
ATTR_SCOPE_READ = Name("vllm_kvfix.scope", "string", "status, smaps, cgroup, malloc or python")
ATTR_UNREAD_REASON = Name(
    "vllm_kvfix.unread.reason",
    "string",
    "not_permitted, gone, other_namespace, not_supported, malformed or other; the log has the words",
)
ATTR_VERDICT_KIND = Name(
    "vllm_kvfix.verdict.kind",
    "string",
    "steady, warming, bounded_growth, unbounded_growth, retained_by_the_allocator or unexplained_growth",
)
ATTR_BOUND = Name("vllm_kvfix.bound", "string", "low, best or high: an 80 % interval and the best estimate in it")
ATTR_HW_ID = Name("hw.id", "string", "uuid of the GPU, or of the part of one (MIG)")
ATTR_HW_TYPE = Name("hw.type", "string", "gpu")
ATTR_HW_NAME = Name("hw.name", "string", "the product's name")
ATTR_HW_PARENT = Name("hw.parent", "string", "uuid of the GPU that this is a part of")

# Of spans (the reason is of a metric, too).
ATTR_FINISH_REASON = Name(
    "vllm_kvfix.request.finish_reason",
    "string",
    "stop, length, abort, error, repetition, ignored, unknown, or engine_ended",
)
ATTR_REQUEST_ID = Name("gen_ai.request.id", "string", "the request's id, as vLLM's own span has it")
ATTR_ENGINE_REQUEST_ID = Name("vllm_kvfix.request.engine_id", "string", "the engine's id, as its log has it")
ATTR_INPUT_TOKENS = Name("gen_ai.usage.input_tokens", "int {token}", "prompt tokens")
ATTR_OUTPUT_TOKENS = Name("gen_ai.usage.output_tokens", "int {token}", "output tokens")
ATTR_QUEUE_DURATION = Name("vllm_kvfix.request.queue_duration", "double s", "arrival until it first ran")
ATTR_RESIDENCY = Name("vllm_kvfix.request.block_residency", "double s", "first ran until its blocks were given back")
ATTR_HIT_TOKENS = Name("vllm_kvfix.prefix_cache.hit_tokens", "int {token}", "prompt tokens found in the prefix cache")
ATTR_EXTERNAL_TOKENS = Name("vllm_kvfix.prefix_cache.external_tokens", "int {token}", "tokens from a KV connector")
ATTR_NEW_BLOCKS = Name("vllm_kvfix.kv_cache.blocks.new", "int {block}", "blocks taken from the pool")
ATTR_REUSED_BLOCKS = Name("vllm_kvfix.kv_cache.blocks.reused", "int {block}", "blocks shared with the prefix cache")
ATTR_PEAK_BLOCKS = Name("vllm_kvfix.kv_cache.blocks.peak", "int {block}", "most blocks held at a time")
ATTR_BLOCK_SECONDS = Name("vllm_kvfix.kv_cache.block_seconds", "double {block}.s", "blocks held, times seconds")
ATTR_GROUP_NEW_BLOCKS = Name("vllm_kvfix.kv_cache.groups.new", "int[] {block}", "new blocks of each group, by index")
ATTR_GROUP_REUSED_BLOCKS = Name("vllm_kvfix.kv_cache.groups.reused", "int[] {block}", "reused blocks of each group")
ATTR_PREEMPTIONS = Name("vllm_kvfix.request.preemptions", "int", "times it lost its blocks while it ran")
ATTR_REFUSALS = Name("vllm_kvfix.request.refusals", "int", "times it was tried and too few blocks were free")
ATTR_TOOK_BLOCKS = Name("vllm_kvfix.request.took_blocks", "boolean", "another request was preempted for it")
ATTR_SAMPLING_REASON = Name(
    "vllm_kvfix.sampling.reason", "string", "why the span was kept: the sampler, or a keep-rule"
)
ATTR_DROPPED_DETAILS = Name("vllm_kvfix.request.dropped_events", "int", "events left out of this span, for its size")

# Of a growth of memory: of its span and of its events alike.
ATTR_ROLE = Name("vllm_kvfix.process.role", "string", "engine core, api server, worker, child, or sidecar: ourselves")
ATTR_GROWTH_KIND = Name(
    "vllm_kvfix.growth.kind", "string", "unbounded_growth, unexplained_growth, or retained_by_the_allocator"
)
ATTR_GROWTH_CATEGORY = Name("vllm_kvfix.growth.category", "string", "the part of the memory that grows")
ATTR_GROWTH_CONTAINERS = Name("vllm_kvfix.growth.containers", "string[]", "paths of what grows, the largest first")
ATTR_GROWTH_SLOPE = Name("vllm_kvfix.growth.slope", "double By/h", "how fast the process grows, the best estimate")
ATTR_GROWTH_SLOPE_LOW = Name("vllm_kvfix.growth.slope_low", "double By/h", "low end of the 80 % interval of the slope")
ATTR_GROWTH_SLOPE_HIGH = Name("vllm_kvfix.growth.slope_high", "double By/h", "high end of that interval")
ATTR_GROWTH_FOLLOWS = Name(
    "vllm_kvfix.growth.follows", "string", "what it follows best: request, abort, generated_token or block"
)
ATTR_GROWTH_PER_UNIT = Name("vllm_kvfix.growth.per_unit", "double By", "bytes for each one of what it follows")
ATTR_GROWTH_EXPLAINED = Name("vllm_kvfix.growth.explained", "double 1", "share of the growth that the containers are")
ATTR_TIME_TO_LIMIT = Name("vllm_kvfix.growth.time_to_limit", "double s", "until the limit, the best estimate")
ATTR_TIME_TO_LIMIT_LOW = Name("vllm_kvfix.growth.time_to_limit_low", "double s", "low end of its 80 % interval")
ATTR_TIME_TO_LIMIT_HIGH = Name(
    "vllm_kvfix.growth.time_to_limit_high", "double s", "high end of that interval; missing where it has none"
)
ATTR_GROWTH_REMEDY = Name("vllm_kvfix.growth.remedy", "string", "what to do")
ATTR_GROWTH_ISSUE = Name("vllm_kvfix.growth.issue", "string", "where upstream tracks it")
ATTR_GROWTH_FIXED_IN = Name("vllm_kvfix.growth.fixed_in", "string", "the first release without it")
ATTR_GROWTH_END = Name(
    "vllm_kvfix.growth.end", "string", "why it is over: calm, process_ended, or sidecar_stopped (it may go on)"
)

# Of events.
ATTR_RELEASED_BLOCKS = Name("vllm_kvfix.kv_cache.blocks.released", "int {block}", "blocks lost by a preemption")
ATTR_ALLOCATIONS = Name("vllm_kvfix.kv_cache.allocations", "int", "steps that the event sums up, where more than one")
ATTR_TAKER = Name("vllm_kvfix.request.taker", "int", "number of the request that got the blocks, in the engine's count")

SPAN_NAME = "kv_cache.request"
EVENT_ADMITTED = Name("vllm_kvfix.admitted", "", "it began to run; blocks and hit tokens it began with")
EVENT_RESUMED = Name("vllm_kvfix.resumed", "", "it ran again after a preemption; as admitted")
EVENT_ALLOCATED = Name("vllm_kvfix.allocated", "", "it got new blocks while it ran")
EVENT_REFUSED = Name("vllm_kvfix.refused", "", "too few blocks were free for it to run; once each time it waits")
EVENT_PREEMPTED = Name("vllm_kvfix.preempted", "", "it lost its blocks; how many, and to whom")
EVENT_FINISHED = Name("vllm_kvfix.finished", "", "it ended, but a KV connector kept its blocks")
LINK_KIND = Name("vllm_kvfix.link", "string", "why the other span is linked")
LINK_TAKEN_BY = Name("blocks_taken_by", "", "the linked request got blocks that this one lost")

GROWTH_SPAN_NAME = "memory.growth"
EVENT_GROWTH_BEGAN = Name(
    "vllm_kvfix.growth.began", "", "a process grows for no known end, or its allocator keeps memory"
)
EVENT_GROWTH_CHANGED = Name("vllm_kvfix.growth.changed", "", "another verdict, category or container than before")
EVENT_GROWTH_ENDED = Name("vllm_kvfix.growth.ended", "", "it is over, and why")

# Of the end of a process: its span and its events.
ATTR_DEATH_END = Name("vllm_kvfix.death.end", "string", "killed (also: crashed), exception, in_order or unsaid")
ATTR_DEATH_REASON = Name("vllm_kvfix.death.exception", "string", "type of the exception that ended it")
ATTR_DEATH_OOM = Name("vllm_kvfix.death.oom", "string", "killed for its memory: yes, probably, no or not_known")
ATTR_DEATH_EVIDENCE = Name("vllm_kvfix.death.evidence", "string[]", "how that is known, each with its source")
ATTR_DEATH_OTHERS = Name("vllm_kvfix.death.others", "string[]", "processes that ended with it")
ATTR_DEATH_LOST = Name("vllm_kvfix.death.lost_requests", "int {request}", "requests that were not over")
ATTR_DEATH_RSS = Name("vllm_kvfix.death.rss", "int By", "its resident memory, as last told")
ATTR_DEATH_USAGE = Name("vllm_kvfix.death.usage", "int By", "what counted against the limit, as last told")
ATTR_DEATH_LIMIT = Name("vllm_kvfix.death.limit", "int By", "that limit")
ATTR_DEATH_LIMIT_OF = Name("vllm_kvfix.death.limit_of", "string", "cgroup or host: whose limit that is")
ATTR_DEATH_RING = Name("vllm_kvfix.death.ring", "string", "path of its ring, for vllm-kvfix postmortem")
ATTR_DEATH_STEPS = Name("vllm_kvfix.death.steps_per_second", "double {step}/s", "steps in the seconds of the span")
ATTR_STEP_RUNNING = Name("vllm_kvfix.step.running", "int {request}", "requests that ran in the step")
ATTR_STEP_WAITING = Name("vllm_kvfix.step.waiting", "int {request}", "requests that waited in it")
ATTR_STEP_FREE = Name("vllm_kvfix.step.free_blocks", "int {block}", "blocks that were free after it")
DEATH_SPAN_NAME = "process.death"
EVENT_DEATH = Name("vllm_kvfix.process.death", "", "a process died, at its last sign of life; also as a log record")
EVENT_LAST_STEP = Name("vllm_kvfix.process.last_step", "", "the last step of the scheduler; in the span alone")

SPAN_ATTRIBUTES = (
    ATTR_REQUEST_ID,
    ATTR_ENGINE_REQUEST_ID,
    ATTR_FINISH_REASON,
    ATTR_INPUT_TOKENS,
    ATTR_OUTPUT_TOKENS,
    ATTR_HIT_TOKENS,
    ATTR_EXTERNAL_TOKENS,
    ATTR_QUEUE_DURATION,
    ATTR_RESIDENCY,
    ATTR_PEAK_BLOCKS,
    ATTR_BLOCK_SECONDS,
    ATTR_NEW_BLOCKS,
    ATTR_REUSED_BLOCKS,
    ATTR_GROUP_NEW_BLOCKS,
    ATTR_GROUP_REUSED_BLOCKS,
    ATTR_PREEMPTIONS,
    ATTR_REFUSALS,
    ATTR_TOOK_BLOCKS,
    ATTR_SAMPLING_REASON,
    ATTR_DROPPED_DETAILS,
)
EVENTS = (EVENT_ADMITTED, EVENT_RESUMED, EVENT_ALLOCATED, EVENT_REFUSED, EVENT_PREEMPTED, EVENT_FINISHED)
EVENT_ATTRIBUTES = (
    ATTR_NEW_BLOCKS,
    ATTR_REUSED_BLOCKS,
    ATTR_HIT_TOKENS,
    ATTR_EXTERNAL_TOKENS,
    ATTR_ALLOCATIONS,
    ATTR_RELEASED_BLOCKS,
    ATTR_TAKER,
)
LINKS = (LINK_TAKEN_BY,)
GROWTH_ATTRIBUTES = (
    ATTR_GROWTH_KIND,
    ATTR_GROWTH_CATEGORY,
    ATTR_GROWTH_CONTAINERS,
    ATTR_GROWTH_SLOPE,
    ATTR_GROWTH_SLOPE_LOW,
    ATTR_GROWTH_SLOPE_HIGH,
    ATTR_GROWTH_FOLLOWS,
    ATTR_GROWTH_PER_UNIT,
    ATTR_GROWTH_EXPLAINED,
    ATTR_TIME_TO_LIMIT,
    ATTR_TIME_TO_LIMIT_LOW,
    ATTR_TIME_TO_LIMIT_HIGH,
    ATTR_GROWTH_REMEDY,
    ATTR_GROWTH_ISSUE,
    ATTR_GROWTH_FIXED_IN,
    ATTR_GROWTH_END,
)
GROWTH_EVENTS = (EVENT_GROWTH_BEGAN, EVENT_GROWTH_CHANGED, EVENT_GROWTH_ENDED)
DEATH_ATTRIBUTES = (
    ATTR_DEATH_END,
    ATTR_DEATH_REASON,
    ATTR_DEATH_OOM,
    ATTR_DEATH_EVIDENCE,
    ATTR_DEATH_OTHERS,
    ATTR_DEATH_LOST,
    ATTR_DEATH_RSS,
    ATTR_DEATH_USAGE,
    ATTR_DEATH_LIMIT,
    ATTR_DEATH_LIMIT_OF,
    ATTR_DEATH_RING,
    ATTR_DEATH_STEPS,
    ATTR_STEP_RUNNING,
    ATTR_STEP_WAITING,
    ATTR_STEP_FREE,
)
DEATH_EVENTS = (EVENT_DEATH, EVENT_LAST_STEP)
GROWTH_RESOURCE_ATTRIBUTES = (ATTR_PID, ATTR_ROLE, ATTR_VLLM_VERSION)
RESOURCE_ATTRIBUTES = (ATTR_PID, ATTR_ENGINE_INDEX, ATTR_VLLM_VERSION)
ENGINE_ATTRIBUTES = (ATTR_PID, ATTR_ENGINE_INDEX)
PROCESS_ATTRIBUTES = (ATTR_PID, ATTR_ROLE, ATTR_PROCESS_NAME)


class Kind(Enum):
    """What a metric's points are, in the words of OpenTelemetry."""

    COUNTER = "Counter"
    UP_DOWN_COUNTER = "UpDownCounter"
    GAUGE = "Gauge"
    HISTOGRAM = "Histogram"


@dataclass(frozen=True)
class Metric:
    """One metric: its unit (UCUM), its attributes, all of few values, and the bounds of a histogram's buckets.

    ``optional``: attributes that a point may have, too.
    ``from_engine``: a counter that the engine keeps, so that it runs on when the sidecar starts anew.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[Name, ...] = ENGINE_ATTRIBUTES
    bounds: tuple[float, ...] = field(default=(), repr=False)
    from_engine: bool = False
    optional: tuple[Name, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus, less the ``_total`` of a counter: as the OpenTelemetry specification turns names."""
        name = self.name.replace(".", "_")
        if self.unit == "1" and self.kind is Kind.GAUGE:
            return f"{name}_ratio"
        word = _PROMETHEUS_UNITS.get(self.unit)
        return f"{name}_{word}" if word else name

    @property
    def series(self) -> str:
        """What its series are called in Prometheus; of a histogram what they begin with."""
        return f"{self.prometheus}_total" if self.kind is Kind.COUNTER else self.prometheus


_PROMETHEUS_UNITS = {"s": "seconds", "By": "bytes", "By/h": "bytes_per_hour"}


def _of_engine(name: str, unit: str, description: str, *more: Name) -> Metric:
    return Metric(name, Kind.UP_DOWN_COUNTER, unit, description, (*ENGINE_ATTRIBUTES, *more))


def _total(name: str, unit: str, description: str) -> Metric:
    return Metric(name, Kind.COUNTER, unit, description, from_engine=True)


def _histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, description, bounds=bounds)


def _of_process(name: str, unit: str, description: str, *more: Name, kind: Kind = Kind.UP_DOWN_COUNTER) -> Metric:
    return Metric(name, kind, unit, description, (*PROCESS_ATTRIBUTES, *more))


def _of_cgroup(name: str, unit: str, description: str, *more: Name, kind: Kind = Kind.UP_DOWN_COUNTER) -> Metric:
    return Metric(name, kind, unit, description, (ATTR_CGROUP, *more))


def _of_sidecar(name: str, kind: Kind, unit: str, description: str, *attributes: Name) -> Metric:
    return Metric(f"vllm_kvfix.sidecar.{name}", kind, unit, description, attributes)


POOL_LIMIT = _of_engine("vllm_kvfix.kv_cache.pool.limit", "{block}", "Blocks in the KV-cache pool.")
POOL_USAGE = _of_engine(
    "vllm_kvfix.kv_cache.pool.usage", "{block}", "Blocks by state; they add up to the limit.", ATTR_STATE
)
POOL_UTILIZATION = Metric(
    "vllm_kvfix.kv_cache.pool.utilization", Kind.GAUGE, "1", "Share of the pool's blocks that requests hold."
)
CACHED_BLOCKS = _of_engine(
    "vllm_kvfix.kv_cache.pool.cached", "{block}", "Blocks that the prefix cache can find; free ones among them."
)
BLOCK_SIZE = _of_engine(
    "vllm_kvfix.kv_cache.block.size", "{token}", "Tokens in a block of the group.", ATTR_GROUP, ATTR_GROUP_KIND
)
BACKLOG = _of_engine(
    "vllm_kvfix.kv_cache.new_block_ids.backlog",
    "{id}",
    "Block ids in new_block_ids of the group's manager; one that only grows is the leak.",
    ATTR_GROUP,
)
BLOCKS_ALLOCATED = _total("vllm_kvfix.kv_cache.blocks.allocated", "{block}", "Blocks that requests took from the pool.")
BLOCKS_REUSED = _total(
    "vllm_kvfix.kv_cache.blocks.reused", "{block}", "Blocks that requests shared from the prefix cache."
)
BLOCKS_RELEASED = _total("vllm_kvfix.kv_cache.blocks.released", "{block}", "Blocks that requests gave back.")
PREFIX_QUERIED = _total("vllm_kvfix.prefix_cache.queried_tokens", "{token}", "Tokens looked up in the prefix cache.")
PREFIX_HIT = _total("vllm_kvfix.prefix_cache.hit_tokens", "{token}", "Tokens found in the prefix cache.")
REQUESTS = _of_engine("vllm_kvfix.scheduler.requests", "{request}", "Requests that run and that wait.", ATTR_STATE)
STEPS = _total("vllm_kvfix.scheduler.steps", "{step}", "Steps of the scheduler.")
SCHEDULED_TOKENS = _total("vllm_kvfix.scheduler.scheduled_tokens", "{token}", "Tokens scheduled.")
PREEMPTIONS = _total("vllm_kvfix.scheduler.preemptions", "{preemption}", "Running requests that lost their blocks.")
REFUSALS = _total("vllm_kvfix.scheduler.refusals", "{refusal}", "Times too few blocks were free for a waiting request.")
FINISHED = Metric(
    "vllm_kvfix.request.finished",
    Kind.COUNTER,
    "{request}",
    "Requests that ended, since the sidecar began.",
    (*ENGINE_ATTRIBUTES, ATTR_FINISH_REASON),
)
PEAK_BLOCKS = _histogram(
    "vllm_kvfix.request.peak_blocks",
    "{block}",
    "Most blocks that a request held at a time.",
    tuple(float(1 << n) for n in range(0, 17, 2)),
)
RESIDENCY = _histogram(
    "vllm_kvfix.request.block_residency",
    "s",
    "Time from a request's first run until its blocks were given back.",
    (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
BLOCK_SECONDS = _histogram(
    "vllm_kvfix.request.block_seconds",
    "{block}.s",
    "Blocks that a request held, times the seconds it held them.",
    tuple(float(1 << n) for n in range(0, 25, 2)),
)
QUEUE_DURATION = _histogram(
    "vllm_kvfix.request.queue_duration",
    "s",
    "Time from a request's arrival until it first ran.",
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
PATCH_STATE = _of_engine(
    "vllm_kvfix.patch.state",
    "1",
    "1 for the state that the fix is in, 0 for the others: unknown, not_affected, applied, refused, off.",
    ATTR_STATE,
)
RING_PUBLISHED = _total("vllm_kvfix.ring.published", "{event}", "Events that the engine published.")
RING_DROPPED = _total("vllm_kvfix.ring.dropped", "{event}", "Events that the engine gave up.")
RING_LOST = Metric(
    "vllm_kvfix.ring.lost", Kind.COUNTER, "{event}", "Events overwritten or damaged before the sidecar read them."
)
RING_MALFORMED = Metric("vllm_kvfix.ring.malformed", Kind.COUNTER, "{frame}", "Frames that no recorder writes.")
RING_AGE = Metric(
    "vllm_kvfix.ring.age", Kind.GAUGE, "s", "Time since the engine last wrote; an idle one does not write."
)
PROCESS_MEMORY = _of_process(
    "process.memory.usage", "By", "Resident memory of a process; the sidecar's own has the role sidecar."
)
MEMORY_STATE = _of_process(
    "vllm_kvfix.process.memory.usage",
    "By",
    "Memory by state; anon, file and shmem add up to what is resident, swap is what is not.",
    ATTR_MEMORY_STATE,
)
MEMORY_PEAK = _of_process(
    "vllm_kvfix.process.memory.peak", "By", "Most resident memory that it ever had.", kind=Kind.GAUGE
)
MEMORY_PSS = _of_process(
    "vllm_kvfix.process.memory.pss", "By", "Resident memory, of a page that others have too its share (PSS)."
)
MEMORY_USS = _of_process("vllm_kvfix.process.memory.uss", "By", "Resident memory that no other process has (USS).")
MEMORY_CATEGORY = _of_process(
    "vllm_kvfix.process.memory.category", "By", "Resident memory by what it is for; adds up.", ATTR_MEMORY_CATEGORY
)
THREADS = _of_process("process.thread.count", "{thread}", "Threads of the process.")
MALLOC_IN_USE = _of_process("vllm_kvfix.malloc.in_use", "By", "What glibc's malloc has handed out, in all arenas.")
MALLOC_RETAINED = _of_process(
    "vllm_kvfix.malloc.retained", "By", "What glibc's malloc keeps of memory that was given back to it."
)
MALLOC_MAPPED = _of_process("vllm_kvfix.malloc.mapped", "By", "What of malloc's memory in use lies in maps of its own.")
PYTHON_BLOCKS = _of_process("vllm_kvfix.python.block.count", "{block}", "Blocks that CPython's allocator gave out.")
GC_COUNT = _of_process(
    "vllm_kvfix.python.gc.count",
    "{object}",
    "What gc.get_count() says of a generation: objects, or collections of the one before, since its last collection.",
    ATTR_GC_GENERATION,
    kind=Kind.GAUGE,
)
GC_COLLECTIONS = _of_process(
    "vllm_kvfix.python.gc.collections",
    "{collection}",
    "Collections of Python's cyclic garbage, of all generations.",
    kind=Kind.COUNTER,
)
CONTAINER_LENGTH = _of_process(
    "vllm_kvfix.container.length",
    "{entry}",
    "Entries of a container that a census found; at most 30 a process, the largest and those that grow fastest.",
    ATTR_CONTAINER_PATH,
)
CONTAINER_CAPACITY = _of_process(
    "vllm_kvfix.container.capacity", "{entry}", "Most entries that it can hold; none: unbounded.", ATTR_CONTAINER_PATH
)
CONTAINER_SIZE = _of_process(
    "vllm_kvfix.container.size", "By", "Estimate of what would be free without it.", ATTR_CONTAINER_PATH
)
CONTAINER_ORPHANS = _of_process(
    "vllm_kvfix.container.orphan.count", "{entry}", "Its keys that are of no live request.", ATTR_CONTAINER_PATH
)
CONTAINER_ORPHAN_AGE = _of_process(
    "vllm_kvfix.container.orphan.age",
    "s",
    "Time since the oldest of its orphans was first seen to be one.",
    ATTR_CONTAINER_PATH,
    kind=Kind.GAUGE,
)
CONTAINER_DRAINED = _of_process(
    "vllm_kvfix.container.drained",
    "1",
    "Entries that left it, as a share of those that came, since the first census; none: none came.",
    ATTR_CONTAINER_PATH,
    kind=Kind.GAUGE,
)
CENSUS_CONTAINERS = _of_process("vllm_kvfix.census.container.count", "{container}", "Containers in the last census.")
CENSUS_TIME = _of_process("vllm_kvfix.census.duration", "s", "What the last census took in all.", kind=Kind.GAUGE)
CENSUS_COMPLETE = _of_process(
    "vllm_kvfix.census.complete", "1", "1: the last census left nothing out for its depth or number; 0: it did."
)
CGROUP_USAGE = _of_cgroup("container.memory.usage", "By", "Memory of a cgroup with followed processes in it.")
CGROUP_STATE = _of_cgroup(
    "vllm_kvfix.cgroup.memory.usage",
    "By",
    "Memory of the cgroup by state; shmem is a part of file, other parts of the usage are not told.",
    ATTR_MEMORY_STATE,
)
CGROUP_LIMIT = _of_cgroup(
    "vllm_kvfix.cgroup.memory.limit", "By", "Its limit, where it has one: beyond it, the kernel kills."
)
CGROUP_HIGH = _of_cgroup(
    "vllm_kvfix.cgroup.memory.high", "By", "Its high mark, where it has one: beyond it, all slows."
)
CGROUP_EVENTS = _of_cgroup(
    "vllm_kvfix.cgroup.memory.events", "{event}", "What befell the cgroup.", ATTR_CGROUP_EVENT, kind=Kind.COUNTER
)
CGROUP_PRESSURE = _of_cgroup(
    "vllm_kvfix.cgroup.memory.pressure",
    "s",
    "Time in which some, or all, of it waited for memory.",
    ATTR_PRESSURE,
    kind=Kind.COUNTER,
)
GPU_USAGE = Metric(
    "hw.gpu.memory.usage",
    Kind.UP_DOWN_COUNTER,
    "By",
    "Memory in use of a GPU, or of a part of one.",
    (ATTR_HW_ID, ATTR_HW_TYPE),
    optional=(ATTR_HW_NAME, ATTR_HW_PARENT),
)
GPU_LIMIT = Metric(
    "hw.gpu.memory.limit",
    Kind.UP_DOWN_COUNTER,
    "By",
    "Memory that it has.",
    GPU_USAGE.attributes,
    optional=GPU_USAGE.optional,
)
PROCESS_GPU = _of_process(
    "vllm_kvfix.process.gpu.memory.usage", "By", "Memory of a GPU that the process has.", ATTR_HW_ID
)
UNREAD = _of_process(
    "vllm_kvfix.unread", "{scope}", "1 for each scope that cannot be read.", ATTR_SCOPE_READ, ATTR_UNREAD_REASON
)
VERDICT = _of_process(
    "vllm_kvfix.verdict", "1", "1 for what the process's memory does, 0 for the other kinds.", ATTR_VERDICT_KIND
)
VERDICT_CATEGORY = _of_process(
    "vllm_kvfix.verdict.category", "1", "1 for the part of the process's memory that grows.", ATTR_MEMORY_CATEGORY
)
VERDICT_ALARMING = _of_process(
    "vllm_kvfix.verdict.alarming", "1", "1: it grows, and no end of it is known; 0: nobody need act."
)
VERDICT_SLOPE = _of_process(
    "vllm_kvfix.verdict.slope", "By/h", "How fast the process's memory grows.", ATTR_BOUND, kind=Kind.GAUGE
)
VERDICT_EXPLAINED = _of_process(
    "vllm_kvfix.verdict.explained", "1", "Share of the growth that known containers make up.", kind=Kind.GAUGE
)
VERDICT_TIME_TO_LIMIT = _of_process(
    "vllm_kvfix.verdict.time_to_limit",
    "s",
    "Time until the limit is reached if it goes on so; none: it does not grow, there is no limit, or no bound.",
    ATTR_BOUND,
    kind=Kind.GAUGE,
)
VERDICT_CULPRIT = _of_process(
    "vllm_kvfix.verdict.culprit.slope",
    "By/h",
    "How fast a container grows that the verdict names; at most five a process.",
    ATTR_CONTAINER_PATH,
    kind=Kind.GAUGE,
)
SPANS = _of_sidecar(
    "spans", Kind.COUNTER, "{span}", "Spans by what became of them; unsampled ones were never made.", ATTR_OUTCOME
)
SPANS_PENDING = _of_sidecar("spans.pending", Kind.UP_DOWN_COUNTER, "{span}", "Spans that wait for their export.")
GROWTH_EVENT_EXPORTS = _of_sidecar(
    "events",
    Kind.COUNTER,
    "{event}",
    "Events of growths and deaths by what became of them, as log records.",
    ATTR_OUTCOME,
)
METRIC_EXPORTS = _of_sidecar("metric_exports", Kind.COUNTER, "{export}", "Exports of metrics.", ATTR_OUTCOME)
ENGINES = _of_sidecar("engines", Kind.UP_DOWN_COUNTER, "{engine}", "Engines that are followed.", ATTR_STATE)
FILES_REFUSED = _of_sidecar(
    "files_refused", Kind.UP_DOWN_COUNTER, "{file}", "Files in the ring folders that were refused; the log says why."
)
PROCESSES = _of_sidecar(
    "process.count", Kind.UP_DOWN_COUNTER, "{process}", "Processes whose memory is followed.", ATTR_ROLE
)
ASSESSMENT_ERRORS = _of_sidecar(
    "assessment.errors", Kind.COUNTER, "{error}", "Errors of the sidecar's own in what follows processes' memory."
)
CPU_TIME = Metric(
    "process.cpu.time",
    Kind.COUNTER,
    "s",
    "CPU time of the sidecar itself, under the role sidecar.",
    (*PROCESS_ATTRIBUTES, ATTR_CPU_MODE),
)

METRICS = tuple(value for value in tuple(vars().values()) if isinstance(value, Metric))
METRIC_ATTRIBUTES = (
    *dict.fromkeys(name for metric in METRICS for name in (*metric.attributes, *metric.optional)),
    ATTR_RING_FILE,
)


if __name__ == "__main__":
    from vllm_kvfix_sidecar.tables import markdown_table

    sys.stdout.write(markdown_table())
