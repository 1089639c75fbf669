# SPDX-License-Identifier: Apache-2.0
"""The command that writes dashboards and alerts, or checks that those written are this version's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix import __version__
from vllm_kvfix_sidecar.monitoring import alerts, dashboards

if TYPE_CHECKING:
    from collections.abc import Sequence

CURRENT, DIFFERENT, CANNOT_WRITE = 0, 1, 2
_DESCRIPTION = """\
Writes the Grafana dashboards and the Prometheus alerts of this version of vllm-kvfix, whose names of metrics they have:

  DIR/dashboards/*.json      one a page; import them, or mount them where Grafana provisions dashboards from
  DIR/rules/vllm-kvfix.yaml  a file of rules for Prometheus; its `groups` are the spec of a PrometheusRule
"""
_EPILOG = """\
examples:
  python -m vllm_kvfix_sidecar.monitoring --output monitoring         write them
  python -m vllm_kvfix_sidecar.monitoring --output monitoring --check  after an upgrade: are they still right?
  promtool check rules monitoring/rules/vllm-kvfix.yaml

exit codes:
  0  written; with --check, current
  1  with --check: some file is missing, or differs from what this version would write
  2  the folder cannot be written or read; or an option cannot be used
"""


def files() -> dict[Path, str]:
    """What each file holds, by its path in the folder."""
    pages = [page().as_json() for page in dashboards.PAGES]
    found = {Path("dashboards", f"{page['uid']}.json"): json.dumps(page, indent=2) + "\n" for page in pages}
    return {**found, Path("rules", "vllm-kvfix.yaml"): alerts.as_yaml()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvfix_sidecar.monitoring",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-kvfix {__version__}")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="the folder; made if it is missing")
    parser.add_argument("--check", action="store_true", help="write nothing; say which files are not current")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        return _check(asked.output) if asked.check else _write(asked.output)
    except OSError as error:
        sys.stderr.write(f"{error.filename or asked.output}: {error.strerror}; choose another folder by --output\n")
        return CANNOT_WRITE


def _write(folder: Path) -> int:
    for path, text in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{folder / path}\n")
    return CURRENT


def _check(folder: Path) -> int:
    wrong = [path for path, text in files().items() if _read(folder / path) != text]
    extra = sorted({path.relative_to(folder) for path in folder.glob("dashboards/*.json")} - files().keys())
    for path in wrong:
        sys.stdout.write(f"{folder / path}: {'not current' if (folder / path).exists() else 'missing'}\n")
    for path in extra:
        sys.stdout.write(f"{folder / path}: of no page of this version\n")
    if wrong or extra:
        sys.stdout.write(f"write them anew: python -m vllm_kvfix_sidecar.monitoring --output {folder}\n")
        return DIFFERENT
    return CURRENT


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
