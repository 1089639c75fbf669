# SPDX-License-Identifier: Apache-2.0
"""The panes of ``vllm-kvfix top`` as lines of text, the same on the live screen and in a ticket."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import report_text
from vllm_kvfix_sidecar.report import ALARMING, CANNOT_TELL, NO_PATCH_STATE, NOTHING_ALARMING, SHORTEST_S
from vllm_kvfix_sidecar.report_text import NEAR
from vllm_kvfix_sidecar.top_lines import Column, Line, cells, cut, fitted, line, shortened, spark, table, wrapped
from vllm_kvfix_sidecar.verdict import Kind
from vllm_kvfix_sidecar.words import clean, duration, share, size, when

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vllm_kvfix_sidecar.report import Usage
    from vllm_kvfix_sidecar.top_told import Facts, Process, Told
    from vllm_kvfix_sidecar.verdict import Interval

MOST_LINES = 1000
UNKNOWN = "-"
_SPARK, _LONG_SPARK = 12, 40
_LONGEST_WORD = 32
_MOST_ENDS = 3
_ONCE_CONTAINERS, _ONCE_REQUESTS = 5, 10
_COLOURS = {NOTHING_ALARMING: "green", ALARMING: "red", CANNOT_TELL: "yellow"}
_SHORT = {
    Kind.UNBOUNDED: "unbounded",
    Kind.BOUNDED: "bounded",
    Kind.RETAINED: "retained",
    Kind.UNEXPLAINED: "unexplained",
}
# The words of `when`, as short as a column.
_UNITS = {"second": "s", "minute": "min", "hour": "h", "day": "d", "year": "y"}
_SHORTER = (
    (" or more", "+"),
    ("about ", "~"),
    ("within ", "<"),
    ("in ", ""),
    (" to ", "-"),
    *((f" {name}{plural}", f" {unit}") for name, unit in _UNITS.items() for plural in ("s", "")),
)
# From here on a verdict's last word is shown, too.
_ROOMY = 100


def moment(unix_s: float, form: str = "%H:%M:%S") -> str:
    """A time of day on this machine."""
    try:
        return time.strftime(form, time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


# ---- the answer ----


def banner(told: Told, width: int, most: int = 1000) -> list[Line]:
    """The answer: the gravest verdict first, then one sentence, which loses the middle of its paths before its end."""
    word = (told.gravest.value if told.gravest and told.exit_code != CANNOT_TELL else "cannot tell").upper()
    badge = cut(f" {word} ", width)
    answer = told.answer.removeprefix("Cannot tell: ") if told.exit_code == CANNOT_TELL else told.answer
    rows = _sentence(badge, answer, width)
    if len(rows) > most:
        rows = _sentence(badge, " ".join(shortened(part, _LONGEST_WORD) for part in answer.split()), width)
    rows = rows[: max(1, most)]
    colour = _COLOURS[told.exit_code]
    first = rows[0]
    rows[0] = fitted([(badge, f"bold reverse {colour}"), (first[0][0][len(badge) :], "bold"), *first[1:]], width)
    return rows


def _sentence(badge: str, answer: str, width: int) -> list[Line]:
    words = wrapped(f"{'x' * len(badge)} {answer}", width, style="bold")  # the badge is no word to be parted
    return [[(badge + row[1][0][len(badge) :], "bold")] if at == 0 else row for at, row in enumerate(words)]


def limits(told: Told, width: int) -> list[Line]:
    """What the memory counts against, and how full that is."""
    found: dict[Usage, str] = {}
    for process in told.processes:
        usage = process.known.usage
        if usage is not None and usage.usage is not None and usage.share is not None and not process.ended:
            style = "bold red" if usage.share >= NEAR else ""
            found[usage] = style
    return [fitted(line(_usage(usage), style), width) for usage, style in found.items()]


def _usage(usage: Usage) -> str:
    used = f"{size(usage.usage or 0)} of {size(usage.limit)} used ({share(usage.share or 0)})"
    return f"{clean(usage.of, 32)}: {used}"


def troubles(told: Told, width: int) -> list[Line]:
    """Why what is shown may be old, or not all."""
    return [row for text in _troubles(told) for row in wrapped(text, width, "! ", "yellow")]


def _troubles(told: Told) -> Iterator[str]:
    sidecar = told.more.at("sidecar")
    why = ", ".join(reason.text() for reason in sidecar.each("why_not") if reason.text())
    if sidecar.flag("alive") is False:
        yield f"The sidecar is stuck{f' ({why})' if why else ''}, so this may be old: restart it."
    elif sidecar.flag("ready") is False:
        yield f"Not all is seen{f': {why}' if why else ''}."
    lost = sum(engine.number("ring", "lost") or 0 for engine in told.more.each("engines"))
    dropped = sum(engine.number("ring", "dropped") or 0 for engine in told.more.each("engines"))
    if lost or dropped:
        yield f"Events were lost: {dropped:,.0f} given up by engines, {lost:,.0f} overwritten before they were read."
    for kind in ("spans", "events"):
        count = sidecar.number(kind, "dropped")
        if count:
            yield f"{count:,.0f} {kind} were dropped instead of exported."
    yield from told.notes


def to_tell(told: Told, width: int) -> list[Line]:
    """What to do where nothing can be told yet."""
    advice = report_text.to_tell(told.report) if told.exit_code == CANNOT_TELL else ()
    return [row for text in advice for row in wrapped(text, width, "  ")]


# ---- processes ----


def _left(interval: Interval | None) -> str:
    if interval is None:
        return UNKNOWN
    return _shorter(when(interval))


def _shorter(text: str) -> str:
    for long, short in _SHORTER:
        text = text.replace(long, short)
    return text


def _slope(process: Process) -> float | None:
    slope = process.known.verdict.slope
    return None if slope is None else slope.best


def _rss(process: Process) -> float | None:
    figures = process.known.figures
    return figures.get("status.rss", figures.get("smaps.rss"))


def _used(process: Process) -> float | None:
    memory, usage = process.known.memory, process.known.usage
    return memory / usage.limit if usage and usage.limit > 0 and memory is not None else None


def _ends(process: Process) -> float | None:
    left = process.known.verdict.time_to_limit_s
    return None if left is None else -left.best


# What the table may be sorted by: the name of the column, and what is largest first; None stays last.
SORTS: tuple[tuple[str, Callable[[Process], float | None] | None], ...] = (
    ("VERDICT", None),
    ("RSS", _rss),
    ("ANON+SWAP", lambda process: process.known.memory),
    ("OF LIMIT", _used),
    ("GROWTH/H", _slope),
    ("LEFT", _ends),
    ("PID", lambda process: -process.known.verdict.pid),
)


def ordered(processes: Sequence[Process], sort: int, *, reverse: bool) -> list[Process]:
    """The processes in the order that was asked for; of what is not known the order stays, at the end."""
    _, figure = SORTS[sort]
    if figure is None:
        return list(reversed(processes)) if reverse else list(processes)
    known = [process for process in processes if figure(process) is not None]
    known.sort(key=lambda process: figure(process) or 0.0, reverse=not reverse)
    return [*known, *(process for process in processes if figure(process) is None)]


_COLUMNS = (
    Column("PID", 8),
    Column("PROCESS", 10, right=False, least=10),
    Column("RSS", 3),
    Column("ANON+SWAP", 6),
    Column("OF LIMIT", 5),
    Column("GROWTH/H", 7),
    Column("LEFT", 9),
    Column("VERDICT", 11, right=False),
    Column("PATCH", 2, right=False),
    Column("LAST HOUR", 1, right=False),
)


def processes(  # noqa: PLR0913  # what may be chosen of a table
    told: Told,
    history: Facts,
    width: int,
    *,
    height: int = MOST_LINES,
    sort: int = 0,
    reverse: bool = False,
    selected: str = "",
) -> list[Line]:
    """The table, as many rows of it around the selected one as there is room for."""
    shown = ordered(told.processes, sort, reverse=reverse)
    if not shown:
        return wrapped("No vLLM process is seen.", width)
    at = next((at for at, process in enumerate(shown) if process.key == selected), 0)
    first, last = _window(len(shown), at, max(1, height - 1))
    rows = [_process(process, history, roomy=width >= _ROOMY) for process in shown[first:last]]
    mark = "▲" if reverse else "▼"
    columns = [
        column._replace(title=f"{column.title}{mark}" if column.title == SORTS[sort][0] and sort else column.title)
        for column in _COLUMNS
    ]
    lines = table(columns, rows, width)
    if selected:
        lines[1 + at - first] = [("".join(text for text, _ in lines[1 + at - first]), "reverse")]
    hidden = len(shown) - (last - first)
    return [*lines, fitted(line(f"and {hidden} more", "dim"), width)] if hidden else lines


def _window(count: int, at: int, room: int) -> tuple[int, int]:
    """The first of those to be shown, and the one behind the last; a line is left to say how many are not."""
    if count <= room:
        return 0, count
    room = max(1, room - 1)
    first = min(max(0, at - room // 2), count - room)
    return first, first + room


def _process(process: Process, history: Facts, *, roomy: bool) -> Line:
    known, verdict = process.known, process.known.verdict
    rss, used, slope = _rss(process), _used(process), _slope(process)
    values = history.numbers("processes", process.key, "memory", "v")
    style = "dim" if process.ended else ""
    kind, kind_style = _kind(process, roomy=roomy)
    shown = (
        str(verdict.pid)[:20],
        process.title,
        "?" if rss is None else size(rss),
        "?" if known.memory is None else size(known.memory),
        UNKNOWN if used is None else share(used).replace("under ", "<"),
        UNKNOWN if slope is None else size(slope),
        "ended" if process.ended else _left(verdict.time_to_limit_s),
        kind,
        _patch(known.patch_state),
        spark(values, _SPARK),
    )
    told = [(cell, style) for cell in shown]
    told[7] = (kind, style or kind_style)
    return told


def _kind(process: Process, *, roomy: bool) -> tuple[str, str]:
    """The verdict in a column, and its style; who was watched for a moment only is not called steady."""
    kind = process.known.verdict.kind
    if kind is Kind.STEADY and process.known.watched_s < SHORTEST_S:
        return "too early", "dim"
    text = kind.value if roomy else _SHORT.get(kind, kind.value)
    if process.known.verdict.alarming:
        return text, "bold red"
    return text, "green" if kind is Kind.STEADY else "yellow"


def _patch(state: str) -> str:
    return UNKNOWN if state in {"", NO_PATCH_STATE} else clean(state, 16)


# ---- one process ----


def detail(process: Process, history: Facts, width: int, *, answer: str = "", most_containers: int = 40) -> list[Line]:
    """All about one process: what is said of it, unless the answer said so, what to do, why, its containers."""
    known, verdict = process.known, process.known.verdict
    version = f", vLLM {clean(known.vllm_version, 40)}" if known.vllm_version else ""
    patch = "" if _patch(known.patch_state) == UNKNOWN else f", fix {_patch(known.patch_state)}"
    watched = f", watched for {duration(known.watched_s)}"
    ended = f", ended at {moment(process.more.number('ended_unix_s') or math.nan)}" if process.ended else ""
    rows = wrapped(f"{clean(verdict.role, 32)} {verdict.pid}{version}{patch}{watched}{ended}", width, style="dim")
    sentence = report_text.sentence(process.known)
    if sentence not in answer:
        rows += wrapped(f"{sentence}.", width, style="bold" if verdict.alarming else "")
    advice = report_text.to_do(known)
    if advice:
        rows += [line(), *_headed("What to do", width), *wrapped(clean(advice, 2000), width, "  ")]
    rows += _memory(process, history, width)
    evidence = [row for told in report_text.evidence_of(known) for row in wrapped(clean(told, 2000), width, "  - ")]
    if evidence:
        rows += [line(), *_headed("Evidence", width), *evidence]
    containers = _containers(process, width, most_containers)
    if containers:
        rows += [line(), *_headed("Containers, the largest", width), *containers]
    unread = [
        row
        for scope, reason in known.unread.items()
        for row in wrapped(f"{clean(scope, 32)}: {clean(reason)}", width, "  - ")
    ]
    if unread:
        rows += [line(), *_headed("Not read", width), *unread]
    return rows


def _headed(text: str, width: int) -> list[Line]:
    return [fitted(line(text, "bold"), width)]


def _memory(process: Process, history: Facts, width: int) -> list[Line]:
    figures = process.known.figures
    categories = {name.removeprefix("smaps."): value for name, value in figures.items() if name.startswith("smaps.")}
    parts = sorted(((value, name) for name, value in categories.items() if name not in _SUMS), reverse=True)
    told = ", ".join(f"{name.replace('_', ' ')} {size(value)}" for value, name in parts[:6] if value)
    values = history.numbers("processes", process.key, "memory", "v")
    rows = []
    if len(values) > 1:
        chart = spark(values, min(_LONG_SPARK, width // 2))
        rows.append(fitted(line(f"  last hour  {chart}  {size(min(values))} to {size(max(values))}"), width))
    if told:
        rows += wrapped(told, width, "  resident   ")
    return [line(), *_headed("Memory", width), *rows] if rows else []


_SUMS = {"rss", "pss", "uss", "swap"}
_CONTAINER_COLUMNS = (
    Column("CONTAINER", 9, right=False, least=24),
    Column("ENTRIES", 8),
    Column("CAPACITY", 6),
    Column("DRAINED", 5),
    Column("ORPHANS", 3),
    Column("SIZE", 7),
)


def _containers(process: Process, width: int, most: int) -> list[Line]:
    found = process.more.each("containers")
    culprits = {clean(culprit.path) for culprit in process.known.verdict.culprits}
    found.sort(key=lambda container: container.text("path") not in culprits)
    rows = [_container(container, culprits) for container in found[:most]]
    if not rows:
        return []
    lines = [[("  ", ""), *row] for row in table(_CONTAINER_COLUMNS, rows, max(1, width - 2))]
    more = [line(f"  and {len(found) - most} more", "dim")] if len(found) > most else []
    return [fitted(row, width) for row in (*lines, *more)]


def _container(container: Facts, culprits: set[str]) -> Line:
    path = container.text("path")
    style = "bold" if path in culprits else ""
    ratio = container.number("drain_ratio")
    shown = (
        path,
        count(container.number("entries")),
        count(container.number("capacity_entries")),
        UNKNOWN if ratio is None else share(ratio),
        count(container.number("orphans")),
        bytes_of(container.number("size_bytes")),
    )
    return [(cell, style) for cell in shown]


def count(value: float | None) -> str:
    """A whole number."""
    return UNKNOWN if value is None else f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"  # noqa: PLR2004  # fits


def _pid(of: Facts) -> str:
    return count(of.number("pid")).replace(",", "")


def bytes_of(value: float | None) -> str:
    """A size."""
    return UNKNOWN if value is None else size(value)


# ---- engines, requests, sidecar ----

_ENGINE_COLUMNS = (
    Column("PID", 9),
    Column("STATE", 5, right=False),
    Column("HELD", 10),
    Column("OF POOL", 10),
    Column("CACHED", 4),
    Column("RUN", 7),
    Column("WAIT", 7),
    Column("DONE", 3),
    Column("PREEMPTED", 2),
    Column("BACKLOG", 8),
    Column("PATCH", 6, right=False),
    Column("LOST", 1),
)


def engines(told: Told, width: int) -> list[Line]:
    """The KV pool of each engine, its requests, and what its lists of new block ids hold."""
    found = told.more.each("engines")
    if not found:
        return wrapped("No engine is followed: only one that has a ring of vllm-kvfix tells of its pool.", width)
    return table(_ENGINE_COLUMNS, [_engine(engine) for engine in found], width)


def _engine(engine: Facts) -> Line:
    held, limit = engine.number("pool", "held"), engine.number("pool", "limit")
    finished = [done for _, part in engine.pairs("requests", "finished") if (done := part.number()) is not None]
    backlog = engine.numbers("backlog")
    patch, lost = engine.text("patch_state", most=16), engine.number("ring", "lost")
    grows = bool(sum(backlog)) and patch in {"refused", "off"}
    return [
        (_pid(engine), ""),
        (engine.text("state", most=12), "" if engine.text("state") == "live" else "yellow"),
        (f"{share(held / limit)}" if held is not None and limit else UNKNOWN, ""),
        (count(limit), ""),
        (count(engine.number("pool", "cached")), ""),
        (count(engine.number("requests", "running")), ""),
        (count(engine.number("requests", "waiting")), ""),
        (count(sum(finished)) if finished else UNKNOWN, ""),
        (count(engine.number("totals", "preemptions")), ""),
        (count(sum(backlog)) if backlog else UNKNOWN, "bold red" if grows else ""),
        (_patch(patch), ""),
        (count(lost), "yellow" if lost else ""),
    ]


_REQUEST_COLUMNS = (
    Column("REQUEST", 9, right=False, least=16),
    Column("STATE", 6, right=False),
    Column("BLOCKS", 8),
    Column("PEAK", 3),
    Column("HELD", 7),
    Column("QUEUED", 4),
    Column("PREEMPTED", 2),
    Column("TRACE", 5, right=False),
)


def requests(told: Told, width: int, most: int = 20) -> list[Line]:
    """The requests that hold most blocks."""
    found = told.more.each("requests")
    if not found:
        return wrapped("No request holds blocks now.", width)
    return table(_REQUEST_COLUMNS, [_request(request) for request in found[:most]], width)


def _request(request: Facts) -> Line:
    held, queued = request.number("held_s"), request.number("queued_s")
    shown = (
        request.text("request_id"),
        request.text("state", most=12),
        count(request.number("blocks")),
        count(request.number("peak_blocks")),
        UNKNOWN if held is None else _brief(held),
        UNKNOWN if queued is None else _brief(queued),
        count(request.number("preemptions")),
        request.text("trace_id", most=32) or UNKNOWN,
    )
    return [(cell, "") for cell in shown]


def _brief(seconds: float) -> str:
    if 0 <= seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return _shorter(duration(seconds))


def sidecar(told: Told, width: int) -> list[Line]:
    """How the sidecar itself is, and what it lost."""
    found = told.more.at("sidecar")
    rss, cpu, up = (found.number(key) for key in ("rss_bytes", "cpu_ratio", "uptime_s"))
    facts = [
        ("pid", _pid(found)),
        ("version", found.text("version", most=40)),
        ("up for", "" if up is None else duration(up)),
        ("memory", "" if rss is None else size(rss)),
        ("CPU", "" if cpu is None else f"{cpu * 100:.1f} % of a core" if abs(cpu) < 1e6 else ""),  # noqa: PLR2004  # fits
        ("errors", count(found.number("errors"))),
    ]
    rows = wrapped(", ".join(f"{name} {value}" for name, value in facts if value not in {"", UNKNOWN}), width)
    for kind, name in (("spans", "traces"), ("metric_exports", "metrics"), ("events", "events")):
        rows += _exports(found, kind, name, width)
    folders = [folder.text() for folder in found.each("folders")]
    if folders:
        rows += wrapped(", ".join(folders), width, "rings in ")
    for engine in told.more.each("engines"):
        ring = engine.at("ring")
        numbers = ", ".join(f"{count(ring.number(key))} {key}" for key in ("published", "dropped", "lost", "malformed"))
        rows += wrapped(numbers, width, f"events of {_pid(engine)}: ")
    for path, reason in told.more.pairs("not_followed"):
        rows += wrapped(f"{path}: {reason.text()}", width, "not followed: ")
    return [*rows, *_marks(told, width)]


def _exports(sidecar: Facts, kind: str, name: str, width: int) -> list[Line]:
    """What became of a signal; nothing where nothing was to be sent."""
    to = sidecar.text("destinations", name, most=200)
    numbers = [(key, value) for key, part in sidecar.pairs(kind) if (value := part.number()) is not None]
    if to in {"", "none"} and not any(value for _, value in numbers):
        return []
    counts = ", ".join(f"{count(value)} {key}" for key, value in numbers)
    return wrapped("; ".join(part for part in (f"to {to}" if to else "", counts) if part), width, f"{name:<8} ")


def _marks(told: Told, width: int) -> list[Line]:
    """What happened, the newest first."""
    found = sorted(told.more.each("marks"), key=lambda mark: -(mark.number("time_unix_s") or 0))
    rows = [
        row
        for mark in found[:20]
        for row in wrapped(mark.text("text"), width, f"  {moment(mark.number('time_unix_s') or math.nan)}  ")
    ]
    return [line(), *_headed("What happened", width), *rows] if rows else []


# ---- a ticket ----


def once(told: Told, history: Facts, width: int, source: str) -> list[Line]:
    """All of it, for a ticket."""
    rows = [*banner(told, width), *limits(told, width), *troubles(told, width)]
    told_at = moment(told.time_unix_s, "%Y-%m-%d %H:%M:%S %Z")
    rows += wrapped(f"{told_at}, {told.more.text('tool', most=60) or 'vllm-kvfix'}, {source}", width, style="dim")
    rows += _part("What to do", to_tell(told, width), width)
    rows += _part("Processes", processes(told, history, width), width)
    grave = [process for process in told.processes if process.known.verdict.kind is not Kind.STEADY]
    for process in grave[:_MOST_ENDS]:
        about = detail(process, history, width, answer=told.answer, most_containers=_ONCE_CONTAINERS)
        rows += _part(report_text.who(process.known.verdict), about, width)
    rows += _part("Engines", engines(told, width), width)
    rows += _part("Requests that hold most blocks", requests(told, width, _ONCE_REQUESTS), width)
    rows += _part("Sidecar", sidecar(told, width), width)
    return [fitted(row, width) for row in rows]


def _part(title: str, rows: Iterable[Line], width: int) -> list[Line]:
    rows = list(rows)
    if not rows:
        return []
    bar = f"── {title} " if width > cells(title) + 4 else title
    return [line(), line(bar + "─" * (width - cells(bar)), "bold"), *rows]
