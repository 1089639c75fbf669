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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix import __version__, faults, import_hook, live, patching, upstream
from vllm_kvfix.recorder import Recorder
from vllm_kvfix.ring import layout, place
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

logger = logging.getLogger(upstream.LOGGER_NAME)

VARIABLE = "VLLM_KVFIX_OBSERVE"
MARK = "observe"

# By id() of the scheduler and of its cache manager; entries go with their scheduler.
_recorders: dict[int, Recorder] = {}
# By id() of the cache manager; see _make_probe.
_probes: dict[int, Callable[[Any], None]] = {}
_at_fork: list[bool] = []


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


class Observation:
    """Watching, in this process: waiting for vLLM's scheduler, then on or off as a whole."""

    def __init__(self, environ: Mapping[str, str], patch_state: Callable[[], str]) -> None:
        """``patch_state`` gives one of ``layout.PATCH_STATES`` when a scheduler is made."""
        self._environ = environ
        self._patch_state = patch_state
        self._version = ""
        self._replacements: list[patching.Replacement] = []

    def wait(self) -> None:
        """Have the hooks put in when vLLM's scheduler has been imported; imports nothing itself.

        To be called after the back-ports wait, so that the hooks lie on top of theirs: below a wrapper that takes any
        arguments, theirs could not be fast.
        """
        import_hook.when_imported(upstream.SCHEDULER_MODULE, self._arrived)

    def _arrived(self, scheduler_module: ModuleType) -> None:
        try:
            sources = upstream.Sources(upstream.package_root(upstream.SCHEDULER_MODULE, scheduler_module.__file__))
            self._version = upstream.read_version(sources.root) or ""
            missing = upstream.missing_observables(sources, [site[:3] for site in SITES])
            if wanted(self._environ) is None:
                missing = [f"{VARIABLE}={self._environ.get(VARIABLE)} is neither on nor off"]
            if missing:
                self._say_off("; ".join(missing))
                return
            init = (upstream.SCHEDULER_MODULE, "Scheduler", "__init__", self._scheduler_init)
            there = [site for site in OPTIONAL_SITES if not upstream.missing_methods(sources, [site[:3]])]
            for module, class_name, name, wrap in (*SITES, *there, init):
                done = patching.replace(sys.modules[module], class_name, name, MARK, wrap)
                if done is not None:
                    self._replacements.append(done)
        except Exception as error:  # noqa: BLE001  # this runs inside an import of vLLM's
            self.restore()
            self._say_off(f"{type(error).__name__}: {error}")

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
        folder = place.default_folder(self._environ)
        try:
            size = place.ring_size(self._environ)
        except ValueError as error:
            size = place.DEFAULT_SIZE
            logger.warning("vllm-kvfix %s: %s. The ring gets %d MiB.", __version__, error, size >> 20)
        path = place.new_ring(folder)
        place.clean_up(folder)
        writer = RingWriter(path, layout.capacity(size), this_process(live.engine_index(scheduler), self._version))
        writer.set_patch_state(self._patch_state())
        recorder = Recorder(scheduler, writer)
        _keep(scheduler, recorder)
        logger.info(
            "vllm-kvfix %s: watching the KV blocks of this engine core through %s (%d MiB). "
            "See them with: vllm-kvfix sidecar. Turn off with: %s=off",
            __version__,
            path,
            size >> 20,
            VARIABLE,
        )
        return path

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
        left = [replacement for replacement in reversed(self._replacements) if not patching.restore(replacement)]
        self._replacements = []
        for recorder in set(_recorders.values()):
            recorder.close()
        _forget()
        return left


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


def this_process(engine_index: int, vllm_version: str, proc: Path = Path("/proc")) -> Origin:
    """Who writes, for a ring's header.

    Raises:
        OSError: ``proc`` is not what Linux has there.
    """
    # The name, in parentheses, may hold anything; the start time is the 20th field after it.
    start_time = int((proc / "self" / "stat").read_text().rpartition(")")[2].split()[19])
    boot_id = bytes.fromhex((proc / "sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return Origin(start_time, boot_id, engine_index, vllm_version, __version__)
