# SPDX-License-Identifier: Apache-2.0
"""assessment: rings and process table become one history a process, each is judged in turn, and no fault gets out."""

from __future__ import annotations

import logging
import os
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sidecar.fake_engine import step
from tests.sidecar.fake_processes import ENGINE, PATH, SECOND, SERVER, FakeMemory, container, leak, steady, view
from vllm_kvfix import host
from vllm_kvfix.events import SCOPES, Census, Figures, Unread
from vllm_kvfix_sidecar import assessment, process_record
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.process_record import MOST_CONTAINERS, MOST_SHOWN
from vllm_kvfix_sidecar.process_table import ProcessKey

if TYPE_CHECKING:
    import pytest

    from vllm_kvfix.events import ProcessEvent
    from vllm_kvfix_sidecar.assessment import Feed
    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.verdict import Verdict

WORKER = ProcessKey(4243, 5100)
TICKS = os.sysconf("SC_CLK_TCK")
ENGINE_CORE, API_SERVER = "engine core", "api server"


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[ProcessKey, Verdict, ProcessHistory, float]] = []
        self.gone: list[tuple[ProcessKey, float]] = []

    def judged(self, key: ProcessKey, verdict: Verdict, history: ProcessHistory, now: float) -> None:
        """A verdict."""
        self.verdicts.append((key, verdict, history, now))

    def ended(self, key: ProcessKey, now: float) -> None:
        """An end."""
        self.gone.append((key, now))


class World:
    """An assessment on a clock that the test turns, over a process table that it makes."""

    def __init__(self, *views: object, verdict: Verdict | None = None) -> None:
        self.now = 100.0
        self.memory = FakeMemory(*views)  # type: ignore[arg-type]  # views
        self.listener = Listener()
        self.verdict = verdict or steady()
        self.asked: list[ProcessHistory] = []
        self.made = Assessment(
            self.memory,
            judge=self.judge,
            listeners=[self.listener],
            clock=lambda: self.now,
            wall=lambda: self.now + 1_000_000,
        )

    def judge(self, history: ProcessHistory, now: float) -> Verdict:
        """Whatever the test wants."""
        assert now == self.now
        self.asked.append(history)
        return self.verdict

    def ring(self, key: ProcessKey = ENGINE, role: str = ENGINE_CORE, name: str = "a.ring") -> Feed:
        """A ring is found."""
        return self.made.follow(key.pid, key.start_time, role, name, "0.25.1")

    def turn(self, seconds: float = 1.0, times: int = 1) -> None:
        """So many turns, so far apart."""
        for _ in range(times):
            self.now += seconds
            self.made.turn(self.now)

    def history(self, key: ProcessKey = ENGINE) -> ProcessHistory:
        """Of one process."""
        return self.made.histories()[key]

    def ns(self) -> int:
        """The time."""
        return round(self.now * SECOND)


class TestJoining:
    """One process from two sources."""

    def test_ring_and_table_are_one_process(self) -> None:
        """Figures of the table and of the ring, containers, version and state are in one history, under its name."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        feed.hear(Figures(world.ns(), "malloc", {"in_use": 5, "retained": 2}))
        feed.hear(container(time=world.now))
        feed.patch("applied")
        world.turn()
        assert list(world.made.histories()) == [ENGINE]
        found = world.history()
        assert (found.pid, found.role, found.name, found.started) == (4242, ENGINE_CORE, "EngineCore", 50.0)
        assert {name: list(series.values) for name, series in found.memory.items()} == {
            "status.rss": [1000],
            "status.anon": [700],
            "malloc.in_use": [5],
            "malloc.retained": [2],
        }
        (only,) = found.containers
        assert (only.path, only.capacity, only.orphan_age_s) == (PATH, 1000, 7)
        columns = (only.length, only.members, only.size, only.added, only.removed, only.orphans)
        assert [list(column.values) for column in columns] == [[100], [1], [800], [150], [50], [3]]
        assert (found.vllm_version, found.patch_state) == ("0.25.1", "applied")
        assert world.memory.asked[-1][0] == ((4242, 5000, ENGINE_CORE),)

    def test_a_process_that_only_its_ring_shows_is_there(self) -> None:
        """A worker in another PID namespace has what its ring told, and why its status cannot be read."""
        world = World()
        world.ring(WORKER, "worker").hear(Figures(world.ns(), "smaps", {"pss": 4}))
        world.turn()
        found = world.history(WORKER)
        assert (found.role, list(found.memory), found.unread) == (
            "worker",
            ["smaps.pss"],
            {"status": "no such process"},
        )

    def test_a_process_without_a_ring_is_there(self) -> None:
        """A compiler, of which only the table tells."""
        child = ProcessKey(9, 9)
        world = World(view(child, "child"))
        world.turn()
        assert world.history(child).role == "child"

    def test_a_ring_found_in_another_pid_namespace_is_joined_with_what_both_had_told(self) -> None:
        """The table's pid stands for both, its figures go on, the ring's are added, and what comes later goes there."""
        inner = ProcessKey(7, ENGINE.start_time)
        world = World(view())
        world.turn()
        feed = world.ring(inner)
        feed.hear(container(time=world.now))
        world.turn(10, times=3)
        assert set(world.made.histories()) == set(world.made.verdicts) == {ENGINE, inner}
        world.memory.views = [view(ring=inner)]
        world.turn(10)
        feed.hear(Figures(world.ns(), "python", {"blocks_count": 3}))
        (found,) = world.made.histories().values()
        assert (found.pid, found.vllm_version, len(found.containers)) == (ENGINE.pid, "0.25.1", 1)
        assert {"status.rss", "python.blocks_count"} <= set(found.memory)
        assert [judged.key for judged in world.made.judged()] == [ENGINE]
        assert found.memory["status.rss"].times[0] == 101
        assert world.made.errors == 0

    def test_a_reason_stands_until_the_figures_come(self) -> None:
        """What the ring cannot read is told with its reason, until it can; what the table cannot, if no ring does."""
        world = World(view(figures={}, unread={"status": "permission denied"}, ring=ENGINE))
        feed = world.ring()
        feed.hear(Unread(world.ns(), "smaps", "busy"))
        world.turn()
        assert world.history().unread == {"status": "permission denied", "smaps": "busy"}
        feed.hear(Figures(world.ns(), "smaps", {"pss": 1}))
        feed.hear(Figures(world.ns(), "status", {"rss": 1}))
        world.turn()
        assert world.history().unread == {}
        feed.hear(Unread(world.ns(), "smaps", "busy again"))
        assert world.history().unread == {"smaps": "busy again"}

    def test_smaps_is_asked_of_the_table_where_a_ring_is_silent(self) -> None:
        """From SILENT_S on, as long as the ring tells none."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        world.turn(assessment.SILENT_S - 1)
        assert list(world.memory.asked[-1][1]) == []
        world.turn(2)
        assert list(world.memory.asked[-1][1]) == [ENGINE]
        feed.hear(Figures(world.ns(), "smaps", {"pss": 1}))
        world.turn()
        assert list(world.memory.asked[-1][1]) == []

    def test_the_limit_is_the_tables_or_else_the_rings(self) -> None:
        """The ring's usage leaves out files, but not shared memory; once the table knows the limit, the ring's goes."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        told = {"usage": 900, "limit": 1000, "file": 300, "shmem": 100}
        feed.hear(Figures(world.ns(), "cgroup", told))
        world.turn()
        limit = world.history().limit
        assert limit is not None
        assert (limit.limit, limit.of, list(limit.usage.values)) == (1000, "cgroup", [700])
        world.memory.views = [view(ring=ENGINE, limit=800, usage=500, of="host")]
        world.turn(10)
        feed.hear(Figures(world.ns(), "cgroup", told))
        limit = world.history().limit
        assert limit is not None
        assert (limit.limit, limit.of, list(limit.usage.values)) == (800, "host", [500])


class TestLoad:
    """What the engines have done."""

    def done(self, world: World, feed: Feed, finished: int, running: int = 0) -> None:
        """A step after which so many have finished."""
        feed.step(step(world.ns(), running)._replace(finished=finished, aborted=1, generated=9, new=8, steps=7))

    def test_it_is_the_engines_own(self) -> None:
        """Each total and level under its name; it goes on while the engine idles."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        self.done(world, feed, 5, running=3)
        world.turn(10, times=3)
        load = world.history().load
        assert {name: series.values[-1] for name, series in load.items()} == {
            "requests": 5,
            "aborts": 1,
            "generated_tokens": 9,
            "blocks": 8,
            "steps": 7,
            "running": 3,
            "waiting": 0,
        }
        assert load["requests"].times[-1] >= world.now - 15

    def test_the_last_step_before_a_pause_is_kept(self) -> None:
        """Steps follow each other fast; of those within a second the last one is heard of when it is looked."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        for finished in (5, 6, 9):
            world.now += 0.3
            self.done(world, feed, finished)
        world.turn()
        assert world.history().load["requests"].values[-1] == 9

    def test_a_deployment_works_together(self) -> None:
        """API server and worker see the sum over its engines; another deployment's engine is not in it."""
        second, other = ProcessKey(4250, 5200), ProcessKey(1, 2)
        stranger = view(other, ring=other, root=ProcessKey(0, 0))
        world = World(view(ring=ENGINE), view(second, ring=second), stranger, view(SERVER, API_SERVER))
        feeds = [world.ring(key, name=f"{key.pid}.ring") for key in (ENGINE, second, other)]
        world.turn()
        for at, finished in ((1, 5), (2, 7), (3, 11)):
            for feed in feeds:
                self.done(world, feed, finished * at, running=2)
            world.turn(10)
        requests = world.history(SERVER).load["requests"].values
        assert requests[-1] - requests[0] == 2 * (33 - 5)
        assert world.history(SERVER).load["running"].values[-1] == 4
        assert world.history(other).load["requests"].values[-1] == 33

    @given(st.lists(st.integers(0, 50), min_size=2, max_size=20))
    def test_totals_never_fall(self, counts: list[int]) -> None:
        """An engine whose recorder begins anew goes on from where it was."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        for count in counts:
            world.turn(10)
            self.done(world, feed, count)
        world.turn(20)
        values = list(world.history().load["requests"].values)
        assert values == sorted(values)
        risen = sum(b - a if b >= a else b for a, b in pairwise(counts))
        assert values[-1] - values[0] == risen

    def test_an_engine_that_is_replaced_leaves_its_share(self) -> None:
        """The deployment's total goes on when one engine dies and another comes; what ran in the first does not run."""
        second = ProcessKey(4250, 9000)
        world = World(view(ring=ENGINE), view(SERVER, API_SERVER))
        first = world.ring()
        world.turn()
        self.done(world, first, 10, running=4)
        world.turn(10)
        self.done(world, first, 30, running=4)
        first.end()
        world.memory.views = [view(second, ring=second), view(SERVER, API_SERVER)]
        feed = world.ring(second, name="b.ring")
        world.turn(10)
        self.done(world, feed, 1)
        world.turn(20)
        self.done(world, feed, 6)
        world.turn(20)
        load = world.history(SERVER).load
        values = list(load["requests"].values)
        assert values == sorted(values)
        assert values[-1] - values[0] == 20 + 5
        assert load["running"].values[-1] == 0

    def test_who_is_in_no_table_works_for_the_engines_that_are_in_none(self) -> None:
        """An API server of which only its ring tells has the sum of such engines, an engine its own."""
        other = ProcessKey(2, 2)
        world = World()
        for number, key in enumerate((ENGINE, other)):
            self.done(world, world.ring(key, name=f"{number}.ring"), 10)
        world.ring(SERVER, API_SERVER, "s.ring")
        world.turn(times=2)
        assert world.history(SERVER).load["requests"].values[-1] == 20
        assert world.history(ENGINE).load["requests"].values[-1] == 10


class TestJudging:
    """Verdicts."""

    def test_each_process_is_judged_once_in_fifteen_seconds_and_one_in_a_turn(self) -> None:
        """Three processes over 60 s, five turns a second: each four times, no two in one turn."""
        keys = [ENGINE, WORKER, SERVER]
        world = World(*[view(key) for key in keys])
        before = 0
        for _ in range(300):
            world.turn(0.2)
            assert len(world.asked) - before <= 1
            before = len(world.asked)
        assert [sum(history.pid == key.pid for history in world.asked) for key in keys] == [4, 4, 4]

    def test_the_latest_verdict_stands_and_is_told(self) -> None:
        """verdicts, judged() and the listeners have it, with the time and the history that it stands on."""
        world = World(view(ring=ENGINE), verdict=leak())
        world.ring().hear(container(time=world.now))
        world.turn(times=3)
        assert world.made.verdicts == {ENGINE: leak()}
        ((key, verdict, history, now),) = world.listener.verdicts
        assert (key, verdict, now) == (ENGINE, leak(), 101)
        assert [container.path for container in history.containers] == [PATH]
        (judged,) = world.made.judged()
        assert (judged.key, judged.verdict, judged.history.containers) == (ENGINE, leak(), ())
        assert list(judged.history.memory["status.rss"].values) == [1000]

    def test_what_is_kept_of_a_judged_history_is_its_ends(self) -> None:
        """The first and the last of each figure, and the last of the limit."""
        world = World(view(limit=10, usage=5, of="cgroup"))
        world.turn(10, times=20)
        (judged,) = world.made.judged()
        full = world.history()
        kept = judged.history.memory["status.rss"]
        assert len(full.memory["status.rss"].times) > 2
        assert (len(kept.times), kept.times[0]) == (2, full.memory["status.rss"].times[0])
        assert judged.history.limit is not None
        assert len(judged.history.limit.usage.values) == 2

    def test_an_ended_process_is_told_once_and_forgotten_after_five_minutes(self) -> None:
        """It is judged no more, its last verdict stands for a while, then nothing is left of it."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        world.turn(times=2)
        feed.end()
        world.memory.views = []
        world.turn(times=3)
        assert world.listener.gone == [(ENGINE, 103)]
        assert (world.made.histories(), world.made.judged(), world.made.states()) == ({}, [], [])
        asked = len(world.asked)
        world.turn(assessment.KEEP_ENDED_S - 5)
        assert list(world.made.verdicts) == [ENGINE]
        world.turn(10)
        assert world.made.verdicts == {}
        assert (world.made._records, world.made._feeds, len(world.asked)) == ({}, [], asked)

    def test_a_zombie_has_ended(self) -> None:
        """Although nobody has noticed its end, so that the table shows it for good: it is told once, and forgotten."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        world.turn()
        feed.end()
        world.memory.views = [view(figures={}, unread={"status": host.ENDED_REASON})]
        world.turn(times=3)
        assert world.listener.gone == [(ENGINE, 102)]
        world.turn(assessment.KEEP_ENDED_S + 1, times=2)
        assert world.made._records == {}

    def test_a_ring_that_could_not_be_read_for_a_while_goes_on(self) -> None:
        """Followed again it is the same feed, and its process has not ended."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        for _ in range(5):
            feed.end()
            world.turn()
            assert world.ring() is feed
            world.turn()
        assert (len(world.made._feeds), world.listener.gone) == (1, [])


class TestFaults:
    """Whatever goes wrong stays here."""

    def test_a_fault_is_counted_and_said_once_a_place(self, caplog: pytest.LogCaptureFixture) -> None:
        """A process table, a judge and a listener that fail: the others go on, and three tracebacks are in the log."""

        def fail(*_: object) -> Verdict:
            raise ZeroDivisionError

        world = World(view())
        world.turn()
        world.made._judge = fail
        world.turn(20, times=3)
        assert world.made.errors == 3
        world.made._judge = world.judge
        world.listener.judged = fail  # type: ignore[assignment,method-assign]  # a fault
        world.turn(20)
        assert (world.made.errors, world.made.verdicts) == (4, {ENGINE: steady()})
        world.memory.look = fail  # type: ignore[assignment,method-assign]  # a fault
        world.turn(20)
        assert world.made.errors == 6
        assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3

    def test_a_process_that_cannot_be_judged_does_not_keep_the_others_waiting(self) -> None:
        """The judge fails at one of two; the other is judged as often as ever."""
        world = World(view(), view(WORKER))
        real = world.judge

        def judge(history: ProcessHistory, now: float) -> Verdict:
            if history.pid == ENGINE.pid:
                raise ZeroDivisionError
            return real(history, now)

        world.made._judge = judge
        world.turn(times=40)
        assert len(world.asked) == 3

    def test_a_ring_that_speaks_of_the_future_is_not_heard(self) -> None:
        """What it says for beyond FUTURE_S is left out, and what it says of now is still heard."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        future = round((world.now + assessment.FUTURE_S + 1) * SECOND)
        feed.hear(Figures(future, "malloc", {"in_use": 1}))
        feed.step(step(future))
        feed.hear(Figures(world.ns(), "malloc", {"in_use": 2}))
        world.turn()
        assert list(world.history().memory["malloc.in_use"].values) == [2]
        assert world.history().load == {}

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(range(5))), max_size=400))
    def test_whatever_rings_say_what_is_kept_is_bounded(self, told: list[tuple[int, int]]) -> None:
        """Containers without end, figures of no scope, words of 64 bits: no error, no more than is promised."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        for number, kind in told:
            world.now += 0.1
            events: list[ProcessEvent] = [
                container(f"path {number}", world.now, size=2**64 - 1),
                Figures(world.ns(), "malloc", {"in_use": 2**64 - 1, "nonsense": 1}),
                Figures(world.ns(), "", {}),
                Unread(world.ns(), str(number), "because"),
                Census(world.ns(), 2**64 - 1, 0, complete=False),
            ]
            feed.hear(events[kind])
        world.turn()
        found = world.history()
        assert world.made.errors == 0
        assert len(found.containers) <= MOST_CONTAINERS
        assert set(found.memory) <= {f"{scope}.{name}" for scope, names in SCOPES.items() for name in names}
        assert found.unread == {}


class TestContainers:
    """Which of them are kept, and which are shown."""

    def test_the_first_are_kept_until_they_are_gone(self) -> None:
        """One too many is refused; when one was not seen for UNSEEN_S, its place is another's."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        for number in range(MOST_CONTAINERS + 1):
            feed.hear(container(str(number), world.now))
        assert feed.record.refused_containers == 1
        world.now += process_record.UNSEEN_S + 1
        there = [str(number) for number in range(MOST_CONTAINERS) if number != 5]
        for path in there:
            feed.hear(container(path, world.now))
        feed.hear(container("new", world.now))
        kept = {history.path for history in feed.record.history({}).containers}
        assert kept == {*there, "new"}

    def test_one_that_is_gone_is_forgotten_after_a_census(self) -> None:
        """A container that was not seen for UNSEEN_S is in no history; the others are."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        feed.hear(container("gone", world.now))
        feed.hear(container("there", world.now))
        world.now += process_record.UNSEEN_S + 1
        feed.hear(container("there", world.now))
        feed.hear(Census(world.ns(), 1, 1, complete=True))
        assert [history.path for history in feed.record.history({}).containers] == ["there"]

    def test_the_largest_and_those_that_grow_are_shown(self) -> None:
        """Of 100 containers 30 are shown: the 15 largest, and the small ones that grow fastest."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        for _ in range(3):
            world.now += 10
            for number in range(100):
                growth = round(world.now) if number == 3 else 0
                feed.hear(container(str(number), world.now, size=number * 10_000 + growth))
        shown = {found.path for found in feed.record.state(world.now).containers}
        assert len(shown) == MOST_SHOWN
        assert {str(number) for number in range(85, 100)} | {"3"} <= shown


class TestState:
    """What is known now."""

    def test_it_is_what_stands(self) -> None:
        """Figures are there until they are old, or a reason came after them; then they are absent, not 0."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        world.turn()
        feed.hear(Figures(world.ns(), "malloc", {"in_use": 5}))
        feed.hear(Figures(world.ns(), "smaps", {"pss": 6}))
        ((found, _),) = world.made.states()
        assert {scope: dict(told.values) for scope, told in found.figures.items()} == {
            "status": {"rss": 1000, "anon": 700},
            "malloc": {"in_use": 5},
            "smaps": {"pss": 6},
        }
        assert (found.ring, found.started_ns) == ("a.ring", 1_000_050 * SECOND)
        world.now += 1
        feed.hear(Unread(world.ns(), "malloc", "busy"))
        ((found, _),) = world.made.states()
        assert set(found.figures) == {"status", "smaps"}
        world.turn(310)
        ((found, _),) = world.made.states()
        assert (set(found.figures), found.unread) == ({"status", "smaps"}, {"malloc": "busy"})
        world.memory.views = [view(ring=ENGINE, figures={})]
        world.turn(310)
        ((found, _),) = world.made.states()
        assert set(found.figures) == {"smaps"}

    def test_a_figure_that_only_runs_up_remembers_where_it_began(self) -> None:
        """The first value of a counter is kept, that of a level is not."""
        world = World(view(ring=ENGINE))
        feed = world.ring()
        for value in (7, 9):
            world.turn()
            feed.hear(Figures(world.ns(), "cgroup", {"oom_kill_count": value, "usage": value}))
        ((found, _),) = world.made.states()
        assert found.first == {"cgroup.oom_kill_count": 7}
        assert found.figures["cgroup"].values["oom_kill_count"] == 9

    def test_a_start_does_not_move(self) -> None:
        """However the wall clock runs, the unix time of a process's start stays what it was first."""
        world = World(view(ring=ENGINE))
        world.turn()
        ((before, _),) = world.made.states()
        world.memory.views = [view(ring=ENGINE, started=51.0)]
        world.turn()
        ((after, _),) = world.made.states()
        assert before.started_ns == after.started_ns
