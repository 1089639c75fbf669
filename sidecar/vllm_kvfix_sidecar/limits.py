# SPDX-License-Identifier: Apache-2.0
"""Against which limit a process's memory counts: the tightest of its cgroups', or else the memory of the host."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kvfix import host
from vllm_kvfix.host import Cgroup, UnreadableError
from vllm_kvfix_sidecar.process_table import read_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

HOST, CGROUP = "host", "cgroup"
MOST_PLACES = 1024
# Version 1 says "no limit" by the largest number of whole pages below 2^63.
_NO_LIMIT = 1 << 60
_MOST_BYTES = 1 << 16
_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
_RECLAIMABLE = re.compile(rb"^slab_reclaimable ([0-9]{1,19})$", re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """Where a process's memory is charged to. ``key``: the same for all in one cgroup, another once it is made anew."""

    key: str
    cgroup: Cgroup


@dataclass(frozen=True)
class Standing:
    """How far it is to a limit, in bytes; None: not known. ``of``: ``host`` or ``cgroup``; ``limiter``: its key."""

    limit: int | None = None
    usage: int | None = None
    of: str = HOST
    limiter: str | None = None

    @property
    def room(self) -> int:
        """Bytes until the limit is reached."""
        return (self.limit or 0) - (self.usage or 0)


@dataclass(frozen=True)
class Reading:
    """One look at a cgroup. ``standing`` is None where neither it nor one above it has a limit of its own."""

    figures: Mapping[str, int] = field(default_factory=dict)
    standing: Standing | None = None
    unread: str | None = None


class Limits:
    """Finds and reads the cgroups of processes."""

    def __init__(self, proc: Path, cgroups: Path) -> None:
        """Read nothing yet.

        Args:
            proc: Where a process table is mounted.
            cgroups: Where the cgroups are mounted.
        """
        self._proc = proc
        self._cgroups = cgroups
        self._places: dict[bytes, Place] = {}

    def host(self) -> Standing:
        """The host's memory: what is not available of it counts as used."""
        try:
            memory = host.host_memory(self._proc)
        except UnreadableError:
            return Standing()
        total, available = memory.get("total"), memory.get("available")
        return Standing(total, None if total is None or available is None else max(0, total - available))

    def forget(self) -> None:
        """Cgroups may have been made anew under their names."""
        self._places.clear()

    def place(self, pid: int) -> Place:
        """The cgroup of a process.

        Raises:
            UnreadableError: It is gone, or its cgroup cannot be seen from here.
        """
        told = read_file(f"{self._proc}/{pid}/cgroup", _MOST_BYTES)
        place = self._places.get(told)
        if place is None:
            cgroup = Cgroup.of(pid, self._proc, self._cgroups)
            place = Place(_key(cgroup.path), cgroup)
            if len(self._places) < MOST_PLACES:
                self._places[told] = place
        return place

    def read(self, place: Place, host_total: int | None) -> Reading:
        """What a cgroup says, and the limit that will be reached first: its own, or of one above it that can be seen.

        Args:
            place: The cgroup.
            host_total: Bytes of memory that the host has: a limit beyond that is none.
        """
        try:
            figures = place.cgroup.read()
        except UnreadableError as error:
            return Reading(unread=str(error))
        most = float("inf") if host_total is None else host_total
        standings = [standing for standing in _standings(place.cgroup) if (standing.limit or 0) < most]
        known = [standing for standing in standings if standing.usage is not None]
        standing = min(known or standings, key=lambda standing: standing.room, default=None)
        if standing is None and figures.get("limit", most) < most:
            standing = Standing(figures["limit"], None, CGROUP)  # of one above that cannot be seen
        return Reading(figures, standing)


def _standings(cgroup: Cgroup) -> Iterator[Standing]:
    for path in (cgroup.path, *cgroup.path.parents):
        limit = _limit(path / _LIMIT_FILES[cgroup.version])
        if limit is not None:
            yield Standing(limit, _usage(Cgroup(path, cgroup.version, cgroup.top)), CGROUP, _key(path))
        if path == cgroup.top:
            return


def _limit(path: Path) -> int | None:
    try:
        text = read_file(str(path), 64).strip()
    except UnreadableError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _usage(cgroup: Cgroup) -> int | None:
    """Bytes that the kernel cannot take back; where a part is not told, all but the files that it can take back."""
    try:
        told = cgroup.read()
    except UnreadableError:
        return None
    if "anon" in told and "shmem" in told and "kernel" in told:
        return told["anon"] + told["shmem"] + max(0, told["kernel"] - _reclaimable(cgroup.path))
    if "usage" not in told:
        return None
    return max(0, told["usage"] - max(0, told.get("file", 0) - told.get("shmem", 0)))


def _reclaimable(path: Path) -> int:
    """Bytes of the kernel's own that it can take back; version 1 does not tell them."""
    try:
        found = _RECLAIMABLE.search(read_file(str(path / "memory.stat"), _MOST_BYTES))
    except UnreadableError:
        return 0
    return int(found[1]) if found else 0


def _key(path: Path) -> str:
    try:
        return f"{path}:{path.stat().st_ino}"
    except OSError:
        return f"{path}:"
