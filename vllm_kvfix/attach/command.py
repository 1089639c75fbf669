# SPDX-License-Identifier: Apache-2.0
"""``vllm-kvfix attach``; what it has in common with ``detach`` is here, too."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_kvfix.attach import errors, session, target
from vllm_kvfix.attach.errors import AttachError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_kvfix.attach.session import Outcome

    Do = Callable[[int, Callable[[str], object]], Outcome]

DONE, REFUSED, UNCERTAIN, INTERRUPTED = 0, 1, 3, 130
_MEBI = 1 << 20
_SAY_AFTER_S = 2.0

EXIT_CODES = """\
exit codes:
  0    done, or nothing was to be done
  1    refused: the engine is as it was
  2    the command line is wrong
  3    it went wrong halfway: what is in the engine is not known; the message says what to do
  130  interrupted; the engine is as it was, or the message says what is in it
With --all the highest of them."""

_EPILOG = f"""\
Nothing is installed or left in the engine's environment: the code travels in memory. Below Python 3.14 it needs the
extra (pip install 'vllm-kvfix[attach]') and the right to trace the process: the same user or root, and ptrace allowed.
All that can be checked is checked from outside first. The engine runs on; it waits for about a millisecond, between two
steps.

{EXIT_CODES}

examples:
  vllm-kvfix attach --dry-run --all      what would be done, to every engine core on this machine
  vllm-kvfix attach --fix 4711           stop the leak, and give back what has piled up
  vllm-kvfix attach --observe 4711       have it recorded, for `vllm-kvfix diagnose` and the sidecar
  vllm-kvfix detach 4711                 take it back
"""


def parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The arguments that attach and detach share."""
    made = argparse.ArgumentParser(
        prog=f"vllm-kvfix {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("pid", metavar="PID", type=int, nargs="*", help="process id of an engine core (VLLM::EngineCore)")
    made.add_argument("--all", action="store_true", help="every engine core that can be seen here")
    made.add_argument("--json", action="store_true", help="print one JSON object a process, a line each")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    made = parser(
        "attach",
        "Brings the fix of the host-memory leak, the recorder of KV blocks, or (without a choice) both into running "
        "engines,\nwithout a restart.",
        _EPILOG,
    )
    made.add_argument("--fix", action="store_true", help="the fix alone, unless --observe is given, too")
    made.add_argument("--observe", action="store_true", help="the recorder alone, unless --fix is given, too")
    made.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    options = made.parse_args(argv)
    both = not (options.fix or options.observe)

    def do(pid: int, progress: Callable[[str], object]) -> Outcome:
        return session.attach_to(
            pid,
            fix=options.fix or both,
            observe=options.observe or both,
            dry_run=options.dry_run,
            progress=progress,
        )

    return over_all(made, options, do)


def over_all(made: argparse.ArgumentParser, options: argparse.Namespace, do: Do) -> int:
    """Do it to every process that is named; returns the exit code."""
    if bool(options.pid) == options.all:
        made.error("give either process ids or --all")
    pids = target.engine_cores() if options.all else options.pid
    if not pids:
        _print_refusal(
            made.prog,
            None,
            AttachError(
                Reason.DEAD,
                "no engine core runs here",
                "of an engine in a script's own process, give the PID; in a pod, use the chart's profile `ptrace`",
            ),
            as_json=options.json,
        )
        return REFUSED
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to leave no file behind, as at Ctrl-C
    code = DONE
    for pid in pids:
        code = max(code, _one(made.prog, pid, do, as_json=options.json))
        if code == INTERRUPTED:
            break
    return code


def _one(program: str, pid: int, do: Do, *, as_json: bool) -> int:
    try:
        outcome = do(pid, _progress(pid))
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: {pid}: interrupted; `vllm-kvfix detach {pid}` takes back what may be in it\n")
        return INTERRUPTED
    except AttachError as error:
        _print_refusal(program, pid, error, as_json=as_json)
        return UNCERTAIN if error.reason in errors.UNCERTAIN else REFUSED
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n" if as_json else _text(outcome))
    sys.stdout.flush()
    return DONE


def _progress(pid: int) -> Callable[[str], object]:
    """Says on stderr what it is at, once it takes long."""
    began = time.monotonic()

    def say(what: str) -> None:
        if time.monotonic() - began > _SAY_AFTER_S:
            sys.stderr.write(f"{pid}: {what}\n")

    return say


def _print_refusal(program: str, pid: int | None, error: AttachError, *, as_json: bool) -> None:
    if as_json:
        uncertain = error.reason in errors.UNCERTAIN
        said: dict[str, Any] = {"pid": pid, "refused": error.reason.value, "message": str(error)}
        said |= {"next_step": error.next_step, "exit_code": UNCERTAIN if uncertain else REFUSED}
        sys.stdout.write(json.dumps(said) + "\n")
        return
    red = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    who = f"{program}: " + (f"{pid}: " if pid is not None else "")
    sys.stderr.write(f"\x1b[31m{who}{error}\x1b[0m\n" if red else f"{who}{error}\n")
    if error.next_step:
        sys.stderr.write(f"  next step: {error.next_step}\n")


_WORDS = {
    "attached": "attached",
    "already there": "was there already",
    "not affected": "not needed",
    "would be attached": "would be attached (dry run)",
    "detached": "taken back",
}


def _text(outcome: Outcome) -> str:
    rank = f", engine {', '.join(map(str, outcome.engines))}" if outcome.engines else ""
    rows = [f"{outcome.pid}: vLLM {outcome.vllm_version or 'of unknown version'}, Python {outcome.python}{rank}"]
    rows += [f"  {label:<9} {_WORDS[word]}" for label, word in (("fix", outcome.fix), ("recorder", outcome.observe))
             if word in _WORDS]  # fmt: skip
    if {outcome.fix, outcome.observe} == {"not attached"}:
        rows.append("  nothing was attached to it")
    if outcome.fix == "attached":
        rows.append(f"  leak      {outcome.backlog_before:,} ids had piled up, {outcome.backlog_after:,} are left")
        rows.append(
            f"  memory    {outcome.rss_before / _MEBI:,.0f} MiB before, {outcome.rss_after / _MEBI:,.0f} MiB after"
        )
    if outcome.confirmed_by:
        rows.append(f"  confirmed by {outcome.confirmed_by}; the engine waited {outcome.held_s * 1e3:.2f} ms for it")
    rows += [f"  ring      {ring}" for ring in outcome.rings if outcome.observe in {"attached", "already there"}]
    rows += [f"  note      {note}" for note in outcome.notes]
    rows += [f"  stays     {name}: another plugin has wrapped it since" for name in outcome.left]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
