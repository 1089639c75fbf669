# SPDX-License-Identifier: Apache-2.0
"""A post-mortem in plain words: the answer in one line, what to do, how it is known, and the last seconds as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvfix.events import SCOPES
from vllm_kvfix_sidecar import death as deaths
from vllm_kvfix_sidecar import report_text
from vllm_kvfix_sidecar.death import End, utc
from vllm_kvfix_sidecar.oom import Oom
from vllm_kvfix_sidecar.report import SHORTEST_S
from vllm_kvfix_sidecar.report_text import DEFAULT_WIDTH, Paint, columns
from vllm_kvfix_sidecar.words import clean, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_kvfix_sidecar.death import Death
    from vllm_kvfix_sidecar.last_words import Grown, Holding

MOST_REQUESTS = 50
MOST_CONTAINERS = 8
# What a person looks at first; the JSON object has all.
_SHOWN = ("status.rss", "status.anon", "status.swap", "malloc.in_use", "malloc.retained", "cgroup.usage", "cgroup.anon")
_COUNTED = ("cgroup.oom_kill_count", "cgroup.max_count")
_GREEN, _RED, _YELLOW = "32", "31", "33"
_NOT_OURS = "vLLM's log of that time says more than a ring can: look there first"


def text(death: Death, now_unix_ns: int, width: int = DEFAULT_WIDTH, *, colour: bool = False) -> str:
    """All that is to be said, for a terminal of so many columns; ends in a line feed."""
    paint = Paint(width, colour=colour)
    end = death.end
    code = _RED if death.is_alarming else _GREEN if end is End.IN_ORDER else _YELLOW
    lines = [paint.painted(deaths.sentence(death), code)]
    if end not in {End.ALIVE, End.UNCLEAR}:
        for heading, part in (
            ("What to do", paint.points(_to_do(death))),
            ("How it is known", paint.points(_known(death, now_unix_ns))),
            (_last_heading(death), _last_seconds(death)),
            ("Memory at the end", _memory(death)),
            ("What grew", paint.points(_grew(death))),
            ("Containers at the end, the largest first", _containers(death)),
            (_requests_heading(death), _requests(death)),
            ("The process", paint.points(_process(death))),
        ):
            told = list(part)
            if told:
                lines += [paint.heading(heading), *told]
    lines += ["", *(paint.wrapped(clean(note, 2000), "") for note in death.words.notes)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _to_do(death: Death) -> Iterator[str]:
    verdict, found = death.process.verdict, death.oom.oom
    if verdict.remedy is not None:
        yield report_text.to_do(death.process)
    if found in {Oom.YES, Oom.PROBABLY}:
        if verdict.remedy is None and verdict.alarming:
            yield "What grew is named below: stop that, since a higher limit would only be reached later."
        elif verdict.remedy is None and verdict.window_s < SHORTEST_S:
            yield "See what grew, below: the time is too short to tell a leak from a limit that is too low."
        elif verdict.remedy is None:
            yield "Nothing is known to leak: give vLLM more memory, or less to hold."
    elif death.is_alarming:
        yield f"{_NOT_OURS}."
    if death.is_alarming and found is Oom.UNKNOWN:
        yield "Next time a running sidecar (`vllm-kvfix sidecar`) sees the count of kills before and after, and tells."


def _known(death: Death, now_unix_ns: int) -> Iterator[str]:
    words = death.words
    yield f"It has ended: {'; '.join(words.proof.sentences)}."
    ago = duration((now_unix_ns - death.ended_unix_ns) / 1e9)
    if words.header.end_ns and death.end in {End.IN_ORDER, End.EXCEPTION}:
        yield f"It said at {utc(death.ended_unix_ns)}, {ago} ago, that it ends ({words.header.end})."
    else:
        yield f"Its last sign of life was at {utc(death.ended_unix_ns)}, {ago} ago."
    if death.end is End.KILLED:
        yield "It did not say that it ends, as it does whenever Python gets to run to the end."
    yield from (f"{_capital(said)}." for said in death.oom.evidence)
    yield from death.others


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _last_heading(death: Death) -> str:
    of = "" if death.engine is None else f" of {deaths.who(death.engine.header)}, its engine"
    return f"The last {duration(death.steps.seconds)}{of}"


def _last_seconds(death: Death) -> Iterator[str]:
    words = death.steps
    if words.rows:
        rows: list[tuple[str, ...]] = [("UTC", "STEPS/S", "TOKENS/S", "RUNNING", "WAITING", "FREE BLOCKS")]
        for row in words.rows:
            rate = [f"{count / row.seconds:.0f}" if row.seconds > 0 else "-" for count in (row.steps, row.tokens)]
            state = [str(row.running), str(row.waiting), str(row.free)]
            rows.append((utc(words.unix_ns(row.time), date=False), *rate, *state))
        yield from columns(rows)
    step = words.last_step
    if step is not None:
        pool = f" of {words.config.blocks}" if words.config else ""
        yield (
            f"  The last step, at {utc(words.unix_ns(step.time))}: {step.running} running, {step.waiting} waiting, "
            f"{step.free}{pool} blocks free; {step.steps} steps and {step.finished} requests since its start."
        )


def _memory(death: Death) -> Iterator[str]:
    words = death.words
    rows: list[tuple[str, ...]] = [("FIGURE", "AT THE END", "GREW BY", "OVER")]
    smaps = [f"smaps.{figure}" for figure in SCOPES["smaps"][4:]]
    shown = [*_SHOWN, *(name for name in smaps if name in words.grown and words.grown[name].last >= 1 << 20)]
    rows += [(name.replace(".", " "), *_figure(words.grown[name])) for name in shown if name in words.grown]
    if len(rows) > 1:
        yield from columns(rows, left={0})
    use = death.use
    if use is not None:
        yield f"  {_capital(use.words)}."
    for name in _COUNTED:
        if name in words.grown:
            grown = words.grown[name]
            yield f"  {name.replace('.', ' ').removesuffix('_count')}: {grown.last:.0f}, {grown.first:.0f} at first."


def _figure(grown: Grown) -> tuple[str, str, str]:
    return size(grown.last), size(grown.last - grown.first), duration(grown.seconds)


def _grew(death: Death) -> Iterator[str]:
    verdict, anon = death.process.verdict, death.words.grown.get("status.anon")
    if verdict.window_s >= SHORTEST_S or anon is None:
        yield f"{report_text.sentence(death.process)}."
        yield from report_text.evidence_of(death.process)
    else:
        yield (
            f"Its memory grew by {size(anon.last - anon.first)} in the {duration(anon.seconds)} that are known, which "
            "is too short for a verdict."
        )


def _containers(death: Death) -> Iterator[str]:
    found = sorted(death.words.containers, key=lambda container: -container.size)[:MOST_CONTAINERS]
    if found:
        rows = [("SIZE", "ENTRIES", "CAPACITY", "PATH")]
        for one in found:
            most = "-" if one.capacity is None else str(one.capacity)
            rows.append((size(one.size), str(one.length), most, clean(one.path, 120)))
        yield from columns(rows, left={3})


def _requests_heading(death: Death) -> str:
    lost = death.lost_requests
    return f"Requests that were not over ({lost})"


def _requests(death: Death) -> Iterator[str]:
    words = death.steps
    if words.requests:
        rows: list[tuple[str, ...]] = [("ID", "STATE", "BLOCKS", "AGE", "PROMPT", "TRACE", "SPAN")]
        rows += [_request(found) for found in words.requests[:MOST_REQUESTS]]
        yield from columns(rows, left={0, 1})
    more = len(words.requests) - MOST_REQUESTS
    if more > 0:
        yield f"  and {more} more, none with more blocks: see --json"
    if words.unknown_requests:
        yield f"  of {words.unknown_requests} the ring holds no arrival any more"


def _request(found: Holding) -> tuple[str, ...]:
    record = found.record
    return (
        clean(record.request_id, 60),
        found.state,
        str(found.blocks),
        f"{(record.end - record.arrival) / 1e9:.1f} s",
        str(record.prompt_tokens),
        f"{record.trace_id:032x}",
        f"{record.span_id:016x}",
    )


def _process(death: Death) -> Iterator[str]:
    words, header = death.words, death.words.header
    lived = duration((death.ended_unix_ns - words.started_unix_ns) / 1e9)
    role = header.role if header.engine_index == 0 else f"{header.role} {header.engine_index}"
    yield f"{role}, pid {header.pid}, started at {utc(words.started_unix_ns)}, lived for {lived}"
    yield (
        f"vLLM {clean(header.vllm_version, 64) or 'of unknown version'}, "
        f"vllm-kvfix {clean(header.plugin_version, 64) or 'of unknown version'}, the fix: {header.patch_state}"
    )
    yield f"{clean(str(words.path))}, {size(words.size)}; {header.events} events in all, {words.lost} lie no more in it"
    if header.dropped or words.malformed:
        yield f"{header.dropped} events were given up by the process, {words.malformed} frames are damaged"
    yield from (f"{scope} could not be read: {clean(reason)}" for scope, reason in death.process.unread.items())
