# SPDX-License-Identifier: Apache-2.0
"""Real containers: Debian's podman over a store of its own that goes with it, a base image, and ours built on that."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.debian import program
from tests.helm.tools import CACHE
from tests.support import ROOT
from vllm_kvfix.demo.environment import locked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

BASE = "localhost/vllm-kvfix-base:test"
IMAGE = "localhost/vllm-kvfix:test"
WITHOUT = "the image and the injected pod"
_SUITE = "bookworm"
_PREFIX = "vllm-kvfix-containers-"
# It holds 0.5 GiB; what a test writes in its containers is small.
_STORE_MIB = 2048
_COMMAND_S = 180.0
_MAKE_S = 600.0
# Where an image of Debian has megabytes that no program reads.
_LEFT_OUT = ("var/cache", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
# What containerd and CRI-O give a container that asks for nothing; podman gives less.
_CAPABILITIES = (
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID "
    "SYS_CHROOT"
)


class Podman:
    """podman, used as a context manager: entered with both images made, left when nothing of it remains."""

    def __init__(self) -> None:
        """Nothing is made before it is entered."""
        self.folder = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}"

    def __enter__(self) -> Self:
        """Make the store and the images; the base comes out of the cache, or takes a minute or two."""
        for name, package in (("podman", "podman"), ("runc", "runc"), ("catatonit", "catatonit")):
            program(name, package, WITHOUT)
        _remove_leftovers()
        base = _base_archive()
        self.folder.mkdir(mode=0o700)
        try:
            self._make_store()
            self.run("import", str(base), BASE, timeout_s=_MAKE_S)
            self._build()
        except BaseException:
            _remove(self.folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every container, and remove the store."""
        _remove(self.folder)

    def _make_store(self) -> None:
        """In memory, which is bounded, and gone in a moment: on a disk its twenty thousand files take a minute."""
        size = f"size={_STORE_MIB}m"
        mount = ["mount", "-t", "tmpfs", "-o", size, "vllm-kvfix-containers", str(self.folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            _configure(self.folder, "overlay")
            if self.run("info", check=False).returncode == 0:
                return
            subprocess.run(["umount", str(self.folder)], check=True)  # noqa: S607  # of the system, wherever it lies
        _configure(self.folder, "vfs")  # copies each layer, which works everywhere

    def _build(self) -> None:
        """From the working tree, less what .dockerignore leaves out."""
        options = ["--isolation=chroot", "--network=host", f"--build-arg=PYTHON_IMAGE={BASE}", f"--tag={IMAGE}"]
        certificates = Path("/etc/ssl/certs")  # behind a proxy that signs by itself, those of this machine are needed
        if certificates.is_dir():
            options.append(f"--volume={certificates}:{certificates}:ro")
        self.run("build", *options, f"--file={ROOT / 'sidecar' / 'Dockerfile'}", str(ROOT), timeout_s=_MAKE_S)

    def run(
        self, *words: str, check: bool = True, timeout_s: float = _COMMAND_S, told: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run podman; ``told``: its standard input."""
        return _podman(self.folder, words, check=check, timeout_s=timeout_s, told=told)

    def once(self, *options: str, command: Sequence[str] = (), image: str = IMAGE) -> subprocess.CompletedProcess[str]:
        """Run a container to its end, which need not be a good one, and remove it."""
        return self.run("run", "--rm", "--network=host", *options, image, *command, check=False)

    def inspect(self, image: str) -> dict[str, Any]:
        """What is known of an image."""
        (found,) = json.loads(self.run("image", "inspect", image).stdout)
        known: dict[str, Any] = found
        return known


def _configure(folder: Path, driver: str) -> None:
    store = {"driver": driver, "graphroot": folder / "graph", "runroot": folder / "run"}
    lines = [f'{name} = "{value}"' for name, value in store.items()]
    (folder / "storage.conf").write_text("\n".join(["[storage]", *lines, ""]))
    # podman would ask for more than may be had where nobody can raise limits.
    processes = min(resource.getrlimit(resource.RLIMIT_NPROC)[1], int(Path("/proc/sys/kernel/pid_max").read_text()))
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 16)
    lines = [
        "[containers]",
        f'default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]',
        f"default_capabilities = {json.dumps(_CAPABILITIES.split())}",
        "[engine]",
        'cgroup_manager = "cgroupfs"',
        'runtime = "runc"',
        'events_logger = "none"',
        # Else locks and state are shared with every other podman of this machine.
        'lock_type = "file"',
        f'tmp_dir = "{folder / "run" / "libpod"}"',
    ]
    (folder / "containers.conf").write_text("\n".join([*lines, ""]))


def _environ(folder: Path) -> Mapping[str, str]:
    conf = {"CONTAINERS_CONF": folder / "containers.conf", "CONTAINERS_STORAGE_CONF": folder / "storage.conf"}
    return {**os.environ, **{name: str(path) for name, path in conf.items()}}


def _podman(
    folder: Path, words: Sequence[str], *, check: bool = True, timeout_s: float = _COMMAND_S, told: str | None = None
) -> subprocess.CompletedProcess[str]:
    command = [program("podman", "podman", WITHOUT), *words]
    done = subprocess.run(
        command, env=_environ(folder), input=told, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def _remove_leftovers() -> None:
    """Of runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not Path("/proc", folder.name.removeprefix(_PREFIX)).exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    if (folder / "containers.conf").exists():
        for words in (("pod", "rm", "--all", "--force", "--time=0"), ("rm", "--all", "--force", "--time=0")):
            _podman(folder, words, check=False)
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if f"{path}/".startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", path], check=False)  # noqa: S607  # of the system, wherever it lies
    shutil.rmtree(folder, ignore_errors=True)


def _base_archive() -> Path:
    """Debian with Python and pip and no more, as one file; made once, into the cache of this user."""
    path = CACHE / f"debian-{_SUITE}-python.tar"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _make_base(path)
    return path


def _make_base(path: Path) -> None:
    debootstrap = program("debootstrap", "debootstrap", WITHOUT)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        root, archive = Path(work) / "root", Path(work) / "tar"
        command = [debootstrap, "--variant=minbase", "--include=python3,python3-pip,ca-certificates", _SUITE, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_MAKE_S)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr}"
        for name in _LEFT_OUT:
            shutil.rmtree(root / name)
            (root / name).mkdir()
        with tarfile.open(archive, "w") as made:
            made.add(root, arcname=".", filter=_without_devices)
        archive.rename(path)


def _without_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.isdev() else member
