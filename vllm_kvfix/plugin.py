# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point: decides, applies, says one line in the engine core; can never raise.

vLLM calls it in every process it starts, before the schedulers are made, and does not guard the call. So it does next
to nothing there: it waits for the modules that hold the scheduler, which only an engine core imports, and decides then.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix import __version__, faults, guard, import_hook, observe, patching, upstream
from vllm_kvfix.backports import BACKPORTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

    from vllm_kvfix.backports import Backport, Means, Site

logger = logging.getLogger(upstream.LOGGER_NAME)

# Its import brings the modules of the other sites with it, except the scheduler's, which imports this one: when this
# one arrives, that one's import has begun, and it is too late to ask for it.
_FIRST_MODULE = upstream.CACHE_MANAGER_MODULE
_LAST_MODULE = upstream.SCHEDULER_MODULE


@dataclass(frozen=True)
class Report:
    """What has become of one back-port in this process."""

    backport: Backport
    decision: guard.Decision | None
    """None until vLLM's scheduler has been imported."""
    replaced: tuple[str, ...]
    """The methods that are replaced now."""


class Application:
    """One back-port in this process: waiting, then applied or refused as a whole."""

    def __init__(self, backport: Backport, mode: guard.Mode | None) -> None:
        self.backport = backport
        self.mode = mode
        self.decision: guard.Decision | None = None
        self.version: str | None = None
        self.means: Means | None = None
        self.replacements: list[patching.Replacement] = []

    def wait(self) -> None:
        """Decide and replace as vLLM's modules are imported."""
        import_hook.when_imported(_FIRST_MODULE, self._first_module_arrived)
        import_hook.when_imported(_LAST_MODULE, self._arrived)

    def _first_module_arrived(self, module: ModuleType) -> None:
        try:
            self._decide(module)
            self._arrived(module)
            for name in dict.fromkeys(site.module for site in self._sites):
                if name not in {module.__name__, _LAST_MODULE}:
                    import_hook.when_imported(name, self._arrived)
        except Exception as error:  # noqa: BLE001  # this runs inside an import of vLLM's
            self._fail(error)

    def _decide(self, module: ModuleType) -> None:
        installation = upstream.locate()
        sources = upstream.Sources(installation.root) if installation else None
        self.version = installation.version if installation else None
        self.decision = guard.decide(self.backport, installation, sources, self.mode)
        if self.decision.state is guard.State.APPLY and sources is not None:
            expected, found = sources.path(_FIRST_MODULE), module.__file__
            if found is None or not expected.samefile(Path(found)):
                self.decision = guard.Decision(
                    guard.State.REFUSED,
                    self.decision.affected,
                    f"{_FIRST_MODULE} was loaded from {found}, not from {expected}",
                    "remove the package that replaces vLLM's modules, or report it",
                )
            else:
                self.means = self.backport.prepare(sources, self.announce)
        if self.decision.state is guard.State.REFUSED:
            self._warn()

    @property
    def _sites(self) -> tuple[Site, ...]:
        return self.means.sites if self.means else ()

    def prepare(self, installation: upstream.Installation, sources: upstream.Sources, decision: guard.Decision) -> None:
        """Get ready for an engine that is live, where ``decision`` fell elsewhere; nothing is replaced yet."""
        self.version, self.decision = installation.version, decision
        self.means = self.backport.prepare(sources, lambda: None)

    def put_in(self, modules: Mapping[str, ModuleType]) -> None:
        """Replace everything at once, in a process that has imported all of it.

        Raises:
            PatchError, KeyError: Something is not what it must be; nothing is replaced then.
        """
        try:
            for site in self._sites:
                self._replace(modules[site.module], site)
        except Exception:
            self.restore()
            raise
        _applications.append(self)

    def take_out(self) -> None:
        """Undo :meth:`put_in`."""
        _applications.remove(self)
        self.restore()

    def _arrived(self, module: ModuleType) -> None:
        try:
            for site in self._sites:
                if site.module == module.__name__:
                    self._replace(module, site)
        except Exception as error:  # noqa: BLE001  # this runs inside an import of vLLM's
            self._fail(error)

    def _replace(self, module: ModuleType, site: Site) -> None:
        done = patching.replace(
            module, site.class_name, site.name, self.backport.name, lambda original: site.make(module, original)
        )
        if done is not None:
            self.replacements.append(done)

    def _fail(self, error: Exception) -> None:
        """All or nothing: a part that cannot be replaced takes back those that were."""
        self.restore()
        self.decision = guard.Decision(
            guard.State.REFUSED, None, f"{type(error).__name__}: {error}", "report it; vLLM runs as it would without us"
        )
        self._warn()

    def restore(self) -> None:
        """Give the originals back; what somebody replaced since goes to ``_left``."""
        import_hook.forget([_FIRST_MODULE, _LAST_MODULE, *(site.module for site in self._sites)])
        self.means = None
        _left.extend(replacement for replacement in self.replacements if not patching.restore(replacement))
        self.replacements = []

    def announce(self) -> None:
        """Say that the fix is in force."""
        logger.info(
            "vllm-kvfix %s: the host-memory leak of vLLM %s is fixed in this engine core (back-port of %s, %s). "
            "Check any time with: vllm-kvfix status",
            __version__,
            self.version,
            self.backport.pull_request,
            self.decision.reason if self.decision else "",
        )

    def _warn(self) -> None:
        if self.decision is not None:
            logger.warning(
                "vllm-kvfix %s: NOT applied to vLLM %s, so %s. Reason: %s. Next step: %s.",
                __version__,
                self.version or "of unknown version",
                self.backport.why,
                self.decision.reason,
                self.decision.next_step,
            )


_applications: list[Application] = []
_observations: list[observe.Observation] = []
# What `restore` could not give back yet, since another plugin's wrapper lay on top.
_left: list[patching.Replacement] = []
_lock = threading.Lock()


def register(environ: Mapping[str, str] | None = None) -> None:
    """Have every back-port applied, and the hooks that watch put in, as soon as vLLM's scheduler is imported.

    Safe to call any number of times. Imports nothing of vLLM and raises nothing. ``environ`` stands in for
    ``os.environ``.
    """
    try:
        with _lock:
            if _applications or _observations:
                return
            environ = os.environ if environ is None else environ
            mode = guard.parse_mode(environ.get(guard.MODE_VARIABLE))
            if mode is not guard.Mode.OFF:
                _applications.extend(Application(backport, mode) for backport in BACKPORTS)
            if observe.wanted(environ) is not False:
                _observations.append(observe.Observation(environ, patch_state))
            for application in _applications:
                application.wait()
            for observation in _observations:
                observation.wait()
    except Exception as error:  # noqa: BLE001  # vLLM does not guard this call
        faults.note("register", error)


def restore() -> tuple[str, ...]:
    """Give vLLM every method back, the identical objects.

    Returns:
        Names of methods that stay replaced because another plugin wrapped ours since: taking ours away would take
        theirs away too. Once that plugin has taken its wrapper back, a further call gives them back.
    """
    with _lock:
        retry()
        # What watches lies on top of what fixes.
        for observation in _observations:
            _left.extend(observation.restore())
        _observations.clear()
        for application in _applications:
            application.restore()
        _applications.clear()
        return tuple(map(str, _left))


def applications() -> tuple[Application, ...]:
    """The back-ports in this process."""
    return tuple(_applications)


def leave(replacements: Iterable[patching.Replacement]) -> None:
    """Remember what could not be given back, as another plugin's wrapper lies on top of it."""
    _left.extend(replacements)


def retry() -> tuple[str, ...]:
    """Give back what can be given back by now; returns the names of the methods that still stay replaced."""
    _left[:] = [replacement for replacement in _left if not patching.restore(replacement)]
    return tuple(map(str, _left))


def patch_state() -> str:
    """What a ring's header says of the fix, one of ``layout.PATCH_STATES``."""
    if not _applications:
        return "off"
    states = {application.decision.state if application.decision else None for application in _applications}
    if guard.State.APPLY in states:
        return "applied"
    return "not affected" if states == {guard.State.NOT_AFFECTED} else "refused"


def report() -> tuple[Report, ...]:
    """The state of each back-port in this process; empty where ``register`` has not run or was told to be off."""
    return tuple(Report(a.backport, a.decision, tuple(map(str, a.replacements))) for a in _applications)
