# SPDX-License-Identifier: Apache-2.0
"""One real ``vllm serve`` on a loopback port, from its start to the end of its last process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from vllm_kvfix.demo.environment import Environment, cache_folder, child_environ, say
from vllm_kvfix.demo.stopping import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

PROBE_FOLDER = Path(__file__).with_name("probe")
MODEL_NAME = "demo"

_CORE_NAME = "VLLM::EngineCore"
_POLL_S = 0.25
_SAY_EVERY_S = 10.0
_TERM_GRACE_S = 20.0
_KILL_GRACE_S = 10.0
_LOG_TAIL = 30
_ERRORS_SHOWN = 5
_ERROR = re.compile(r"\w+(?:Error|Exception): .+")


class EngineFailedError(RuntimeError):
    """The engine did not start or ended early; the message holds the end of its log."""


@dataclass(frozen=True)
class Sample:
    """What the probe saw at one moment.

    ``time`` in Unix seconds, ``pid`` of the engine core, ``steps`` and ``allocated`` blocks since its start,
    ``backlog``: the length of ``new_block_ids`` of each manager.
    """

    time: float
    pid: int
    steps: int
    allocated: int
    backlog: tuple[int, ...]


def read_samples(file: Path) -> list[Sample]:
    """Return the samples in the probe's file, oldest first; none if it is not there yet."""
    if not file.exists():
        return []
    # The last line may be half written.
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    return [
        Sample(line["time"], line["pid"], line["steps"], line["allocated"], tuple(line["backlog"]))
        for line in map(json.loads, whole)
    ]


def rss_anon(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the anonymous resident memory of a process in bytes (``RssAnon`` of ``/proc/PID/status``)."""
    for line in (proc / str(pid) / "status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    msg = f"/proc/{pid}/status has no RssAnon line: the process has ended"
    raise ProcessLookupError(msg)


def plugin_lines(log: str) -> list[str]:
    """Return the lines of an engine's log that our plugin wrote: each opens with its name and version."""
    return [line for line in log.splitlines() if re.search(r"\bvllm-kvfix \d", line)]


def session_members(session: int, proc: Path = Path("/proc")) -> dict[int, str]:
    """Return pid and command line of every live process of a session."""
    members = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name, in parentheses, may hold anything; after it come state, parent, group, session.
            state, _parent, _group, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                members[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return members


def engine_environ(settings: Mapping[str, str], python_path: Sequence[Path]) -> dict[str, str]:
    """Return the environment for a vLLM process: offline, small, nothing reported, nothing outside our cache."""
    environ = {
        name: value
        for name, value in child_environ().items()
        if not name.startswith(("VLLM_", "KVFIX_")) and not name.lower().endswith("_proxy")
    }
    home = cache_folder() / "vllm"
    environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Else vLLM compiles a few small functions at its start, and a machine without a C++ compiler cannot.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home / "huggingface"),
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "VLLM_CONFIG_ROOT": str(home / "config"),
    }
    if python_path:
        environ["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    return environ | dict(settings)


def distribution_name(environment: Environment, folder: Path) -> Path:
    """Write to ``folder`` the metadata by which ``vllm serve`` finds its own version, and return the folder.

    The command asks for the distribution ``vllm``, but the CPU build on the Python Package Index is ``vllm-cpu``.
    """
    metadata = folder / f"vllm-{environment.release}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {environment.release}+cpu\n")
    return folder


@dataclass(frozen=True)
class EngineSettings:
    """How to start one engine.

    Attributes:
        model: the model's folder.
        work: an existing folder for the log and the probe's file.
        name: the stem of both files.
        arguments: further arguments of ``vllm serve``.
        environ: further environment variables.
        plugin_path: a folder with an installed vllm_kvfix (package and dist-info), or None to start without it.
        start_deadline_s: seconds until the engine must answer.
    """

    model: Path
    work: Path
    name: str = "engine"
    arguments: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    plugin_path: Path | None = None
    start_deadline_s: float = 300.0


class Engine:
    """A running ``vllm serve``, used as a context manager: entered when it answers, left when no process remains.

    Raises:
        EngineFailedError: on entering, if it ends or its deadline passes first.
    """

    def __init__(
        self, environment: Environment, settings: EngineSettings, *, log: Callable[[str], object] = say
    ) -> None:
        """Prepare the engine; nothing runs before it is entered."""
        self.log_file = settings.work / f"{settings.name}.log"
        self.probe_file = settings.work / f"{settings.name}.jsonl"
        self.start_s = 0.0
        self._environment = environment
        self._settings = settings
        self._log = log
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: TextIO | None = None

    @property
    def url(self) -> str:
        """The base address of the HTTP server, without a slash at its end."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Engine:  # noqa: PYI034  Self came with Python 3.11
        """Start the server and wait until it answers."""
        started = time.monotonic()
        try:
            self._start()
            self._wait_until_it_answers(started)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the server and wait until none of its processes is left."""
        self.stop()

    def core_pids(self) -> list[int]:
        """Return the process ids of the engine cores, lowest first."""
        members = session_members(self._process.pid) if self._process else {}
        return sorted(pid for pid, command in members.items() if command.startswith(_CORE_NAME))

    def check(self) -> None:
        """Raise EngineFailedError if the server has ended."""
        if self._process is None or self._process.poll() is not None:
            code = self._process.returncode if self._process else None
            raise EngineFailedError(self._failure(f"the engine ended by itself with exit code {code}"))

    def log_text(self) -> str:
        """Return all that the server has written to its log so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """End every process of the server: politely, then by force. Harmless if there is none."""
        if self._process is None:
            return
        session = self._process.pid
        try:
            if self._process.poll() is None:
                self._process.terminate()
            deadline = time.monotonic() + _TERM_GRACE_S
            while session_members(session) and time.monotonic() < deadline:
                self._process.poll()
                time.sleep(_POLL_S)
        finally:
            # Also on a second Ctrl-C: a left-over engine would hold memory and port for good.
            deadline = time.monotonic() + _KILL_GRACE_S
            while (left := session_members(session)) and time.monotonic() < deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(_POLL_S)
            self._process.wait(_KILL_GRACE_S)
            self._process = None
            if self._output is not None:
                self._output.close()
                self._output = None

    def _start(self) -> None:
        settings = self._settings
        self.probe_file.unlink(missing_ok=True)
        self._output = self.log_file.open("w", encoding="utf-8")
        python_path = [PROBE_FOLDER, distribution_name(self._environment, settings.work / "metadata")]
        python_path += [settings.plugin_path] if settings.plugin_path else []
        environ = {"KVFIX_PROBE_FILE": str(self.probe_file), **(settings.environ or {})}
        command = [str(self._environment.path / "bin" / "vllm"), "serve", str(settings.model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", MODEL_NAME]
        command += ["--enforce-eager", "--uvicorn-log-level", "warning", *settings.arguments]
        with uninterrupted():
            self._process = subprocess.Popen(  # noqa: S603  our own command
                command,
                cwd=settings.work,
                env=engine_environ(environ, python_path),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches us alone, and all its processes can be found and ended.
                start_new_session=True,
            )

    def _wait_until_it_answers(self, started: float) -> None:
        said = started
        while not self._answers():
            self.check()
            now = time.monotonic()
            if now - started > self._settings.start_deadline_s:
                cause = f"the engine did not answer within {self._settings.start_deadline_s:.0f} s"
                raise EngineFailedError(self._failure(cause))
            if now - said >= _SAY_EVERY_S:
                said = now
                self._log(f"  … vLLM {self._environment.release} is starting, {now - started:.0f} s")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)  # noqa: PLR2004  HTTP OK
        except (OSError, urllib.error.URLError):
            return False

    def _failure(self, cause: str) -> str:
        lines = self.log_text().splitlines()
        # The end of the log tells that a process died; why, the process itself told long before.
        errors = list(dict.fromkeys(found[0] for line in lines if (found := _ERROR.search(line))))
        tail = "\n".join("    " + line for line in [*errors[:_ERRORS_SHOWN], "…", *lines[-_LOG_TAIL:]])
        return f"{cause} (vLLM {self._environment.release}); errors in, and the end of, {self.log_file}:\n{tail}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
