# SPDX-License-Identifier: Apache-2.0
"""Which alerts a file of rules fires in a scene, as promtool works it out."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from tests.sidecar_e2e.prometheus import prometheus_binary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tests.monitoring.scenes import Scene

_LONGEST_S = 120
_ALERT = re.compile(r"^ *Labels:\{(.*)\}\n *Annotations:\{(.*)\},?$", re.MULTILINE)
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')


class Fired(NamedTuple):
    """An alert that fires."""

    labels: dict[str, str]
    annotations: dict[str, str]


class PromtoolError(AssertionError):
    """promtool could not do what it was asked; the message is its own."""


def check_rules(rules: Path) -> str:
    """What ``promtool check rules`` says; fails if it finds a fault."""
    command = [prometheus_binary("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(rules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
    if done.returncode:
        raise PromtoolError(done.stdout + done.stderr)
    return done.stdout


def fired(rules: Path, scene: Scene, minutes: Iterable[int], names: Sequence[str], folder: Path) -> list[Fired]:
    """What fires in any of these minutes.

    promtool is told that nothing does, and says what did all the same.
    """
    checks = [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for minute in minutes for name in names]
    test = {"interval": "1m", "input_series": scene.inputs(), "alert_rule_test": checks}
    path = folder / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    command = [prometheus_binary("promtool"), "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
    told = done.stdout + done.stderr
    found = [Fired(_pairs(labels), _pairs(annotations)) for labels, annotations in _ALERT.findall(told)]
    if bool(done.returncode) != bool(found):
        raise PromtoolError(told)
    return found


def _pairs(text: str) -> dict[str, str]:
    return {key: ast.literal_eval(value) for key, value in _PAIR.findall(text)}
