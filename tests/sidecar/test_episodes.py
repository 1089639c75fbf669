# SPDX-License-Identifier: Apache-2.0
"""episodes: each growth is one span under ids that stay, and events say when it begins, changes and ends."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.sidecar.collectors import wait_until
from tests.sidecar.fake_engine import Sink
from tests.sidecar.test_report import VERDICTS
from tests.sidecar.verdicts import ACTION, BLOCK_IDS, DAY, MIB, PULL, calm, culprit, history, leak
from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar import episodes, event_export, telemetry_settings
from vllm_kvfix_sidecar.episodes import CALM_S, CHANGE_S, MOST_OPEN, Episodes, growth_attributes
from vllm_kvfix_sidecar.metrics import SpanCounts
from vllm_kvfix_sidecar.process_table import ProcessKey
from vllm_kvfix_sidecar.spans import SpanMaker
from vllm_kvfix_sidecar.verdict import Interval, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk._logs import ReadableLogRecord, ReadWriteLogRecord
    from opentelemetry.sdk.trace import ReadableSpan

    from vllm_kvfix_sidecar.verdict import Verdict

KEY = ProcessKey(4242, 77)
UNIX_NS = 1_796_050_000 * 10**9
# On the clock of the histories, which is that of `history()`: it was watched from 4400 to 8000, and began at 1000.
AT = 8000.0


class Events:
    """An event sink that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[ReadWriteLogRecord] = []

    def emit(self, record: ReadWriteLogRecord) -> bool:
        """Take an event."""
        self.records.append(record)
        return True

    @property
    def names(self) -> list[str]:
        """In their order, less the prefix."""
        return [str(record.log_record.event_name).rpartition(".")[2] for record in self.records]


class Sidecar:
    """One life of a sidecar whose clocks the test sets; the unix clock runs with ``now``."""

    def __init__(self, limits: SpanLimits | None = None) -> None:
        self.now = AT
        self.counts = SpanCounts()
        self.sink = Sink(self.counts)
        self.events = Events()
        self.maker = SpanMaker(ALWAYS_OFF, Resource({"service.name": "s"}), self.sink, limits)
        self.episodes = Episodes(
            self.maker.resource,
            self.maker,
            self.events,
            boot_id=b"boot",
            unix_ns=lambda: UNIX_NS + int((self.now - AT) * 1e9),
        )

    def judged(self, verdict: Verdict, after: float = 15.0, key: ProcessKey = KEY) -> None:
        """A verdict comes, ``after`` seconds."""
        self.now += after
        self.episodes.judged(key, verdict, history(), self.now)

    def end(self, after: float = 15.0, key: ProcessKey = KEY) -> None:
        """A process ends, ``after`` seconds."""
        self.now += after
        self.episodes.ended(key, self.now)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those that the sink got."""
        return self.sink.spans


def unix(moment: float) -> int:
    """A moment of the histories' clock."""
    return UNIX_NS + int((moment - AT) * 1e9)


class TestEpisode:
    """Begin, change, end."""

    def test_a_growth_is_one_span_from_its_window_to_the_first_calm_verdict(self) -> None:
        """Its begin is that of the window, its end the first verdict of the calm, and the sampler is not asked."""
        sidecar = Sidecar()
        sidecar.judged(leak(), after=0)
        for _ in range(4):
            sidecar.judged(leak(window_s=9000.0))
        assert sidecar.spans == []
        calm_at = sidecar.now + 15
        while not sidecar.spans:
            sidecar.judged(calm(4242, kind=Kind.BOUNDED))
        assert sidecar.now - calm_at >= CALM_S
        (span,) = sidecar.spans
        assert (span.name, span.start_time, span.end_time) == (names.GROWTH_SPAN_NAME, unix(AT - 3600), unix(calm_at))
        assert dict(span.attributes or {}) == {**growth_attributes(leak()), names.ATTR_GROWTH_END: "calm"}
        assert sidecar.maker.accepted == 1

    def test_no_window_reaches_back_before_the_process(self) -> None:
        """A window of a day of a process that is an hour old begins with the process."""
        sidecar = Sidecar()
        sidecar.judged(leak(window_s=DAY), after=0)
        sidecar.end()
        assert sidecar.spans[0].start_time == unix(1000)

    @pytest.mark.parametrize("kind", sorted(Kind, key=str))
    def test_only_growth_without_a_known_end_is_one(self, kind: Kind) -> None:
        """Unbounded, unexplained, retained; nothing is told of what is steady, warming or fills."""
        sidecar = Sidecar()
        sidecar.judged(replace(leak(), kind=kind))
        expected = {Kind.UNBOUNDED, Kind.UNEXPLAINED, Kind.RETAINED}
        assert sidecar.episodes.open == len(sidecar.events.records) == int(kind in expected)

    def test_it_is_seen_while_it_lasts(self) -> None:
        """The event at the begin has the span's ids, a sentence, a severity, and what the span will say."""
        sidecar = Sidecar()
        sidecar.judged(leak())
        (event,) = sidecar.events.records
        record = event.log_record
        assert (record.event_name, record.severity_number) == (names.EVENT_GROWTH_BEGAN, SeverityNumber.WARN)
        assert str(record.body).startswith(f"EngineCore (pid 4242) leaks: {BLOCK_IDS} grows by 88 MiB an hour")
        assert dict(record.attributes or {}) == growth_attributes(leak())
        assert record.timestamp == unix(sidecar.now)
        sidecar.end()
        assert sidecar.sink.ids == [(record.trace_id, record.span_id)]
        resource = {
            "service.name": "s",
            names.ATTR_PID: 4242,
            names.ATTR_ROLE: "engine core",
            names.ATTR_VLLM_VERSION: "0.25.1",
        }
        assert dict(event.resource.attributes) == dict(sidecar.spans[0].resource.attributes) == resource  # type: ignore[union-attr]  # it has one

    def test_the_end_of_the_process_is_the_end(self) -> None:
        """At once, with the reason; a second end of it tells nothing."""
        sidecar = Sidecar()
        sidecar.judged(leak())
        sidecar.end()
        sidecar.end()
        (span,) = sidecar.spans
        assert (span.end_time, (span.attributes or {})[names.ATTR_GROWTH_END]) == (
            unix(sidecar.now - 15),
            "process_ended",
        )
        assert sidecar.events.names == ["began", "ended"]
        assert (
            str(sidecar.events.records[1].log_record.body)
            == "EngineCore (pid 4242) grew for 60 minutes, and has ended."
        )

    def test_a_verdict_that_wavers_makes_one_episode(self) -> None:
        """Calm for less than CALM_S, again and again, is no end."""
        sidecar = Sidecar()
        for _ in range(20):
            sidecar.judged(leak())
            sidecar.judged(calm(4242), after=CALM_S / 2)
        assert (sidecar.events.names, sidecar.spans) == (["began"], [])

    def test_a_change_is_told_once_it_is_news(self) -> None:
        """Another kind, category or container, no oftener than once in CHANGE_S; figures alone are none."""
        sidecar = Sidecar()
        sidecar.judged(replace(leak(), kind=Kind.UNEXPLAINED, culprits=()))
        sidecar.judged(leak(), after=CHANGE_S / 2)
        assert sidecar.events.names == ["began"]
        sidecar.judged(leak(), after=CHANGE_S / 2)
        sidecar.judged(leak(slope=Interval(1, 2, 3)), after=CHANGE_S * 2)
        assert sidecar.events.names == ["began", "changed"]
        sidecar.judged(leak(category="anonymous"), after=CHANGE_S)
        sidecar.judged(leak(culprits=(culprit("other"),)), after=CHANGE_S)
        sidecar.end()
        (span,) = sidecar.spans
        assert sidecar.events.names == ["began", "changed", "changed", "changed", "ended"]
        assert [event.name.rpartition(".")[2] for event in span.events] == sidecar.events.names
        assert (span.attributes or {})[names.ATTR_GROWTH_CONTAINERS] == ("other",)

    def test_when_the_sidecar_stops_the_span_is_told_and_no_end(self) -> None:
        """The growth may go on, so no event says that it is over."""
        sidecar = Sidecar()
        sidecar.judged(leak())
        sidecar.episodes.close(sidecar.now)
        (span,) = sidecar.spans
        assert (span.attributes or {})[names.ATTR_GROWTH_END] == "sidecar_stopped"
        assert sidecar.events.names == ["began"]
        assert sidecar.episodes.open == 0

    def test_a_sidecar_that_starts_anew_tells_the_same_span(self) -> None:
        """Same process, same growth: the same ids; another process, or a second growth of it, has others."""
        first, second = Sidecar(), Sidecar()
        for sidecar in (first, second):
            sidecar.judged(leak())
            sidecar.episodes.close(sidecar.now)
        second.judged(leak())
        second.judged(leak(99), key=ProcessKey(99, 77))
        second.judged(leak(), key=ProcessKey(4242, 78))
        second.episodes.close(second.now)
        assert first.sink.ids == second.sink.ids[:1]
        assert len(set(second.sink.ids)) == 4

    def test_no_more_are_followed_than_anybody_reads(self, caplog: pytest.LogCaptureFixture) -> None:
        """Beyond MOST_OPEN a growth is not told, which is said once."""
        sidecar = Sidecar()
        for pid in range(1, MOST_OPEN + 4):
            sidecar.judged(leak(pid), key=ProcessKey(pid, 1))
        assert sidecar.episodes.open == len(sidecar.events.records) == MOST_OPEN
        assert len([record for record in caplog.records if "not told" in record.message]) == 1

    def test_without_exporters_nothing_is_made(self) -> None:
        """Neither spans nor events are asked for: verdicts come and go all the same."""
        alone = Episodes(Resource({}), None, None)
        alone.judged(KEY, leak(), history(), AT)
        alone.ended(KEY, AT)
        assert alone.open == 0

    def test_the_limits_of_the_environment_hold(self) -> None:
        """OTEL_SPAN_* limits cut attributes and events, and what was left out is counted."""
        limits = SpanLimits(max_span_attributes=3, max_events=2, max_span_attribute_length=5, max_event_attributes=1)
        sidecar = Sidecar(limits)
        for at in range(5):
            sidecar.judged(leak(culprits=(culprit(f"c{at}"),)), after=CHANGE_S)
        sidecar.end()
        (span,) = sidecar.spans
        assert len(span.attributes or {}) == 3
        assert (len(span.events), span.dropped_events) == (2, 4)
        assert [len(event.attributes or {}) for event in span.events] == [1, 1]

    def test_a_growth_that_changes_for_weeks_does_not_grow_itself(self) -> None:
        """What is kept of an episode is bounded, and what fell out is counted."""
        sidecar = Sidecar(SpanLimits(max_events=SpanLimits.UNSET))
        for at in range(300):
            sidecar.judged(leak(culprits=(culprit(f"c{at}"),)), after=CHANGE_S)
        sidecar.end()
        (span,) = sidecar.spans
        assert (len(span.events), span.dropped_events) == (episodes.MOST_EVENTS, 301 - episodes.MOST_EVENTS)


class TestAttributes:
    """What is said of a growth."""

    def test_all_of_a_verdict_is_in_them(self) -> None:
        """Each field under its name, in its unit."""
        assert growth_attributes(leak()) == {
            names.ATTR_GROWTH_KIND: "unbounded_growth",
            names.ATTR_GROWTH_CATEGORY: "heap",
            names.ATTR_GROWTH_CONTAINERS: (BLOCK_IDS,),
            names.ATTR_GROWTH_SLOPE_LOW: 85 * MIB,
            names.ATTR_GROWTH_SLOPE: 90 * MIB,
            names.ATTR_GROWTH_SLOPE_HIGH: 95 * MIB,
            names.ATTR_GROWTH_FOLLOWS: "request",
            names.ATTR_GROWTH_PER_UNIT: 154.2,
            names.ATTR_GROWTH_EXPLAINED: 0.98,
            names.ATTR_TIME_TO_LIMIT_LOW: 3.1 * DAY,
            names.ATTR_TIME_TO_LIMIT: 3.5 * DAY,
            names.ATTR_TIME_TO_LIMIT_HIGH: 4 * DAY,
            names.ATTR_GROWTH_REMEDY: ACTION,
            names.ATTR_GROWTH_ISSUE: PULL,
            names.ATTR_GROWTH_FIXED_IN: "0.26.0",
        }

    def test_what_is_not_known_is_not_there(self) -> None:
        """No remedy, no interval, no end of one: no attribute; never a NaN, which no back-end can show."""
        bare = calm(
            kind=Kind.UNEXPLAINED, slope=Interval(math.nan, 1, math.inf), time_to_limit_s=Interval(5, 6, math.inf)
        )
        assert growth_attributes(bare) == {
            names.ATTR_GROWTH_KIND: "unexplained_growth",
            names.ATTR_GROWTH_SLOPE: 1,
            names.ATTR_TIME_TO_LIMIT_LOW: 5,
            names.ATTR_TIME_TO_LIMIT: 6,
        }

    @settings(deadline=None)
    @given(VERDICTS)
    def test_each_is_documented_and_can_be_sent(self, verdict: Verdict) -> None:
        """Whatever the verdict: names of the conventions, values that OTLP has."""
        for name, value in growth_attributes(verdict).items():
            assert name in names.GROWTH_ATTRIBUTES
            assert isinstance(value, str | float | tuple)
            assert not isinstance(value, float) or math.isfinite(value)


class TestAnySequence:
    """Whatever comes in whatever order."""

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 1 << 32))
    def test_each_begin_has_one_span_and_one_end(self, seed: int) -> None:
        """After a random history of three processes: as many spans as begins, each once, none before its begin."""
        rng = random.Random(seed)  # noqa: S311  # no secret
        sidecar = Sidecar()
        keys = [ProcessKey(pid, 1) for pid in (1, 2, 3)]
        for _ in range(100):
            key, after = rng.choice(keys), rng.choice((1.0, 15.0, 200.0))
            if rng.random() < 0.1:
                sidecar.end(after, key)
            else:
                sidecar.judged(rng.choice((leak(key.pid), calm(key.pid))), after, key)
        sidecar.episodes.close(sidecar.now)
        begins = sidecar.events.names.count("began")
        assert len(sidecar.spans) == begins
        assert len({record.log_record.span_id for record in sidecar.events.records}) <= begins
        for span in sidecar.spans:
            assert (span.start_time or 0) <= (span.end_time or 0)


class Exporter(LogRecordExporter):
    """Keeps what it gets, or fails as told."""

    def __init__(self, *, fails: bool = False) -> None:
        self.records: list[ReadableLogRecord] = []
        self.fails = fails

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Take a batch."""
        if self.fails:
            raise RuntimeError("broken")
        self.records += batch
        return LogRecordExportResult.SUCCESS

    def shutdown(self) -> None:
        """The end."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:  # noqa: ARG002  # the SDK's
        """Nothing is held back."""
        return True


def telemetry(**environ: str) -> telemetry_settings.Telemetry:
    """What these variables ask for."""
    return telemetry_settings.read({"OTEL_BLRP_SCHEDULE_DELAY": "10", **environ})


def some_event() -> ReadWriteLogRecord:
    """Any."""
    sidecar = Sidecar()
    sidecar.judged(leak())
    return sidecar.events.records[0]


class TestEventSink:
    """The account of events."""

    def test_events_get_out_and_are_counted(self) -> None:
        """Soon, without being asked; body, name and attributes as they were made."""
        counts, exporter = SpanCounts(), Exporter()
        sink = event_export.EventSink([exporter], counts, telemetry())
        made = some_event()
        assert sink.emit(made)
        wait_until(lambda: counts.exported == 1)
        (record,) = exporter.records
        assert record.log_record.event_name == names.EVENT_GROWTH_BEGAN
        assert dict(record.log_record.attributes or {}) == growth_attributes(leak())
        assert json.loads(record.to_json())["trace_id"].endswith(f"{made.log_record.trace_id:032x}")
        assert sink.close(5)
        assert not sink.emit(some_event())
        assert (counts.emitted, counts.exported, counts.dropped, counts.pending) == (2, 1, 1, 0)

    def test_one_that_fails_is_counted_and_keeps_nobody_from_the_others(self) -> None:
        """All exporters get each batch; it counts as failed."""
        counts, good = SpanCounts(), Exporter()
        sink = event_export.EventSink([Exporter(fails=True), good], counts, telemetry())
        sink.emit(some_event())
        assert sink.close(5)
        assert (len(good.records), counts.failed, counts.exported, counts.pending) == (1, 1, 0, 0)

    def test_a_full_queue_drops_the_newest_and_says_so(self) -> None:
        """Never waits, never forgets what it dropped."""
        counts = SpanCounts()
        asked = telemetry(
            OTEL_BLRP_MAX_QUEUE_SIZE="2", OTEL_BLRP_MAX_EXPORT_BATCH_SIZE="2", OTEL_BLRP_SCHEDULE_DELAY="600000"
        )
        sink = event_export.EventSink([Exporter()], counts, asked)
        taken = [sink.emit(some_event()) for _ in range(10)]
        sink.close(5)
        assert (counts.emitted, counts.exported + counts.dropped, counts.pending) == (10, 10, 0)
        assert counts.exported == sum(taken)

    @pytest.mark.parametrize(
        ("environ", "kinds"),
        [
            ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://127.0.0.1:1"}, ["OTLPLogExporter"]),
            ({"OTEL_LOGS_EXPORTER": "otlp_proto_http"}, ["OTLPLogExporter"]),
            ({"OTEL_LOGS_EXPORTER": "console"}, ["ConsoleLogRecordExporter"]),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_LOGS_EXPORTER": "none"}, []),
            ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, []),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, []),
        ],
    )
    def test_where_events_go(self, environ: dict[str, str], kinds: list[str]) -> None:
        """As the specification has it for logs; an endpoint asks for otlp."""
        made: list[Any] = event_export.exporters(telemetry(**environ).logs)
        assert [type(exporter).__name__ for exporter in made] == kinds
        for exporter in made:
            exporter.shutdown()

    def test_what_an_exporter_cannot_use_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As for spans and metrics."""
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "soon")
        with pytest.raises(telemetry_settings.SettingError, match="exporter of events cannot use"):
            event_export.exporters(telemetry_settings.Signal(("otlp",), "grpc"))
