# SPDX-License-Identifier: Apache-2.0
"""A post-mortem as one JSON object, ``schema_version`` 1; its keys are told in ``docs/postmortem.md``.

Within one schema version keys are only added. Units stand in the names; times are unix seconds; what is not known is
``null`` or missing, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_kvfix_sidecar import death as deaths
from vllm_kvfix_sidecar import report

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_kvfix.ring.reader import Header
    from vllm_kvfix_sidecar.death import Death
    from vllm_kvfix_sidecar.last_words import Holding, LastWords
    from vllm_kvfix_sidecar.oom import Use

SCHEMA_VERSION = 1
MOST_REQUESTS = 10_000


def of(death: Death, now_unix_ns: int, exit_code: int, exported: str | None = None) -> dict[str, Any]:
    """The object.

    Args:
        death: What is told.
        now_unix_ns: The wall clock.
        exit_code: The command's.
        exported: What was exported; None: nothing was asked for.
    """
    words = death.words
    header = words.header
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": report.TOOL,
        "time_unix_s": now_unix_ns / 1e9,
        "exit_code": exit_code,
        "answer": deaths.sentence(death),
        "notes": list(words.notes),
        "exported": exported,
        "ring": {
            **ring(words.path, words.size, header, words.proof.state),
            "lost": words.lost,
            "damaged": words.malformed,
        },
        "process": {
            **report.process_json(death.process),
            "engine_index": header.engine_index,
            "plugin_version": header.plugin_version,
            "started_unix_s": words.started_unix_ns / 1e9,
        },
        "end": {
            "kind": death.end.value,
            "time_unix_s": death.ended_unix_ns / 1e9,
            "last_sign_of_life_unix_s": words.unix_ns(words.last) / 1e9,
            "exception": header.end_reason or None,
            "proof": list(words.proof.sentences),
            "others": list(death.others),
        },
        "oom": {"killed": death.oom.oom.value, "why": death.oom.why, "evidence": list(death.oom.evidence)},
        "use": death.use and _use(death.use),
        "last_seconds": _last_seconds(death.steps),
        "grown": {
            name: {"first": grown.first, "last": grown.last, "seconds": grown.seconds}
            for name, grown in words.grown.items()
        },
        "containers": [
            {
                "path": found.path,
                "entries": found.length,
                "capacity_entries": found.capacity,
                "size_bytes": found.size,
                "orphans": found.orphans,
            }
            for found in words.containers
        ],
        "requests": {
            "lost": death.lost_requests,
            "unknown": death.steps.unknown_requests,
            "known": [_request(found, death.steps) for found in death.steps.requests[:MOST_REQUESTS]],
        },
    }


def ring(path: Path, size: int, header: Header, state: str) -> dict[str, Any]:
    """What a ring's header says."""
    return {
        "path": str(path),
        "size_bytes": size,
        "pid": header.pid,
        "role": header.role,
        "state": state,
        "end": header.end,
        "last_sign_of_life_unix_s": (header.heartbeat_ns + header.clock_offset_ns) / 1e9,
        "events": header.events,
        "dropped": header.dropped,
        "vllm_version": header.vllm_version,
    }


def _use(use: Use) -> dict[str, Any]:
    return {"usage_bytes": use.usage, "limit_bytes": use.limit, "of": use.of, "before_the_end_s": use.age_s}


def _last_seconds(words: LastWords) -> dict[str, Any]:
    step = words.last_step
    return {
        "pid": words.header.pid,
        "seconds": words.seconds,
        "rows": [{**row._asdict(), "time": words.unix_ns(row.time) / 1e9} for row in words.rows],
        "last_step": step and {**step._asdict(), "time": words.unix_ns(step.time) / 1e9, "backlog": list(step.backlog)},
        "blocks": words.config and words.config.blocks,
    }


def _request(found: Holding, words: LastWords) -> dict[str, Any]:
    record = found.record
    return {
        "id": record.request_id,
        "state": found.state,
        "blocks": found.blocks,
        "age_s": (record.end - record.arrival) / 1e9,
        "arrival_unix_s": words.unix_ns(record.arrival) / 1e9,
        "prompt_tokens": record.prompt_tokens,
        "preemptions": record.preemptions,
        "trace_id": f"{record.trace_id:032x}",
        "span_id": f"{record.span_id:016x}",
    }
