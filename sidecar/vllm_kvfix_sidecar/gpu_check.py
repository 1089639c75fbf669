# SPDX-License-Identifier: Apache-2.0
"""Checks what :mod:`gpu_memory` tells against a live CUDA process: ``make gpu-check``, under three minutes.

It needs a GPU with its driver and ``nvidia-ml-py``; no network, no torch: a child allocates through ``libcuda`` itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_kvfix_sidecar.gpu_memory import GpuMemory, GpuWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_kvfix_sidecar.gpu_memory import GpuDevice, GpuSnapshot

MIB = 1 << 20
MOST_BYTES = 1024 * MIB
LEAST_BYTES = 64 * MIB
# The driver hands out pieces of 2 MiB, and other processes of the GPU may do a little meanwhile.
SLACK_BYTES = 32 * MIB
ROUNDS = 3
LONGEST_S = 170
SETTLE_S = 10.0
# The inode of the first PID namespace is the same on every Linux: there, pids are what the driver counts.
FIRST_PID_NAMESPACE = "pid:[4026531836]"


class Exit(IntEnum):
    """How a check ended."""

    OK = 0
    FAILED = 1
    NO_GPU = 3
    CANNOT = 4


class Holder(Protocol):
    """A process with a CUDA context on the GPU."""

    pid: int

    def allocate(self) -> None:
        """Take the memory, and touch it."""

    def free(self) -> None:
        """Give it back, and keep the context."""

    def end(self) -> None:
        """End the process."""


class CudaProcess:
    """A child that holds memory of one GPU at its parent's word; ends with its parent."""

    def __init__(self, device: str, size: int) -> None:
        """Start it on the GPU, or part of one, with this uuid; it has its context when this returns."""
        self._process = subprocess.Popen(  # noqa: S603  # this very module
            [sys.executable, "-m", "vllm_kvfix_sidecar.gpu_check", "--hold", str(size)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._answer()

    def allocate(self) -> None:
        """Take the memory, and touch it."""
        self._tell("allocate")

    def free(self) -> None:
        """Give it back, and keep the context."""
        self._tell("free")

    def end(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # noqa: S101  # for mypy: they are pipes
            pipe.close()
        self._process.wait(60)

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None  # noqa: S101  # for mypy: it is a pipe
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None  # noqa: S101  # for mypy: it is a pipe
        answer = self._process.stdout.readline().strip()
        if answer != "done":
            self._process.kill()
            self.end()
            raise RuntimeError(answer or "the CUDA process ended without a word")


def hold(size: int) -> int:
    """Be the child: make a CUDA context, then allocate and free ``size`` bytes as told on stdin, until it ends."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        _call(cuda.cuInit, 0)
        _call(cuda.cuDeviceGet, ctypes.byref(device), 0)
        _call(cuda.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
        _call(cuda.cuCtxSetCurrent, context)
        _say("done")
        for word in sys.stdin:
            if word.strip() == "allocate":
                _call(cuda.cuMemAlloc_v2, ctypes.byref(memory), ctypes.c_size_t(size))
                _call(cuda.cuMemsetD8_v2, memory, ctypes.c_ubyte(1), ctypes.c_size_t(size))
                _call(cuda.cuCtxSynchronize)
            else:
                _call(cuda.cuMemFree_v2, memory)
            _say("done")
    except (OSError, RuntimeError) as error:
        _say(str(error))
        return Exit.FAILED
    return Exit.OK


def _call(function: Any, *arguments: object) -> None:
    code = function(*arguments)
    if code != 0:
        raise RuntimeError(f"{function.__name__} failed with CUDA's error {code}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Check:
    """The checks, one line each."""

    def __init__(
        self,
        memory: GpuMemory,
        hold_on: Callable[[str, int], Holder] = CudaProcess,
        say: Callable[[str], None] = _say,
        *,
        own_pids: bool | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Check nothing yet.

        Args:
            memory: What is checked.
            hold_on: Starts a process that will hold so many bytes of the device with this uuid.
            say: Takes a line for a person.
            own_pids: Whether this process counts pids as the driver does; None: found out.
            pause: Sleeps for so many seconds.
        """
        self.failures = 0
        self._memory = memory
        self._hold_on = hold_on
        self._say = say
        self._own_pids = _counts_as_the_driver() if own_pids is None else own_pids
        self._pause = pause

    def run(self) -> Exit:
        """All checks."""
        snapshot = self._memory.look()
        if snapshot.reason is not None:
            package = "nvidia-ml-py" in snapshot.reason
            self._say(f"{'cannot check' if package else 'no GPU to check here'}: {snapshot.reason}")
            return Exit.CANNOT if package else Exit.NO_GPU
        for found in snapshot.devices:
            self._say(f"     {_described(found)}")
        device = _roomiest(snapshot)
        if device is None:
            self._say(f"FAIL no GPU has {LEAST_BYTES // MIB} MiB free and tells its memory")
            return Exit.FAILED
        self._check(device)
        self._check_watch()
        return Exit.FAILED if self.failures else Exit.OK

    def _result(self, good: bool, text: str) -> None:  # noqa: FBT001  # the outcome is what this is about
        self.failures += not good
        self._say(f"{'ok  ' if good else 'FAIL'} {text}")

    def _check(self, device: GpuDevice) -> None:
        size = min(MOST_BYTES, max(LEAST_BYTES, (device.free or 0) // 4))
        before = self._memory.look()
        try:
            holder = self._hold_on(device.uuid, size)
        except (RuntimeError, OSError) as error:
            self._result(False, f"a CUDA process starts on {device.uuid}: {error}")  # noqa: FBT003  # the outcome
            return
        try:
            self._check_device(device.uuid, size, holder)
            self._check_process(device.uuid, size, holder, before)
        except (RuntimeError, OSError) as error:
            self._result(False, f"the CUDA process does as it is told: {error}")  # noqa: FBT003  # the outcome
        finally:
            holder.end()
        self._check_end(device.uuid, holder.pid)

    def _check_device(self, uuid: str, size: int, holder: Holder) -> None:
        """Others may use the GPU meanwhile, so once in ``ROUNDS`` must be right; the memory is held afterwards."""
        rise = fall = 0
        for _ in range(ROUNDS):
            low = self._used(uuid)
            holder.allocate()
            high = self._used(uuid)
            holder.free()
            rise, fall = high - low, high - self._used(uuid)
            if max(abs(rise - size), abs(fall - size)) <= SLACK_BYTES:
                break
        holder.allocate()
        wanted = f"for {size // MIB} MiB"
        self._result(abs(rise - size) <= SLACK_BYTES, f"used memory rises by {rise / MIB:.1f} MiB {wanted} allocated")
        self._result(abs(fall - size) <= SLACK_BYTES, f"used memory falls by {fall / MIB:.1f} MiB {wanted} freed")

    def _used(self, uuid: str) -> int:
        device = next((device for device in self._memory.look().devices if device.uuid == uuid), None)
        if device is None or device.used is None:
            raise RuntimeError(f"{uuid} does not tell its memory any more: {device and device.reason}")
        return device.used

    def _check_process(self, uuid: str, size: int, holder: Holder, before: GpuSnapshot) -> None:
        snapshot = self._memory.look()
        known = {(process.pid, process.device) for process in before.processes}
        new = [p for p in snapshot.processes if p.device == uuid and (p.pid, p.device) not in known]
        found = next((p for p in new if p.pid == holder.pid), None)
        if found is None and not self._own_pids:
            if not new:
                self._say(f"note in this PID namespace NVML lists no process {_why(snapshot, uuid)}")
                return
            found = max(new, key=lambda process: process.used or 0)
            self._say(f"note pids are another namespace's here: {found.pid} appeared for our {holder.pid}")
        if found is None:
            self._result(False, f"process {holder.pid} is listed {_why(snapshot, uuid)}")  # noqa: FBT003  # the outcome
        elif found.used is None:
            self._say(f"note process {found.pid} is listed; how much it uses NVML says is not available here")
        else:
            text = f"process {found.pid} is listed with {found.used / MIB:.1f} MiB, {size / MIB:.0f} of them ours"
            self._result(found.used >= size, text)

    def _check_end(self, uuid: str, pid: int) -> None:
        """The driver needs a moment to take an ended process off its list."""
        listed = True
        for _ in range(int(SETTLE_S * 5)):
            listed = any(p.pid == pid and p.device == uuid for p in self._memory.look().processes)
            if not listed:
                break
            self._pause(0.2)
        self._result(not listed, "an ended process is listed no more")

    def _check_watch(self) -> None:
        """The thread tells the same."""
        stop = threading.Event()
        watch = GpuWatch(self._memory, stop)
        watch.start()
        for _ in range(int(SETTLE_S * 5)):
            if watch.latest is not None:
                break
            self._pause(0.2)
        stop.set()
        ended = watch.join(SETTLE_S)
        latest = watch.latest
        took = "never" if latest is None else f"in {latest.took * 1000:.1f} ms"
        good = ended and latest is not None and latest.reason is None
        self._result(good, f"the watching thread has a snapshot ({took}), and ends when told")


def _described(device: GpuDevice) -> str:
    what = f"part {device.index} of {device.parent}" if device.parent else f"GPU {device.index}"
    if device.used is None or device.total is None:
        return f"{what}: {device.name} {device.uuid}: {device.reason}"
    return f"{what}: {device.name} {device.uuid}: {device.used / MIB:.0f} of {device.total / MIB:.0f} MiB used"


def _roomiest(snapshot: GpuSnapshot) -> GpuDevice | None:
    """The device with the most free memory that CUDA can use: of a GPU in parts, one of them."""
    parted = {device.parent for device in snapshot.devices}
    usable = [d for d in snapshot.devices if d.uuid not in parted and (d.free or 0) >= LEAST_BYTES]
    return max(usable, key=lambda device: device.free or 0, default=None)


def _why(snapshot: GpuSnapshot, uuid: str) -> str:
    reason = (snapshot.unread or {}).get(uuid)
    return f"({reason})" if reason else ""


def _counts_as_the_driver() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == FIRST_PID_NAMESPACE
    except OSError:
        return False


def main(arguments: Sequence[str]) -> int:
    """Check, or be the child that holds memory."""
    if arguments[:1] == ["--hold"]:
        return hold(int(arguments[1]))
    signal.alarm(LONGEST_S)  # a sick GPU may hold a call for ever
    return Check(GpuMemory()).run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
