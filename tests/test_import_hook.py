# SPDX-License-Identifier: Apache-2.0
"""import_hook: callbacks after imports, and nothing else changed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from vllm_kvfix import import_hook

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package ``hooked`` with modules that import one another, on sys.path."""
    folder = tmp_path / "hooked"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("done = True\n")
    (folder / "outer.py").write_text("from hooked import inner\ndone = inner.done\n")
    (folder / "failing.py").write_text("import hooked.switch\nif not hooked.switch.ok: raise RuntimeError('broken')\n")
    (folder / "switch.py").write_text("ok = False\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield "hooked"
    for name in set(sys.modules) - before:
        del sys.modules[name]
    import_hook.forget(["hooked.inner", "hooked.outer", "hooked.failing", "hooked.never"])


def test_the_callback_comes_after_the_module_has_run(package: str) -> None:
    """At the callback the module's body has been executed, once, and the finder is gone afterwards."""
    seen: list[tuple[str, bool]] = []
    import_hook.when_imported(f"{package}.inner", lambda m: seen.append((m.__name__, m.done)))
    assert seen == []
    importlib.import_module(f"{package}.outer")
    importlib.import_module(f"{package}.inner")
    assert seen == [("hooked.inner", True)]
    assert import_hook._finder not in sys.meta_path


def test_a_module_that_is_there_already_calls_back_at_once(package: str) -> None:
    """No finder is installed for a module that has been imported."""
    importlib.import_module(f"{package}.inner")
    seen: list[ModuleType] = []
    import_hook.when_imported(f"{package}.inner", seen.append)
    assert seen == [sys.modules["hooked.inner"]]
    assert import_hook._finder not in sys.meta_path


def test_spec_and_loader_are_what_they_would_be_without_us(package: str) -> None:
    """The hooked module's loader has no attribute of ours left, and its source can be had."""
    import_hook.when_imported(f"{package}.inner", lambda _: None)
    module = importlib.import_module(f"{package}.inner")
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert "exec_module" not in vars(module.__spec__.loader)
    assert importlib.reload(module).done


def test_a_failed_import_calls_back_only_when_it_succeeds(package: str) -> None:
    """An import that raises gives no callback; the next, successful one does."""
    seen: list[str] = []
    import_hook.when_imported(f"{package}.failing", lambda m: seen.append(m.__name__))
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(f"{package}.failing")
    assert seen == []
    sys.modules["hooked.switch"].ok = True  # type: ignore[attr-defined]  # the module made above
    importlib.import_module(f"{package}.failing")
    assert seen == ["hooked.failing"]


def test_a_module_that_does_not_exist_still_raises(package: str) -> None:
    """Waiting for a module that never comes does not change the error of importing it."""
    import_hook.when_imported(f"{package}.never", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"hooked\.never"):
        importlib.import_module(f"{package}.never")
    import_hook.forget([f"{package}.never"])
    assert import_hook._finder not in sys.meta_path


def test_a_loader_shared_by_several_modules_serves_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a zip archive, whose loader is one object for all modules, only the awaited module calls back."""
    archive = tmp_path / "zipped.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("zipped_one.py", "import zipped_two\n")
        packed.writestr("zipped_two.py", "value = 2\n")
    monkeypatch.syspath_prepend(str(archive))
    seen: list[str] = []
    import_hook.when_imported("zipped_one", lambda m: seen.append(m.__name__))
    importlib.import_module("zipped_one")
    assert seen == ["zipped_one"]
    assert sys.modules["zipped_two"].value == 2
    for name in ("zipped_one", "zipped_two"):
        del sys.modules[name]


@pytest.mark.parametrize("theirs_first", [True, False])
def test_another_hook_of_the_same_kind_may_stand_beside_ours(package: str, *, theirs_first: bool) -> None:
    """A hook that lends the same loader method and takes it back itself neither breaks ours nor is broken by it."""
    seen: list[str] = []

    class Theirs:
        """Does as ours does."""

        asking = False

        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            """Lend the loader's method."""
            if self.asking or name != f"{package}.inner":
                return None
            self.asking = True
            spec = importlib.util.find_spec(name)
            assert spec is not None
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                seen.append("theirs")

            loader.exec_module = exec_module
            return spec

    theirs = Theirs()
    if theirs_first:
        sys.meta_path.insert(0, theirs)
    import_hook.when_imported(f"{package}.inner", lambda _: seen.append("ours"))
    if not theirs_first:
        sys.meta_path.insert(0, theirs)
    try:
        importlib.import_module(f"{package}.inner")
    finally:
        sys.meta_path.remove(theirs)
    assert sorted(seen) == ["ours", "theirs"]
