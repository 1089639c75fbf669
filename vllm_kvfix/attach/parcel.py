# SPDX-License-Identifier: Apache-2.0
"""What travels into a target: the modules that run there, compiled for its Python, and what unpacks them."""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import importlib.util
import json
import marshal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix import __version__
from vllm_kvfix.attach import compiling
from vllm_kvfix.attach.errors import AttachError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGE = "vllm_kvfix"
FIRST = "vllm_kvfix.attach.arrival"
INSIDE = "vllm_kvfix.attach.inside"
ATTACH = "vllm_kvfix.attach"  # the package itself, which is for this side, travels as an empty one
COMPILE_TIMEOUT_S = 60

_ROOT = Path(__file__).parents[1]

# What runs in the target first. It is short, since it is compiled there, and ends at once: a thread does the rest.
_BOOTSTRAP = """\
import threading
def run():
    import importlib.util, json, marshal, socket
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout({patience})
        link.connect({path!r})
        stream = link.makefile("rwb")
        head = json.loads(stream.readline())
        data = stream.read(head["bytes"])
        if len(data) == head["bytes"] and importlib.util.MAGIC_NUMBER.hex() == head["magic"]:
            exec(marshal.loads(data[:head["first"]]),
                 {{"__name__": "vllm_kvfix_arrival", "stream": stream, "head": head, "data": data}})
        elif data:
            stream.write(b'{{"event": "refused", "reason": "other python", "message": "other byte code"}}\\n')
            stream.flush()
    except OSError:
        pass
    finally:
        link.close()
threading.Thread(target=run, name="vllm-kvfix-attach", daemon=True).start()
"""


def bootstrap(path: str, patience_s: int = 60) -> str:
    """The code that connects to the socket at ``path`` and runs what comes; leaves no name behind."""
    return f"exec({_BOOTSTRAP.format(path=path, patience=patience_s)!r}, {{'__name__': 'vllm_kvfix_bootstrap'}})"


@dataclass(frozen=True)
class Parcel:
    """Compiled modules, each after those that it imports, and fingerprints of vLLM's functions.

    ``build`` tells one state of our sources from another, whatever Python they are compiled for.
    """

    magic: str
    build: str
    modules: Mapping[str, bytes]
    fingerprints: Mapping[str, Mapping[str, str]]

    def head_and_data(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """What is sent: a description that is JSON, and the modules one after another."""
        places, data = {}, self.modules[FIRST]
        for name, code in self.modules.items():
            if name != FIRST:
                places[name] = (len(data), len(data) + len(code))
                data += code
        head = {
            "bytes": len(data),
            "first": len(self.modules[FIRST]),
            "magic": self.magic,
            "modules": places,
            "packages": [name for name in places if _path(name).name == "__init__.py"],
            "version": __version__,
            "build": self.build,
            "use": f"use the vllm-kvfix that is in the engine, or restart the engine with {__version__}",
            "request": request,
        }
        return head, data


def make(version: tuple[int, int], interpreter: str, sources: Mapping[str, tuple[str, list[str]]]) -> Parcel:
    """The parcel for a Python of this ``version``.

    Args:
        version: Major and minor.
        interpreter: A program that runs it, for when this one is of another version.
        sources: Of vLLM's modules, by name: the text and the functions whose byte code is to be compared.

    Raises:
        AttachError: The interpreter cannot be run.
    """
    texts, build = _texts()
    if version == sys.version_info[:2]:
        prints = {name: _fingerprints(text, tuple(functions)) for name, (text, functions) in sources.items()}
        return Parcel(compiling.MAGIC, build, _own_codes(), prints)
    made = _by_other({"compile": texts, "fingerprint": dict(sources)}, version, interpreter)
    codes = {name: base64.b64decode(code) for name, code in made["modules"].items()}
    return Parcel(made["magic"], build, codes, made["fingerprints"])


# Once for all engines.


@functools.cache
def _texts() -> tuple[dict[str, str], str]:
    """The texts of what travels, and their build: not of byte code, which need not be the same written out twice."""
    names = [*_in_order(INSIDE), FIRST]
    texts = {name: "" if name == ATTACH else _path(name).read_text(encoding="utf-8") for name in names}
    return texts, hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


@functools.cache
def _own_codes() -> dict[str, bytes]:
    return {name: _compiled(name, text) for name, text in _texts()[0].items()}


@functools.lru_cache(maxsize=64)
def _fingerprints(text: str, functions: tuple[str, ...]) -> dict[str, str]:
    return compiling.fingerprints(text, list(functions))


def _compiled(name: str, text: str) -> bytes:
    if name == ATTACH:
        return marshal.dumps(compile(text, f"{name}.py", "exec"))
    spec = importlib.util.find_spec(name)
    loader: Any = spec.loader if spec else None
    return marshal.dumps(loader.get_code(name))  # from __pycache__ where it is there


def _by_other(order: Mapping[str, Any], version: tuple[int, int], interpreter: str) -> dict[str, Any]:
    text = Path(compiling.__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(  # noqa: S603  # the target's own program
            [interpreter, "-I", "-S", "-c", text],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        made: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        theirs = ".".join(map(str, version))
        raise AttachError(
            Reason.OTHER_PYTHON,
            f"it runs Python {theirs}, this command {'.'.join(map(str, sys.version_info[:2]))}, and its interpreter "
            f"cannot be asked to compile for it: {error}",
            f"run this command with Python {theirs}",
        ) from error
    return made


def _path(name: str) -> Path:
    found = _ROOT.joinpath(*name.split(".")[1:])
    return found / "__init__.py" if found.is_dir() else found.with_suffix(".py")


def _in_order(name: str) -> list[str]:
    """``name`` and all of this package that it imports, each after what it needs itself."""
    done: dict[str, None] = {}

    def visit(module: str, above: frozenset[str]) -> None:
        if module in done or module in above:
            return
        parent = module.rpartition(".")[0]
        text = "" if module == ATTACH else _path(module).read_text(encoding="utf-8")
        for needed in ([parent] if parent else []) + list(_imports(ast.parse(text))):
            visit(needed, above | {module})
        done.setdefault(module)

    visit(name, frozenset())
    return list(done)


def _imports(tree: ast.Module) -> Iterator[str]:
    """Modules of this package that a module imports as it runs."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if _path(below).exists() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
