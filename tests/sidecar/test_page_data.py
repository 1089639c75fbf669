# SPDX-License-Identifier: Apache-2.0
"""page_data: what the page is told is what is known at that moment, as strict JSON, whoever asks how often."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from tests.sidecar.fake_engine import (
    SECOND,
    FakeEngine,
    Sink,
    admitted,
    allocated,
    arrived,
    finished,
    start_time_of,
    step,
)
from tests.sidecar.fake_processes import GPU_SNAPSHOT, PATH, SERVER, FakeMemory, container, leak, steady, view
from vllm_kvfix import events
from vllm_kvfix.events import Config, Figures, Group, Identity, TraceContext, Unread
from vllm_kvfix_sidecar import assessment, conventions, page_data, report
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.health import Health
from vllm_kvfix_sidecar.marks import Marks
from vllm_kvfix_sidecar.metrics import Metrics
from vllm_kvfix_sidecar.page_data import About, BadQueryError, PageData, UnknownProcessError
from vllm_kvfix_sidecar.page_history import MOST_CONTAINERS
from vllm_kvfix_sidecar.pipeline import Pipeline
from vllm_kvfix_sidecar.process_table import ProcessKey
from vllm_kvfix_sidecar.readings import Cost
from vllm_kvfix_sidecar.spans import SpanMaker
from vllm_kvfix_sidecar.verdict import Culprit, Interval

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.verdict import Verdict

US = ProcessKey(os.getpid(), start_time_of(os.getpid()))
KEY = f"{US.pid}-{US.start_time}"
SERVER_KEY = f"{SERVER.pid}-{SERVER.start_time}"
EPOCH = 1_796_000_000.0
CONFIG = Config(1000, 8, 64, prefix_caching=True, groups=(Group(16, "FullAttentionSpec"),))
CALLER = TraceContext(0xABC << 64 | 1, 0xDEF, 1)
# Whatever a ring may hold as a text, lone halves of surrogate pairs left out: a ring's text is UTF-8.
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=80) | st.sampled_from(
    ["</script><img src=x onerror=alert(1)>", '"};alert(1)//', "\x00\x1b[31m\u202e\u2028", "__proto__"]
)  # fmt: skip


class World:
    """All parts of a sidecar over a real ring, of an engine that is this process, on a clock that the test turns."""

    def __init__(self, folder: Path, *views: object) -> None:
        self.now = 100.0
        self.unix = EPOCH
        self.engine = FakeEngine(folder / "a.ring", 1 << 18)
        self.memory = FakeMemory(*views)  # type: ignore[arg-type]  # views
        self.verdict = steady()
        self.marks = Marks()
        self.assessment = Assessment(
            self.memory, judge=self.judge, listeners=(self.marks,), clock=self.clock, wall=self.wall
        )
        self.metrics = Metrics()
        self.sink = Sink(self.metrics.spans)
        maker = SpanMaker(ALWAYS_ON, Resource({}), self.sink)
        self.pipeline = Pipeline([folder], self.metrics, maker, assessment=self.assessment, clock=self.clock)
        self.cost = Cost(1.0, 0.5, 50 << 20)
        self.data = PageData(
            self.pipeline,
            self.assessment,
            self.metrics,
            Health(self.pipeline, self.metrics, [folder], self.clock),
            self.marks,
            About("127.0.0.1:9464", [folder], {"traces": "none"}),
            gpus=lambda: GPU_SNAPSHOT,
            host_pids=True,
            cost=lambda: self.cost,
            clock=self.clock,
            wall=self.wall,
        )

    def clock(self) -> float:
        """Steady seconds."""
        return self.now

    def wall(self) -> float:
        """Unix seconds; they run with the others."""
        return self.unix + self.now

    def judge(self, history: ProcessHistory, now: float) -> Verdict:
        """What the test wants, of that process."""
        assert now == self.now
        return replace(self.verdict, pid=history.pid, role=history.role, name=history.name)

    def turn(self, seconds: float = 1.0, times: int = 1) -> None:
        """So many turns, so far apart."""
        for _ in range(times):
            self.now += seconds
            self.pipeline.poll()

    def ns(self) -> int:
        """The time."""
        return round(self.now * SECOND)

    def told(self) -> dict[str, Any]:
        """Now, as whoever asks reads it."""
        self.now += page_data.FRESH_S
        return strictly(self.data.now_body())

    def process(self, key: str = KEY) -> dict[str, Any]:
        """Of it one process."""
        (found,) = [process for process in self.told()["processes"] if process["key"] == key]
        return found  # type: ignore[no-any-return]  # JSON


def strictly(body: bytes) -> dict[str, Any]:
    """JSON as the standard has it: nothing infinite, no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(body, parse_constant=refuse)  # type: ignore[no-any-return]  # an object


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An engine of which nothing was told yet, and its API server."""
    return World(tmp_path, view(US, ring=US), view(SERVER, "api server"))


class TestProcesses:
    """The processes of /api/now."""

    def test_a_report_is_in_it(self, world: World) -> None:
        """It reads as a report with the same processes, answer and exit code, and each has the keys of the page."""
        world.verdict = leak()
        world.turn(times=3)
        body = world.data.now_body()
        read = report.parse(body)
        assert [process.verdict.pid for process in read.processes] == [US.pid, SERVER.pid]
        told = strictly(body)
        assert told["exit_code"] == report.ALARMING
        assert told["answer"].startswith(f"EngineCore (pid {US.pid}) leaks: ")
        first = told["processes"][0]
        assert told["answer"] == f"{first['sentence']}. 1 more process grows: see below."
        assert (first["key"], first["title"], first["ended_unix_s"]) == (KEY, "EngineCore", None)
        assert first["to_do"].startswith("Install the fix")
        assert first["started_unix_s"] == pytest.approx(EPOCH + US.start_time / 100)

    def test_figures_are_those_of_now_though_the_verdict_is_older(self, world: World) -> None:
        """What the table showed a second ago is there, and what counts against the limit; the verdict is the last."""
        world.turn(times=3)
        world.memory.views = [
            view(US, ring=US, figures={"status.rss": 5000, "status.anon": 4000}, limit=9000, usage=4500, of="cgroup")
        ]
        world.turn()
        process = world.process()
        assert process["memory"]["status"] == {"rss_bytes": 5000, "anon_bytes": 4000}
        assert process["limit"] == {"limit_bytes": 9000, "usage_bytes": 4500, "of": "cgroup"}
        assert process["verdict"]["kind"] == "steady"

    def test_a_change_of_the_fix_is_judged_at_once(self, world: World) -> None:
        """The state is there in the turn in which the ring tells it, with a new verdict and a mark."""
        world.turn(times=3)
        assert world.process()["patch_state"] == "unknown"
        world.verdict = leak()
        world.engine.writer.set_patch_state("applied")
        world.turn(times=2)
        process = world.process()
        assert (process["patch_state"], process["verdict"]["kind"]) == ("applied", "unbounded growth")
        assert [mark["kind"] for mark in world.told()["marks"]].count("patch") == 1

    def test_an_unread_scope_has_its_reason(self, world: World) -> None:
        """Figures that came before are not shown once the ring says that it cannot read them."""
        world.engine.write(Figures(world.ns(), "malloc", {"in_use": 5}))
        world.turn(times=3)
        assert world.process()["memory"]["malloc"] == {"in_use_bytes": 5}
        world.engine.write(Unread(world.ns(), "malloc", "busy"))
        world.turn()
        process = world.process()
        assert "malloc" not in process["memory"]
        assert process["unread"] == {"malloc": "busy"}

    def test_an_ended_process_stays_for_a_while(self, world: World) -> None:
        """Behind those that run, with the time of its end and its last figures; the answer is not about it."""
        world.verdict = leak()
        world.turn(times=3)
        world.memory.views = [view(US, ring=US)]
        world.verdict = steady()
        world.turn(times=2)
        world.turn(20, times=3)
        told = world.told()
        assert [process["key"] for process in told["processes"]] == [KEY, SERVER_KEY]
        gone = told["processes"][1]
        assert gone["ended_unix_s"] == pytest.approx(EPOCH + 104)
        assert gone["memory"]["status"]["rss_bytes"] == 1000
        assert gone["verdict"]["alarming"]
        assert told["exit_code"] == report.NOTHING_ALARMING
        assert [mark["text"] for mark in told["marks"]][-1] == "APIServer (pid 4200) ended"
        world.turn(assessment.KEEP_ENDED_S)
        world.turn()
        assert [process["key"] for process in world.told()["processes"]] == [KEY]

    def test_a_death_is_told_with_where_more_is(self, world: World) -> None:
        """Of a ring whose process is gone a sentence names the command that tells more."""
        world.unix = time.time() - world.now
        world.turn(times=3)
        assert world.told()["ended"] == []
        other = FakeEngine(world.engine.path.with_name("b.ring"))
        other.die()
        world.turn(times=3)
        (sentence,) = world.told()["ended"]
        assert f"vllm-kvfix postmortem {other.path}" in sentence

    def test_gpus_are_by_process(self, tmp_path: Path) -> None:
        """What NVML says of a pid is at its process; where pids are not the host's, nothing is."""
        engine = ProcessKey(4242, 5000)
        world = World(tmp_path, view(engine))
        world.turn(times=3)
        (process,) = [process for process in world.told()["processes"] if process["pid"] == engine.pid]
        assert process["gpus"] == [
            {"device": "GPU-1", "index": 0, "used_bytes": 600},
            {"device": "MIG-1", "index": 0, "used_bytes": None},
        ]
        world.data._host_pids = False
        assert not any(process["gpus"] for process in world.told()["processes"])


class TestContainers:
    """The containers of a process."""

    def test_the_largest_are_there_and_those_to_blame(self, world: World) -> None:
        """Of 100 the largest 39, and the culprit though it is the smallest; the largest first."""
        world.verdict = leak(path="small")
        sizes = {f"part[{number}]": 1000 + number for number in range(99)} | {"small": 1}
        world.engine.write(*[container(path, world.now, size=size) for path, size in sizes.items()])
        world.turn(times=3)
        found = [(told["path"], told["size_bytes"]) for told in world.process()["containers"]]
        assert found == [*[(f"part[{n}]", 1000 + n) for n in range(98, 98 - MOST_CONTAINERS + 1, -1)], ("small", 1)]

    def test_each_figure_is_the_latest(self, world: World) -> None:
        """Length, members, capacity, what came and went, orphans with their age; drained is what went of what came."""
        world.engine.write(
            container(time=world.now),
            container("scheduler.waiting", world.now, capacity=None, added=0, orphans=0, size=1),
        )
        world.turn(times=3)
        first, second = world.process()["containers"]
        assert first == {
            "path": PATH,
            "entries": 100,
            "members": 1,
            "size_bytes": 800,
            "capacity_entries": 1000,
            "added": 150,
            "removed": 50,
            "drain_ratio": 0.3333,
            "orphans": 3,
            "orphan_age_s": 7.0,
        }
        assert (second["capacity_entries"], second["drain_ratio"], second["orphan_age_s"]) == (None, None, None)


class TestEngines:
    """The engines of /api/now, and their requests."""

    def test_all_of_an_engine(self, world: World) -> None:
        """Pool, backlog, totals and requests are those of its latest step, its key is its process's."""
        usual = step(world.ns(), running=2)._replace(
            free=900, cached=50, waiting=1, steps=9, tokens=99, new=8, reused=7, released=6, refusals=5, backlog=(33,)
        )
        world.engine.write(CONFIG, arrived(1), usual, finished(1))
        world.turn()
        (engine,) = world.told()["engines"]
        age = engine["ring"].pop("age_s")
        assert age >= 0
        assert engine == {
            "key": KEY,
            "pid": US.pid,
            "engine_index": 0,
            "vllm_version": "0.25.1",
            "patch_state": "unknown",
            "state": "live",
            "pool": {"limit": 1000, "held": 100, "free": 900, "cached": 50},
            "block_size_tokens": [16],
            "backlog": [33],
            "requests": {"running": 2, "waiting": 1, "finished": {"stop": 1}},
            "totals": {
                "allocated": 8,
                "reused": 7,
                "released": 6,
                "steps": 9,
                "scheduled_tokens": 99,
                "preemptions": 0,
                "refusals": 5,
            },
            "peak_blocks": {"bounds": list(conventions.PEAK_BLOCKS.bounds), "counts": [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]},
            "ring": {"published": 4, "dropped": 0, "lost": 0, "malformed": 0},
        }

    def test_what_is_not_known_is_null(self, world: World) -> None:
        """Of an engine that has told nothing there is its ring, and no zero that nobody told."""
        world.turn()
        (engine,) = world.told()["engines"]
        assert engine["pool"] == dict.fromkeys(("limit", "held", "free", "cached"))
        assert (engine["backlog"], engine["totals"], engine["block_size_tokens"]) == (None, None, None)
        assert engine["requests"] == {"running": None, "waiting": None, "finished": {}}

    def test_a_request_has_the_ids_that_its_span_will_have(self, world: World) -> None:
        """Trace and span id of each live request are those that the sink gets when it ends."""
        world.engine.write(CONFIG, step(SECOND), arrived(1), arrived(2, context=CALLER), admitted(1), admitted(2))
        world.turn()
        shown = {(request["trace_id"], request["span_id"]) for request in world.told()["requests"]}
        assert f"{CALLER.trace_id:032x}" in {trace for trace, _ in shown}
        world.engine.write(finished(1), finished(2, CALLER))
        world.turn()
        assert shown == {(f"{trace:032x}", f"{span:016x}") for trace, span in world.sink.ids}
        assert world.told()["requests"] == []

    def test_the_requests_that_hold_most_come_first(self, world: World) -> None:
        """Of 30 the 20 with the most blocks, with what each holds, has held, for how long, and how long it waited."""
        world.engine.write(CONFIG, step(50 * SECOND))
        for number in range(1, 31):
            world.engine.write(
                arrived(number, 40 * SECOND), step(60 * SECOND), admitted(number), allocated(number, new=number)
            )
        world.turn()
        told = world.told()
        assert [request["blocks"] for request in told["requests"]] == [7 + number for number in range(30, 10, -1)]
        assert told["requests"][0] == {
            "request_id": "cmpl-30",
            "engine_request_id": "cmpl-30-0a1b2c3d",
            "engine": KEY,
            "trace_id": told["requests"][0]["trace_id"],
            "span_id": told["requests"][0]["span_id"],
            "state": "running",
            "blocks": 37,
            "peak_blocks": 37,
            "held_s": pytest.approx(world.now - 60),
            "queued_s": 20.0,
            "preemptions": 0,
        }


class TestSidecar:
    """What the sidecar says of itself."""

    def test_it_tells_its_account_and_its_cost(self, world: World) -> None:
        """Spans and events by what became of them, memory, the share of a core since the last look but one."""
        world.turn()
        world.metrics.spans.exported, world.metrics.events.failed, world.metrics.exports.failed = 3, 2, 1
        world.data.now()
        world.now += 60
        world.cost = Cost(3.0, 1.5, 60 << 20)
        told = world.data.now()["sidecar"]
        assert (told["rss_bytes"], told["cpu_ratio"], told["uptime_s"]) == (
            60 << 20,
            pytest.approx(3 / 61, abs=1e-4),
            61,
        )
        assert (told["spans"]["exported"], told["events"]["failed"], told["metric_exports"]["failed"]) == (3, 2, 1)
        assert (told["listen"], told["destinations"], told["errors"]) == ("127.0.0.1:9464", {"traces": "none"}, 0)

    def test_a_stuck_one_says_so(self, world: World) -> None:
        """Ten seconds after its last turn it is not alive, and a note says that figures may be old."""
        world.turn()
        assert world.told()["sidecar"]["alive"]
        world.now += 20
        told = world.told()
        assert (told["sidecar"]["alive"], told["sidecar"]["why_not"]) == (False, ["stuck"])
        assert told["notes"] == ["The sidecar is stuck, so this may be old: restart it."]

    def test_no_folder_is_why_it_is_not_ready(self, tmp_path: Path) -> None:
        """Before the first look it is not ready, and says why."""
        told = World(tmp_path).data.now()["sidecar"]
        assert (told["ready"], told["why_not"]) == (False, ["no ring folder is readable yet"])


class TestAnswers:
    """What is sent."""

    def test_an_answer_is_made_once_a_second(self, world: World) -> None:
        """Whoever asks within FRESH_S gets the same bytes, later others; each history is an answer of its own."""
        world.turn()
        first = world.data.now_body()
        world.now += page_data.FRESH_S * 0.9
        assert world.data.now_body() is first
        world.now += page_data.FRESH_S * 0.2
        assert world.data.now_body() is not first
        short, long = (world.data.history_body(None, range_s, 300) for range_s in (60.0, 600.0))
        assert (strictly(short)["range_s"], strictly(long)["range_s"]) == (60.0, 600.0)
        assert world.data.history_body(None, 60.0, 300) is short

    def test_no_more_answers_are_kept_than_there_is_room_for(self, world: World) -> None:
        """Whatever is asked for, MOST_CACHED answers stay, the newest."""
        for points in range(10, 100):
            world.data.history_body(None, 3600.0, points)
        assert len(world.data._bodies) == page_data.MOST_CACHED
        assert world.data.history_body(None, 3600.0, 99) is world.data.history_body(None, 3600.0, 99)

    @settings(max_examples=40, deadline=None)
    @given(request=TEXTS, path=TEXTS, reason=TEXTS, name=TEXTS)
    def test_strings_of_strangers_come_as_they_are(
        self, tmp_path_factory: Any, request: str, path: str, reason: str, name: str
    ) -> None:
        """Ids, paths, reasons and names are in the JSON as the ring told them, whatever they hold."""
        world = World(tmp_path_factory.mktemp("hostile"), view(US, ring=US, name=name))
        identity = Identity(request)
        world.engine.write(
            CONFIG, step(SECOND), arrived(1)._replace(identity=identity), admitted(1),
            container(path, world.now), Unread(world.ns(), "malloc", reason),
        )  # fmt: skip
        world.verdict = leak(path=path, evidence=(reason,))
        world.turn(times=3)
        told = world.told()
        (process,) = told["processes"]
        assert told["requests"][0]["engine_request_id"] == request
        assert [container["path"] for container in process["containers"]] == [path]
        assert (process["unread"]["malloc"], process["name"], process["verdict"]["evidence"]) == (
            reason,
            name,
            [reason],
        )
        detail = strictly(world.data.history_body(KEY, 60.0, 10))
        assert list(detail["containers"]) == [path]

    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(st.sampled_from([math.inf, -math.inf, math.nan, 0.0, 1e300]), min_size=8, max_size=8),
        st.just(2**64 - 1) | st.integers(0, 2**64 - 1),
    )
    def test_nothing_is_infinite_or_nan(self, tmp_path_factory: Any, numbers: list[float], word: int) -> None:
        """Verdicts with no end, and words as large as a ring can hold, give JSON that any reader takes."""
        world = World(tmp_path_factory.mktemp("large"), view(US, ring=US, limit=word, usage=word, of="host"))
        low, best, high, per, explained, full, when, window = numbers
        culprit = Culprit(PATH, low, {"request": per}, None, None, "why", full, when)
        world.verdict = leak(
            slope=Interval(low, best, high), time_to_limit_s=Interval(high, low, best), per={"step": per},
            explained=explained, culprits=(culprit,), window_s=abs(window) if math.isfinite(window) else 0.0,
        )  # fmt: skip
        large = min(word, events.LOW)
        state = step(SECOND, running=large)._replace(free=large, backlog=(word,), steps=word, tokens=word)
        counted = container(time=world.now)._replace(size=word, added=word, removed=word, orphans=word, orphan_age=word)
        world.engine.write(
            CONFIG, state, Figures(world.ns(), "malloc", {"in_use": word}), counted,
        )  # fmt: skip
        world.turn(times=3)
        told = world.told()
        (process,) = told["processes"]
        assert process["memory"]["malloc"]["in_use_bytes"] == word
        assert told["engines"][0]["backlog"] == [word]
        overview = strictly(world.data.history_body(None, 60.0, 10))
        assert overview["engines"][KEY]["backlog"]["v"][-1] == pytest.approx(word)
        assert strictly(world.data.history_body(KEY, 60.0, 10))["series"]["malloc.in_use"]["v"][-1] == pytest.approx(
            word
        )


class TestHistory:
    """/api/history."""

    def test_the_overview_is_memory_of_all_and_load_of_engines(self, world: World) -> None:
        """Anonymous memory with swap, usage against the limit, held blocks, requests and backlog, in unix time."""
        world.engine.write(CONFIG)
        for at in range(60):
            figures = {"status.rss": 1, "status.anon": 700 + at, "status.swap": 1000 + at // 30}
            world.memory.views = [view(US, ring=US, figures=figures, limit=5000, usage=2000 + at, of="cgroup")]
            world.engine.write(step(world.ns(), running=at)._replace(waiting=1, free=1000 - at, backlog=(at, at)))
            world.turn(10)
        told = strictly(world.data.history_body(None, 3600.0, 300))
        (memory,) = told["processes"].values()
        assert memory["limit_bytes"] == 5000
        assert dict(zip(memory["memory"]["t"], memory["memory"]["v"], strict=True))[EPOCH + 110 + 300] == 730 + 1001
        assert memory["memory"]["v"][-1] == 759 + 1001
        assert memory["limit_usage"]["v"][-1] == 2059
        (engine,) = told["engines"].values()
        assert (engine["running"]["v"][-1], engine["held"]["v"][-1], engine["backlog"]["v"][-1]) == (59, 59, 118)
        assert engine["waiting"]["v"] == [1, 1]
        assert set(engine) == {"held", "running", "waiting", "backlog"}
        for series in (*engine.values(), memory["memory"], memory["limit_usage"]):
            assert len(series["t"]) == len(series["v"])
            assert series["t"] == sorted(set(series["t"]))
            assert series["t"][0] >= EPOCH + 90
            assert series["t"][-1] <= EPOCH + world.now

    @pytest.mark.parametrize(
        ("figures", "size"),
        [
            ({"status.anon": 5, "status.rss": 9}, [5]),
            ({"status.anon": 5, "status.swap": 2}, [7]),
            ({"status.rss": 9}, [9]),
            ({"smaps.rss": 3}, [3]),
            ({}, []),
        ],
    )
    def test_memory_is_what_is_known_of_it(self, tmp_path: Path, figures: dict[str, int], size: list[int]) -> None:
        """Anonymous memory with swap; else RSS by whichever tells it; else nothing."""
        world = World(tmp_path, view(US, ring=US, figures=figures))
        world.turn(times=2)
        assert set(world.data.history()["processes"][KEY]["memory"]["v"]) == set(size)

    def test_of_one_process_there_is_all(self, world: World) -> None:
        """Each figure under its name, each of its largest containers with entries, bytes and capacity."""
        world.verdict = leak(path="small")
        sizes = {f"part[{number}]": 1000 + number for number in range(99)} | {"small": 1}
        for length in (100, 200):
            world.engine.write(*[container(path, world.now, size=size, length=length) for path, size in sizes.items()])
            world.engine.write(Figures(world.ns(), "malloc", {"in_use": length}))
            world.turn(20)
        told = world.data.history(KEY, 3600.0, 300)
        assert told["process"] == KEY
        assert set(told["series"]) == {"status.rss", "status.anon", "malloc.in_use"}
        assert told["series"]["malloc.in_use"] == {"t": [EPOCH + 100, EPOCH + 120], "v": [100, 200]}
        assert len(told["containers"]) == MOST_CONTAINERS
        assert told["containers"]["small"] == {
            "t": [EPOCH + 100, EPOCH + 120],
            "entries": [100, 200],
            "size": [1, 1],
            "capacity": 1000,
        }

    def test_no_more_points_than_asked_for(self, world: World) -> None:
        """Of an hour that always changes there are so many points at most, and of the last minute only those."""
        for at in range(360):
            world.memory.views = [view(US, ring=US, figures={"status.anon": at * 7919 % 1009})]
            world.turn(10)
        for points in (10, 57, 300, 1000):
            told = world.data.history(None, 3600.0, points)["processes"][KEY]["memory"]
            assert points / 4 < len(told["t"]) <= points or points == 1000
        late = world.data.history(None, 60.0, 300)["processes"][KEY]["memory"]
        assert 5 <= len(late["t"]) <= 8
        assert late["t"][0] >= EPOCH + world.now - 60

    def test_ended_ones_are_there_as_long_as_in_now(self, world: World) -> None:
        """A process that is gone keeps its line for a while."""
        world.turn(times=3)
        world.memory.views = [view(US, ring=US)]
        world.turn(times=2)
        assert set(world.data.history()["processes"]) == {KEY, SERVER_KEY}
        assert world.data.history(SERVER_KEY)["series"]["status.rss"]["v"]
        world.turn(assessment.KEEP_ENDED_S + 1, times=2)
        assert set(world.data.history()["processes"]) == {KEY}

    @settings(deadline=None)
    @given(st.floats(allow_nan=True, allow_infinity=True), st.integers())
    def test_what_cannot_be_had_is_refused_with_what_can(
        self, tmp_path_factory: Any, range_s: float, points: int
    ) -> None:
        """Ranges but 60 s to a week, and points but 10 to 1000, give BadQueryError and nothing else."""
        data = World(tmp_path_factory.mktemp("asked")).data
        if 60 <= range_s <= 604_800 and 10 <= points <= 1000:
            assert data.history(None, range_s, points)["range_s"] == range_s
        else:
            with pytest.raises(BadQueryError, match=r"60 to 604800|10 to 1000"):
                data.history(None, range_s, points)

    @pytest.mark.parametrize(("range_s", "points"), [(60.0, 10), (604_800.0, 1000)])
    def test_the_ends_of_what_can_be_had(self, world: World, range_s: float, points: int) -> None:
        """They can be had."""
        assert world.data.history(None, range_s, points)["range_s"] == range_s

    @pytest.mark.parametrize("key", ["", "1-1", "4242", "../etc/passwd", "9" * 1000])
    def test_a_process_that_nobody_knows_is_refused(self, world: World, key: str) -> None:
        """The error is of its own kind, says which are known, and does not say again what was asked."""
        world.turn(times=2)
        with pytest.raises(UnknownProcessError) as caught:
            world.data.history_body(key, 3600.0, 300)
        assert KEY in str(caught.value)
        assert len(str(caught.value)) < 200

    def test_a_clock_that_is_set_moves_all_times(self, world: World) -> None:
        """After a jump of the wall clock the newest value is at the new present."""
        world.turn(times=3)
        world.unix += 3600
        told = world.data.history(None, 60.0, 300)
        assert told["processes"][KEY]["memory"]["t"][-1] == pytest.approx(EPOCH + 3600 + world.now)


class TestThreads:
    """Others ask while the pipeline turns."""

    def test_askers_get_whole_answers_while_everything_changes(self, tmp_path: Path) -> None:
        """Four threads ask for all there is, while requests and containers come and go and processes end: no fault.

        Each answer is strict JSON; held blocks and free ones are always of one step.
        """
        world = World(tmp_path, view(US, ring=US))
        world.engine.write(CONFIG)
        world.turn(times=2)
        stop, faults, answers = threading.Event(), [], [0] * 4

        def ask(number: int) -> None:
            try:
                while not stop.is_set():
                    world.data._bodies.clear()  # nothing is answered from what was made before
                    now = strictly(world.data.now_body())
                    strictly(world.data.history_body(None, 3600.0, 30))
                    strictly(world.data.history_body(KEY, 3600.0, 30))
                    for engine in now["engines"]:
                        pool = engine["pool"]
                        assert pool["held"] is None or pool["held"] + pool["free"] == 1000
                    answers[number] += 1
            except Exception as error:  # noqa: BLE001  # whatever it is, the test is to show it
                faults.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        turns = 0
        while not faults and (turns < 150 or min(answers) < 10) and time.monotonic() < deadline:
            turns += 1
            for event in self.happening(turns, world):
                world.engine.write(event) if not isinstance(event, list) else world.engine.write(*event)
            other = [view(ProcessKey(50_000 + turns // 5, 7), "worker")] if turns % 5 else []
            world.memory.views = [view(US, ring=US, figures={"status.anon": turns}), *other]
            world.turn()
        stop.set()
        for thread in threads:
            thread.join()
        assert faults == []
        assert min(answers) >= 10
        assert (world.assessment.errors, turns >= 150) == (0, True)

    @staticmethod
    def happening(turn: int, world: World) -> Iterator[list[events.Event]]:
        """Of each turn: a step, 20 requests that come and of which all but one end, and 20 containers."""
        numbers = range(turn * 20, turn * 20 + 20)
        state = step(world.ns(), running=turn % 9)._replace(free=turn % 1000, backlog=(turn,))
        yield [state, *[arrived(number) for number in numbers], *[admitted(number) for number in numbers]]
        yield [finished(number) for number in numbers[1:]]
        yield [container(f"part[{turn % 40}][{number}]", world.now, size=turn) for number in range(20)]
