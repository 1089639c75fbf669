# SPDX-License-Identifier: Apache-2.0
"""The sidecar's container keeps out of vLLM's way: it holds up no start, and does not end with what runs in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.helm.test_injection import VLLM, injected, pod_of
from tests.sidecar_e2e.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_S = 120.0
# What the container would run: it notes that it was started with which words, and that it was told to end. It may tell
# the container to end itself, as its first deed, when the shell that started it has hardly gone on.
PROGRAM = """\
#!/bin/sh
trap 'echo told >> "$NOTES"; exit 0' TERM
echo "start $*" >> "$NOTES"
[ "$ENDS" ] && exit 2
[ "$TELLS" ] && kill -TERM $PPID
sleep 1000 & wait
"""


def container() -> dict[str, Any]:
    """The sidecar's, as it is injected."""
    (found,) = [made for made in injected(pod_of(VLLM))["spec"]["initContainers"] if made["name"] == "vllm-kvfix"]
    made: dict[str, Any] = found
    return made


def started(folder: Path, **environ: str) -> tuple[subprocess.Popen[bytes], Path]:
    """The container's command with its arguments, and what its program notes; it waits no ten seconds here."""
    program = folder / "vllm-kvfix"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    told = container()
    words = [word.replace("sleep 10 ", "sleep 0.05 ") for word in told["command"]]
    shell = shutil.which(words[0])
    assert shell is not None
    notes = folder / "notes"
    notes.touch()
    path = f"{folder}:{os.environ['PATH']}"
    child = subprocess.Popen(
        [shell, *words[1:], *told["args"]],
        env={**os.environ, "PATH": path, "NOTES": str(notes), **environ},
        start_new_session=True,
    )
    return child, notes


@contextlib.contextmanager
def ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave nothing of it, whatever comes."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_vllm_starts_whatever_the_sidecar_does() -> None:
    """There is no probe: one of its start would hold up vLLM's, and one that kills takes the pod out of service."""
    assert not [key for key in container() if key.endswith("Probe")]


def test_what_ends_is_started_again_in_the_same_container(tmp_path: Path) -> None:
    """With the same arguments; the container goes on, so its pod stays in service."""
    child, notes = started(tmp_path, ENDS="1")
    with ended(child):
        wait_until(lambda: len(notes.read_text().splitlines()) > 2, DEADLINE_S, "it was started thrice")
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == 0
    assert set(notes.read_text().splitlines()) == {f"start {' '.join(container()['args'])}"}


@pytest.mark.parametrize("attempt", range(20))
def test_it_ends_with_its_pod(tmp_path: Path, attempt: int) -> None:
    """SIGTERM reaches the program, however young it is, and it has its time to flush; then the container ends well."""
    del attempt  # chance decides how far the shell has come
    child, notes = started(tmp_path, TELLS="1")
    with ended(child):
        assert child.wait(DEADLINE_S) == 0
    assert notes.read_text().splitlines()[1:] == ["told"]
