# SPDX-License-Identifier: Apache-2.0
"""Byte code for the Python that the target runs, and what names a function's byte code.

Compiling inside the target would hold its interpreter, module by module, so it is done outside. Where the target runs
another Python than this command, its own program is handed this file's text: hence the standard library alone, and no
import of this package.
"""

from __future__ import annotations

import base64
import hashlib
import json
import marshal
import sys
from importlib.util import MAGIC_NUMBER
from types import CodeType
from typing import Any

MAGIC = MAGIC_NUMBER.hex()


def fingerprint(code: CodeType) -> str:
    """16 hex digits that name what a function does; the same for one that runs as for its source, compiled anew."""
    return hashlib.sha256(repr(_essence(code)).encode()).hexdigest()[:16]


def _essence(code: CodeType) -> tuple[object, ...]:
    constants = [_essence(c) if isinstance(c, CodeType) else _stable(c) for c in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)


def _stable(constant: object) -> object:
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def find(code: CodeType, qualname: str) -> CodeType | None:
    """The code of ``Class.function`` in a module's code; None where there is none."""
    for name in qualname.split("."):
        found = next((c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name), None)
        if found is None:
            return None
        code = found
    return code


def fingerprints(text: str, qualnames: list[str]) -> dict[str, str]:
    """:func:`fingerprint` of each function of these names that the ``text`` of a module defines."""
    module = compile(text, "<target>", "exec", dont_inherit=True, optimize=0)
    found = {name: find(module, name) for name in qualnames}
    return {name: fingerprint(code) for name, code in found.items() if code is not None}


def work(order: dict[str, Any]) -> dict[str, Any]:
    """What an order asks for: ``compile`` texts by name of module, ``fingerprint`` functions of texts."""
    return {
        "magic": MAGIC,
        "modules": {
            name: base64.b64encode(marshal.dumps(compile(text, f"{name}.py", "exec", dont_inherit=True))).decode()
            for name, text in order["compile"].items()
        },
        "fingerprints": {module: fingerprints(text, names) for module, (text, names) in order["fingerprint"].items()},
    }


if __name__ == "__main__":
    json.dump(work(json.load(sys.stdin)), sys.stdout)
