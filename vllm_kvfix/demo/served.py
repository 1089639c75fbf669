# SPDX-License-Identifier: Apache-2.0
"""The demo's engine, and the load on it."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix.demo.engine import (
    MODEL_NAME,
    Engine,
    EngineFailedError,
    EngineSettings,
    engine_environ,
    read_samples,
    rss_anon,
)
from vllm_kvfix.demo.measurement import Point
from vllm_kvfix.demo.stopping import uninterrupted
from vllm_kvfix.ring.place import FOLDER_VARIABLE

if TYPE_CHECKING:
    from types import TracebackType

    from vllm_kvfix.demo.environment import Environment
    from vllm_kvfix.demo.progress import Progress

LOAD_SCRIPT = Path(__file__).with_name("load.py")
MODE_VARIABLE = "VLLM_KVFIX_PATCH"
UNFIXED, FIXED = "off", "auto"

CONCURRENCY = 16
PROMPT_TOKENS = 600
BLOCK_SIZE = 16
# Block size as on a GPU. The pool is small and the prefix cache off, so that the leak is all that can grow: both
# would fill up over minutes, up to a limit, and hide it.
_ENGINE_ARGUMENTS = (
    "--dtype=float32",
    "--max-model-len=2048",
    f"--block-size={BLOCK_SIZE}",
    "--num-gpu-blocks-override=4096",
    "--no-enable-prefix-caching",
)
# glibc puts a list of more than 32 MiB, as a leak of days is, into a mapping of its own. That of minutes it would put
# where it has free memory from the engine's start: neither its growth nor its end would show in the process's size.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
# A demo that somebody forgot on a laptop should not work on for days.
_LONGEST_LOAD_S = 3600.0
_LOAD_GRACE_S = 60.0
_KILL_GRACE_S = 10.0


@dataclass(frozen=True)
class Scene:
    """What every engine of the demo shares. ``plugin``: a folder with an installed vllm_kvfix."""

    environment: Environment
    model: Path
    plugin: Path
    work: Path
    progress: Progress

    @property
    def rings(self) -> Path:
        """The folder that engines and sidecar agree on."""
        return self.work / "rings"


class Served:
    """One engine, entered when it answers; then a load may be put on it, and taken off."""

    def __init__(self, scene: Scene, mode: str) -> None:
        """Prepare it with the fix on or off, as ``mode`` says; nothing runs before it is entered."""
        self._scene = scene
        self._report_file = scene.work / f"{mode}-load.json"
        self._load: subprocess.Popen[bytes] | None = None
        settings = EngineSettings(
            scene.model,
            scene.work,
            name=mode,
            arguments=_ENGINE_ARGUMENTS,
            environ={
                MODE_VARIABLE: mode,
                FOLDER_VARIABLE: str(scene.rings),
                # vLLM leaves sockets and folders in the place for temporary files.
                "TMPDIR": str(scene.work),
                **_ALLOCATOR,
            },
            plugin_path=scene.plugin,
        )
        self.engine = Engine(scene.environment, settings, log=scene.progress)
        self.core = 0
        self._looked_at = 0.0

    def __enter__(self) -> Served:  # noqa: PYI034  Self came with Python 3.11
        """Start the engine and wait until it answers."""
        self.engine.__enter__()
        try:
            self.core = self.engine.core_pids()[0]
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the load and the engine."""
        self.stop()

    def stop(self) -> None:
        """Stop both, at once. Harmless if there is neither."""
        try:
            self._kill_load()
        finally:
            self.engine.stop()

    def put_load_on(self) -> None:
        """Let clients send requests from now on."""
        environment = self._scene.environment
        command = [str(environment.python), "-I", str(LOAD_SCRIPT), "--mode=leak", f"--url={self.engine.url}"]
        command += [f"--model={MODEL_NAME}", f"--output={self._report_file}", f"--seconds={_LONGEST_LOAD_S}"]
        command += [f"--concurrency={CONCURRENCY}", f"--prompt-tokens={PROMPT_TOKENS}"]
        # A session of its own: Ctrl-C is ours to handle, the load need not report it as well.
        with uninterrupted():
            self._load = subprocess.Popen(  # noqa: S603  our own command
                command, env=engine_environ({}, ()), stdin=subprocess.DEVNULL, start_new_session=True
            )

    def take_load_off(self) -> int:
        """Let the clients finish what they have sent; the number of requests that were answered.

        Raises:
            EngineFailedError: A request failed, or is not answered in time.
        """
        if self._load is None:
            return 0
        self._load.terminate()
        try:
            self._load.wait(_LOAD_GRACE_S)
        except subprocess.TimeoutExpired:
            raise EngineFailedError(f"requests were not answered within {_LOAD_GRACE_S:.0f} s") from None
        finally:
            self._kill_load()
        report = json.loads(self._report_file.read_text(encoding="utf-8"))
        if report["failed"]:
            raise EngineFailedError(
                f"{report['failed']} of {report['sent']} requests failed, so the run proves nothing"
            )
        return int(report["completed"])

    def check(self) -> None:
        """Raise EngineFailedError if the engine has ended, or the load while it should last."""
        self.engine.check()
        if self._load is not None and self._load.poll() is not None:
            raise EngineFailedError(f"the load ended by itself with exit code {self._load.returncode}")

    def look(self, began: float) -> Point | None:
        """The newest figures, on a clock that began at the Unix time ``began``; None: no step since the last look."""
        samples = read_samples(self.engine.probe_file)
        if not samples or samples[-1].time <= max(began, self._looked_at):
            return None
        self._looked_at = samples[-1].time
        return Point(time.time() - began, rss_anon(self.core), sum(samples[-1].backlog), samples[-1].allocated)

    def _kill_load(self) -> None:
        if self._load is not None:
            self._load.kill()
            self._load.wait(_KILL_GRACE_S)
            self._load = None
