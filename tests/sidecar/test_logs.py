# SPDX-License-Identifier: Apache-2.0
"""logs: one line a record, whatever is in it; a failing exporter says one line a minute, and no secret."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix_sidecar import logs
from vllm_kvfix_sidecar.logs import Digest, JsonFormatter, PlainFormatter, fields


@pytest.fixture
def root() -> logging.Logger:
    """The root logger."""
    return logging.getLogger()


def made(
    message: str, *args: object, name: str = "x", level: int = logging.ERROR, **extra: object
) -> logging.LogRecord:
    """A record."""
    record = logging.LogRecord(name, level, "f.py", 1, message, args, None)
    vars(record).update(fields(**extra))
    return record


class TestFormats:
    """Plain and JSON."""

    def test_a_plain_line_is_level_time_message_fields(self) -> None:
        """A field with a space is quoted; the time is UTC with milliseconds."""
        line = PlainFormatter().format(made("said %d", 3, level=logging.WARNING, a=1, b="two words", c=""))
        assert re.fullmatch(r'WARNING \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z said 3 a=1 b="two words" c=""', line)

    def test_a_json_line_has_the_same(self) -> None:
        """Time, level, message and fields, as an object."""
        line = json.loads(JsonFormatter().format(made("said %d", 3, a=1, b="two words")))
        assert set(line) == {"time", "level", "message", "fields"}
        assert (line["level"], line["message"], line["fields"]) == ("error", "said 3", {"a": 1, "b": "two words"})

    @given(st.text(), st.text())
    def test_a_record_is_one_line_whatever_it_says(self, message: str, value: str) -> None:
        """File names and ids with line ends, escapes or anything else make no second line, and JSON gives them back."""
        record = made("%s", message, a=value)
        printed = PlainFormatter().format(record)
        assert len(printed.splitlines()) == 1
        assert "\x1b" not in printed
        text = JsonFormatter().format(record)
        assert "\n" not in text
        assert json.loads(text)["message"] == message

    def test_an_exception_keeps_its_traceback(self) -> None:
        """Both forms hold it."""
        try:
            raise ValueError("why")  # noqa: TRY301  # an exception with a traceback is what is needed
        except ValueError as error:
            record = made("failed")
            record.exc_info = (ValueError, error, error.__traceback__)
        assert PlainFormatter().format(record).endswith("ValueError: why")
        assert "test_logs.py" in json.loads(JsonFormatter().format(record))["error"]


class TestDigest:
    """What exporters say."""

    def said(self, digest: Digest, *records: logging.LogRecord) -> list[str]:
        """The messages that pass."""
        return [record.getMessage() for record in records if digest.filter(record)]

    def test_a_failing_exporter_says_one_line_a_minute_with_the_count(self) -> None:
        """A thousand failures in a minute make one line; the first after it says how many were not told."""
        now = [0.0]
        digest = Digest(lambda: now[0])
        failure = ("Failed to export %s to %s", "traces", "c:4317")
        name = "opentelemetry.exporter.otlp.proto.grpc.exporter"
        assert len(self.said(digest, *(made(*failure, name=name) for _ in range(1000)))) == 1
        now[0] = 59.9
        assert self.said(digest, made(*failure, name=name)) == []
        now[0] = 60.0
        assert self.said(digest, made(*failure, name=name)) == [
            "Failed to export traces to c:4317 (1000 more like this since the last line)"
        ]

    def test_spans_do_not_silence_metrics(self) -> None:
        """The two signals' failures are told apart, and so are two places of failure."""
        lines = [("Failed to export %s", "traces"), ("Failed to export %s", "metrics"), ("Queue full",)]
        assert len(self.said(Digest(lambda: 0.0), *(made(*line, name="opentelemetry.x") for line in lines))) == 3

    def test_our_own_lines_are_all_said(self) -> None:
        """The pipeline's and the service's lines are not held back."""
        records = [made("ended", name="vllm_kvfix_sidecar.pipeline") for _ in range(5)]
        assert len(self.said(Digest(lambda: 0.0), *records)) == 5

    def test_retries_are_for_debugging(self, root: logging.Logger) -> None:
        """A transient error is written at level debug alone."""
        retry = made("Transient error %s encountered", "UNAVAILABLE", name="opentelemetry.x", level=logging.WARNING)
        root.setLevel(logging.INFO)
        assert not Digest().filter(retry)
        root.setLevel(logging.DEBUG)
        assert Digest().filter(retry)

    def test_a_malformed_headers_value_is_not_quoted(self) -> None:
        """The SDK's warning quotes the header, which may be a token; what is written does not."""
        record = made("Header format invalid! %s", "authorization: token", name="opentelemetry.util.re")
        (line,) = self.said(Digest(), record)
        assert "token" not in line
        assert "OTEL_EXPORTER_OTLP_*HEADERS" in line

    def test_a_traceback_of_an_exporter_becomes_its_words(self) -> None:
        """The exception is named in the line, and its traceback left out."""
        record = made("Exception while exporting", name="opentelemetry.sdk")
        error = ConnectionError("no route")
        record.exc_info = (ConnectionError, error, None)
        assert self.said(Digest(), record) == ["Exception while exporting: ConnectionError('no route')"]
        assert record.exc_info is None

    def test_memory_of_what_was_said_is_bounded(self) -> None:
        """Ten thousand different failures are all told, and few remembered."""
        digest = Digest(lambda: 0.0)
        assert len(self.said(digest, *(made(f"failure {n}", name="opentelemetry.x") for n in range(10_000)))) == 10_000
        assert len(digest._said) <= 256


@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_line_is_written_once(root: logging.Logger, form: str) -> None:
    """Setting up twice leaves one handler; what is below the level is not written."""
    first, second = io.StringIO(), io.StringIO()
    logs.set_up("info", form, first)
    logs.set_up("info", form, second)
    logging.getLogger("vllm_kvfix_sidecar.x").info("hello")
    logging.getLogger("vllm_kvfix_sidecar.x").debug("details")
    assert root.level == logging.INFO
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    assert "hello" in second.getvalue()
