# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-kvfix postmortem``: what the ring of a dead process says of its last seconds."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvfix import __version__
from vllm_kvfix.ring import place
from vllm_kvfix.ring.reader import RingError, RingReader
from vllm_kvfix_sidecar import (
    cursors,
    death,
    deployments,
    kernel_log,
    last_words,
    logs,
    postmortem_json,
    postmortem_text,
    together,
)
from vllm_kvfix_sidecar.death import End
from vllm_kvfix_sidecar.diagnose import say_error, seconds, write
from vllm_kvfix_sidecar.oom import Witness, read_witness
from vllm_kvfix_sidecar.report_text import DEFAULT_WIDTH, columns
from vllm_kvfix_sidecar.together import Gone
from vllm_kvfix_sidecar.words import clean, duration, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_kvfix.ring.reader import Header
    from vllm_kvfix_sidecar.death import Death
    from vllm_kvfix_sidecar.last_words import LastWords, Proof

IN_ORDER, DIED, CANNOT_TELL = 0, 1, 2
LONGEST_S = 3600.0
WIDEST = 160
MOST_RINGS = 1024

_DESCRIPTION = """\
Says what a process of vLLM did in its last seconds, from the ring that it left: how it ended, whether for its memory,
the last steps, the memory and what grew, and the requests that were lost. The ring outlives kill -9 and the
out-of-memory killer. Without a RING, the one that ended last is taken, an engine core before others that ended with it.
"""
_EPILOG = """\
examples:
  vllm-kvfix postmortem                                  of what ended last
  vllm-kvfix postmortem --list                           which rings there are
  vllm-kvfix postmortem --pid 4242 --last 30             the last half minute, by the pid that a log names
  vllm-kvfix postmortem /tmp/vllm-kvfix-0/4242-1f.ring   of one ring; it may have been copied from elsewhere
  vllm-kvfix postmortem --json | jq '.end, .oom'
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317 vllm-kvfix postmortem --export

exit codes:
  0  it ended in order
  1  it died: it was killed, crashed, or ended by an exception
  2  cannot tell: no ring, it cannot be read, its process lives; or an option cannot be used, the export failed

variables:
  VLLM_KVFIX_RING_DIR   where rings lie (--ring-dir); several separated as in PATH
  OTEL_*                where --export sends to, as of `vllm-kvfix sidecar`
"""


class CannotTellError(Exception):
    """There is nothing to tell; the message says why, and what to do next."""


@dataclass(frozen=True)
class Asked:
    """The command line. ``ring``: a path, None: the latest; ``pid``: of that process."""

    ring: Path | None
    pid: int | None
    seconds: float
    folders: tuple[Path, ...]
    as_json: bool
    export: bool
    list_only: bool


class Found(NamedTuple):
    """A ring in a folder."""

    path: Path
    size: int
    header: Header
    proof: Proof

    @property
    def unix_ns(self) -> int:
        """Its process's last sign of life."""
        return self.header.heartbeat_ns + self.header.clock_offset_ns

    @property
    def has_ended(self) -> bool:
        """Whether its process has."""
        return self.proof.state == last_words.ENDED


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """The command line under variables.

    Raises:
        SystemExit: As argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-kvfix postmortem",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("ring", nargs="?", type=Path, metavar="RING", help="a ring file, or the name of one in the folders")
    add("--version", action="version", version=f"vllm-kvfix {__version__}")
    add("--latest", action="store_true", help="the process that ended last (the default)")
    add("--pid", type=int, metavar="PID", help="the process that had this pid, the last one of those that ended")
    add("--list", action="store_true", dest="list_only", help="list the rings, the last that ended first, and end")
    add("--ring-dir", action="append", type=Path, metavar="DIR", help="look in here; may be given more than once")
    add(
        "--last",
        type=_seconds,
        default=last_words.DEFAULT_LAST_S,
        metavar="SECONDS",
        help=f"tell so much of the end step by step (default {last_words.DEFAULT_LAST_S:.0f})",
    )
    add("--json", action="store_true", help="print one JSON object (its keys: docs/postmortem.md)")
    add("--export", action="store_true", help="send it by OTLP, too: a span, an event, and the spans of lost requests")
    given = parser.parse_args(arguments)
    if sum((given.ring is not None, given.pid is not None, given.latest)) > 1:
        parser.error("a RING, --pid and --latest each say which ring: choose")
    if given.list_only and (given.ring is not None or given.export):
        parser.error("--list only lists: leave RING and --export out")
    folders = tuple(given.ring_dir or place.folders(environ))
    return Asked(given.ring, given.pid, given.last, folders, given.json, given.export, given.list_only)


def _seconds(text: str) -> float:
    return seconds(text, LONGEST_S, "an hour")


def main(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    proc: Path = last_words.PROC,
    kernel: Path = kernel_log.KMSG,
    unix_ns: Callable[[], int] = time.time_ns,
) -> int:
    """Run the command; the exit code.

    Args:
        arguments: Those behind ``postmortem``.
        environ: Variables.
        proc: Where a process table is mounted.
        kernel: The kernel's log.
        unix_ns: The wall clock.
    """
    asked = parse(arguments, environ)
    logs.set_up("critical", "plain", sys.stderr)
    try:
        if asked.list_only:
            return _list(asked, proc, unix_ns())
        found = _death(_chosen(asked, proc), asked, proc, kernel)
        told = _export(found, environ) if asked.export else None
    except CannotTellError as error:
        return _cannot(str(error), as_json=asked.as_json)
    except KeyboardInterrupt:
        return _cannot("interrupted", as_json=asked.as_json)
    code = exit_code(found)
    if asked.as_json:
        write(json.dumps(postmortem_json.of(found, unix_ns(), code, told), indent=2) + "\n")
    else:
        colour = sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        width = min(WIDEST, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)
        text = postmortem_text.text(found, unix_ns(), max(40, width), colour=colour)
        write(text + (f"\n{told}\n" if told else ""))
    return code


def exit_code(found: Death) -> int:
    """``IN_ORDER``, ``DIED`` or ``CANNOT_TELL``."""
    if found.is_alarming:
        return DIED
    return IN_ORDER if found.end is End.IN_ORDER else CANNOT_TELL


def _chosen(asked: Asked, proc: Path) -> Path:
    """The ring that is asked for.

    Raises:
        CannotTellError: There is none.
    """
    if asked.ring is not None:
        return _named(asked.ring, asked.folders)
    found = [ring for ring in rings(asked.folders, proc) if asked.pid is None or ring.header.pid == asked.pid]
    ended = [ring for ring in found if ring.has_ended]
    if ended:
        return latest(ended).path
    of_pid = "" if asked.pid is None else f" of process {asked.pid}"
    where = ", ".join(map(str, asked.folders))
    if found:
        raise CannotTellError(
            f"nothing has ended{of_pid}: the processes of all {len(found)} rings in {where} live\n"
            "  `vllm-kvfix diagnose` says how they do."
        )
    raise CannotTellError(
        f"there is no ring{of_pid} in {where}\n"
        "  `vllm-kvfix postmortem --list` shows what there is; name another folder by --ring-dir, or by "
        f"{place.FOLDER_VARIABLE}.\n  A process leaves a ring if vllm-kvfix was installed beside vLLM when it started."
    )


def latest(ended: Sequence[Found]) -> Found:
    """The one to be told of what ended last: the first that died of those that ended together."""
    settled = together.settled([_gone(ring) for ring in ended], [ring.header for ring in ended])
    gone = {one.path: one for one in settled}
    newest = max(gone.values(), key=lambda one: one.unix_ns)
    one = together.first([newest, *together.with_it(newest, list(gone.values()))])
    told = one.witness.first if one.witness else ""
    by_path = {ring.path: ring for ring in ended}
    return by_path.get(one.path.with_name(told) if _is_name(told) else one.path, by_path[one.path])


def _is_name(text: str) -> bool:
    return bool(text) and "/" not in text and "\0" not in text and text not in {".", ".."}


def _gone(ring: Found) -> Gone:
    """With what a sidecar saw, and what the kernel's log still says."""
    return Gone(ring.path, ring.header, read_witness(cursors.witness(ring.path, ring.header)))


def _named(ring: Path, folders: Sequence[Path]) -> Path:
    if ring.exists() or len(ring.parts) > 1:
        return ring
    return next((folder / ring for folder in folders if (folder / ring).exists()), ring)


def rings(folders: Sequence[Path], proc: Path) -> list[Found]:
    """The rings in some folders, ``MOST_RINGS`` at most, the last that ended first; other files are left out."""
    found = []
    for folder in folders:
        for path in sorted(folder.glob(f"*{place.SUFFIX}"))[:MOST_RINGS]:
            try:
                reader = RingReader(path)
            except (RingError, OSError):
                continue
            try:
                found.append(Found(path, reader.found.st_size, reader.header, last_words.prove(reader, proc)))
            finally:
                reader.close()
    return sorted(found, key=lambda ring: -ring.unix_ns)


def _death(path: Path, asked: Asked, proc: Path, kernel: Path) -> Death:
    """What is known of the end that a ring tells of.

    Raises:
        CannotTellError: It cannot be read.
    """
    words = _words(path, asked, proc)
    others = _others(words, proc)
    core = together.core_of(others.one, others.gone)
    return death.of(
        words,
        _witness(words, kernel),
        engine=None if core is None else _words(core.path, asked, proc),
        others=together.sentences(others.one, others.gone),
        deaths=together.deaths(others.one, others.gone),
        named=together.named(others.gone),
        stopped=others.one.stopped,
    )


def _words(path: Path, asked: Asked, proc: Path) -> LastWords:
    """What a ring says.

    Raises:
        CannotTellError: It cannot be read.
    """
    try:
        return last_words.of(path, seconds=asked.seconds, proc=proc)
    except RingError as error:
        raise CannotTellError(str(error)) from error
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CannotTellError(
            f"cannot open {path}: {what}\n  `vllm-kvfix postmortem --list` shows which rings there are."
        ) from error


class _Others(NamedTuple):
    one: Gone
    gone: list[Gone]


def _others(words: LastWords, proc: Path) -> _Others:
    """Who ended with the process of a ring, as the rings beside it say."""
    beside = rings([words.path.parent], proc)
    one = Gone(words.path, words.header, read_witness(cursors.witness(words.path, words.header)))
    ended = [one, *(_gone(ring) for ring in beside if ring.has_ended and ring.path != one.path)]
    one, *others = together.settled(ended, [ring.header for ring in beside])
    return _Others(one, together.with_it(one, others))


def _witness(words: LastWords, kernel: Path) -> Witness | None:
    """What a sidecar saw, and what the kernel's log still says, if this is the boot in which it ended."""
    seen = read_witness(cursors.witness(words.path, words.header))
    if (seen is not None and seen.kernel is not None) or any("anew" in said for said in words.proof.sentences):
        return seen
    line = kernel_log.about(words.header.pid, words.last / 1e9, kernel)
    if line is None:
        return seen
    return replace(seen or Witness(), kernel=line)


def _export(found: Death, environ: Mapping[str, str]) -> str:
    """Send it; what was sent.

    Raises:
        CannotTellError: It was not, and why.
    """
    from vllm_kvfix_sidecar import postmortem_export  # noqa: PLC0415  # OpenTelemetry takes half a second

    if found.end in {End.ALIVE, End.UNCLEAR}:
        raise CannotTellError(f"nothing was exported: {death.sentence(found)}")
    try:
        return postmortem_export.send(found, environ)
    except postmortem_export.NotSentError as error:
        raise CannotTellError(f"nothing was exported: {error}") from error


def _cannot(text: str, *, as_json: bool) -> int:
    say_error("postmortem", text, as_json=as_json)
    return CANNOT_TELL


def _list(asked: Asked, proc: Path, now_unix_ns: int) -> int:
    found = rings(asked.folders, proc)
    if asked.as_json:
        told = [postmortem_json.ring(ring.path, ring.size, ring.header, ring.proof.state) for ring in found]
        write(json.dumps({"schema_version": postmortem_json.SCHEMA_VERSION, "rings": told}, indent=2) + "\n")
    elif found:
        header = ("PID", "PROCESS", "ENDED", "LAST HEARD OF", "EVENTS", "SIZE", "RING")
        write("\n".join(columns([header, *(_row(ring, now_unix_ns) for ring in found)], left={1, 2, 3, 6})) + "\n")
    if not found:
        return _cannot(f"there is no ring in {', '.join(map(str, asked.folders))}", as_json=asked.as_json)
    return 0


def _row(ring: Found, now_unix_ns: int) -> tuple[str, ...]:
    header = ring.header
    state = ring.proof.state if not ring.has_ended else _ENDS[death.said_end(header.end)]
    ago = duration((now_unix_ns - ring.unix_ns) / 1e9)
    name = deployments.NAMES.get(header.role, header.role)
    return str(header.pid), name, state, f"{ago} ago", str(header.events), size(ring.size), clean(str(ring.path), 200)


_ENDS = {
    End.IN_ORDER: "in order",
    End.EXCEPTION: "by an exception",
    End.KILLED: "killed, or crashed",
    End.UNSAID: "yes",
}
