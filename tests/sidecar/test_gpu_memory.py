# SPDX-License-Identifier: Apache-2.0
"""gpu_memory: every device and process that NVML tells; absent, with its reason, where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pynvml
import pytest

from tests.sidecar.fake_nvml import GIB, FakeGpu, FakeNvml
from tests.support import ROOT
from vllm_kvfix_sidecar import gpu_memory
from vllm_kvfix_sidecar.gpu_check import MIB, Check, Exit
from vllm_kvfix_sidecar.gpu_memory import RETRY_S, GpuDevice, GpuMemory, GpuProcess, GpuSnapshot, GpuWatch

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_AVAILABLE = (1 << 64) - 1
HAS_NO_GPU = not Path("/dev/nvidiactl").exists()


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def look(nvml: FakeNvml) -> GpuSnapshot:
    """One look."""
    return GpuMemory(nvml, Clock()).look()


class TestDevices:
    """What is told of GPUs."""

    def test_eight_gpus_are_eight_devices(self) -> None:
        """Each with its uuid, index, name and memory."""
        snapshot = look(FakeNvml(*(FakeGpu(f"GPU-{n}", used=n * GIB) for n in range(8))))
        assert (snapshot.reason, snapshot.processes, snapshot.unread) == (None, (), {})
        assert snapshot.devices == tuple(
            GpuDevice(f"GPU-{n}", n, "NVIDIA H200", 141 * GIB, n * GIB, (141 - n) * GIB) for n in range(8)
        )

    def test_a_lost_gpu_has_the_reason_and_hides_no_other(self, caplog: pytest.LogCaptureFixture) -> None:
        """It keeps the uuid that it had, tells no figure, and is said once; then it comes back."""
        nvml = FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b"), FakeGpu("GPU-c"))
        memory = GpuMemory(nvml, Clock())
        memory.look()
        nvml.gpus[1].faults["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
        for _ in range(3):
            lost = memory.look().devices[1]
            assert (lost.uuid, lost.index, lost.total, lost.used, lost.free) == ("GPU-b", 1, None, None, None)
            assert lost.reason == "GPU is lost"
        assert [device.used for device in memory.look().devices] == [GIB, None, GIB]
        assert caplog.text.count("GPU is lost") == 1
        nvml.gpus[1].faults.clear()
        assert memory.look().devices[1].used == GIB

    def test_one_that_was_never_seen_is_called_by_its_index(self) -> None:
        """It has no uuid to tell."""
        nvml = FakeNvml(FakeGpu("GPU-a", faults={"Handle": pynvml.NVML_ERROR_GPU_IS_LOST}))
        assert look(nvml).devices == (GpuDevice("GPU 0", 0, reason="GPU is lost"),)

    @pytest.mark.parametrize(
        ("gpu", "reason"),
        [
            (FakeGpu("GPU-a", faults={"MemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}), "not Supported"),
            (FakeGpu("GPU-a", faults={"Name": pynvml.NVML_ERROR_NO_PERMISSION}), "insufficient Permissions"),
            (FakeGpu("GPU-a", total=0, used=0), "it states no memory of its own"),
            (FakeGpu("GPU-a", total=NOT_AVAILABLE, used=0), "it states no memory of its own"),
        ],
    )
    def test_memory_that_is_not_told_is_none(self, gpu: FakeGpu, reason: str) -> None:
        """Not 0; the processes may be told all the same."""
        gpu.compute[7] = GIB
        snapshot = look(FakeNvml(gpu))
        (device,) = snapshot.devices
        assert (device.uuid, device.total, device.used, device.free, device.reason) == ("GPU-a", *[None] * 3, reason)
        assert snapshot.processes == (GpuProcess(7, "GPU-a", GIB),)

    def test_parts_are_devices_of_their_own(self) -> None:
        """With their parent; free places are none; the processes are told once, with the part."""
        parts = [FakeGpu("MIG-x", total=20 * GIB, compute={7: GIB}), None, FakeGpu("MIG-y", total=40 * GIB)]
        snapshot = look(FakeNvml(FakeGpu("GPU-a", parts=parts, compute={7: GIB}), FakeGpu("GPU-b")))
        assert [(device.uuid, device.index, device.parent) for device in snapshot.devices] == [
            ("GPU-a", 0, None),
            ("MIG-x", 0, "GPU-a"),
            ("MIG-y", 2, "GPU-a"),
            ("GPU-b", 1, None),
        ]
        assert [device.total for device in snapshot.devices] == [141 * GIB, 20 * GIB, 40 * GIB, 141 * GIB]
        assert snapshot.processes == (GpuProcess(7, "MIG-x", GIB),)

    @pytest.mark.parametrize("fault", ["MigMode", "MaxMig"])
    def test_a_gpu_that_cannot_be_parted_is_whole(self, fault: str) -> None:
        """Most say so by an error."""
        gpu = FakeGpu(
            "GPU-a", parts=[FakeGpu("MIG-x")], faults={fault: pynvml.NVML_ERROR_NOT_SUPPORTED}, compute={7: 1}
        )
        snapshot = look(FakeNvml(gpu))
        assert [device.uuid for device in snapshot.devices] == ["GPU-a"]
        assert snapshot.processes == (GpuProcess(7, "GPU-a", 1),)

    def test_no_gpu_under_a_driver_is_told(self) -> None:
        """It is no fault."""
        assert look(FakeNvml()).reason == "there is no GPU"


class TestProcesses:
    """What is told of processes."""

    def test_a_process_on_several_devices_is_told_for_each(self) -> None:
        """A tensor-parallel worker has one; one that draws as well is told once."""
        gpus = FakeGpu("GPU-a", compute={7: 5, 8: 6}, graphics={8: 6, 9: 1}), FakeGpu("GPU-b", compute={7: 2})
        assert set(look(FakeNvml(*gpus)).processes) == {
            GpuProcess(7, "GPU-a", 5),
            GpuProcess(8, "GPU-a", 6),
            GpuProcess(9, "GPU-a", 1),
            GpuProcess(7, "GPU-b", 2),
        }

    @pytest.mark.parametrize("said", [None, NOT_AVAILABLE])
    def test_what_nvml_does_not_know_is_none(self, said: int | None) -> None:
        """The module gives None, some of its functions the largest number; neither is an amount."""
        assert look(FakeNvml(FakeGpu("GPU-a", compute={7: said}))).processes == (GpuProcess(7, "GPU-a", None),)

    def test_processes_that_cannot_be_read_have_the_reason(self) -> None:
        """Under the device, whose memory is told; other devices' processes are told."""
        fault = {"ComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION}
        snapshot = look(FakeNvml(FakeGpu("GPU-a", faults=fault), FakeGpu("GPU-b", compute={7: 2})))
        assert snapshot.unread == {"GPU-a": "insufficient Permissions"}
        assert [device.used for device in snapshot.devices] == [GIB, GIB]
        assert snapshot.processes == (GpuProcess(7, "GPU-b", 2),)

    def test_an_old_driver_is_asked_as_it_can_be(self) -> None:
        """There is no such function for it under the usual name."""
        nvml = FakeNvml(FakeGpu("GPU-a", compute={7: 5}, graphics={8: 6}))
        nvml.old_driver = True
        assert look(nvml).processes == (GpuProcess(7, "GPU-a", 5), GpuProcess(8, "GPU-a", 6))

    def test_they_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many there are."""
        monkeypatch.setattr(gpu_memory, "MOST_PROCESSES", 10)
        assert len(look(FakeNvml(FakeGpu("GPU-a", compute=dict.fromkeys(range(50), 1)))).processes) == 10


class TestAbsent:
    """Without NVML, or with one that fails."""

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
            (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver Not Loaded"),
            (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch."),
        ],
    )
    def test_it_is_told_and_tried_again_rarely(self, code: int, reason: str, caplog: pytest.LogCaptureFixture) -> None:
        """Looks between two tries cost nothing, the log has one line, and a driver that comes late is found."""
        caplog.set_level("INFO")
        nvml, clock = FakeNvml(FakeGpu("GPU-a")), Clock()
        nvml.faults["Init"] = code
        memory = GpuMemory(nvml, clock)
        for _ in range(30):
            assert memory.look() == GpuSnapshot(reason=reason, time=clock.now)
            clock.now += 10.0
        assert nvml.begun == 1
        clock.now += RETRY_S
        memory.look()
        assert nvml.begun == 2
        nvml.faults.clear()
        clock.now += RETRY_S
        assert memory.look().devices[0].used == GIB
        assert len(caplog.records) == 1

    def test_a_failure_of_all_begins_anew_later(self) -> None:
        """As after a driver's update under way: it is closed, reported, and opened once more."""
        nvml, clock = FakeNvml(FakeGpu("GPU-a")), Clock()
        memory = GpuMemory(nvml, clock)
        assert memory.look().reason is None
        nvml.faults["Count"] = pynvml.NVML_ERROR_UNKNOWN
        assert memory.look().reason == "unknown Error"
        assert nvml.opened == 0
        nvml.faults.clear()
        assert memory.look().reason == "unknown Error"
        clock.now += RETRY_S
        assert memory.look().devices[0].used == GIB
        assert nvml.opened == 1

    def test_whatever_it_raises_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing leaves a look."""
        nvml = FakeNvml(FakeGpu("GPU-a"))
        monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: int("x"))
        assert "invalid literal" in str(look(nvml).reason)

    def test_closing_gives_it_back_once(self) -> None:
        """Also if that fails; a later look opens it again."""
        nvml = FakeNvml(FakeGpu("GPU-a"))
        memory = GpuMemory(nvml, Clock())
        memory.look()
        nvml.faults["Shutdown"] = pynvml.NVML_ERROR_UNKNOWN
        memory.close()
        memory.close()
        assert nvml.opened == 0
        assert memory.look().devices[0].used == GIB

    def test_how_long_it_took_is_told(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the clock; a slow one is said once."""
        nvml, clock = FakeNvml(FakeGpu("GPU-a")), Clock()

        def slow() -> int:
            clock.now += 2.5
            return 1

        monkeypatch.setattr(nvml, "nvmlDeviceGetCount", slow)
        memory = GpuMemory(nvml, clock)
        assert [(memory.look().time, memory.look().took) for _ in range(2)] == [(1000.0, 2.5), (1005.0, 2.5)]
        assert caplog.text.count("NVML took 2.5 s") == 1

    @pytest.mark.skipif(not HAS_NO_GPU, reason="a machine without a GPU is what this is about; this one has one")
    def test_this_machine_has_none(self) -> None:
        """The real pynvml says so."""
        snapshot = GpuMemory().look()
        assert (snapshot.devices, snapshot.reason) == ((), "NVML Shared Library Not Found")


class TestWatch:
    """The thread."""

    def test_the_latest_snapshot_is_there_without_waiting(self) -> None:
        """Also while NVML hangs: then it is the one before; and the thread ends when told."""
        asked, answer, stop = threading.Event(), threading.Event(), threading.Event()
        nvml = FakeNvml(FakeGpu("GPU-a"))
        count = nvml.nvmlDeviceGetCount

        def hang() -> int:
            asked.set()
            assert answer.wait(30)
            return count()

        memory = GpuMemory(nvml)
        watch = GpuWatch(memory, stop, every=0.0)
        nvml.nvmlDeviceGetCount = hang  # type: ignore[method-assign]  # a GPU that does not answer
        assert watch.latest is None
        watch.start()
        assert asked.wait(30)
        assert watch.latest is None
        assert not watch.join(0.0)
        stop.set()
        answer.set()
        assert watch.join(30)
        assert watch.latest is not None
        assert watch.latest.devices[0].used == GIB
        assert nvml.opened == 0

    def test_it_holds_up_no_process_that_ends(self) -> None:
        """A sick GPU may hold it for ever."""
        code = (
            "import threading, types\n"
            "from vllm_kvfix_sidecar.gpu_memory import *\n"
            "asked = threading.Event()\n"
            "nvml = types.SimpleNamespace(nvmlInit=lambda: (asked.set(), threading.Event().wait()))\n"
            "GpuWatch(GpuMemory(nvml), threading.Event()).start()\n"
            "print(asked.wait(30))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
        )
        assert done.stdout == "True\n"


class FakeHolder:
    """A fake CUDA process, named so: its GPU's figures change as it is told."""

    def __init__(self, gpu: FakeGpu, size: int, pid: int = 7) -> None:
        self.gpu = gpu
        self.size = size
        self.pid = pid
        gpu.compute[pid] = 500 * MIB

    def allocate(self) -> None:
        """More is used."""
        self.gpu.used += self.size
        self.gpu.compute[self.pid] = (self.gpu.compute[self.pid] or 0) + self.size

    def free(self) -> None:
        """Less is used."""
        self.gpu.used -= self.size
        self.gpu.compute[self.pid] = (self.gpu.compute[self.pid] or 0) - self.size

    def end(self) -> None:
        """It is gone."""
        self.gpu.compute.pop(self.pid, None)


class Unlisted(FakeHolder):
    """As in a container that hides processes."""

    def __init__(self, gpu: FakeGpu, size: int) -> None:
        super().__init__(gpu, size)
        gpu.compute.clear()

    def allocate(self) -> None:
        """More is used, by nobody."""
        self.gpu.used += self.size

    def free(self) -> None:
        """Less is used."""
        self.gpu.used -= self.size


class Silent(FakeHolder):
    """As in a container where amounts are not told."""

    def allocate(self) -> None:
        """More is used."""
        super().allocate()
        self.gpu.compute[self.pid] = None


class Elsewhere(FakeHolder):
    """As in a PID namespace of its own: the driver knows it by another pid."""

    def __init__(self, gpu: FakeGpu, size: int) -> None:
        super().__init__(gpu, size, pid=70007)
        self.pid = 7

    def allocate(self) -> None:
        """More is used, under the driver's pid."""
        self._as_the_driver(super().allocate)

    def free(self) -> None:
        """Less is used."""
        self._as_the_driver(super().free)

    def end(self) -> None:
        """It is gone."""
        self._as_the_driver(super().end)

    def _as_the_driver(self, act: Callable[[], None]) -> None:
        self.pid = 70007
        act()
        self.pid = 7


class Wasteful(FakeHolder):
    """NVML tells too little for it, and it keeps what it frees."""

    def allocate(self) -> None:
        """Half of it."""
        self.gpu.used += self.size // 2

    def free(self) -> None:
        """Nothing."""


class Disturbed(FakeHolder):
    """Another process takes memory of that GPU at the same time, once."""

    noise = 500 * MIB

    def allocate(self) -> None:
        """More is used than is allocated here."""
        super().allocate()
        self.gpu.used += self.noise
        self.noise = 0


class Stays(FakeHolder):
    """It is listed after its end."""

    def end(self) -> None:
        """It is not gone."""


class TestCheck:
    """``make gpu-check``, with fakes in the place of GPU and CUDA process."""

    def check(
        self, holder: Callable[[FakeGpu, int], FakeHolder] = FakeHolder, *gpus: FakeGpu, own_pids: bool = True
    ) -> tuple[Exit, str]:
        """How it ended, and what it said."""
        made = gpus or (FakeGpu("GPU-a"),)
        by_uuid = {part.uuid: part for gpu in made for part in (gpu, *(gpu.parts or ())) if part}
        lines: list[str] = []
        code = Check(
            GpuMemory(FakeNvml(*made)),
            lambda uuid, size: holder(by_uuid[uuid], size),
            lines.append,
            own_pids=own_pids,
            pause=lambda _: None,
        ).run()
        return code, "\n".join(lines)

    def test_all_is_well_with_a_gpu_that_tells_the_truth(self) -> None:
        """Five checks, each with a line."""
        code, text = self.check()
        assert (code, text.count("ok   "), text.count("FAIL")) == (Exit.OK, 5, 0)
        assert "rises by 1024.0 MiB for 1024 MiB" in text
        assert "process 7 is listed with 1524.0 MiB" in text

    @pytest.mark.parametrize(
        ("holder", "failures"),
        [(Wasteful, ["rises by 512.0", "falls by 0.0", "is listed with 500.0"]), (Stays, ["is listed no more"])],
    )
    def test_a_wrong_figure_fails(self, holder: type[FakeHolder], failures: list[str]) -> None:
        """Each by its own line."""
        code, text = self.check(holder)
        assert code == Exit.FAILED
        failed = [line for line in text.splitlines() if line.startswith("FAIL")]
        assert len(failed) == len(failures)
        assert all(failure in line for failure, line in zip(failures, failed, strict=True))

    def test_another_process_on_the_gpu_does_not_fail_it(self) -> None:
        """It is measured again."""
        code, text = self.check(Disturbed)
        assert (code, "rises by 1024.0 MiB" in text) == (Exit.OK, True)

    def test_a_process_that_is_not_listed_fails_where_pids_are_the_drivers(self) -> None:
        """In a container it is a note: NVML does not show processes of other PID namespaces there."""
        code, text = self.check(Unlisted)
        assert (code, text.count("FAIL process 7 is listed")) == (Exit.FAILED, 1)
        code, text = self.check(Unlisted, own_pids=False)
        assert (code, text.count("note in this PID namespace NVML lists no process")) == (Exit.OK, 1)

    def test_an_amount_that_is_not_available_is_a_note(self) -> None:
        """It is no failure of ours."""
        code, text = self.check(Silent)
        assert (code, text.count("NVML says is not available")) == (Exit.OK, 1)

    def test_a_pid_of_another_namespace_is_found_by_its_coming(self) -> None:
        """And its amount is checked."""
        code, text = self.check(Elsewhere, own_pids=False)
        assert code == Exit.OK
        assert "70007 appeared for our 7" in text
        assert "process 70007 is listed with 1524.0 MiB" in text

    def test_of_a_gpu_in_parts_a_part_is_checked(self) -> None:
        """CUDA sees no whole one there; the roomiest is taken."""
        parts: list[FakeGpu | None] = [FakeGpu("MIG-x", total=8 * GIB), FakeGpu("MIG-y", total=20 * GIB)]
        code, text = self.check(FakeHolder, FakeGpu("GPU-a", parts=parts))
        assert (code, "part 1 of GPU-a" in text) == (Exit.OK, True)
        assert parts[1] is not None
        assert parts[1].used == 2 * GIB

    def test_a_full_gpu_fails_to_be_checked(self) -> None:
        """And says what is missing."""
        code, text = self.check(FakeHolder, FakeGpu("GPU-a", total=GIB, used=GIB))
        assert (code, "FAIL no GPU has 64 MiB free" in text) == (Exit.FAILED, True)

    def test_a_cuda_process_that_does_not_start_fails(self) -> None:
        """With its last word."""

        def broken(gpu: FakeGpu, size: int) -> FakeHolder:
            raise RuntimeError(f"cuInit failed on {gpu.uuid} for {size}")

        code, text = self.check(broken)
        assert (code, "FAIL a CUDA process starts on GPU-a: cuInit failed" in text) == (Exit.FAILED, True)

    @pytest.mark.skipif(not HAS_NO_GPU, reason="a machine without a GPU is what this is about; this one has one")
    def test_without_a_gpu_it_says_so_with_a_code_of_its_own(self) -> None:
        """The real command; and without pynvml another."""
        for options, code, said in ((["-S"], Exit.CANNOT, "cannot check"), ([], Exit.NO_GPU, "no GPU to check")):
            done = subprocess.run(
                [sys.executable, *options, "-m", "vllm_kvfix_sidecar.gpu_check"],
                env={**os.environ, "PYTHONPATH": f"{ROOT}/sidecar:{ROOT}"},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stdout.startswith(said), done.stderr) == (code, True, "")

    @pytest.mark.skipif(not HAS_NO_GPU, reason="a machine without a GPU is what this is about; this one has one")
    def test_a_child_without_cuda_says_so(self) -> None:
        """And its parent hears it."""
        lines: list[str] = []
        code = Check(GpuMemory(FakeNvml(FakeGpu("GPU-a"))), say=lines.append, pause=lambda _: None).run()
        assert code == Exit.FAILED
        assert "libcuda.so.1" in lines[1]
