# SPDX-License-Identifier: Apache-2.0
"""Whether a vLLM started from an environment would be protected: collected without importing it, then worded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix import guard, upstream
from vllm_kvfix.backports import BACKPORTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_kvfix.backports import Backport
    from vllm_kvfix.environment import Environment

ENTRY_POINT = "kvfix"

PROTECTED_OR_UNAFFECTED = 0
AFFECTED_AND_UNPROTECTED = 1
CANNOT_TELL = 2


@dataclass(frozen=True)
class BackportStatus:
    """One back-port in one environment."""

    name: str
    pull_request: str
    first_fixed: str
    state: str
    affected: bool | None
    protected: bool
    reason: str
    next_step: str


@dataclass(frozen=True)
class Status:
    """All that ``vllm-kvfix status`` says."""

    python: str
    executable: str
    vllm_version: str | None
    vllm_path: str | None
    plugin_version: str | None
    """Version of the plugin in the environment that was looked at; None where it is not installed there."""
    plugin_filter: str | None
    """The value of ``VLLM_PLUGINS``; None where it is unset."""
    plugin_allowed: bool
    """Whether ``VLLM_PLUGINS`` lets our entry point load."""
    leaking_models: tuple[str, ...]
    """Families of models that leak on this vLLM; empty where it is not affected, or that cannot be told."""
    backports: tuple[BackportStatus, ...]
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        return asdict(self)


def filter_allows(plugin_filter: str | None, name: str) -> bool:
    """Whether vLLM loads the entry point ``name`` under this ``VLLM_PLUGINS``.

    vLLM splits at commas, strips nothing, and takes an empty value for "none".
    """
    return plugin_filter is None or name in plugin_filter.split(",")


def collect(environment: Environment, environ: Mapping[str, str]) -> Status:
    """The status of an environment under the environment variables ``environ``; reads files, imports nothing."""
    root = Path(environment.package_root) if environment.package_root else None
    installation = upstream.Installation(root, upstream.read_version(root)) if root else None
    sources = upstream.Sources(root) if root else None
    mode = guard.parse_mode(environ.get(guard.MODE_VARIABLE))
    plugin_filter = environ.get(upstream.PLUGIN_FILTER_VARIABLE)
    allowed = filter_allows(plugin_filter, environment.entry_point or ENTRY_POINT)
    loads = environment.entry_point is not None and allowed
    backports = tuple(
        _backport_status(backport, guard.decide(backport, installation, sources, mode), environment, loads=loads)
        for backport in BACKPORTS
    )
    affected = any(b.affected for b in backports)
    return Status(
        python=environment.python,
        executable=environment.executable,
        vllm_version=installation.version if installation else None,
        vllm_path=environment.package_root,
        plugin_version=environment.plugin_version,
        plugin_filter=plugin_filter,
        plugin_allowed=allowed,
        leaking_models=tuple(upstream.SPEC_FAMILIES.get(name, name) for name in upstream.recorded_specs(sources))
        if sources and affected
        else (),
        backports=backports,
        exit_code=max(map(_exit_code, backports)),
    )


def _exit_code(backport: BackportStatus) -> int:
    if backport.protected or backport.affected is False:
        return PROTECTED_OR_UNAFFECTED
    return AFFECTED_AND_UNPROTECTED if backport.affected else CANNOT_TELL


def _backport_status(
    backport: Backport, decision: guard.Decision, environment: Environment, *, loads: bool
) -> BackportStatus:
    next_step = decision.next_step
    if decision.state is guard.State.APPLY and not loads:
        if environment.entry_point is None:
            next_step = f"{environment.executable} -m pip install vllm-kvfix, then restart vLLM"
        else:
            next_step = f"add {environment.entry_point} to {upstream.PLUGIN_FILTER_VARIABLE}, then restart vLLM"
    return BackportStatus(
        name=backport.name,
        pull_request=backport.pull_request,
        first_fixed=backport.first_fixed,
        state=decision.state.value,
        affected=decision.affected,
        protected=decision.state is guard.State.APPLY and loads,
        reason=decision.reason,
        next_step=next_step,
    )


_AFFECTED_WORDS = {True: "yes", False: "no", None: "cannot be told"}
_VERDICTS = {
    PROTECTED_OR_UNAFFECTED: "OK",
    AFFECTED_AND_UNPROTECTED: "NOT PROTECTED",
    CANNOT_TELL: "CANNOT TELL",
}


def verdict(status: Status) -> str:
    """The first line: two or three words, and why."""
    word = _VERDICTS[status.exit_code]
    if status.exit_code == PROTECTED_OR_UNAFFECTED:
        protected = any(b.protected for b in status.backports)
        return f"{word}: " + (
            "a vLLM started from this environment is protected"
            if protected
            else f"nothing to fix: {status.backports[0].reason}"
        )
    if status.exit_code == AFFECTED_AND_UNPROTECTED:
        return f"{word}: a vLLM started from this environment leaks host memory"
    return f"{word}: {status.backports[0].reason}"


def lines(status: Status) -> list[tuple[str, str]]:
    """The table below the verdict: label and value."""
    version = status.vllm_version or "of unknown version"
    rows = [
        ("vLLM", f"{version} in {status.vllm_path}" if status.vllm_path else "none"),
        ("Python", f"{status.python}, {status.executable}"),
        ("Plugin", f"vllm-kvfix {status.plugin_version}" if status.plugin_version else "not installed there"),
        (
            upstream.PLUGIN_FILTER_VARIABLE,
            "not set: every plugin loads"
            if status.plugin_filter is None
            else f"{status.plugin_filter!r}: {'lets us load' if status.plugin_allowed else 'keeps us out'}",
        ),
    ]
    if status.vllm_path is None:
        return [*rows, ("Next step", status.backports[0].next_step)]
    for backport in status.backports:
        state = "will be applied" if backport.protected else backport.state
        if backport.state == guard.State.APPLY.value and not backport.protected:
            state = "fits, but would not load"
        rows += [
            ("Back-port", f"{backport.name} ({backport.pull_request})"),
            ("  affected", _AFFECTED_WORDS[backport.affected]),
            ("  state", f"{state}: {backport.reason}"),
        ]
        if status.leaking_models:
            rows.append(("  leaks for", f"{'; '.join(status.leaking_models)}; never for models with Mamba layers"))
        rows.append(("  next step", backport.next_step or "none"))
    return rows
