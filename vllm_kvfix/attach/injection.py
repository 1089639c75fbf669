# SPDX-License-Identifier: Apache-2.0
"""Has a Python process run a piece of code: ``sys.remote_exec`` from Python 3.14 on, the ptrace of ``hypno`` below.

With ptrace, what could go wrong is excluded rather than hoped against:

* A thread that is stopped anywhere may hold the lock of malloc or of the loader, and a call made on it would wait for
  ever. So only a thread that sleeps in one of a few system calls is taken (:data:`_WAITING`), and looked at again when
  it has been stopped.
* While a library is being loaded, the loader is locked. Whoever waits for the interpreter then, while the interpreter's
  holder waits for the loader, waits for ever. So the library does nothing as it is loaded: its first byte of code, by
  which it tells that there is some, is put in place later, and only then its function is called.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix.attach.errors import AttachError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_kvfix.attach.meeting import Meeting

REMOTE_EXEC = (3, 14)
EXTRA = "pip install 'vllm-kvfix[attach]'"
PATIENCE_S = 10.0
CHILD_PATIENCE_S = 20.0
RETRY_S = 0.002

# System calls in which a thread holds no lock of libc's: it waits for events, messages or time. By number.
_WAITING = {
    "x86_64": {7, 23, 35, 43, 45, 47, 230, 232, 270, 271, 281, 288, 441},
    "aarch64": {22, 72, 73, 101, 115, 202, 207, 212, 242, 441},
}
# Never futex(2): who signals a condition next, such as the interpreter's own, waits for those that wait there already;
# and one of those, made to run code, would wait for the interpreter, which the other may hold.

_FUNCTION = "run_python_code"


def available(version: tuple[int, int]) -> str:
    """What would be used for a target of this Python.

    Raises:
        AttachError: Nothing that is here could do it.
    """
    if version >= REMOTE_EXEC:
        if sys.version_info[:2] == version:
            return "sys.remote_exec"
        ours = ".".join(map(str, sys.version_info[:2]))
        theirs = ".".join(map(str, version))
        raise AttachError(
            Reason.OTHER_PYTHON,
            f"it runs Python {theirs}, and this command Python {ours}: sys.remote_exec needs the same on both sides",
            f"run this command with Python {theirs}",
        )
    _hypno()
    return "hypno"


def _hypno() -> tuple[Any, Any]:
    try:
        # An extra, without types: whoever attaches to a Python of 3.14 or newer needs none.
        import hypno.api  # type: ignore[import-untyped]  # noqa: PLC0415  # see above
        import pyinjector  # type: ignore[import-untyped]  # noqa: PLC0415  # see above
    except ImportError as error:
        raise AttachError(
            Reason.NO_TOOL, f"for a Python below 3.14 this needs hypno, which is not here: {error}", EXTRA
        ) from error
    return hypno.api, pyinjector


def inject(pid: int, version: tuple[int, int], code: str, meeting: Meeting) -> None:
    """Have the process run ``code`` (ASCII, short, and quick to end) once; it may not have begun on return.

    Raises:
        AttachError: It could not be had to.
    """
    if available(version) == "hypno":
        _by_ptrace(pid, code.encode("ascii"), meeting)
        return
    script = meeting.put("code.py", code.encode())
    try:
        sys.remote_exec(pid, script)  # type: ignore[attr-defined]  # Python 3.14
    except (OSError, RuntimeError) as error:
        raise AttachError(
            Reason.RIGHTS, f"sys.remote_exec was refused: {error}", "see docs/attach.md for the rights it needs"
        ) from error


def _by_ptrace(pid: int, code: bytes, meeting: Meeting) -> None:
    hypno, _ = _hypno()
    library = bytearray(hypno.INJECTION_LIB_PATH.read_bytes())
    at = library.find(hypno.MAGIC) - 1
    room = int(library[at + 1 + len(hypno.MAGIC) :].partition(b"\0")[0] or b"0") if at > 0 else 0
    if len(code) > room or _FUNCTION.encode() not in library:
        raise AttachError(Reason.NO_TOOL, "this release of hypno is built otherwise than those known", EXTRA)
    library[at : at + len(code) + 1] = b"\0" + code[1:] + b"\0"
    path = meeting.put("code.so", bytes(library))
    _in_a_child(pid, lambda: _put_in(pid, path, meeting.name, at, code[:1]))


def _put_in(pid: int, path: str, folder: str, at: int, first: bytes) -> None:
    _, pyinjector = _hypno()
    try:
        with _undisturbed(), _stopped_thread(pid, pyinjector) as (thread, injector):
            handle = injector.inject(os.fsencode(path))
            try:
                _write(thread, Path(path).name, folder, at, first)
                injector.call(handle, _FUNCTION)
            finally:
                injector.uninject(handle)
    except pyinjector.PyInjectorError as error:
        raise _explained(error) from error


def _in_a_child(pid: int, work: Callable[[], None]) -> None:
    """Do it in a process of its own, which waits for as long as it takes to leave the target in order; we do not.

    Raises:
        AttachError: It failed, or the target does not let it go on.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = ["", "", ""]
        try:
            os.setsid()  # Ctrl-C is not for this one
            work()
        except AttachError as error:
            said = [error.reason.value, str(error), error.next_step]
        except BaseException as error:  # noqa: BLE001  # it must not come back into the parent's code
            said = [Reason.FAILED.value, repr(error), "report it"]
        finally:
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
    os.close(writer)
    try:
        waiting = select.poll()  # select() knows no descriptor from 1024 on
        waiting.register(reader, select.POLLIN)
        ready = waiting.poll(CHILD_PATIENCE_S * 1000)
        said = json.loads(os.read(reader, 1 << 16) or b"[]") if ready else []
    finally:
        os.close(reader)
    if not ready:
        raise AttachError(
            Reason.NO_ANSWER,
            f"process {pid} has not let a thread of it run for {CHILD_PATIENCE_S:.0f} s; process {child} lets go of "
            "that thread as soon as it has run, and nothing is attached then. Do not kill it",
            f"if it is stopped: kill -CONT {pid}; else see what holds its interpreter: py-spy dump --pid {pid}",
        )
    os.waitpid(child, 0)
    if not said:
        raise AttachError(Reason.FAILED, "the process that injects ended without a word", "report it")
    if said[0]:
        raise AttachError(Reason(said[0]), said[1], said[2])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal until it is over: to let go of a thread halfway through a call would end the target."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _stopped_thread(pid: int, pyinjector: Any) -> Iterator[tuple[int, Any]]:
    """A thread of the process that is stopped, and sleeps where it holds no lock; the others run on."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for thread in _threads(pid):
            if not is_safe(_system_call(thread)):
                continue
            with pyinjector.attach(thread) as injector:
                if is_safe(_system_call(thread)):
                    yield thread, injector
                    return
        if time.monotonic() > deadline:
            raise AttachError(
                Reason.NO_BOUNDARY,
                f"none of its threads has waited where it can be taken for {PATIENCE_S:.0f} s",
                "try again while it waits for requests",
            )
        time.sleep(RETRY_S)


def _threads(pid: int) -> list[int]:
    """The process's threads, its main thread last: an engine core has others that only wait."""
    try:
        found = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208  # names alone
    except FileNotFoundError as error:
        raise AttachError(Reason.DEAD, f"process {pid} has ended") from error
    return [thread for thread in found if thread != pid] + [pid]


def _system_call(thread: int) -> str:
    try:
        return Path(f"/proc/{thread}/syscall").read_text()
    except OSError:
        return ""


def is_safe(system_call: str, machine: str | None = None) -> bool:
    """Whether a thread whose ``/proc/TID/syscall`` says this may be taken."""
    machine = machine or platform.machine()
    number = system_call.partition(" ")[0]
    return number.isdecimal() and int(number) in _WAITING.get(machine, ())


def _write(thread: int, file: str, folder: str, offset: int, data: bytes) -> None:
    """Write ``data`` where the target has mapped ``offset`` of the library for writing."""
    for line in Path(f"/proc/{thread}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or "w" not in fields[1] or not fields[5].endswith(f"{folder}/{file}"):  # noqa: PLR2004  # with a path
            continue
        (start, end), first = (int(part, 16) for part in fields[0].split("-")), int(fields[2], 16)
        if first <= offset < first + end - start:
            memory = os.open(f"/proc/{thread}/mem", os.O_RDWR)
            try:
                os.pwrite(memory, data, start + offset - first)
            finally:
                os.close(memory)
            return
    raise AttachError(Reason.NO_TOOL, "the library is not mapped as expected", EXTRA)


def _explained(error: Exception) -> AttachError:
    text = str(error).splitlines()[0]
    if "noexec" in text or "failed to map segment" in text:
        return AttachError(Reason.NO_PLACE, f"it may run no code from that folder: {text}", "give TMPDIR another one")
    if "PTRACE_ATTACH" in text or "Operation not permitted" in text:
        return AttachError(
            Reason.RIGHTS,
            f"the kernel refused to trace it: {text}",
            "allow ptrace here (seccomp, AppArmor or SELinux); see docs/attach.md",
        )
    return AttachError(Reason.FAILED, text, "report it")
