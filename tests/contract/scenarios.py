# SPDX-License-Identifier: Apache-2.0
"""Everything that people run that is not the stock scheduler, each without and with the back-port, on real code.

Every scenario must leak without it (else it proves nothing) and show an empty list after each step with it. Where
blocks are zeroed, the ids must be the same list in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tests import releases
from tests.contract import driver as d
from tests.contract import families, foreign, running_release, snapshots
from tests.contract.machine import MismatchError

PILED_UP = 300_000  # ids in a list that has grown for long
STEPS_TO_GIVE_BACK = 20  # most steps until they are gone


@dataclasses.dataclass(frozen=True)
class Setup:
    """Which classes a scheduler is made of.

    Attributes:
        scheduler: A function that gives its class, None for vLLM's own.
        coordinator: Whether the coordinator is one that skips `super().__init__()`.
        cache_manager: Whether the cache manager is one that skips `super().__init__()`.
        asynchronous: Whether it is made from `AsyncScheduler`.
    """

    scheduler: Callable[[], Any] | None = None
    coordinator: bool = False
    cache_manager: bool = False
    asynchronous: bool = False


def _own_with_start() -> Any:
    return foreign.scheduler_class(starts_steps=True)


def _own_without_start() -> Any:
    return foreign.scheduler_class(starts_steps=False)


SETUPS: dict[str, Setup] = {
    "stock": Setup(),
    "AsyncScheduler": Setup(asynchronous=True),
    "own schedule(), calls new_step_starts": Setup(_own_with_start),
    "own schedule(), calls neither": Setup(_own_without_start),
    "own coordinator": Setup(coordinator=True),
    "own coordinator, AsyncScheduler": Setup(coordinator=True, asynchronous=True),
    "own cache manager": Setup(cache_manager=True),
    "own coordinator and cache manager": Setup(coordinator=True, cache_manager=True),
    "own schedule() and coordinator": Setup(_own_without_start, coordinator=True),
    "own schedule() and cache manager": Setup(_own_without_start, cache_manager=True),
    "all three its own": Setup(_own_without_start, coordinator=True, cache_manager=True),
}


@dataclasses.dataclass
class Played:
    """One run of the load.

    Attributes:
        outputs: Snapshot of each step's output.
        lists: Length of each manager's list after each step.
        objects: Length of the very list objects that were there when the back-port was applied late.
    """

    outputs: list[Any] = dataclasses.field(default_factory=list)
    lists: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    objects: list[int] = dataclasses.field(default_factory=list)


def _make(setup: Setup, family: str) -> d.Driver:
    with foreign.installed_classes(coordinator=setup.coordinator, cache_manager=setup.cache_manager):
        return d.make_scheduler(
            family,
            scheduler_cls=setup.scheduler() if setup.scheduler else None,
            num_blocks=400,
            prefix_caching=False,
            async_scheduling=setup.asynchronous,
        )


def _play(driver: d.Driver, between: Callable[[d.Driver, int], None] | None = None) -> Played:
    """Put the load on a scheduler; `between(driver, step)` is called before each step."""
    played = Played()
    for number in range(12):
        driver.add_request(
            f"r{number}", prompt_seed=number % 3, prompt_length=20 + 11 * number % 90, max_tokens=20 + number % 5
        )
    for number in range(60):
        if between is not None:
            between(driver, number)
        if number == 5:  # somewhere in the middle
            driver.finish("r3")
        played.outputs.append(snapshots.snapshot(driver.step()))
        played.lists.append(d.backlog(driver))
    driver.drain()
    if driver.scheduler.has_unfinished_requests():
        msg = f"{len(driver.scheduler.requests)} requests did not finish: the load proves nothing"
        raise MismatchError(msg)
    return played


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """The back-port in force, and taken back whole afterwards."""
    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test, only in a release's process

    plugin.register()
    try:
        for report in plugin.report():
            if not report.replaced:
                msg = f"not applied: {report.decision}"
                raise MismatchError(msg)
        yield
    finally:
        left = plugin.restore()
    if left:
        msg = f"restore() left {left}"
        raise MismatchError(msg)


def _compare(family: str, without: Played, patched: Played) -> dict[str, int]:
    """Hold the two runs against each other; gives the backlog of each at its end (with: its highest)."""
    if without.outputs != patched.outputs:
        found = snapshots.differences(("outputs", without.outputs), ("outputs", patched.outputs))
        raise MismatchError("the outputs differ: " + "; ".join(found[:3]))
    if families.FAMILIES[family].zeroing:
        if without.lists != patched.lists:
            msg = f"ids waiting {patched.lists}, stock {without.lists}"
            raise MismatchError(msg)
        zeroed = sum(len(_ids_to_zero(output)) for output in patched.outputs)
        if not zeroed:
            msg = "no id to zero came up: this proves nothing"
            raise MismatchError(msg)
        return {"zeroed": zeroed}
    result = {"without": sum(without.lists[-1]), "with": max(sum(lists) for lists in patched.lists)}
    if bool(result["without"]) != _records(family):
        msg = f"without the back-port the backlog is {result['without']}, though {family} records: {_records(family)}"
        raise MismatchError(msg)
    if result["with"]:
        msg = f"with the back-port the backlog after each step is {patched.lists}"
        raise MismatchError(msg)
    return result


def _ids_to_zero(output: Any) -> list[int]:
    value = dict(output[1]).get("new_block_ids_to_zero")
    return [] if value is None else list(value[1])


Between = Callable[[d.Driver, int], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A setup under the load, made while the back-port is in force, against the same without."""

    name: str
    setup: Setup
    family: str
    between: Between | None = None

    def play(self) -> Played:
        """Put the load on it."""
        return _play(_make(self.setup, self.family), self.between)


def _stray(driver: d.Driver, number: int) -> None:
    """Somebody calls `take_new_block_ids()` in between, on the cache manager or on one manager."""
    if number in {4, 9}:
        driver.scheduler.kv_cache_manager.take_new_block_ids()
    if number in {6, 9}:
        driver.managers[0].take_new_block_ids()


def _cases() -> Iterator[Case]:
    few = ("stock", "own schedule(), calls neither", "all three its own")
    for family in families.families():
        if family == "full+cross":  # needs encoder tokens: a scenario of its own
            continue
        for name in SETUPS if _records(family) or families.FAMILIES[family].zeroing else few:
            if name == "all three its own" and families.FAMILIES[family].flag_only:
                continue  # nothing of vLLM's that knows the flag runs there, and there is no Mamba to tell
            yield Case(f"{name} / {family}", SETUPS[name], family)
    for family in ("full", "full+sliding"):
        for name in few:
            yield Case(f"stray take_new_block_ids(), {name} / {family}", SETUPS[name], family, _stray)
    yield Case("stray take_new_block_ids(), stock / full+mamba", SETUPS["stock"], "full+mamba", _stray)


def _records(family: str) -> bool:
    """Whether this release records blocks of any group of a family."""
    return bool(set(families.FAMILIES[family].specs) & set(releases.BY_VERSION[running_release.release()].records))


def _wrapped_before(setup: Setup, family: str, *, wraps: bool) -> dict[str, int]:
    """Another plugin wrapped the same methods before ours came."""
    with foreign.wrapped(wraps=wraps) as calls:
        without = _play(_make(setup, family))
        seen = set(calls)
        calls.clear()
        with applied():
            patched = _play(_make(setup, family))
    if seen - set(calls):
        msg = f"the other plugin no longer sees {seen - set(calls)}"
        raise MismatchError(msg)
    return _compare(family, without, patched)


def _wrapped_after(setup: Setup, family: str, *, wraps: bool) -> dict[str, int]:
    """Another plugin wraps the same methods after ours."""
    without = _play(_make(setup, family))
    with applied(), foreign.wrapped(wraps=wraps) as calls:
        patched = _play(_make(setup, family))
        if not calls:
            msg = "the other plugin sees nothing"
            raise MismatchError(msg)
    return _compare(family, without, patched)


def _late(setup: Setup, family: str) -> dict[str, int]:
    """Applied to a scheduler that exists, works, and whose list has grown: it must give the memory back."""
    zeroing = families.FAMILIES[family].zeroing
    without = _play(_make(setup, family))
    driver = _make(setup, family)
    apply_at, piled = 10, 0
    with contextlib.ExitStack() as stack:
        grown: list[list[int]] = []

        def between(driver: d.Driver, number: int) -> None:
            nonlocal piled
            if number == apply_at:
                if not zeroing:
                    for manager in driver.managers:
                        if manager.new_block_ids:
                            manager.new_block_ids.extend(range(PILED_UP))
                piled = sum(d.backlog(driver))
                grown.extend(m.new_block_ids for m in driver.managers)
                stack.enter_context(applied())
            elif number > apply_at:
                patched.objects.append(sum(map(len, grown)))

        patched = Played()
        result = _play(driver, between)
        patched.outputs, patched.lists = result.outputs, result.lists
    if zeroing:
        return _compare(family, without, patched)
    if piled < PILED_UP:
        msg = f"only {piled} ids had piled up: this proves nothing"
        raise MismatchError(msg)
    if patched.objects[STEPS_TO_GIVE_BACK]:
        msg = f"{patched.objects[STEPS_TO_GIVE_BACK]} of {piled} ids are still held after {STEPS_TO_GIVE_BACK} steps"
        raise MismatchError(msg)
    patched.lists = patched.lists[apply_at + STEPS_TO_GIVE_BACK :]
    return _compare(family, without, patched)


def _restore_under_a_wrapper() -> dict[str, int]:
    """`restore()` says which methods it cannot give back while somebody wraps ours, and breaks nothing."""
    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test, only in a release's process

    stock = {(m, c, n): getattr(running_release.module(m), c).__dict__[n] for m, c, n in foreign.WRAPPED}
    plugin.register()
    try:
        ours = {
            key
            for key, value in stock.items()
            if getattr(running_release.module(key[0]), key[1]).__dict__[key[2]] is not value
        }
        with foreign.wrapped(wraps=True):
            left = plugin.restore()
            _play(_make(Setup(), "full"))
        expected = {f"{cls}.{name}" for _, cls, name in ours}
        if set(left) != expected:
            msg = f"restore() says it left {left}, but wrapped are {sorted(expected)}"
            raise MismatchError(msg)
    finally:
        for (module, cls, name), value in stock.items():
            setattr(getattr(running_release.module(module), cls), name, value)
    return {"left": len(left)}


def _cross_attention() -> dict[str, int]:
    """Full + cross attention, at the cache manager: only the full group records, and neither with the back-port."""

    def play() -> Played:
        played = Played()
        driver = d.make_scheduler("full+cross", num_blocks=400, prefix_caching=False)
        cache = driver.scheduler.kv_cache_manager
        for number in range(8):
            request = driver.add_request(f"r{number}", prompt_length=30 + 9 * number)
            blocks = cache.allocate_slots(request, request.num_tokens, num_encoder_tokens=100)
            played.outputs.append(snapshots.snapshot(blocks.get_block_ids()))
            played.lists.append(d.backlog(driver))
        return played

    without = play()
    if without.lists[-1][1] or not without.lists[-1][0]:
        msg = f"backlog {without.lists[-1]} without the back-port: this proves nothing"
        raise MismatchError(msg)
    with applied():
        patched = play()
    return _compare("full+cross", without, patched)


def _scenarios() -> Iterator[tuple[str, Callable[[], dict[str, int]]]]:
    """Those that need the back-port to come or go at a moment of their own."""
    late = ("stock", "AsyncScheduler", "own coordinator", "own cache manager", "own coordinator and cache manager")
    for family in ("full", "full+sliding", "full+mamba"):
        for name in late:
            yield f"late: {name} / {family}", functools.partial(_late, SETUPS[name], family)
    for wraps in (True, False):
        word = "with" if wraps else "without"
        for name in ("stock", "AsyncScheduler", "all three its own"):
            for family in ("full", "full+mamba"):
                for when, scenario in (("before", _wrapped_before), ("after", _wrapped_after)):
                    yield (
                        f"wrapped {when}, {word} functools.wraps: {name} / {family}",
                        functools.partial(scenario, SETUPS[name], family, wraps=wraps),
                    )
    yield "cross attention", _cross_attention
    yield "restore() under another's wrapper", _restore_under_a_wrapper


def run() -> dict[str, dict[str, int]]:
    """Run them all; by name, what each left without and with the back-port.

    Raises:
        MismatchError: At least one failed; the message has them all.
    """
    results: dict[str, dict[str, int]] = {}
    failures: list[str] = []
    foreign.accepted_by_managers(), foreign.accepted_by_coordinators()
    cases = list(_cases())
    stock = [case.play() for case in cases]
    patched: list[Played | None] = []
    with applied():
        for case in cases:
            with _collecting(case.name, failures):
                patched.append(case.play())
                continue
            patched.append(None)
    for case, without, with_ in zip(cases, stock, patched, strict=True):
        with _collecting(case.name, failures):
            if with_ is not None:
                results[case.name] = _compare(case.family, without, with_)
    for name, scenario in _scenarios():
        with _collecting(name, failures):
            results[name] = scenario()
    print(f"  {len(results)} scenarios hold, {len(failures)} fail", file=sys.stderr, flush=True)  # noqa: T201  progress
    if failures:
        raise MismatchError("\n".join(failures))
    return results


@contextlib.contextmanager
def _collecting(name: str, failures: list[str]) -> Iterator[None]:
    """All failures are wanted, not the first."""
    try:
        yield
    except Exception:  # noqa: BLE001  raised again, together, at the end
        failures.append(f"{name}:\n{traceback.format_exc(limit=-3)}")
