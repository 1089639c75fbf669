# SPDX-License-Identifier: Apache-2.0
"""What all scenes have in common: the load, the options of the scheduler, and a hook for each event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tests.labelled import truth
from tests.labelled.clock import THREE_HOURS, Pace
from tests.labelled.stage import Load

if TYPE_CHECKING:
    from tests.labelled.stage import Stage

ENGINE_CORE = "engine core"
API_SERVER = "api server"
WORKER = "worker"

WARM_TICKS = 6


STANDARD: dict[str, Any] = {
    "num_blocks": 2048,
    "prefix_caching": False,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "max_model_len": 4096,
}


class Scene:
    """A scheduler, a load, and what a case does at each event; one that does nothing is a healthy process.

    Attributes:
        name: Of the case.
        role: The process that this is, one of `layout.ROLES`.
        pace: How long it lasts.
        patched: Whether the back-port is in force: without it, each scheduler of an affected release leaks anyhow.
        options: Of the scheduler, see `driver.Options`.
        traffic: What comes in a tick.
        leaked: Bytes that this case itself knows it leaked, so far; 0: it does not know.
    """

    role: ClassVar[str] = ENGINE_CORE
    pace: ClassVar[Pace] = THREE_HOURS
    patched: ClassVar[bool] = True
    options: ClassVar[dict[str, Any]] = STANDARD
    traffic: ClassVar[Load] = Load()

    def __init__(self, name: str) -> None:
        self.name = name
        self.leaked = 0

    def set_up(self, stage: Stage) -> None:
        """Make what the case needs, before anything is frozen."""

    def load(self, tick: int) -> Load:  # noqa: ARG002  # for those whose load changes
        """What comes in a tick."""
        return self.traffic

    def before_tick(self, stage: Stage, tick: int) -> None:
        """A tick begins."""

    def arrived(self, stage: Stage, name: str) -> None:
        """A request was added."""

    def stepped(self, stage: Stage) -> None:
        """A step is over."""

    def generated(self, stage: Stage, name: str, tokens: int) -> None:
        """A request got tokens."""

    def finished(self, stage: Stage, name: str) -> None:
        """A request was answered to its end."""

    def aborted(self, stage: Stage, name: str) -> None:
        """A request's client went away, and vLLM was told."""

    def after_tick(self, stage: Stage, tick: int) -> None:
        """A tick is over."""

    def addresses(self) -> list[int]:
        """Where the bytes lie that were leaked, or some of them; empty: not known."""
        return []

    def category(self) -> str | None:
        """In which kind of mapping those lie; None: not known."""
        return truth.category_of(self.addresses())

    def lost(self, size: int) -> None:
        """Count the bytes that were leaked just now."""
        self.leaked += size
