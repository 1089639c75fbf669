# SPDX-License-Identifier: Apache-2.0
"""Replacing attributes of classes and giving them back; knows no target.

A replacement carries a mark, found through the chain of ``__wrapped__``, so that nothing is replaced twice: not by a
second call, not in a forked child, not by a second copy of this package, not under another plugin's wrapper.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

MARK = "__vllm_kvfix__"


class PatchError(Exception):
    """A target is not what it must be for a replacement; the message says which and how."""


@dataclass(frozen=True)
class Replacement:
    """An attribute that was replaced: ``original`` is the very object that ``owner.__dict__`` held before."""

    owner: type
    name: str
    original: Callable[..., Any]
    current: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


def class_of(module: ModuleType, name: str) -> type:
    """The class of that name in a module.

    Raises:
        PatchError: there is none.
    """
    found = module.__dict__.get(name)
    if not isinstance(found, type):
        message = f"{module.__name__} has no class {name}"
        raise PatchError(message)
    return found


def resolve(module: ModuleType, class_name: str, name: str) -> tuple[type, Any]:
    """The class and the raw attribute (from its own ``__dict__``) that are to be replaced.

    Raises:
        PatchError: ``module`` has no such class, or the class does not define ``name`` itself.
    """
    owner = class_of(module, class_name)
    if name not in owner.__dict__:
        message = f"{module.__name__} defines no {class_name}.{name}"
        raise PatchError(message)
    return owner, owner.__dict__[name]


def is_marked(function: object, mark: str) -> bool:
    """Whether ``function`` is a replacement with this mark, or another plugin's wrapper around one."""
    seen = 0
    while function is not None and seen < 100:  # noqa: PLR2004  # a bound against a cycle, not a measure
        if getattr(function, MARK, None) == mark:
            return True
        function = getattr(function, "__wrapped__", None)
        seen += 1
    return False


def replace(
    module: ModuleType, class_name: str, name: str, mark: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Replacement | None:
    """Put ``make(original)`` in the place of a method; None where a replacement with this mark is there already.

    Raises:
        PatchError: see :func:`resolve`; also where the attribute is no callable.
    """
    owner, original = resolve(module, class_name, name)
    if is_marked(original, mark):
        return None
    if not callable(original):
        message = f"{class_name}.{name} is a {type(original).__name__}, not a function"
        raise PatchError(message)
    current = make(original)
    functools.update_wrapper(current, original)
    setattr(current, MARK, mark)
    setattr(owner, name, current)
    return Replacement(owner, name, original, current)


def restore(replacement: Replacement) -> bool:
    """Give the original back; False where somebody replaced ours since: theirs is left alone."""
    if replacement.owner.__dict__.get(replacement.name) is not replacement.current:
        return False
    setattr(replacement.owner, replacement.name, replacement.original)
    return True
