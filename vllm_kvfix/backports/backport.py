# SPDX-License-Identifier: Apache-2.0
"""What a back-port is: a documented value. Nothing happens until :mod:`vllm_kvfix.plugin` applies it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from vllm_kvfix.upstream import Sources, Target

    Make = Callable[[ModuleType, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Site:
    """One method to replace: ``make(module, original)`` gives what takes its place once ``module`` has run."""

    module: str
    class_name: str
    name: str
    make: Make = field(repr=False)

    def __str__(self) -> str:
        return f"{self.class_name}.{self.name}"


@dataclass(frozen=True)
class Means:
    """A back-port made ready for one process."""

    sites: tuple[Site, ...]
    heal: Callable[[Any], None] = field(repr=False)
    """``heal(scheduler)``: have a live scheduler, made before the sites were replaced, be as one made since."""
    unheal: Callable[[Any], None] = field(repr=False)
    """``unheal(scheduler)``: have it be as one made without the back-port."""
    release: Callable[[], int] = field(repr=False)
    """Give back one slice of what had piled up; returns how much of it is left."""


@dataclass(frozen=True)
class Backport:
    """An upstream fix brought to releases that lack it."""

    name: str
    """Short and stable: the mark on what it replaces, and the name that ``vllm-kvfix status`` prints."""
    pull_request: str
    """Address of the upstream pull request."""
    issue: str
    """Address of the upstream report."""
    why: str
    """What goes wrong without it, in half a sentence that a user recognises."""
    affected: tuple[str, ...]
    """The released versions that it is for."""
    first_fixed: str
    """The first release with the fix: obsolete when every supported release is that or later."""
    targets: tuple[Target, ...]
    """Functions whose source must be known before anything is replaced."""
    missing_features: Callable[[Sources], list[str]] = field(repr=False)
    """What a source of unknown digest lacks for this; a sentence each, empty where all is there."""
    prepare: Callable[[Sources, Callable[[], None]], Means] = field(repr=False)
    """``prepare(sources, announce)``: the means; ``announce`` is called when they are first in force in an engine."""
