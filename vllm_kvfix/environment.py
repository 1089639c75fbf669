# SPDX-License-Identifier: Apache-2.0
"""What an interpreter's environment holds: where its vLLM lies, and whether vLLM would find our plugin there.

Another interpreter is asked by handing it this file's text, so it needs nothing of ours; hence the standard library
alone, and no import of this package. Nothing that is looked at gets imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 60


class UnusableInterpreterError(Exception):
    """Another interpreter could not be asked; the message says which and why."""


class Environment(NamedTuple):
    """What was found; plain strings, since it travels as JSON."""

    python: str
    """Version of the interpreter, such as ``3.11.7``."""
    executable: str
    """Path of the interpreter."""
    package_root: str | None
    """Folder of the package that was asked for; None where there is none."""
    entry_point: str | None
    """Name of our entry point in the group that was asked for; None where there is none."""
    plugin_version: str | None
    """Version of the distribution that brings the entry point."""


def describe(package: str, group: str) -> Environment:
    """The environment of the running interpreter: its ``package``, and our entry point in ``group``."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    ours = next((e for e in metadata.entry_points(group=group) if e.value.split(".")[0] == "vllm_kvfix"), None)
    return Environment(
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        package_root=locations[0] if locations else None,
        entry_point=ours.name if ours else None,
        plugin_version=ours.dist.version if ours and ours.dist else None,
    )


def describe_other(python: str, package: str, group: str) -> Environment:
    """:func:`describe` run by another interpreter.

    Args:
        python: Path of the interpreter, or a name on ``PATH``.
        package: As for :func:`describe`.
        group: As for :func:`describe`.

    Raises:
        UnusableInterpreterError: It cannot be started, fails, hangs, or is older than Python 3.10.
    """
    code = Path(__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(  # noqa: S603  # the user names the program
            [python, "-c", code, package, group],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"cannot run {python}: {error}"
        raise UnusableInterpreterError(message) from error
    try:
        return Environment(*json.loads(done.stdout))
    except (ValueError, TypeError) as error:
        said = done.stderr.strip().splitlines()
        message = f"{python} is no Python of 3.10 or newer: {said[-1] if said else f'exit code {done.returncode}'}"
        raise UnusableInterpreterError(message) from error


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if entry]  # `-c` puts the working folder first, `vllm serve` does not
    sys.stdout.write(json.dumps(describe(sys.argv[1], sys.argv[2])))
