# SPDX-License-Identifier: Apache-2.0
"""What runs inside the target, in a thread of its own: finds the live scheduler, checks, attaches or detaches, tells.

It prepares everything in its thread and leaves to the engine's own what must happen between two steps. Whatever fails,
it gives back what was changed, and vLLM notices nothing.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from vllm_kvfix import faults, guard, live, observe, patching, plugin, upstream
from vllm_kvfix.attach import boundary, compiling
from vllm_kvfix.attach.errors import AttachError, Reason
from vllm_kvfix.backports.kv_cache_zeroing_gate import BACKPORT
from vllm_kvfix.ring import place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType
    from typing import BinaryIO

    from vllm_kvfix.backports import Means
    from vllm_kvfix.ring.writer import RingWriter

    Found = list[tuple[Any, Any]]
    Say = Callable[..., None]

SAY_S = 0.5
LOOK_S = 2.0
RELEASE_PAUSE_S = 0.001


class _Attached:
    """What was attached to this process, and not by its own plugin."""

    fix: plugin.Application | None = None
    observation: observe.Observation | None = None
    fix_on_top = False


_attached = _Attached()
_one_at_a_time = threading.Lock()


def attached() -> list[str]:
    """What is attached."""
    return ["fix"] * (_attached.fix is not None) + ["observe"] * (_attached.observation is not None)


def main(stream: BinaryIO, request: Mapping[str, Any]) -> None:
    """Do what is asked for, and tell of it by ``stream``; raises nothing."""

    def say(event: str, **more: object) -> None:
        try:
            stream.write(json.dumps({"event": event, **more}).encode() + b"\n")
            stream.flush()
        except (OSError, ValueError):
            pass  # whoever asked is gone: what was begun is brought to its end all the same

    if not _one_at_a_time.acquire(blocking=False):
        say("refused", reason=Reason.FAILED.value, message="another attach is at work in it", next_step="wait for it")
        return
    try:
        (_attach if request["do"] == "attach" else _detach)(request, say)
    except AttachError as error:
        say("refused", reason=error.reason.value, message=str(error), next_step=error.next_step)
    except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM; the other side says it
        say("refused", reason=Reason.FAILED.value, message=repr(error), next_step="report it; vLLM is not affected")
    finally:
        _one_at_a_time.release()


# -- finding ----------------------------------------------------------------------------------------------------------


def find(*, by_script: bool) -> Found:
    """Every live scheduler of this process with the ``EngineCore`` that drives it.

    ``gc.freeze()`` has hidden an engine core from gc, but threads of its own run its methods. An engine that is driven
    by a script's own calls has none: what the script holds of it lies on the main thread's stack, or gc knows it.
    """
    places: tuple[Callable[[], Iterable[Any]], ...] = (_receivers,)
    if by_script:
        places += (_on_the_main_stack, gc.get_objects)
    for things in places:
        found = {id(pair[0]): pair for thing in things() for pair in live.schedulers_below(thing)}
        if found:
            return list(found.values())
    return []


def _receivers() -> list[Any]:
    """The objects whose methods the threads of this process run."""
    targets = [vars(thread).get("_target") for thread in threading.enumerate()]
    return [target.__self__ for target in targets if isinstance(target, MethodType)]


def _on_the_main_stack() -> list[Any]:
    """What the frames of the main thread hold.

    It looks itself, at its next byte code: another thread that walks its stack while it runs may find frames there that
    are none any more. If it does not get to it, it is asleep, and its stack is still.
    """
    found: list[Any] = []
    over = threading.Event()

    def look(_: object) -> int:
        try:
            found.extend(_held_by(sys._getframe().f_back))  # noqa: SLF001  # its own stack
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM
            faults.note("looking for a scheduler", error)
        over.set()
        return 0

    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(look)
    _kept_for_good.append(call)  # it may be called late
    ctypes.pythonapi.Py_AddPendingCall(call, None)
    if over.wait(LOOK_S):
        return found
    main = threading.main_thread().ident
    return _held_by(sys._current_frames().get(main or 0))  # noqa: SLF001  # the one way to another thread's stack


def _held_by(frame: FrameType | None) -> list[Any]:
    held: list[Any] = []
    while frame is not None:
        held += frame.f_locals.values()
        frame = frame.f_back
    return held


_kept_for_good: list[object] = []


# -- checking ---------------------------------------------------------------------------------------------------------


def _check(request: Mapping[str, Any]) -> None:
    """See that what runs here is what was looked at from outside.

    Raises:
        AttachError: It is not; nothing was changed.
    """
    if request["fingerprints"] and sys.flags.optimize:
        raise AttachError(
            Reason.OTHER_PYTHON, "it runs with -O, so its byte code cannot be compared with its source", "restart it"
        )
    root = Path(request["root"])
    for name, functions in request["fingerprints"].items():
        module = sys.modules.get(name)
        expected = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
        file = getattr(module, "__file__", None)
        if file is None or not (Path(file) == expected or expected.samefile(file)):
            raise AttachError(
                Reason.UNKNOWN_SOURCE,
                f"it has {name} from {file}, not from {expected}",
                "report how this vLLM was installed",
            )
        for qualname, expected_code in functions.items():
            if _fingerprint(module, qualname) != expected_code:
                raise AttachError(
                    Reason.UNKNOWN_SOURCE,
                    f"{qualname} as it runs is not what its file says: it was edited, or another plugin replaced it",
                    "restart the engine with vllm-kvfix installed",
                )


def _fingerprint(module: object, qualname: str) -> str | None:
    """The fingerprint of a function as it is in this process, below all wrappers that say what they wrap."""
    found: Any = module
    for name in qualname.split("."):
        found = vars(found).get(name) if found is not None else None
    found = getattr(found, "fget", found)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    code = getattr(found, "__code__", None)
    return compiling.fingerprint(code) if code is not None else None


def _schedulers(request: Mapping[str, Any]) -> Found:
    found = find(by_script=request["by_script"])
    if not found:
        raise AttachError(
            Reason.NO_SCHEDULER,
            "no live scheduler is in this process",
            "if the engine is still loading, try again when it serves; else name the process of its EngineCore",
        )
    return found


def _is_fixed() -> bool:
    scheduler = patching.class_of(sys.modules[upstream.SCHEDULER_MODULE], "Scheduler")
    return patching.is_marked(vars(scheduler).get("schedule"), BACKPORT.name)


def _backlog(found: Found) -> int:
    return sum(live.backlog(scheduler) for scheduler, _ in found)


# -- attaching --------------------------------------------------------------------------------------------------------


class _Attachment:
    """The fix, the hooks that watch, or both, on their way into this process: as a whole, or not at all."""

    def __init__(self, request: Mapping[str, Any], found: Found) -> None:
        self._request = request
        self.fix = self._prepared_fix() if request["fix"] and not _is_fixed() else None
        self.observation: observe.Observation | None = None
        self._rings: dict[int, RingWriter] = {}
        self._in = False
        self._healed: list[Any] = []
        unwatched = [scheduler for scheduler, _ in found if observe.recorder_of(scheduler) is None]
        if request["observe"] and unwatched:
            self._prepare_watching(unwatched)

    def _prepared_fix(self) -> plugin.Application:
        root, version = Path(self._request["root"]), self._request["version"]
        application = plugin.Application(BACKPORT, guard.Mode.AUTO)
        application.prepare(
            upstream.Installation(root, version),
            upstream.Sources(root, tuple(self._request["recorded_specs"])),
            guard.Decision(guard.State.APPLY, affected=True, reason=self._request["decision"]),
        )
        return application

    def _prepare_watching(self, schedulers: list[Any]) -> None:
        self.observation = observe.Observation(os.environ, plugin.patch_state)
        try:
            for scheduler in schedulers:
                self._rings[id(scheduler)] = self.observation.open_ring(scheduler, self._request["version"] or "")
        except (OSError, place.PlaceError) as error:
            self._remove_rings()
            raise AttachError(
                Reason.NO_RING, f"no ring can be made: {error}", f"attach --fix alone, or free {place.FOLDER_VARIABLE}"
            ) from error

    def put_in(self, scheduler: Any) -> None:
        """What must happen between two steps of ``scheduler``."""
        if not self._in:
            self._in = True
            if self.fix is not None:
                self.fix.put_in(sys.modules)
            if self.observation is not None:
                self.observation.put_in(self._request["version"] or "")
        if self.fix is not None and self.fix.means is not None:
            self._healed.append(scheduler)
            self.fix.means.heal(scheduler)
        ring = self._rings.get(id(scheduler))
        if self.observation is not None and ring is not None:
            self.observation.record(scheduler, ring)

    def take_back(self) -> None:
        """Undo whatever has been done so far, and leave no ring."""
        if self.observation is not None:
            self.observation.take_out()
            self.observation.end()
        if self.fix is not None and self.fix in plugin.applications():
            means = self.fix.means
            self.fix.take_out()
            for scheduler in self._healed:
                if means is not None:
                    means.unheal(scheduler)
        self._remove_rings()

    def _remove_rings(self) -> None:
        for ring in self._rings.values():
            ring.path.unlink(missing_ok=True)

    def announce(self, found: Found) -> None:
        """Say so in vLLM's log, and in the ring of whoever watched already."""
        if self.fix is not None:
            self.fix.announce()
        if self.observation is not None:
            for scheduler, core in found:
                if id(scheduler) in self._rings:
                    self.observation.speak(scheduler, core)
        _tell_patch_state(found)


def _tell_patch_state(found: Found) -> None:
    for scheduler, _ in found:
        recorder = observe.recorder_of(scheduler)
        if recorder is not None and not recorder.off:
            recorder.writer.set_patch_state(plugin.patch_state())


def _attach(request: Mapping[str, Any], say: Say) -> None:
    _check(request)
    found = _schedulers(request)
    before = _backlog(found)
    attachment = _Attachment(request, found)
    say("prepared", schedulers=len(found), backlog=before)
    held = 0
    try:
        for scheduler, core in found:
            held = max(held, boundary.between_steps(scheduler, core, _bound(attachment.put_in, scheduler)))
    except Exception:
        attachment.take_back()
        raise
    _attached.fix_on_top = attachment.fix is not None and _attached.observation is not None
    _attached.fix = attachment.fix or _attached.fix
    _attached.observation = attachment.observation or _attached.observation
    attachment.announce(found)
    if attachment.fix is not None and attachment.fix.means is not None:
        _give_back(attachment.fix.means, say)
    say(
        "done",
        fix=_word(request["fix"], attachment.fix),
        observe=_word(request["observe"], attachment.observation),
        backlog_before=before,
        backlog_after=_backlog(found),
        in_force=_is_fixed() and all(map(_gated, (scheduler for scheduler, _ in found))),
        **_where(found),
        held_ns=held,
    )


def _word(wanted: bool, made: object) -> str:  # noqa: FBT001  # what was asked for
    return "not asked for" if not wanted else "attached" if made is not None else "already there"


def _bound(function: Callable[[Any], None], scheduler: Any) -> Callable[[], None]:
    return lambda: function(scheduler)


def _gated(scheduler: Any) -> bool:
    """Whether every manager of a scheduler that zeroes nothing keeps nothing."""
    return bool(scheduler.needs_kv_cache_zeroing) or live.backlog(scheduler) == 0


def _where(found: Found) -> dict[str, object]:
    recorders = [observe.recorder_of(scheduler) for scheduler, _ in found]
    return {
        "rings": [str(recorder.writer.path) for recorder in recorders if recorder is not None],
        "engines": [live.engine_index(scheduler) for scheduler, _ in found],
    }


def _give_back(means: Means, say: Say) -> None:
    """Release what had piled up, a slice at a time, whether the engine steps meanwhile or not."""
    said = time.monotonic()
    while left := means.release():
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say("releasing", left=left)
        time.sleep(RELEASE_PAUSE_S)


# -- detaching --------------------------------------------------------------------------------------------------------


def _detach(request: Mapping[str, Any], say: Say) -> None:
    found = _schedulers(request)
    taken, held = attached(), 0
    fix, observation = _attached.fix, _attached.observation
    means = fix.means if fix is not None else None
    rings = _where(found)["rings"] if observation is not None else []

    def take_out(scheduler: Any) -> None:
        parts = (_take_out_watching, _take_out_fix)
        for part in reversed(parts) if _attached.fix_on_top else parts:  # what lies on top first
            part()
        if means is not None:
            means.unheal(scheduler)

    if taken:
        for scheduler, core in found:
            held = max(held, boundary.between_steps(scheduler, core, _bound(take_out, scheduler)))
    if observation is not None:
        observation.end()
    _tell_patch_state(found)
    if means is not None:
        _give_back(means, say)
    say(
        "done",
        taken=taken,
        left=plugin.retry(),
        fixed_by_plugin=_is_fixed(),
        rings=rings,
        engines=_where(found)["engines"],
        held_ns=held,
    )


def _take_out_fix() -> None:
    fix, _attached.fix = _attached.fix, None
    if fix is not None:
        fix.take_out()


def _take_out_watching() -> None:
    observation, _attached.observation = _attached.observation, None
    if observation is not None:
        plugin.leave(observation.take_out())
