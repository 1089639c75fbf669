# SPDX-License-Identifier: Apache-2.0
"""Finds the objects that a census begins at, in every kind of process of vLLM, and gives each process its voice.

*What is wrapped, and why these?* An engine core's scheduler comes from :mod:`vllm_kvfix.observe`. Around it lies the
``EngineCore``, whose ``__init__`` is running already when plugins are loaded: it is met at its first ``add_request``.
Front ends are met when their ``__init__`` is over, workers when their device is ready. A process that has a scheduler
tells of itself through the scheduler's ring; a front end or a worker in a process of its own gets a ring of its own. A
worker's is opened at its first step, when no process will be forked from it any more, and when it is sure that no
scheduler shares its process: one would have scheduled that step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from vllm_kvfix import __version__, faults, import_hook, live, patching, upstream
from vllm_kvfix.census import Census
from vllm_kvfix.ring import layout, place
from vllm_kvfix.vitals import Vitals, Voice

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable
    from types import ModuleType

    from vllm_kvfix.ring.writer import RingWriter
    from vllm_kvfix.vitals import Sink

logger = logging.getLogger(upstream.LOGGER_NAME)

MARK = "roots"

_all: weakref.WeakSet[Roots] = weakref.WeakSet()
_at_fork: list[bool] = []


class OwnRing:
    """A ring that holds nothing but what a process tells of itself."""

    def __init__(self, writer: RingWriter) -> None:
        self.largest = writer.largest - layout.FRAME_HEADER_WORDS
        self._writer = writer

    def tell(self, words: array[int], count: int) -> bool:
        """Publish so many events."""
        self._writer.write(words, count)
        return True

    def stopping(self) -> None:
        """Say that this process ends in order, and its engines with it."""
        self._writer.end(layout.STOPPING)


class Roots:
    """The roots of this process, and its voice."""

    def __init__(self, open_ring: Callable[[str, int], RingWriter]) -> None:
        """``open_ring(role, index)`` makes a ring for a process that has no scheduler."""
        self._open_ring = open_ring
        self._replacements: list[patching.Replacement] = []
        self._begin()
        _all.add(self)
        if not _at_fork:
            os.register_at_fork(after_in_child=_forget)
            _at_fork.append(True)

    def _begin(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._census = Census()
        self._voice = Voice(Vitals(self._census))
        self._own: OwnRing | None = None
        self.speaking = False

    def forget(self) -> None:
        """This process is a fork of the one that was told of: begin anew, and leave that one's ring alone."""
        self._begin()

    def add(self, name: str, thing: Any) -> None:
        """Have the census begin at ``thing``, too."""
        if id(thing) not in self._known:
            self._known[id(thing)] = weakref.ref(thing)
            self._census.add_root(name, thing, live.live_ids_of)

    def knows(self, thing: Any) -> bool:
        """Whether the census begins at that very object."""
        known = self._known.get(id(thing))
        return known is not None and known() is thing

    def speak(self, sink: Sink) -> None:
        """Tell of this process through ``sink``."""
        self.speaking = True
        self._voice.start(sink)

    def speak_alone(self, role: str, index: int = 0) -> None:
        """Tell of this process through a ring of its own, unless it speaks already."""
        if self.speaking:
            return
        self.speaking = True  # whatever comes of it: it is tried once
        try:
            writer = self._open_ring(role, index)
        except (OSError, place.PlaceError) as error:
            logger.warning(
                "vllm-kvfix %s: NOT telling of the memory of this %s; vLLM is not affected. Reason: no ring can be "
                "made: %s.",
                __version__,
                role,
                error,
            )
            return
        self._own = OwnRing(writer)
        self._voice.start(self._own)
        logger.info("vllm-kvfix %s: watching the memory of this %s through %s.", __version__, role, writer.path)

    def stopping(self, front_end: Any) -> None:
        """A front end begins to end its engine: what becomes of that now is in order, unless it has died before."""
        with contextlib.suppress(AttributeError):  # it never came to have an engine, or that is in this process
            if self._own is not None and not live.engine_is_dead(front_end):
                self._own.stopping()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Have the hooks put in as vLLM's modules are imported; imports nothing itself."""
        for module in dict.fromkeys(site[0] for site in SITES):
            import_hook.when_imported(module, self._arrived)

    def _arrived(self, module: ModuleType) -> None:
        for name, class_name, method, make in SITES:
            if name == module.__name__:
                try:
                    done = patching.replace(module, class_name, method, MARK, make(self))
                except patching.PatchError as error:
                    logger.info("vllm-kvfix %s: a census of this process will be incomplete: %s", __version__, error)
                except Exception as error:  # noqa: BLE001  # this runs inside an import of vLLM's
                    faults.note(f"{class_name}.{method}", error)
                else:
                    self._replacements += [] if done is None else [done]

    def restore(self) -> list[patching.Replacement]:
        """Give the originals back and fall silent; returns what lies below another plugin's wrapper still."""
        import_hook.forget([site[0] for site in SITES])
        left = [replacement for replacement in reversed(self._replacements) if not patching.restore(replacement)]
        self._replacements = []
        self._voice.stop()
        self._begin()
        return left


def _forget() -> None:
    for roots in _all:
        roots.forget()


def _front_end(name: str) -> Callable[[Roots], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    def make(roots: Roots) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                original(self, *args, **kwargs)
                try:
                    roots.add(name, self)
                    roots.speak_alone(layout.API_SERVER)
                except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
                    faults.note(f"{name}.__init__", error)

            return __init__

        return wrap

    return make


def _shutdown(roots: Roots) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                roots.stopping(self)
            except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
                faults.note("AsyncLLM.shutdown", error)
            return original(self, *args, **kwargs)

        return shutdown

    return wrap


def _core_add_request(roots: Roots) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not roots.knows(self):
                try:
                    roots.add("engine_core", self)
                except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
                    faults.note("EngineCore.add_request", error)
            return original(self, *args, **kwargs)

        return add_request

    return wrap


def _init_device(roots: Roots) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            try:
                roots.add("worker", self.worker)
            except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
                faults.note("WorkerWrapperBase.init_device", error)
            return result

        return init_device

    return wrap


def _execute_model(roots: Roots) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not roots.speaking:
                try:
                    roots.speak_alone(layout.WORKER)
                except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
                    faults.note("WorkerWrapperBase.execute_model", error)
            return original(self, *args, **kwargs)

        return execute_model

    return wrap


# Module, class and method to wrap, and how; each is worth having without the others.
SITES: tuple[tuple[str, str, str, Callable[[Roots], Callable[[Callable[..., Any]], Callable[..., Any]]]], ...] = (
    (upstream.ASYNC_LLM_MODULE, "AsyncLLM", "__init__", _front_end("async_llm")),
    (upstream.ASYNC_LLM_MODULE, "AsyncLLM", "shutdown", _shutdown),
    (upstream.LLM_ENGINE_MODULE, "LLMEngine", "__init__", _front_end("llm_engine")),
    (upstream.CORE_MODULE, "EngineCore", "add_request", _core_add_request),
    (upstream.WORKER_MODULE, "WorkerWrapperBase", "init_device", _init_device),
    (upstream.WORKER_MODULE, "WorkerWrapperBase", "execute_model", _execute_model),
)
