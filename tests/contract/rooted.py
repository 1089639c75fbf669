# SPDX-License-Identifier: Apache-2.0
"""Where a census begins, on a release's real classes: each scenario a function, run by `run_release.py`.

The scheduler's own process is in :mod:`tests.contract.watching`; here are the classes around it. Neither a whole engine
core nor a front end can be made without a model, so of those the methods are run on objects that skip `__init__`.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.contract import accounts, watching
from tests.contract import driver as d
from vllm_kvfix import events, patching, plugin, roots, vitals
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import RingReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE_S = 30.0


class _Runner:
    """What a worker's model runner keeps of its requests; a fake, since a real one needs a model."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.kept: list[int] = []


class _Worker:
    """A worker without a device; a fake, as its model runner."""

    def __init__(self) -> None:
        self.model_runner: _Runner | None = None

    def init_device(self) -> None:
        self.model_runner = _Runner()

    def execute_model(self, output: Any) -> Any:
        assert self.model_runner is not None
        self.model_runner.kept.append(len(self.model_runner.kept))
        return output


def _roots() -> roots.Roots:
    (observation,) = plugin._observations
    return observation._roots


def _wrapper() -> Any:
    """The wrapper that vLLM puts around every worker, around the fake one."""
    module = importlib.import_module("vllm.v1.worker.worker_base")
    wrapper = object.__new__(module.WorkerWrapperBase)
    wrapper.vllm_config = d.make_scheduler().scheduler.vllm_config
    wrapper.mm_receiver_cache = None
    wrapper.worker = _Worker()
    return wrapper


def _wait_for(ring: Path, wanted: Callable[[list[events.Event]], bool]) -> list[events.Event]:
    """What a ring tells, once it tells what is wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        told = accounts.read(ring.parent).told
        if wanted(told):
            return told
        if time.monotonic() > deadline:
            raise AssertionError(f"{ring} does not tell what was wanted; it tells {told[-5:]}")
        time.sleep(0.05)  # a poll of another thread's file


def every_site_is_there_and_is_given_back(folder: Path) -> None:
    """Each class has its method wrapped, whichever module is imported when; and `restore` gives the original back."""
    with watching.watching(folder):
        for module, class_name, method, _ in roots.SITES:
            found = importlib.import_module(module)
            if not patching.is_marked(vars(getattr(found, class_name))[method], roots.MARK):
                raise AssertionError(f"{class_name}.{method} is not wrapped")
    for module, class_name, method, _ in roots.SITES:
        if patching.is_marked(vars(getattr(importlib.import_module(module), class_name))[method], roots.MARK):
            raise AssertionError(f"{class_name}.{method} was not given back")


def a_worker_in_a_process_of_its_own(folder: Path) -> None:
    """Its ring is opened at its first step, tells its role, its memory, and the containers of its model runner."""
    wrapper = _wrapper()
    with watching.watching(folder) as lines:
        wrapper.init_device()
        if list(folder.iterdir()):
            raise AssertionError("a ring was opened before the first step")
        if wrapper.execute_model(5) != 5:
            raise AssertionError("what the worker returns was changed")
        (ring,) = folder.iterdir()
        reader = RingReader(ring)
        if reader.header.role != layout.WORKER:
            raise AssertionError(f"the ring is of a {reader.header.role}")
        told = _wait_for(ring, lambda told: any(isinstance(event, events.Census) for event in told))
        paths = {event.path for event in told if isinstance(event, events.Container)}
        if not {"worker.model_runner.requests", "worker.model_runner.kept"} <= paths:
            raise AssertionError(f"the census knows {sorted(paths)}")
        if not any(isinstance(event, events.Figures) and event.scope == "status" for event in told):
            raise AssertionError("no figures were told")
        if sum("watching the memory of this worker" in line for line in lines) != 1:
            raise AssertionError(f"logged were {lines}")


def a_worker_beside_a_scheduler(folder: Path) -> None:
    """In one process with a scheduler there is one ring, the scheduler's, and it tells of the worker, too."""
    wrapper = _wrapper()
    with watching.watching(folder) as lines:
        wrapper.init_device()
        driver = d.make_scheduler()
        wrapper.execute_model(5)
        (ring,) = folder.iterdir()
        if RingReader(ring).header.role != layout.ENGINE_CORE:
            raise AssertionError(f"the one ring is not the engine core's; logged were {lines}")
        told = _wait_for(
            ring, lambda told: any(isinstance(e, events.Container) and e.path.startswith("worker.") for e in told)
        )
        if not any(isinstance(e, events.Container) and e.path == "scheduler.running" for e in told):
            raise AssertionError("the scheduler's own containers are missing")
        del driver


def an_engine_core_at_its_first_request(folder: Path) -> None:
    """What the engine core keeps beside its scheduler is told once a request has come."""
    module = importlib.import_module("vllm.v1.engine.core")
    with watching.watching(folder):
        driver = d.make_scheduler()
        core = object.__new__(module.EngineCore)
        core.scheduler = driver.scheduler
        core.kept = list(range(7))
        core.add_request(driver.make_request("r1"))
        if "r1" not in driver.scheduler.requests:
            raise AssertionError("the request did not arrive")
        (ring,) = folder.iterdir()
        _wait_for(
            ring,
            lambda told: any(
                isinstance(e, events.Container) and (e.path, e.length) == ("engine_core.kept", 7) for e in told
            ),
        )
        if not _roots().knows(core):
            raise AssertionError("the engine core is no root")


def a_folder_for_a_worker_that_cannot_be_made(folder: Path) -> None:
    """A worker that can have no ring runs as without us: one WARNING, however many steps."""
    wrapper = _wrapper()
    (folder / "file").write_text("")
    with watching.watching(folder / "file" / "rings") as lines:
        wrapper.init_device()
        if [wrapper.execute_model(n) for n in range(3)] != [0, 1, 2]:
            raise AssertionError("what the worker returns was changed")
    if sum("NOT telling of the memory" in line for line in lines) != 1:
        raise AssertionError(f"logged were {lines}")


def a_front_end_that_stops(folder: Path) -> None:
    """It says that it stops before it ends its engine, and says nothing where the engine has died before."""
    module = importlib.import_module("vllm.v1.engine.async_llm")
    for engine_dead in (True, False):
        with watching.watching(folder / str(engine_dead)):
            _roots().speak_alone(layout.API_SERVER)
            (ring,) = (folder / str(engine_dead)).iterdir()
            ends = []
            front = object.__new__(module.AsyncLLM)
            front.engine_core = mock.Mock()
            front.engine_core.resources.engine_dead = engine_dead
            front.engine_core.shutdown = lambda *_, **__: ends.append(RingReader(ring).header.end)  # noqa: B023  # at once
            with contextlib.suppress(AttributeError):  # what else it holds differs from release to release
                front.shutdown()
            del front.engine_core  # it is shut down once more when it goes
            if ends[:1] != [layout.NOT_ENDED if engine_dead else layout.STOPPING]:
                raise AssertionError(f"when its engine was ended, the ring said {ends}")


SCENARIOS = (
    every_site_is_there_and_is_given_back,
    a_worker_in_a_process_of_its_own,
    a_worker_beside_a_scheduler,
    an_engine_core_at_its_first_request,
    a_front_end_that_stops,
    a_folder_for_a_worker_that_cannot_be_made,
)


def run() -> list[str]:
    """Run every scenario in a folder of its own; their names."""
    # Nobody is disturbed by haste here.
    with mock.patch.multiple(vitals, PAUSE_S=0.002, CENSUS_S=0.01):
        return accounts.run_scenarios(SCENARIOS)
