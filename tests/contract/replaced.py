# SPDX-License-Identifier: Apache-2.0
"""Which objects of vLLM's core are not the ones that were there before: compared by identity, found by looking."""

from __future__ import annotations

import inspect
import sys
from typing import Any

_PREFIXES = ("vllm.v1.core.", "vllm.v1.kv_cache_interface", "vllm.v1.request", "vllm.v1.engine.core")

Picture = dict[str, object]


def picture() -> Picture:
    """Every attribute of every class, and every global, of vLLM's core modules that this process has imported.

    Keys are dotted names; the values keep the objects alive, so that an id cannot be used again.
    """
    found: Picture = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(_PREFIXES) or module is None:
            continue
        for key, value in list(vars(module).items()):
            if key in {"__builtins__", "__spec__", "__loader__"}:
                continue
            found[f"{name}.{key}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                found.update(_attributes(f"{name}.{key}", value))
    return found


def _attributes(name: str, cls: type[Any]) -> Picture:
    # An abstract class's cache of subclass checks is not behaviour, and changes by itself.
    return {f"{name}.{k}": v for k, v in vars(cls).items() if k not in {"_abc_impl", "__weakref__"}}


def replaced(before: Picture, after: Picture) -> list[str]:
    """Names whose object changed, that came, or that went; names of modules imported since are not counted."""
    modules = {name.rsplit(".", 1)[0] for name in before}
    return sorted(
        [name for name in before if name not in after or after[name] is not before[name]]
        + [name for name in after if name not in before and name.rsplit(".", 1)[0] in modules]
    )
