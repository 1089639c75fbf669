# SPDX-License-Identifier: Apache-2.0
"""Snapshots of `SchedulerOutput`s, every field of them, and where two of them differ."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import deque
from typing import Any

_PLAIN = (int, float, str, bytes, bool, type(None))


def snapshot(value: Any) -> Any:
    """A plain structure with every field of a `SchedulerOutput`, recursively; equal if and only if they are equal.

    Order is kept where Python keeps one (lists, tuples, dicts); sets are sorted. Types are part of it.

    Raises:
        TypeError: An object whose state cannot be seen: nothing is skipped silently.
    """
    return _snapshot(value, ())


def _snapshot(value: Any, path: tuple[int, ...]) -> Any:  # noqa: PLR0911  one return per kind of value
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        return value
    if id(value) in path:
        return ("cycle", len(path) - path.index(id(value)))
    path = (*path, id(value))
    kind = type(value).__name__
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if isinstance(value, dict):
        return (kind, [(_snapshot(k, path), _snapshot(v, path)) for k, v in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (kind, [_snapshot(v, path) for v in value])
    if isinstance(value, (set, frozenset)):
        return (kind, sorted((_snapshot(v, path) for v in value), key=repr))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        state = [(f.name, _snapshot(getattr(value, f.name), path)) for f in dataclasses.fields(value)]
        names = {f.name for f in dataclasses.fields(value)}
        extra = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in names}
        return (kind, state, _snapshot(extra, path))
    return (kind, _opaque(value, path))


def _opaque(value: Any, path: tuple[int, ...]) -> Any:
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "tolist"):  # numpy arrays and tensors
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if hasattr(value, "__struct_fields__"):  # msgspec
        return [(n, _snapshot(getattr(value, n), path)) for n in value.__struct_fields__]
    slots = [s for c in type(value).__mro__ for s in _as_tuple(c.__dict__.get("__slots__", ())) if hasattr(value, s)]
    state = {**{s: getattr(value, s) for s in slots if s != "__dict__"}, **getattr(value, "__dict__", {})}
    if not state and not hasattr(value, "__dict__"):
        msg = f"cannot see the state of a {type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(msg)
    return _snapshot(state, path)


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def differences(left: Any, right: Any, where: str = "output") -> list[str]:
    """The places where two snapshots differ, as readable lines."""
    if left == right and type(left) is type(right):
        return []
    if (
        isinstance(left, (list, tuple))
        and isinstance(right, (list, tuple))
        and len(left) == len(right)
        and len(left) > 0
    ):
        found = []
        for i, (one, two) in enumerate(zip(left, right, strict=True)):
            label = one[0] if isinstance(one, tuple) and one and isinstance(one[0], str) else i
            found += differences(one, two, f"{where}.{label}")
        return found
    return [f"{where}: {left!r:.300} != {right!r:.300}"]
