# SPDX-License-Identifier: Apache-2.0
"""The requests of all engines that hold most KV-cache blocks now, as the page lists them."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar.conventions import caller_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_kvfix_sidecar.report import Object
    from vllm_kvfix_sidecar.requests import Holder, RequestTracker


def most_held(followed: Iterable[tuple[str, RequestTracker]], now: float, most: int) -> list[Object]:
    """Of each engine, by its key, the requests; ``now`` in seconds of the engines' clock."""
    found = [(key, holder) for key, tracker in followed for holder in tracker.holders(most)]
    return [_request(*each, now) for each in nlargest(most, found, key=lambda each: each[1].blocks)]


def _request(engine: str, holder: Holder, now: float) -> Object:
    """Times that are not known are null, and those of a ring that lies never negative."""
    known = holder.request_id is not None
    return {
        "request_id": caller_id(holder.request_id) if holder.request_id is not None else None,
        "engine_request_id": holder.request_id,
        "engine": engine,
        "trace_id": f"{holder.trace_id:032x}" if known else None,
        "span_id": f"{holder.span_id:016x}",
        "state": holder.state,
        "blocks": holder.blocks,
        "peak_blocks": holder.peak,
        "held_s": _seconds(holder.admission, now) if holder.admission and holder.blocks else None,
        "queued_s": _seconds(holder.arrival, holder.admission / 1e9 if holder.admission else now) if known else None,
        "preemptions": holder.preemptions,
    }


def _seconds(begin_ns: int, end: float) -> float:
    return round(max(0.0, end - begin_ns / 1e9), 3)
