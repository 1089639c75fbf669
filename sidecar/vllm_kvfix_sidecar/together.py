# SPDX-License-Identifier: Apache-2.0
"""Who died first of the processes that ended together: the kill of one makes the others give up, or be killed, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.ring.layout import API_SERVER, ENDED_IN_ORDER, ENGINE_CORE, STOPPING
from vllm_kvfix_sidecar import death
from vllm_kvfix_sidecar.death import End
from vllm_kvfix_sidecar.words import clean, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from vllm_kvfix.ring.reader import Header
    from vllm_kvfix_sidecar.oom import Witness

TOGETHER_S = 15.0
# The last sign of life of a worker or a server may be a second older than its end; an engine core's is not.
_ADVANTAGE_NS = 1_500_000_000


class Gone(NamedTuple):
    """A process that has ended; ``found``: when it was found to have (s), the same for all where that is not known."""

    path: Path
    header: Header
    witness: Witness | None = None
    found: float = 0.0
    stopped: bool = False

    @property
    def end(self) -> End:
        """How, by its own word, or by its server's."""
        return End.IN_ORDER if self.stopped else death.said_end(self.header.end)

    @property
    def unix_ns(self) -> int:
        """Its last sign of life."""
        return self.header.heartbeat_ns + self.header.clock_offset_ns

    @property
    def who(self) -> str:
        """As a person knows it."""
        return death.who(self.header)

    @property
    def how(self) -> str:
        """Half a sentence."""
        if self.stopped:
            return "was stopped by its server, in order,"
        return {
            End.IN_ORDER: "ended in order",
            End.EXCEPTION: f"ended by an exception ({clean(self.header.end_reason, 128)})",
            End.KILLED: "was killed, or crashed,",
        }.get(self.end, "ended")

    @property
    def is_named(self) -> bool:
        """Whether the kernel's log names it as killed for its memory."""
        return self.witness is not None and self.witness.kernel is not None and self.witness.kernel.oom

    @property
    def rank(self) -> tuple[int, bool, float, int]:
        """The least is that of the one that died first."""
        gravity = {End.KILLED: 0, End.UNSAID: 1, End.EXCEPTION: 2}.get(self.end, 3)
        core = self.header.role == ENGINE_CORE
        return gravity, not self.is_named, self.found, self.unix_ns - (_ADVANTAGE_NS if core else 0)


def settled(gone: Sequence[Gone], servers: Iterable[Header]) -> list[Gone]:
    """With what servers say of those that said nothing: vLLM ends its engines by a kill where they take a moment.

    Args:
        gone: Processes that have ended.
        servers: What the rings of theirs say that may have ended them; other rings do no harm.
    """
    servers = [header for header in servers if header.role == API_SERVER]
    return [one._replace(stopped=_was_stopped(one, servers)) for one in gone]


def _was_stopped(one: Gone, servers: Sequence[Header]) -> bool:
    if one.end not in {End.KILLED, End.UNSAID}:
        return False
    return any(
        server.boot_id == one.header.boot_id
        and (server.end == STOPPING or (server.end == ENDED_IN_ORDER and server.end_ns <= one.header.heartbeat_ns))
        and abs(server.end_ns - one.header.heartbeat_ns) <= TOGETHER_S * 1e9
        for server in servers
    )


def first(gone: Sequence[Gone]) -> Gone:
    """The one that died first, as far as can be told: without a word before all others."""
    return min(gone, key=lambda one: one.rank)


def with_it(one: Gone, gone: Sequence[Gone]) -> list[Gone]:
    """The others of those that ended together with one, in their order."""
    near = [other for other in gone if other.path != one.path and abs(other.unix_ns - one.unix_ns) <= TOGETHER_S * 1e9]
    return sorted(near, key=lambda other: other.unix_ns)


def sentences(one: Gone, others: Sequence[Gone]) -> tuple[str, ...]:
    """What is to be said of the others, one sentence each."""
    return tuple(f"{other.who} {other.how} {_when(other, one)}." for other in others)


def _when(other: Gone, one: Gone) -> str:
    seconds = (other.unix_ns - one.unix_ns) / 1e9
    if abs(seconds) < 1:
        return "at the same time"
    return f"{duration(abs(seconds))} {'later' if seconds > 0 else 'before'}"


def deaths(one: Gone, others: Sequence[Gone]) -> int:
    """How many of them died without a word in the cgroup of one, itself included."""
    cgroup = one.witness.cgroup if one.witness else ""
    return 1 + sum(
        other.end is End.KILLED and (other.witness.cgroup if other.witness else "") == cgroup for other in others
    )


def named(others: Sequence[Gone]) -> str:
    """Who of the others was killed for its memory, as the kernel's log says; empty: nobody."""
    return next((other.who for other in others if other.is_named), "")


def core_of(one: Gone, others: Sequence[Gone]) -> Gone | None:
    """The engine core among the others, whose steps ended with one that has none of its own."""
    if one.header.role == ENGINE_CORE:
        return None
    return next((other for other in others if other.header.role == ENGINE_CORE), None)
