# SPDX-License-Identifier: Apache-2.0
"""A report in plain words: the answer in one sentence, what to do, the evidence, a table, what could not be read."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.ring.layout import ROLES
from vllm_kvfix_sidecar.report import ALARMING, CANNOT_TELL, NOTHING_ALARMING, SHORTEST_S
from vllm_kvfix_sidecar.verdict import Interval, Kind
from vllm_kvfix_sidecar.words import clean, duration, share, size, when

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from vllm_kvfix_sidecar.remedies import Remedy
    from vllm_kvfix_sidecar.report import ProcessReport, Report, Usage
    from vllm_kvfix_sidecar.verdict import Verdict

DEFAULT_WIDTH = 100
MOST_ROWS = 100
# From this share of a limit on, somebody may have been paged though nothing grows.
NEAR = 0.8
KIND_WORDS = {
    Kind.STEADY: "its memory does not grow",
    Kind.WARMING: "it grows, and it is too early to tell a warm-up from a leak (hours, where no container is to blame)",
    Kind.BOUNDED: "it grows, and what grows has a capacity at which it ends (a cache that fills)",
    Kind.UNBOUNDED: "it leaks: what grows is known, and nothing bounds it",
    Kind.RETAINED: "it has freed the memory, and the allocator keeps it instead of giving it back",
    Kind.UNEXPLAINED: "it grows, and nothing that was counted is the cause: no guess is made",
}
_PER_WORDS = {
    "request": "a request",
    "abort": "an aborted request",
    "generated_token": "a generated token",
    "block": "an allocated block",
    "step": "a step",
}
_CATEGORY_WORDS = {
    "heap": "the heap (malloc)",
    "anonymous": "anonymous mappings outside the heap",
    "stacks": "thread stacks",
    "shared_memory": "shared memory",
    "shmem": "shared memory",
    "files": "mapped files",
    "file": "mapped files",
    "ring": "the ring of vllm-kvfix",
    "driver": "driver mappings",
    "rest": "other mappings",
    "anon": "anonymous memory",
}
_SCOPE_WORDS = {
    "status": "its sizes",
    "smaps": "the categories of its memory (smaps)",
    "cgroup": "usage and limit of its cgroup",
    "malloc": "what its allocator keeps",
    "python": "Python's own counts",
    "census": "its containers",
}
_COLOURS = {NOTHING_ALARMING: "32", ALARMING: "31", CANNOT_TELL: "33"}
_BOLD = "1"
_NO_REMEDY = (
    "No remedy is known for this. Plan a restart before the limit is reached, and report it: the output of "
    "`vllm-kvfix diagnose --json` says what a maintainer needs."
)
_INSTALLED = "See that vllm-kvfix was installed beside vLLM when it started: `vllm-kvfix status` tells."
_ELSEWHERE = (
    "If its rings lie elsewhere, name the folder by --ring-dir; if they are another user's, run this as that user."
)
_RINGS = f"{_INSTALLED} {_ELSEWHERE}"
FIND_A_PROCESS = (
    "See that vLLM runs here: in Kubernetes run this in vLLM's container, or in one that shares its processes.",
    _RINGS,
)


def who(verdict: Verdict) -> str:
    """A process as a person knows it: ``EngineCore (pid 4242)``."""
    return f"{title(verdict)} (pid {verdict.pid})"


def title(verdict: Verdict) -> str:
    """What vLLM calls the process, else its role."""
    return clean(verdict.name.rpartition("::")[2] or verdict.role or "process", 32)


def sentence(process: ProcessReport) -> str:
    """What is to be said of one process, in one sentence without its full stop."""
    return _SENTENCES[process.verdict.kind](process)


def _unbounded(process: ProcessReport) -> str:
    verdict = process.verdict
    grows = f"{_what(verdict)} grows by {_pace(verdict)}"
    return _joined(f"{who(verdict)} leaks: {grows}", _forecast(process))


def _what(verdict: Verdict) -> str:
    """What grows: the first container by its path, else the category."""
    if not verdict.culprits:
        return _category(verdict)
    path, more = clean(verdict.culprits[0].path), len(verdict.culprits) - 1
    if not more:
        return path
    return f"{path} (and {more} more container{'s' if more > 1 else ''})"


def _category(verdict: Verdict) -> str:
    return _CATEGORY_WORDS.get(verdict.category or "anon") or clean(verdict.category or "", 32)


def _pace(verdict: Verdict) -> str:
    """How fast: of the culprits where there are any, since that is what leaks, else of the process."""
    if not verdict.culprits:
        slope = verdict.slope.best if verdict.slope else None
        per, follows = verdict.per or {}, verdict.follows
    else:
        slope = sum(culprit.bytes_per_hour for culprit in verdict.culprits)
        per, follows = verdict.culprits[0].per, verdict.culprits[0].follows
        if len(verdict.culprits) > 1:
            per, follows = verdict.per or {}, verdict.follows
    hourly = "an unknown amount" if slope is None else f"{size(slope)} an hour"
    return _joined(hourly, _per(per, follows))


def _per(per: Mapping[str, float], follows: str | None) -> str:
    """Bytes for each one of what it follows, and for each request, since that can be compared with the load."""
    drivers = dict.fromkeys(driver for driver in ("request", follows) if driver in per)
    return _joined(*(f"{size(per[driver])} {_unit(driver)}" for driver in drivers if driver is not None))


def _unit(driver: str) -> str:
    return _PER_WORDS.get(driver) or f"a {clean(driver, 32)}"


def _forecast(process: ProcessReport) -> str:
    left, usage = process.verdict.time_to_limit_s, process.usage
    if left is None:
        return "no limit is known" if usage is None and process.verdict.alarming else ""
    if usage is None:
        return f"the limit is reached {when(left)}"
    if usage.of == "host":
        return f"the host's {size(usage.limit)} are full {when(left)}"
    return f"the limit of {size(usage.limit)} is reached {when(left)}"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _unexplained(process: ProcessReport) -> str:
    verdict = process.verdict
    slope = f"{size(verdict.slope.best)} an hour" if verdict.slope else "an unknown amount"
    explained = "nothing that was counted explains it"
    if verdict.explained is not None and verdict.explained >= 0.01:  # noqa: PLR2004  # a percent
        explained = f"what was counted explains {share(verdict.explained)} of it"
    grows = _joined(f"grows by {slope}", _per(verdict.per or {}, verdict.follows))
    return _joined(f"{who(verdict)} {grows} in {_category(verdict)}, and {explained}", _forecast(process))


def _retained(process: ProcessReport) -> str:
    kept = process.figures.get("malloc.retained")
    amount = f"{size(kept)} of memory" if kept else "memory"
    return f"{who(process.verdict)} has freed {amount} that its allocator keeps: no object holds it"


def _bounded(process: ProcessReport) -> str:
    verdict = process.verdict
    return _joined(f"{who(verdict)} grows{_by(verdict)} as {_what(verdict)} fills", *_full(verdict), _forecast(process))


def _by(verdict: Verdict) -> str:
    return f" by {size(verdict.slope.best)} an hour" if verdict.slope and verdict.slope.best > 0 else ""


def _full(verdict: Verdict) -> Iterator[str]:
    """Where that ends, of all culprits that have a capacity."""
    bounded = [culprit for culprit in verdict.culprits if culprit.full_bytes is not None]
    if bounded:
        yield f"which ends after {size(sum(culprit.full_bytes or 0 for culprit in bounded))} more"
        yield when(Interval(*[max(culprit.full_in_s or 0 for culprit in bounded)] * 3))


def _warming(process: ProcessReport) -> str:
    verdict = process.verdict
    suspect = f"; the suspect is {_what(verdict)}" if verdict.culprits else ""
    return f"{who(verdict)} grows{_by(verdict)}, and it is too early to tell a warm-up from a leak{suspect}"


def _steady(process: ProcessReport) -> str:
    return f"{who(process.verdict)} does not grow"


_SENTENCES: dict[Kind, Callable[[ProcessReport], str]] = {
    Kind.UNBOUNDED: _unbounded,
    Kind.UNEXPLAINED: _unexplained,
    Kind.RETAINED: _retained,
    Kind.BOUNDED: _bounded,
    Kind.WARMING: _warming,
    Kind.STEADY: _steady,
}


def answer(report: Report) -> str:
    """The first line: the answer in one sentence, and whether there is something else to know."""
    ended = len(report.ended)
    if not ended:
        return _answer(report)
    return f"{_answer(report)} {ended} process{'es have' if ended > 1 else ' has'} ended: see below."


def _answer(report: Report) -> str:
    if report.exit_code == CANNOT_TELL:
        return f"Cannot tell: {_why_not(report)}."
    gravest = report.processes
    if report.exit_code == ALARMING:
        more = sum(process.verdict.alarming for process in gravest) - 1
        others = f" {more} more process{'es grow' if more > 1 else ' grows'}: see below." if more else ""
        return f"{sentence(gravest[0])}.{others}"
    if gravest[0].verdict.kind is Kind.WARMING:
        return f"No alarm yet: {sentence(gravest[0])}."
    if gravest[0].verdict.kind is not Kind.STEADY:
        return f"Nothing leaks: {sentence(gravest[0])}."
    every = "the one process" if len(gravest) == 1 else f"all {len(gravest)} processes"
    return f"Nothing grows: {every} held still for {duration(report.watched_s)}."


def _why_not(report: Report) -> str:
    if not report.processes:
        return "no vLLM process was found"
    if not any(process.is_readable for process in report.processes):
        reasons = {reason for process in report.processes for reason in process.unread.values()}
        why = f" ({'; '.join(clean(reason, 80) for reason in sorted(reasons)[:2])})" if reasons else ""
        return f"the memory of none of {len(report.processes)} processes can be read{why}"
    return f"the figures reach back {duration(report.watched_s)} only, and growth takes longer to show"


class Paint:
    """Colours and wraps; without ``colour`` no escape sequence is made."""

    def __init__(self, width: int, *, colour: bool) -> None:
        self._width = width
        self._colour = colour

    def painted(self, text: str, code: str) -> str:
        """In a colour, if there are any."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def heading(self, text: str) -> str:
        """With a line above it."""
        return "\n" + self.painted(text, _BOLD)

    def wrapped(self, text: str, first: str = "  ") -> str:
        """Wrapped behind an indent; a path or a command is never cut."""
        indent = " " * len(first)
        return textwrap.fill(
            text,
            self._width,
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def points(self, sentences: Iterable[str]) -> Iterator[str]:
        """Each as a point of a list; a line of its own stays one."""
        for told in sentences:
            first, *more = told.splitlines() or [""]
            yield self.wrapped(clean(first, 2000), "  - ")
            for line in more:
                yield self.wrapped(clean(line, 2000), "    ") if line.strip() else ""


def text(report: Report, width: int = DEFAULT_WIDTH, *, colour: bool = False) -> str:
    """All that is to be said, for a terminal of so many columns; ends in a line feed."""
    paint = Paint(width, colour=colour)
    lines = [paint.painted(answer(report), _COLOURS[report.exit_code])]  # one line, for `| head -1`
    for heading, part in (
        ("What has ended", paint.points(report.ended)),
        ("What to do", paint.points(_to_do(report))),
        ("Evidence", _evidence(report, paint)),
        ("Processes", _table(report)),
        ("Not read", paint.points(_not_read(report))),
    ):
        told = list(part)
        if told:
            lines += [paint.heading(heading), *told]
    lines += ["", *(paint.wrapped(clean(note, 2000), "") for note in report.notes)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _to_do(report: Report) -> Iterator[str]:
    if report.exit_code == CANNOT_TELL:
        yield from to_tell(report)
        return
    told: dict[str, list[str]] = {}
    for process in report.processes:
        verdict = process.verdict
        if report.exit_code == ALARMING and not verdict.alarming:
            continue
        if advice := to_do(process):
            told.setdefault(advice, []).append(who(verdict))
    for remedy, processes in told.items():
        yield remedy if len(told) == 1 else f"{_few(processes)}: {remedy}"
    yield from _near(report)


def to_do(process: ProcessReport) -> str:
    """What helps against the growth of one process; empty where nothing need be done. May be of a stranger's making."""
    verdict = process.verdict
    if verdict.remedy is not None:
        return _remedy(verdict.remedy)
    return _NO_REMEDY if verdict.alarming else ""


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004  # fit a line


def to_tell(report: Report) -> Iterator[str]:
    """What to do where a report cannot tell."""
    if not report.processes:
        yield from FIND_A_PROCESS
    elif not any(process.is_readable for process in report.processes):
        yield "Run this as the user that runs vLLM, or as root, where vLLM's /proc is to be seen."
    else:
        yield f"Watch for longer than {duration(SHORTEST_S)}: `vllm-kvfix diagnose --for 300`."


def _remedy(remedy: Remedy) -> str:
    fixed = f"fixed in {clean(remedy.fixed_in, 80)}" if remedy.fixed_in else ""
    more = _joined(fixed, clean(remedy.issue) if remedy.issue else "")
    return f"{_capital(remedy.action)}{f' ({more})' if more else ''}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _near(report: Report) -> Iterator[str]:
    """That a limit is near, though nothing grows towards it."""
    if report.exit_code == ALARMING:
        return
    for usage, processes in _usages(report).items():
        used = usage.share
        if used is None or used < NEAR:
            continue
        largest = max(processes, key=lambda process: process.memory or 0)
        told = f"; the largest is {who(largest.verdict)} with {size(largest.memory)}" if largest.memory else ""
        yield (
            f"{share(used)} of the {clean(usage.of, 32)}'s {size(usage.limit)} are used though nothing grows without "
            f"bound: give vLLM more memory, or less to hold{told}."
        )


def _usages(report: Report) -> dict[Usage, list[ProcessReport]]:
    found: dict[Usage, list[ProcessReport]] = {}
    for process in report.processes:
        usage = process.usage
        if usage is not None and usage.of == "host":  # there is one, read for each process at a moment of its own
            usage = next((known for known in found if known.of == "host"), usage)
        if usage is not None:
            found.setdefault(usage, []).append(process)
    return found


def _evidence(report: Report, paint: Paint) -> Iterator[str]:
    for usage in _usages(report):
        used = usage.share
        if used is not None and usage.usage is not None:
            yield paint.wrapped(
                f"The {clean(usage.of, 32)} uses {size(usage.usage)} of {size(usage.limit)} ({share(used)}).", "  "
            )
    for process in report.processes:
        if process.verdict.kind is Kind.STEADY and report.exit_code == ALARMING:
            continue
        told = list(evidence_of(process))
        if told:
            yield paint.wrapped(f"{who(process.verdict)}, {process.verdict.kind.value}:", "  ")
            yield from paint.points(told)


def evidence_of(process: ProcessReport) -> Iterator[str]:
    """What its verdict says it stands on, less what is said elsewhere; each may hold any character."""
    unread = {f"{scope} could not be read: {reason}" for scope, reason in process.unread.items()}
    verdict = process.verdict
    yield from (told for told in verdict.evidence if told not in unread)
    if verdict.explained is not None and verdict.culprits:
        yield f"the containers that are named make up {share(verdict.explained)} of the growth"


class _Row(NamedTuple):
    pid: str
    process: str
    rss: str
    anon: str
    of_limit: str
    growth: str
    verdict: str


_HEADER = _Row("PID", "PROCESS", "RSS", "ANON+SWAP", "OF LIMIT", "GROWTH/H", "VERDICT")
_LEFT = {_Row._fields.index(name) for name in ("process", "verdict")}


def _row(process: ProcessReport) -> _Row:
    verdict, memory, usage = process.verdict, process.memory, process.usage
    rss = process.figures.get("status.rss", process.figures.get("smaps.rss"))
    return _Row(
        pid=str(verdict.pid)[:20],
        process=title(verdict),
        rss="?" if rss is None else size(rss),
        anon="?" if memory is None else size(memory),
        of_limit=share(memory / usage.limit) if usage and usage.limit > 0 and memory is not None else "-",
        growth="-" if verdict.slope is None else size(verdict.slope.best),
        verdict=verdict.kind.value,
    )


def _table(report: Report) -> Iterator[str]:
    processes = report.processes
    if not processes:
        return
    yield from columns([_HEADER, *map(_row, processes[:MOST_ROWS])], _LEFT)
    if len(processes) > MOST_ROWS:
        yield f"  and {len(processes) - MOST_ROWS} more, none graver"


def columns(rows: Sequence[tuple[str, ...]], left: Container[int] = ()) -> Iterator[str]:
    """Rows of cells as lines of a table; all columns but those of ``left`` are set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()


def _not_read(report: Report) -> Iterator[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for process in report.processes:
        for scope, reason in process.unread.items():
            found.setdefault((scope, reason), []).append(who(process.verdict))
    for (scope, reason), of in found.items():
        yield f"{_capital(_SCOPE_WORDS.get(scope) or clean(scope, 32))}, of {_few(of)}: {clean(reason)}"
    silent = [who(process.verdict) for process in report.processes if not process.has_ring and _has_role(process)]
    if silent:
        names = _few(silent)
        yield f"No ring of vllm-kvfix was read of {names}: neither containers nor load are known. {_RINGS}"
    yield from (f"{clean(path)}: {clean(reason)}" for path, reason in report.not_followed.items())


def _has_role(process: ProcessReport) -> bool:
    """Whether it is a process of vLLM that writes a ring, not one of its helpers."""
    return process.verdict.role in ROLES
