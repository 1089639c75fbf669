# SPDX-License-Identifier: Apache-2.0
"""Judges recordings as the sidecar would: `python -m tests.labelled.judging FOLDER CASE...` writes `CASE.verdict.json`.

A deployment has three processes. The case is one of them, with the load of its own engine; the two others are healthy
ones that were recorded beside it. So a verdict must name the right one of three.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.labelled import cases, recording, scenes
from tests.labelled.clock import BEGIN_S
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.host_memory import ProcessView
from vllm_kvfix_sidecar.process_table import ProcessKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_kvfix_sidecar.verdict import Verdict

HEALTHY = {scenes.ENGINE_CORE: "steady", scenes.API_SERVER: "steady-api-server", scenes.WORKER: "steady-worker"}
KEYS = {role: ProcessKey(1000 + number, 500) for number, role in enumerate(HEALTHY)}
# Verdicts are made at so many moments of a case, evenly.
MOMENTS = 40


@dataclass
class Table:
    """The process table of a made-up deployment, whose members tell of themselves."""

    views: list[ProcessView] = field(default_factory=list)

    def look(self, *_: Any) -> list[ProcessView]:
        """All of them."""
        return self.views


class Deployment:
    """The three processes of a case, and the sidecar's assessment of them on the case's clock."""

    def __init__(self, case: cases.Case, folder: Path) -> None:
        self._now = BEGIN_S
        root = KEYS[scenes.API_SERVER]
        table = Table([ProcessView(key, 0, role, role, ring=key, root=root) for role, key in KEYS.items()])
        self._assessment = Assessment(table, clock=lambda: self._now)
        self._feeds = {role: self._assessment.follow(*key, role, role, case.release) for role, key in KEYS.items()}
        for feed in self._feeds.values():
            feed.patch("applied" if case.scene.patched else "off")
        names = {**HEALTHY, case.role: case.name}
        self._told = {role: _Told(folder / f"{name}.rec") for role, name in names.items()}
        self._role = case.role

    def look(self, time: float) -> None:
        """Hear what was told until then."""
        self._now = time
        for role, told in self._told.items():
            for voice, event in told.until(time):
                if voice == recording.OWN:
                    self._feeds[role].hear(event)
                elif role == self._role:
                    self._feeds[scenes.ENGINE_CORE].step(event)
        self._assessment.look(time)

    def verdicts(self) -> Mapping[str, Verdict]:
        """Judge all of them now."""
        for _ in KEYS:
            self._assessment.tick(self._now)
        if self._assessment.errors:
            raise AssertionError(f"{self._assessment.errors} errors in the assessment")
        by_key = self._assessment.verdicts
        return {role: by_key[key] for role, key in KEYS.items()}


def verdicts(case: cases.Case, folder: Path) -> Iterator[tuple[float, Mapping[str, Verdict]]]:
    """The verdict on each process, by its role, at some moments of a case, in simulated seconds since its begin."""
    deployment = Deployment(case, folder)
    every = max(1, case.scene.pace.ticks // MOMENTS)
    for tick, time in enumerate(case.scene.pace.times(), 1):
        deployment.look(time)
        if tick % every == 0 or tick == case.scene.pace.ticks:
            yield time - BEGIN_S, deployment.verdicts()


class _Told:
    """A recording, handed out as time goes on."""

    def __init__(self, path: Path) -> None:
        self._events = recording.read(path)
        self._next: tuple[int, Any] | None = next(self._events, None)

    def until(self, time: float) -> Iterator[tuple[int, Any]]:
        """What was told by then and not handed out yet."""
        while self._next is not None and self._next[1].time / 1e9 <= time:
            yield self._next
            self._next = next(self._events, None)


def judge(case: cases.Case, folder: Path) -> dict[str, Any]:
    """What was found of a case, as plain JSON: each moment's kinds, and the last verdict on each process in full."""
    moments = []
    last: Mapping[str, Verdict] = {}
    for time, last in verdicts(case, folder):
        moments.append((time, {role: _short(verdict) for role, verdict in last.items()}))
    return {"moments": moments, "last": {role: _plain(verdict) for role, verdict in last.items()}}


def _short(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind.name,
        "category": verdict.category,
        "follows": verdict.follows,
        "culprits": [(culprit.path, dict(culprit.per)) for culprit in verdict.culprits[:3]],
    }


def _plain(verdict: Verdict) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(verdict, kind=verdict.kind.name))  # type: ignore[arg-type]  # for JSON


def main() -> int:
    """Judge the named cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    chosen = parser.parse_args()
    for name in chosen.cases:
        found = judge(cases.BY_NAME[name], chosen.folder)
        (chosen.folder / f"{name}.verdict.json").write_text(json.dumps(found))
        print(f"  {name}: judged", file=sys.stderr, flush=True)  # noqa: T201  progress
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
