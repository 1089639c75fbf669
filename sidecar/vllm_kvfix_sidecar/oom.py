# SPDX-License-Identifier: Apache-2.0
"""Whether a process that is gone was killed for its memory: what was seen, and what that proves.

The kernel counts the processes of a cgroup that it killed (``oom_kill``). Seen before and after a death, the count
proves it either way; a cgroup goes with its container, so it is remembered while the process lives, of those above it,
too. Without it, the last use against the limit is all there is, and that proves nothing.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvfix.host import Cgroup, UnreadableError
from vllm_kvfix_sidecar.kernel_log import KernelLine
from vllm_kvfix_sidecar.process_table import read_file
from vllm_kvfix_sidecar.processes import process_runs
from vllm_kvfix_sidecar.words import clean, duration, share, size

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator
    from pathlib import Path

    from vllm_kvfix_sidecar.process_table import ProcessKey

# From this share of the limit on, the next seconds can have reached it.
NEAR = 0.95
_COUNT_FILES = {1: "memory.oom_control", 2: "memory.events"}
_COUNT = re.compile(rb"^oom_kill ([0-9]{1,18})$", re.MULTILINE)
_MOST_BYTES = 4096
_LARGEST = 1 << 60
# One a second: longer than a process takes to end.
MOST_LOOKS = 60
_LONGEST_TEXT = 4096


class Oom(Enum):
    """Whether it was killed for its memory."""

    YES = "yes"
    PROBABLY = "probably"
    NO = "no"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Finding:
    """``why``: half a sentence; ``evidence``: sentences, each with its source."""

    oom: Oom
    why: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Witness:
    """What a sidecar saw of a death from outside.

    ``before`` and ``after``: the count of kills of the ``cgroup``, None: could not be read; ``own``: that is the
    process's own, not one above it. ``kernel``: what the kernel's log says of it. ``first``: the name of the ring of
    the process that died first of those that ended together.
    """

    cgroup: str = ""
    own: bool = True
    before: int | None = None
    after: int | None = None
    kernel: KernelLine | None = None
    first: str = ""

    def as_json(self) -> dict[str, Any]:
        """For a file beside the ring."""
        line = self.kernel
        return {
            "cgroup": self.cgroup,
            "own": self.own,
            "oom_kill_before": self.before,
            "oom_kill_after": self.after,
            "kernel": line and {"text": line.text, "oom": line.oom, "by_cgroup": line.by_cgroup},
            "first": self.first,
        }


def read_witness(told: object) -> Witness | None:
    """What :meth:`Witness.as_json` made, from a file that anybody may have written; None: it is no such thing."""
    if not isinstance(told, dict) or not isinstance(told.get("cgroup"), str):
        return None
    line = told.get("kernel")
    kernel = None
    if isinstance(line, dict) and isinstance(line.get("text"), str):
        kernel = KernelLine(
            clean(line["text"], 200), oom=line.get("oom") is True, by_cgroup=line.get("by_cgroup") is True
        )
    return Witness(
        cgroup=told["cgroup"][:_LONGEST_TEXT],
        own=told.get("own") is True,
        before=_count(told.get("oom_kill_before")),
        after=_count(told.get("oom_kill_after")),
        kernel=kernel,
        first=first[:_LONGEST_TEXT] if isinstance(first := told.get("first"), str) else "",
    )


def _count(told: object) -> int | None:
    return told if isinstance(told, int) and not isinstance(told, bool) and 0 <= told < _LARGEST else None


class _Level(NamedTuple):
    path: Path
    version: int
    kills: int


class KillCounts:
    """Remembers of each process that lives how many kills its cgroup, and each above it, has counted."""

    def __init__(self, proc: Path, cgroups: Path) -> None:
        """Read nothing yet.

        Args:
            proc: Where a process table is mounted.
            cgroups: Where the cgroups are mounted.
        """
        self._proc = proc
        self._cgroups = cgroups
        self._seen: dict[Hashable, deque[tuple[int, tuple[_Level, ...]]]] = {}

    def look(self, key: Hashable, process: ProcessKey) -> None:
        """A process lives: remember what is counted now; where nothing can be read, what was known stays."""
        try:
            cgroup = Cgroup.of(process.pid, self._proc, self._cgroups)
        except UnreadableError:
            return
        known = self._seen.get(key)
        # One that is ending is said to be in the root of all, for as long as that takes; nobody is moved there alive.
        path = known[-1][1][0].path if known else cgroup.path
        if cgroup.path == cgroup.top != path and path.is_dir():
            return
        levels = tuple(_levels(cgroup))
        if levels and process_runs(self._proc, *process):
            if known is None or path != cgroup.path:
                known = self._seen[key] = deque(maxlen=MOST_LOOKS)
            known.append((time.monotonic_ns(), levels))

    def after(self, key: Hashable, alive_ns: int) -> Witness:
        """What is counted now that it is gone, in the innermost of its cgroups that is left.

        It was alive at ``alive_ns`` of the monotonic clock: what was counted since may be its own kill, since a large
        process takes seconds to end.
        """
        looks = self._seen.pop(key, ())
        levels = next((levels for at, levels in reversed(looks) if at <= alive_ns), looks[0][1] if looks else ())
        for level in levels:
            kills = _kills(level.path, level.version)
            if kills is not None:
                return Witness(str(level.path), level is levels[0], level.kills, kills)
        return Witness(str(levels[0].path), own=True, before=levels[0].kills) if levels else Witness()


def _levels(cgroup: Cgroup) -> Iterator[_Level]:
    for path in (cgroup.path, *cgroup.path.parents):
        kills = _kills(path, cgroup.version)
        if kills is not None:
            yield _Level(path, cgroup.version, kills)
        if path == cgroup.top or cgroup.version == 1:  # where a cgroup counts its own alone
            return


def _kills(path: Path, version: int) -> int | None:
    try:
        found = _COUNT.search(read_file(str(path / _COUNT_FILES[version]), _MOST_BYTES))
    except UnreadableError:
        return None
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Use:
    """The last figures: ``usage`` of ``limit`` bytes ``of`` cgroup or host, so many seconds before the end.

    ``by_then``: what the usage would have been at the end, had it gone on as before. ``stalled_s``: how long everybody
    in the cgroup waited for memory, in the last seconds (PSI), None: not told.
    """

    usage: float
    limit: float
    of: str
    age_s: float
    by_then: float
    stalled_s: float | None = None

    @property
    def words(self) -> str:
        """``1.9 GiB of the cgroup's 2 GiB (95 %), 3 seconds before``."""
        part = f" ({share(self.usage / self.limit)})" if self.limit > 0 else ""
        before = f", {duration(self.age_s)} before" if self.age_s >= 1 else ""
        return f"{size(self.usage)} of the {self.of}'s {size(self.limit)} were used{part}{before}"

    @property
    def is_near(self) -> bool:
        """Whether the limit can have been reached by the end."""
        return max(self.usage, self.by_then) >= NEAR * self.limit > 0


def judge(witness: Witness | None, use: Use | None, *, deaths: int = 1, named: str = "") -> Finding:
    """Whether a process that said nothing of its end was killed for its memory.

    Args:
        witness: What a sidecar saw; None: there was none.
        use: The last figures; None: none were told.
        deaths: Processes that died with it without a word, itself included.
        named: The one of those that the kernel's log names as killed for its memory; empty: none.
    """
    told = tuple(_evidence(witness, use))
    if named and not (witness and witness.kernel):
        return Finding(Oom.NO, f"the kernel killed {named} for its memory, with which it ended", told)
    found = (_proved(witness, deaths) if witness else None) or _supposed(use)
    return Finding(*found, told)


def _evidence(witness: Witness | None, use: Use | None) -> Iterator[str]:
    counted = _counted(witness)
    if counted:
        yield f"{counted} (seen by a sidecar)"
    if witness is not None and witness.kernel is not None:
        yield f"the kernel's log: {witness.kernel.text}"
    if use is not None:
        yield f"at its last word {use.words} (its ring)"
        if use.stalled_s:
            yield f"for {duration(use.stalled_s)} of its last seconds all in its cgroup waited for memory (PSI)"


def _proved(witness: Witness, deaths: int) -> tuple[Oom, str] | None:
    """What a witness proves; None: nothing."""
    kernel, counted = witness.kernel, _counted(witness)
    if kernel is not None and kernel.oom:
        whose = "a cgroup's limit" if kernel.by_cgroup else "the whole machine ran out of memory"
        return Oom.YES, f"the kernel's log names it ({whose})"
    if witness.before is None or witness.after is None:
        return None if kernel is None else (Oom.NO, f"it crashed: {kernel.text}")
    rise = witness.after - witness.before
    if rise <= 0:
        return Oom.NO, counted
    if rise < deaths:
        return Oom.PROBABLY, f"{counted}, while {deaths} processes died in it"
    return (Oom.YES if witness.own else Oom.PROBABLY), counted


def _supposed(use: Use | None) -> tuple[Oom, str]:
    """What the last figures suggest."""
    unseen = "nobody saw its cgroup's count of kills after it"
    if use is None:
        return Oom.UNKNOWN, f"{unseen}, and no limit is known"
    if use.is_near:
        return Oom.PROBABLY, f"{use.words}; {unseen}"
    return Oom.UNKNOWN, f"{unseen}; {use.words}"


def _counted(witness: Witness | None) -> str:
    if witness is None or witness.before is None:
        return ""
    whose = "its cgroup's" if witness.own else f"the oom_kill of {clean(witness.cgroup, 100)}, above its cgroup,"
    count = f"{whose} oom_kill" if witness.own else whose
    if witness.after is None:
        return f"{count} was {witness.before} before, and the cgroup is gone"
    if witness.after == witness.before:
        return f"{count} stayed at {witness.before}"
    return f"{count} went from {witness.before} to {witness.after}"
