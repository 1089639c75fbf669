# SPDX-License-Identifier: Apache-2.0
"""postmortem: the command tells of a real process that is gone what its ring holds, and no more than that."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.sidecar.dying_engine import IDS, LIMIT, dying_engine, order
from tests.sidecar.fake_engine import FakeEngine, life
from tests.sidecar.growing_engine import PATH
from tests.sidecar.test_diagnose import clean
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import RingReader
from vllm_kvfix_sidecar import cursors, death, last_words, oom, postmortem, postmortem_text
from vllm_kvfix_sidecar.cursors import Cursor
from vllm_kvfix_sidecar.oom import Witness

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

WAIT_S = 180.0


def run(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, run as users run it."""
    command = [sys.executable, "-m", "vllm_kvfix", "postmortem", *options]
    return subprocess.run(command, env=clean(**environ), capture_output=True, text=True, check=False, timeout=WAIT_S)


def told(*options: str) -> dict[str, Any]:
    """Its JSON object."""
    done = run("--json", *options)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == found["exit_code"]
    return found


def gone(ring: Path, end: int | None = None) -> None:
    """A ring of another boot."""
    engine = FakeEngine(ring, boot=bytes(range(16)))
    engine.write(*life(1))
    if end is not None:
        engine.poke(layout.END_WORD, end)
    os.close(engine.writer._descriptor)  # and with it the lock: that of a process that was killed


def kill(process: Popen[str]) -> float:
    """End it as the kernel would; unix seconds."""
    at = time.time()
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)
    return at


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, float]:
    """The folder of its ring, its pid, and when it was killed."""
    folder = tmp_path_factory.mktemp("rings")
    with dying_engine(folder / "a.ring") as process:
        time_of = last_words.of(folder / "a.ring").header.events
        deadline = time.monotonic() + WAIT_S
        while last_words.of(folder / "a.ring").header.events < time_of + 150:
            assert time.monotonic() < deadline
        return folder, process.pid, kill(process)


class TestKilled:
    """One engine core that was killed while it worked; each test asks about it."""

    def test_the_object_says_who_when_and_how(self, dead: tuple[Path, int, float]) -> None:
        """The pid, an end without a word, at the time of the kill as seen from outside, and exit code 1."""
        folder, pid, at = dead
        found = told(f"--ring-dir={folder}")
        assert (found["process"]["pid"], found["process"]["role"]) == (pid, "engine core")
        assert (found["end"]["kind"], found["exit_code"], found["schema_version"]) == ("killed", 1, 1)
        assert abs(found["end"]["time_unix_s"] - at) < 1
        assert f"EngineCore (pid {pid}) was probably killed by the memory limit" in found["answer"]
        assert "3 requests were lost" in found["answer"]

    def test_the_last_step_is_told_and_the_pace_before_it(self, dead: tuple[Path, int, float]) -> None:
        """Its state, its time, and rows whose steps are those that lie between."""
        folder, _, at = dead
        last = told(f"--ring-dir={folder}")["last_seconds"]
        step, rows = last["last_step"], last["rows"]
        assert abs(step["time"] - at) < 1
        assert (step["running"], step["waiting"], step["free"], last["blocks"]) == (2, 1, 100, 10_000)
        assert rows[-1]["time"] == step["time"]
        assert rows[-1]["tokens"] == 32 * rows[-1]["steps"] > 0
        assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)

    def test_memory_limit_and_growth_are_told(self, dead: tuple[Path, int, float]) -> None:
        """The last figures, how they grew, the use of the limit, and the verdict as of the end, with its container."""
        found = told(f"--ring-dir={dead[0]}")
        assert found["process"]["memory"]["status"]["rss_bytes"] == 900 << 20
        assert found["grown"]["status.rss"]["last"] == 900 << 20
        assert found["grown"]["status.rss"]["seconds"] > 1000
        assert (found["use"]["limit_bytes"], found["use"]["usage_bytes"]) == (LIMIT, 1023 << 20)
        assert (found["oom"]["killed"], len(found["oom"]["evidence"])) == ("probably", 1)
        assert [culprit["path"] for culprit in found["process"]["verdict"]["culprits"]] == [PATH]
        assert PATH in [container["path"] for container in found["containers"]]

    def test_the_lost_requests_are_told_with_their_blocks(self, dead: tuple[Path, int, float]) -> None:
        """Id, state, blocks and trace of each; that of a caller is the caller's."""
        found = told(f"--ring-dir={dead[0]}")["requests"]
        by_id = {request["id"]: request for request in found["known"]}
        assert (found["lost"], found["unknown"], sorted(by_id)) == (3, 0, sorted(IDS))
        assert [by_id[one]["state"] for one in IDS] == ["running", "waiting", "waiting"]
        assert [by_id[one]["blocks"] for one in IDS] == [7, 0, 0]
        assert by_id[IDS[1]]["trace_id"] == f"{0xABC:032x}"
        assert all(0 < request["age_s"] < WAIT_S for request in found["known"])

    def test_the_text_begins_with_the_answer_and_has_every_part(self, dead: tuple[Path, int, float]) -> None:
        """One line first; then what to do, how it is known, steps, memory, growth, containers, requests, process."""
        folder, pid, _ = dead
        done = run(f"--ring-dir={folder}")
        first, *rest = done.stdout.splitlines()
        assert first.startswith(f"EngineCore (pid {pid}) was probably killed")
        assert [line for line in rest if line and not line.startswith(" ")] == [
            "What to do",
            "How it is known",
            "The last 10 seconds",
            "Memory at the end",
            "What grew",
            "Containers at the end, the largest first",
            "Requests that were not over (3)",
            "The process",
        ]
        assert "pip install vllm-kvfix" in done.stdout
        assert all(one in done.stdout for one in IDS)
        assert "\x1b" not in done.stdout

    def test_fewer_seconds_are_fewer_rows(self, dead: tuple[Path, int, float]) -> None:
        """--last 1 tells of one second."""
        assert len(told("--last=1", f"--ring-dir={dead[0]}")["last_seconds"]["rows"]) == 1

    def test_it_is_found_by_name_path_and_pid(self, dead: tuple[Path, int, float]) -> None:
        """All of them mean the same ring."""
        folder, pid, _ = dead
        path = str(folder / "a.ring")
        for options in ((path,), ("a.ring", f"--ring-dir={folder}"), (f"--pid={pid}", f"--ring-dir={folder}")):
            assert told(*options)["ring"]["path"] == path

    def test_what_a_sidecar_saw_makes_it_sure(self, dead: tuple[Path, int, float]) -> None:
        """A witness beside the ring decides: killed by the limit, or not for its memory."""
        ring = dead[0] / "a.ring"
        reader = RingReader(ring)
        for after, killed, words in ((1, "yes", "was killed by the memory limit"), (0, "no", "and not for its memory")):
            seen = Witness("/box", before=0, after=after).as_json()
            cursors.write(ring, reader.header, Cursor(1, 0, ended=True), seen)
            found = told(str(ring))
            assert found["oom"]["killed"] == killed
            assert words in found["answer"]
        cursors.path_of(ring).unlink()
        reader.close()


def test_an_end_in_order_is_no_alarm(tmp_path: Path) -> None:
    """Exit code 0, "in order", and no request counts as lost without an alarm."""
    with dying_engine(tmp_path / "a.ring") as process:
        order(process, "order")
        found = told(f"--ring-dir={tmp_path}")
        assert (found["end"]["kind"], found["exit_code"], found["oom"]["killed"]) == ("in order", 0, "no")
        assert f"(pid {process.pid}) ended in order at " in found["answer"]


def test_an_exception_is_named(tmp_path: Path) -> None:
    """Exit code 1, and the type of the exception in the answer."""
    with dying_engine(tmp_path / "a.ring") as process:
        order(process, "exception")
        found = told(f"--ring-dir={tmp_path}")
        assert (found["end"]["kind"], found["exit_code"]) == ("exception", 1)
        assert "ended by an exception at " in found["answer"]
        assert "torch.OutOfMemoryError; vLLM's log" in found["answer"]


def test_a_process_that_lives_is_sent_to_diagnose(tmp_path: Path) -> None:
    """Asked by name it says that it lives; asked for the latest there is none; exit code 2 both times."""
    with dying_engine(tmp_path / "a.ring") as process:
        done = run(str(tmp_path / "a.ring"))
        assert done.returncode == 2
        assert done.stdout.startswith(f"EngineCore (pid {process.pid}) is alive: a process holds the lock on the ring.")
        assert "`vllm-kvfix diagnose`" in done.stdout
        assert len(done.stdout.splitlines()) == 1
        latest = run(f"--ring-dir={tmp_path}")
        assert latest.returncode == 2
        assert "nothing has ended" in latest.stderr


def test_a_worker_tells_of_its_memory_alone(tmp_path: Path) -> None:
    """No steps, no requests, and no error for the want of them."""
    with dying_engine(tmp_path / "a.ring", layout.WORKER) as process:
        kill(process)
        found = told(f"--ring-dir={tmp_path}")
        assert found["process"]["name"] == "Worker"
        assert found["last_seconds"]["last_step"] is None
        assert found["requests"]["lost"] == 0
        assert "The last 10 seconds" not in run(f"--ring-dir={tmp_path}").stdout


def test_of_several_the_one_that_died_is_told(tmp_path: Path) -> None:
    """Of three that ended together, the killed engine core comes before a server that ended in order after it."""
    with (
        dying_engine(tmp_path / "core.ring") as core,
        dying_engine(tmp_path / "server.ring", layout.API_SERVER) as server,
        dying_engine(tmp_path / "live.ring"),
    ):
        kill(core)
        order(server, "order")
        assert told(f"--ring-dir={tmp_path}")["ring"]["path"] == str(tmp_path / "core.ring")
        listed = json.loads(run("--list", "--json", f"--ring-dir={tmp_path}").stdout)["rings"]
        by_name = {ring["path"].rpartition("/")[2]: (ring["state"], ring["end"]) for ring in listed}
        assert by_name == {
            "core.ring": ("ended", "running"),
            "server.ring": ("ended", "in order"),
            "live.ring": ("live", "running"),
        }
        text = run("--list", f"--ring-dir={tmp_path}").stdout
        assert re.search(rf"{core.pid} +EngineCore +killed, or crashed +.* ago .*core\.ring", text)


def test_another_boot_is_proof_enough(tmp_path: Path) -> None:
    """A ring from before a restart of the machine: ended, and it says how that is known."""
    gone(tmp_path / "a.ring")
    found = told(str(tmp_path / "a.ring"))
    assert "the machine was started anew since" in found["end"]["proof"]
    assert found["end"]["kind"] == "killed"


def test_a_release_that_says_no_end_is_not_accused(tmp_path: Path) -> None:
    """Its end word is 0: nothing is called a kill, and the exit code is 2."""
    gone(tmp_path / "a.ring", end=0)
    found = told(str(tmp_path / "a.ring"))
    assert (found["end"]["kind"], found["exit_code"]) == ("unsaid", 2)
    assert "does not say how" in found["answer"]


def test_diagnose_names_what_has_ended(tmp_path: Path) -> None:
    """Who died, whichever it was, and engine cores that ended in order, with the command; others are no news."""
    with (
        dying_engine(tmp_path / "core.ring") as core,
        dying_engine(tmp_path / "other.ring") as other,
        dying_engine(tmp_path / "server.ring", layout.API_SERVER) as server,
    ):
        kill(core)
        order(server, "order")
        order(other, "order")
        command = [sys.executable, "-m", "vllm_kvfix", "diagnose", "--for=1", f"--ring-dir={tmp_path}"]
        done = subprocess.run(command, env=clean(), capture_output=True, text=True, check=False, timeout=WAIT_S)
        said = " ".join(done.stdout.split())
        assert "2 processes have ended: see below." in done.stdout.splitlines()[0]
        assert f"EngineCore (pid {core.pid}) was killed, or crashed," in said
        assert f"`vllm-kvfix postmortem {tmp_path / 'core.ring'}`" in said
        assert f"EngineCore (pid {other.pid}) ended in order" in said
        assert f"(pid {server.pid})" not in said
        found = json.loads(
            subprocess.run(
                [*command, "--json"], env=clean(), capture_output=True, text=True, check=False, timeout=WAIT_S
            ).stdout
        )
        assert len(found["ended"]) == 2


class TestErrors:
    """Each names the cause and the next step, on standard error, with exit code 2."""

    def test_no_ring(self, tmp_path: Path) -> None:
        """The folder, and the ways to name another."""
        done = run(f"--ring-dir={tmp_path}")
        assert done.returncode == 2
        assert str(tmp_path) in done.stderr
        assert "--ring-dir" in done.stderr

    def test_no_such_file(self, tmp_path: Path) -> None:
        """The path, and --list."""
        done = run(str(tmp_path / "none.ring"))
        assert (done.returncode, done.stdout) == (2, "")
        assert "No such file" in done.stderr
        assert "--list" in done.stderr

    def test_no_ring_file(self, tmp_path: Path) -> None:
        """What it is not."""
        (tmp_path / "a.ring").write_text("hello")
        assert "is no ring file" in run(str(tmp_path / "a.ring")).stderr

    def test_errors_in_json(self, tmp_path: Path) -> None:
        """One object with the error and the exit code."""
        assert told(f"--ring-dir={tmp_path}").keys() == {"schema_version", "error", "exit_code"}

    def test_options_that_exclude_each_other(self, tmp_path: Path) -> None:
        """A RING and --latest."""
        assert "choose" in run(str(tmp_path / "a.ring"), "--latest").stderr

    def test_export_without_a_place(self, tmp_path: Path) -> None:
        """The variable to set."""
        gone(tmp_path / "a.ring")
        done = run(str(tmp_path / "a.ring"), "--export")
        assert done.returncode == 2
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" in done.stderr

    def test_export_that_nobody_takes(self, tmp_path: Path) -> None:
        """How much arrived, and what to look at."""
        gone(tmp_path / "a.ring")
        done = run(
            str(tmp_path / "a.ring"),
            "--export",
            OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
            OTEL_EXPORTER_OTLP_TIMEOUT="1",
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        )
        assert done.returncode == 2
        assert "0 arrived" in done.stderr


def test_the_help_teaches() -> None:
    """Examples and exit codes."""
    text = run("--help").stdout
    assert "exit codes:" in text
    assert "--export" in text


def test_a_time_that_no_calendar_has_is_unknown() -> None:
    """A clock offset of a liar's making gives no traceback."""
    assert death.utc(1 << 80) == death.utc(0) == "an unknown time"
    assert death.utc(1_796_050_000_120_000_000) == "2026-11-30 14:46:40.120 UTC"
    assert postmortem.IN_ORDER == 0
    assert oom.Oom.YES.value == "yes"
    assert postmortem_text.MOST_REQUESTS > 0
