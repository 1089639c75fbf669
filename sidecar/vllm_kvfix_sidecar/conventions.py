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
ATTR_PID = Name("process.pid", "int", "the engine process, as its own PID namespace counts")
ATTR_ENGINE_INDEX = Name("vllm_kvfix.engine.index", "int", "data-parallel rank of the engine")
ATTR_VLLM_VERSION = Name("vllm_kvfix.vllm.version", "string", "version of the vLLM that the engine runs")
ATTR_RING_FILE = Name(
    "vllm_kvfix.ring.file",
    "string",
    "file name of the engine's ring; only where two live engines of two PID namespaces share pid and index",
)

# Of metrics.
ATTR_STATE = Name("vllm_kvfix.state", "string", "used, free; running, waiting; a state of an engine or of the patch")
ATTR_GROUP = Name("vllm_kvfix.kv_cache.group", "int", "index of the KV-cache group")
ATTR_GROUP_KIND = Name("vllm_kvfix.kv_cache.group.kind", "string", "vLLM's name of the group's kind")
ATTR_OUTCOME = Name("vllm_kvfix.outcome", "string", "exported, failed, dropped or unsampled")
ATTR_CPU_MODE = Name("cpu.mode", "string", "user or system")

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
RESOURCE_ATTRIBUTES = (ATTR_PID, ATTR_ENGINE_INDEX, ATTR_VLLM_VERSION)
ENGINE_ATTRIBUTES = (ATTR_PID, ATTR_ENGINE_INDEX)


class Kind(Enum):
    """What a metric's points are, in the words of OpenTelemetry."""

    COUNTER = "Counter"
    UP_DOWN_COUNTER = "UpDownCounter"
    GAUGE = "Gauge"
    HISTOGRAM = "Histogram"


@dataclass(frozen=True)
class Metric:
    """One metric: its unit (UCUM), its attributes, all of few values, and the bounds of a histogram's buckets.

    ``from_engine``: a counter that the engine keeps, so that it runs on when the sidecar starts anew.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[Name, ...] = ENGINE_ATTRIBUTES
    bounds: tuple[float, ...] = field(default=(), repr=False)
    from_engine: bool = False

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus, less the ``_total`` of a counter: as the OpenTelemetry specification turns names."""
        name = self.name.replace(".", "_")
        if self.unit == "1" and self.kind is Kind.GAUGE:
            return f"{name}_ratio"
        word = _PROMETHEUS_UNITS.get(self.unit)
        return f"{name}_{word}" if word else name


_PROMETHEUS_UNITS = {"s": "seconds", "By": "bytes"}


def _of_engine(name: str, unit: str, description: str, *more: Name) -> Metric:
    return Metric(name, Kind.UP_DOWN_COUNTER, unit, description, (*ENGINE_ATTRIBUTES, *more))


def _total(name: str, unit: str, description: str) -> Metric:
    return Metric(name, Kind.COUNTER, unit, description, from_engine=True)


def _histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, description, bounds=bounds)


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
SPANS = _of_sidecar(
    "spans", Kind.COUNTER, "{span}", "Spans by what became of them; unsampled ones were never made.", ATTR_OUTCOME
)
SPANS_PENDING = _of_sidecar("spans.pending", Kind.UP_DOWN_COUNTER, "{span}", "Spans that wait for their export.")
METRIC_EXPORTS = _of_sidecar("metric_exports", Kind.COUNTER, "{export}", "Exports of metrics.", ATTR_OUTCOME)
ENGINES = _of_sidecar("engines", Kind.UP_DOWN_COUNTER, "{engine}", "Engines that are followed.", ATTR_STATE)
FILES_REFUSED = _of_sidecar(
    "files_refused", Kind.UP_DOWN_COUNTER, "{file}", "Files in the ring folders that were refused; the log says why."
)
CPU_TIME = Metric("process.cpu.time", Kind.COUNTER, "s", "CPU time of the sidecar itself.", (ATTR_CPU_MODE,))
MEMORY_USAGE = Metric("process.memory.usage", Kind.UP_DOWN_COUNTER, "By", "Resident memory of the sidecar itself.", ())

METRICS = tuple(value for value in tuple(vars().values()) if isinstance(value, Metric))


if __name__ == "__main__":
    from vllm_kvfix_sidecar.tables import markdown_table

    sys.stdout.write(markdown_table())
