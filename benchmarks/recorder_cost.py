# SPDX-License-Identifier: Apache-2.0
"""What watching costs a step of the scheduler: `python -m benchmarks.recorder_cost [--json]`, some four minutes.

Schedulers with the same load live in one process and take turns, in an order that is drawn anew each time: two stock
ones (their ratio is what the machine's noise alone can do), one that is recorded, and what a user would turn on
instead: vLLM's KV-cache events, its KV-cache metrics of every block, and an OpenTelemetry span for each request made in
the process. A step is `add_request` of what arrives, `schedule`, `update_from_output`, and the end of the objects that
these made and dropped; no model runs, so in an engine all this is a small part of a step. Statistics are on, as they
are in a server. Timed is the CPU time of the scheduler's thread; that of the recorder's own stands beside it, per step.
What the threads of KV events and of spans do is not counted, nor is the collection of cycles, which is off.

*Why it is fair.* Each scheduler has a copy of its own of vLLM's two hooked modules: hooks, once in, stay in, and what
the interpreter learns about one scheduler's code is not spoiled by another's. The load is steady from its first step:
requests begin with a random part of their answer done. Which scheduler is made first differs by batch, so where their
objects lie in memory is part of the noise.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__" and str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: an unzipped wheel on PYTHONPATH wins over the checkout

from benchmarks.spread import shown, spread  # noqa: E402  the path comes first
from tests import releases  # noqa: E402  as above

RUNNING = (1, 64, 256, 1024)
VARIANTS = (
    "stock", "recorder", "stock again", "kv events", "kv metrics", "span per request",
)  # fmt: skip  # in the order in which they step
BATCHES = 3  # fresh schedulers for each
BATCH_S = 6.0  # in which rounds are made, at least two
STEPS = {1: 600, 64: 64, 256: 18, 1024: 5}  # in a turn: some 40 ms or more
PASSES = 2  # turns of each in a round
UNTIMED = 8  # one step in so many, and at least one, to warm the processor's caches at the beginning of a turn
WARM_UP = 20
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Kind:
    """A load: prompts of so many tokens, some sharing their first quarter with others, and answers of so many.

    ``share``: of the usual number of steps in a turn, since a step takes longer; ``running``: requests at a time.
    """

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    share: float = 1.0
    running: tuple[int, ...] = RUNNING


KINDS = (
    Kind("decode-heavy", (17, 64), (300, 500)),
    Kind("prefill-heavy", (768, 1280), (8, 24), share=0.4),
    Kind("one token each", (500, 700), (1, 1), share=0.1, running=(64,)),
)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  a command's output


# -- in the release's process -------------------------------------------------------------------------------------


@dataclass
class _Prompts:
    """Where prompts are cut from: any cut is a prompt of its own."""

    chance: random.Random
    kind: Kind
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.chance.choices(range(3, 500), k=200_000)

    def draw(self) -> list[int]:
        """A prompt; half of them begin with the same tokens."""
        length = self.chance.randint(*self.kind.prompt)
        shared = length // 4 if self.chance.random() < 0.5 else 0  # noqa: PLR2004  a half
        start = self.chance.randrange(len(self.tokens) - length)
        return self.tokens[:shared] + self.tokens[start : start + length - shared]


@dataclass
class _Load:
    """A scheduler under a load that keeps so many requests in it."""

    driver: Any
    kind: Kind
    running: int
    prompts: _Prompts
    way: _Stock
    added: int = 0
    steps: int = 0

    def arrivals(self) -> list[Any]:
        """Requests to add, as many as are missing; the first ones have a part of their life behind them."""
        made = []
        first = self.added == 0
        for _ in range(self.running - len(self.driver.scheduler.requests)):
            self.added += 1
            answer = self.prompts.chance.randint(*self.kind.answer)
            if first:
                answer = self.prompts.chance.randint(1, answer)
            name = f"cmpl-{self.added:032x}-0"
            made.append(self.driver.make_request(name, prompt=self.prompts.draw(), max_tokens=answer))
            del self.driver.requests[name]  # it ends where the scheduler lets go of it
        return made

    def turn(self, steps: int) -> int:
        """So many steps, and some untimed ones before them; nanoseconds."""
        untimed = max(steps // UNTIMED, 1)
        for _ in range(untimed):
            self.step()
        took = sum(self.step() for _ in range(steps))
        self.steps += steps + untimed
        return took

    def step(self) -> int:
        """One step; nanoseconds that the scheduler's part of it took."""
        arrivals = self.arrivals()[::-1]
        scheduler = self.driver.scheduler
        before = time.thread_time_ns()
        while arrivals:
            scheduler.add_request(arrivals.pop())
        output = scheduler.schedule()
        took = time.thread_time_ns() - before
        answer = self.answer(output)
        before = time.thread_time_ns()
        scheduler.update_from_output(output, answer)
        del output
        return took + time.thread_time_ns() - before

    def answer(self, output: Any) -> Any:
        """What a model would say: the same token to everybody whose prompt is through."""
        from tests.contract import running_release  # noqa: PLC0415  only in a release's process

        requests = self.driver.scheduler.requests
        names = list(output.num_scheduled_tokens)
        return running_release.fitting(
            running_release.module("vllm.v1.outputs").ModelRunnerOutput,
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[
                [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=None,
        )


class _Stock:
    """Nothing is put on vLLM's classes."""

    events = 0
    beside = 0

    def modules(self) -> dict[str, Any]:
        """Fresh copies of the modules that have hooked classes, hooked; vLLM's own stay what and where they are."""
        from vllm_kvfix import observe  # noqa: PLC0415  the package under test

        names = list(dict.fromkeys(site[0] for site in observe.SITES))
        kept = {name: importlib.import_module(name) for name in names}
        for name in names:
            del sys.modules[name]
        try:
            made = {name: importlib.import_module(name) for name in reversed(names)}
        finally:
            sys.modules.update(kept)
            for name in names:
                parent, _, child = name.rpartition(".")
                setattr(sys.modules[parent], child, kept[name])
        for module, class_name, name, wrap in observe.SITES:
            owner = vars(made[module])[class_name]
            setattr(owner, name, self.wrap(name, owner.__dict__[name], wrap))
        return made

    def wrap(self, name: str, method: Any, wrap: Any) -> Any:
        """What takes the place of a method; ``wrap`` is the recorder's way."""
        del name, wrap
        return method

    def adopt(self, scheduler: Any, folder: Path) -> None:
        """Prepare for a scheduler that was made just now."""

    def check(self, scheduler: Any) -> None:
        """End the benchmark where what is measured has given up."""


class _Recorder(_Stock):
    """The recorder's hooks."""

    def wrap(self, name: str, method: Any, wrap: Any) -> Any:
        del name
        return functools.update_wrapper(wrap(method), method)

    def adopt(self, scheduler: Any, folder: Path) -> None:
        from vllm_kvfix import observe  # noqa: PLC0415  the package under test

        self.ring = observe.Observation({"VLLM_KVFIX_RING_DIR": str(folder)}, lambda: "off").watch(scheduler)
        self.recorder = observe._recorders[id(scheduler)]  # noqa: SLF001  nobody else asks

    def check(self, scheduler: Any) -> None:
        from vllm_kvfix import faults  # noqa: PLC0415  the package under test

        del scheduler
        if self.recorder.off or faults.counts:
            raise SystemExit(f"the recorder had errors, so nothing was measured: {faults.counts}")

    @property
    def beside(self) -> int:  # type: ignore[override]  # here it changes
        """Nanoseconds of CPU that its thread has had."""
        thread = self.recorder._thread  # noqa: SLF001  nobody else asks
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident)) if thread and thread.ident else 0

    @property
    def events(self) -> int:  # type: ignore[override]  # here it changes
        """Events in the ring so far."""
        from vllm_kvfix.ring.reader import RingReader  # noqa: PLC0415  the package under test

        reader = RingReader(self.ring)
        reader.close()
        return reader.header.events


class _Spans(_Stock):
    """An OpenTelemetry span of each request, made in the process, with as much in it as ours; exported to nowhere."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  only in a release's process
        from opentelemetry.sdk.trace.export import (  # noqa: PLC0415  as above
            BatchSpanProcessor,
            SpanExporter,
            SpanExportResult,
        )

        class Nowhere(SpanExporter):
            def export(self, spans: Any) -> SpanExportResult:
                del spans
                return SpanExportResult.SUCCESS

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(Nowhere()))
        self.tracer = provider.get_tracer("benchmark")
        self.spans: dict[str, Any] = {}

    def wrap(self, name: str, method: Any, wrap: Any) -> Any:
        del wrap
        made = {"add_request": self._add_request, "schedule": self._schedule, "_free_request": self._free_request}
        return functools.update_wrapper(made[name](method), method) if name in made else method

    def _add_request(self, method: Any) -> Any:
        def add_request(scheduler: Any, request: Any) -> None:
            method(scheduler, request)
            self.spans[request.request_id] = self.tracer.start_span("kv_cache.request")

        return add_request

    def _schedule(self, method: Any) -> Any:
        def schedule(scheduler: Any, *arguments: Any) -> Any:
            output = method(scheduler, *arguments)
            for row in output.scheduled_new_reqs:
                if row.req_id in self.spans:
                    self.spans[row.req_id].add_event("admitted", {"blocks": len(row.block_ids[0])})
            rows = output.scheduled_cached_reqs
            for name, ids in zip(rows.req_ids, rows.new_block_ids, strict=True):
                if ids and name in self.spans:
                    self.spans[name].add_event("allocated", {"blocks": len(ids[0])})
            return output

        return schedule

    def _free_request(self, method: Any) -> Any:
        def free_request(scheduler: Any, request: Any, *arguments: Any, **keywords: Any) -> Any:
            blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            result = method(scheduler, request, *arguments, **keywords)
            span = self.spans.pop(request.request_id, None)
            if span is not None:
                for number in range(8):
                    span.set_attribute(f"attribute.{number}", len(blocks[0]))
                span.end()
            return result

        return free_request


_WAYS: dict[str, type[_Stock]] = {
    "recorder": _Recorder,
    "span per request": _Spans,
}
_EXTRA: dict[str, dict[str, Any]] = {"kv events": {"kv_events": True}, "kv metrics": {"block_metrics": True}}


def _make(variant: str, kind: Kind, running: int, folder: Path, seed: int) -> _Load:
    from tests.contract import driver as d  # noqa: PLC0415  only in a release's process
    from vllm_kvfix import upstream  # noqa: PLC0415  the package under test

    most = kind.prompt[1] + kind.answer[1]
    way = _WAYS.get(variant, _Stock)()
    made = d.make_scheduler(
        "full",
        scheduler_cls=way.modules()[upstream.SCHEDULER_MODULE].Scheduler,
        num_blocks=running * (most // BLOCK_SIZE + 2) + 64,
        max_num_seqs=running,
        max_num_batched_tokens=max(running * kind.prompt[1], 2048),
        max_model_len=2 * most,
        log_stats=True,
        **_EXTRA.get(variant, {}),
    )
    way.adopt(made.scheduler, folder)
    return _Load(made, kind, running, _Prompts(random.Random(seed), kind), way)  # noqa: S311  a load, not a secret


@dataclass
class _Batch:
    """What was measured of one set of schedulers: per round, nanoseconds of a step of each variant."""

    rounds: list[dict[str, float]]
    events_per_step: float
    beside: float
    """Nanoseconds of the recorder's thread per step."""


def _batch(kind: Kind, running: int, number: int, folder: Path) -> _Batch:
    """Make fresh schedulers and measure them."""
    turned = VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
    loads = {variant: _make(variant, kind, running, folder, seed=number) for variant in turned}
    steps = max(round(STEPS[running] * kind.share), 3)
    for load in loads.values():
        load.turn(WARM_UP)
    recorded = loads["recorder"]
    before = recorded.way.events, recorded.way.beside, recorded.steps
    gc.collect()
    gc.disable()
    rounds = list(_rounds(loads, steps, random.Random(number)))  # noqa: S311  an order, not a secret
    gc.enable()
    recorded.way.check(recorded.driver.scheduler)
    steps = recorded.steps - before[2]
    events, beside = (recorded.way.events - before[0]) / steps, (recorded.way.beside - before[1]) / steps
    for load in loads.values():
        if load.driver.scheduler.kv_event_publisher is not None:
            load.driver.scheduler.kv_event_publisher.shutdown()
    return _Batch(rounds, events, beside)


def _rounds(loads: dict[str, _Load], steps: int, chance: random.Random) -> Iterator[dict[str, float]]:
    made, end, last = 0, time.monotonic() + BATCH_S, ""
    while made < 2 or time.monotonic() < end:  # noqa: PLR2004  a spread needs some
        sums = dict.fromkeys(loads, 0)
        for _ in range(PASSES):
            order = chance.sample(sorted(loads), len(loads))
            if order[0] == last:
                order.reverse()  # two turns in a row would find the processor's caches full of one's own
            last = order[-1]
            for variant in order:
                sums[variant] += loads[variant].turn(steps)
        made += 1
        yield {variant: took / (PASSES * steps) for variant, took in sums.items()}


def _row(kind: Kind, running: int, folder: Path) -> dict[str, Any]:
    batches = [_batch(kind, running, number, folder) for number in range(BATCHES)]
    rounds = [times for batch in batches for times in batch.rounds]
    stock = [(times["stock"] + times["stock again"]) / 2 for times in rounds]
    ratios = {
        variant: spread([times[variant] / base for times, base in zip(rounds, stock, strict=True)])
        for variant in VARIANTS
        if not variant.startswith("stock")
    }
    ratios["stock"] = spread([times["stock"] / times["stock again"] for times in rounds])
    more = statistics.median([times["recorder"] - base for times, base in zip(rounds, stock, strict=True)]) / 1e3
    events = statistics.mean([batch.events_per_step for batch in batches])
    return {
        "load": kind.name,
        "running": running,
        "rounds": len(rounds),
        "steps_per_round": PASSES * max(round(STEPS[running] * kind.share), 3),
        "stock_us": statistics.median(stock) / 1e3,
        "recorder_us": more,
        "events_per_step": events,
        "us_per_event": more / events,
        "beside_us": statistics.mean([batch.beside for batch in batches]) / 1e3,
        "over_stock": ratios,
    }


def _inside(release: str) -> dict[str, Any]:
    """Everything that is measured in the release's process."""
    from tests.contract import running_release  # noqa: PLC0415  only in a release's process

    if running_release.release() != release:
        raise SystemExit(f"asked for vLLM {release}, but sys.path has {running_release.release()}")
    rows = []
    for kind in KINDS:
        for running in kind.running:
            _say(f"  {kind.name}, {running} running")
            with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as folder:
                rows.append(_row(kind, running, Path(folder)))
    return {"steps": rows}


# -- the parent ---------------------------------------------------------------------------------------------------


def measure(release: str, package: Path) -> dict[str, Any]:
    """All figures, as plain JSON."""
    _say(f"a step of the scheduler of vLLM {release}, stock, recorded, and with what else there is")
    command = [str(releases.contract_python()), str(Path(__file__).resolve()), "--inside", release]
    done = subprocess.run(  # noqa: S603  our own arguments
        command, env=releases.environment(release, package), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the process of vLLM {release} failed with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_1m": os.getloadavg()[0]}
    return {"release": release, "machine": machine, **result}


def table(result: dict[str, Any]) -> str:
    """The figures for a reader: medians, and the 5th to 95th percentile of the rounds."""
    others = [variant for variant in VARIANTS if not variant.startswith("stock")]
    lines = [
        f"add_request + schedule + update_from_output per step, vLLM {result['release']}, over stock;",
        "median, and 5th to 95th percentile of the rounds; recorder: what it adds to a step, per event, and beside it",
        f"{'load':15} {'running':>7} {'stock':>11} {'recorder':>11} {'events':>7} {'each':>8} {'beside':>9}  "
        f"{'stock over stock':22} " + " ".join(f"{name:22}" for name in others) + " rounds",
    ]
    lines += [
        f"{row['load']:15} {row['running']:7} {row['stock_us']:8.1f} us {row['recorder_us']:+8.1f} us "
        f"{row['events_per_step']:7.1f} {row['us_per_event']:5.2f} us {row['beside_us']:6.1f} us  "
        + " ".join(f"{shown(row['over_stock'][name]):22}" for name in ("stock", *others))
        + f" {row['rounds']} x {row['steps_per_round']}"
        for row in result["steps"]
    ]
    machine = result["machine"]
    lines.append(f"{machine['cpus']} CPUs, load {machine['load_1m']:.1f} at the end")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, run: Callable[[str, Path], dict[str, Any]] = measure) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorder_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--release", default=releases.ENGINE_RELEASE, choices=[r.version for r in releases.RELEASES])
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--package", type=Path, default=ROOT, help="folder in which vllm_kvfix lies (the checkout)")
    parser.add_argument("--inside", metavar="RELEASE", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inside:
        print(json.dumps(_inside(chosen.inside)))  # noqa: T201  a command's output
        return 0
    result = run(chosen.release, chosen.package)
    print(json.dumps(result) if chosen.json else table(result))  # noqa: T201  a command's output
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
