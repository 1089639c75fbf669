# SPDX-License-Identifier: Apache-2.0
"""What the plugin tells of a case's process, as words in a file: written in that process, read by who judges it.

A frame is a voice (whose events these are), the number of words, and as many words as `events.encode` made.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, BinaryIO

from vllm_kvfix import census, events, live, vitals
from vllm_kvfix.census import Census

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.labelled.clock import Clock, Pace
    from tests.labelled.stage import Stage

OWN = 0  # of the process itself
ENGINE = 1  # of the engine that it works for: the load
MOST_TURNS = 100_000


class Recorder:
    """The plugin's own vitals on a simulated clock, and the file that they go to."""

    def __init__(self, stage: Stage, clock: Clock, pace: Pace, file: BinaryIO) -> None:
        self._stage = stage
        self._clock = clock
        self._file = file
        # As many of a walk's rounds go into a tick as in the time that it counts for.
        self._census = Census(clock.ns, max(1, round(census.ROUNDS * vitals.CENSUS_S / pace.tick_s)))
        for name, thing in stage.roots.items():
            self._census.add_root(name, thing, live.live_ids_of)
        readers = {
            scope: (read, pace.smaps_s if scope in {"smaps", "python"} else least)
            for scope, (read, least) in vitals.READERS.items()
            if scope != "cgroup"  # that of the tests themselves, and whatever runs beside them
        }
        self._vitals = vitals.Vitals(self._census, readers, clock.ns)

    def look(self) -> None:
        """Tell of the engine's load, and all that is due of the process."""
        self._tell(ENGINE, [self._step()])
        for _ in range(MOST_TURNS):
            told = list(self._vitals.turn())
            self._tell(OWN, told)
            if self._census.resting and not told:
                return
        raise AssertionError(f"a round of the census is not over after {MOST_TURNS} turns")

    def _step(self) -> events.Step:
        totals, scheduler = self._stage.totals, self._stage.scheduler
        return events.Step(
            time=self._clock.ns(),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            cached=0,
            steps=totals.steps,
            tokens=0,
            new=totals.blocks,
            reused=0,
            released=0,
            preemptions=0,
            refusals=0,
            queried=0,
            hit=0,
            finished=totals.requests,
            aborted=totals.aborts,
            generated=totals.generated_tokens,
            backlog=tuple(len(getattr(m, "new_block_ids", ())) for m in self._stage.driver.managers),
        )

    def _tell(self, voice: int, told: Sequence[events.Event]) -> None:
        words = array("Q")
        for event in told:
            words.extend(events.encode(event))
        if words:
            self._file.write(array("Q", (voice, len(words))).tobytes() + words.tobytes())


def read(path: Path) -> Iterator[tuple[int, events.Event]]:
    """The events in a file, each with its voice, in their order."""
    words = array("Q")
    words.frombytes(path.read_bytes())
    at = 0
    while at < len(words):
        voice, size = words[at], words[at + 1]
        at += 2
        for event in events.decode(words[at : at + size]):
            yield voice, event
        at += size
