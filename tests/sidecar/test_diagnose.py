# SPDX-License-Identifier: Apache-2.0
"""diagnose: the command finds the process that grows, by a sidecar or by itself, and believes no answer unchecked."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import packaging
import pytest

from tests.sidecar.fake_engine import FakeEngine, step
from tests.sidecar.growing_engine import PATH
from tests.sidecar.test_report import data_of, leaking, of
from tests.sidecar.test_server import PAGES, TOKEN
from tests.sidecar.verdicts import calm, history, leak
from tests.support import ROOT
from vllm_kvfix import cli
from vllm_kvfix_sidecar import client, diagnose, report, report_text, settings
from vllm_kvfix_sidecar.bearer import TokenFile
from vllm_kvfix_sidecar.health import STALE_S, Answer
from vllm_kvfix_sidecar.server import Access, Server
from vllm_kvfix_sidecar.service import Service
from vllm_kvfix_sidecar.settings import Address
from vllm_kvfix_sidecar.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.report import Report
    from vllm_kvfix_sidecar.verdict import Verdict

MIB = 1 << 20
WAIT_S = 180.0
NOBODY = {"VLLM_KVFIX_LISTEN": "127.0.0.1:0"}


# ---- processes of their own ----


@contextlib.contextmanager
def engine(ring: Path, bytes_an_hour: float = 90 * MIB) -> Iterator[int]:
    """A process that has grown for twenty minutes, as its ring says; its pid."""
    command = [sys.executable, "-m", "tests.sidecar.growing_engine", str(ring), str(bytes_an_hour), "engine core"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.stdin.close()


def clean(**environ: str) -> dict[str, str]:
    """This environment without what would configure us, and with no sidecar at the usual place."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VLLM_", "COLUMNS"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "sidecar")])
    return {**kept, "PYTHONPATH": path, **NOBODY, **environ}


def command(*options: str) -> list[str]:
    """The command, run as users run it."""
    return [sys.executable, "-m", "vllm_kvfix", "diagnose", *options]


def run(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        command(*options), env=clean(**environ), capture_output=True, text=True, check=False, timeout=WAIT_S
    )


class TestAlone:
    """Without a sidecar, on real processes with real rings."""

    def test_the_ring_tells_who_leaks_in_seconds(self, tmp_path: Path) -> None:
        """One second is enough, since the ring holds the minutes before: who, what, bytes a request, remedy."""
        with engine(tmp_path / "a.ring") as pid:
            done = run("--for", "1", "--ring-dir", str(tmp_path), "--pid", str(pid))
        assert done.returncode == 1, done.stderr
        first = done.stdout.splitlines()[0]
        assert f"(pid {pid}) leaks: {PATH} grows by " in first
        per_request = re.search(r" ([\d.]+) bytes a request", first)
        assert per_request is not None
        assert float(per_request[1]) == pytest.approx(20 * 8, rel=0.1)
        assert "pip install vllm-kvfix" in done.stdout
        assert "\x1b" not in done.stdout
        assert done.stderr == ""

    def test_two_deployments_are_told_apart(self, tmp_path: Path) -> None:
        """Of two engines in two folders one leaks: the alarm is about that one, and the other is steady or warms up."""
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        with engine(folders[0] / "a.ring") as grows, engine(folders[1] / "a.ring", 0) as rests:
            done = run("--json", "--for", "2", *(option for at in folders for option in ("--ring-dir", str(at))))
        told = json.loads(done.stdout or done.stderr)
        found = {process["pid"]: process["verdict"] for process in told["processes"]}
        assert (done.returncode, told["exit_code"], told["schema_version"]) == (1, 1, 1)
        assert f"(pid {grows})" in told["answer"]
        assert (found[grows]["kind"], found[grows]["culprits"][0]["path"]) == ("unbounded growth", PATH)
        assert found[rests]["alarming"] is False

    def test_nothing_is_changed(self, tmp_path: Path) -> None:
        """A sidecar's cursor beside the ring, another's whose ring is gone: all files stay what they are."""
        with engine(tmp_path / "a.ring"):
            (tmp_path / "a.ring.cursor").write_text("{}")
            (tmp_path / "gone.ring.cursor").write_text("{}")
            before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
            run("--for", "1", "--ring-dir", str(tmp_path))
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_head_ends_it_quietly(self, tmp_path: Path) -> None:
        """The first line is the whole answer, nothing is said of the broken pipe, and the exit code stands."""
        with engine(tmp_path / "a.ring") as pid:
            words = " ".join(command("--for", "1", "--ring-dir", str(tmp_path), "--pid", str(pid)))
            script = f"{words} | head -n 1; exit ${{PIPESTATUS[0]}}"
            done = subprocess.run(
                ["/bin/bash", "-c", script], env=clean(), capture_output=True, text=True, check=False, timeout=WAIT_S
            )
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.count("\n") == 1
        assert f"(pid {pid}) leaks" in done.stdout
        assert done.stdout.endswith(".\n")

    def test_a_reader_that_is_gone_is_no_error(self, tmp_path: Path) -> None:
        """Nothing is said of it, and the exit code stands."""
        reader, writer = os.pipe()
        os.close(reader)
        with engine(tmp_path / "a.ring") as pid:
            options = ("--for", "1", "--ring-dir", str(tmp_path), "--pid", str(pid))
            with subprocess.Popen(
                command(*options), env=clean(), stdout=writer, stderr=subprocess.PIPE, text=True
            ) as process:
                os.close(writer)
                _, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, err) == (1, "")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_an_interrupt_prints_what_is_known(self, tmp_path: Path, number: signal.Signals) -> None:
        """On a terminal it says how long still; Ctrl-C ends that with the answer, its exit code, and no traceback."""
        with (
            engine(tmp_path / "a.ring") as pid,
            on_terminal("--for", "600", "--ring-dir", str(tmp_path), "--pid", str(pid)) as (process, terminal),
        ):
            said = read_until(terminal, b"growth")
            process.send_signal(number)
            out, _ = process.communicate(timeout=WAIT_S)
        assert re.search(rb"\r10 minutes to go, Ctrl-C: print now; \d+ process(es)?, \w+ \(pid \d+\): \w+ growth", said)
        assert process.returncode == 1
        assert f"(pid {pid}) leaks" in out.splitlines()[0]
        assert "Traceback" not in out

    def test_it_needs_no_more_than_the_plugin(self, tmp_path: Path) -> None:
        """In an image that has neither OpenTelemetry nor psutil it works."""
        bare = tmp_path / "bare"
        bare.mkdir()
        (bare / "vllm_kvfix").symlink_to(ROOT / "vllm_kvfix")
        (bare / "vllm_kvfix_sidecar").symlink_to(ROOT / "sidecar" / "vllm_kvfix_sidecar")
        (bare / "packaging").symlink_to(os.path.dirname(packaging.__file__))  # noqa: PTH120  # a string it is
        with engine(tmp_path / "a.ring") as pid:
            done = subprocess.run(
                [sys.executable, "-S", *command("--for", "1", "--ring-dir", str(tmp_path), "--pid", str(pid))[1:]],
                env=clean(PYTHONPATH=str(bare)),
                capture_output=True,
                text=True,
                check=False,
                timeout=WAIT_S,
                cwd="/",
            )
        assert (done.returncode, done.stderr) == (1, "")


@contextlib.contextmanager
def on_terminal(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command with a terminal for its errors, and that terminal's other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    try:
        with subprocess.Popen(
            command(*options), env=clean(), stdout=subprocess.PIPE, stderr=theirs, text=True
        ) as process:
            os.close(theirs)
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        os.close(ours)


def read_until(terminal: int, wanted: bytes) -> bytes:
    """What comes out of a terminal, until that came."""
    said = b""
    while wanted not in said:
        assert select.select([terminal], [], [], WAIT_S)[0], said
        said += os.read(terminal, 1000)
    return said


# ---- with a watcher that says what the test wants ----


class Watcher:
    """A watcher, named so: sees so many processes, and knows a report."""

    def __init__(self, told: Report, processes: int = 2) -> None:
        self.told = told
        self.processes = processes
        self.so_far = ""
        self.turns = 0
        self.closed = False

    def turn(self) -> None:
        """Take what there is."""
        self.turns += 1

    def report(self) -> Report:
        """What is known."""
        return self.told

    def close(self) -> None:
        """The end."""
        self.closed = True


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def alone(
    told: Report, *options: str, processes: int = 2, environ: dict[str, str] | None = None
) -> tuple[int, Watcher]:
    """Run the command in this process; its exit code and the watcher."""
    made = Watcher(told, processes)
    code = diagnose.main(["--for", "0.01", *options], {**NOBODY, **(environ or {})}, watcher=lambda _: made)
    return code, made


class TestOutput:
    """What is printed."""

    def test_the_text_is_the_reports(self, capsys: pytest.CaptureFixture[str]) -> None:
        """All of it, and how it is known; the watcher is closed."""
        code, watcher = alone(leaking())
        out = capsys.readouterr().out
        assert (code, watcher.closed) == (1, True)
        assert out.startswith(f"{report_text.answer(leaking())}\n")
        assert "Watched for under 1 second; with what the rings held, the figures reach back 60 minutes." in out

    def test_json_is_one_object(self, capsys: pytest.CaptureFixture[str]) -> None:
        """It is the report, with the exit code in it."""
        code, _ = alone(leaking(), "--json")
        told = json.loads(capsys.readouterr().out)
        assert (code, told["exit_code"], len(told["processes"])) == (1, 1, 2)
        assert report.parse(json.dumps(told).encode()).processes == leaking().processes

    @pytest.mark.parametrize(
        ("out", "environ", "colours"),
        [
            (Terminal, {}, True),
            (Terminal, {"NO_COLOR": "1"}, False),
            (Terminal, {"TERM": "dumb"}, False),
            (io.StringIO, {}, False),
        ],
    )
    def test_colours_are_for_terminals_that_want_them(
        self,
        monkeypatch: pytest.MonkeyPatch,
        out: type[io.StringIO],
        environ: dict[str, str],
        colours: bool,  # noqa: FBT001  # a parameter
    ) -> None:
        """None in a file, under NO_COLOR, on a terminal that cannot."""
        stream = out()
        monkeypatch.setattr(sys, "stdout", stream)
        alone(leaking(), environ=environ)
        assert ("\x1b[" in stream.getvalue()) is colours

    def test_a_terminal_that_knows_ascii_alone_gets_ascii(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A letter that it has no code for is written out, and is no error."""
        data = io.BytesIO()
        stream = io.TextIOWrapper(data, encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        alone(of((history(), leak(evidence=("Größe",)))))
        stream.flush()
        assert b"Gr\\xf6\\xdfe" in data.getvalue()

    def test_calm_processes_are_no_alarm(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Exit code 0."""
        code, _ = alone(of((history(), calm())))
        assert code == 0
        assert capsys.readouterr().out.startswith("Nothing grows")

    def test_who_sees_nobody_does_not_wait(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No process within FIND_S: the answer comes at once, with what to do, and is exit code 2."""
        monkeypatch.setattr(diagnose, "FIND_S", 0.0)
        code, watcher = alone(of(), "--for", "600", processes=0)
        out = capsys.readouterr().out
        assert (code, watcher.turns) == (2, 1)
        assert out.startswith("Cannot tell: no vLLM process was found.\n")
        assert "vllm-kvfix status" in out

    def test_a_machine_without_vllm_has_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An empty process table and an empty folder: the real watcher finds nothing, and says so by exit code 2."""
        monkeypatch.setattr(diagnose, "FIND_S", 0.0)
        assert diagnose.main(["--ring-dir", str(tmp_path)], NOBODY, proc=tmp_path) == 2

    def test_a_process_that_cannot_be_judged_hides_no_other(self, tmp_path: Path) -> None:
        """A fault of ours is a note; the others are told."""

        def judge(history: ProcessHistory, now: float) -> Verdict:  # noqa: ARG001  # as the real one
            if history.pid == os.getpid():
                return leak(history.pid)
            raise ValueError("x")

        FakeEngine(tmp_path / "a.ring").write(step(time.monotonic_ns()))
        with engine(tmp_path / "b.ring") as other:
            watch = Watch([tmp_path], judge=judge)
            watch.turn()
            told = watch.report()
            watch.close()
        assert [process.verdict.pid for process in told.processes] == [os.getpid()]
        assert f"Process {other} could not be judged: ValueError('x'). Please report this." in told.notes

    def test_one_process_can_be_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Only that one is told of, and only it decides the exit code."""
        code, _ = alone(leaking(), "--pid", "17")
        out = capsys.readouterr().out
        assert code == 0
        assert "4242" not in out

    def test_a_process_that_is_not_there_is_an_error(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """Exit code 2, no report; the message says whether it exists, and which ones are known; JSON stays JSON."""
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "comm").write_text("ba\x1bsh\n")
        for pid, words in (("7", r"process 7 (ba\x1bsh) is no vLLM process"), ("8", "there is no process 8 here")):
            for json_too in ([], ["--json"]):
                made = Watcher(leaking())
                options = ["--for", "0.01", "--pid", pid, *json_too]
                assert diagnose.main(options, NOBODY, watcher=lambda _, made=made: made, proc=tmp_path) == 2  # type: ignore[misc]  # a default
                out, err = capsys.readouterr()
                said = json.loads(out)["error"] if json_too else err
                assert words in said
                assert "Known are: EngineCore (pid 4242), APIServer (pid 17)." in said


class TestOptions:
    """The command line."""

    @pytest.mark.parametrize(
        "options",
        [
            ["--pid", "0"],
            ["--pid", "x"],
            ["--pid", "٣"],
            ["--pid", "99999999999"],
            ["--for", "0"],
            ["--for", "-1"],
            ["--for", "nan"],
            ["--for", "1e9"],
            ["--sidecar", "ftp://x"],
            ["--sidecar", "file:///etc/passwd"],
            ["--sidecar", "http://"],
            ["--sidecar", "http://x:0"],
            ["--sidecar", "http://x:99999"],
            ["--sidecar", "http://x y"],
            ["--sidecar", "http://[x"],
            ["--sidecar", "http://x", "--for", "5"],
            ["--sidecar", "http://x", "--ring-dir", "/x"],
            ["--js"],
            ["more"],
        ],
    )
    def test_what_cannot_be_used_is_two(self, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """The exit code of argparse, and a message that names the option; no scheme but http."""
        with pytest.raises(SystemExit) as raised:
            diagnose.main(options, NOBODY)
        assert raised.value.code == 2
        assert "usage: vllm-kvfix diagnose" in capsys.readouterr().err

    def test_a_variable_that_cannot_be_used_is_two(self, capsys: pytest.CaptureFixture[str]) -> None:
        """VLLM_KVFIX_LISTEN is the sidecar's."""
        assert diagnose.main([], {"VLLM_KVFIX_LISTEN": "nowhere"}, watcher=lambda _: Watcher(of())) == 2
        assert "--listen nowhere cannot be used" in capsys.readouterr().err

    def test_help_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Examples, exit codes, and what each verdict means."""
        with pytest.raises(SystemExit) as raised:
            cli.main(["diagnose", "--help"])
        text = capsys.readouterr().out
        assert raised.value.code == 0
        for part in ("examples:", "exit codes:", "kubectl exec", *(kind.value for kind in report_text.KIND_WORDS)):
            assert part in text

    def test_the_command_is_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """`vllm-kvfix --help` names it."""
        with pytest.raises(SystemExit):
            cli.main(["--help"])
        assert re.search(r"^ +diagnose +say which vLLM process grows", capsys.readouterr().out, re.MULTILINE)


# ---- asking a sidecar ----


@contextlib.contextmanager
def sidecar(told: Callable[[], Answer], access: Access = Access()) -> Iterator[str]:  # noqa: B008  # it is immutable
    """A sidecar's real server that gives this answer; HOST:PORT."""
    server = Server(Address("127.0.0.1", 0), PAGES._replace(diagnosis=told), access=access)
    server.start()
    try:
        yield str(server.address)
    finally:
        server.stop()


def known(told: Report) -> Callable[[], Answer]:
    """The answer of a sidecar that knows a report."""
    return lambda: Answer(good=True, body=report.as_json(told, report_text.answer(told)))


@contextlib.contextmanager
def stranger(respond: Any) -> Iterator[str]:
    """Somebody else who speaks HTTP, or nearly; HOST:PORT."""
    asked = {"do_GET": respond, "log_message": lambda *_: None}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (BaseHTTPRequestHandler,), asked))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sends(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    """Somebody who answers with that."""

    def respond(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):  # who asked has gone
            handler.send_response(status)
            for name, value in (headers or {}).items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)

    return respond


class TestSidecar:
    """What a sidecar knows."""

    def test_its_page_is_made_of_its_verdicts(self, tmp_path: Path) -> None:
        """The real service's /diagnosis is read by this command; of a sidecar that is stuck it says that it is."""
        now = time.monotonic()
        options = ["--listen", "127.0.0.1:0", "--ring-dir", str(tmp_path)]
        with engine(tmp_path / "a.ring") as pid:
            service = Service(settings.parse(options, {}), {}, clock=lambda: now)
            assert service.server is not None
            service.server.start()
            try:
                service.pipeline.poll()
                fresh = client.ask(client.url_of(str(service.server.address)))
                now += STALE_S + 1
                stuck = client.ask(client.url_of(str(service.server.address)))
            finally:
                service.close()
        assert fresh.source == "sidecar"
        assert pid in [process.verdict.pid for process in fresh.processes]
        assert (fresh.notes, stuck.notes) == ((), ("The sidecar is stuck, so this may be old: restart it.",))

    def test_it_is_asked_where_it_is_said_to_listen(self, capsys: pytest.CaptureFixture[str]) -> None:
        """VLLM_KVFIX_LISTEN says where; one that listens on all addresses is asked by loopback."""
        with sidecar(known(leaking())) as at:
            port = at.rpartition(":")[2]
            for listen in (at, f"0.0.0.0:{port}"):
                code = diagnose.main([], {"VLLM_KVFIX_LISTEN": listen}, watcher=lambda _: pytest.fail("watched"))
                out = capsys.readouterr().out
                assert code == 1
                assert out.startswith(report_text.answer(leaking()))
                assert f"As the sidecar at http://127.0.0.1:{port}/diagnosis knows it, which has watched for" in out

    def test_no_proxy_is_asked_for_loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The environment's proxy would ask its own loopback."""
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with sidecar(known(leaking())) as at:
            assert client.ask(client.url_of(at)) == leaking()

    @pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/", "http://{}/diagnosis", "http://{}#x"])
    def test_one_can_be_named(self, form: str, capsys: pytest.CaptureFixture[str]) -> None:
        """By address or URL; JSON is printed anew, from what was understood."""
        with sidecar(known(leaking())) as at:
            assert diagnose.main(["--json", "--sidecar", form.format(at)], {}) == 1
        told = json.loads(capsys.readouterr().out)
        assert [process["pid"] for process in told["processes"]] == [4242, 17]

    def test_one_that_was_named_and_is_not_there_is_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Exit code 2, and what to do; nothing is watched instead, since that one was asked for."""
        code = diagnose.main(["--sidecar", "127.0.0.1:1"], {}, watcher=lambda _: pytest.fail("watched"))
        err = capsys.readouterr().err
        assert code == 2
        assert "nobody answers at http://127.0.0.1:1/diagnosis: Connection refused" in err
        assert "vllm-kvfix sidecar" in err

    def test_one_that_wants_a_token_gets_it(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """That in the file of the option, else of the variable; none, or another, is exit code 2 and a hint."""
        right, wrong = tmp_path / "right", tmp_path / "wrong"
        right.write_text(TOKEN)
        wrong.write_text(f"{TOKEN}x")
        variable = {"VLLM_KVFIX_TOKEN_FILE": str(right)}
        with sidecar(known(leaking()), Access(lets_in=TokenFile(right).lets_in)) as at:
            assert diagnose.main(["--sidecar", at, "--token-file", str(right)], {}) == 1
            assert diagnose.main(["--sidecar", at], variable) == 1
            assert diagnose.main([], {"VLLM_KVFIX_LISTEN": at, **variable}) == 1
            capsys.readouterr()
            assert diagnose.main(["--sidecar", at], {}) == 2
            assert "/diagnosis wants a token: name the file that holds it by --token-file" in capsys.readouterr().err
            assert diagnose.main(["--sidecar", at, "--token-file", str(wrong)], variable) == 2
            assert "wants another token" in capsys.readouterr().err
        with pytest.raises(SystemExit) as raised:
            diagnose.main(["--sidecar", at, "--token-file", str(tmp_path / "none")], variable)
        assert raised.value.code == 2
        assert "none cannot be read: No such file" in capsys.readouterr().err

    @pytest.mark.parametrize("options", [["--for", "0.01"], ["--ring-dir", "/x", "--for", "0.01"]])
    def test_who_wants_to_watch_watches(self, options: list[str]) -> None:
        """Whatever a sidecar knows."""
        with sidecar(known(leaking())) as at:
            watcher = Watcher(of((history(), calm())))
            assert diagnose.main(options, {"VLLM_KVFIX_LISTEN": at}, watcher=lambda _: watcher) == 0
        assert watcher.closed

    def test_an_interrupt_before_anything_is_known_is_no_traceback(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While a sidecar is asked there is nothing to print yet: one line, and exit code 2."""

        def ask(url: str, *, token: str | None) -> Report:  # noqa: ARG001  # as the real one
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "ask", ask)
        assert diagnose.main(["--sidecar", "127.0.0.1:9464"], {}) == 2
        assert capsys.readouterr().err == "vllm-kvfix diagnose: interrupted before anything was known\n"

    def test_one_that_knows_nobody_is_no_answer(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may look elsewhere, so the command looks itself, and says so."""
        monkeypatch.setattr(diagnose, "DEFAULT_S", 0.01)
        with sidecar(known(of())) as at:
            code = diagnose.main([], {"VLLM_KVFIX_LISTEN": at}, watcher=lambda _: Watcher(leaking()))
        assert code == 1
        out = " ".join(capsys.readouterr().out.split())
        assert "/diagnosis says: Cannot tell: no vLLM process was found." in out

    @pytest.mark.parametrize(
        ("respond", "words"),
        [
            (sends(b"<html>hello</html>"), "what came is no JSON"),
            (sends(b"{}"), "schema version"),
            (sends(data_of(leaking()).replace(b'"schema_version": 1', b'"schema_version": 2')), "same release"),
            (sends(b"there are /metrics, /healthz and /readyz", 404), "answered 404"),
            (sends(b"", 302, {"Location": "http://127.0.0.1:1/"}), "answered 302"),
            (sends(b"", 301, {"Location": "file:///etc/passwd"}), "answered 301"),
            (sends(b"[" * 50_000), "no JSON"),
            (sends(b" " * (client.LARGEST_ANSWER + 2)), "larger than 8 MiB"),
            (sends(b"x", headers={"Content-Length": "1000000"}), "no JSON"),
            (sends(b"x", headers={"Content-Length": "many"}), "no JSON"),
            (sends(b"x", headers={"Transfer-Encoding": "chunked"}), "nobody answers"),
            (lambda handler: handler.wfile.write(b"HTTP/9.9 what\r\n\r\n"), "nobody answers"),
            (lambda handler: handler.wfile.write(b"a" * 100_000), "nobody answers"),
            (lambda handler: handler.connection.close(), "nobody answers"),
        ],
    )  # fmt: skip
    def test_who_is_no_sidecar_is_refused(self, respond: Any, words: str) -> None:
        """By one exception that says why: HTML, another schema, redirects, too much, what is no HTTP at all."""
        with stranger(respond) as at, pytest.raises(client.NoAnswerError, match=re.escape(words)) as raised:
            client.ask(client.url_of(at))
        assert len(str(raised.value)) < 500

    def test_who_answers_word_by_word_is_given_up(self) -> None:
        """A byte now and then does not keep the command waiting, in the headers or in the body."""
        over = threading.Event()

        def headers(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
            while not over.wait(0.05):
                with contextlib.suppress(OSError):
                    handler.wfile.write(b"X")

        def body(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            while not over.wait(0.05):
                with contextlib.suppress(OSError):
                    handler.wfile.write(b" ")

        for respond in (headers, body):
            with stranger(respond) as at:
                try:
                    with pytest.raises(client.NoAnswerError):
                        client.ask(client.url_of(at), answer_s=0.5)
                finally:
                    over.set()
            over.clear()

    def test_a_stranger_at_the_usual_place_is_watched_around(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another program may use that port: the command says so and looks itself."""
        monkeypatch.setattr(diagnose, "DEFAULT_S", 0.01)
        with stranger(sends(b"\x1b[31mhello")) as at:
            code = diagnose.main([], {"VLLM_KVFIX_LISTEN": at}, watcher=lambda _: Watcher(leaking()))
        out = capsys.readouterr().out
        assert code == 1
        assert "No sidecar was asked: what answers at" in " ".join(out.split())
        assert "\x1b" not in out


@pytest.fixture(autouse=True)
def _all_is_as_before() -> Iterator[None]:
    """The command gives back the signal handlers that it found."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
