# SPDX-License-Identifier: Apache-2.0
"""What watching costs a step of the scheduler: `python -m benchmarks.recorder_cost [--json]`, some four minutes.

Schedulers with the same load live in one process and step in turn, in one order in the first half of a round and in the
other in the second: two stock ones (their ratio is what the machine's noise alone can do), one that is recorded, and
what a user would turn on instead: vLLM's KV-cache events, its KV-cache metrics of every block, and an OpenTelemetry
span for each request made in the process. A step is `add_request` of what arrives, `schedule`, `update_from_output`; no
model runs. Timed is the CPU time of the scheduler's thread.

The hooks are put on vLLM's classes for the steps of the scheduler that is recorded, and taken off after them. That, like
any change to a class, makes the interpreter forget what it had learnt of it; so every scheduler's turn begins with such
a change and some untimed steps. (Hooks on a subclass would be no way out: the interpreter's fast paths are for one class
at a time, and the odd one would pay for it.)
"""

from __future__ import annotations

import argparse
import functools
import gc
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

from tests import releases  # noqa: E402  the path comes first

RUNNING = (1, 64, 256, 1024)
VARIANTS = ("stock", "recorder", "stock again", "kv events", "kv metrics", "span per request")
ROUNDS = 48
BATCHES = 6  # fresh schedulers for each; they share the rounds
STEPS = {1: 200, 64: 16, 256: 6, 1024: 2}  # in half a round
UNTIMED = {1: 100, 64: 6, 256: 3, 1024: 2}  # before them
WARM_UP = 30


@dataclass(frozen=True)
class Kind:
    """A load: prompts of so many tokens, a quarter of them shared with others, and answers of so many."""

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]


KINDS = (
    Kind("decode-heavy", (17, 64), (300, 500)),
    Kind("prefill-heavy", (768, 1280), (8, 24)),
    Kind("one token each", (500, 700), (1, 1)),
)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  a command's output


# -- in the release's process -------------------------------------------------------------------------------------


@dataclass
class _Load:
    """A scheduler under a load that keeps so many requests in it."""

    driver: Any
    kind: Kind
    running: int
    chance: random.Random
    way: _Stock
    added: int = 0
    prefix: list[int] = field(default_factory=list)

    def arrivals(self) -> list[Any]:
        """Requests to add, so that as many as wanted are there."""
        made = []
        for _ in range(self.running - len(self.driver.scheduler.requests)):
            self.added += 1
            length = self.chance.randint(*self.kind.prompt)
            shared = self.prefix[: length // 4] if self.chance.random() < 0.5 else []  # noqa: PLR2004  a half
            prompt = shared + self.chance.choices(range(3, 500), k=length - len(shared))
            answer = self.chance.randint(*self.kind.answer)
            made.append(self.driver.make_request(f"cmpl-{self.added:032x}-0", prompt=prompt, max_tokens=answer))
        return made

    def turn(self, steps: int, untimed: int = 0) -> int:
        """So many steps under the load's hooks; nanoseconds of all but the first `untimed`."""
        with self.way:
            for _ in range(untimed):
                self.step()
            return sum(self.step() for _ in range(steps))

    def step(self) -> int:
        """One step; nanoseconds that the scheduler's part of it took."""
        arrivals = self.arrivals()
        scheduler = self.driver.scheduler
        before = time.thread_time_ns()
        for request in arrivals:
            scheduler.add_request(request)
        output = scheduler.schedule()
        took = time.thread_time_ns() - before
        answer = self.driver.answer(output)
        before = time.thread_time_ns()
        scheduler.update_from_output(output, answer)
        took += time.thread_time_ns() - before
        for name in [name for name in self.driver.requests if name not in scheduler.requests]:
            del self.driver.requests[name]
        return took


class _Stock:
    """Nothing is put on vLLM's classes; they are touched all the same."""

    def __enter__(self) -> None:
        for owner, name, method in self.sites():
            setattr(owner, name, self.wrap(name, method))

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self.sites():
            setattr(owner, name, getattr(method, "__wrapped__", method))

    @staticmethod
    def sites() -> list[tuple[type, str, Any]]:
        """The methods that are hooked: class, name and what is there now."""
        from tests.contract import running_release  # noqa: PLC0415  only in a release's process
        from vllm_kvfix import observe  # noqa: PLC0415  the package under test

        owners = [(vars(running_release.module(site[0]))[site[1]], site[2]) for site in observe.SITES]
        return [(owner, name, owner.__dict__[name]) for owner, name in owners]

    def wrap(self, name: str, method: Any) -> Any:
        """What takes the place of a method."""
        del name
        return method

    def adopt(self, scheduler: Any, folder: Path) -> None:
        """Prepare for a scheduler that was made just now."""


class _Recorder(_Stock):
    """The recorder's hooks."""

    def wrap(self, name: str, method: Any) -> Any:
        from vllm_kvfix import observe  # noqa: PLC0415  the package under test

        (wrap,) = [site[3] for site in observe.SITES if site[2] == name]
        return functools.update_wrapper(wrap(method), method)

    def adopt(self, scheduler: Any, folder: Path) -> None:
        from vllm_kvfix import observe  # noqa: PLC0415  the package under test

        observe.Observation({"VLLM_KVFIX_RING_DIR": str(folder)}, lambda: "off").watch(scheduler)


class _Spans(_Stock):
    """An OpenTelemetry span of each request, made in the process, with as much in it as ours has; exported to nowhere."""

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

    def wrap(self, name: str, method: Any) -> Any:
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


_WAYS: dict[str, type[_Stock]] = {"recorder": _Recorder, "span per request": _Spans}
_EXTRA: dict[str, dict[str, Any]] = {
    "kv events": {"kv_events": True},
    "kv metrics": {"block_metrics": True, "log_stats": True},
}


def _make(variant: str, kind: Kind, running: int, folder: Path, seed: int) -> _Load:
    from tests.contract import driver as d  # noqa: PLC0415  only in a release's process

    most = kind.prompt[1] + kind.answer[1]
    made = d.make_scheduler(
        "full",
        num_blocks=running * (most // d.BLOCK_SIZE + 2) + 64,
        max_num_seqs=running,
        max_num_batched_tokens=max(running * kind.prompt[1], 2048),
        max_model_len=2 * most,
        **_EXTRA.get(variant, {}),
    )
    way = _WAYS.get(variant, _Stock)()
    way.adopt(made.scheduler, folder)
    chance = random.Random(seed)  # noqa: S311  a load, not a secret
    prefix = chance.choices(range(3, 500), k=kind.prompt[1])
    return _Load(made, kind, running, chance, way, prefix=prefix)


def _batch(kind: Kind, running: int, number: int, folder: Path) -> Iterator[tuple[float, ...]]:
    """Fresh schedulers; per round, nanoseconds of a step of each variant.

    In which order they are made differs by batch, so that where their objects lie in memory is part of the noise.
    """
    turned = VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
    loads = {variant: _make(variant, kind, running, folder, seed=number) for variant in turned}
    warm_up = WARM_UP if kind.answer[1] < 100 else 2 * WARM_UP  # noqa: PLR2004  long answers settle later
    for load in loads.values():
        load.turn(warm_up)
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS // BATCHES):
        sums = dict.fromkeys(VARIANTS, 0)
        for order in (VARIANTS, VARIANTS[::-1]):
            for variant in order:
                sums[variant] += loads[variant].turn(STEPS[running], untimed=UNTIMED[running])
        yield tuple(sums[variant] / (2 * STEPS[running]) for variant in VARIANTS)
    gc.enable()
    for load in loads.values():
        if load.driver.scheduler.kv_event_publisher is not None:
            load.driver.scheduler.kv_event_publisher.shutdown()


def _row(kind: Kind, running: int, folder: Path) -> dict[str, Any]:
    rounds = [times for number in range(BATCHES) for times in _batch(kind, running, number, folder)]
    at = {variant: index for index, variant in enumerate(VARIANTS)}
    stock = [(times[0] + times[at["stock again"]]) / 2 for times in rounds]
    ratios = {
        variant: _spread([times[index] / base for times, base in zip(rounds, stock, strict=True)])
        for variant, index in at.items()
        if not variant.startswith("stock")
    }
    ratios["stock"] = _spread([times[0] / times[at["stock again"]] for times in rounds])
    return {
        "load": kind.name,
        "running": running,
        "rounds": len(rounds),
        "steps_per_round": 2 * STEPS[running],
        "stock_us": statistics.median(stock) / 1e3,
        "recorder_us": statistics.median(
            [times[at["recorder"]] - base for times, base in zip(rounds, stock, strict=True)]
        )
        / 1e3,
        "over_stock": ratios,
    }


def _spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"median": statistics.median(values), "p5": cuts[0], "p95": cuts[-1]}


def _inside(release: str) -> dict[str, Any]:
    """Everything that is measured in the release's process."""
    from tests.contract import running_release  # noqa: PLC0415  only in a release's process

    if running_release.release() != release:
        raise SystemExit(f"asked for vLLM {release}, but sys.path has {running_release.release()}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as folder:
        for kind in KINDS:
            for running in RUNNING:
                _say(f"  {kind.name}, {running} running: {ROUNDS} rounds")
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
        "median, and 5th to 95th percentile of the rounds",
        f"{'load':15} {'running':>7} {'stock':>11} {'recorder':>10}  {'stock over stock':22} "
        + " ".join(f"{name:22}" for name in others),
    ]
    lines += [
        f"{row['load']:15} {row['running']:7} {row['stock_us']:8.1f} us {row['recorder_us']:+7.1f} us  "
        + " ".join(f"{_range(row['over_stock'][name]):22}" for name in ("stock", *others))
        for row in result["steps"]
    ]
    machine = result["machine"]
    rounds = result["steps"][0]["rounds"]
    lines.append(f"{rounds} rounds each; {machine['cpus']} CPUs, load {machine['load_1m']:.1f} at the end")
    return "\n".join(lines)


def _range(spread: dict[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['p5']:.3f}..{spread['p95']:.3f})"


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
