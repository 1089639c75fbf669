# SPDX-License-Identifier: Apache-2.0
"""Everything about a target that can be known from outside, from ``/proc`` and its files alone: nothing runs in it.

What cannot be made out is a refusal: nobody should have to trust a guess about an engine that serves.
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix import guard, observe, upstream
from vllm_kvfix.attach import rights
from vllm_kvfix.attach.errors import AttachError, Reason
from vllm_kvfix.backports.kv_cache_zeroing_gate import BACKPORT

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
TITLES = "VLLM::"  # of vLLM's own processes; a script that drives an engine by itself has none
ENGINE_CORE_TITLE = "VLLM::EngineCore"
_WORKER_TITLE = "VLLM::Worker"
_FRONT_END_TITLE = "VLLM::APIServer"
_ENTRY = "PyRun_SimpleStringFlags"  # what an injected library calls
_KEEP_ON = "start the engine with vllm-kvfix installed instead"


@dataclass(frozen=True)
class Target:
    """A process that runs vLLM, as seen from outside.

    ``root`` is the folder of its package ``vllm`` as seen from here, ``root_inside`` as it sees it itself;
    ``environ`` is what it, or the engine's first process, was started with; ``started`` in Unix seconds.
    """

    pid: int
    title: str
    uid: int
    gid: int
    python: tuple[int, int]
    interpreter: str
    root: Path
    root_inside: str
    version: str | None
    environ: dict[str, str]
    started: float
    sources: upstream.Sources
    decision: guard.Decision
    unwatchable: tuple[str, ...]

    def folders(self) -> list[str]:
        """Folders in its file system where a small file may lie for a moment, best first."""
        return [*filter(None, [self.environ.get("TMPDIR")]), "/tmp", "/var/tmp", "/dev/shm", "/run"]  # noqa: S108  # in a folder of ours there


def look(pid: int) -> Target:
    """All that is to be known of a process before anything is done to it.

    Raises:
        AttachError: It is not what one can attach to, we may not, or something about it cannot be made out.
    """
    _check_state(pid)
    title = _title(pid)
    _check_role(pid, title)
    rights.check(pid)
    maps = _mapped(pid)
    python = _python(pid, maps)
    environ = _environ(pid)
    inside = _package(pid, maps, environ, title)
    root = outside(pid, inside)
    version = upstream.read_version(root)
    files = _identities(root)
    sources = _parsed.get(files) or upstream.Sources(root)
    forced = guard.parse_mode(environ.get(guard.MODE_VARIABLE)) is guard.Mode.FORCE
    mode = guard.Mode.FORCE if forced else guard.Mode.AUTO
    decision = guard.decide(BACKPORT, upstream.Installation(root, version), sources, mode)
    uid, gid = (int(_status(pid)[name].split()[1]) for name in ("Uid", "Gid"))
    target = Target(
        pid=pid,
        title=title,
        uid=uid,
        gid=gid,
        python=python,
        interpreter=f"/proc/{pid}/exe",
        root=root,
        root_inside=inside,
        version=version,
        environ=environ,
        started=_started(pid),
        sources=sources,
        decision=decision,
        unwatchable=tuple(observe.missing_for(sources)),
    )
    _parsed[files] = sources
    _check_unedited(target)
    return target


def engine_cores() -> list[int]:
    """The process ids of all engine cores that can be seen, by the title that vLLM gives them."""
    pids = (int(name) for name in os.listdir(PROC) if name.isdigit())  # noqa: PTH208  # names alone
    named = [pid for pid in pids if _title(pid).startswith(ENGINE_CORE_TITLE)]
    # What an engine core forks has its title, too, for a moment or for good.
    return sorted(pid for pid in named if _parent(pid) not in named)


# -- the process ------------------------------------------------------------------------------------------------------


def _status(pid: int) -> dict[str, str]:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise AttachError(Reason.DEAD, f"there is no process {pid}", "vllm-kvfix attach --all finds them") from error
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _check_state(pid: int) -> None:
    status = _status(pid)
    if int(status["Tgid"]) != pid:
        raise AttachError(Reason.DEAD, f"{pid} is a thread of process {status['Tgid']}", f"attach to {status['Tgid']}")
    state = status["State"][:1]
    if state in {"Z", "X"}:
        raise AttachError(Reason.DEAD, f"process {pid} has ended, and its parent has not taken note of it")
    if state == "T":
        raise AttachError(Reason.STOPPED, f"process {pid} is stopped by a signal", f"kill -CONT {pid}, and try again")
    tracer = int(status["TracerPid"])
    if tracer:
        raise AttachError(
            Reason.TRACED,
            f"process {pid} is traced by process {tracer} ({_title(tracer) or 'whose name cannot be read'})",
            "end that one (a debugger, strace or another attach), and try again",
        )


def _title(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _children(pid: int) -> Iterator[int]:
    for name in os.listdir(PROC):  # noqa: PTH208  # names alone
        if name.isdigit() and _parent(int(name)) == pid:
            yield int(name)


def _parent(pid: int) -> int:
    """The process that has started it; 0 where that cannot be seen, or it has ended."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    # The name, in parentheses, may hold anything; after it come state and parent.
    return int(stat.rpartition(")")[2].split()[1])


def _check_role(pid: int, title: str) -> None:
    if title.startswith(_WORKER_TITLE):
        raise AttachError(Reason.WORKER, f"process {pid} is a worker: the scheduler is not in it", _cores_near(pid))
    if title.startswith(ENGINE_CORE_TITLE):
        return
    cores = [child for child in _children(pid) if _title(child).startswith(ENGINE_CORE_TITLE)]
    if title.startswith(_FRONT_END_TITLE) or cores:
        raise AttachError(
            Reason.FRONT_END, f"process {pid} is an API server: the scheduler is not in it", _cores_near(pid, cores)
        )
    if title.startswith(TITLES):
        raise AttachError(
            Reason.NO_SCHEDULER, f"process {pid} ({title}) is no engine core: no scheduler is in it", _cores_near(pid)
        )


def _cores_near(pid: int, cores: list[int] | None = None) -> str:
    if not cores:
        parent = _parent(pid)
        cores = [parent] if _title(parent).startswith(ENGINE_CORE_TITLE) else []
        cores = cores or [child for child in _children(parent) if _title(child).startswith(ENGINE_CORE_TITLE)]
    if not cores:
        return "attach to its engine core; vllm-kvfix attach --all finds them"
    return f"attach to its engine core: vllm-kvfix attach {' '.join(map(str, cores))}"


def _started(pid: int) -> float:
    ticks = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    uptime = float((PROC / "uptime").read_text().split()[0])
    now = os.stat(PROC / "self").st_ctime  # noqa: PTH116  # made anew at each look: the kernel's own idea of now
    return now - uptime + ticks / os.sysconf("SC_CLK_TCK")


def _environ(pid: int) -> dict[str, str]:
    """What it was started with, and, where its title has been written over that, as vLLM does, its ancestor was."""
    found: dict[str, str] = {}
    while pid:
        try:
            block = (PROC / str(pid) / "environ").read_bytes()
        except OSError:
            break
        pairs = (pair.partition("=") for pair in block.decode(errors="surrogateescape").split("\0"))
        found = {name: value for name, mark, value in pairs if mark} | found
        # A title is filled up with NULs; some variables may be left behind it.
        if block and b"\0\0" not in block:
            break
        pid = _parent(pid)
    return found


# -- its Python -------------------------------------------------------------------------------------------------------


def _mapped(pid: int) -> list[str]:
    """The files that it has mapped."""
    lines = (PROC / str(pid) / "maps").read_text(errors="surrogateescape").splitlines()
    return list(dict.fromkeys(fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) > 5))  # noqa: PLR2004  # with a path


def _python(pid: int, maps: list[str]) -> tuple[int, int]:
    """Its Python's major and minor version."""
    text = "\n".join(maps)
    program = str((PROC / str(pid) / "exe").readlink())
    if re.search(r"libpypy|\.pypy\d|/pypy3?[\d.]*$", f"{text}\n{program}"):
        raise AttachError(Reason.OTHER_PYTHON, f"process {pid} runs PyPy, and this is for CPython", _KEEP_ON)
    found = re.search(r"/libpython3\.(\d+)(t?)\.so", text) or re.search(r"/python3\.(\d+)(t?)$", program)
    found = found or re.search(r"\.cpython-3(\d+)(t?)-[\w-]+\.so", text)
    if not found:
        raise AttachError(
            Reason.NOT_PYTHON, f"process {pid} ({program}) runs no Python that can be made out", "name an engine core"
        )
    if found[2]:
        raise AttachError(Reason.OTHER_PYTHON, f"process {pid} runs a free-threaded Python", _KEEP_ON)
    if "/ld-musl-" in text:
        raise AttachError(Reason.OTHER_PYTHON, f"process {pid} runs on musl libc, and hypno needs glibc", _KEEP_ON)
    library = re.search(r"^(.*/libpython3\.\d+\.so.*)$", text, re.MULTILINE)
    file = outside(pid, library[1]) if library else PROC / str(pid) / "exe"
    if not _exports(file, _ENTRY):
        raise AttachError(
            Reason.OTHER_PYTHON, f"process {pid} runs a Python that lets no library call it ({program})", _KEEP_ON
        )
    return 3, int(found[1])


def _exports(file: Path, symbol: str) -> bool:
    try:
        with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"\0" + symbol.encode() + b"\0") >= 0
    except (OSError, ValueError):
        return False


# -- its vLLM ---------------------------------------------------------------------------------------------------------


def outside(pid: int, path: str) -> Path:
    """A path of the target's as seen from here."""
    return PROC / str(pid) / "root" / path.lstrip("/")


def _package(pid: int, maps: list[str], environ: dict[str, str], title: str) -> str:
    """The folder of its package vllm, as it sees it; whether that is what it has imported is seen to inside it."""
    loaded = [found[1] for found in (re.match(rf"(.*/{upstream.PACKAGE})/.*\.so$", path) for path in maps) if found]
    loaded = [folder for folder in dict.fromkeys(loaded) if _is_package(pid, folder)]
    if not loaded and not title.startswith(TITLES):
        name = title[:60] or "without a name"
        raise AttachError(Reason.NOT_VLLM, f"process {pid} ({name}) has not loaded vLLM", "name an engine core")
    entries = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    on_path = [str(Path(entry) / upstream.PACKAGE) for entry in entries]
    sites = [found[1] for found in (re.match(r"(.*/(?:site|dist)-packages)/", path) for path in maps) if found]
    folders = [*on_path, *loaded, *(f"{site}/{upstream.PACKAGE}" for site in sites)]
    for folder in dict.fromkeys(folders):
        if folder.startswith("/") and _is_package(pid, folder):
            return folder
    raise AttachError(Reason.NOT_VLLM, f"the files of the vLLM of process {pid} are not to be found", _KEEP_ON)


def _is_package(pid: int, folder: str) -> bool:
    return (outside(pid, folder) / "__init__.py").is_file()


def _identities(root: Path) -> tuple[tuple[int, ...], ...]:
    """What tells the files that are looked at from all others."""
    modules = [known.module for known in BACKPORT.targets] + [upstream.POOL_MODULE, upstream.OUTPUT_MODULE]
    sources = upstream.Sources(root)
    return tuple(map(_identity, [root / "_version.py", *map(sources.path, modules)]))


# By the identities of their files: several engines often have the very same ones.
_parsed: dict[tuple[tuple[int, ...], ...], upstream.Sources] = {}


def _identity(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def _check_unedited(target: Target) -> None:
    """What was edited after the process began is not what runs in it."""
    if target.decision.state is not guard.State.APPLY:
        return
    for module in dict.fromkeys(known.module for known in BACKPORT.targets):
        path = upstream.Sources(target.root).path(module)
        # Nobody has imported vLLM within the first second; the clock of files is not that of processes.
        if path.stat().st_mtime > target.started + 1:
            raise AttachError(
                Reason.UNKNOWN_SOURCE,
                f"{path.name} was changed after process {target.pid} had started: what runs in it is not known",
                "restart the engine with vllm-kvfix installed",
            )
