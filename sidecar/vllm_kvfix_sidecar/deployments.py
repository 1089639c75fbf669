# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to a vLLM deployment, and what each is for. Pure: no clock, no files.

A deployment is a vLLM server and all its descendants. It is found by an engine that has a ring, or by how processes
call themselves: ``VLLM::EngineCore``, ``vllm serve``. An engine that no server started (an offline script) belongs to
the Python program that started it.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix.ring.layout import API_SERVER, ENGINE_CORE, WORKER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm_kvfix_sidecar.process_table import Entry, ProcessKey

CHILD = "child"
LONGEST_NAME = 40
MOST_ANCESTORS = 64

# Title of a process of vLLM's; the prefix is VLLM_PROCESS_NAME_PREFIX.
_TITLE = re.compile(r"(?:VLLM::|\w+::(?=EngineCore|APIServer|Worker|DPCoordinator|DPSupervisor))(\w+)|(VllmWorker-\d+)")
_RAY = re.compile(r"ray::(\w+).*")
_RAY_WORKER = "RayWorkerWrapper"
_PYTHON = re.compile(r"python[\d.]*")
# What a Python child runs that has no title of its own, by what stands in its command line.
_HELPERS = (
    ("multiprocessing.resource_tracker", "resource_tracker"),
    ("multiprocessing.forkserver", "forkserver"),
    ("multiprocessing.spawn", "spawning"),
    ("_inductor/compile_worker", "compile_worker"),
    ("_inductor.compile_worker", "compile_worker"),
)
_RUST_SERVER = "vllm-rs"
_ROLES = (
    ("EngineCore", ENGINE_CORE),
    ("APIServer", API_SERVER),
    ("Worker", WORKER),
    ("VllmWorker", WORKER),
    (_RAY_WORKER, WORKER),
)
NAMES = {ENGINE_CORE: "EngineCore", API_SERVER: "APIServer", WORKER: "Worker"}
_SERVING = {"serve", "run-batch", "launch"}


class Member(NamedTuple):
    """A process of a deployment. ``name`` fits a metric's attribute: no argument is in it; ``root``: the server's."""

    key: ProcessKey
    role: str
    name: str
    root: ProcessKey


def members(
    entries: Mapping[int, Entry], rings: Mapping[ProcessKey, str], most: int
) -> tuple[dict[ProcessKey, Member], int]:
    """The processes of all deployments, the engines first; and how many were left out.

    Args:
        entries: The process table by pid.
        rings: The role that its ring states, for each process that has one.
        most: Processes taken at most.
    """
    children: dict[int, list[Entry]] = {}
    seeds = []
    for entry in entries.values():
        children.setdefault(entry.parent, []).append(entry)
        if entry.key in rings or is_vllm(entry):
            seeds.append(entry)
    seeds.sort(key=lambda entry: (entry.key not in rings, entry.key.start_time))
    roots = {seed.key: root_of(seed, entries, rings) for seed in seeds}
    order = _descent(roots, entries, children)
    found = {
        entry.key: Member(entry.key, *describe(entry, entries.get(entry.parent), rings.get(entry.key)), root)
        for entry, root in order[:most]
    }
    return _name_launchers(found), max(0, len(order) - most)


def _descent(
    roots: Mapping[ProcessKey, Entry], entries: Mapping[int, Entry], children: Mapping[int, Sequence[Entry]]
) -> list[tuple[Entry, ProcessKey]]:
    """The seeds, then all descendants of their roots, near ones first; each once, with its root."""
    order = {key: (entries[key.pid], root.key) for key, root in roots.items()}
    waiting = deque((root, root.key) for root in roots.values())
    visited: set[ProcessKey] = set()
    while waiting:
        entry, root = waiting.popleft()
        if entry.key in visited:
            continue
        visited.add(entry.key)
        order.setdefault(entry.key, (entry, root))
        waiting.extend((child, root) for child in children.get(entry.key.pid, ()))
    return list(order.values())


def root_of(entry: Entry, entries: Mapping[int, Entry], rings: Mapping[ProcessKey, str]) -> Entry:
    """The outermost process of vLLM's above; for an engine without a server, the Python program that started it."""
    top = entry
    for above in _ancestors(entry, entries):
        if above.key in rings or is_vllm(above):
            top = above
    parent = entries.get(top.parent)
    if parent is None or not _is_python(parent):
        return top
    role = describe(top, parent, rings.get(top.key))[0]
    started_by_it = _title(top) is not None or top.argv == parent.argv or "multiprocessing.spawn" in " ".join(top.argv)
    return parent if role in {ENGINE_CORE, WORKER} and started_by_it else top


def _ancestors(entry: Entry, entries: Mapping[int, Entry]) -> Iterator[Entry]:
    for _ in range(MOST_ANCESTORS):  # a table that changes while it is read may hold a circle
        above = entries.get(entry.parent)
        if above is None:
            return
        yield above
        entry = above


def is_vllm(entry: Entry) -> bool:
    """Whether the process calls itself one of vLLM's, or its command starts a vLLM server."""
    text = entry.argv[0] if entry.argv else entry.name
    # Most processes have nothing of the kind, and all are asked.
    return (("::" in text or "VllmWorker" in text) and _title(entry) is not None) or _is_server(entry.argv)


def _title(entry: Entry) -> str | None:
    text = entry.argv[0].strip() if entry.argv else entry.name
    found = _TITLE.fullmatch(text)
    if found:
        return found[1] or found[2]
    ray = _RAY.fullmatch(text)
    return _RAY_WORKER if ray and ray[1] == _RAY_WORKER else None


def _is_server(argv: Sequence[str]) -> bool:
    if not any("vllm" in word for word in argv[:8]):
        return False
    words = list(argv)
    if words and _PYTHON.fullmatch(PurePosixPath(words[0]).name):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in {"-m", "-c"}:  # -u, -X dev, ...
            words = words[2 if words[0] in {"-X", "-W"} else 1 :]
        if words[:1] == ["-m"] and len(words) > 1:
            return _is_server_module(words[1], words[2:])
    is_command = bool(words) and PurePosixPath(words[0]).name == "vllm"
    return is_command and len(words) > 1 and words[1] in _SERVING


def _is_server_module(module: str, arguments: Sequence[str]) -> bool:
    if module in {"vllm", "vllm.entrypoints.cli.main"}:
        return bool(arguments) and arguments[0] in _SERVING
    return module.startswith("vllm.entrypoints.")


def _is_python(entry: Entry) -> bool:
    return bool(entry.argv) and bool(_PYTHON.fullmatch(PurePosixPath(entry.argv[0]).name))


def describe(entry: Entry, parent: Entry | None, ring_role: str | None) -> tuple[str, str]:
    """Role and name of a process of a deployment."""
    is_fork = parent is not None and entry.argv != () and entry.argv == parent.argv
    title = None if is_fork else _title(entry)
    if title is not None:
        role = next((role for beginning, role in _ROLES if title.startswith(beginning)), CHILD)
        return ring_role or role, title[:LONGEST_NAME]
    if ring_role is not None:
        return ring_role, NAMES.get(ring_role, CHILD)
    if is_fork:
        return CHILD, "fork"  # it may get a title of its own yet, or run another program
    if _is_server(entry.argv):
        return API_SERVER, NAMES[API_SERVER]
    if entry.name == _RUST_SERVER:
        return API_SERVER, _RUST_SERVER
    return CHILD, _name_of_child(entry)


def _name_of_child(entry: Entry) -> str:
    command = " ".join(entry.argv[:3])
    helper = next((name for part, name in _HELPERS if part in command), None)
    if helper is not None:
        return helper
    ray = _RAY.fullmatch(entry.argv[0].strip()) if entry.argv else None
    if ray is not None:
        return f"ray_{ray[1]}"[:LONGEST_NAME]
    # The kernel's name: the program's own, or what it calls itself; no argument, so no secret.
    return re.sub(r"[^\w.+:-]", "_", entry.name)[:LONGEST_NAME] or CHILD


def _name_launchers(found: dict[ProcessKey, Member]) -> dict[ProcessKey, Member]:
    """The process that only started the API servers is none."""
    started = {member.root for member in found.values() if member.name.startswith(("APIServer_", _RUST_SERVER))}
    for root in started & found.keys():
        if found[root].name == NAMES[API_SERVER]:
            found[root] = found[root]._replace(role=CHILD, name="launcher")
    return found
