# SPDX-License-Identifier: Apache-2.0
"""Watches processes without a sidecar, for a while, as one would: rings and process table, but nothing is sent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar import ended, report, report_text, verdict
from vllm_kvfix_sidecar.assessment import Assessment
from vllm_kvfix_sidecar.health import Health
from vllm_kvfix_sidecar.host_memory import HostMemory
from vllm_kvfix_sidecar.marks import Marks
from vllm_kvfix_sidecar.metrics import Metrics
from vllm_kvfix_sidecar.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_kvfix_sidecar.observed import ProcessHistory
    from vllm_kvfix_sidecar.page_data import PageData
    from vllm_kvfix_sidecar.report import ProcessReport, Report
    from vllm_kvfix_sidecar.verdict import Verdict


class Watch:
    """Reads only: no cursor is moved, so that a sidecar beside it misses nothing."""

    def __init__(  # noqa: PLR0913  # its parts
        self,
        folders: Sequence[Path],
        *,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        judge: Callable[[ProcessHistory, float], Verdict] = verdict.judge,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Look at nothing yet.

        Args:
            folders: Where rings lie.
            proc: Where a process table is mounted.
            cgroups: Where the cgroups are mounted.
            judge: Makes a verdict of a history and a time.
            clock: Steady seconds; that of the rings' times.
            wall: Seconds since the epoch.
        """
        self._clock = clock
        self._wall = wall
        self._judge = judge
        self._folders = folders
        self._marks, self._metrics = Marks(), Metrics()
        self._assessment = Assessment(
            HostMemory(proc, cgroups, clock), judge=judge, listeners=[self._marks], clock=clock, wall=wall
        )
        self._pipeline = Pipeline(
            folders, self._metrics, None, assessment=self._assessment, proc=proc, clock=clock, read_only=True
        )

    def turn(self) -> None:
        """Take what rings and process table say now."""
        self._pipeline.poll()

    def report(self) -> Report:
        """What is known so far, judged now; takes some 20 ms a process."""
        now = self._clock()
        notes: list[str] = []
        judged = [self._judged(history, now, notes) for history in self._assessment.histories().values()]
        refused = {str(path): reason for path, reason in self._pipeline.refused.items()}
        known = [process for process in judged if process is not None]
        gone = ended.sentences(self._pipeline.all, int(self._wall() * 1e9))
        return report.make(known, self._wall(), not_followed=refused, notes=tuple(notes), ended=gone)

    def page(self) -> PageData:
        """What a sidecar's page would show; it needs what a sidecar needs, so it is not imported before."""
        from vllm_kvfix_sidecar.page_data import About, PageData  # noqa: PLC0415  # a report needs the plugin alone

        health = Health(self._pipeline, self._metrics, self._folders, self._clock)
        about = About(folders=self._folders)
        return PageData(
            self._pipeline,
            self._assessment,
            self._metrics,
            health,
            self._marks,
            about,
            clock=self._clock,
            wall=self._wall,
        )

    def _judged(self, history: ProcessHistory, now: float, notes: list[str]) -> ProcessReport | None:
        try:
            return report.of(history, self._judge(history, now))
        except Exception as error:  # noqa: BLE001  # a fault of ours about one process must not hide the others
            notes.append(f"Process {history.pid} could not be judged: {error!r}. Please report this.")
            return None

    @property
    def so_far(self) -> str:
        """The gravest verdict so far, in a few words; empty where there is none."""
        judged = self._assessment.judged()
        if not judged:
            return ""
        gravest = min((found.verdict for found in judged), key=lambda found: report.GRAVITY.index(found.kind))
        return f"{report_text.who(gravest)}: {gravest.kind.value}"

    @property
    def processes(self) -> int:
        """How many processes are seen."""
        return len(self._assessment.states())

    def close(self) -> None:
        """Close the rings."""
        self._pipeline.close()
