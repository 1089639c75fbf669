# SPDX-License-Identifier: Apache-2.0
"""Calls back when a module has been imported, without importing it (PEP 302 and PEP 451 finders and loaders).

The finder asks the finders after it, and lends the loader that they name one method for one import. So the module's
``__spec__`` and ``__loader__`` are what they would be without us.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Callback = Callable[[ModuleType], None]


class _Finder:
    """First on ``sys.meta_path`` while any callback waits; gone from it when none does."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        spec = self._spec_of_others(name, path, target)
        if spec is not None and spec.loader is not None:
            self._lend(name, spec)
        return spec

    def _spec_of_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _lend(self, name: str, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != name:  # a loader that serves several modules, such as zipimport's
                execute(module)
                return
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module  # type: ignore[union-attr]  # the instance attribute set below
            execute(module)
            callbacks = self.waiting.pop(name, ())
            if not self.waiting:
                uninstall()
            for callback in callbacks:
                callback(module)

        try:
            loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]  # found non-None above
        except AttributeError:  # a loader with slots: nothing can be lent, so this import goes unseen
            return


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once ``name`` has run: now, if it has already; else right after its next import.

    An import that has begun already goes unseen. Several callbacks for one name run in the order in which they came.
    ``callback`` must not raise: its exception would be that of the import.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    _finder.waiting.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(names: Sequence[str]) -> None:
    """Drop the callbacks that still wait for any of ``names``."""
    for name in names:
        _finder.waiting.pop(name, None)
    if not _finder.waiting:
        uninstall()


def uninstall() -> None:
    """Take the finder off ``sys.meta_path``; harmless where it is not on it."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
