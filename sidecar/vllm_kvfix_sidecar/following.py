# SPDX-License-Identifier: Apache-2.0
"""Keeps track of who belongs to a deployment while processes come, go, and get their names, and of whose rings are."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from vllm_kvfix.host import UnreadableError
from vllm_kvfix_sidecar import deployments
from vllm_kvfix_sidecar.once import Once
from vllm_kvfix_sidecar.process_table import ProcessTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from vllm_kvfix_sidecar.deployments import Member
    from vllm_kvfix_sidecar.process_table import Entry, ProcessKey

MOST_NAMES = 128
GONE = "no such process"
NOT_THERE = "its process is not in this process table; it may be in another PID namespace"

_log = logging.getLogger(__name__)


class Following:
    """The processes of all deployments; each :meth:`look` brings it up to date.

    A process is followed until it ends, whatever becomes of its parents. Who belongs here is found out anew only when a
    row of the table changed that has to do with it.
    """

    def __init__(self, proc: Path, clock: Callable[[], float], most: int) -> None:
        """Look at nothing yet.

        Args:
            proc: Where a process table is mounted.
            clock: Steady seconds.
            most: Processes followed at a time.
        """
        self.table = ProcessTable(proc, clock)
        self._most = most
        self._members: dict[ProcessKey, Member] = {}
        self._processes: dict[ProcessKey, ProcessKey] = {}
        self._unseen: dict[ProcessKey, str] = {}
        self._asked: dict[ProcessKey, str] = {}
        self._names: set[str] = set()
        self._once = Once(_log)

    @property
    def members(self) -> Mapping[ProcessKey, Member]:
        """Those that are followed."""
        return self._members

    @property
    def processes(self) -> Mapping[ProcessKey, ProcessKey]:
        """The process of each ring, as the table counts, by what the ring says; without those that cannot be seen."""
        return self._processes

    def why_unseen(self, ring: ProcessKey) -> str:
        """Why the process of a ring cannot be seen."""
        return self.table.fault or self._unseen.get(ring, NOT_THERE)

    def drop(self, key: ProcessKey) -> None:
        """It has ended."""
        del self._members[key]

    def look(self, rings: Mapping[ProcessKey, str]) -> None:
        """Bring all up to date.

        Args:
            rings: The role that each ring states, by its process as the ring counts.
        """
        # What is a child may start another program with the same kernel's name, as Python does.
        changed = self.table.look({key.pid for key, m in self._members.items() if m.role == deployments.CHILD})
        if self.table.fault is not None:
            self._once.warn("table", self.table.fault, f"no process's memory is told: {self.table.fault}")
        for ring, key in list(self._processes.items()):
            if ring not in rings or self._is_gone(key):
                del self._processes[ring]
        lost = rings.keys() - self._processes.keys()
        if rings == self._asked and not (lost and self.table.whole) and not self._concerns(changed, lost):
            return
        self._asked = dict(rings)
        self._unseen = {}
        for ring in lost:
            self._match(ring)
        self._find(rings)

    def _is_gone(self, key: ProcessKey) -> bool:
        return key.pid not in self.table.entries or self.table.entries[key.pid].key != key

    def _concerns(self, changed: list[Entry], lost: set[ProcessKey]) -> bool:
        """Whether a row that changed may be a member's, a child's of a member, or a ring's."""
        pids = {key.pid for key in self._members}
        starts = {ring.start_time for ring in lost}
        return any(
            entry.key.pid in pids
            or entry.parent in pids
            or entry.key.start_time in starts
            or deployments.is_vllm(entry)
            for entry in changed
        )

    def _match(self, ring: ProcessKey) -> None:
        """Find the process of a ring, or why it cannot be found.

        Its start tells it from most others; its pid in the innermost namespace that it is in must be the ring's.
        """
        found = []
        for entry in self.table.entries.values():
            if entry.key.start_time != ring.start_time:
                continue
            with contextlib.suppress(UnreadableError):
                own_pid = self.table.own_pid(entry.key.pid)
                if ring.pid == (entry.key.pid if own_pid is None else own_pid):
                    found.append(entry.key)
        if len(found) == 1:
            self._processes[ring] = found[0]
        elif found:
            self._unseen[ring] = f"{len(found)} processes fit its ring, each in a PID namespace of its own"
        else:
            self._unseen[ring] = self._why_not_there(ring)

    def _why_not_there(self, ring: ProcessKey) -> str:
        try:
            self.table.again(ring.pid)
        except UnreadableError as error:
            if str(error) != GONE:
                return str(error)
        return NOT_THERE

    def _find(self, rings: Mapping[ProcessKey, str]) -> None:
        roles = {key: rings[ring] for ring, key in self._processes.items()}
        found, left_out = deployments.members(self.table.entries, roles, self._most)
        if left_out:
            text = (
                f"the memory of {self._most} processes is told, and that of {left_out} more of the deployments is not"
            )
            self._once.warn("most", "", text)
        before, self._members = self._members, {}
        for key, member in before.items():  # those whose parents are gone, and those whose end is to be told
            if key not in found and len(found) < self._most:
                found[key] = self._renamed(member, roles.get(key))
        roots = _kept_roots(found, before)
        for key, member in found.items():
            name, root = self._bounded(member.name), roots.get(member.root, member.root)
            self._members[key] = member._replace(name=name, root=root)
            if key not in before:
                level = logging.DEBUG if member.role == deployments.CHILD else logging.INFO
                _log.log(level, "follow the memory of process %d, %s", key.pid, name)

    def _renamed(self, member: Member, ring_role: str | None) -> Member:
        if self._is_gone(member.key):
            return member
        entry = self.table.entries[member.key.pid]
        role, name = deployments.describe(entry, self.table.entries.get(entry.parent), ring_role)
        return member._replace(role=role, name=name)

    def _bounded(self, name: str) -> str:
        """Names become a metric's attribute: a program that invents ever new ones is a child like any other."""
        if len(self._names) < MOST_NAMES:
            self._names.add(name)
        return name if name in self._names else deployments.CHILD


def _kept_roots(
    found: Mapping[ProcessKey, Member], before: Mapping[ProcessKey, Member]
) -> dict[ProcessKey, ProcessKey]:
    """By the root that is found now, the root before, of those whose parents are gone: they still belong to it."""
    roots = {}
    for key, member in found.items():
        root = before.get(key, member).root
        if root != member.root and (root not in found or found[root].root != member.root):
            roots[member.root] = root
    return roots
