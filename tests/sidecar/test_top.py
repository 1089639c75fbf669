# SPDX-License-Identifier: Apache-2.0
"""top: one frame says all that a ticket needs, the live screen fits any terminal, and no stranger's text moves it."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.sidecar.test_diagnose import NOBODY, Terminal, clean, sends, stranger
from tests.sidecar.test_report import REPORTS, leaking, of
from tests.sidecar.verdicts import BLOCK_IDS, GIB, MIB, calm, culprit, history, leak
from vllm_kvfix import cli
from vllm_kvfix_sidecar import client, report, report_text, top, top_app, top_lines, top_told, top_view, words
from vllm_kvfix_sidecar.report import MalformedReportError
from vllm_kvfix_sidecar.top_lines import Column
from vllm_kvfix_sidecar.top_told import Facts
from vllm_kvfix_sidecar.verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from textual.pilot import Pilot

    from vllm_kvfix_sidecar.report import Report
    from vllm_kvfix_sidecar.top_lines import Line
    from vllm_kvfix_sidecar.top_told import Told

WAIT_S = 180.0
KEY = "4242-1234567"
# What a terminal acts on, what turns a line round, what is wide, and what markup is made of.
NASTY = "\x1b[2J\x1b]0;x\x07\r\n\t\x00\x7f\x9b31m\u202e\u200b\u2028\ud800[red]壹é\u0301🧨"
TEXTS = st.text(st.sampled_from(NASTY) | st.characters(), max_size=60)
NUMBERS = st.integers(-(10**40), 10**40) | st.floats() | st.booleans()
JSON = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def shaped(**of: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with these keys, each there or not, and of that shape or any."""
    return st.fixed_dictionaries({}, optional={key: JSON | value for key, value in of.items()})


CONTAINER = shaped(path=TEXTS, entries=NUMBERS, size_bytes=NUMBERS, capacity_entries=NUMBERS, drain_ratio=NUMBERS)
ENGINE = shaped(
    pid=NUMBERS,
    state=TEXTS,
    patch_state=TEXTS,
    pool=shaped(limit=NUMBERS, held=NUMBERS, cached=NUMBERS),
    backlog=st.lists(NUMBERS, max_size=3),
    requests=shaped(running=NUMBERS, finished=st.dictionaries(TEXTS, NUMBERS, max_size=2)),
    ring=shaped(published=NUMBERS, dropped=NUMBERS, lost=NUMBERS),
)
REQUEST = shaped(request_id=TEXTS, trace_id=TEXTS, state=TEXTS, blocks=NUMBERS, held_s=NUMBERS, queued_s=NUMBERS)
SIDECAR = shaped(
    pid=NUMBERS,
    version=TEXTS,
    uptime_s=NUMBERS,
    cpu_ratio=NUMBERS,
    alive=st.booleans(),
    ready=st.booleans(),
    why_not=st.lists(TEXTS, max_size=2),
    spans=st.dictionaries(TEXTS, NUMBERS, max_size=3) | shaped(dropped=NUMBERS),
    destinations=shaped(traces=TEXTS),
    folders=st.lists(TEXTS, max_size=2),
)
MORE_OF_PROCESS = shaped(
    key=st.just(KEY), title=TEXTS, ended_unix_s=NUMBERS, containers=st.lists(CONTAINER, max_size=3)
)
MORE = shaped(
    answer=TEXTS,
    time_unix_s=NUMBERS,
    exit_code=st.sampled_from((0, 1, 2)),
    engines=st.lists(ENGINE, max_size=3),
    requests=st.lists(REQUEST, max_size=3),
    sidecar=SIDECAR,
    marks=st.lists(shaped(time_unix_s=NUMBERS, text=TEXTS), max_size=3),
    notes=st.lists(TEXTS, max_size=3),
    not_followed=st.dictionaries(TEXTS, TEXTS, max_size=2),
)
SERIES = shaped(t=st.lists(NUMBERS), v=st.lists(NUMBERS, max_size=100))
HISTORY = shaped(processes=st.fixed_dictionaries({KEY: shaped(memory=SERIES)}))


def now_of(told: Report, **more: object) -> dict[str, Any]:
    """A report as a page's data."""
    found = report.as_json(told, report_text.answer(told))
    for process in found["processes"]:
        process["key"] = f"{process['pid']}-1234567"
    return {**found, **more}


def read(told: Report, **more: object) -> Told:
    """The same, read."""
    return top_told.of(now_of(told, **more))


def text(lines: Sequence[Line]) -> list[str]:
    """Lines without their styles."""
    return ["".join(part for part, _ in row) for row in lines]


def frame(told: Told, width: int = 100, past: Facts | None = None) -> str:
    """A ticket."""
    return "\n".join(text(top_view.once(told, past or Facts(), width, "a test")))


def panes(told: Told, past: Facts, width: int) -> list[Line]:
    """All that can be shown, on the screen or in a ticket."""
    return [
        *top_view.once(told, past, width, "a test"),
        *top_view.banner(told, width, 2),
        *top_view.processes(told, past, width, height=3, sort=3, reverse=True, selected=KEY),
        *(row for process in told.processes for row in top_view.detail(process, past, width)),
    ]


class TestHostile:
    """Whoever answers at an address may send anything."""

    @given(JSON)
    def test_what_is_no_report_is_refused_by_one_exception(self, told: object) -> None:
        """Any JSON is read, or refused as malformed: nothing else is raised."""
        try:
            found = top_told.read(json.dumps(told).encode())
        except MalformedReportError:
            return
        assert isinstance(told, dict)
        assert found.processes == ()

    @settings(deadline=None)
    @given(
        REPORTS,
        MORE,
        st.lists(MORE_OF_PROCESS, min_size=4, max_size=4),
        HISTORY | JSON,
        st.integers(1, 30) | st.integers(31, 200),
    )
    def test_no_line_is_too_long_or_moves_the_cursor(
        self, told: Report, more: dict[str, Any], of_processes: list[dict[str, Any]], past: object, width: int
    ) -> None:
        """Whatever is in it, each character can be printed, and no line is wider than the terminal."""
        found = now_of(told, **more)
        for process, extra in zip(found["processes"], of_processes, strict=False):
            process.update(extra)
        try:
            read_back = top_told.read(json.dumps({"schema_version": 1, **found}).encode())
        except MalformedReportError:  # what was put over a list or an object that must be one
            return
        for row in panes(read_back, Facts(past), width):
            line = "".join(part for part, _ in row)
            assert line.isprintable(), repr(line)
            assert max(cell_len(line), top_lines.cells(line)) <= width, repr(line)

    @given(st.lists(st.tuples(TEXTS.map(words.clean), st.sampled_from(("", "bold red")))), st.integers(1, 80))
    def test_a_ticket_is_plain_in_any_encoding(self, row: Line, width: int) -> None:
        """Without colour there is no control character but line feeds, and ASCII is no wider than Unicode."""
        fitted = top_lines.fitted(row, width)
        for encoding in ("utf-8", "ascii", "latin-1", "no-such"):
            out = top_lines.plain([fitted, fitted], encoding, colour=False)
            assert out.count("\n") == 2
            assert all(line.isprintable() and top_lines.cells(line) <= width for line in out.split("\n"))

    def test_a_ring_of_history_cannot_be_reached_by_a_list(self) -> None:
        """A key that is no text, an object where a list should be: no figure, no exception."""
        told = read(leaking())
        for key in ([1], {"a": 1}, 7, None, True):
            raw = now_of(leaking())
            raw["processes"][0]["key"] = key
            assert "EngineCore" in frame(top_told.of(raw), past=Facts({"processes": {"memory": [1]}}))
        assert told.more.number("processes") is None


class TestFrame:
    """What a frame says."""

    def test_the_verdict_comes_first_whatever_the_width(self) -> None:
        """It stands at the begin of the first line, whole, from 20 columns on, even where one line is all there is."""
        told = read(leaking())
        for width in range(20, 200):
            assert text(top_view.banner(told, width, 1))[0].startswith(" UNBOUNDED GROWTH ")
        assert text(top_view.banner(told, 10, 1))[0].startswith(" UNBOUN")

    def test_the_answer_is_whole_where_there_is_room(self) -> None:
        """At 80 columns in six lines nothing is lost; in three the path's middle is, and the sentence's end is not."""
        told = read(leaking())
        whole = "".join(text(top_view.banner(told, 80, 6)))
        assert BLOCK_IDS in whole
        assert "…" not in whole
        short = " ".join(text(top_view.banner(told, 80, 3)))
        assert "…" in short
        assert re.search(r"scheduler\S*…\S*new_block_ids grows by 88 MiB .* 3\.1 to 4\s+days", short)

    def test_a_ticket_has_evidence_remedy_table_and_time(self) -> None:
        """All that diagnose says of a process that grows, and who said it, and when."""
        told = read(leaking(), time_unix_s=1_796_050_000.0)
        out = frame(told)
        for part in ("What to do", "pip install vllm-kvfix", "Evidence", "2026-", "a test", "PID", "3.1-4 d"):
            assert part in out, part
        assert out.count("(pid 4242) leaks:") == 1, "the answer is not repeated"

    def test_each_figure_of_the_page_is_in_it(self) -> None:
        """Engines, requests, containers, drops: as the JSON has them."""
        raw = now_of(
            leaking(),
            engines=[
                {"pid": 4242, "state": "live", "pool": {"limit": 4096, "held": 1024}, "backlog": [200_000, 67_330],
                 "patch_state": "refused", "ring": {"lost": 77, "dropped": 5},
                 "requests": {"running": 8, "waiting": 3, "finished": {"length": 400, "abort": 47}}}
            ],
            requests=[{"request_id": "cmpl-a", "blocks": 38, "held_s": 12.0, "queued_s": 0.25, "trace_id": "ab" * 16}],
            sidecar={"alive": False, "rss_bytes": 80 * MIB, "spans": {"dropped": 9}, "destinations": {"traces": "x"}},
        )  # fmt: skip
        raw["processes"][0]["containers"] = [
            {
                "path": "scheduler.other",
                "entries": 12,
                "size_bytes": 4096,
                "capacity_entries": 5000,
                "drain_ratio": 0.5,
            },
            {"path": BLOCK_IDS, "entries": 267_330, "size_bytes": 2 * MIB, "drain_ratio": 0.0},
        ]
        out = frame(top_told.of(raw), 160)
        for part in (
            "25 %", "4,096", "267,330", "447", "cmpl-a", "12 s", "250 ms", "ab" * 16, "5,000", "50 %", "80 MiB",
            "The sidecar is stuck", "5 given up by engines, 77 overwritten", "9 spans were dropped",
        ):  # fmt: skip
            assert part in out, part
        rows = [row for row in out.splitlines() if "new_block_ids " in row or "scheduler.other" in row]
        assert BLOCK_IDS in rows[-2], "the culprit stands first"

    def test_who_cannot_tell_says_what_to_do(self) -> None:
        """No process: how to find one; too short a time: how long to watch; nobody is called steady by then."""
        nobody = frame(read(of()))
        assert nobody.startswith(" CANNOT TELL  no vLLM process was found.")
        assert "vllm-kvfix status" in " ".join(nobody.split())
        raw = now_of(of((history(17), calm())), exit_code=2)
        raw["processes"][0]["watched_s"] = 5.0
        early = frame(top_told.of(raw))
        assert "too early" in early
        assert "steady" not in early

    def test_what_ended_stands_last_and_helpers_that_ended_nowhere(self) -> None:
        """An engine core that ended is dim and behind; a compiler that ended is left out."""
        raw = now_of(of((history(), leak()), (history(17), calm()), (history(18, "other", "cc1"), calm(18, "", "cc1"))))
        for process in raw["processes"]:
            process["ended_unix_s"] = None if process["pid"] == 17 else 1_796_050_000.0
        told = top_told.of(raw)
        assert [process.known.verdict.pid for process in told.processes] == [17, 4242]
        assert told.gravest is Kind.STEADY
        assert "ended" in text(top_view.processes(told, Facts(), 100))[-1]

    def test_the_table_keeps_what_matters_most(self) -> None:
        """At 80 columns of a leak all but the little chart; narrower, who and which verdict stay to the end."""
        told = read(leaking())
        head, first, *_ = text(top_view.processes(told, Facts(), 80))
        assert " ".join(head.split()) == "PID PROCESS RSS ANON+SWAP OF LIMIT GROWTH/H LEFT VERDICT PATCH"
        assert first.split()[-2:] == ["unbounded", "refused"]
        for width in range(20, 80):
            rows = text(top_view.processes(told, Facts(), width))
            assert "VERDICT" in rows[0]
            assert "unbounded" in rows[1]

    def test_rows_around_the_selected_one_are_shown(self) -> None:
        """Of many processes as many as fit, and how many do not; the selected one is among them, and is marked."""
        told = read(of(*((history(pid), calm(pid)) for pid in range(100, 140))))
        for pid in (100, 119, 139):
            lines = top_view.processes(told, Facts(), 80, height=10, selected=f"{pid}-1234567")
            assert len(lines) == 10
            (marked,) = [row for row in lines if row[0][1] == "reverse"]
            assert str(pid) in marked[0][0]
            assert text(lines)[-1] == "and 32 more"

    @pytest.mark.parametrize(
        ("column", "expected"),
        [("RSS", [2, 3, 1]), ("ANON+SWAP", [3, 2, 1]), ("PID", [1, 2, 3]), ("VERDICT", [1, 2, 3]), ("LEFT", [2, 1, 3])],
    )
    def test_it_sorts_by_what_is_asked(self, column: str, expected: list[int]) -> None:
        """Largest or soonest first, the other way round on request; what is not known stays last."""
        left = Kind.UNBOUNDED
        told = read(
            of(
                (history(1, figures={"status.rss": 1.0 * GIB, "status.anon": 1.0 * GIB}), leak(1, kind=left)),
                (history(2, figures={"status.rss": 9.0 * GIB, "status.anon": 2.0 * GIB}), leak(2, kind=Kind.BOUNDED)),
                (history(3, figures={"status.rss": 5.0 * GIB, "status.anon": 5.0 * GIB}), calm(3)),
            )
        )
        sort = [name for name, _ in top_view.SORTS].index(column)
        if column == "LEFT":
            ends = {1: 1000.0, 2: 10.0}
            for process in told.processes:
                slope = process.known.verdict.time_to_limit_s
                if slope is not None:
                    object.__setattr__(slope, "best", ends[process.known.verdict.pid])

        def pids(*, reverse: bool) -> list[int]:
            return [p.known.verdict.pid for p in top_view.ordered(told.processes, sort, reverse=reverse)]

        assert pids(reverse=False) == expected
        known = expected[:2] if column == "LEFT" else expected
        assert pids(reverse=True) == [*reversed(known), *expected[len(known) :]]

    def test_the_little_chart_rises_with_memory(self) -> None:
        """Its ends are the least and the most; what hardly moves is flat; one point is no course."""
        assert top_lines.spark([1.0, 2.0, 3.0, 8.0], 4) == "▁▂▃█"
        assert top_lines.spark([1000.0, 1001.0, 1000.0], 10) == "▁▁▁"
        assert top_lines.spark([5.0], 10) == ""
        assert len(top_lines.spark(list(map(float, range(100))), 12)) == 12
        past = Facts({"processes": {KEY: {"memory": {"t": [1, 2], "v": [GIB, 2 * GIB]}}}})
        assert "▁█  1 GiB to 2 GiB" in frame(read(leaking()), past=past)

    def test_columns_go_by_their_worth(self) -> None:
        """The least goes first, a text is shortened before that, and what is left is never parted from its head."""
        columns = (Column("KEEP", 9, right=False, least=8), Column("LESS", 1), Column("MORE", 5))
        rows: list[Line] = [[("a" * 10 + "z" * 10, ""), ("1", ""), ("2", "")]]
        assert text(top_lines.table(columns, rows, 40))[0].split() == ["KEEP", "LESS", "MORE"]
        assert text(top_lines.table(columns, rows, 20))[1].split() == ["aaa…zzzzzz", "1", "2"]
        assert text(top_lines.table(columns, rows, 14))[0].split() == ["KEEP", "MORE"]
        assert text(top_lines.table(columns, rows, 6))[1] == "aaaaa…"


# ---- the command ----


def main(*options: str, environ: dict[str, str] | None = None) -> int:
    """Run it in this process."""
    return top.main(list(options), {**NOBODY, **(environ or {})})


class TestCommand:
    """Options, output, exit codes."""

    @pytest.mark.parametrize(
        ("told", "code"), [(leaking(), 1), (of((history(17), calm())), 0), (of(), 2)], ids=["leak", "calm", "nobody"]
    )
    def test_once_ends_as_diagnose_does(self, told: Report, code: int, capsys: pytest.CaptureFixture[str]) -> None:
        """1 for an alarm, 0 for none, 2 where nobody can tell; without /api/history there is a frame, too."""

        def respond(handler: Any) -> None:
            page = client.NOW in handler.path
            sends(json.dumps(now_of(told)).encode() if page else b"{}", 200 if page else 404)(handler)

        with stranger(respond) as at:
            assert main("--once", "--sidecar", at) == code
        out = capsys.readouterr().out
        assert out.startswith((" UNBOUNDED GROWTH ", " STEADY ", " CANNOT TELL "))
        assert f"http://{at}" in out
        assert "\x1b" not in out

    def test_json_is_what_the_page_gets(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The object is printed as it came, its exit code with it."""
        sent = now_of(leaking(), engines=[{"pid": 1, "later": "key"}])
        with stranger(sends(json.dumps(sent).encode())) as at:
            assert main("--json", "--sidecar", at) == 1
        assert json.loads(capsys.readouterr().out) == sent

    @pytest.mark.parametrize(
        ("environ", "colours"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
    )
    def test_colours_are_for_terminals_that_want_them(
        self,
        monkeypatch: pytest.MonkeyPatch,
        environ: dict[str, str],
        colours: bool,  # noqa: FBT001  # a parameter
    ) -> None:
        """None under NO_COLOR, or on a terminal that cannot."""
        monkeypatch.setattr(sys, "stdout", stream := Terminal())
        with stranger(sends(json.dumps(now_of(leaking())).encode())) as at:
            main("--once", "--sidecar", at, environ=environ)
        assert ("\x1b[" in stream.getvalue()) is colours

    def test_it_is_as_wide_as_the_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """COLUMNS, or 100."""
        for columns, width in (("60", 60), (None, 100)):
            monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS")
            with stranger(sends(json.dumps(now_of(leaking())).encode())) as at:
                main("--once", "--sidecar", at)
            assert max(map(len, capsys.readouterr().out.splitlines())) == width

    @pytest.mark.parametrize("json_too", [[], ["--json"]])
    def test_a_sidecar_that_was_named_and_is_silent_is_two(
        self, json_too: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The message says who does not answer, why, and what next; JSON stays JSON; so does one that is no sidecar."""
        assert main(*(json_too or ["--once"]), "--sidecar", "127.0.0.1:1") == 2
        out, err = capsys.readouterr()
        said = json.loads(out)["error"] if json_too else err
        assert "nobody answers at http://127.0.0.1:1/api/now" in said
        assert "leave --sidecar out" in said
        with stranger(sends(b'{"schema_version": 1, "processes": [7]}')) as at:
            assert main(*(json_too or ["--once"]), "--sidecar", at) == 2
        said = "".join(capsys.readouterr())
        assert "a process is no object" in said

    def test_the_token_in_a_file_is_sent(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """For the figures and for their history; a file that holds none is exit code 2."""
        seen: list[str | None] = []

        def respond(handler: Any) -> None:
            seen.append(handler.headers["Authorization"])
            sends(json.dumps(now_of(leaking())).encode())(handler)

        (tmp_path / "token").write_text(f"{'a1' * 16}\n")
        with stranger(respond) as at:
            assert main("--once", "--sidecar", at, "--token-file", str(tmp_path / "token")) == 1
        assert seen == [f"Bearer {'a1' * 16}"] * 2
        with pytest.raises(SystemExit) as raised:
            main("--once", "--token-file", str(tmp_path / "none"))
        assert raised.value.code == 2
        assert "none cannot be read" in capsys.readouterr().err

    def test_without_a_sidecar_it_watches_by_itself(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody at the usual place: the frame says why none was asked; with --ring-dir none is asked."""
        monkeypatch.setattr(top, "ONCE_S", 0.01)
        folder = ["--ring-dir", str(tmp_path)]
        nobody = {"VLLM_KVFIX_LISTEN": "127.0.0.1:1", "VLLM_KVFIX_RING_DIR": str(tmp_path)}
        main("--once", environ=nobody)
        out = " ".join(capsys.readouterr().out.split())
        assert "watching by itself" in out
        assert "No sidecar was asked: nobody answers at http://127.0.0.1:1/api/now" in out
        with stranger(sends(json.dumps(now_of(leaking())).encode())) as at:
            main("--once", "--for", "0.01", *folder, environ={"VLLM_KVFIX_LISTEN": at})
            assert "watching by itself" in capsys.readouterr().out
            assert main("--once", environ={"VLLM_KVFIX_LISTEN": at}) == 1
        assert f"http://{at}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "options",
        [
            ["--interval", "0.1"],
            ["--interval", "nan"],
            ["--interval", "x"],
            ["--for", "5"],
            ["--once", "--for", "0"],
            ["--once", "--sidecar", "http://x", "--for", "5"],
            ["--once", "--sidecar", "ftp://x"],
            ["--onc"],
            ["more"],
        ],
    )
    def test_what_cannot_be_used_is_two(self, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """The exit code of argparse, and usage."""
        with pytest.raises(SystemExit) as raised:
            main(*options)
        assert raised.value.code == 2
        assert "usage: vllm-kvfix top" in capsys.readouterr().err

    def test_help_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Examples and exit codes."""
        with pytest.raises(SystemExit) as raised:
            cli.main(["top", "--help"])
        out = capsys.readouterr().out
        assert raised.value.code == 0
        for part in ("examples:", "exit codes of --once", "kubectl exec -it", "--sidecar", "--ring-dir", "--interval"):
            assert part in out

    def test_without_a_terminal_it_says_what_works(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Output to a file, input from none, TERM=dumb: exit code 2, and --once is named."""
        assert main() == 2
        assert "`--once`" in capsys.readouterr().err
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert main() == 2
        assert "kubectl exec -it" in capsys.readouterr().err
        monkeypatch.setattr(sys, "stdin", Terminal())
        assert main(environ={"TERM": "dumb"}) == 2
        assert "TERM=dumb" in capsys.readouterr().err

    def test_without_textual_it_says_what_to_install(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Exit code 2, the extra is named, and what works without."""
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.delitem(sys.modules, "vllm_kvfix_sidecar.top_app")
        monkeypatch.delattr("vllm_kvfix_sidecar.top_app")
        monkeypatch.setitem(sys.modules, "textual.app", None)
        assert main(environ={"TERM": "xterm"}) == 2
        said = capsys.readouterr().err
        assert "needs textual" in said
        assert "pip install 'vllm-kvfix[sidecar]'" in said
        assert "--once" in said

    def test_a_frame_needs_no_textual(self) -> None:
        """`--once` of a sidecar imports neither Textual nor OpenTelemetry nor psutil, so it is there at once."""
        code = (
            "import sys; from vllm_kvfix import cli; code = cli.main(sys.argv[1:]);"
            "print([name for name in ('textual', 'rich', 'opentelemetry', 'psutil') if name in sys.modules], code)"
        )
        with stranger(sends(json.dumps(now_of(leaking())).encode())) as at:
            done = subprocess.run(
                [sys.executable, "-c", code, "top", "--once", "--sidecar", at],
                env=clean(),
                capture_output=True,
                text=True,
                check=True,
                timeout=WAIT_S,
            )
        assert done.stdout.splitlines()[-1] == "[] 1"


# ---- the live screen ----


class Source:
    """What tells, named so: what the test wants, or nothing."""

    name = "http://a.test"

    def __init__(self, told: Told) -> None:
        self.told = told
        self.silent = ""
        self.asked = 0
        self.closed = threading.Event()

    def now(self) -> Told:
        """What is known."""
        self.asked += 1
        if self.silent:
            raise client.NoAnswerError(self.silent)
        return self.told

    def history(self) -> Facts:
        """Nothing."""
        return Facts()

    def rest(self, stop: threading.Event, seconds: float) -> None:
        """Wait."""
        stop.wait(seconds)

    def close(self) -> None:
        """The end."""
        self.closed.set()


def screen(app: top_app.Top) -> list[str]:
    """The lines that are on it."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


async def until(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    """Wait until it is true, on a screen that has settled."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "\n".join(screen(pilot.app))  # type: ignore[arg-type]  # it is a Top
        await pilot.pause(0.02)


def live(
    told: Told,
    script: Callable[[top_app.Top, Pilot[int], Source], Coroutine[Any, Any, None]],
    size: tuple[int, int] = (80, 24),
) -> tuple[top_app.Top, Source]:
    """Run the screen in a terminal of that size, and the script on it."""
    source = Source(told)
    app = top_app.Top(source, 0.05)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: any("vllm-kvfix top" in row or "GROWTH" in row for row in screen(app)))
            await until(pilot, lambda: "Waiting for" not in "\n".join(screen(app)))
            await script(app, pilot, source)
        app._stop.set()

    asyncio.run(run())
    assert source.closed.wait(WAIT_S), "the thread ends"
    return app, source


def many() -> Told:
    """A leak, and three that rest."""
    return read(of((history(), leak()), *((history(pid), calm(pid)) for pid in (17, 18, 19))))


class TestScreen:
    """The live screen, in Textual's own test terminal."""

    def test_at_80_by_24_all_that_matters_is_there_at_once(self) -> None:
        """Answer, limit, table, remedy and keys, none wider than the terminal."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:  # noqa: ARG001  # of all scripts
            await pilot.pause()
            rows = screen(app)
            assert len(rows) == 24
            assert rows[1].startswith(" UNBOUNDED GROWTH  EngineCore (pid 4242) leaks:")
            found = "\n".join(rows)
            for part in ("http://a.test", "91 %", "GROWTH/H", "APIServer", "What to do", "1 Processes", "q quit"):
                assert part in found, part

        live(many(), script)

    def test_many_processes_leave_room_for_what_to_do(self) -> None:
        """With forty processes at 80 by 24 the remedy of the gravest is still there, and how many are not shown."""
        crowd = read(of((history(), leak()), *((history(pid), calm(pid)) for pid in range(100, 140))))

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:  # noqa: ARG001  # of all scripts
            await pilot.pause()
            found = "\n".join(screen(app))
            assert "pip install vllm-kvfix" in found
            assert re.search(r"and \d+ more", found)

        live(crowd, script)

    def test_no_size_breaks_it(self) -> None:
        """From 1 by 1 to 300 by 100 it draws, the verdict is on it from 20 by 2 on, and it stays alive."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:  # noqa: ARG001  # of all scripts
            for size in ((1, 1), (20, 5), (20, 2), (5, 2), (300, 100), (120, 40), (40, 10), (80, 3), (3, 80), (80, 24)):
                await pilot.resize_terminal(*size)
                await until(pilot, lambda size=size: len(screen(app)) == size[1] and app.size == size)  # type: ignore[misc]  # a default
                if size[0] >= 20:
                    await until(pilot, lambda: any("UNBOUNDED GROWTH" in row for row in screen(app)))

        live(many(), script)

    def test_more_room_shows_all_panes(self) -> None:
        """At 120 by 40 engines, requests and the sidecar are beside the processes; at 80 by 24 one pane is shown."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:  # noqa: ARG001  # of all scripts
            await until(
                pilot, lambda: all(f"{n + 1} {name}" in "\n".join(screen(app)) for n, name in enumerate(top_app.PANES))
            )
            await until(pilot, lambda: "No request holds blocks" in "\n".join(screen(app)))
            await pilot.resize_terminal(80, 24)
            await until(pilot, lambda: "No request holds blocks" not in "\n".join(screen(app)))

        live(many(), script, (120, 40))

    def test_keys_do_what_the_help_says(self) -> None:
        """Selection, details, panes, sorting, pausing, help."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:
            def shown() -> str:
                return "\n".join(screen(app))

            await pilot.press("down", "down", "enter")
            await until(pilot, lambda: "api server 18" in shown())
            await pilot.press("escape", "up", "enter")
            await until(pilot, lambda: "api server 17" in shown())
            await pilot.press("4")
            await until(pilot, lambda: "No request holds blocks" in shown())
            await pilot.press("tab", "tab")
            await until(pilot, lambda: "GROWTH/H" in shown())
            await pilot.press("shift+tab", "shift+tab", "shift+tab")
            await until(pilot, lambda: "No engine is followed" in shown())
            await pilot.press("1", "s")
            await until(pilot, lambda: "RSS▼" in shown())
            await pilot.press("r")
            await until(pilot, lambda: "RSS▲" in shown())
            await pilot.press("question_mark")
            await until(pilot, lambda: "Verdicts" in shown())
            await pilot.press("x")
            await until(pilot, lambda: "GROWTH/H" in shown())
            await pilot.press("p")
            await until(pilot, lambda: "PAUSED" in shown())
            source.told = read(of((history(17), calm())))
            asked = source.asked
            await until(pilot, lambda: source.asked > asked + 2)
            assert "UNBOUNDED" in shown()
            await pilot.press("p")
            await until(pilot, lambda: "UNBOUNDED" not in shown() and "STEADY" in shown())

        live(many(), script)

    def test_the_selected_process_stays_selected_when_the_order_changes(self) -> None:
        """It is a process that is chosen, not a row; when it is gone, or nobody chose one, it is the gravest."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:
            await pilot.press("down", "enter")
            await until(pilot, lambda: "api server 17" in "\n".join(screen(app)))
            source.told = read(of((history(17), leak(17)), (history(18), calm(18))))
            await until(pilot, lambda: "(pid 17) leaks" in "\n".join(screen(app)))
            assert app._selected == "17-1234567"
            source.told = read(of((history(18), leak(18)), (history(19), calm(19))))
            await until(pilot, lambda: "vLLM 0.25.1" in "\n".join(screen(app)) and "core 18" in "\n".join(screen(app)))
            source.told = read(of((history(18), calm(18)), (history(19), leak(19))))
            await until(pilot, lambda: "core 19" in "\n".join(screen(app)))

        live(many(), script)

    def test_silence_is_said_with_its_cause_and_since_when(self) -> None:
        """What was known stays, under a line that says so; when there is an answer again the line goes."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:
            source.silent = "nobody answers at \x1b[31mhttp://a.test"
            await until(pilot, lambda: "NO ANSWER since " in "\n".join(screen(app)))
            found = " ".join("\n".join(screen(app)).split())
            assert re.search(r"NO ANSWER since \d\d:\d\d:\d\d", found)
            assert "nobody answers at \\x1b" in found
            assert "UNBOUNDED GROWTH" in found
            source.silent = ""
            await until(pilot, lambda: "NO ANSWER" not in "\n".join(screen(app)))

        live(many(), script)

    def test_strangers_texts_are_no_markup(self) -> None:
        """Brackets, escapes and wide letters of a container or a request are shown as they are, and escaped."""
        raw = now_of(of((history(), leak(culprits=(culprit(f"a{NASTY}"),)))), answer=f"[bold]x[/nope] {NASTY}")
        raw["requests"] = [{"request_id": f"[@click=app.quit]{NASTY}", "blocks": 1}]

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:  # noqa: ARG001  # of all scripts
            for key in "12345":
                await pilot.press(key)
                await pilot.pause()
                assert all(row.isprintable() for row in screen(app))
                assert "[bold]x[/nope]" in "\n".join(screen(app))

        live(top_told.read(json.dumps(raw).encode()), script)

    @pytest.mark.parametrize("key", ["q", "ctrl+c"])
    def test_it_ends_when_told(self, key: str) -> None:
        """By q and Ctrl-C, from the help, too; the exit code is 0."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:  # noqa: ARG001  # of all scripts
            await pilot.press("question_mark", key)
            await until(pilot, lambda: app._exit)

        app, _ = live(many(), script)
        assert app.return_value == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_ends_it_in_order(self, number: signal.Signals) -> None:
        """The screen is put back, and the exit code tells the signal."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:  # noqa: ARG001  # of all scripts
            signal.raise_signal(number)
            await until(pilot, lambda: app._exit)

        app, _ = live(many(), script)
        assert app.return_value == 128 + number

    def test_a_fault_of_ours_is_said_and_not_the_end(self) -> None:
        """What cannot be asked because of a bug is shown as silence, with what to do."""

        async def script(app: top_app.Top, pilot: Pilot[int], source: Source) -> None:
            source.now = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]  # a bug
            await until(pilot, lambda: "Please report this." in " ".join("\n".join(screen(app)).split()))

        live(many(), script)
