# SPDX-License-Identifier: Apache-2.0
"""What the spans and metrics of a ledger must be, worked out from the ledger alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.sidecar_e2e.ledger import Ledger
    from tests.sidecar_e2e.telemetry import Span

# The offset between the clocks is measured anew with each frame; a time in a span has moved by as much.
OFFSET_TOLERANCE_NS = 500_000_000
ID = "vllm_kvfix.request.engine_id"
REASON = "vllm_kvfix.request.finish_reason"
WHY_KEPT = "vllm_kvfix.sampling.reason"
ENGINE_ENDED = "engine_ended"
ERROR = 2
# OTLP: bit 8, it is known whether the parent is remote; bit 9, it is.
LOCAL_PARENT, REMOTE_PARENT = 0x100, 0x300


def by_id(spans: Iterable[Span]) -> dict[object, Span]:
    """The spans by the engine's id of their request."""
    return {span.attributes[ID]: span for span in spans}


def of_engine(spans: Iterable[Span], pid: int) -> list[Span]:
    """The spans of the engine of process ``pid``."""
    return [span for span in spans if span.resource["process.pid"] == pid]


def twice(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Ids of spans that are there more than once."""
    return [pair for pair, n in Counter((s.trace_id, s.span_id) for s in spans).items() if n > 1]


def differences(spans: Sequence[Span], book: Ledger, lines: Sequence[dict[str, Any]] | None = None) -> list[str]:
    """What is wrong with the spans of one engine that should be those of ``lines``; None: of all that have ended."""
    lines = book.requests if lines is None else lines
    found, wanted = by_id(spans), {line["id"] for line in lines}
    numbers = {line["number"]: line["id"] for line in (*book.requests, *book.open)}
    wrong = [f"{len(wanted - set(found))} missing"] if wanted - set(found) else []
    wrong += [f"{len(set(found) - wanted)} too many"] if set(found) - wanted else []
    wrong += [f"{len(twice(spans))} twice"] if twice(spans) else []
    ids = {number: found[name].span_id for number, name in numbers.items() if name in found}
    for line in lines:
        span = found.get(line["id"])
        if span is not None:
            wrong += [f"{line['number']}: {text}" for text in _wrong(span, line, book, ids)]
    return wrong


def _wrong(span: Span, line: dict[str, Any], book: Ledger, ids: dict[int, int]) -> list[str]:
    offset = span.start - line["arrival"]
    wanted = {
        "attributes": _attributes(line),
        "end": line["freed_at"] + offset,
        "events": _events(line, offset),
        "parent": _parent(line),
        "links": sorted({ids[number] for number in line["takers"] if number in ids}),
        "status": ERROR if line["reason"] in {"error", ENGINE_ENDED} else 0,
        "flags": REMOTE_PARENT if line["context"] else LOCAL_PARENT,
    }
    got = {
        "attributes": {name: span.attributes.get(name) for name in wanted["attributes"]},
        "end": span.end,
        "events": [(event.name, event.time, event.attributes) for event in span.events],
        "parent": (span.trace_id if span.parent_id else 0, span.parent_id),
        "links": sorted(link.span_id for link in span.links),
        "status": span.status,
        "flags": span.flags,
    }
    wrong = [f"{name} is {got[name]}, not {wanted[name]}" for name in wanted if got[name] != wanted[name]]
    if abs(offset - book.engine["offset"]) > OFFSET_TOLERANCE_NS:
        wrong.append(f"begins {(offset - book.engine['offset']) / 1e9} s off")
    return wrong


def _parent(line: dict[str, Any]) -> tuple[int, int]:
    context = line["context"]
    return (int(context[0], 16), int(context[1], 16)) if context else (0, 0)


def _attributes(line: dict[str, Any]) -> dict[str, object]:
    groups = line["groups"]
    wanted = {
        REASON: line["reason"],
        "gen_ai.request.id": line["id"][:-9],
        "gen_ai.usage.input_tokens": line["prompt_tokens"],
        "gen_ai.usage.output_tokens": line["output_tokens"],
        "vllm_kvfix.prefix_cache.hit_tokens": line["hit_tokens"],
        "vllm_kvfix.prefix_cache.external_tokens": line["external_tokens"],
        "vllm_kvfix.kv_cache.blocks.new": sum(group[1] for group in groups),
        "vllm_kvfix.kv_cache.blocks.reused": sum(group[0] for group in groups),
        "vllm_kvfix.kv_cache.groups.new": tuple(group[1] for group in groups),
        "vllm_kvfix.kv_cache.groups.reused": tuple(group[0] for group in groups),
        "vllm_kvfix.kv_cache.blocks.peak": line["peak"],
        "vllm_kvfix.kv_cache.block_seconds": line["held"] / 1e6,
        "vllm_kvfix.request.preemptions": line["preemptions"],
        "vllm_kvfix.request.refusals": line["refusals"],
        "vllm_kvfix.request.queue_duration": (line["admission"] - line["arrival"]) / 1e9,
        "vllm_kvfix.request.block_residency": (line["freed_at"] - line["admission"]) / 1e9,
    }
    if not line["admission"]:
        wanted["vllm_kvfix.request.queue_duration"] = wanted["vllm_kvfix.request.block_residency"] = None
    return wanted


def _events(line: dict[str, Any], offset: int) -> list[tuple[str, int, dict[str, object]]]:
    made = [_event(detail, offset) for detail in line["details"]]
    if line["freed_at"] > line["end"]:
        made.append(("vllm_kvfix.finished", line["end"] + offset, {}))
    return made


def _event(detail: list[Any], offset: int) -> tuple[str, int, dict[str, object]]:
    kind, time, *numbers = detail
    attributes: dict[str, object] = {}
    if kind in {"admitted", "resumed"}:
        new, reused, hit, external = numbers
        attributes = {
            "vllm_kvfix.kv_cache.blocks.new": new,
            "vllm_kvfix.kv_cache.blocks.reused": reused,
            "vllm_kvfix.prefix_cache.hit_tokens": hit,
            "vllm_kvfix.prefix_cache.external_tokens": external,
        }
    elif kind == "allocated":
        attributes = {"vllm_kvfix.kv_cache.blocks.new": sum(numbers)}
    elif kind == "preempted":
        released, taker = numbers
        attributes = {"vllm_kvfix.kv_cache.blocks.released": released}
        attributes |= {"vllm_kvfix.request.taker": taker} if taker else {}
    return f"vllm_kvfix.{kind}", time + offset, attributes
