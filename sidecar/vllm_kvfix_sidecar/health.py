# SPDX-License-Identifier: Apache-2.0
"""Whether the sidecar works, and what it follows: the answers to probes and to ``--once``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vllm_kvfix.ring.reader import Header
    from vllm_kvfix_sidecar.metrics import EngineKey, Metrics

STALE_S = 10.0


class FollowedEngine(Protocol):
    """What is asked of an engine, or of another process that has a ring."""

    key: EngineKey
    vllm_version: str
    state: str
    lost: int

    @property
    def header(self) -> Header:
        """What its ring says of itself."""


class Follower(Protocol):
    """What is asked of the pipeline."""

    last_turn: float
    scanned: bool

    @property
    def folders_readable(self) -> bool:
        """Whether the last scan could look into a folder."""

    @property
    def engines(self) -> Sequence[FollowedEngine]:
        """The engines that are followed."""

    @property
    def processes(self) -> Sequence[FollowedEngine]:
        """The other processes whose rings are followed."""

    @property
    def refused(self) -> Mapping[Path, str]:
        """Files that are not followed, and why."""


class Answer(NamedTuple):
    """Yes or no, and what there is to say."""

    good: bool
    body: dict[str, object]


class Health:
    """Answers probes; ``clock`` is the pipeline's."""

    def __init__(
        self,
        follower: Follower,
        metrics: Metrics,
        folders: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._follower = follower
        self._metrics = metrics
        self._folders = folders
        self._clock = clock

    def alive(self) -> Answer:
        """Whether the pipeline has turned within ``STALE_S``."""
        age = self._clock() - self._follower.last_turn
        good = age < STALE_S
        return Answer(good, {"status": "ok" if good else "stuck", "last_turn_age_s": round(age, 3)})

    def ready(self) -> Answer:
        """Whether a folder can be read and has been looked through; no engine need be there."""
        readable, scanned = self._follower.folders_readable, self._follower.scanned
        good = readable and scanned
        status = "ok" if good else "no ring folder is readable yet" if not readable else "not looked yet"
        return Answer(good, {"status": status, **self.summary()})

    def notes(self) -> tuple[str, ...]:
        """Sentences about what is shown elsewhere, as far as it may not be what it seems."""
        return () if self.alive().good else ("The sidecar is stuck, so this may be old: restart it.",)

    def summary(self) -> dict[str, object]:
        """The folders, the engines, and the files that were refused; nothing that grows without bound."""
        return {
            "folders": [str(folder) for folder in self._folders],
            "engines": [self._engine(engine) for engine in self._follower.engines],
            "processes": [_process(process) for process in self._follower.processes],
            "refused": {str(path): reason for path, reason in list(self._follower.refused.items())},
        }

    def _engine(self, engine: FollowedEngine) -> dict[str, object]:
        known = self._metrics.known(engine.key)
        header, step, config = known.header, known.last_step, known.settings
        told: dict[str, object] = {
            "pid": engine.key.pid,
            "index": engine.key.index,
            "ring": engine.key.ring,
            "state": engine.state,
            "vllm_version": engine.vllm_version,
            "patch": header.patch_state if header else None,
            "events": {
                "published": header.events if header else None,
                "dropped": header.dropped if header else None,
                "lost": known.lost,
                "malformed_frames": known.malformed,
            },
            "finished": {reason: count for reason, count in known.finished_by_reason.items() if count},
        }
        if step:
            told["blocks"] = {"pool": config.blocks if config else None, "free": step.free, "cached": step.cached}
            told["requests"] = {"running": step.running, "waiting": step.waiting}
            told["steps"] = step.steps
            told["backlog"] = list(step.backlog)
        return told


def _process(process: FollowedEngine) -> dict[str, object]:
    header = process.header
    return {
        "pid": process.key.pid,
        "role": header.role,
        "ring": process.key.ring,
        "state": process.state,
        "vllm_version": process.vllm_version,
        "events": {"published": header.events, "dropped": header.dropped, "lost": process.lost},
    }
