# SPDX-License-Identifier: Apache-2.0
"""Histories of processes for the tests of the verdict, from functions of the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kvfix_sidecar.observed import ContainerHistory, Limit, ProcessHistory, Series

if TYPE_CHECKING:
    from collections.abc import Callable

MIB, GIB = float(1 << 20), float(1 << 30)
MINUTE, HOUR = 60.0, 3600.0
BEGIN = 5000.0


def series(curve: Callable[[float], float], seconds: float, every: float = 10.0, begin: float = BEGIN) -> Series:
    """Samples of a function of the seconds since the begin."""
    times = [i * every for i in range(int(seconds // every) + 1)]
    values = [curve(time) for time in times]
    return Series([begin + time for time in times], values, values)


def nothing(_: float) -> float:
    """Always 0."""
    return 0.0


@dataclass
class Made:
    """A history that is being made; ``seconds`` long, of a process that began with it."""

    seconds: float
    every: float = 10.0
    begin: float = BEGIN
    memory: dict[str, Series] = field(default_factory=dict)
    containers: list[ContainerHistory] = field(default_factory=list)
    load: dict[str, Series] = field(default_factory=dict)
    limit: Limit | None = None
    version: str = "0.30.0"
    patch: str = "not affected"

    def series(self, curve: Callable[[float], float]) -> Series:
        """Samples over all of it."""
        return series(curve, self.seconds, self.every, self.begin)

    def figures(self, **curves: Callable[[float], float]) -> Made:
        """Figures of memory; ``_`` in a name stands for the dot after the scope."""
        self.memory |= {name.replace("_", ".", 1): self.series(curve) for name, curve in curves.items()}
        return self

    def loaded(self, **curves: Callable[[float], float]) -> Made:
        """Figures of the load."""
        self.load |= {name: self.series(curve) for name, curve in curves.items()}
        return self

    def container(  # noqa: PLR0913  # what a container has
        self,
        path: str,
        length: Callable[[float], float],
        unit: float = 100.0,
        *,
        capacity: int | None = None,
        orphans: Callable[[float], float] = nothing,
        orphan_age: float = 0.0,
        members: Callable[[float], float] = lambda _: 1.0,
    ) -> Made:
        """A container of so many bytes an entry."""
        self.containers.append(
            ContainerHistory(
                path,
                capacity,
                orphan_age,
                self.series(length),
                self.series(members),
                self.series(lambda time: length(time) * unit),
                self.series(length),
                self.series(nothing),
                self.series(orphans),
            )
        )
        return self

    def limited(self, limit: float, usage: Callable[[float], float]) -> Made:
        """A limit and what counts against it."""
        self.limit = Limit(limit, self.series(usage))
        return self

    @property
    def now(self) -> float:
        """The end."""
        return self.begin + self.seconds

    def history(self) -> ProcessHistory:
        """What was made."""
        return ProcessHistory(
            pid=17,
            role="engine core",
            name="VLLM::EngineCore",
            started=self.begin,
            memory=self.memory,
            containers=self.containers,
            load=self.load,
            limit=self.limit,
            vllm_version=self.version,
            patch_state=self.patch,
        )


def engine(seconds: float, requests_a_second: float = 10.0, every: float = 10.0) -> Made:
    """An engine core of 2 GiB under even load: a tenth aborted, 50 tokens, 7.3 blocks a request, 20 steps a second."""
    made = Made(seconds, every)
    made.figures(
        status_anon=lambda _: 2 * GIB, status_swap=nothing, smaps_heap=lambda _: GIB, smaps_anonymous=lambda _: GIB
    )
    return made.loaded(
        requests=lambda time: requests_a_second * time,
        aborts=lambda time: 0.1 * requests_a_second * time,
        generated_tokens=lambda time: 50 * requests_a_second * time,
        blocks=lambda time: 7.3 * requests_a_second * time,
        steps=lambda time: 20 * time,
        running=lambda _: 30.0,
        waiting=nothing,
    )
