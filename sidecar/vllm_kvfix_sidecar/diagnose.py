# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-kvfix diagnose``: which process grows, what owns it, when it ends, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, TypeVar

from vllm_kvfix import __version__
from vllm_kvfix.ring import place
from vllm_kvfix_sidecar import bearer, client, logs, report, report_text, settings
from vllm_kvfix_sidecar.report import CANNOT_TELL
from vllm_kvfix_sidecar.telemetry_settings import SettingError
from vllm_kvfix_sidecar.words import clean, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from vllm_kvfix_sidecar.report import Report

T = TypeVar("T")
DEFAULT_S = 180.0
LONGEST_S = 7 * 86400.0
PAUSE_S = 0.2
PROGRESS_S = 1.0
# Who is not seen by then is not there.
FIND_S = 5.0
WIDEST = 120

_DESCRIPTION = """\
Says which vLLM process grows, in which part of its memory, what owns the growth, when the limit is reached, and what
to do. Asks a sidecar that runs on this machine, which has watched for hours; without one it watches by itself, with
what the rings of vllm-kvfix hold of the minutes before. It needs to be the user that runs vLLM, or root, and changes
nothing.
"""
_EPILOG = """\
examples:
  vllm-kvfix diagnose                                  the answer, from the sidecar or after three minutes
  vllm-kvfix diagnose --for 600                        watch for ten minutes, whatever a sidecar knows
  kubectl exec POD -c vllm -- vllm-kvfix diagnose      of a pod
  vllm-kvfix diagnose --sidecar http://10.0.0.7:9464   of another machine
  vllm-kvfix diagnose --json | jq '.processes[] | {pid, verdict}'

exit codes:
  0  nothing alarming
  1  a process grows without a known end (unbounded or unexplained growth)
  2  cannot tell: no vLLM process, nothing readable, too short a time; or an option cannot be used

what the verdicts mean:
"""


@dataclass(frozen=True)
class Asked:
    """The command line. ``sidecar``: the page to ask for, None: whatever is at the usual address, unless ``alone``.

    ``token``: what a sidecar may want.
    """

    as_json: bool
    pid: int | None
    seconds: float
    sidecar: str | None
    alone: bool
    folders: tuple[Path, ...]
    token: str | None = None


class Watcher(Protocol):
    """What is asked of :class:`vllm_kvfix_sidecar.watch.Watch`."""

    @property
    def processes(self) -> int:
        """How many are seen."""

    @property
    def so_far(self) -> str:
        """The gravest verdict so far, in a few words."""

    def turn(self) -> None:
        """Take what there is now."""

    def report(self) -> Report:
        """What is known so far."""

    def close(self) -> None:
        """The end."""


class CannotTellError(Exception):
    """There is nothing to report; the message says why, and what to do next."""


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """The command line under variables.

    Raises:
        SystemExit: As argparse does.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    alone = watches_alone(parser, given)
    return Asked(
        as_json=given.json,
        pid=given.pid,
        seconds=DEFAULT_S if given.seconds is None else given.seconds,
        sidecar=given.sidecar,
        alone=alone,
        folders=tuple(given.ring_dir or place.folders(environ)),
        token=None if alone else token_of(parser, given.token_file, environ),
    )


def _parser() -> argparse.ArgumentParser:
    kinds = report_text.KIND_WORDS
    width = max(len(kind.value) for kind in kinds)
    meanings = "".join(f"  {kind.value:<{width}}  {words}\n" for kind, words in kinds.items())
    parser = argparse.ArgumentParser(
        prog="vllm-kvfix diagnose",
        description=_DESCRIPTION,
        epilog=_EPILOG + meanings,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"vllm-kvfix {__version__}")
    add("--json", action="store_true", help="print one JSON object (its keys: docs/diagnosis.md)")
    add("--pid", type=_pid, metavar="PID", help="only this process")
    add(
        "--for",
        dest="seconds",
        type=seconds,
        metavar="SECONDS",
        help=f"watch for so long, without a sidecar (default {DEFAULT_S:.0f} where there is none)",
    )
    add_places(parser, client.PATH)
    return parser


def watches_alone(parser: argparse.ArgumentParser, given: argparse.Namespace) -> bool:
    """Whether ``--for`` or ``--ring-dir`` say to watch without a sidecar.

    Raises:
        SystemExit: A sidecar is named, too.
    """
    alone = given.seconds is not None or bool(given.ring_dir)
    if given.sidecar and alone:
        parser.error("--sidecar asks a sidecar, --for and --ring-dir watch without one: choose")
    return alone


def token_of(parser: argparse.ArgumentParser, option: str | None, environ: Mapping[str, str]) -> str | None:
    """What is in the file that the option, or the variable, names; None where there is none.

    Raises:
        SystemExit: It cannot be read, or holds no token.
    """
    try:
        file = settings.token_file(option, environ)
        return None if file is None else bearer.read(file)
    except SettingError as error:
        parser.error(str(error))


def add_places(parser: argparse.ArgumentParser, page: str) -> None:
    """Options that say where to look: at a sidecar's page, or in folders."""

    def url(text: str) -> str:
        try:
            return client.url_of(text, page)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument(
        "--sidecar",
        type=url,
        metavar="URL",
        help="ask this one (default: the one that VLLM_KVFIX_LISTEN names, else http://127.0.0.1:9464)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"send the token in this file to a sidecar that wants one (default: {bearer.VARIABLE})",
    )
    parser.add_argument(
        "--ring-dir",
        action="append",
        type=Path,
        metavar="DIR",
        help="watch the rings in here, without a sidecar; may be given more than once (default: VLLM_KVFIX_RING_DIR)",
    )


def _pid(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no process id")
    return int(text)


def seconds(text: str, longest: float = LONGEST_S, said: str = "a week") -> float:
    """A time of the command line, up to ``longest``, which is ``said`` in words.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= longest:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0 and up to {said}")
    return value


def main(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    watcher: Callable[[Asked], Watcher] | None = None,
    proc: Path = Path("/proc"),
) -> int:
    """Run the command; the exit code.

    Args:
        arguments: Those behind ``diagnose``.
        environ: Variables.
        watcher: Makes what watches where no sidecar is asked.
        proc: Where a process table is mounted.
    """
    asked = parse(arguments, environ)
    logs.set_up("critical", "plain", sys.stderr)  # the report says it all: what was not read, followed, judged
    try:
        found = _find_out(asked, environ, watcher or (lambda asked: _watch(asked, proc)))
        if asked.pid is not None:
            found = _only(found, asked.pid, proc)
    except CannotTellError as error:
        say_error("diagnose", str(error), as_json=asked.as_json)
        return CANNOT_TELL
    except KeyboardInterrupt:
        say_error("diagnose", "interrupted before anything was known", as_json=asked.as_json)
        return CANNOT_TELL
    answer = report_text.answer(found)
    if asked.as_json:
        write(json.dumps(report.as_json(found, answer), indent=2) + "\n")
    else:
        colour = sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        width = min(WIDEST, shutil.get_terminal_size((report_text.DEFAULT_WIDTH, 24)).columns)
        write(report_text.text(found, max(40, width), colour=colour))
    return found.exit_code


def _watch(asked: Asked, proc: Path) -> Watcher:
    from vllm_kvfix_sidecar.watch import Watch  # noqa: PLC0415  # what a sidecar says needs none of this

    return Watch(asked.folders, proc=proc)


def _find_out(asked: Asked, environ: Mapping[str, str], watcher: Callable[[Asked], Watcher]) -> Report:
    """From the sidecar, or by watching.

    Raises:
        CannotTellError: The sidecar that was named does not answer; or a variable cannot be used.
    """
    ask = functools.partial(client.ask, token=asked.token)
    if asked.sidecar is not None:
        return _noted(named(asked.sidecar, ask), asked.sidecar)
    found, why = (None, "") if asked.alone else usual(environ, client.PATH, ask, _no_answer)
    if found is not None:
        return _noted(*found)
    began = time.monotonic()
    with contextlib.closing(watcher(asked)) as watch:
        watched_for(asked.seconds, watch)
        seen = watch.report()
    watched = duration(time.monotonic() - began)
    note = f"Watched for {watched}; with what the rings held, the figures reach back {duration(seen.watched_s)}."
    return replace(seen, notes=(*seen.notes, f"{note}{f' {why}' if why else ''}"))


def named(url: str, ask: Callable[[str], T]) -> T:
    """What the sidecar says that was named.

    Raises:
        CannotTellError: It does not answer.
    """
    try:
        return ask(url)
    except client.NoAnswerError as error:
        raise CannotTellError(
            f"{error}\n  See that it runs (`vllm-kvfix sidecar`), or leave --sidecar out to watch without one."
        ) from error


def usual(
    environ: Mapping[str, str], page: str, ask: Callable[[str], T], no_answer: Callable[[T], str]
) -> tuple[tuple[T, str] | None, str]:
    """What the sidecar of this machine says, and where; None: nothing that helps, and why.

    Args:
        environ: Variables, which say where it listens.
        page: What it is asked for.
        ask: Asks for a URL; raises :class:`client.NoAnswerError`.
        no_answer: Why an answer is of no help; empty where it is.

    Raises:
        CannotTellError: A variable cannot be used.
    """
    try:
        url = client.url_at(settings.listen_address(None, environ), page)
    except SettingError as error:
        raise CannotTellError(f"{error}") from error
    if url is None:
        return None, ""
    try:
        told = ask(url)
    except client.NoAnswerError as error:
        return None, f"No sidecar was asked: {error}."
    why = no_answer(told)
    return (None, f"The sidecar at {url} says: {why}") if why else ((told, url), "")


def _no_answer(told: Report) -> str:
    return report_text.answer(told) if told.exit_code == CANNOT_TELL else ""


def _noted(told: Report, url: str) -> Report:
    note = f"As the sidecar at {url} knows it, which has watched for {duration(told.watched_s)}."
    return replace(told, notes=(*told.notes, note))


def watched_for(seconds: float, watch: Watcher) -> None:
    """Watch until the time is over, or somebody interrupts; the second interrupt ends the process."""
    progress = _Progress(sys.stderr)
    began = shown = time.monotonic()
    with _stopping() as stop:
        while not stop.is_set():
            watch.turn()
            now = time.monotonic()
            left = seconds - (now - began)
            if left <= 0 or (not watch.processes and now - began >= FIND_S):
                break
            if now - shown >= PROGRESS_S:
                shown = now
                progress.show(watch.processes, watch.so_far, left)
            stop.wait(min(PAUSE_S, left))
        progress.clear()


class _Progress:
    """One line on a terminal that is written over; nothing elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out if out.isatty() else None
        self._length = 0

    def show(self, processes: int, so_far: str, left: float) -> None:
        """Say how it stands."""
        seen = f"{processes} process{'' if processes == 1 else 'es'}{so_far and ', '}{so_far}"
        self._write(f"{duration(left)} to go, Ctrl-C: print now; {seen}")

    def clear(self) -> None:
        """Leave no trace."""
        if self._length:
            self._write("")

    def _write(self, line: str) -> None:
        if self._out is None:
            return
        with contextlib.suppress(OSError):  # the terminal is gone; the answer goes to stdout
            columns = os.get_terminal_size(self._out.fileno()).columns
            line = line[: max(1, (columns or report_text.DEFAULT_WIDTH) - 1)]  # 0: it does not know
            self._out.write("\r" + line.ljust(self._length) + ("" if line else "\r"))
            self._out.flush()
        self._length = len(line)


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one ends the process on the spot."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # a signal handler's
        if stop.is_set():
            os._exit(CANNOT_TELL)
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _only(found: Report, pid: int, proc: Path) -> Report:
    """The report of one process.

    Raises:
        CannotTellError: It is not in the report.
    """
    chosen = tuple(process for process in found.processes if process.verdict.pid == pid)
    if chosen:
        return replace(found, processes=chosen)
    known = ", ".join(report_text.who(process.verdict) for process in found.processes[:20])
    raise CannotTellError(
        f"{_what_is(pid, proc)}\n  "
        + (f"Known are: {known}." if known else f"No vLLM process was found at all. {report_text.FIND_A_PROCESS[1]}")
    )


def _what_is(pid: int, proc: Path) -> str:
    try:
        name = (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return f"there is no process {pid} here (pids count within a container)"
    return f"process {pid} ({clean(name, 32)}) is no vLLM process that is known"


def say_error(command: str, text: str, *, as_json: bool) -> None:
    """Say why a command has nothing to report."""
    if as_json:
        told = {"schema_version": report.SCHEMA_VERSION, "error": text, "exit_code": CANNOT_TELL}
        write(json.dumps(told, indent=2) + "\n")
    else:
        sys.stderr.write(f"vllm-kvfix {command}: {text}\n")


def write(text: str) -> None:
    """Write all at once; a reader that goes away (``| head``) is no error, and the exit code still says all."""
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
