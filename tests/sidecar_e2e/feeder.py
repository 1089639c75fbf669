# SPDX-License-Identifier: Apache-2.0
"""A fake engine as a process of its own, named so: writes a real ring file, and says on its output what it wrote.

Each line of the output is a JSON object with the field ``kind``::

    engine   pid, start_time, boot_id, index, ring, offset (unix ns - monotonic ns, at the start), config
    request  one that has ended and was freed: see ``_request``; ``written``: its end is in the ring, not dropped;
             ``freed_written``: that its blocks were freed is, too
    open     as request, of those that never end; when the feeder has written all the others
    totals   the last ``Step``, and frames, events (published), dropped, requests; the last line, and always there

It then waits for the end of its input if it was told to ``--hold``, or ends at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tests.sidecar_e2e.fake_engine import FakeEngine, Load, Request
from vllm_kvfix import events
from vllm_kvfix.ring import layout
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST_STEPS_AFTER = 100_000


class ShiftedRing(RingWriter):
    """A ring whose header says a wall clock that is ``shift_ns`` ahead of this machine's."""

    shift_ns = 0

    @property
    def events(self) -> int:
        """Events published so far."""
        return self._events

    def _beat(self) -> None:
        super()._beat()
        offset = time.time_ns() - time.monotonic_ns() + self.shift_ns
        self._header[layout.CLOCK_OFFSET_WORD] = offset & layout.WORD_MASK


@dataclass
class Feeder:
    """Steps the engine and writes what happened, a frame a step."""

    engine: FakeEngine
    ring: ShiftedRing
    out: TextIO
    drop_every: int = 0
    frames: int = 0
    ended: int = 0
    _end_written: dict[int, bool] = field(default_factory=dict)

    def begin(self, origin: Origin, offset: int) -> None:
        """Write the configuration, and say who we are."""
        config = self.engine.config()
        self._frame([config])
        self._say(
            "engine",
            pid=os.getpid(),
            start_time=origin.start_time,
            boot_id=origin.boot_id.hex(),
            index=origin.engine_index,
            ring=str(self.ring.path),
            offset=offset,
            config=config._asdict(),
        )

    def _say(self, kind: str, **fields: object) -> None:
        self.out.write(json.dumps({"kind": kind, **fields}) + "\n")

    def _frame(self, happened: Iterable[events.Event]) -> bool:
        told = list(happened)
        words = [word for event in told for word in events.encode(event)]
        self.frames += 1
        if self.drop_every and self.frames % self.drop_every == 0:
            self.ring.drop(len(told))
            return False
        return self.ring.write(words, len(told))

    def step(self, arrivals: int) -> None:
        """One step."""
        happened = self.engine.step(time.monotonic_ns(), arrivals)
        written = self._frame(happened.events)
        for request in happened.finished:
            self.ended += 1
            if not request.freed_at:
                self._end_written[request.number] = written
        for request in happened.freed:
            end_written = self._end_written.pop(request.number, written)
            self._say("request", **_request(request), written=end_written, freed_written=written)

    def feed(self, requests: int, per_step: int, rate: float) -> None:
        """``requests`` come, ``per_step`` at a time, ``rate`` a second (0: as fast as can be), and run to their end."""
        begin, come = time.monotonic(), 0
        endless = self.engine.load.never_end
        for _ in range(requests // per_step + _MOST_STEPS_AFTER):
            arrivals = min(per_step, requests - come)
            come += arrivals
            self.step(arrivals)
            if come == requests and len(self.engine.open) == endless and self.engine.totals["steps"] > 1:
                return
            if rate:
                time.sleep(max(0.0, begin + come / rate - time.monotonic()))
        raise RuntimeError("the pool is too small for the requests: they do not end")

    def close(self) -> None:
        """Tell of the open requests, and the totals."""
        for request in self.engine.open:
            self._say("open", **_request(request))
        self._say(
            "totals",
            **self.engine.totals,
            frames=self.frames,
            events=self.ring.events,
            dropped=self.ring.dropped,
            requests=self.ended,
        )
        self.out.flush()


def _request(request: Request) -> dict[str, object]:
    """The account of a request: the fields of :class:`Request`, times in monotonic ns, and its identity in hex."""
    fields = asdict(request)
    for inner in ("blocks", "changed", "life", "endless", "told_refused", "held_ns"):
        del fields[inner]
    identity, context = request.identity, request.identity.context
    del fields["identity"]
    fields["id"] = identity.request_id
    fields["context"] = context and [f"{context.trace_id:032x}", f"{context.parent_id:016x}", context.flags]
    fields["held"] = request.held_ns // 1000
    return fields


def start_time(pid: int, proc: Path = Path("/proc")) -> int:
    """When the process began: clock ticks since boot, field 22 of its ``stat``."""
    return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])


def boot_id(proc: Path = Path("/proc")) -> bytes:
    """The 16 bytes that tell this boot of the machine from any other."""
    return bytes.fromhex((proc / "sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sidecar_e2e.feeder", description="A fake engine.")
    add = parser.add_argument
    add("--ring", type=Path, required=True, help="the file to make")
    add("--capacity", type=int, default=1 << 20, help="words in the ring's body (%(default)s)")
    add("--index", type=int, default=0, help="the engine's index")
    add("--seed", type=int, default=1, help="of the random requests")
    add("--requests", type=int, default=100, help="how many come (%(default)s)")
    add("--per-step", type=int, default=8, help="how many come in one step (%(default)s)")
    add("--rate", type=float, default=0.0, help="how many come a second; 0: as fast as can be")
    add("--steps", type=int, default=0, help="so many further steps without arrivals")
    add("--blocks", type=int, default=400, help="in the pool (%(default)s)")
    add("--groups", type=int, default=2, help="KV-cache groups (%(default)s)")
    add("--traced", type=float, default=0.5, help="share of the requests with a trace context")
    add("--hit", type=float, default=0.3, help="share of the requests with a prefix hit")
    add("--delayed", type=float, default=0.05, help="share of the requests whose blocks are freed later")
    add("--life", type=int, default=12, help="steps that a request runs at most (%(default)s)")
    add("--never-end", type=int, default=0, help="the first so many requests never finish")
    add("--leaky", action="store_true", help="grow the backlog, and say that the fix is not in force")
    add("--start-time", type=int, help="write this start time instead of our own")
    add("--clock-shift", type=int, default=0, help="wall clock ahead of the machine's, in ns")
    add("--clock-step", type=int, default=0, help="the wall clock steps by so many ns before the further steps")
    add("--drop-every", type=int, default=0, help="give every so many-th frame up, as a recorder does that failed")
    add("--hold", action="store_true", help="live until the end of the input")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Feed."""
    chosen = _parser().parse_args(arguments)
    shares = {name: getattr(chosen, name) for name in ("blocks", "groups", "traced", "hit", "delayed", "life", "leaky")}
    engine = FakeEngine(Load(never_end=chosen.never_end, **shares), random.Random(chosen.seed))  # noqa: S311  # a load
    origin = Origin(chosen.start_time or start_time(os.getpid()), boot_id(), chosen.index, "0.25.1", "0.0.0")
    ShiftedRing.shift_ns = chosen.clock_shift
    ring = ShiftedRing(chosen.ring, chosen.capacity, origin)
    ring.set_patch_state("refused" if chosen.leaky else "applied")
    feeder = Feeder(engine, ring, sys.stdout, chosen.drop_every)
    feeder.begin(origin, time.time_ns() - time.monotonic_ns() + chosen.clock_shift)
    feeder.feed(chosen.requests, chosen.per_step, chosen.rate)
    ShiftedRing.shift_ns += chosen.clock_step
    for _ in range(chosen.steps):
        feeder.step(0)
    feeder.close()
    if chosen.hold:
        sys.stdin.read()
    ring.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
