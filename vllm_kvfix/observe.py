# SPDX-License-Identifier: Apache-2.0
"""The hooks that only watch: each calls vLLM's own method, hands its result on unchanged, and tells a recorder.

*What is watched, and why these?* ``schedule`` says nearly all: what a step gave to whom. ``add_request``,
``_free_request`` and ``_free_blocks`` bound a request's life, ``_preempt_request`` knows what a request loses before it
is lost, and ``get_computed_blocks`` what the prefix cache gave. ``allocate_slots`` is called for every running request
of every step, so wrapping it would cost more than all the rest; what it refuses to running requests shows as
preemptions. For a waiting request it is called once after ``get_computed_blocks``, so it is watched for that one call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from vllm_kvfix import __version__, faults, import_hook, live, own_ring, patching, upstream
from vllm_kvfix.recorder import Recorder
from vllm_kvfix.ring import place
from vllm_kvfix.roots import Roots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import ModuleType

    from vllm_kvfix.ring.writer import RingWriter

logger = logging.getLogger(upstream.LOGGER_NAME)

VARIABLE = "VLLM_KVFIX_OBSERVE"
MARK = "observe"

# By id() of the scheduler and of its cache manager; entries go with their scheduler.
_recorders: dict[int, Recorder] = {}
# By id() of the cache manager; see _make_probe.
_probes: dict[int, Callable[[Any], None]] = {}
_at_fork: list[bool] = []


def recorder_of(scheduler: Any) -> Recorder | None:
    """The recorder of a live scheduler; None where it is not watched."""
    return _recorders.get(id(scheduler))


def wanted(environ: Mapping[str, str]) -> bool | None:
    """Whether ``VLLM_KVFIX_OBSERVE`` is on (also: unset) or off; None where it says neither."""
    return {"": True, "on": True, "off": False}.get(environ.get(VARIABLE, "").strip().lower())


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorders.get(id(self))
        if recorder is None:
            return original(self, *args, **kwargs)
        recorder.inside_step = True
        output = original(self, *args, **kwargs)
        recorder.after_step(self, output)
        return output

    return schedule


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        recorder = _recorders.get(id(self))
        if recorder is not None:
            recorder.arrived(request)
        return result

    return add_request


def _preempt_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorders.get(id(self))
        if recorder is not None:
            recorder.preempting(request)
        return original(self, request, *args, **kwargs)

    return _preempt_request


def _free_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def _free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorders.get(id(self))
        if recorder is None:
            return original(self, request, *args, **kwargs)
        recorder.finishing(request)
        result = original(self, request, *args, **kwargs)
        if request.request_id in live.known_requests(self):
            recorder.kept(request)
        return result

    return _free_request


def _free_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def _free_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        recorder = _recorders.get(id(self))
        if recorder is not None:
            recorder.freed(request)
        return result

    return _free_blocks


def _get_computed_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, request, *args, **kwargs)
        recorder = _recorders.get(id(self))
        if recorder is not None:
            recorder.looked_up(request, found)
            _probes[id(self)](request)
        return found

    return get_computed_blocks


def _make_probe(manager: Any, recorder: Recorder) -> Callable[[Any], None]:
    """``watch(request)`` has the next ``allocate_slots`` of this manager tell ``recorder`` if that request is refused.

    For that one call an attribute of the object stands before the class's method. Where somebody else put one there, it
    is left alone, and refusals of waiting requests go unseen.
    """
    awaited: Any = None

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(AttributeError):
            del manager.allocate_slots
        blocks = manager.allocate_slots(request, *args, **kwargs)
        if blocks is None and request is awaited:
            recorder.refused(request)
        return blocks

    def watch(request: Any) -> None:
        nonlocal awaited
        awaited = request
        present = manager.allocate_slots
        owner: Any = getattr(present, "__self__", None)
        if present is not allocate_slots and owner is manager:
            manager.allocate_slots = allocate_slots

    return watch


def _can_fit_full_sequence(original: Callable[..., Any]) -> Callable[..., Any]:
    def can_fit_full_sequence(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        fits = original(self, request, *args, **kwargs)
        recorder = _recorders.get(id(self))
        if not fits and recorder is not None:
            recorder.refused(request)
        return fits

    return can_fit_full_sequence


# Module, class and method to wrap, and how.
SITES: tuple[tuple[str, str, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (upstream.SCHEDULER_MODULE, "Scheduler", "schedule", _schedule),
    (upstream.SCHEDULER_MODULE, "Scheduler", "add_request", _add_request),
    (upstream.SCHEDULER_MODULE, "Scheduler", "_preempt_request", _preempt_request),
    (upstream.SCHEDULER_MODULE, "Scheduler", "_free_request", _free_request),
    (upstream.SCHEDULER_MODULE, "Scheduler", "_free_blocks", _free_blocks),
    (upstream.CACHE_MANAGER_MODULE, "KVCacheManager", "get_computed_blocks", _get_computed_blocks),
)
# As those, but there in some releases only: they ask it before `allocate_slots`, which does so itself later.
OPTIONAL_SITES = ((upstream.CACHE_MANAGER_MODULE, "KVCacheManager", "can_fit_full_sequence", _can_fit_full_sequence),)


def missing_for(sources: upstream.Sources) -> list[str]:
    """What watching relies on and this source lacks, a sentence each; empty: all is there."""
    return upstream.missing_observables(sources, [site[:3] for site in SITES])


class Observation:
    """Watching, in this process: waiting for vLLM's scheduler, then on or off as a whole."""

    def __init__(self, environ: Mapping[str, str], patch_state: Callable[[], str]) -> None:
        """``patch_state`` gives one of ``layout.PATCH_STATES`` when a scheduler is made."""
        self._environ = environ
        self._patch_state = patch_state
        self._version = ""
        self._over = False
        self._replacements: list[patching.Replacement] = []
        self._ending: set[Recorder] = set()
        self._roots = Roots(self._open_ring)

    def _open_ring(self, role: str, index: int) -> RingWriter:
        """A ring for a process that has no scheduler."""
        found = upstream.locate()
        return own_ring.open_ring(self._environ, (found and found.version) or "", role, index)

    def wait(self) -> None:
        """Have the hooks put in when vLLM's scheduler has been imported; imports nothing itself.

        To be called after the back-ports wait, so that the hooks lie on top of theirs: below a wrapper that takes any
        arguments, theirs could not be fast.
        """
        import_hook.when_imported(upstream.SCHEDULER_MODULE, self._arrived)
        if wanted(self._environ):
            self._roots.wait()

    def _arrived(self, scheduler_module: ModuleType) -> None:
        if self._over:  # the module comes after everything was given back
            return
        try:
            sources = upstream.Sources(upstream.package_root(upstream.SCHEDULER_MODULE, scheduler_module.__file__))
            missing = missing_for(sources)
            if wanted(self._environ) is None:
                missing = [f"{VARIABLE}={self._environ.get(VARIABLE)} is neither on nor off"]
            self._version = upstream.read_version(sources.root) or ""
            if missing:
                self._say_off("; ".join(missing))
                return
            self.put_in(self._version)
        except Exception as error:  # noqa: BLE001  # this runs inside an import of vLLM's
            self.restore()
            self._say_off(f"{type(error).__name__}: {error}")

    def put_in(self, version: str) -> None:
        """Put the hooks in at once, in a process that has imported what :func:`missing_for` asks for of ``version``.

        Raises:
            PatchError, KeyError: Something is not what it must be; :meth:`restore` gives back what was replaced.
        """
        self._version = version
        init = (upstream.SCHEDULER_MODULE, "Scheduler", "__init__", self._scheduler_init)
        there = [site for site in OPTIONAL_SITES if site[2] in vars(patching.class_of(sys.modules[site[0]], site[1]))]
        for module, class_name, name, wrap in (*SITES, *there, init):
            done = patching.replace(sys.modules[module], class_name, name, MARK, wrap)
            if done is not None:
                self._replacements.append(done)

    def _scheduler_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(scheduler, *args, **kwargs)
            try:
                self.watch(scheduler)
            except (OSError, place.PlaceError) as error:
                self._say_off(f"no ring can be made: {error}")
            except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
                faults.note("Scheduler.__init__", error)

        return __init__

    def watch(self, scheduler: Any) -> Path:
        """Begin to record a live scheduler; returns the path of its ring.

        Raises:
            OSError, PlaceError: No ring can be made; nothing is watched then.
        """
        writer = self.open_ring(scheduler, self._version)
        self.record(scheduler, writer)
        self.speak(scheduler)
        return writer.path

    def open_ring(self, scheduler: Any, version: str) -> RingWriter:
        """A new ring for a scheduler of a vLLM of ``version``.

        Raises:
            OSError, PlaceError: None can be made.
        """
        return own_ring.open_ring(self._environ, version, engine_index=live.engine_index(scheduler))

    def record(self, scheduler: Any, writer: RingWriter) -> None:
        """Have the hooks tell of ``scheduler`` through ``writer``; to be called between two of its steps."""
        writer.set_patch_state(self._patch_state())
        _keep(scheduler, Recorder(scheduler, writer))

    def speak(self, scheduler: Any, core: Any = None) -> None:
        """Have this process tell of itself through the ring of a scheduler that is watched; ``core`` drives it."""
        recorder = _recorders[id(scheduler)]
        writer = recorder.writer
        logger.info(
            "vllm-kvfix %s: watching the KV blocks of this engine core through %s (%d MiB). "
            "See them with: vllm-kvfix sidecar. Turn off with: %s=off",
            __version__,
            writer.path,
            writer.size >> 20,
            VARIABLE,
        )
        self._roots.add("scheduler", scheduler)
        if core is not None:
            self._roots.add("engine_core", core)
        self._roots.speak(recorder)

    def _say_off(self, reason: str) -> None:
        logger.warning(
            "vllm-kvfix %s: NOT watching vLLM %s; the engine runs as it would without us. Reason: %s. "
            "To say nothing more of it: %s=off.",
            __version__,
            self._version or "of unknown version",
            reason,
            VARIABLE,
        )

    def restore(self) -> list[patching.Replacement]:
        """Give the originals back and end every recording; returns what lies below another plugin's wrapper still."""
        left = self._roots.restore()
        left += self.take_out()
        self.end()
        return left

    def take_out(self) -> list[patching.Replacement]:
        """Take the hooks out and tell the recorders no more; waits for nothing. What is left is as for `restore`."""
        self._over = True
        left = [replacement for replacement in reversed(self._replacements) if not patching.restore(replacement)]
        self._replacements = []
        self._ending |= set(_recorders.values())
        _forget()
        return left

    def end(self) -> None:
        """After :meth:`take_out`: fall silent, and let go of the rings. Waits for the threads that write."""
        self._roots.restore()
        for recorder in self._ending:
            recorder.close()
        self._ending.clear()


def _keep(scheduler: Any, recorder: Recorder) -> None:
    cache_manager = live.cache_manager(scheduler)
    keys = (id(scheduler), id(cache_manager))
    _recorders.update(dict.fromkeys(keys, recorder))
    _probes[keys[1]] = _make_probe(cache_manager, recorder)
    weakref.finalize(scheduler, _let_go, *keys)
    # A forked child shares the mapping: it must not write to it.
    if not _at_fork:
        os.register_at_fork(after_in_child=_forget)
        _at_fork.append(True)


def _let_go(*keys: int) -> None:
    """The scheduler is gone: publish what was gathered of it."""
    for key in keys:
        recorder = _recorders.pop(key, None)
        _probes.pop(key, None)
        if recorder is not None and not recorder.off:
            recorder.close()


def _forget() -> None:
    _recorders.clear()
    _probes.clear()
