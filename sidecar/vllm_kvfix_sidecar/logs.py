# SPDX-License-Identifier: Apache-2.0
"""What the log looks like: one line a record, plain or JSON, and a failing exporter does not flood it."""

from __future__ import annotations

import json
import logging
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_DIGESTED = ("opentelemetry", "vllm_kvfix_sidecar.export", "vllm_kvfix_sidecar.push", "vllm_kvfix_sidecar.server")
_DIGEST_S = 60.0
# Its warnings quote a malformed header as it stands, which may be a secret.
_HEADER_PARSER = "opentelemetry.util.re"
_HEADER_SAID = "a header in an OTEL_EXPORTER_OTLP_*HEADERS variable is malformed, and left out"
_LARGEST_MEMORY = 256


def fields(**values: object) -> dict[str, dict[str, object]]:
    """For ``extra=``: what a line says beside its message, ``key=value`` in plain lines, an object in JSON."""
    return {"fields": values}


def set_up(level: str, form: str, stream: TextIO) -> None:
    """Have all loggers write to ``stream``; ``form`` is plain or json. What was set up before is replaced."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else PlainFormatter())
    handler.addFilter(Digest())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = getattr(record, "fields", None)
    return found if isinstance(found, dict) else {}


class PlainFormatter(logging.Formatter):
    """``WARNING 2026-11-30T09:22:24.123Z what happened key=value``; a traceback follows in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``."""
        said = [record.levelname, _time(record), _one_line(record.getMessage())]
        said += [f"{key}={_plain(value)}" for key, value in _fields(record).items()]
        line = " ".join(said)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, message, fields, and error where there was an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if _fields(record):
            line["fields"] = _fields(record)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _one_line(text: str) -> str:
    """File names and ids come from elsewhere: none may begin a line, or colour a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _plain(value: object) -> str:
    text = str(value)
    quoted = not text or any(char.isspace() or char == '"' for char in text)
    return _one_line(json.dumps(text, ensure_ascii=False) if quoted else text)


class Digest(logging.Filter):
    """Lets a failing exporter say one line a minute of a kind, with how many it has not said since.

    Each retry's warning is said at level debug alone: the error after the last one tells the same. Tracebacks of
    exporters become the exception's own words.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is to be written; what is written may be reworded."""
        if not record.name.startswith(_DIGESTED):
            return True
        if record.name == _HEADER_PARSER:
            record.msg, record.args = _HEADER_SAID, ()
        if record.levelno < logging.WARNING:
            return True
        if str(record.msg).startswith("Transient error"):
            return logging.getLogger().isEnabledFor(logging.DEBUG)
        return self._is_due(record)

    def _is_due(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        key = (record.name, record.levelno, f"{record.msg} {record.args[:1] if isinstance(record.args, tuple) else ''}")
        at, unsaid = self._said.get(key, (-_DIGEST_S, 0))
        if now - at < _DIGEST_S:
            self._said[key] = (at, unsaid + 1)
            return False
        if len(self._said) >= _LARGEST_MEMORY:
            self._said.clear()
        self._said[key] = (now, 0)
        _reword(record, unsaid)
        return True


def _reword(record: logging.LogRecord, unsaid: int) -> None:
    message = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        message += f": {record.exc_info[1]!r}"
    record.exc_info = None
    record.msg, record.args = message + (f" ({unsaid} more like this since the last line)" if unsaid else ""), ()
