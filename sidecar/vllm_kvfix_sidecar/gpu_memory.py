# SPDX-License-Identifier: Apache-2.0
"""Memory of the GPUs of this host, by device and by process, as NVIDIA's management library (NVML) tells it.

NVML is slow on a busy host and may block for seconds on a sick GPU, so :class:`GpuWatch` asks it in its own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LOOK_S = 10.0
RETRY_S = 300.0
SLOW_S = 1.0
MOST_DEVICES = 256
MOST_PROCESSES = 1024
_NOT_AVAILABLE = (1 << 64) - 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuDevice:
    """A GPU, or a part of one (MIG). Figures in bytes; one that could not be read is None, and ``reason`` says why.

    ``used`` is NVML's: on most drivers it holds what the driver reserves for itself, too. ``index``: NVML's, which a
    restart of the host may change; of a part, its place in its parent. ``parent``: the uuid of the GPU that this is a
    part of.
    """

    uuid: str
    index: int
    name: str = ""
    total: int | None = None
    used: int | None = None
    free: int | None = None
    parent: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a device.

    ``pid`` as the driver counts: of the host's PID namespace, mostly. ``device``: the uuid of the device or part.
    ``used``: bytes; None: NVML does not say, as in many containers.
    """

    pid: int
    device: str
    used: int | None


@dataclass(frozen=True)
class GpuSnapshot:
    """What one look saw.

    ``reason``: why there is nothing to see, None where there is. ``unread``: by uuid of a device, why its processes
    could not be read. ``time``: of the look's beginning, ``took``: how long it was, in seconds of the clock.
    """

    devices: tuple[GpuDevice, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    reason: str | None = None
    unread: Mapping[str, str] | None = None
    time: float = 0.0
    took: float = 0.0


class GpuMemory:
    """Asks NVML. One that is absent, or has no driver, is tried again every ``RETRY_S``: a driver may come late."""

    def __init__(self, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask nothing yet.

        Args:
            nvml: The module ``pynvml``, or what stands for it; None: it is imported at the first look.
            clock: Steady seconds.
        """
        self._nvml = nvml
        self._clock = clock
        self._open = False
        self._absent: str | None = None
        self._retry_at = clock()
        self._said: set[str] = set()
        self._uuids: dict[int, str] = {}

    def look(self) -> GpuSnapshot:
        """What every device says now. Raises nothing; may take long where a GPU is sick."""
        began = self._clock()
        if not self._open and began >= self._retry_at:
            self._absent = self._begin()
            self._open = self._absent is None
            self._retry_at = self._clock() + RETRY_S
        if not self._open:
            return GpuSnapshot(reason=self._absent, time=began, took=self._clock() - began)
        try:
            snapshot = self._look()
        except Exception as error:  # noqa: BLE001  # whatever a foreign library does, the thread goes on
            self._restart(error)
            return GpuSnapshot(reason=_worded(error), time=began, took=self._clock() - began)
        took = self._clock() - began
        self._say_slow(took)
        return GpuSnapshot(*snapshot, time=began, took=took)

    def close(self) -> None:
        """Give NVML back. It may be looked again afterwards."""
        if self._open:
            self._open = False
            self._retry_at = self._clock()
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                _log.debug("NVML did not shut down: %s", error)

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError

    def _begin(self) -> str | None:
        """Start NVML; why not, if it does not."""
        if self._nvml is None:
            try:
                import pynvml  # noqa: PLC0415  # not needed where there is no GPU
            except ImportError:
                return self._say("the Python package nvidia-ml-py is not installed")
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            return self._say(_worded(error))
        return None

    def _restart(self, error: Exception) -> None:
        """NVML as a whole fails, as after an update of the driver: begin anew, later."""
        self._absent = self._say(_worded(error))
        self.close()
        self._retry_at = self._clock() + RETRY_S

    def _say(self, reason: str) -> str:
        if reason not in self._said:
            self._said.add(reason)
            _log.info("no GPU memory is told: %s. It is tried again every %d minutes.", reason, RETRY_S // 60)
        return reason

    def _say_slow(self, took: float) -> None:
        if took >= SLOW_S and "slow" not in self._said:
            self._said.add("slow")
            _log.warning("NVML took %.1f s to tell of the GPUs' memory; one of them may be sick", took)

    def _look(self) -> tuple[tuple[GpuDevice, ...], tuple[GpuProcess, ...], str | None, Mapping[str, str]]:
        devices: list[GpuDevice] = []
        processes: dict[tuple[int, str], GpuProcess] = {}
        unread: dict[str, str] = {}
        for handle, device in self._devices():
            devices.append(device)
            if handle is None:
                continue
            try:
                for process in self._processes(handle, device.uuid):
                    processes.setdefault((process.pid, process.device), process)
            except self._errors as error:
                unread[device.uuid] = _worded(error)
        self._say_faults(devices)
        reason = None if devices else "there is no GPU"
        return tuple(devices), tuple(processes.values())[:MOST_PROCESSES], reason, unread

    def _say_faults(self, devices: list[GpuDevice]) -> None:
        for device in devices:
            if device.reason is not None and f"{device.uuid} {device.reason}" not in self._said:
                self._said.add(f"{device.uuid} {device.reason}")
                _log.warning("GPU %d (%s) tells no memory: %s", device.index, device.uuid, device.reason)

    def _devices(self) -> Iterator[tuple[Any, GpuDevice]]:
        """Each device and part of one, with the handle to ask for its processes, None: it has none to tell."""
        for index in range(min(self._nvml.nvmlDeviceGetCount(), MOST_DEVICES)):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
            except self._nvml.NVMLError as error:  # a lost one has no uuid any more, but had one
                yield None, GpuDevice(self._uuids.get(index, f"GPU {index}"), index, reason=_worded(error))
                continue
            self._uuids[index] = uuid
            parts = tuple(self._parts(handle, uuid))
            # The parts tell of the processes in them, their GPU would tell of them again.
            yield None if parts else handle, self._device(handle, uuid, index)
            yield from parts

    def _parts(self, handle: Any, parent: str) -> Iterator[tuple[Any, GpuDevice]]:
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return
            most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:  # no GPU of this kind can be parted, or it tells so where it tells its memory
            return
        for index in range(min(most, MOST_DEVICES)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                uuid = _text(nvml.nvmlDeviceGetUUID(part))
            except nvml.NVMLError:  # that place is free
                continue
            yield part, self._device(part, uuid, index, parent)

    def _device(self, handle: Any, uuid: str, index: int, parent: str | None = None) -> GpuDevice:
        name = ""
        try:
            name = _text(self._nvml.nvmlDeviceGetName(handle))
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as error:
            return GpuDevice(uuid, index, name, parent=parent, reason=_worded(error))
        total, used, free = int(memory.total), int(memory.used), int(memory.free)
        if total == 0 or _NOT_AVAILABLE in {total, used, free}:  # one that shares the host's memory has none to tell
            return GpuDevice(uuid, index, name, parent=parent, reason="it states no memory of its own")
        return GpuDevice(uuid, index, name, total, used, free, parent)

    def _processes(self, handle: Any, device: str) -> Iterator[GpuProcess]:
        """A process that both computes and draws is told twice, with the same figure."""
        for kind in ("Compute", "Graphics"):
            for found in self._running(f"nvmlDeviceGet{kind}RunningProcesses", handle):
                used = found.usedGpuMemory
                known = used is not None and int(used) < _NOT_AVAILABLE
                yield GpuProcess(int(found.pid), device, int(used) if known else None)

    def _running(self, function: str, handle: Any) -> Sequence[Any]:
        running: Sequence[Any]
        try:
            running = getattr(self._nvml, function)(handle)
        except self._nvml.NVMLLibraryMismatchError:  # a driver before 510
            running = getattr(self._nvml, f"{function}_v2")(handle)
        return running


class GpuWatch:
    """Looks every ``LOOK_S`` in a daemon thread; :attr:`latest` waits for nothing."""

    def __init__(self, memory: GpuMemory, stop: threading.Event, every: float = LOOK_S) -> None:
        """Start nothing yet.

        Args:
            memory: What is looked at.
            stop: Ends the thread once it is set, as soon as NVML has answered.
            every: Seconds between the end of a look and the next.
        """
        self.latest: GpuSnapshot | None = None
        self._memory = memory
        self._stop = stop
        self._every = every
        self._thread = threading.Thread(target=self._run, name="gpu-memory", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end, once ``stop`` is set; whether it came: a sick GPU may hold the thread for ever."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.latest = self._memory.look()
            self._stop.wait(self._every)
        self._memory.close()


def _text(value: str | bytes) -> str:
    """Releases of pynvml before 11.5 give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _worded(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
