# SPDX-License-Identifier: Apache-2.0
"""What the memory controller of a process's cgroup says, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix.host import procfs
from vllm_kvfix.host.errors import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOUNTS = Path("/sys/fs/cgroup")
V1, V2 = 1, 2

# Version 1 says "no limit" by the largest number of whole pages below 2^63, which differs with the page's size.
_NO_LIMIT = 1 << 60
_NUMBER = re.compile(rb"[0-9]{1,19}\n?")
_PAIR = re.compile(rb"^(\w+) ([0-9]{1,19})$", re.MULTILINE)
_PRESSURE = re.compile(rb"^(some|full) .*\btotal=([0-9]{1,19})$", re.MULTILINE)
# Our name of a figure, and the name in memory.stat, memory.events or of a file.
_V2_FILES = {"usage": "memory.current", "swap": "memory.swap.current"}
_V2_STAT = {"anon": b"anon", "file": b"file", "shmem": b"shmem", "kernel": b"kernel"}
# What "kernel" is the sum of, for kernels before 5.18, which do not say it.
_V2_KERNEL = (b"slab", b"kernel_stack", b"pagetables", b"sec_pagetables", b"percpu", b"vmalloc")
_V2_EVENTS = {"oom_count": b"oom", "oom_kill_count": b"oom_kill", "high_count": b"high", "max_count": b"max"}
_V1_FILES = {"usage": "memory.usage_in_bytes", "kernel": "memory.kmem.usage_in_bytes", "max_count": "memory.failcnt"}
# "cache" holds shared memory as well, like "file" of version 2.
_V1_STAT = {"anon": b"rss", "file": b"cache", "shmem": b"shmem", "swap": b"swap"}


@dataclass(frozen=True)
class Cgroup:
    """A cgroup: its folder ``path``, the ``version`` of its memory controller, the ``top`` folder that can be seen."""

    path: Path
    version: int
    top: Path

    @classmethod
    def of(cls, pid: int | str = "self", proc: Path = procfs.PROC, mounts: Path = MOUNTS) -> Cgroup:
        """The cgroup that a process's memory is charged to.

        Args:
            pid: The process.
            proc: The process table.
            mounts: Where version 2 is mounted, or the folder that holds a mount of each controller of version 1.

        Raises:
            UnreadableError: There is no such process, it may not be read, or its cgroup cannot be seen from here.
        """
        paths = _memberships(pid, proc)
        version = V1 if V1 in paths and (mounts / "memory").is_dir() else V2
        if version not in paths:
            raise UnreadableError("it is in no cgroup whose memory controller can be seen")
        top = mounts / "memory" if version == V1 else _top_of_v2(mounts)
        path = _folder(paths[version], version, top, proc)
        return cls(_charged(path, top) if version == V2 else path, version, top)

    def read(self) -> dict[str, int]:
        """What the controller says now, by the names of ``SCOPES["cgroup"]``.

        ``limit`` and ``high`` are the lowest of this cgroup and of those above it as far as they can be seen, although
        what other members of those use counts there as well.

        Raises:
            UnreadableError: The cgroup is gone, it may not be read, or it has no memory controller.
        """
        found = _read_v1(self.path) if self.version == V1 else self._read_v2()
        if not found:
            raise UnreadableError(_why_nothing(self.path))
        return found

    def _read_v2(self) -> dict[str, int]:
        found = _numbers(self.path, _V2_FILES)
        for name, file in (("limit", "memory.max"), ("high", "memory.high")):
            limits = [value for level in self._levels() if (value := _number(level / file)) is not None]
            if limits:
                found[name] = min(limits)
        stat = _pairs(self.path / "memory.stat")
        found.update(_chosen(stat, _V2_STAT))
        parts = [stat[part] for part in _V2_KERNEL if part in stat]
        if parts:
            found.setdefault("kernel", sum(parts))
        found.update(_chosen(_pairs(self.path / "memory.events"), _V2_EVENTS))
        pressure = _PRESSURE.findall(_text(self.path / "memory.pressure"))
        found.update({f"psi_{kind.decode()}_us": int(total) for kind, total in pressure})
        return found

    def _levels(self) -> Iterator[Path]:
        for level in (self.path, *self.path.parents):
            yield level
            if level == self.top:
                return


def _read_v1(path: Path) -> dict[str, int]:
    found = _numbers(path, _V1_FILES)
    stat = _pairs(path / "memory.stat")
    # With the cgroups below it, as in usage, unless the hierarchy is switched off.
    found.update(_chosen(stat, _V1_STAT))
    found.update(_chosen(stat, {name: b"total_" + key for name, key in _V1_STAT.items()}))
    found.update(_numbers(path, {"limit": "memory.limit_in_bytes"}))
    # The lowest of this cgroup and of those above it, also of those that cannot be seen.
    found.update(_chosen(stat, {"limit": b"hierarchical_memory_limit"}))
    if found.get("limit", 0) >= _NO_LIMIT:
        del found["limit"]
    found.update(_chosen(_pairs(path / "memory.oom_control"), {"oom_kill_count": b"oom_kill"}))
    return found


def _memberships(pid: int | str, proc: Path) -> dict[int, str]:
    """The paths of the cgroups of a process that can have a memory controller, by version."""
    found = {}
    for line in os.fsdecode(procfs.read(pid, "cgroup", proc)).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            found[V1] = path
        elif number == "0" and not controllers:
            found[V2] = path
    return found


def _top_of_v2(mounts: Path) -> Path:
    """Where version 2 is mounted: beside controllers of version 1 it has a folder of its own."""
    unified = mounts / "unified"
    return unified if unified.is_dir() and not (mounts / "cgroup.controllers").exists() else mounts


def _folder(path: str, version: int, top: Path, proc: Path) -> Path:
    """The folder of the cgroup ``path`` under the mount ``top``.

    A container's mount may begin at the container's own cgroup while the process table tells paths from the machine's
    root on.
    """
    if path.endswith(" (deleted)"):
        raise UnreadableError("its cgroup was removed")
    parts = [part for part in path.split("/") if part]
    if ".." not in parts:
        if top.joinpath(*parts).is_dir():
            return top.joinpath(*parts)
        with contextlib.suppress(UnreadableError):  # the reader itself may be missing from another machine's table
            folder = _below_root(path, top, proc)
            if folder is not None and folder.is_dir():
                return folder
            if _memberships("self", proc).get(version) == path:
                return top
    raise UnreadableError(f"its cgroup {path} cannot be seen under {top}")


def _below_root(path: str, top: Path, proc: Path) -> Path | None:
    """The folder of the cgroup ``path`` where ``top`` shows not the root but a cgroup above it; None: it does not."""
    for line in os.fsdecode(procfs.read("self", "mountinfo", proc)).splitlines():
        fields = line.split(" ")
        if len(fields) > 4 and fields[4] == str(top) and f"{path}/".startswith(f"{fields[3]}/"):  # noqa: PLR2004
            return top.joinpath(*path[len(fields[3]) :].split("/"))
    return None


def _charged(path: Path, top: Path) -> Path:
    """The nearest cgroup, from ``path`` upwards, that has the controller: it bears what those below it use."""
    while path != top and not (path / "memory.stat").exists():
        path = path.parent
    return path


def _why_nothing(path: Path) -> str:
    try:
        (path / "memory.stat").read_bytes()
    except PermissionError:
        return "permission denied"
    except OSError:
        pass
    return "its cgroup has no memory controller" if path.is_dir() else "its cgroup was removed"


def _text(path: Path) -> bytes:
    """A file's text; empty where this kernel has none, or does not keep it."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if _NUMBER.fullmatch(text) else None


def _numbers(path: Path, files: Mapping[str, str]) -> dict[str, int]:
    return {name: value for name, file in files.items() if (value := _number(path / file)) is not None}


def _pairs(path: Path) -> dict[bytes, int]:
    return {key: int(value) for key, value in _PAIR.findall(_text(path))}


def _chosen(pairs: Mapping[bytes, int], names: Mapping[str, bytes]) -> dict[str, int]:
    return {name: pairs[key] for name, key in names.items() if key in pairs}
