# SPDX-License-Identifier: Apache-2.0
"""The end of one process: how it ended, as far as that is known, what it left, and who ended with it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING

from vllm_kvfix.ring import layout
from vllm_kvfix_sidecar import deployments, last_words, oom
from vllm_kvfix_sidecar.oom import Finding, Oom
from vllm_kvfix_sidecar.words import clean, duration, size

if TYPE_CHECKING:
    from vllm_kvfix.ring.reader import Header
    from vllm_kvfix_sidecar.last_words import LastWords
    from vllm_kvfix_sidecar.oom import Use, Witness
    from vllm_kvfix_sidecar.report import ProcessReport

_LATEST_S = 4e9  # beyond the year 2090 a clock is wrong


class End(Enum):
    """How a process ended.

    ``KILLED`` stands for every end without a word: a signal, a crash, the kernel. ``UNSAID``: it wrote its ring by a
    release that says no word at its end either way.
    """

    ALIVE = "alive"
    IN_ORDER = "in order"
    EXCEPTION = "exception"
    KILLED = "killed"
    UNSAID = "unsaid"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Death:
    """The end of a process.

    ``process``: what is known of it, and the verdict. ``engine``: what the engine core says whose steps ended with it,
    None: it is one itself, or none ended with it. ``others``: sentences on the processes that ended with it.
    ``stopped``: its server did, in order, and need not have let it say so.
    """

    words: LastWords
    oom: Finding
    process: ProcessReport
    use: Use | None = None
    engine: LastWords | None = None
    others: tuple[str, ...] = ()
    lost_requests: int = 0
    stopped: bool = False

    @property
    def end(self) -> End:
        """How it ended."""
        end = end_of(self.words)
        return End.IN_ORDER if self.stopped and end in {End.KILLED, End.UNSAID} else end

    @property
    def is_alarming(self) -> bool:
        """Whether it ended otherwise than it should."""
        return self.end in {End.EXCEPTION, End.KILLED} or self.oom.oom in {Oom.YES, Oom.PROBABLY}

    @property
    def steps(self) -> LastWords:
        """What tells of steps and requests: its own ring, or that of the engine core that ended with it."""
        return self.engine or self.words

    @property
    def who(self) -> str:
        """``EngineCore (pid 4242)``."""
        return who(self.words.header)

    @property
    def ended_unix_ns(self) -> int:
        """When it ended, as far as that is known: its last sign of life."""
        return self.words.unix_ns(self.words.end_ns)


def who(header: Header) -> str:
    """A process as a person knows it, by what its ring says: ``EngineCore (pid 4242)``, ``EngineCore 1 (pid 4243)``."""
    index = f" {header.engine_index}" if header.engine_index and header.role == layout.ENGINE_CORE else ""
    return f"{deployments.NAMES.get(header.role, header.role)}{index} (pid {header.pid})"


def end_of(words: LastWords) -> End:
    """How the process of a ring ended, by what the ring itself says."""
    if words.proof.state != last_words.ENDED:
        return End.ALIVE if words.proof.state == last_words.LIVE else End.UNCLEAR
    return said_end(words.header.end)


def said_end(end: str) -> End:
    """What a header says of the end of a process that has ended."""
    return {
        layout.ENDED_IN_ORDER: End.IN_ORDER,
        layout.STOPPING: End.IN_ORDER,
        layout.ENDED_BY_EXCEPTION: End.EXCEPTION,
        layout.NOT_ENDED: End.KILLED,
    }.get(end, End.UNSAID)


def of(  # noqa: PLR0913  # its parts
    words: LastWords,
    witness: Witness | None = None,
    *,
    process: ProcessReport | None = None,
    use: Use | None = None,
    engine: LastWords | None = None,
    others: tuple[str, ...] = (),
    deaths: int = 1,
    named: str = "",
    stopped: bool = False,
) -> Death:
    """Put together what is known of an end.

    Args:
        words: What the ring says.
        witness: What a sidecar saw.
        process: What a sidecar knew, in place of what the ring holds: it reaches back further.
        use: The same of the use of memory.
        engine: What the engine core says that ended with it.
        others: Who ended with it.
        deaths: How many of them ended without a word, itself included.
        named: The one of those that the kernel's log names as killed for its memory; empty: none.
        stopped: Whether its server has stopped it, in order.
    """
    end, use = end_of(words), words.use or use
    if stopped and end in {End.KILLED, End.UNSAID}:
        finding = Finding(Oom.NO, "its server has stopped it, in order")
    elif end in {End.KILLED, End.UNSAID}:
        finding = oom.judge(witness, use, deaths=deaths, named=named)
    elif end in {End.IN_ORDER, End.EXCEPTION}:
        finding = Finding(Oom.NO, "it said itself that it ends")
    else:
        finding = Finding(Oom.UNKNOWN, "it has not ended, as far as is known")
    steps = engine or words
    # An engine core that has lost a worker may live for a second yet, but none of its requests does.
    is_over = engine is not None or steps.proof.state == last_words.ENDED
    lost = len(steps.requests) + steps.unknown_requests if is_over else 0
    return Death(words, finding, process or words.process, use, engine, others, lost, stopped)


def utc(unix_ns: int, *, date: bool = True) -> str:
    """``2026-11-30 22:41:07.120 UTC``, or the time of the day alone."""
    seconds, ns = divmod(unix_ns, 10**9)
    if not 0 < seconds < _LATEST_S:
        return "an unknown time"
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    text = f"{moment:%Y-%m-%d %H:%M:%S}.{ns // 10**6:03d}"
    return f"{text} UTC" if date else text.partition(" ")[2]


def sentence(death: Death) -> str:
    """What happened, in one sentence or two."""
    at = utc(death.ended_unix_ns)
    told = {
        End.ALIVE: _alive,
        End.UNCLEAR: _unclear,
        End.IN_ORDER: _in_order,
        End.EXCEPTION: _exception,
    }.get(death.end, _without_a_word)(death, at)
    lost = death.lost_requests
    return f"{told}.{f' {_requests(lost)} lost.' if lost and death.is_alarming else ''}"


def _requests(lost: int) -> str:
    return "1 request was" if lost == 1 else f"{lost} requests were"


def _alive(death: Death, _: str) -> str:
    return f"{death.who} is alive: {death.words.proof.sentences[-1]}. `vllm-kvfix diagnose` says how it does"


def _unclear(death: Death, at: str) -> str:
    sentences = "; ".join(death.words.proof.sentences)
    return f"Cannot tell whether {death.who} has ended: {sentences}. It was last heard of at {at}"


def _in_order(death: Death, at: str) -> str:
    return f"{death.who} {'was stopped by its server,' if death.stopped else 'ended'} in order at {at}"


def _exception(death: Death, at: str) -> str:
    reason = clean(death.words.header.end_reason, 128) or "of which nothing is told"
    return f"{death.who} ended by an exception at {at}: {reason.removeprefix('builtins.')}; vLLM's log has it in full"


def _without_a_word(death: Death, at: str) -> str:
    why = death.oom.why
    if death.oom.oom is Oom.YES:
        return f"{death.who} was killed by the memory limit at {at}: {why}{_of_limit(death)}"
    if death.oom.oom is Oom.PROBABLY:
        return f"{death.who} was probably killed by the memory limit at {at}: {why}"
    if death.end is End.UNSAID:
        return f"{death.who} ended at {at}, and its release of vllm-kvfix does not say how; {why}"
    if death.oom.oom is Oom.NO:
        return f"{death.who} was killed, or crashed, at {at}, and not for its memory: {why}"
    return f"{death.who} was killed, or crashed, at {at}; whether for its memory is not known: {why}"


def _of_limit(death: Death) -> str:
    use = death.use
    if use is None:
        return ""
    return f"; of the {use.of}'s {size(use.limit)}, {size(use.usage)} were used" + (
        f" {duration(use.age_s)} before" if use.age_s >= 1 else ""
    )
