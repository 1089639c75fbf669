# SPDX-License-Identifier: Apache-2.0
"""patching: replace, recognise, restore."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from vllm_kvfix import patching

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "a-mark"


class Base:
    """A class of somebody else's."""

    value = 3

    def method(self, number: int) -> int:
        """Add."""
        return number + 1

    def inherited(self) -> str:
        """Only here."""
        return "base"


class Child(Base):
    """Defines one of the two itself."""

    def method(self, number: int) -> int:
        """Add more."""
        return number + 2


@pytest.fixture
def module() -> ModuleType:
    """A module with fresh copies of both classes."""
    made = ModuleType("made_up")
    base = type("Base", (), dict(Base.__dict__))
    vars(made).update(Base=base, Child=type("Child", (base,), {"method": Child.__dict__["method"]}))
    return made


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that doubles the result."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return 2 * original(*args, **kwargs)

    return method


def test_restore_gives_back_the_identical_object(module: ModuleType) -> None:
    """After replace and restore, the class holds the very function it held before."""
    original = module.Child.__dict__["method"]
    done = patching.replace(module, "Child", "method", MARK, doubled)
    assert done is not None
    assert module.Child().method(1) == 6
    assert patching.restore(done)
    assert module.Child.__dict__["method"] is original
    assert module.Child().method(1) == 3


def test_a_second_replacement_with_the_same_mark_changes_nothing(module: ModuleType) -> None:
    """Replacing twice wraps once."""
    assert patching.replace(module, "Child", "method", MARK, doubled) is not None
    current = module.Child.__dict__["method"]
    assert patching.replace(module, "Child", "method", MARK, doubled) is None
    assert module.Child.__dict__["method"] is current


def test_a_replacement_is_recognised_under_the_wrapper_of_another(module: ModuleType) -> None:
    """A wrapper by functools.wraps around ours does not make us wrap again."""
    patching.replace(module, "Child", "method", MARK, doubled)
    ours = module.Child.method

    @functools.wraps(ours)
    def theirs(*args: Any) -> Any:
        return ours(*args)

    module.Child.method = theirs
    assert patching.is_marked(theirs, MARK)
    assert patching.replace(module, "Child", "method", MARK, doubled) is None


def test_restore_leaves_the_wrapper_of_another_alone(module: ModuleType) -> None:
    """Where somebody wrapped ours since, restore says so and takes nothing away."""
    done = patching.replace(module, "Child", "method", MARK, doubled)
    assert done is not None
    theirs = doubled(module.Child.method)
    module.Child.method = theirs
    assert not patching.restore(done)
    assert module.Child.method is theirs


def test_metadata_of_the_original_survives(module: ModuleType) -> None:
    """Name, docstring and __wrapped__ of a replacement are those that functools promises."""
    original = module.Child.__dict__["method"]
    patching.replace(module, "Child", "method", MARK, doubled)
    replaced = module.Child.__dict__["method"]
    assert (replaced.__name__, replaced.__doc__, replaced.__wrapped__) == ("method", original.__doc__, original)


@pytest.mark.parametrize(
    ("class_name", "name", "words"),
    [
        ("Absent", "method", "no class Absent"),
        ("Child", "absent", "no Child.absent"),
        ("Child", "inherited", "no Child.inherited"),
        ("Base", "value", "is a int"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_name(module: ModuleType, class_name: str, name: str, words: str) -> None:
    """A missing class, a missing or merely inherited method, and a plain value are refused with their name."""
    with pytest.raises(patching.PatchError, match=words):
        patching.replace(module, class_name, name, MARK, doubled)


def test_a_cycle_of_wrappers_ends() -> None:
    """is_marked ends on a function that claims to wrap itself."""

    def snake() -> None:
        """Bite."""

    snake.__wrapped__ = snake  # type: ignore[attr-defined]  # the point of the test
    assert not patching.is_marked(snake, MARK)
