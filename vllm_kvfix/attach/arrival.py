# SPDX-License-Identifier: Apache-2.0
"""The first of our code that runs in a target: unpacks the package there, in memory, and calls ``inside``.

It travels compiled, beside the modules that it unpacks, and imports nothing of this package before it has done so.
Modules are imported one at a time with pauses between them: whoever waits for the interpreter meanwhile waits little.
"""

from __future__ import annotations

import importlib
import json
import marshal
import sys
import time
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType
    from typing import BinaryIO

PACKAGE = "vllm_kvfix"
BUILD = "__attached_build__"
PAUSE_S = 0.004


class Finder:
    """Finds the modules that came along, and loads them (PEP 451)."""

    def __init__(self, modules: Mapping[str, memoryview], packages: Sequence[str]) -> None:
        self._modules = modules
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module that came along; None of all others."""
        del path, target
        if name not in self._modules:
            return None
        return ModuleSpec(name, self, is_package=name in self._packages)  # type: ignore[arg-type]  # it has all it needs

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """An ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        exec(marshal.loads(self._modules[module.__name__]), vars(module))  # noqa: S102,S302  # our own, see the bootstrap


def _inside() -> Any:
    return sys.modules.get(f"{PACKAGE}.attach.inside")


def _is_in_use() -> bool:
    return _inside() is not None and bool(_inside().attached())


def _make_room(head: Mapping[str, Any]) -> str:
    """See to it that the package here, if any, is the one that comes; says why that cannot be, or nothing."""
    present = sys.modules.get(PACKAGE)
    if present is None:
        return ""
    build = getattr(present, BUILD, None)
    if present.__version__ == head["version"] and build in {None, head["build"]}:
        return ""
    if build is None or _is_in_use():
        return f"vllm-kvfix {present.__version__} is at work in the engine, and this is {head['version']}" + (
            " of another build" if present.__version__ == head["version"] else ""
        )
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    return ""


def unpack(head: Mapping[str, Any], data: bytes) -> None:
    """Import every module that came along and is not there yet."""
    view = memoryview(data)
    modules = {name: view[start:end] for name, (start, end) in head["modules"].items()}
    fresh = PACKAGE not in sys.modules
    finder: Any = Finder(modules, head["packages"])
    sys.meta_path.insert(0, finder)
    try:
        for name in modules:
            if name not in sys.modules:
                importlib.import_module(name)
                time.sleep(PAUSE_S)
    finally:
        sys.meta_path.remove(finder)
    if fresh:
        setattr(sys.modules[PACKAGE], BUILD, head["build"])


def run(stream: BinaryIO, head: Mapping[str, Any], data: bytes) -> None:
    """Unpack, do what is asked for, and tell of it by ``stream``, a line of JSON each."""
    try:
        # What was attached is taken back by what attached it, of whatever release that is.
        by_itself = head["request"]["do"] == "detach" and _is_in_use()
        obstacle = "" if by_itself else _make_room(head)
        if obstacle:
            said = {"event": "refused", "reason": "other version", "message": obstacle, "next_step": head["use"]}
        else:
            if not by_itself:
                unpack(head, data)
            _inside().main(stream, head["request"])
            return
    except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM; the other side says it
        said = {"event": "refused", "reason": "failed", "message": repr(error), "next_step": "report it"}
    stream.write(json.dumps(said).encode() + b"\n")
    stream.flush()


if __name__ == "vllm_kvfix_arrival":
    run(globals()["stream"], globals()["head"], globals()["data"])
