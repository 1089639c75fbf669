# SPDX-License-Identifier: Apache-2.0
"""A fake NVML, named so: answers like ``pynvml``, with its errors, for GPUs that a test makes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

GIB = 1 << 30


@dataclass
class FakeGpu:
    """A GPU, or a part of one; a handle is the thing itself.

    ``faults`` maps the end of a function's name to the error that it answers with. ``parts``: None where MIG is off; a
    None in it is a free place. ``compute``, ``graphics``: bytes by pid.
    """

    uuid: str
    name: str = "NVIDIA H200"
    total: int = 141 * GIB
    used: int = GIB
    parts: list[FakeGpu | None] | None = None
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """What of ``pynvml`` is used. ``faults`` as those of a GPU, of the functions that ask none."""

    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.faults: dict[str, int] = {}
        self.opened = 0
        self.begun = 0
        self.old_driver = False

    def nvmlInit(self) -> None:  # noqa: N802  # pynvml's name
        """Begin."""
        self.begun += 1
        self._fail(self.faults, "Init")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802  # pynvml's name
        """End."""
        self.opened -= 1
        self._fail(self.faults, "Shutdown")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802  # pynvml's name
        """Lost ones count, too."""
        self._fail(self.faults, "Count")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802  # pynvml's name
        """The GPU itself."""
        return self._asked(self.gpus[index], "Handle")

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:  # noqa: N802  # pynvml's name
        """Its uuid."""
        return self._asked(handle, "UUID").uuid

    def nvmlDeviceGetName(self, handle: FakeGpu) -> bytes:  # noqa: N802  # pynvml's name
        """Its name, as old releases of pynvml give it."""
        return self._asked(handle, "Name").name.encode()

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> SimpleNamespace:  # noqa: N802  # pynvml's name
        """Its memory."""
        self._asked(handle, "MemoryInfo")
        return SimpleNamespace(total=handle.total, used=handle.used, free=handle.total - handle.used)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:  # noqa: N802  # pynvml's name
        """The current mode, and the one after a restart."""
        return [int(self._asked(handle, "MigMode").parts is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:  # noqa: N802  # pynvml's name
        """Places for parts."""
        return len(self._asked(handle, "MaxMig").parts or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeGpu:  # noqa: N802  # pynvml's name
        """A part, if there is one at that place."""
        part = (self._asked(handle, "MigDevice").parts or [])[index]
        if part is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802  # pynvml's name
        """Those that compute."""
        if self.old_driver:
            raise pynvml.NVMLLibraryMismatchError
        return _listed(self._asked(handle, "ComputeRunningProcesses").compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802  # pynvml's name
        """Those that draw."""
        if self.old_driver:
            raise pynvml.NVMLLibraryMismatchError
        return _listed(self._asked(handle, "GraphicsRunningProcesses").graphics)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802  # pynvml's name
        """What a driver before 510 has."""
        return _listed(handle.compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, handle: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802  # pynvml's name
        """What a driver before 510 has."""
        return _listed(handle.graphics)

    def _asked(self, gpu: FakeGpu, function: str) -> FakeGpu:
        self._fail(gpu.faults, function)
        return gpu

    def _fail(self, faults: dict[str, int], function: str) -> None:
        for name in (function, "*"):
            if name in faults:
                raise pynvml.NVMLError(faults[name])


def _listed(processes: dict[int, int | None]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes.items()]
