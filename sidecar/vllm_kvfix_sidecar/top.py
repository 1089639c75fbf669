# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-kvfix top``: what the live page shows, in a terminal; one frame of it as text, for a ticket."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvfix import __version__
from vllm_kvfix.ring import place
from vllm_kvfix_sidecar import client, diagnose, logs, report_text, top_lines, top_told, top_view
from vllm_kvfix_sidecar.diagnose import CannotTellError
from vllm_kvfix_sidecar.report import CANNOT_TELL

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from vllm_kvfix_sidecar.top_app import Source
    from vllm_kvfix_sidecar.top_told import Facts, Told
    from vllm_kvfix_sidecar.watch import Watch

DEFAULT_INTERVAL_S = 2.0
QUICKEST_S, SLOWEST_S = 0.2, 3600.0
# A ring holds the minutes before; so long takes it to be found and read.
ONCE_S = 5.0
HISTORY_S, HISTORY_POINTS = 3600, 60
NARROWEST = 20

_DESCRIPTION = """\
Shows live in a terminal what the sidecar's page shows: the verdict, processes with their memory, growth and time to the
limit, the evidence and the remedy, KV pools, the requests that hold most blocks, and how the sidecar itself is. Asks a
sidecar that runs on this machine; without one it watches by itself, as `vllm-kvfix diagnose` does. It changes nothing.
"""
_EPILOG = """\
examples:
  vllm-kvfix top                                       live; ? shows the keys, q quits
  kubectl exec -it POD -c vllm -- vllm-kvfix top       of a pod
  vllm-kvfix top --once > ticket.txt                   one frame as plain text
  vllm-kvfix top --sidecar http://10.0.0.7:9464        of another machine
  vllm-kvfix top --json | jq '.processes[] | {pid, sentence}'

exit codes of --once and --json:
  0  nothing alarming
  1  a process grows without a known end (unbounded or unexplained growth)
  2  cannot tell: no vLLM process, nothing readable, too short a time; or an option cannot be used
The live screen ends with 0 when you quit it, and with 2 where it cannot begin.
"""


@dataclass(frozen=True)
class Asked:
    """The command line, as in :class:`diagnose.Asked`; ``seconds``: to watch before a frame is printed."""

    once: bool
    as_json: bool
    interval_s: float
    seconds: float
    sidecar: str | None
    alone: bool
    folders: tuple[Path, ...]
    token: str | None

    @property
    def live(self) -> bool:
        """Whether a screen is wanted."""
        return not self.once and not self.as_json


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """The command line under variables.

    Raises:
        SystemExit: As argparse does.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    alone = diagnose.watches_alone(parser, given)
    if given.seconds is not None and not given.once and not given.json:
        parser.error("--for says how long to watch before --once or --json print; the live screen goes on until q")
    return Asked(
        once=given.once,
        as_json=given.json,
        interval_s=given.interval,
        seconds=ONCE_S if given.seconds is None else given.seconds,
        sidecar=given.sidecar,
        alone=alone,
        folders=tuple(given.ring_dir or place.folders(environ)),
        token=None if alone else diagnose.token_of(parser, given.token_file, environ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvfix top",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"vllm-kvfix {__version__}")
    add("--once", action="store_true", help="print one frame as plain text, as wide as the terminal or 100 columns")
    add("--json", action="store_true", help="print once what /api/now says")
    add(
        "--interval",
        type=_interval,
        default=DEFAULT_INTERVAL_S,
        metavar="S",
        help=f"ask every S seconds, {QUICKEST_S:g} to {SLOWEST_S:g} (default %(default)g)",
    )
    add(
        "--for",
        dest="seconds",
        type=diagnose.seconds,
        metavar="SECONDS",
        help=f"with --once or --json: watch for so long, without a sidecar (default {ONCE_S:.0f} where there is none)",
    )
    diagnose.add_places(parser, client.NOW)
    return parser


def _interval(text: str) -> float:
    value = diagnose.seconds(text)
    if not QUICKEST_S <= value <= SLOWEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {QUICKEST_S:g} and {SLOWEST_S:g} seconds")
    return value


class Remote:
    """A sidecar that is asked; ``token``: what it may want."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._token = token
        before, page, _ = url.partition(client.NOW)
        self._history = f"{before}{client.HISTORY}?range={HISTORY_S}&points={HISTORY_POINTS}" if page else None
        self.name = before.rstrip("/") if page else url

    def now(self) -> Told:
        """As :class:`top_app.Source`."""
        return ask(self._url, self._token)

    def history(self) -> Facts:
        """As :class:`top_app.Source`."""
        if self._history is None:
            return top_told.Facts()
        return client.understood(self._history, top_told.history, token=self._token)

    def rest(self, stop: threading.Event, seconds: float) -> None:
        """As :class:`top_app.Source`."""
        stop.wait(seconds)

    def close(self) -> None:
        """Nothing is held."""


def ask(url: str, token: str | None) -> Told:
    """What the sidecar at ``url`` knows.

    Raises:
        client.NoAnswerError: It does not answer.
    """
    return client.understood(url, top_told.read, token=token)


class Local:
    """What watches here; it only reads."""

    def __init__(self, watch: Watch, why: str = "") -> None:
        self._watch = watch
        self._why = why
        self._page = watch.page()
        self.name = "watching by itself, without a sidecar"

    def watch_for(self, seconds: float) -> None:
        """Learn what is there."""
        diagnose.watched_for(seconds, self._watch)

    def now(self) -> Told:
        """As :class:`top_app.Source`."""
        self._watch.turn()
        told = self._page.now()
        return top_told.of({**told, "notes": [*told["notes"], *([self._why] if self._why else [])]})

    def history(self) -> Facts:
        """As :class:`top_app.Source`."""
        return top_told.Facts(self._page.history(None, HISTORY_S, HISTORY_POINTS))

    def rest(self, stop: threading.Event, seconds: float) -> None:
        """As :class:`top_app.Source`: rings are read meanwhile, since they hold no more than some time."""
        until = time.monotonic() + seconds
        while not stop.wait(min(diagnose.PAUSE_S, max(0.0, until - time.monotonic()))) and time.monotonic() < until:
            self._watch.turn()

    def close(self) -> None:
        """As :class:`top_app.Source`."""
        self._watch.close()


def main(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    watcher: Callable[[Asked], Watch] | None = None,
) -> int:
    """Run the command; the exit code.

    Args:
        arguments: Those behind ``top``.
        environ: Variables.
        watcher: Makes what watches where no sidecar is asked.
    """
    asked = parse(arguments, environ)
    logs.set_up("critical", "plain", sys.stderr)  # the frame says it all
    watcher = watcher or _watch
    try:
        if asked.live:
            _need_terminal(environ)
            run = _screen()
            return run(_source(asked, environ, watcher)[0], asked.interval_s)
        source, told = _source(asked, environ, watcher)
        return _print(asked, environ, source, told)
    except CannotTellError as error:
        diagnose.say_error("top", str(error), as_json=asked.as_json)
    except KeyboardInterrupt:
        diagnose.say_error("top", "interrupted before anything was known", as_json=asked.as_json)
    return CANNOT_TELL


def _watch(asked: Asked) -> Watch:
    from vllm_kvfix_sidecar.watch import Watch  # noqa: PLC0415  # what a sidecar says needs none of this

    return Watch(asked.folders)


def _need_terminal(environ: Mapping[str, str]) -> None:
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise CannotTellError(
            "the live screen needs a terminal for input and output.\n"
            "  Use `--once` for one frame as text; in Kubernetes `kubectl exec -it` gives a terminal."
        )
    if environ.get("TERM") == "dumb":
        raise CannotTellError(
            "this terminal says that it can only write lines (TERM=dumb).\n"
            "  Use `--once` for one frame as text, or set TERM=xterm where it can do more."
        )


def _screen() -> Callable[[Source, float], int]:
    with _needing("the live screen", "; `--once` works without."):
        from vllm_kvfix_sidecar import top_app  # noqa: PLC0415  # a frame as text is there sooner, and without Textual
    return top_app.run


@contextlib.contextmanager
def _needing(what: str, else_do: str) -> Iterator[None]:
    """Say what is to be installed where a module of others is missing.

    Raises:
        CannotTellError: One is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in {"", "vllm_kvfix", "vllm_kvfix_sidecar"}:
            raise
        raise CannotTellError(
            f"{what} needs {name}, which is not installed.\n  `pip install 'vllm-kvfix[sidecar]'` brings it{else_do}"
        ) from error


def _source(asked: Asked, environ: Mapping[str, str], watcher: Callable[[Asked], Watch]) -> tuple[Source, Told | None]:
    """Who tells, and what was told already; a sidecar where one is named or known, as `diagnose` has it.

    Raises:
        CannotTellError: The sidecar that was named does not answer; or a variable cannot be used.
    """
    by_token = functools.partial(ask, token=asked.token)
    if asked.sidecar is not None:
        return Remote(asked.sidecar, asked.token), diagnose.named(asked.sidecar, by_token)
    found, why = (None, "") if asked.alone else diagnose.usual(environ, client.NOW, by_token, _no_answer)
    if found is not None:
        told, url = found
        return Remote(url, asked.token), told
    with _needing("to watch without a sidecar", "; `vllm-kvfix diagnose` works without."):
        return Local(watcher(asked), why), None


def _no_answer(told: Told) -> str:
    """One that sees nobody may look elsewhere."""
    return "" if told.processes else told.answer


def _print(asked: Asked, environ: Mapping[str, str], source: Source, told: Told | None) -> int:
    with contextlib.closing(source):
        if told is None:
            assert isinstance(source, Local)  # noqa: S101  # only what watches has told nothing yet
            source.watch_for(asked.seconds)
            told = source.now()
        if asked.as_json:
            diagnose.write(json.dumps(told.more.value, indent=2) + "\n")
            return told.exit_code
        history = top_told.Facts()
        with contextlib.suppress(client.NoAnswerError):  # a frame without its little charts is one
            history = source.history()
    colour = sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    width = max(NARROWEST, shutil.get_terminal_size((report_text.DEFAULT_WIDTH, 24)).columns)
    lines = top_view.once(told, history, width, source.name)
    diagnose.write(top_lines.plain(lines, sys.stdout.encoding or "ascii", colour=colour))
    return told.exit_code
