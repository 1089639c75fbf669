# SPDX-License-Identifier: Apache-2.0
"""A canned process table and cgroup tree, with the files that a kernel would show."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
KIB = 1 << 10


class CannedProc:
    """A folder that looks like ``/proc``; its host has 4 GiB, half of them available, unless told otherwise."""

    def __init__(self, root: Path, total_kib: int = 4 * MIB, available_kib: int = 2 * MIB) -> None:
        self.root = root
        (root / "self").mkdir(parents=True)
        (root / "self/mountinfo").write_text("")
        (root / "self/cgroup").write_text("0::/reader\n")
        (root / "meminfo").write_text(
            f"MemTotal:       {total_kib} kB\nMemFree:  12 kB\nMemAvailable:   {available_kib} kB\n"
        )

    def add(  # noqa: PLR0913  # a process has many sides
        self,
        pid: int,
        *argv: str,
        parent: int = 1,
        name: str = "",
        start: int | None = None,
        own_pids: Sequence[int] = (),
        rss_kib: int = 1000,
        state: str = "S",
        cgroup: str | None = None,
    ) -> Path:
        """A process; ``name`` is the kernel's, else its program's; it starts at tick ``pid`` unless told otherwise."""
        folder = self.root / str(pid)
        folder.mkdir()
        called = name or (Path(argv[0]).name if argv else "kthread")[:15]
        ticks = pid if start is None else start
        fields = [str(pid), f"({called})", state, str(parent), *["0"] * 17, str(ticks), *["0"] * 30]
        (folder / "stat").write_text(" ".join(fields) + "\n")
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
        (folder / "status").write_text(
            f"Name:\t{called}\nState:\t{state} (whatever)\nPid:\t{pid}\n"
            + (f"NSpid:\t{pid}\t" + "\t".join(map(str, own_pids)) + "\n" if own_pids else f"NSpid:\t{pid}\n")
            + ("" if state == "Z" else f"VmHWM:\t {rss_kib} kB\nVmRSS:\t {rss_kib} kB\nRssAnon:\t {rss_kib} kB\n")
            + "Threads:\t3\n"
        )
        if cgroup is not None:
            (folder / "cgroup").write_text(cgroup)
        return folder

    def remove(self, pid: int) -> None:
        """It is gone."""
        shutil.rmtree(self.root / str(pid))


def cgroup_v2(path: Path, **files: str | int) -> Path:
    """A cgroup with the files of version 2: ``max=...`` is ``memory.max``."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / f"memory.{name.replace('_', '.')}").write_text(f"{text}\n")
    return path
