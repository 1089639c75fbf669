# SPDX-License-Identifier: Apache-2.0
"""One attach or detach from its first look to its confirmation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_kvfix import guard, host, upstream
from vllm_kvfix.attach import injection, parcel, target
from vllm_kvfix.attach.errors import AttachError, Reason
from vllm_kvfix.attach.meeting import Meeting
from vllm_kvfix.backports.kv_cache_zeroing_gate import BACKPORT
from vllm_kvfix.ring.reader import RingError, RingReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_kvfix.attach.target import Target

    Progress = Callable[[str], object]

ARRIVAL_S = 30.0
SILENCE_S = 60.0
REASONS = {reason.value: reason for reason in Reason}


@dataclass(frozen=True)
class Outcome:
    """What was done to one process.

    ``fix`` and ``observe`` are one of "attached", "already there", "not asked for", "not affected", "detached",
    "not attached", and with ``dry_run`` "would be attached"; ``rss_*`` is its anonymous resident memory in bytes,
    ``backlog_*`` the leaked ids; ``held_s`` how long the engine waited at its step boundary, ``whole_s`` what all took.
    ``confirmed_by`` says how it was seen to be in force; ``left`` what stays in the process.
    """

    pid: int
    vllm_version: str | None
    python: str
    fix: str
    observe: str
    by: str
    dry_run: bool = False
    engines: tuple[int, ...] = ()
    backlog_before: int = 0
    backlog_after: int = 0
    rss_before: int = 0
    rss_after: int = 0
    held_s: float = 0.0
    whole_s: float = 0.0
    rings: tuple[str, ...] = ()
    confirmed_by: str = ""
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = field(default=())


def _quiet(_: str) -> None:
    """Say nothing."""


def attach_to(pid: int, *, fix: bool, observe: bool, dry_run: bool = False, progress: Progress = _quiet) -> Outcome:
    """Bring the fix, the recorder or both into a running engine.

    Raises:
        AttachError: It was refused or failed; unless its reason is in ``errors.UNCERTAIN`` the engine is as it was.
    """
    began = time.monotonic()
    seen = target.look(pid)
    notes = []
    fix_word = _may_fix(seen, alone=not observe) if fix else ""
    if observe:
        _may_watch(seen)
    by = injection.available(seen.python)
    wanted = {"fix": fix and not fix_word, "observe": observe}
    rss = _rss(pid)
    if fix_word:
        notes.append(f"nothing to fix: {seen.decision.reason}")
    if dry_run:
        return _outcome(
            seen, by, began, rss, dry_run=True, notes=tuple(notes),
            fix=fix_word or ("would be attached" if fix else "not asked for"),
            observe="would be attached" if observe else "not asked for",
        )  # fmt: skip
    if not any(wanted.values()):
        return _outcome(seen, by, began, rss, fix=fix_word, observe="not asked for", notes=tuple(notes))
    done = _perform(seen, {"do": "attach", **wanted, **_findings(seen)}, progress)
    confirmed = _confirm(seen, done, fixed=wanted["fix"])
    return _outcome(
        seen, by, began, rss, notes=tuple(notes),
        fix=fix_word or done["fix"], observe=done["observe"], engines=tuple(done["engines"]),
        backlog_before=done["backlog_before"], backlog_after=done["backlog_after"], held_s=done["held_ns"] / 1e9,
        rings=tuple(done["rings"]), confirmed_by=confirmed,
    )  # fmt: skip


def detach_from(pid: int, *, progress: Progress = _quiet) -> Outcome:
    """Take back what was attached to a running engine.

    Raises:
        AttachError: As for :func:`attach_to`.
    """
    began = time.monotonic()
    seen = target.look(pid)
    by = injection.available(seen.python)
    rss = _rss(pid)
    done = _perform(seen, {"do": "detach"}, progress)
    notes = []
    if done["fixed_by_plugin"]:
        notes.append("the fix came with the engine's start and stays: restart it with VLLM_KVFIX_PATCH=off")
    if done["rings"]:
        notes.append(f"the ring stays for a post-mortem: {', '.join(done['rings'])}")
    if done["taken"]:
        notes.append("the modules of vllm-kvfix stay in its memory, unused, until it ends")
    words = {name: "detached" if name in done["taken"] else "not attached" for name in ("fix", "observe")}
    return _outcome(
        seen, by, began, rss, notes=tuple(notes), fix=words["fix"], observe=words["observe"],
        engines=tuple(done["engines"]), held_s=done["held_ns"] / 1e9, rings=tuple(done["rings"]),
        left=tuple(done["left"]),
    )  # fmt: skip


def _outcome(seen: Target, by: str, began: float, rss: int, **more: Any) -> Outcome:
    return Outcome(
        pid=seen.pid,
        vllm_version=seen.version,
        python=".".join(map(str, seen.python)),
        by=by,
        rss_before=rss,
        rss_after=_rss(seen.pid),
        whole_s=time.monotonic() - began,
        **more,
    )


def _may_fix(seen: Target, *, alone: bool) -> str:
    """Empty where the fix may be applied, "not affected" where none is needed.

    Raises:
        AttachError: It must not be applied, or none is needed and nothing else was asked for.
    """
    decision = seen.decision
    if decision.state is guard.State.APPLY:
        return ""
    if decision.state is guard.State.NOT_AFFECTED:
        if alone:
            raise AttachError(
                Reason.NOT_AFFECTED,
                f"vLLM {seen.version}: there is nothing to fix: {decision.reason}",
                f"to watch it: vllm-kvfix attach --observe {seen.pid}",
            )
        return "not affected"
    raise AttachError(Reason.UNKNOWN_SOURCE, f"vLLM {seen.version}: {decision.reason}", decision.next_step)


def _may_watch(seen: Target) -> None:
    if seen.unwatchable:
        raise AttachError(
            Reason.UNKNOWN_SOURCE,
            f"vLLM {seen.version} cannot be watched: {'; '.join(seen.unwatchable)}",
            f"to fix it alone: vllm-kvfix attach --fix {seen.pid}",
        )


def _findings(seen: Target) -> dict[str, Any]:
    """What was seen from outside, for the other side to go by."""
    return {
        "root": seen.root_inside,
        "version": seen.version,
        "decision": seen.decision.reason,
        "recorded_specs": list(upstream.recorded_specs(seen.sources)),
    }


def _compared(seen: Target) -> dict[str, tuple[str, list[str]]]:
    """Of which modules the text, and which functions of it, are to be compared with what runs."""
    compared: dict[str, tuple[str, list[str]]] = {}
    for known in BACKPORT.targets:
        if seen.sources.function(known) is not None:
            text = upstream.Sources(seen.root).path(known.module).read_text(encoding="utf-8")
            compared.setdefault(known.module, (text, []))[1].append(known.qualname)
    return compared


def _perform(seen: Target, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Have the code in the target do what is asked for, and return what it says in the end."""
    compared = _compared(seen) if request.get("fix") else {}
    packed = parcel.make(seen.python, seen.interpreter, compared)
    request |= {"fingerprints": packed.fingerprints, "by_script": not seen.title.startswith(target.TITLES)}
    head, data = packed.head_and_data(request)
    executable = seen.python < injection.REMOTE_EXEC
    with Meeting(seen.pid, seen.folders(), (seen.uid, seen.gid), executable=executable) as meeting:
        injection.inject(seen.pid, seen.python, parcel.bootstrap(meeting.socket), meeting)
        progress("waiting for its answer")
        link = meeting.wait(ARRIVAL_S)
    try:
        if link.peer() not in {seen.pid, 0}:  # 0: it cannot be seen from our PID namespace
            raise AttachError(Reason.NO_ANSWER, f"process {link.peer()} answered in its place", "look what that is")
        link.send(head, data)
        for event in link.events(SILENCE_S):
            if event["event"] == "refused":
                raise AttachError(
                    REASONS.get(event["reason"], Reason.FAILED), event["message"], event.get("next_step", "")
                )
            if event["event"] == "done":
                return event
            progress(_said(event))
    finally:
        link.close()
    raise AttachError(Reason.FAILED, "the code in it ended without a word", "see the engine's log, and report it")


def _said(event: dict[str, Any]) -> str:
    if event["event"] == "releasing":
        return f"giving memory back, {event['left']:,} ids left"
    return f"at its next step boundary, {event['backlog']:,} ids have leaked"


def _confirm(seen: Target, done: dict[str, Any], *, fixed: bool) -> str:
    """How it was seen that what was attached is in force.

    Raises:
        AttachError: It was not.
    """
    states = [_ring_state(target.outside(seen.pid, path)) for path in done["rings"]]
    if fixed and not done["in_force"]:
        raise AttachError(Reason.FAILED, "the fix is in, but ids still pile up", "vllm-kvfix detach, and report it")
    if fixed and any(state not in {"applied", ""} for state in states):
        raise AttachError(Reason.FAILED, f"its ring says that the fix is {states}", "vllm-kvfix detach, and report it")
    if states and all(states):
        return "its ring"
    return "a look at its classes and lists"


def _ring_state(path: Path) -> str:
    """The patch state that a ring says; empty where it cannot be read from here."""
    try:
        reader = RingReader(path)
    except (OSError, RingError):
        return ""
    try:
        return reader.header.patch_state
    finally:
        reader.close()


def _rss(pid: int) -> int:
    try:
        return host.status(pid).get("anon", 0)
    except host.UnreadableError:
        return 0
