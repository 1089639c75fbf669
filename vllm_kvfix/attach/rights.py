# SPDX-License-Identifier: Apache-2.0
"""Whether this process may trace another one, asked without touching it; and if not, which right is missing."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_kvfix.attach.errors import AttachError, Reason

PROC = Path("/proc")
_SYS_PTRACE = 1 << 19
# CAP_CHOWN and CAP_DAC_OVERRIDE: its files are another user's.
_OTHERS_FILES = 1 << 0 | 1 << 1


def check(pid: int) -> None:
    """See that the kernel would let us.

    To open a process's memory takes the very right that ``PTRACE_ATTACH`` takes, the security modules' word included.

    Raises:
        AttachError: It would not.
    """
    folder = PROC / str(pid)
    try:
        os.close(os.open(folder / "mem", os.O_RDWR))
        (folder / "exe").readlink()
        os.listdir(folder / "root")  # noqa: PTH208  # whether it can be listed at all
    except FileNotFoundError as error:
        raise AttachError(Reason.DEAD, f"process {pid} has ended") from error
    except OSError as error:
        raise AttachError(Reason.RIGHTS, *_missing(pid)) from error


def _missing(pid: int) -> tuple[str, str]:
    """What we lack, and the command that grants it."""
    again = f"vllm-kvfix attach {pid}"
    theirs, ours = _status(pid), _status(os.getpid())
    capabilities = int(ours.get("CapEff", "0"), 16)
    capable = bool(capabilities & _SYS_PTRACE)
    same_user = set(theirs.get("Uid", "?").split()) == {str(os.geteuid())}
    if _namespace(pid, "user") not in {_namespace(os.getpid(), "user"), ""} and not capable:
        return "it is in another user namespace, where we have no rights", f"run it in that container, or sudo {again}"
    wanted = _SYS_PTRACE | _OTHERS_FILES
    if not same_user and capabilities & wanted != wanted:
        owner = theirs.get("Uid", "?").split()[0]
        lacking = "CAP_DAC_OVERRIDE and CAP_CHOWN beside CAP_SYS_PTRACE" if capable else "CAP_SYS_PTRACE"
        return (
            f"it belongs to user {owner}; we are {os.geteuid()}, without {lacking}",
            f"sudo {again} (in a container: docker exec --privileged -u 0 …, or kubectl debug --profile=sysadmin …)",
        )
    scope = _yama()
    if scope == 3:  # noqa: PLR2004  # Yama's value for never
        return "kernel.yama.ptrace_scope is 3: no process may trace another until the next boot", "restart the engine"
    if scope and not capable:
        return (
            f"kernel.yama.ptrace_scope is {scope}: without CAP_SYS_PTRACE only its own ancestors may trace it",
            f"sudo {again}, or for a while: sudo sysctl kernel.yama.ptrace_scope=0",
        )
    if same_user and not capable:
        return (
            "it is the same user's, but not dumpable: it has changed its user, or has rights that we have not",
            f"sudo {again}",
        )
    return (
        "a security module (AppArmor, SELinux) or a user namespace forbids it in spite of CAP_SYS_PTRACE",
        "see `dmesg | grep -i denied`; run it on the host, or allow ptrace for this container",
    )


def _status(pid: int) -> dict[str, str]:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _namespace(pid: int, kind: str) -> str:
    try:
        return str((PROC / str(pid) / "ns" / kind).readlink())
    except OSError:
        return ""


def _yama() -> int:
    try:
        return int((PROC / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0
