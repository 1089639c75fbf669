# SPDX-License-Identifier: Apache-2.0
"""Commands in namespaces of their own, as a container runtime makes them, without one."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import ROOT
from vllm_kvfix.demo.environment import Environment, cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

TMP = Path("/tmp")  # noqa: S108  # what the namespace has another one of
_MOUNTS = "--mount --propagation=private"
_OWN_PIDS = "--pid --fork --mount-proc --kill-child"


def confining(folder: Path, visible: Path, instead: Mapping[Path, Path] | None = None, *, pids: bool) -> list[str]:
    """What runs the command that follows it in a mount namespace of its own, with an empty /tmp.

    Args:
        folder: for a script; must exist.
        visible: what of the real /tmp stays to be seen, beside the checkout, the environments and this interpreter.
        instead: by file, the one that lies in its place there.
        pids: whether it has its own process ids, too; it is then a child of what is started, which no SIGTERM ends
            and SIGKILL with it.
    """
    assert os.geteuid() == 0, "this test makes namespaces: run it as root"
    stage = folder / "stage"
    stage.mkdir()
    lines = [f"mount --bind {new} {old}" for old, new in (instead or {}).items()]
    lines += [f"mount -t tmpfs -o mode=1777 none {stage}"]
    for seen in sorted({visible, ROOT, cache_folder(), Path(sys.prefix)}):  # the outer ones first
        if seen.is_relative_to(TMP):
            place = stage / seen.relative_to(TMP)
            lines += [f"mkdir -p {place}", f"mount --bind {seen} {place}"]
    lines += [f"mount --move {stage} {TMP}"]
    inner = shlex.quote(" && ".join([*lines, 'exec "$@"']))
    options = f"{_MOUNTS} {_OWN_PIDS}" if pids else _MOUNTS
    script = folder / "confined"
    script.write_text(f'#!/bin/sh\nexec unshare {options} sh -c {inner} sh "$@"\n')
    script.chmod(0o755)
    return [str(script)]


def confined(environment: Environment, folder: Path, confining: list[str]) -> Environment:
    """The environment with a ``vllm`` that runs so."""
    program = folder / "bin/vllm"
    program.parent.mkdir()
    words = shlex.join([*confining, str(environment.path / "bin/vllm")])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    return Environment(environment.release, environment.python, folder)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are alive."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def own_pid(pid: int) -> int:
    """The id that a process has in its own namespace."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])
