# SPDX-License-Identifier: Apache-2.0
"""deaths: the sidecar tells of a process that dies under it, once, and of none that ends in order."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.sidecar.collectors import wait_until
from tests.sidecar.dying_engine import dying_engine, order
from tests.sidecar.fake_engine import FakeEngine, Sink, life
from tests.sidecar.test_episodes import Events
from vllm_kvfix.ring import layout
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar import cursors, death, death_export, deaths, last_words, together
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.death import End
from vllm_kvfix_sidecar.deaths import Deaths
from vllm_kvfix_sidecar.kernel_log import KernelLine
from vllm_kvfix_sidecar.metrics import Metrics
from vllm_kvfix_sidecar.oom import Witness
from vllm_kvfix_sidecar.pipeline import Pipeline
from vllm_kvfix_sidecar.spans import SpanMaker
from vllm_kvfix_sidecar.together import Gone

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan

    from vllm_kvfix_sidecar.host_memory import ProcessView


class Nobody:
    """Sees no process."""

    def look(
        self,
        engines: Collection[tuple[int, int, str]],  # noqa: ARG002  # the protocol's
        silent: Collection[tuple[int, int]] = (),  # noqa: ARG002  # as above
    ) -> Sequence[ProcessView]:
        """Nothing."""
        return ()


class Flushed:
    """Counts how often it was emptied."""

    def __init__(self) -> None:
        self.times = 0

    def flush(self) -> None:
        """Once more."""
        self.times += 1


class Sidecar:
    """A pipeline on real time, its spans, its events, and what it has told of deaths."""

    def __init__(self, folder: Path, kernel: Path) -> None:
        metrics = Metrics()
        self.sink, self.events, self.flushed = Sink(metrics.spans), Events(), Flushed()
        maker = SpanMaker(ALWAYS_OFF, Resource({"service.name": "s"}), self.sink)
        assessment = Assessment(Nobody())
        self.deaths = Deaths(
            maker.resource, maker, self.events, assessment=assessment, flush=[self.flushed], kernel=kernel
        )
        self.pipeline = Pipeline([folder], metrics, maker, assessment=assessment, deaths=self.deaths)
        self.pipeline.poll()

    def until_told(self, count: int = 1) -> None:
        """Turn until so many deaths were told."""

        def turned() -> bool:
            self.pipeline.poll()
            return self.deaths.told >= count

        wait_until(turned)

    def turn(self, seconds: float) -> None:
        """Turn for so long: nothing is to come, so nothing can be waited for."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pipeline.poll()
            time.sleep(0.05)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those of deaths."""
        return [span for span in self.sink.spans if span.name == names.DEATH_SPAN_NAME]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A log of the kernel in which nothing stands."""
    path = tmp_path / "kmsg"
    path.touch()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For rings."""
    made = tmp_path / "rings"
    made.mkdir()
    return made


def test_a_kill_is_told_as_span_event_and_line(folder: Path, kernel: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All three have who, when, how large against which limit, and the ring; what waits is sent at once."""
    with dying_engine(folder / "a.ring") as process:
        sidecar = Sidecar(folder, kernel)
        process.kill()
        process.wait()
        sidecar.until_told()
        (span,), (event,) = sidecar.spans, sidecar.events.records
        context, attributes = span.get_span_context(), dict(span.attributes or {})
        assert context is not None
        assert (event.log_record.trace_id, event.log_record.span_id) == (context.trace_id, context.span_id)
        assert event.log_record.event_name == names.EVENT_DEATH
        assert set(attributes) <= {*names.DEATH_ATTRIBUTES, *names.GROWTH_ATTRIBUTES}
        assert attributes[names.ATTR_DEATH_END] == "killed"
        assert attributes[names.ATTR_DEATH_LOST] == 3
        assert int(str(attributes[names.ATTR_DEATH_RSS])) >= 900 << 20
        assert attributes[names.ATTR_DEATH_LIMIT] == 1 << 30
        assert attributes[names.ATTR_DEATH_RING] == str(folder / "a.ring")
        assert span.resource.attributes[names.ATTR_PID] == process.pid
        assert [told.name for told in span.events] == [names.EVENT_LAST_STEP, names.EVENT_DEATH]
        assert 0 <= (span.end_time or 0) - span.events[0].timestamp < 10**9
        assert (span.end_time or 0) - (span.start_time or 0) <= 10 * 10**9
        (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert f"EngineCore (pid {process.pid})" in line.getMessage()
        assert "3 requests were lost" in line.getMessage()
        assert line.fields["more"] == f"vllm-kvfix postmortem {folder / 'a.ring'}"  # type: ignore[attr-defined]  # our own
        wait_until(lambda: sidecar.flushed.times == 1)


def test_an_end_in_order_is_no_death(folder: Path, kernel: Path) -> None:
    """No span, no event; the cursor says that it was told."""
    with dying_engine(folder / "a.ring") as process:
        sidecar = Sidecar(folder, kernel)
        order(process, "order")
        sidecar.turn(deaths.GATHER_S + 0.5)
        assert (sidecar.spans, sidecar.events.records, sidecar.deaths.told) == ([], [], 0)
        assert json.loads(cursors.path_of(folder / "a.ring").read_text())["ended"]


def test_what_its_server_stops_is_no_death(folder: Path, kernel: Path) -> None:
    """A server that lives still says that it stops, and its engine core is killed: nothing is told of that."""
    with dying_engine(folder / "core.ring") as core, dying_engine(folder / "server.ring", layout.API_SERVER) as server:
        sidecar = Sidecar(folder, kernel)
        assert server.stdin is not None
        server.stdin.write("stop\n")
        server.stdin.flush()
        wait_until(lambda: last_words.of(folder / "server.ring").header.end == layout.STOPPING)
        core.kill()
        core.wait()
        sidecar.turn(deaths.GATHER_S + 1.0)
        assert (sidecar.spans, sidecar.events.records, sidecar.deaths.told) == ([], [], 0)


def test_an_exception_is_told(folder: Path, kernel: Path) -> None:
    """With its type, and no word of memory."""
    with dying_engine(folder / "a.ring") as process:
        sidecar = Sidecar(folder, kernel)
        order(process, "exception")
        sidecar.until_told()
        attributes = dict(sidecar.spans[0].attributes or {})
        assert attributes[names.ATTR_DEATH_END] == "exception"
        assert attributes[names.ATTR_DEATH_REASON] == "torch.OutOfMemoryError"
        assert attributes[names.ATTR_DEATH_OOM] == "no"


def test_those_that_end_with_it_are_named_and_not_told(folder: Path, kernel: Path) -> None:
    """A worker is killed and its engine ends by an exception: one span, of the worker, with the engine's steps."""
    with dying_engine(folder / "core.ring") as core, dying_engine(folder / "worker.ring", layout.WORKER) as worker:
        sidecar = Sidecar(folder, kernel)
        worker.kill()
        worker.wait()
        order(core, "exception")
        sidecar.until_told()
        sidecar.turn(deaths.GATHER_S + 0.5)
        (span,) = sidecar.spans
        attributes = dict(span.attributes or {})
        assert span.resource.attributes[names.ATTR_PID] == worker.pid
        (other,) = attributes[names.ATTR_DEATH_OTHERS]  # type: ignore[misc]  # a row of strings
        assert str(other).startswith(f"EngineCore (pid {core.pid}) ended by an exception (torch.OutOfMemoryError)")
        assert attributes[names.ATTR_DEATH_LOST] == 3
        assert attributes[names.ATTR_STEP_RUNNING] == 2
        witness = json.loads(cursors.path_of(folder / "core.ring").read_text())["witness"]
        assert witness["first"] == "worker.ring"


def test_a_death_is_told_once(folder: Path, kernel: Path) -> None:
    """Neither the next turns nor the next sidecar tell it again."""
    with dying_engine(folder / "a.ring") as process:
        sidecar = Sidecar(folder, kernel)
        process.kill()
        process.wait()
        sidecar.until_told()
        sidecar.pipeline.close()
        again = Sidecar(folder, kernel)
        again.turn(deaths.GATHER_S + 0.5)
        assert (sidecar.deaths.told, again.deaths.told) == (1, 0)


def test_a_death_while_no_sidecar_ran_is_told_by_the_next(folder: Path, kernel: Path) -> None:
    """It may have been killed with its engine: nobody has told that end yet."""
    with dying_engine(folder / "a.ring") as process:
        process.kill()
        process.wait()
        sidecar = Sidecar(folder, kernel)
        sidecar.until_told()
        assert len(sidecar.spans) == 1


def test_a_death_of_long_ago_is_left_to_the_command(folder: Path, kernel: Path) -> None:
    """A ring whose last sign of life is old gives no alarm."""
    engine = FakeEngine(folder / "a.ring")
    engine.write(*life(1))
    engine.die()
    engine.poke(layout.HEARTBEAT_WORD, time.monotonic_ns() - int((deaths.RECENT_S + 1) * 1e9))
    sidecar = Sidecar(folder, kernel)
    sidecar.turn(deaths.GATHER_S + 0.5)
    assert sidecar.deaths.told == 0


def test_a_stop_of_the_sidecar_tells_what_it_knows(folder: Path, kernel: Path) -> None:
    """The death is told though others might still have come."""
    with dying_engine(folder / "a.ring") as process:
        sidecar = Sidecar(folder, kernel)
        process.kill()
        process.wait()
        sidecar.pipeline.close()
        assert sidecar.deaths.told == 1


def test_a_ring_that_went_meanwhile_costs_no_turn(folder: Path, kernel: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line in the log says what is known without it."""
    with dying_engine(folder / "a.ring") as process:
        sidecar = Sidecar(folder, kernel)
        process.kill()
        process.wait()
        (folder / "a.ring").unlink()
        sidecar.turn(deaths.GATHER_S + 2.5)
        assert sidecar.deaths.told == 0
        assert any("cannot be read any more" in record.getMessage() for record in caplog.records)


class TestTogether:
    """Who died first, among headers of one machine."""

    @staticmethod
    def gone(  # noqa: PLR0913  # what tells them apart
        folder: Path, name: str, role: str, end: str, ago_s: float, *, named: bool = False, found: float = 0.0
    ) -> Gone:
        """A process that ended so long ago."""
        engine = FakeEngine(folder / name)
        header = last_words.of(engine.path).header
        line = KernelLine("killed", oom=True, by_cgroup=True) if named else None

        heartbeat = time.monotonic_ns() - int(ago_s * 1e9)
        header = replace(header, role=role, end=end, heartbeat_ns=heartbeat, pid=int(ago_s * 10))
        return Gone(engine.path, header, Witness("/c", kernel=line), found)

    def test_the_one_that_the_kernel_names_is_the_first(self, folder: Path) -> None:
        """Whatever the times say."""
        core = self.gone(folder, "a", layout.ENGINE_CORE, layout.NOT_ENDED, 3)
        worker = self.gone(folder, "b", layout.WORKER, layout.NOT_ENDED, 2, named=True)
        assert together.first([core, worker]) is worker
        assert together.named([worker]) == "Worker (pid 20)"

    def test_an_engine_core_comes_before_a_worker_of_about_the_time(self, folder: Path) -> None:
        """A worker speaks once a second, so that its last word is older than its end."""
        core = self.gone(folder, "a", layout.ENGINE_CORE, layout.NOT_ENDED, 2)
        worker = self.gone(folder, "b", layout.WORKER, layout.NOT_ENDED, 3)
        early = self.gone(folder, "c", layout.WORKER, layout.NOT_ENDED, 6)
        assert together.first([worker, core]) is core
        assert together.first([worker, core, early]) is early

    def test_what_a_server_stopped_has_ended_in_order(self, folder: Path) -> None:
        """One that begins to stop says so before it kills; one that ended after a death says nothing of it."""
        core = self.gone(folder, "a", layout.ENGINE_CORE, layout.NOT_ENDED, 2)
        failed = self.gone(folder, "b", layout.WORKER, layout.ENDED_BY_EXCEPTION, 2)
        server = self.gone(folder, "c", layout.API_SERVER, layout.STOPPING, 2).header
        server = replace(server, end_ns=core.header.heartbeat_ns + 10**8)
        assert [one.stopped for one in together.settled([core, failed], [server])] == [True, False]
        (stopped,) = together.settled([core], [server])
        assert (stopped.end, stopped.how) == (End.IN_ORDER, "was stopped by its server, in order,")
        for other in (
            replace(server, role=layout.WORKER),
            replace(server, end=layout.ENDED_IN_ORDER),
            replace(server, end_ns=server.end_ns + 60 * 10**9),
            replace(server, boot_id=bytes(16)),
        ):
            assert not together.settled([core], [other])[0].stopped

    def test_who_said_a_word_was_not_the_first(self, folder: Path) -> None:
        """Killed before exception before order; found earlier before found later."""
        killed = self.gone(folder, "a", layout.WORKER, layout.NOT_ENDED, 1)
        later = self.gone(folder, "b", layout.WORKER, layout.NOT_ENDED, 9, found=2.0)
        failed = self.gone(folder, "c", layout.ENGINE_CORE, layout.ENDED_BY_EXCEPTION, 2)
        ended = self.gone(folder, "d", layout.API_SERVER, layout.ENDED_IN_ORDER, 3)
        assert together.first([ended, failed, later, killed]) is killed
        assert together.first([ended, failed]) is failed
        assert together.deaths(killed, [later, failed, ended]) == 2
        assert [other.path.name for other in together.with_it(killed, [ended, failed, later])] == ["b", "d", "c"]


def test_limits_on_spans_are_kept(folder: Path) -> None:
    """OTEL_SPAN_*_LIMIT bound attributes and events of the span."""
    with dying_engine(folder / "a.ring") as process:
        process.kill()
        process.wait()
    made = death.of(last_words.of(folder / "a.ring"))
    span = death_export.span(made, Resource({}), SpanLimits(max_span_attributes=2, max_events=1))
    assert len(span.attributes or {}) == 2
    assert len(span.events) == 1
