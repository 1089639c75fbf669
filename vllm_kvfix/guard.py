# SPDX-License-Identifier: Apache-2.0
"""Whether a back-port may be applied to the vLLM that is there: a pure function, and it fails closed.

Applied only if the version is in range **and** the source of each target is known. Where the version says nothing
(nightlies, vendor builds, forks), the digests decide; where the two disagree, nothing is applied.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvfix import upstream

if TYPE_CHECKING:
    from packaging.version import Version

    from vllm_kvfix.backports import Backport

MODE_VARIABLE = "VLLM_KVFIX_PATCH"


class Mode(enum.Enum):
    """What the user asks for by ``VLLM_KVFIX_PATCH``."""

    AUTO = "auto"
    """Apply where version and digests are known."""
    FORCE = "force"
    """Apply where a digest is unknown too, if every feature that the back-port relies on is there."""
    OFF = "off"
    """Apply nothing."""


class State(enum.Enum):
    """What a decision comes to."""

    APPLY = "apply"
    NOT_AFFECTED = "not affected"
    REFUSED = "refused"
    OFF = "off"
    ABSENT = "absent"


@dataclass(frozen=True)
class Decision:
    """A state, the reason for it, and what the user can do next (empty: nothing)."""

    state: State
    affected: bool | None
    """Whether this vLLM has what the back-port mends; None where that cannot be told."""
    reason: str
    next_step: str = ""


def parse_mode(text: str | None) -> Mode | None:
    """The mode that the variable's value names; ``AUTO`` where it is unset or empty, None where it names none."""
    try:
        return Mode((text or "auto").strip().lower())
    except ValueError:
        return None


def decide(
    backport: Backport, installation: upstream.Installation | None, sources: upstream.Sources | None, mode: Mode | None
) -> Decision:
    """The decision for one back-port on one vLLM.

    Args:
        backport: What would be applied.
        installation: The vLLM found, None where there is none.
        sources: Its source files; None only where ``installation`` is.
        mode: What the user asks for; None where they asked for something unknown.
    """
    if installation is None or sources is None:
        return Decision(State.ABSENT, None, "no vLLM in this environment", "run this with the Python that runs vLLM")
    settled = _decide_without_digests(backport, installation, sources)
    if settled is not None:
        return settled
    return _decide_by_digests(backport, sources, mode)


def _decide_by_digests(backport: Backport, sources: upstream.Sources, mode: Mode | None) -> Decision:
    """The decision where the source records block ids and has no gate of its own."""
    unknown = upstream.unknown_targets(sources, backport.targets)
    affected = None if unknown else True
    if mode is Mode.OFF:
        return Decision(State.OFF, affected, f"{MODE_VARIABLE}=off", f"unset {MODE_VARIABLE}, then restart vLLM")
    if mode is None:
        names = ", ".join(m.value for m in Mode)
        return Decision(
            State.REFUSED,
            affected,
            f"the value of {MODE_VARIABLE} is none of {names}",
            f"unset {MODE_VARIABLE}, then restart vLLM",
        )
    if not unknown:
        return Decision(State.APPLY, affected, "version and source are known")
    if mode is Mode.AUTO:
        return Decision(
            State.REFUSED,
            affected,
            f"the source is not that of a release we know: {'; '.join(unknown)}",
            f"set {MODE_VARIABLE}=force to have it applied if all that it relies on is there, or upgrade to vLLM "
            f"{backport.first_fixed}",
        )
    missing = backport.missing_features(sources)
    if missing:
        return Decision(
            State.REFUSED,
            affected,
            f"{MODE_VARIABLE}=force, but it is not so that {'; that '.join(missing)}",
            f"upgrade to vLLM {backport.first_fixed}, or report it with your source",
        )
    return Decision(State.APPLY, affected, f"{MODE_VARIABLE}=force, and all that it relies on is there")


def _decide_without_digests(
    backport: Backport, installation: upstream.Installation, sources: upstream.Sources
) -> Decision | None:
    """The decision where version and the presence of record and gate suffice; None where digests must decide."""
    version = upstream.parse_version(installation.version)
    path = sources.path(upstream.MANAGERS_MODULE)
    if sources.module(upstream.MANAGERS_MODULE) is None:
        if version is not None and upstream.predates_leak(version):
            return Decision(State.NOT_AFFECTED, affected=False, reason=f"vLLM {version} is older than the leak")
        return Decision(State.REFUSED, None, f"no readable source at {path}", "install vLLM with its .py files")
    if not upstream.records_block_ids(sources):
        return Decision(
            State.NOT_AFFECTED, affected=False, reason="this vLLM keeps no block ids: it is older than the leak"
        )
    if upstream.has_gate(sources):
        return Decision(State.NOT_AFFECTED, affected=False, reason="this vLLM carries the upstream fix itself")
    expectation = _contradicted_expectation(backport, version)
    if expectation:
        return Decision(
            State.REFUSED,
            None,
            f"vLLM {version} should {expectation}, but its source does not say so",
            "check where this vLLM comes from",
        )
    return None


def _contradicted_expectation(backport: Backport, version: Version | None) -> str:
    """What a version of an ungated, recording source promises otherwise; empty where it promises nothing."""
    if version is None or version.is_devrelease:
        return ""
    if upstream.postdates_leak(version):
        return f"carry the fix of {backport.first_fixed}"
    if upstream.predates_leak(version):
        return "be older than the leak"
    return ""
