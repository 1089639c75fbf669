# SPDX-License-Identifier: Apache-2.0
"""pipeline: every request is counted once and told once, over restarts, deaths, losses and hostile neighbours."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from tests.sidecar import fake_processes
from tests.sidecar.fake_engine import SECOND, FakeEngine, Sink, admitted, arrived, finished, life, other_process, step
from vllm_kvfix import events
from vllm_kvfix.events import Blocks, Config, Figures, Group
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.reader import RingReader
from vllm_kvfix_sidecar import conventions, cursors, pipeline
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.health import Health
from vllm_kvfix_sidecar.metrics import Metrics
from vllm_kvfix_sidecar.pipeline import Pipeline
from vllm_kvfix_sidecar.readings import Reader
from vllm_kvfix_sidecar.spans import SpanMaker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_kvfix_sidecar.cursors import Cursor


class Sidecar:
    """A pipeline with all that it needs, on a clock that the test turns."""

    def __init__(self, *folders: Path, sampler: Sampler = ALWAYS_ON) -> None:
        self.now = 100.0
        self.metrics = Metrics()
        self.sink = Sink(self.metrics.spans)
        maker = SpanMaker(sampler, Resource({}), self.sink)
        self.pipeline = Pipeline(folders, self.metrics, maker, clock=lambda: self.now)

    def poll(self, seconds: float = 1.0) -> int:
        """A turn, so much later."""
        self.now += seconds
        return self.pipeline.poll()

    @property
    def finished(self) -> int:
        """Requests that the metrics have counted."""
        return sum(sum(engine.finished_by_reason.values()) for engine in self.metrics.engines())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for rings."""
    made = tmp_path / "rings"
    made.mkdir()
    return made


class TestTurn:
    """What one turn does."""

    def test_events_become_metrics_and_spans(self, folder: Path) -> None:
        """Config, the latest step, each finished request and the ring's state reach the metrics; each span the sink."""
        source = FakeEngine(folder / "a.ring")
        config = Config(1000, 8, 64, prefix_caching=True, groups=(Group(16, "FullAttentionSpec"),))
        source.write(config, *life(1))
        source.write(step(5 * SECOND, running=3), *life(2))
        sidecar = Sidecar(folder)
        assert not sidecar.pipeline.scanned
        assert sidecar.poll() == source.published
        (engine,) = sidecar.metrics.engines()
        assert engine.settings == config
        assert engine.last_step == step(3 * SECOND)
        assert (engine.state, engine.lost, engine.malformed, sidecar.finished) == ("live", 0, 0, 2)
        assert len(set(sidecar.sink.ids)) == 2
        (span, _) = sidecar.sink.spans
        header = sidecar.pipeline.engines[0].header
        assert span.start_time == SECOND + header.clock_offset_ns
        assert (sidecar.pipeline.scanned, sidecar.pipeline.folders_readable) == (True, True)
        assert sidecar.pipeline.last_turn == sidecar.now

    def test_what_the_sampler_leaves_is_counted(self, folder: Path) -> None:
        """Requests that give no span are in the metrics, and the accounts say so."""
        FakeEngine(folder / "a.ring").write(*life(1), *life(2))
        sidecar = Sidecar(folder, sampler=ALWAYS_OFF)
        sidecar.poll()
        assert (sidecar.finished, sidecar.metrics.spans.unsampled, sidecar.sink.spans) == (2, 2, [])

    def test_a_backlog_does_not_hold_a_turn(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A turn takes MOST_EVENTS or a frame more of each ring; close() reads the rest."""
        monkeypatch.setattr(pipeline, "MOST_EVENTS", 10)
        big, small = FakeEngine(folder / "a.ring"), FakeEngine(folder / "b.ring")
        for number in range(1, 11):
            big.write(*life(number))
        small.write(*life(1))
        sidecar = Sidecar(folder)
        assert sidecar.poll() == 12 + 6
        big.write(*life(11))
        sidecar.pipeline.close()
        assert sidecar.finished == 12

    def test_a_folder_that_comes_later_is_found(self, tmp_path: Path) -> None:
        """No folder at first is no fault, and within a second of its coming its rings are followed."""
        sidecar = Sidecar(tmp_path / "later")
        sidecar.poll()
        assert not sidecar.pipeline.folders_readable
        (tmp_path / "later").mkdir()
        FakeEngine(tmp_path / "later" / "a.ring").write(*life(1))
        sidecar.poll(pipeline.SCAN_S)
        assert sidecar.finished == 1

    def test_lost_and_read_events_add_up(self, folder: Path) -> None:
        """With a ring that is far too small, published = read + lost, and each span told is of a request once."""
        source = FakeEngine(folder / "a.ring", capacity=600)
        sidecar = Sidecar(folder)
        chance = random.Random(5)  # noqa: S311  # a test
        read = 0
        for number in range(1, 400):
            source.write(*life(number))
            if chance.random() < 0.1:
                read += sidecar.poll(0.05)
        read += sidecar.poll()
        (engine,) = sidecar.metrics.engines()
        assert read + engine.lost == source.published
        assert engine.lost > 0
        assert len(set(sidecar.sink.ids)) == len(sidecar.sink.ids) == sidecar.finished == read // 6

    def test_it_turns_until_it_is_told_to_stop(self, folder: Path) -> None:
        """run() reads what comes while it runs, and returns when the event is set."""
        source = FakeEngine(folder / "a.ring")
        sidecar, stop = Sidecar(folder), threading.Event()
        thread = threading.Thread(target=sidecar.pipeline.run, args=(stop,))
        thread.start()
        try:
            wait_for(lambda: sidecar.pipeline.scanned)
            source.write(*life(1))
            wait_for(lambda: sidecar.finished == 1)
        finally:
            stop.set()
            thread.join(10)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds; fail after 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


class TestRestart:
    """A sidecar that is started again."""

    def test_after_an_orderly_stop_nothing_is_told_twice(self, folder: Path) -> None:
        """What the first told, the second does not; a request that lived through it is told once, with its details."""
        source = FakeEngine(folder / "a.ring")
        source.write(*life(1))
        source.write(arrived(2), step(2 * SECOND), admitted(2))
        first = Sidecar(folder)
        first.poll()
        first.pipeline.close()
        source.write(finished(2), *life(3))
        second = Sidecar(folder)
        second.poll()
        assert (first.finished, second.finished) == (1, 2)
        assert not set(first.sink.ids) & set(second.sink.ids)
        assert [event.name for event in second.sink.spans[0].events] == [conventions.EVENT_ADMITTED]
        assert second.metrics.engines()[0].lost == 0

    def test_a_killed_sidecars_unexported_spans_are_told_again_under_the_same_ids(self, folder: Path) -> None:
        """What was exported before the kill is not told again; what was only queued is, with its ids."""
        source = FakeEngine(folder / "a.ring")
        source.write(step(1))
        first = Sidecar(folder)
        first.poll()
        source.write(*life(1))
        first.poll(0.05)
        first.sink.export()
        first.poll(0.05)
        source.write(*life(2))
        first.poll(0.05)
        second = Sidecar(folder)
        second.poll()
        assert second.sink.ids == first.sink.ids[1:]
        assert len(first.sink.ids) == 2

    def test_state_is_known_again_from_what_was_told_before(self, folder: Path) -> None:
        """Config and step of the history reach the metrics of the second sidecar; its requests are not counted."""
        source = FakeEngine(folder / "a.ring")
        source.write(Config(5, 1, 1, prefix_caching=False, groups=()), step(SECOND, running=7), *life(1))
        first = Sidecar(folder)
        first.poll()
        first.pipeline.close()
        second = Sidecar(folder)
        second.poll()
        (engine,) = second.metrics.engines()
        assert engine.settings is not None
        assert engine.last_step is not None
        assert (second.finished, second.sink.ids) == (0, [])

    def test_cursors_are_written_once_a_second_at_most_while_nothing_is_exported(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """100 turns in 5 s without traces write 5 or 6 cursors."""
        written: list[Cursor] = []
        monkeypatch.setattr(cursors, "write", lambda _, __, cursor, *___: written.append(cursor))
        source, now = FakeEngine(folder / "a.ring"), [0.0]
        turned = Pipeline([folder], Metrics(), None, clock=lambda: now[0])
        for _ in range(100):
            source.write(step(1))
            turned.poll()
            now[0] += 0.05
        assert 5 <= len(written) <= 6

    def test_a_receiver_that_is_down_makes_no_heap_of_cursors(self, folder: Path) -> None:
        """While the sink takes nothing, the cursors that wait are few, however many turns there are."""
        source, sidecar = FakeEngine(folder / "a.ring"), Sidecar(folder)
        source.write(*life(1))
        sidecar.poll()
        for _ in range(500):
            source.write(step(1))
            sidecar.poll(0.05)
        (follower,) = sidecar.pipeline._followers.values()
        assert len(follower.unsafe) <= 2


class TestEnds:
    """Engines that die."""

    def test_a_killed_engines_requests_are_told_once(self, folder: Path) -> None:
        """After kill -9 the running request is told as engine_ended; a sidecar that comes later tells none of it."""
        sidecar = Sidecar(folder)
        with other_process(folder / "a.ring") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            sidecar.poll()
            assert sidecar.finished == 1
            process.kill()
            process.wait()
        sidecar.poll()
        sidecar.poll()
        (engine,) = sidecar.metrics.engines()
        assert engine.finished_by_reason["engine_ended"] == 1
        assert (engine.state, engine.ended_s is not None) == ("ended", True)
        (known,) = sidecar.pipeline.engines
        assert (known.state, known.told, known.closed) == ("ended", True, True)
        sidecar.sink.export()
        again = Sidecar(folder)
        again.poll()
        again.poll()
        assert (again.finished, again.sink.ids) == (0, [])
        assert [engine.state for engine in again.pipeline.engines] == ["ended"]

    def test_an_engine_that_died_before_the_sidecar_came_is_told_whole(self, folder: Path) -> None:
        """Post-mortem: the ring of a dead engine is read to its end, then its open requests are told."""
        source = FakeEngine(folder / "a.ring")
        source.write(*life(1))
        source.write(arrived(2), step(2 * SECOND), admitted(2))
        source.die()
        sidecar = Sidecar(folder)
        sidecar.poll()
        sidecar.poll()
        reasons = [dict(span.attributes or {})[conventions.ATTR_FINISH_REASON] for span in sidecar.sink.spans]
        assert reasons == ["stop", "engine_ended"]

    def test_a_dead_engines_backlog_is_read_before_it_is_closed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many turns it takes, all that a dead engine published is told, and nothing twice."""
        monkeypatch.setattr(pipeline, "MOST_EVENTS", 10)
        source = FakeEngine(folder / "a.ring")
        sidecar = Sidecar(folder)
        for number in range(1, 21):
            source.write(*life(number))
            sidecar.poll() if number == 5 else None
        sidecar.pipeline.engines[0].start_time = 1  # stands for: the process is gone
        for _ in range(20):
            sidecar.poll()
        assert len(set(sidecar.sink.ids)) == len(sidecar.sink.ids) == 20
        assert sidecar.pipeline.engines[0].lost == 0

    @pytest.mark.parametrize("how", ["overwritten", "dropped", "damaged"])
    def test_a_request_that_may_be_over_is_not_said_to_have_been_cut_off(self, folder: Path, how: str) -> None:
        """Whose Finished was overwritten, dropped or damaged is not told as engine_ended; lost and read add up."""
        source = FakeEngine(folder / "a.ring", capacity=600)
        sidecar = Sidecar(folder)
        source.write(arrived(1))
        read = sidecar.poll()
        if how == "dropped":
            source.writer.drop(1)
        else:
            source.write(finished(1))
        if how == "damaged":
            source.writer._body[(source.writer._head - 1) % 600] ^= 1
        else:
            for _ in range(50):
                source.write(step(SECOND))
                read += sidecar.poll(0.05) if how == "dropped" else 0
            source.write(arrived(2))
        sidecar.pipeline.engines[0].start_time = 1  # stands for: the process is gone
        read += sidecar.poll() + sidecar.poll()
        told = [dict(span.attributes or {})[conventions.ATTR_REQUEST_ID] for span in sidecar.sink.spans]
        assert told == ([] if how == "damaged" else ["cmpl-2"])
        assert read + sidecar.pipeline.engines[0].lost == source.published
        assert (sidecar.pipeline.engines[0].lost > 0) == (how != "dropped")

    def test_a_deleted_ring_is_told_to_its_end(self, folder: Path) -> None:
        """It is read on while the engine lives; when that ends, the engine is forgotten, and no cursor is left."""
        sidecar = Sidecar(folder)
        with other_process(folder / "a.ring") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            sidecar.poll()
            (folder / "a.ring").unlink()
            sidecar.poll()
            assert len(sidecar.pipeline.engines) == 1
            process.kill()
            process.wait()
        for _ in range(3):
            sidecar.poll()
        assert sidecar.finished == 2
        assert sidecar.pipeline.engines == ()
        assert list(folder.iterdir()) == []

    def test_an_ended_engine_leaves_the_metrics_after_a_while(self, folder: Path) -> None:
        """It is shown for some minutes, then no more."""
        source = FakeEngine(folder / "a.ring")
        source.write(*life(1))
        source.die()
        sidecar = Sidecar(folder)
        sidecar.poll()
        sidecar.poll(250)
        assert len(sidecar.metrics.engines()) == 1
        sidecar.poll(100)
        assert sidecar.metrics.engines() == []


class TestProcesses:
    """What goes to the assessment, and who is no engine."""

    def sidecar(self, folder: Path) -> tuple[Sidecar, Assessment]:
        """With an assessment over an empty process table."""
        made = Sidecar(folder)
        memory = fake_processes.FakeMemory()
        assessment = Assessment(memory, judge=lambda *_: fake_processes.leak(), clock=lambda: made.now)
        made.pipeline = Pipeline([folder], made.metrics, None, assessment=assessment, clock=lambda: made.now)
        return made, assessment

    def test_figures_and_steps_reach_the_assessment(self, folder: Path) -> None:
        """Those of an engine make its history, and the verdict on it; its requests are counted as ever."""
        source = FakeEngine(folder / "a.ring")
        source.write(*life(1))
        source.write(Figures(4 * SECOND, "malloc", {"in_use": 5}), step(5 * SECOND)._replace(finished=1))
        source.poke(layout.PATCH_STATE_WORD, layout.PATCH_STATES.index("applied"))
        sidecar, assessment = self.sidecar(folder)
        sidecar.poll()
        ((_, history),) = assessment.histories().items()
        assert (history.pid, history.role, history.vllm_version) == (os.getpid(), "engine core", "0.25.1")
        assert history.patch_state == "applied"
        assert list(history.memory["malloc.in_use"].times) == [4]
        assert list(history.load["requests"].values)[-1] == 1
        assert list(assessment.verdicts.values()) == [fake_processes.leak()]
        assert sidecar.finished == 1

    def test_other_processes_are_followed_and_are_no_engines(self, folder: Path) -> None:
        """A worker's figures are heard; it is in no metric of engines, and --once lists it apart."""
        FakeEngine(folder / "a.ring").write(*life(1))
        worker = FakeEngine(folder / "b.ring")
        worker.poke(layout.ROLE_WORD, layout.ROLES.index(layout.WORKER))
        worker.write(Figures(4 * SECOND, "smaps", {"pss": 5}))
        sidecar, assessment = self.sidecar(folder)
        sidecar.poll()
        assert {history.role for history in assessment.histories().values()} <= {"engine core", "worker"}
        assert any("smaps.pss" in history.memory for history in assessment.histories().values())
        assert len(sidecar.metrics.engines()) == 1
        found = Reader(sidecar.metrics).read()
        assert sum(point.value for point in found[conventions.ENGINES]) == 1  # type: ignore[misc]  # no histogram
        told: dict[str, Any] = Health(sidecar.pipeline, sidecar.metrics, [folder]).summary()
        assert [engine["ring"] for engine in told["engines"]] == ["a.ring"]
        (process,) = told["processes"]
        assert (process["ring"], process["role"], process["state"]) == ("b.ring", "worker", "live")
        assert process["events"] == {"published": 1, "dropped": 0, "lost": 0}
        worker.die()
        sidecar.pipeline.processes[0].start_time = 1  # stands for: the process is gone
        sidecar.poll()
        sidecar.poll()
        assert [engine.key.ring for engine in sidecar.metrics.engines()] == ["a.ring"]

    def test_the_end_of_a_ring_is_that_of_its_process(self, folder: Path) -> None:
        """When the engine has died and its ring was read, its process has ended; one that died before is not met."""
        source, dead = FakeEngine(folder / "a.ring"), FakeEngine(folder / "b.ring")
        dead.write(Figures(4 * SECOND, "malloc", {"in_use": 5}))
        dead.die()
        source.write(*life(1))
        sidecar, assessment = self.sidecar(folder)
        sidecar.poll()
        assert len(assessment.histories()) == len(assessment._records) == 1
        (engine,) = (engine for engine in sidecar.pipeline.engines if engine.key.ring == "a.ring")
        engine.start_time = 1  # stands for: the process is gone
        sidecar.poll()
        sidecar.poll()
        assert assessment.histories() == {}

    def test_a_fault_of_the_assessment_stops_nothing(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whatever fails in it, requests are counted, errors are counted, and each place is said once."""

        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        source = FakeEngine(folder / "a.ring")
        sidecar, assessment = self.sidecar(folder)
        sidecar.poll()
        feed = assessment._feeds[0]
        monkeypatch.setattr(assessment, "follow", fail)
        other = FakeEngine(folder / "b.ring")
        other.write(*life(1))
        monkeypatch.setattr(assessment, "tick", fail)
        monkeypatch.setattr(assessment, "look", fail)
        monkeypatch.setattr(feed.record, "hear", fail)
        monkeypatch.setattr(feed.load, "take", fail)
        for number in range(1, 4):
            source.write(Figures(4 * SECOND, "malloc", {"in_use": 5}), *life(number))
            sidecar.poll()
        assert sidecar.finished == 4
        assert assessment.errors >= 4 * 3 + 1
        assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 5

    def test_who_only_reads_leaves_no_trace(self, folder: Path) -> None:
        """Read-only, no cursor is written, and none removed; another sidecar tells all."""
        source = FakeEngine(folder / "a.ring")
        source.write(*life(1))
        (folder / "gone.ring.cursor").write_text("{}")
        reading = Pipeline([folder], Metrics(), None, read_only=True)
        reading.poll()
        reading.close()
        assert sorted(path.name for path in folder.iterdir()) == ["a.ring", "gone.ring.cursor"]
        sidecar = Sidecar(folder)
        sidecar.poll()
        assert sidecar.finished == 1


class TestNeighbours:
    """One ring's fault is not another's."""

    def test_a_ring_that_is_cut_is_given_up_and_the_others_go_on(self, folder: Path) -> None:
        """It is counted as refused with a reason, no turn raises, and the next ring's requests are told."""
        bad, good = FakeEngine(folder / "a.ring"), FakeEngine(folder / "b.ring")
        bad.write(*life(1))
        sidecar = Sidecar(folder)
        sidecar.poll()
        os.truncate(bad.path, 100)
        good.write(*life(1))
        sidecar.poll(0.05)
        sidecar.poll()
        assert sidecar.finished == 2
        assert [engine.path for engine in sidecar.pipeline.engines] == [good.path]
        assert sidecar.metrics.refused_files == 1
        assert list(sidecar.pipeline.refused) == [bad.path]

    def test_a_ring_that_failed_once_is_followed_again(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After an input error it is given up, found again, told from where it was left, and stays in the metrics."""
        source = FakeEngine(folder / "a.ring")
        source.write(*life(1))
        sidecar = Sidecar(folder)
        sidecar.poll()
        source.write(*life(2))
        sidecar.poll(0.05)

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(RingReader, "poll", fail)
            sidecar.poll(0.05)
        assert sidecar.pipeline.engines == ()
        source.write(*life(3))
        sidecar.poll()
        assert (len(sidecar.sink.ids), len(set(sidecar.sink.ids))) == (3, 3)
        sidecar.poll(1000)
        assert len(sidecar.metrics.engines()) == 1

    def test_a_ring_that_always_fails_is_tried_ever_more_rarely(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A ring whose body cannot be read costs less and less, is said once, and does not hold up the others."""
        FakeEngine(folder / "a.ring").write(*life(1))
        tries: list[RingReader] = []

        def fail(reader: RingReader) -> None:
            tries.append(reader)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(RingReader, "poll", fail)
        sidecar = Sidecar(folder)
        for _ in range(100):
            sidecar.poll()
        assert 3 < len(tries) < 10
        assert caplog.text.count("not followed") == 1

    @pytest.mark.parametrize("number", range(20))
    def test_no_words_in_a_ring_stop_it(self, folder: Path, number: int) -> None:
        """Frames of random words, and random words over header and body, never raise; the good ring is told."""
        chance = random.Random(number)  # noqa: S311  # a test
        bad, good = FakeEngine(folder / "a.ring", capacity=2000), FakeEngine(folder / "b.ring")
        sidecar = Sidecar(folder)
        for request in range(1, 30):
            words = [chance.getrandbits(64) for _ in range(chance.randrange(40))]
            words += [events.head(chance.randrange(12), chance.randrange(1, 30), chance.randrange(5))]
            words += [chance.choice([0, 1, 2**63, 2**64 - 1]) for _ in range(chance.randrange(40))]
            bad.writer.write(words, chance.choice([0, 1, 2**32 - 1]))
            if chance.random() < 0.3:
                bad.writer._body[chance.randrange(2000)] = chance.getrandbits(64)
            if chance.random() < 0.2:
                bad.poke(chance.randrange(layout.CLOCK_OFFSET_WORD, 32), chance.getrandbits(64))
            good.write(*life(request))
            sidecar.poll(chance.choice([0.05, 2.0]))
        told = [span for span in sidecar.sink.spans if (span.attributes or {})[conventions.ATTR_PEAK_BLOCKS] == 8]
        assert len(told) == 29

    def test_a_thousand_requests_in_one_step_are_told(self, folder: Path) -> None:
        """A step that admits and ends 1,000 requests gives 1,000 spans."""
        source = FakeEngine(folder / "a.ring", capacity=1 << 18)
        sidecar = Sidecar(folder)
        source.write(*[arrived(number) for number in range(1, 1001)], step(2 * SECOND), *map(admitted, range(1, 1001)))
        source.write(step(3 * SECOND), *[finished(number, groups=(Blocks(0, number),)) for number in range(1, 1001)])
        sidecar.poll()
        got = [(span.attributes or {})[conventions.ATTR_NEW_BLOCKS] for span in sidecar.sink.spans]
        assert got == list(range(1, 1001))
