# SPDX-License-Identifier: Apache-2.0
"""report: what is said of processes is true to the verdicts, in JSON and in words; what is read is checked first."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sidecar.verdicts import (
    ACTION,
    BLOCK_IDS,
    DAY,
    GIB,
    MIB,
    PULL,
    calm,
    culprit,
    history,
    leak,
    series,
)
from vllm_kvfix.events import CATEGORIES, SCOPES
from vllm_kvfix_sidecar import report, report_text
from vllm_kvfix_sidecar.observed import Limit
from vllm_kvfix_sidecar.remedies import Remedy
from vllm_kvfix_sidecar.report import (
    ALARMING,
    CANNOT_TELL,
    NOTHING_ALARMING,
    MalformedReportError,
    ProcessReport,
    Report,
    Usage,
    parse,
)
from vllm_kvfix_sidecar.verdict import Culprit, Interval, Kind, Verdict

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.observed import ProcessHistory

NOW = 1_796_050_000.0
NUMBERS = st.floats(-(2.0**60), 2.0**60) | st.integers(0, 1 << 60)
INTERVALS = st.builds(Interval, NUMBERS, NUMBERS, NUMBERS | st.just(math.inf))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
PER = st.dictionaries(st.sampled_from(("request", "abort", "block")), NUMBERS, max_size=3)
CULPRITS = st.builds(
    Culprit,
    path=TEXTS,
    bytes_per_hour=NUMBERS,
    per=PER,
    follows=st.none() | st.sampled_from(("request", "time")),
    capacity=st.none() | st.integers(0, 1 << 40),
    why=TEXTS,
    full_bytes=st.none() | NUMBERS,
    full_in_s=st.none() | NUMBERS,
)
VERDICTS = st.builds(
    Verdict,
    pid=st.integers(1, 1 << 22),
    role=TEXTS,
    name=TEXTS,
    kind=st.sampled_from(Kind),
    category=st.none() | st.sampled_from((*CATEGORIES, "anon", "strange")),
    culprits=st.lists(CULPRITS, max_size=3).map(tuple),
    slope=st.none() | INTERVALS,
    per=st.none() | PER,
    follows=st.none() | TEXTS,
    explained=st.none() | st.floats(0, 1),
    time_to_limit_s=st.none() | INTERVALS,
    evidence=st.lists(TEXTS, max_size=3).map(tuple),
    remedy=st.none() | st.builds(Remedy, TEXTS, st.none() | TEXTS, st.none() | TEXTS),
    window_s=st.floats(0, 1e9),
)
FIGURES = st.dictionaries(
    st.sampled_from([f"{scope}.{name}" for scope, names in SCOPES.items() for name in names]), st.integers(0, 1 << 50)
)
PROCESSES = st.builds(
    ProcessReport,
    verdict=VERDICTS,
    figures=FIGURES,
    usage=st.none() | st.builds(Usage, st.floats(0, 2.0**60), st.none() | st.floats(0, 2.0**60), TEXTS),
    unread=st.dictionaries(st.sampled_from(tuple(SCOPES)), TEXTS),
    vllm_version=TEXTS,
    patch_state=TEXTS,
    watched_s=st.floats(0, 1e9),
)
REPORTS = st.builds(
    lambda processes, notes, not_followed: report.make(processes, NOW, notes=tuple(notes), not_followed=not_followed),
    st.lists(PROCESSES, max_size=4),
    st.lists(TEXTS, max_size=2),
    st.dictionaries(TEXTS, TEXTS, max_size=2),
)


def of(*judged: tuple[ProcessHistory, Verdict]) -> Report:
    """The report of these."""
    return report.make([report.of(*pair) for pair in judged], NOW)


def leaking() -> Report:
    """An engine core that leaks, and an API server that does not grow."""
    return of((history(17, "api server", "VLLM::APIServer"), calm()), (history(), leak()))


def unexplained(**changed: object) -> Verdict:
    """An API server that grows for no known cause."""
    return replace(calm(kind=Kind.UNEXPLAINED, slope=Interval(1, 50 * MIB, 2)), **changed)  # type: ignore[arg-type]  # each field has its own type


def filling(path: str) -> Culprit:
    """A cache that is full after 300 MiB more, in five hours."""
    return culprit(path, capacity=100, full_bytes=300.0 * MIB, full_in_s=18000.0)


def data_of(told: Report) -> bytes:
    """As it is sent."""
    return json.dumps(report.as_json(told, report_text.answer(told))).encode()


def json_of(told: Report) -> Any:
    """As it is read by whoever reads JSON."""
    return json.loads(data_of(told))


class TestMade:
    """From histories and verdicts."""

    def test_the_latest_figures_are_told(self) -> None:
        """Of each series the last value; anonymous memory has the swapped part with it."""
        told = report.of(history(figures={"status.anon": 4 * GIB, "status.swap": GIB, "status.rss": 6 * GIB}), leak())
        assert told.figures == {"status.anon": 4 * GIB, "status.swap": GIB, "status.rss": 6 * GIB}
        assert told.memory == 5 * GIB
        assert told.watched_s == 3600
        assert told.usage == Usage(16 * GIB, 14.56 * GIB)
        assert told.usage.share == pytest.approx(0.91)

    def test_what_was_not_read_is_missing(self) -> None:
        """No figure, no limit: no number, not 0."""
        told = report.of(history(figures={"smaps.rss": 1}, limit=None, unread={"status": "no such process"}), calm())
        assert told.memory is None
        assert told.usage is None
        only = json_of(of((history(memory={}, limit=None), calm())))["processes"][0]
        assert (only["memory"], only["limit"], only["verdict"]["slope_bytes_per_hour"]) == ({}, None, None)

    def test_a_limit_without_an_end_is_none(self) -> None:
        """What is infinite is no limit, and JSON has no word for it."""
        assert report.of(history(limit=Limit(math.inf, series(1))), calm()).usage is None

    def test_the_gravest_is_the_first(self) -> None:
        """Unbounded before unexplained before the others; the sooner the limit, then the faster, the graver."""
        soon = leak(2, time_to_limit_s=Interval(1, 2, 3))
        kinds = [calm(10 + at, kind=kind) for at, kind in enumerate(Kind)]
        slow = leak(3, slope=Interval(1, 2, 3))
        told = of(*((history(), verdict) for verdict in (*kinds, slow, leak(1), soon)))
        assert [process.verdict.pid for process in told.processes[:3]] == [2, 1, 3]
        found = [process.verdict.kind for process in told.processes[3:]]
        assert found == [Kind.UNBOUNDED, Kind.UNEXPLAINED, Kind.RETAINED, Kind.BOUNDED, Kind.WARMING, Kind.STEADY]

    def test_no_more_is_made_than_can_be_read_again(self) -> None:
        """A report of more processes, culprits, evidence and files than anybody has is cut, and is readable."""
        many = leak(culprits=(culprit(),) * 300, evidence=("x",) * 300)
        process = report.of(history(), many)
        made = report.make([process] * 1500, NOW, not_followed={f"/{n}": "no ring" for n in range(300)})
        read = parse(data_of(made))
        assert len(read.processes) == report.MOST_PROCESSES
        assert len(read.not_followed) == len(read.processes[0].verdict.culprits) == report.MOST_PARTS


class TestExitCode:
    """0, 1, 2."""

    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            (Kind.STEADY, NOTHING_ALARMING),
            (Kind.WARMING, NOTHING_ALARMING),
            (Kind.BOUNDED, NOTHING_ALARMING),
            (Kind.RETAINED, NOTHING_ALARMING),
            (Kind.UNBOUNDED, ALARMING),
            (Kind.UNEXPLAINED, ALARMING),
        ],
    )
    def test_it_is_one_for_what_has_no_end(self, kind: Kind, code: int) -> None:
        """One such process among calm ones is enough."""
        assert of((history(17), calm()), (history(), calm(4242, kind=kind))).exit_code == code

    def test_nothing_known_is_two(self) -> None:
        """No process, none that can be read, or figures of less than a minute: nothing was told, so nothing is said."""
        short = {"status.anon": series(1, 2, every=30.0)}
        for told in (of(), of((history(memory={}), calm())), of((history(memory=short), calm()))):
            assert told.exit_code == CANNOT_TELL
            assert report_text.answer(told).startswith("Cannot tell: ")
        assert of((history(memory=short), calm()), (history(), calm())).exit_code == NOTHING_ALARMING

    def test_an_alarm_needs_no_minute(self) -> None:
        """Whoever judged had reasons."""
        assert of((history(memory={"status.anon": series(1, 2, every=30.0)}), leak())).exit_code == ALARMING


class TestJson:
    """The form that is sent."""

    def test_its_keys_have_their_units(self) -> None:
        """What somebody's script stands on."""
        told = json_of(leaking())
        assert (told["schema_version"], told["exit_code"], told["source"]) == (1, 1, "watch")
        assert told["answer"] == report_text.answer(leaking())
        first, second = told["processes"]
        assert (first["pid"], first["role"], first["vllm_version"]) == (4242, "engine core", "0.25.1")
        assert first["memory"]["status"] == {"rss_bytes": int(9.5 * GIB), "anon_bytes": 9 * GIB, "swap_bytes": 0}
        assert first["limit"] == {"limit_bytes": 16 * GIB, "usage_bytes": 14.56 * GIB, "of": "cgroup"}
        verdict = first["verdict"]
        assert (verdict["kind"], verdict["alarming"], verdict["category"]) == ("unbounded growth", True, "heap")
        assert verdict["slope_bytes_per_hour"] == {"low": 85 * MIB, "best": 90 * MIB, "high": 95 * MIB}
        assert verdict["time_to_limit_s"]["best"] == 3.5 * DAY
        assert (verdict["follows"], verdict["explained_ratio"], verdict["window_s"]) == ("request", 0.98, 3600)
        (owner,) = verdict["culprits"]
        assert (owner["path"], owner["bytes_per"]["request"], owner["capacity_entries"]) == (BLOCK_IDS, 154.2, None)
        assert verdict["remedy"] == {"action": ACTION, "issue": PULL, "fixed_in": "0.26.0"}
        assert second["verdict"]["alarming"] is False

    def test_counts_and_times_are_not_called_bytes(self) -> None:
        """The unit is that of the figure."""
        told = report.of(
            history(figures={"status.threads_count": 9, "cgroup.psi_some_us": 7, "malloc.retained": 5}), calm()
        )
        memory = json_of(report.make([told], NOW))["processes"][0]["memory"]
        assert memory == {"status": {"threads_count": 9}, "cgroup": {"psi_some_us": 7}, "malloc": {"retained_bytes": 5}}

    @settings(deadline=None)
    @given(REPORTS)
    def test_it_is_read_as_it_was_made(self, told: Report) -> None:
        """Every field of every report comes back; what is infinite has no end again."""
        assert parse(data_of(told)) == told

    @settings(deadline=None)
    @given(REPORTS)
    def test_it_is_json_that_everybody_reads(self, told: Report) -> None:
        """No NaN and no Infinity, which other languages do not know."""
        json.loads(data_of(told), parse_constant=pytest.fail)

    def test_more_keys_are_no_fault(self) -> None:
        """A later release may tell more."""
        told = json_of(leaking())
        told["new"] = told["processes"][0]["new"] = told["processes"][0]["verdict"]["new"] = [1]
        told["processes"][0]["memory"]["new"] = {"x_bytes": 1}
        assert parse(json.dumps(told).encode()) == leaking()


def broken(path: str, value: object) -> bytes:
    """A report with one value replaced; ``path`` in dots."""
    told = json_of(leaking())
    *way, last = path.split(".")
    at = told
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(told).encode()


class TestHostile:
    """Answers of whoever answers."""

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xff\xfe",
            b"null",
            b"[]",
            b"{}",
            b"<html>",
            b"[" * 100_000,
            b'{"schema_version": 1, "processes": {}}',
            b'{"schema_version": 1, "processes": [], "notes": [], "time_unix_s": NaN, "source": "", "tool": ""}',
            b'{"schema_version": 1, "processes": [1]}',
            b'{"schema_version": ' + b"9" * 5000 + b"}",
        ],
    )
    def test_what_is_no_report_is_refused(self, data: bytes) -> None:
        """By one exception, whatever it is."""
        with pytest.raises(MalformedReportError):
            parse(data)

    @pytest.mark.parametrize("version", [0, 2, True, "1", None, "x" * 10_000])
    def test_another_schema_is_refused_with_what_to_do(self, version: object) -> None:
        """The message says which one is known, and is short."""
        with pytest.raises(MalformedReportError, match="use the same release") as raised:
            parse(broken("schema_version", version))
        assert len(str(raised.value)) < 200

    @pytest.mark.parametrize(
        "path",
        [
            "time_unix_s",
            "processes.0.pid",
            "processes.0.watched_s",
            "processes.0.limit.limit_bytes",
            "processes.0.memory.status.rss_bytes",
            "processes.0.verdict.window_s",
            "processes.0.verdict.explained_ratio",
            "processes.0.verdict.slope_bytes_per_hour.best",
            "processes.0.verdict.bytes_per.request",
            "processes.0.verdict.culprits.0.bytes_per_hour",
            "processes.0.verdict.culprits.0.capacity_entries",
        ],
    )
    @pytest.mark.parametrize("value", ["1", True, [], {}, 1e308 * 10, 10**400, -(1 << 200)])
    def test_a_number_is_a_number_that_can_be_counted_with(self, path: str, value: object) -> None:
        """No text, no truth, no list; nothing infinite, nothing that no float can hold."""
        with pytest.raises(MalformedReportError):
            parse(broken(path, value))

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("processes", [{}] * 2000),
            ("processes.0.verdict.evidence", ["x"] * 300),
            ("processes.0.verdict.evidence", "one text"),
            ("processes.0.verdict.evidence", [["x"]]),
            ("processes.0.verdict.kind", "fine"),
            ("processes.0.verdict.kind", ["steady"]),
            ("processes.0.verdict.culprits", {"0": {}}),
            ("processes.0.verdict.remedy", "pip install"),
            ("processes.0.verdict.slope_bytes_per_hour", 7),
            ("processes.0.unread", {str(n): "x" for n in range(300)}),
            ("processes.0.unread", {"status": 1}),
            ("processes.0.name", None),
            ("processes.0.memory", []),
            ("processes.0.memory.status", [1]),
            ("processes.0.verdict", None),
            ("not_followed", ["/x"]),
            ("notes", None),
        ],
    )
    def test_each_part_is_of_its_kind_and_bounded(self, path: str, value: object) -> None:
        """Lists are lists, objects objects, and none has more parts than anybody needs."""
        with pytest.raises(MalformedReportError):
            parse(broken(path, value))

    @settings(deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_no_json_does_anything_but_be_refused(self, told: object) -> None:
        """Whatever JSON in the place of a process: refused, and nothing else."""
        with pytest.raises(MalformedReportError):
            parse(broken("processes", [told]))

    def test_a_long_text_is_cut(self) -> None:
        """A sentence of a megabyte is not one."""
        read = parse(broken("processes.0.verdict.remedy.action", "x" * (1 << 20)))
        assert read.processes[0].verdict.remedy is not None
        assert len(read.processes[0].verdict.remedy.action) == report.LONGEST_TEXT

    @settings(deadline=None)
    @given(st.text(max_size=20).filter(lambda text: not text.isprintable()))
    def test_no_text_of_a_stranger_reaches_a_terminal_as_it_is(self, evil: str) -> None:
        """Whatever stands in names, paths, reasons and notes: each line that is printed is printable."""
        verdict = leak(
            name=evil,
            role=evil,
            category=evil,
            follows=evil,
            culprits=(culprit(evil, follows=evil, per={evil: 1.0}, why=evil),),
            evidence=(evil,),
            remedy=Remedy(evil, evil, evil),
        )
        process = replace(report.of(history(unread={evil: evil}), verdict), usage=Usage(1.0, 1.0, evil))
        told = report.make([process], NOW, notes=(evil,), not_followed={evil: evil})
        for line in report_text.text(told).split("\n"):
            assert line.isprintable()
        assert json.dumps(report.as_json(told, report_text.answer(told))).isprintable()


class TestWords:
    """For a person."""

    def test_a_leak_is_said_in_one_sentence(self) -> None:
        """Who, what, how fast, per what, and when the limit is reached."""
        answer = report_text.answer(leaking())
        assert answer == (
            f"EngineCore (pid 4242) leaks: {BLOCK_IDS} grows by 88 MiB an hour, 154 bytes a request, "
            "the limit of 16 GiB is reached in 3.1 to 4 days."
        )

    def test_the_screen_has_everything(self) -> None:
        """The answer first, then the remedy with its source, the evidence, each process, and what could not be read."""
        refused = {"/rings/x.ring": "it is no ring file"}
        processes = [
            report.of(history(), leak()),
            report.of(history(17, unread={"smaps": "permission denied"}), calm()),
            report.of(history(18, unread={"smaps": "permission denied"}), calm(18, "worker", "VLLM::Worker_TP0")),
        ]
        told = report.make(processes, NOW, not_followed=refused, notes=("Watched.",))
        text = report_text.text(told)
        flat = " ".join(text.split())
        assert text.split("\n")[0] == report_text.answer(told)
        order = [
            "What to do",
            ACTION,
            "Evidence",
            "uses 14.6 GiB of 16 GiB (91 %)",
            "Processes",
            "Not read",
        ]
        assert [flat.index(part) for part in order] == sorted(flat.index(part) for part in order)
        assert f"(fixed in 0.26.0, {PULL})" in flat
        assert "make up 98 % of the growth" in flat
        assert "of APIServer (pid 17), Worker_TP0 (pid 18): permission denied" in flat
        assert "/rings/x.ring: it is no ring file" in flat
        assert text.endswith("Watched.\n")

    def test_the_table_has_a_row_for_each_process(self) -> None:
        """Pid, role, RSS, anonymous memory, its share of the limit, slope, verdict."""
        rows = [line.split("  ") for line in report_text.text(leaking()).splitlines()]
        cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
        assert ["PID", "PROCESS", "RSS", "ANON+SWAP", "OF LIMIT", "GROWTH/H", "VERDICT"] in cells
        assert ["4242", "EngineCore", "9.5 GiB", "9 GiB", "56 %", "90 MiB", "unbounded growth"] in cells
        assert ["17", "APIServer", "9.5 GiB", "9 GiB", "56 %", "-", "steady"] in cells

    def test_a_figure_that_was_not_read_is_a_question_mark(self) -> None:
        """Not 0, which would be a size."""
        text = report_text.text(of((history(memory={}, limit=None), calm()), (history(), leak())))
        (row,) = [line for line in text.splitlines() if line.strip().startswith("17 ")]
        assert re.split(r"\s{2,}", row.strip()) == ["17", "APIServer", "?", "?", "-", "-", "steady"]

    def test_many_rows_end_in_a_count(self) -> None:
        """The gravest are shown."""
        told = of((history(), leak()), *((history(pid), calm(pid)) for pid in range(200, 400)))
        assert "and 101 more, none graver" in report_text.text(told)

    def test_two_that_grow_are_both_told(self) -> None:
        """Of two deployments, the sooner is the answer, that there is another is said, and both have a row."""
        soon = leak(99, time_to_limit_s=Interval(600, 900, 1200))
        other = history(99, limit=Limit(8 * GIB, series(7.9 * GIB)))
        told = of((history(), leak()), (other, soon))
        answer = report_text.answer(told)
        assert answer.startswith("EngineCore (pid 99) leaks: ")
        assert "the limit of 8 GiB is reached in 10 to 20 minutes. 1 more process grows: see below." in answer
        text = report_text.text(told)
        assert "of 16 GiB (91 %)" in text
        assert "of 8 GiB (99 %)" in text
        assert {"EngineCore (pid 99), unbounded growth:", "EngineCore (pid 4242), unbounded growth:"} <= {
            line.strip() for line in text.splitlines()
        }

    @pytest.mark.parametrize(
        ("verdict", "words"),
        [
            (
                unexplained(category="anonymous", explained=0.0),
                ["by 50 MiB an hour in anonymous mappings outside the heap", "nothing that was counted explains it"],
            ),
            (
                unexplained(explained=0.25, per={"abort": 512}, follows="abort"),
                ["512 bytes an aborted request", "explains 25 % of it"],
            ),
            (
                calm(kind=Kind.UNBOUNDED, category="heap", slope=Interval(1, MIB, 2), follows="time", per={}),
                ["leaks: the heap (malloc) grows by 1 MiB an hour"],
            ),
            (
                leak(17, culprits=(culprit("a"), culprit("b")), per={"request": 300.0}),
                ["a (and 1 more container) grows by 176 MiB an hour, 300 bytes a request"],
            ),
            (
                calm(kind=Kind.BOUNDED, slope=Interval(1, MIB, 2), culprits=(filling("cache"),)),
                [
                    "Nothing leaks:",
                    "grows by 1 MiB an hour as cache fills",
                    "ends after 300 MiB more, in about 5 hours",
                ],
            ),
            (
                calm(kind=Kind.WARMING, slope=Interval(1, MIB, 2), culprits=(culprit("cache"),)),
                ["No alarm yet:", "too early to tell", "the suspect is cache"],
            ),
            (calm(kind=Kind.RETAINED), ["Nothing leaks:", "has freed memory that its allocator keeps"]),
            (calm(), ["Nothing grows: the one process held still for 60 minutes"]),
        ],
    )
    def test_each_verdict_has_its_sentence(self, verdict: Verdict, words: list[str]) -> None:
        """What a verdict knows is in its sentence."""
        answer = report_text.answer(of((history(limit=None), verdict)))
        assert [part for part in words if part not in answer] == [], answer

    def test_a_host_has_no_limit_but_an_end(self) -> None:
        """Where no cgroup limits it, the memory of the machine does."""
        told = of((history(limit=Limit(64 * GIB, series(GIB), "host")), leak()))
        assert "the host's 64 GiB are full in 3.1 to 4 days." in report_text.answer(told)

    def test_what_is_known_to_help_is_said_for_whom(self) -> None:
        """Two remedies of two processes are told apart; one that grows without a remedy gets a next step, too."""
        bare = leak(5, remedy=None)
        flat = " ".join(report_text.text(of((history(), leak()), (history(5), bare))).split())
        assert f"EngineCore (pid 4242): {ACTION}" in flat
        assert "EngineCore (pid 5): No remedy is known" in flat

    def test_beside_a_leak_nothing_else_is_to_be_done(self) -> None:
        """What a cache that fills is limited by is no help against a leak; without the leak it is said."""
        cache = calm(5, kind=Kind.BOUNDED, remedy=Remedy("expected: a cache"))
        assert "expected: a cache" not in report_text.text(of((history(), leak()), (history(5), cache)))
        assert "Expected: a cache" in report_text.text(of((history(5), cache)))

    def test_a_process_without_a_ring_is_told_to_be_half_known(self) -> None:
        """Nothing is known of its containers, so calm words about it weigh less; of a helper nobody expects a ring."""
        bare = history(5, vllm_version="", patch_state="unknown")
        told = of((bare, calm(5)), (bare, calm(6, "child", "nvcc")), (history(), calm(4242)))
        flat = " ".join(report_text.text(told).split())
        assert "No ring of vllm-kvfix was read of APIServer (pid 5): neither containers nor load are known." in flat
        assert "No ring" not in report_text.text(of((history(), calm())))

    def test_what_was_not_read_is_said_once(self) -> None:
        """A verdict's evidence has it, too; the screen has a part of its own for it."""
        told = leak(evidence=("smaps could not be read: permission denied", "it grew"))
        text = report_text.text(of((history(unread={"smaps": "permission denied"}), told)))
        assert text.count("permission denied") == 1
        assert "it grew" in text

    def test_a_limit_that_is_near_is_said_though_nothing_grows(self) -> None:
        """Who was paged at 91 % learns that nothing leaks, that the limit is near, and who is the largest."""
        small = history(17, figures={"status.anon": GIB})
        told = of((small, calm()), (history(), calm(4242, "engine core", "VLLM::EngineCore")))
        flat = " ".join(report_text.text(told).split())
        assert told.exit_code == NOTHING_ALARMING
        assert "91 % of the cgroup's 16 GiB are used though nothing grows" in flat
        assert "the largest is EngineCore (pid 4242) with 9 GiB" in flat

    def test_the_host_is_said_once(self) -> None:
        """Its usage was read for each process at another moment; cgroups of the same size are told apart."""
        pairs = [(history(pid), calm(pid)) for pid in (17, 18, 4242)]
        made = [report.of(*pair) for pair in pairs]
        hosts = [replace(one, usage=Usage(GIB, GIB / 8 + at, "host")) for at, one in enumerate(made)]
        assert report_text.text(report.make(hosts, NOW)).count("The host uses") == 1
        cgroups = [replace(one, usage=Usage(GIB, GIB / 8 + at * GIB / 4)) for at, one in enumerate(made)]
        assert report_text.text(report.make(cgroups, NOW)).count("The cgroup uses") == 3

    def test_who_finds_nothing_learns_what_to_do(self) -> None:
        """No process: where to look, and how to see that the plugin is there."""
        text = report_text.text(of())
        assert text.startswith("Cannot tell: no vLLM process was found.")
        assert "`vllm-kvfix status`" in text
        unreadable = of((history(memory={}, unread={"status": "permission denied"}), calm()))
        assert "none of 1 processes can be read (permission denied)" in report_text.answer(unreadable)

    def test_colours_are_made_only_when_asked_for(self) -> None:
        """Without them no escape is in the text; with them, the words are the same."""
        plain, coloured = report_text.text(leaking()), report_text.text(leaking(), colour=True)
        assert "\x1b" not in plain
        assert coloured.startswith("\x1b[31m")
        assert re.sub(r"\x1b\[\d+m", "", coloured) == plain

    @settings(deadline=None)
    @given(REPORTS, st.integers(40, 120), st.booleans())
    def test_every_report_can_be_said(self, told: Report, width: int, colour: bool) -> None:  # noqa: FBT001  # hypothesis gives it
        """Whatever the figures: words without nan and inf, one line feed at the end, an answer of one line."""
        text = report_text.text(told, width, colour=colour)
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        answer = report_text.answer(told)
        assert "\n" not in answer
        assert answer.endswith((".", "below."))

    @settings(deadline=None)
    @given(REPORTS)
    def test_no_number_is_strange(self, told: Report) -> None:
        """No nan, no inf, no exponent, in what is said in numbers."""
        plain = replace(told, processes=tuple(_numbers_only(process) for process in told.processes), notes=())
        words = report_text.text(replace(plain, not_followed={}))
        assert not re.search(r"\bnan\b|\binf\b|\d[eE][+-]?\d", words), words


def _numbers_only(process: ProcessReport) -> ProcessReport:
    """A process without the words of others."""
    verdict = process.verdict
    owners = tuple(replace(owner, path="p", why="w") for owner in verdict.culprits)
    plain = replace(verdict, role="r", name="n", category=None, evidence=(), remedy=None, culprits=owners, follows=None)
    usage = process.usage and replace(process.usage, of="cgroup")
    return replace(process, verdict=plain, usage=usage, unread={})
