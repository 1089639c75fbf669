# SPDX-License-Identifier: Apache-2.0
"""A deployment that has everything: engines with and without the fix, a leak, losses, a receiver that is not there.

Real processes with real rings, a real sidecar, a real Prometheus; the engines in it are fakes, named so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sidecar_e2e.processes import Child, clean_environ, free_port
from tests.sidecar_e2e.prometheus import Prometheus
from tests.sidecar_e2e.sidecar import QUICK, Sidecar
from tests.support import ROOT
from vllm_kvfix.ring.layout import ENGINE_CORE, WORKER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Deployment:
    """What runs. ``engines``: all processes but the sidecar and Prometheus; the last of them has no ring."""

    sidecar: Sidecar
    prometheus: Prometheus
    engines: list[Child]

    def end_engines(self) -> None:
        """End them all."""
        for engine in self.engines:
            engine.kill()


def _python(folder: Path, name: str, *command: str) -> Child:
    environ = {**clean_environ(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sidecar")])}
    return Child(name, [sys.executable, "-m", *command], folder, environ, cwd=ROOT)


def _feeder(folder: Path, ring: Path) -> Child:
    """An engine with the fix under a load that its pool is too small for, which gives up one frame in twenty."""
    options = ["--requests", "1000000", "--rate", "150", "--blocks", "60", "--index", "1", "--drop-every", "20"]
    return _python(folder, "feeder", "tests.sidecar_e2e.feeder", "--ring", str(ring), *options)


class _Titled(Child):
    """A process that calls itself an engine core and has no ring."""

    def __init__(self, folder: Path) -> None:
        sleep = shutil.which("sleep")
        assert sleep is not None
        super().__init__("titled", ["bash", "-c", f"exec -a VLLM::EngineCore {sleep} 3600"], folder, os.environ)


def _refuse(rings: Path) -> None:
    (rings / "damaged.ring").write_bytes(b"no ring" * 1000)
    (rings / "damaged.ring").chmod(0o600)


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """Start it; end it."""
    rings = folder / "rings"
    rings.mkdir()
    _refuse(rings)
    telling = "tests.monitoring.telling_engine"
    nobody = {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    with contextlib.ExitStack() as stack:
        leaking = stack.enter_context(_python(folder, "leaking", telling, str(rings / "leaking.ring"), ENGINE_CORE))
        worker = stack.enter_context(_python(folder, "worker", telling, str(rings / "worker.ring"), WORKER))
        feeder = stack.enter_context(_feeder(folder, rings / "feeder.ring"))
        titled = stack.enter_context(_Titled(folder))
        sidecar = stack.enter_context(Sidecar(folder, rings, nobody))
        prometheus = stack.enter_context(Prometheus(folder, f"127.0.0.1:{sidecar.port}"))
        yield Deployment(sidecar, prometheus, [leaking, worker, feeder, titled])
