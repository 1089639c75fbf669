# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: who imports whom, and who may speak of vLLM."""

from __future__ import annotations

import ast
import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = ROOT / "vllm_kvfix"

# Allowed edges: a module may import these of ours, and no other. The arrows of docs/architecture.md.
EDGES = {
    "upstream": set(),
    "patching": set(),
    "import_hook": set(),
    "environment": set(),
    "ring": {"ring"},
    "events": set(),
    "host": {"events", "host", "ring"},
    "faults": {"upstream"},
    "live": {"events"},
    "containers": {"live"},
    "orphans": {"containers"},
    "census": {"containers", "events", "live", "orphans"},
    "backports": {"upstream", "live", "patching", "faults", "backports"},
    "ledger": {"events", "live"},
    "recorder": {"events", "faults", "ledger", "live", "upstream", "ring"},
    "own_ring": {"ring", "upstream"},
    "vitals": {"census", "events", "faults", "host", "upstream"},
    "roots": {"census", "faults", "import_hook", "live", "patching", "ring", "upstream", "vitals"},
    "observe": {"faults", "import_hook", "live", "own_ring", "patching", "recorder", "ring", "roots", "upstream"},
    "guard": {"upstream", "backports"},
    "plugin": {"upstream", "patching", "import_hook", "faults", "backports", "guard", "observe"},
    "status": {"upstream", "guard", "backports", "environment"},
    "attach": {
        "attach",
        "backports",
        "environment",
        "events",
        "faults",
        "guard",
        "host",
        "import_hook",
        "live",
        "observe",
        "own_ring",
        "patching",
        "plugin",
        "ring",
        "upstream",
    },
    "cli": {"upstream", "environment", "status"},
    "demo": {"attach", "demo", "ring", "upstream"},
    "__main__": {"cli"},
    "__init__": set(),
}
THIRD_PARTY = {"packaging"}
# Imported when they are used, and never inside vLLM: the commands that are the sidecar's, and what the extra `attach`
# brings, in the one module that injects.
ELSEWHERE = {"cli.py": {"vllm_kvfix_sidecar"}, "attach/injection.py": {"hypno", "pyinjector"}}
# What the sidecar may take from the plugin: the contract between them, and nothing that runs inside vLLM.
SHARED = {"__version__", "events", "host", "ring"}


# Each source file of the plugin with the name of the module, or of the sub-package, that it belongs to.
MODULES = [
    pytest.param(path.relative_to(PACKAGE).with_suffix("").parts[0], path, id=str(path.relative_to(PACKAGE)))
    for path in sorted(PACKAGE.rglob("*.py"))
]


def imports(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("module", "path"), MODULES)
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    """No module of the plugin imports another of ours that the table does not allow it."""
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "vllm_kvfix" or parts[1] == "__version__":
            continue
        assert parts[1] in EDGES[module], f"{path} imports {name}"


@pytest.mark.parametrize(("module", "path"), MODULES)
def test_the_plugin_needs_the_standard_library_and_packaging_alone(module: str, path: Path) -> None:
    """Outside demo/, nothing is imported that is neither standard, nor packaging, nor ours."""
    if module == "demo":  # never runs inside vLLM
        return
    outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"vllm_kvfix"}
    assert outside <= THIRD_PARTY | ELSEWHERE.get(str(path.relative_to(PACKAGE)), set())


@pytest.mark.parametrize(("module", "path"), MODULES)
def test_only_upstream_speaks_of_vllm(module: str, path: Path) -> None:
    """A dotted path into vLLM, or a version of it, is a string in upstream.py alone (docstrings apart)."""
    if module in {"upstream", "demo"}:
        return
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, documented)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
            assert not re.search(r"\bvllm\.\w", node.value), f"{path}:{node.lineno}: {node.value!r}"
            said = path.name != "cli.py" and module != "__init__" and re.search(r"\b0\.\d+\.\d+\b", node.value)
            assert not said, f"{path}:{node.lineno}: {node.value!r}"


def test_importing_every_module_changes_nothing_of_vllm() -> None:
    """Importing all of the plugin's modules imports no vLLM and leaves sys.meta_path as it was."""
    import importlib  # noqa: PLC0415  # what is tested

    before = list(sys.meta_path)
    for module in EDGES:
        if module not in {"__main__", "demo", "__init__"}:
            importlib.import_module(f"vllm_kvfix.{module}")
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]


def test_the_sidecar_takes_only_the_contract_from_the_plugin() -> None:
    """The sidecar imports the events and the ring of the plugin, no vLLM, and no torch."""
    for path in sorted((ROOT / "sidecar" / "vllm_kvfix_sidecar").rglob("*.py")):
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] not in {"vllm", "torch"}, f"{path} imports {name}"
            assert parts[0] != "vllm_kvfix" or parts[1] in SHARED, f"{path} imports {name}"
