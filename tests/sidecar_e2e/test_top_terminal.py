# SPDX-License-Identifier: Apache-2.0
"""`vllm-kvfix top` in a real terminal (tmux), asking a real sidecar that follows a real ring."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.debian import program
from tests.sidecar.test_diagnose import clean, engine
from tests.sidecar_e2e.ledger import Feeder
from tests.sidecar_e2e.processes import WAIT_S, wait_until
from tests.sidecar_e2e.sidecar import Sidecar
from vllm_kvfix_sidecar.top_app import PANES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typing_extensions import Self

ENDED = "ended with"


class Terminal:
    """A terminal of tmux, on a server of its own, in which ``top`` runs, and the shell after it."""

    def __init__(self, folder: Path, *options: str, columns: int = 80, rows: int = 24) -> None:
        tmux = program("tmux", "tmux", "NO REAL TERMINAL is tried")
        self._tmux = [tmux, "-S", str(folder / "tmux.sock"), "-f", "/dev/null"]
        command = shlex.join([sys.executable, "-m", "vllm_kvfix", "top", *options])
        script = (
            f"echo before; {command}; echo {ENDED} $?; stty -a | grep -o -w -e '-\\?echo' -e '-\\?icanon'; read more"
        )
        size = ["-x", str(columns), "-y", str(rows)]
        environ = [part for name, value in clean().items() for part in ("-e", f"{name}={value}")]
        self._run("new-session", "-d", "-s", "top", *size, *environ, "/bin/sh", "-c", script)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, check=True, timeout=WAIT_S, env=clean()
        )
        return done.stdout

    def screen(self) -> list[str]:
        """The lines that are to be seen."""
        return self._run("capture-pane", "-p", "-t", "top").split("\n")[:-1]

    def text(self) -> str:
        """The same as one text, the blanks of its layout made one."""
        return " ".join(" ".join(self.screen()).split())

    def shows(self, *parts: str) -> list[str]:
        """Wait until all of that is on the screen; the screen then."""
        return self.until(lambda text: all(part in text for part in parts), f"{parts} on the screen")

    def until(self, condition: Callable[[str], object], what: str) -> list[str]:
        """Wait until the screen is so."""
        wait_until(lambda: condition(self.text()), WAIT_S, lambda: f"{what}:\n" + "\n".join(self.screen()))
        return self.screen()

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names."""
        self._run("send-keys", "-t", "top", *keys)

    def resize(self, columns: int, rows: int) -> None:
        """Make it so large."""
        self._run("resize-window", "-t", "top", "-x", str(columns), "-y", str(rows))

    def in_alternate_screen(self) -> bool:
        """Whether a program has taken the whole screen, as it gives back at its end."""
        return self._run("display-message", "-p", "-t", "top", "#{alternate_on}").strip() == "1"

    def pid(self) -> int:
        """The command's."""
        shell = self._run("display-message", "-p", "-t", "top", "#{pane_pid}").strip()
        done = subprocess.run(["/usr/bin/pgrep", "-P", shell], capture_output=True, text=True, check=True)
        return int(done.stdout)

    def is_as_before(self, code: int) -> None:
        """Wait for the end of the command: what stood there before is back, and nothing else, and keys are echoed."""
        found = self.shows("before", f"{ENDED} {code}", "icanon")
        assert not self.in_alternate_screen()
        assert [row for row in found if row][:2] == ["before", f"{ENDED} {code}"]
        assert {"-echo", "-icanon"}.isdisjoint(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run("kill-server")


@pytest.fixture
def leak(tmp_path: Path, rings: Path) -> Iterator[tuple[Sidecar, int]]:
    """A sidecar that follows an engine that leaks, and another that serves; the pid of the first."""
    with (
        Sidecar(tmp_path, rings, {}) as sidecar,
        engine(rings / "a.ring") as pid,
        Feeder(tmp_path, rings / "b.ring", "--requests", "200", "--never-end", "3", "--leaky", "--hold") as feeder,
    ):
        feeder.fed()
        yield sidecar, pid


def test_a_person_on_call_sees_the_leak_at_any_size(tmp_path: Path, leak: tuple[Sidecar, int]) -> None:
    """At 80x24 answer, table, remedy; keys and sizes work; q gives the terminal back as it was."""
    sidecar, pid = leak
    with Terminal(tmp_path, "--sidecar", f"127.0.0.1:{sidecar.port}", "--interval", "0.2") as terminal:
        rows = terminal.shows("UNBOUNDED GROWTH", f"(pid {pid}) leaks", "What to do", "q quit")
        assert (len(rows), max(map(len, rows)) <= 80) == (24, True)
        assert rows[1].startswith(" UNBOUNDED GROWTH ")
        assert any(re.match(rf" *{pid} .* unbounded", row) for row in rows)
        for number, part in enumerate(("PID", "new_block_ids", "BACKLOG", "BLOCKS", "version")):
            terminal.press(str(number + 1))
            terminal.shows(f"{number + 1} {PANES[number]}", part)
        terminal.resize(120, 40)
        rows = terminal.shows("1 Processes", "5 Sidecar", "BACKLOG", "LAST HOUR", "Evidence")
        assert max(map(len, rows)) <= 120
        terminal.resize(40, 10)
        terminal.press("1")
        rows = terminal.until(lambda text: "VERDICT" in text and "BACKLOG" not in text, "the table")
        assert max(map(len, rows)) <= 40
        assert rows[1].startswith(" UNBOUNDED GROWTH ")
        terminal.resize(20, 5)
        rows = terminal.until(lambda text: text.startswith("UNBOUNDED GROWTH") and "q quit" not in text, "the verdict")
        assert len(rows) == 5
        terminal.resize(80, 24)
        terminal.shows("1 Processes", "q quit")
        terminal.press("s")
        terminal.shows("RSS▼")
        terminal.press("p")
        terminal.shows("PAUSED")
        terminal.press("?")
        terminal.shows("Verdicts")
        terminal.press("Escape")
        terminal.until(lambda text: "Verdicts" not in text, "the help is gone")
        assert terminal.in_alternate_screen()
        terminal.press("q")
        terminal.is_as_before(0)


def test_a_sidecar_that_dies_is_said_to_be_silent(tmp_path: Path, leak: tuple[Sidecar, int]) -> None:
    """The figures stay, with a line that says since when nobody answers; Ctrl-C ends that in order."""
    sidecar, pid = leak
    with Terminal(tmp_path, "--sidecar", f"127.0.0.1:{sidecar.port}", "--interval", "0.2") as terminal:
        terminal.shows(f"(pid {pid}) leaks")
        sidecar.kill()
        rows = terminal.shows("NO ANSWER since", f"(pid {pid}) leaks")
        assert rows[1].startswith("NO ANSWER since ")
        terminal.press("C-c")
        terminal.is_as_before(0)


def test_sigterm_gives_the_terminal_back(tmp_path: Path, rings: Path) -> None:
    """Without a sidecar it watches by itself, and a signal to end leaves no trace on the terminal."""
    with engine(rings / "a.ring") as pid, Terminal(tmp_path, "--ring-dir", str(rings)) as terminal:
        terminal.shows("watching by itself", f"(pid {pid}) leaks")
        found = terminal.pid()
        subprocess.run(["/bin/kill", f"-{signal.SIGTERM.value}", str(found)], check=True)
        terminal.is_as_before(128 + signal.SIGTERM)
