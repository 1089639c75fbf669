# SPDX-License-Identifier: Apache-2.0
"""The parts of attaching one by one: which thread may be taken, where to meet, what travels, when it may act."""

from __future__ import annotations

import ast
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attach.processes import started, wait_for
from tests.test_pythons import interpreter
from vllm_kvfix import live
from vllm_kvfix.attach import boundary, compiling, injection, parcel
from vllm_kvfix.attach.errors import AttachError, Reason
from vllm_kvfix.attach.meeting import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = (os.geteuid(), os.getegid())
SPINNING = """
import threading, time
threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
print("up", flush=True)
while True: sum(range(1000))
"""

# -- which thread may be taken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "said", "safe"),
    [
        ("x86_64", "232 0x5 0x7f 0x100 0xffffffff 0x0 0x0 0x7ffc 0x7f5a", True),  # epoll_wait
        ("x86_64", "202 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7ffc 0x7f5a", False),  # a semaphore, or a condition
        ("x86_64", "202 0x7f 0x80 0x2 0x0 0x0 0x0 0x7ffc 0x7f5a", False),  # a lock of libc's
        ("x86_64", "running", False),
        ("x86_64", "-1 0x7ffc 0x7f5a", False),  # stopped outside of any call
        ("x86_64", "0 0x3 0x7f 0x100 0x0 0x0 0x0 0x7ffc 0x7f5a", False),  # read
        ("x86_64", "", False),
        ("aarch64", "22 0x5 0x7f 0x100 0xffffffff 0x0 0x8 0x7ffc 0x7f5a", True),  # epoll_pwait
        ("aarch64", "232 0x5 0x7f 0x100 0xffffffff 0x0 0x0 0x7ffc 0x7f5a", False),  # another call there
        ("riscv64", "22 0x5 0x7f 0x100 0xffffffff 0x0 0x8 0x7ffc 0x7f5a", False),
    ],
)
def test_which_thread_may_be_taken(machine: str, said: str, safe: bool) -> None:  # noqa: FBT001  # what is expected
    """Only a thread that sleeps where it can hold no lock may be taken; on an unknown machine none may."""
    assert injection.is_safe(said, machine) is safe


@given(st.text(max_size=200))
def test_whatever_the_kernel_says_is_read(said: str) -> None:
    """No text makes the decision fail."""
    assert injection.is_safe(said, "x86_64") in {True, False}


def test_a_process_that_never_lets_go_of_the_interpreter() -> None:
    """Code is put into a process whose main thread computes all the time, ten times, and leaves no file."""
    with started([sys.executable, "-c", SPINNING], "up") as target:
        for _ in range(10):
            with Meeting(target.pid, ["/tmp"], OURS, executable=True) as meeting:  # noqa: S108  # for a moment
                folder = meeting.outside
                injection.inject(target.pid, sys.version_info[:2], parcel.bootstrap(meeting.socket), meeting)
                link = meeting.wait(10)
            assert link.peer() == target.pid
            link.close()
            assert not folder.exists()
        assert target.alive


def test_a_process_that_is_stopped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped after it was looked at is given up on, and goes on unharmed once it is woken."""
    monkeypatch.setattr(injection, "CHILD_PATIENCE_S", 0.5)
    with started([sys.executable, "-c", SPINNING], "up") as target:
        os.kill(target.pid, signal.SIGSTOP)
        with Meeting(target.pid, ["/tmp"], OURS, executable=True) as meeting:  # noqa: S108  # for a moment
            code = parcel.bootstrap(meeting.socket)
            with pytest.raises(AttachError, match="has not let a thread of it run") as caught:
                injection.inject(target.pid, sys.version_info[:2], code, meeting)
        assert f"kill -CONT {target.pid}" in caught.value.next_step
        os.kill(target.pid, signal.SIGCONT)
        child = int(str(caught.value).partition("; process ")[2].split()[0])
        os.waitpid(child, 0)
        assert target.alive


def test_code_runs_once(tmp_path: Path) -> None:
    """What is put into a process runs once, not also when the library is loaded."""
    marks = tmp_path / "marks"
    with started([sys.executable, "-c", SPINNING], "up") as target:
        with Meeting(target.pid, [str(tmp_path)], OURS, executable=True) as meeting:
            code = f"print('x', end='', file=open({str(marks)!r}, 'a'))"
            injection.inject(target.pid, sys.version_info[:2], code, meeting)
        wait_for(lambda: marks.exists() and marks.read_text() != "")
        assert marks.read_text() == "x"


def test_sys_remote_exec_is_given_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """For Python 3.14 the code lies in a file that the target can read, and sys.remote_exec is told of it."""
    given_to: list[tuple[int, str]] = []
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    monkeypatch.setattr(
        sys, "remote_exec", lambda pid, path: given_to.append((pid, Path(path).read_text())), raising=False
    )
    with Meeting(os.getpid(), ["/tmp"], OURS, executable=False) as meeting:  # noqa: S108  # for a moment
        injection.inject(os.getpid(), (3, 14), "the code", meeting)
    assert given_to == [(os.getpid(), "the code")]


# -- where to meet ----------------------------------------------------------------------------------------------------


def test_no_folder_will_do(tmp_path: Path) -> None:
    """Each folder that will not do is named with its reason, and nothing is made."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(AttachError, match=r"nowhere \(not absolute\).*file \(no folder\).*/proc") as caught:
        Meeting(os.getpid(), ["nowhere", str(file), "/proc", "/" + "x" * 90], OURS, executable=True).__enter__()
    assert caught.value.reason is Reason.NO_PLACE


@pytest.mark.parametrize("length", range(65, 85))
def test_whoever_is_told_of_the_socket_can_connect(length: int) -> None:
    """However long a folder's path, it is refused with that reason, or its socket's path is one that connects."""
    with tempfile.TemporaryDirectory() as base:
        short = f"{base}/é/"
        folder = Path(short + "x" * (length - len(os.fsencode(short))))
        folder.mkdir(parents=True)
        try:
            with Meeting(os.getpid(), [str(folder)], OURS, executable=False) as meeting:
                with socket.socket(socket.AF_UNIX) as target:
                    target.connect(meeting.socket)
                meeting.wait(10).close()
            refused = ""
        except AttachError as error:
            refused = str(error)
        assert ("too long a path" in refused) == bool(refused) == (length > 74)  # see unix(7)


def test_who_does_not_come(tmp_path: Path) -> None:
    """Where nobody connects, the wait ends in an error, and the folder is gone."""
    meeting = Meeting(os.getpid(), [str(tmp_path)], OURS, executable=False)
    with pytest.raises(AttachError, match="did not answer") as caught, meeting:
        meeting.wait(0.01)
    assert caught.value.reason is Reason.NO_ANSWER
    assert list(tmp_path.iterdir()) == []


def test_who_speaks_nonsense(tmp_path: Path) -> None:
    """A peer that sends no JSON is an error of ours with a next step, not a traceback."""
    script = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\ns.sendall(b'{]\\n')"
    with Meeting(os.getpid(), [str(tmp_path)], OURS, executable=False) as meeting:
        with subprocess.Popen([sys.executable, "-c", script, meeting.socket]):
            link = meeting.wait(10)
            with pytest.raises(AttachError, match="fell silent"):
                list(link.events(10))
        link.close()


# -- what travels -----------------------------------------------------------------------------------------------------


def test_modules_travel_after_those_they_import() -> None:
    """In the order in which they are imported there, each module comes after all of ours that it needs."""
    names = parcel._in_order(parcel.INSIDE)
    for place, name in enumerate(names):
        text = "" if name == parcel.ATTACH else parcel._path(name).read_text()
        later = set(parcel._imports(ast.parse(text))) - set(names[:place]) - {name}
        # A package and its modules name each other.
        assert {other for other in later if not other.startswith(f"{name}.")} == set(), name


def test_nothing_of_this_side_travels() -> None:
    """Neither what looks from outside nor what injects goes into an engine."""
    names = set(parcel._in_order(parcel.INSIDE))
    for name in ("target", "session", "injection", "command", "meeting", "rights", "parcel"):
        assert f"vllm_kvfix.attach.{name}" not in names


def test_the_bootstrap_leaves_no_name() -> None:
    """Run in a namespace, the few lines that come first leave nothing in it."""
    namespace: dict[str, Any] = {"__builtins__": {"exec": lambda *_: None}}
    exec(parcel.bootstrap("/nowhere"), namespace)  # noqa: S102  # what a target does
    assert set(namespace) == {"__builtins__"}
    assert parcel.bootstrap("/nowhere").isascii()


def test_an_interpreter_that_cannot_be_asked() -> None:
    """Where the target's own program cannot compile for it, the error names the Python to run with."""
    with pytest.raises(AttachError, match=r"Python 3\.9") as caught:
        parcel.make((3, 9), "/bin/false", {})
    assert "run this command with Python 3.9" in caught.value.next_step


TEXT = (
    "class A:\n    def f(self):\n        return {x for x in 'ab' if x in {'c', 'd', 'e'}}\n    def g(self): return 1\n"
)


def test_fingerprints() -> None:
    """A function's fingerprint is that of its live code after many calls, and another one for any other body."""
    namespace: dict[str, Any] = {}
    exec(compile(TEXT, "elsewhere.py", "exec"), namespace)  # noqa: S102  # our own text
    thing = namespace["A"]()
    for _ in range(100):  # until the interpreter has specialised it
        thing.f()
    found = compiling.fingerprints(TEXT, ["A.f", "A.g", "A.missing"])
    assert found["A.f"] == compiling.fingerprint(namespace["A"].f.__code__)
    assert set(found) == {"A.f", "A.g"}
    assert compiling.fingerprints(TEXT.replace("return 1", "return 2"), ["A.g"])["A.g"] != found["A.g"]


def test_another_interpreter_makes_its_own_byte_code() -> None:
    """What Python 3.12 compiles carries its magic, and its fingerprints differ from ours."""
    python = interpreter("3.12")
    assert python, "no Python 3.12 here: uv python install 3.12"
    made = parcel.make((3, 12), python, {"module": (TEXT, ["A.f"])})
    assert made.magic != compiling.MAGIC or sys.version_info[:2] == (3, 12)
    assert set(made.modules) == set(parcel.make(sys.version_info[:2], "", {}).modules)
    assert set(made.fingerprints["module"]) == {"A.f"}


# -- when it may act --------------------------------------------------------------------------------------------------


class Scheduler:
    """Counts who is inside; knows whether it was disturbed within a step."""

    def __init__(self) -> None:
        self.requests: dict[str, object] = {}
        self.inside = 0
        self.acted_inside: list[int] = []

    def schedule(self) -> None:
        """A step."""
        self.inside += 1
        time.sleep(0.0002)
        self.inside -= 1

    def act(self) -> None:
        """What must not happen within one."""
        self.acted_inside.append(self.inside)

    add_request = finish_requests = update_from_output = schedule

    def has_requests(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.requests)


def core_of(scheduler: Scheduler) -> tuple[Any, Callable[[], None]]:
    """An engine core that steps in a thread, and what ends it."""
    core = SimpleNamespace(scheduler=scheduler, input_queue=queue.Queue())

    def run() -> None:
        while (steps := core.input_queue.get()) is not None:
            for _ in range(steps):
                scheduler.add_request()
                scheduler.schedule()
                scheduler.update_from_output()

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        core.input_queue.put(None)
        thread.join()

    return core, end


@pytest.mark.parametrize("steps", [0, 1, 5, 200])
def test_it_acts_between_steps(steps: int) -> None:
    """Idle, busy, or turning from one to the other: each of thirty acts happens once, and never within a step."""
    scheduler = Scheduler()
    core, end = core_of(scheduler)
    try:
        for _ in range(30):
            core.input_queue.put(steps)
            if steps > 1:
                wait_for(lambda: scheduler.inside == 1)
            boundary.between_steps(scheduler, core, scheduler.act, 10)
    finally:
        end()
    assert scheduler.acted_inside == [0] * 30
    assert not set(vars(scheduler)) & set(live.STEP_METHODS)


def test_who_comes_too_late_does_not_act_again() -> None:
    """A caller that held our method before it was taken away runs the step, and nothing of ours."""
    scheduler = Scheduler()
    for give_up in (True, False):
        turn = boundary._Turn(scheduler, scheduler.act)
        turn.arm()
        held = scheduler.schedule
        if give_up:
            assert turn.give_up()
        turn.take_if(lambda: True)
        held()
        assert scheduler.acted_inside == [0] * (not give_up)


def test_it_gives_up_on_a_step_without_end() -> None:
    """An engine that stays within a step is left as it was, and the act is not made later either."""
    scheduler = Scheduler()
    scheduler.requests["one"] = object()
    core = SimpleNamespace(scheduler=scheduler)
    with pytest.raises(AttachError) as caught:
        boundary.between_steps(scheduler, core, scheduler.act, 0.05)
    assert caught.value.reason is Reason.NO_BOUNDARY
    scheduler.schedule()
    assert scheduler.acted_inside == []
    assert not set(vars(scheduler)) & set(live.STEP_METHODS)


@pytest.mark.parametrize("requests", [0, 1])
def test_it_acts_where_a_rank_without_requests_asks_for_some(requests: int) -> None:
    """A rank that neither steps nor sleeps acts itself when it asks for requests, and only if there are none."""
    scheduler = Scheduler()
    scheduler.requests |= dict.fromkeys(map(str, range(requests)), object())
    turn = boundary._Turn(scheduler, scheduler.act)
    turn.arm()
    assert scheduler.has_requests() is bool(requests)
    assert scheduler.acted_inside == [0] * (not requests)
    assert turn.give_up() is bool(requests)
    assert not set(vars(scheduler)) & {*live.STEP_METHODS, live.IDLE_METHOD}


def test_an_engine_without_a_queue_acts_when_it_has_no_request() -> None:
    """An engine that a script drives is acted on once it has been without requests for a moment."""
    scheduler = Scheduler()
    boundary.between_steps(scheduler, SimpleNamespace(scheduler=scheduler), scheduler.act, 10)
    assert scheduler.acted_inside == [0]


def test_what_fails_at_the_boundary_reaches_only_us() -> None:
    """An error of the act is raised to who asked for it; the engine's step goes on."""
    scheduler = Scheduler()
    core, end = core_of(scheduler)
    core.input_queue.put(1000)

    def fail() -> None:
        raise LookupError

    try:
        with pytest.raises(LookupError):
            boundary.between_steps(scheduler, core, fail, 10)
    finally:
        end()
    assert scheduler.inside == 0


def test_a_stranger_on_the_object_is_kept() -> None:
    """An attribute that somebody else put on the scheduler object stands there again afterwards."""
    scheduler = Scheduler()
    calls: list[int] = []
    vars(scheduler)["schedule"] = stranger = lambda: calls.append(1)
    core, end = core_of(scheduler)
    core.input_queue.put(50)
    try:
        boundary.between_steps(scheduler, core, scheduler.act, 10)
    finally:
        end()
    assert vars(scheduler)["schedule"] is stranger
    assert len(calls) == 50
