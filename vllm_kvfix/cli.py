# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-kvfix``."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

from vllm_kvfix import __version__, environment, status, upstream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STATUS_EPILOG = """\
exit codes:
  0  protected, or not affected
  1  affected and not protected
  2  cannot tell (no vLLM there, an unknown source, an interpreter that does not run)

examples:
  vllm-kvfix status                                   the environment of this command
  vllm-kvfix status --python /opt/venv/bin/python     another one
  VLLM_PLUGINS=lora_resolver vllm-kvfix status        as under that variable
  vllm-kvfix status --json | jq .exit_code
"""

# Commands that parse their own arguments: the module whose `main` they are, and what they do.
_DELEGATED = {
    "attach": (
        "vllm_kvfix.attach.command",
        "bring the fix, the recorder or both into a running engine, without a restart",
    ),
    "detach": ("vllm_kvfix.attach.detach", "take back what was attached"),
    "diagnose": (
        "vllm_kvfix_sidecar.diagnose",
        "say which vLLM process grows, what owns the growth, when the limit is reached, and what to do",
    ),
    "top": ("vllm_kvfix_sidecar.top", "the same, live, in a terminal (extra `sidecar`)"),
    "postmortem": ("vllm_kvfix_sidecar.postmortem", "say what the ring of a dead engine tells of its last seconds"),
    "sidecar": (
        "vllm_kvfix_sidecar.__main__",
        "show live engines: a page, metrics for Prometheus, spans and metrics by OTLP (extra `sidecar`)",
    ),
    "demo": (
        "vllm_kvfix.demo.run",
        "a real engine with a tiny model leaks, is named on a live page, and is fixed while it runs (CPU, minutes)",
    ),
}

_COLOURS = {
    status.PROTECTED_OR_UNAFFECTED: "32",
    status.AFFECTED_AND_UNPROTECTED: "31",
    status.CANNOT_TELL: "33",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvfix",
        description="Fixes the host-memory leak of vLLM 0.17.1 to 0.25.1 without an upgrade, and shows the KV blocks "
        "of live engines. Once installed beside vLLM, both begin by themselves at its next start; `status` tells "
        "whether they would, `diagnose` which process grows and why, `sidecar` shows what is seen.",
        epilog="`vllm-kvfix COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-kvfix {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status_parser = commands.add_parser(
        "status",
        help="say whether a vLLM started from an environment is affected and protected",
        description="Looks at an environment without importing vLLM or torch: which vLLM is there, whether it leaks "
        "host memory and for which models, whether the plugin would load and apply, and what to do next.",
        epilog=_STATUS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status_parser.add_argument("--json", action="store_true", help="print one JSON object")
    status_parser.add_argument("--python", metavar="PATH", help="look at the environment of this interpreter")
    for name, (_, help_text) in _DELEGATED.items():
        delegated = commands.add_parser(name, help=help_text, add_help=False)
        delegated.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _print_status(found: status.Status, out: TextIO, *, colour: bool) -> None:
    first = status.verdict(found)
    out.write(f"\x1b[{_COLOURS[found.exit_code]}m{first}\x1b[0m\n" if colour else f"{first}\n")
    rows = status.lines(found)
    width = max(len(label) for label, _ in rows)
    out.writelines(f"  {label:<{width}}  {value}\n" for label, value in rows)


def _status(arguments: argparse.Namespace, environ: Mapping[str, str], out: TextIO, *, colour: bool) -> int:
    if arguments.python:
        try:
            there = environment.describe_other(arguments.python, upstream.PACKAGE, upstream.PLUGIN_GROUP)
        except environment.UnusableInterpreterError as error:
            if arguments.json:
                out.write(json.dumps({"error": str(error), "exit_code": status.CANNOT_TELL}) + "\n")
            else:
                sys.stderr.write(f"vllm-kvfix status: {error}\n  Give --python the interpreter that runs vLLM.\n")
            return status.CANNOT_TELL
    else:
        there = environment.describe(upstream.PACKAGE, upstream.PLUGIN_GROUP)
    found = status.collect(there, environ)
    if arguments.json:
        out.write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        _print_status(found, out, colour=colour)
    return found.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] and argv[0] in _DELEGATED:
        module, _ = _DELEGATED[argv[0]]
        run = importlib.import_module(module).main  # here, as status must stay fast
        return int(run(argv[1:]))
    arguments = _parser().parse_args(argv)
    out = io.StringIO()
    code = _status(arguments, os.environ, out, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    try:
        sys.stdout.write(out.getvalue())
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` and its like: the exit code still says all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
