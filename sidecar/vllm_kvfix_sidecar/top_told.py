# SPDX-License-Identifier: Apache-2.0
"""What ``/api/now`` and ``/api/history`` say, read for a terminal: nothing of it is believed, or printed as it came."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from vllm_kvfix.ring.layout import ROLES
from vllm_kvfix_sidecar import report
from vllm_kvfix_sidecar.report import ALARMING, CANNOT_TELL, GRAVITY, MOST_PROCESSES, NOTHING_ALARMING, Report
from vllm_kvfix_sidecar.report_text import title
from vllm_kvfix_sidecar.words import clean

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.report import ProcessReport
    from vllm_kvfix_sidecar.verdict import Kind

MOST_ROWS = 1024
MOST_POINTS = 1000
LONGEST = 4000
_LARGEST = 1 << 100

Key: TypeAlias = "str | int"


@dataclass(frozen=True)
class Facts:
    """A value of JSON: what is asked for by its path is there in the type that is asked for, or is not there."""

    value: object = None

    def at(self, *path: Key) -> Facts:
        """What lies there."""
        found = self.value
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return Facts(found)

    def number(self, *path: Key) -> float | None:
        """A number that can be counted with."""
        found = self.at(*path).value
        if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < _LARGEST:
            return None
        return found

    def text(self, *path: Key, most: int = 500) -> str:
        """A text, made harmless."""
        found = self.at(*path).value
        return clean(found, most) if isinstance(found, str) else ""

    def flag(self, *path: Key) -> bool | None:
        """Yes or no."""
        found = self.at(*path).value
        return found if isinstance(found, bool) else None

    def each(self, *path: Key, most: int = MOST_ROWS) -> list[Facts]:
        """The parts of a list."""
        found = self.at(*path).value
        return [Facts(part) for part in found[:most]] if isinstance(found, list) else []

    def pairs(self, *path: Key, most: int = MOST_ROWS) -> list[tuple[str, Facts]]:
        """The parts of an object, their names made harmless."""
        found = self.at(*path).value
        return (
            [(clean(str(key)), Facts(part)) for key, part in list(found.items())[:most]]
            if isinstance(found, dict)
            else []
        )

    def numbers(self, *path: Key) -> list[float]:
        """The numbers of a list."""
        return [value for part in self.each(*path, most=MOST_POINTS) if (value := part.number()) is not None]


@dataclass(frozen=True)
class Process:
    """A process: what is reported of it, and what the page knows beside that."""

    known: ProcessReport
    more: Facts

    @property
    def key(self) -> str:
        """What tells it from a later process of the same pid."""
        return self.more.text("key") or str(self.known.verdict.pid)

    @property
    def title(self) -> str:
        """Its short name."""
        return self.more.text("title", most=32) or title(self.known.verdict)

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.more.number("ended_unix_s") is not None


@dataclass(frozen=True)
class Told:
    """What is known at one moment, the gravest process first."""

    time_unix_s: float
    exit_code: int
    answer: str
    processes: tuple[Process, ...] = ()
    more: Facts = field(default_factory=Facts)

    @property
    def gravest(self) -> Kind | None:
        """The gravest verdict on a process that lives; where none does, on one that lived."""
        living = [process for process in self.processes if not process.ended] or self.processes
        return min((process.known.verdict.kind for process in living), key=GRAVITY.index, default=None)

    @property
    def report(self) -> Report:
        """What is reported of the processes."""
        return Report(tuple(process.known for process in self.processes), self.time_unix_s)

    @property
    def notes(self) -> list[str]:
        """Sentences about all of it."""
        return [text for note in self.more.each("notes") if (text := note.text(most=LONGEST))]


def read(data: bytes) -> Told:
    """What a sidecar answers to ``/api/now``.

    Raises:
        MalformedReportError: It is none that this release can read.
    """
    return of(report.read_object(data))


def of(told: dict[str, object]) -> Told:
    """What ``/api/now`` would answer, as an object; less the helpers of vLLM that ended, which come by the hundred.

    Raises:
        MalformedReportError: It is none that this release can read.
    """
    more = Facts(told)
    raw = more.each("processes", most=MOST_PROCESSES)
    read = (Process(report.read_process(process.value), process) for process in raw)
    processes = [process for process in read if not process.ended or process.known.verdict.role in ROLES]
    code = more.number("exit_code")
    return Told(
        time_unix_s=more.number("time_unix_s") or math.nan,
        exit_code=int(code) if code in {NOTHING_ALARMING, ALARMING, CANNOT_TELL} else CANNOT_TELL,
        answer=more.text("answer", most=LONGEST) or "The sidecar gave no answer.",
        processes=tuple(sorted(processes, key=lambda process: (process.ended, process.known.order))),
        more=more,
    )


def history(data: bytes) -> Facts:
    """What a sidecar answers to ``/api/history``.

    Raises:
        MalformedReportError: It is none that this release can read.
    """
    return Facts(report.read_object(data))
