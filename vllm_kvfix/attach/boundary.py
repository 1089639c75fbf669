# SPDX-License-Identifier: Apache-2.0
"""Does something in a live engine between two of its steps, never within one; runs inside the target.

A busy engine does it itself, at the entry of its next ``schedule()``: an attribute of the scheduler object stands there
for that one call. An idle engine enters none, so a thread of ours does it, while the engine's thread sleeps in its
queue; should it wake up meanwhile, it meets that attribute, and waits there until it is done. One that has no request
but must keep step with others does neither: it does it when it asks whether it has any.

The stacks of other threads (``sys._current_frames()``, ``f_back``) would tell as much, but not safely: read while their
threads run, some of the frames that C extensions push turn out to be none any more.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from vllm_kvfix import live
from vllm_kvfix.attach.errors import AttachError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 30.0
LOOK_S = 0.002
QUIET_S = 0.1
_NOTHING = object()


class _Turn:
    """``act``, once, and what came of it."""

    def __init__(self, scheduler: Any, act: Callable[[], None]) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None
        self.held_ns = 0
        self._scheduler = scheduler
        self._act = act
        self._lock = threading.Lock()
        self._armed = False
        self._stood_there: dict[str, Any] = {}

    def arm(self) -> None:
        own = vars(self._scheduler)
        with self._lock:
            self._armed = True
            for name in (*live.STEP_METHODS, live.IDLE_METHOD):
                self._stood_there[name] = own.get(name, _NOTHING)
                own[name] = self._guarded(name, getattr(self._scheduler, name))

    def _guarded(self, name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if name == live.STEP_METHODS[0] or (
                    name == live.IDLE_METHOD and not live.known_requests(self._scheduler)
                ):
                    self._take()
                armed = self._armed
            # Once disarmed, the class's method may be another one than before.
            return (before if armed else getattr(self._scheduler, name))(*args, **kwargs)

        return method

    def take_if(self, may: Callable[[], bool]) -> None:
        with self._lock:
            if self._armed and may():
                self._take()

    def give_up(self) -> bool:
        """Disarm; False where it was done at the last moment."""
        with self._lock:
            armed = self._armed
            self._disarm()
        return armed

    def _take(self) -> None:
        if not self._armed:
            return
        self._disarm()
        began = time.perf_counter_ns()
        try:
            self._act()
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach vLLM; our own thread says it
            self.error = error
        self.held_ns = time.perf_counter_ns() - began
        self.over.set()

    def _disarm(self) -> None:
        own = vars(self._scheduler)
        for name, stood_there in self._stood_there.items():
            if stood_there is _NOTHING:
                own.pop(name, None)
            else:
                own[name] = stood_there
        self._armed = False


def between_steps(scheduler: Any, core: Any, act: Callable[[], None], patience_s: float = PATIENCE_S) -> int:
    """Have ``act`` done between two steps of ``scheduler``, which ``core`` drives; returns the nanoseconds it took.

    Raises:
        AttachError: No step ended in time; ``act`` was not called.
        Exception: What ``act`` raised.
    """
    turn = _Turn(scheduler, act)
    busy_at = time.monotonic()

    def idle() -> bool:
        nonlocal busy_at
        waits = live.waits_for_work(core)
        if waits is not None:
            return waits
        # A script drives the engine by its own calls: without requests it is at rest, or about to be.
        if live.known_requests(scheduler):
            busy_at = time.monotonic()
        return time.monotonic() - busy_at > QUIET_S

    deadline = time.monotonic() + patience_s
    turn.arm()
    while not turn.over.is_set():
        turn.take_if(idle)
        if time.monotonic() > deadline and turn.give_up():
            raise AttachError(
                Reason.NO_BOUNDARY,
                f"the engine has been within one step for {patience_s:.0f} s",
                "see what it is at (py-spy dump), and try again",
            )
        turn.over.wait(LOOK_S)
    if turn.error is not None:
        raise turn.error
    return turn.held_ns
