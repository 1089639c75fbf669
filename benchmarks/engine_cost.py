# SPDX-License-Identifier: Apache-2.0
"""What watching costs an engine: `python -m benchmarks.engine_cost [--json]`, some five minutes.

One real engine on CPUs, in one process with its load: vLLM's scheduler, model runner and sampler with the demo's tiny
model, 64 requests at a time, no HTTP. The same requests run again and again in blocks, each to its last token; before a
block the prefix cache is emptied, and everything that watches (the recorder and its thread; the thread that reads the
process's memory and walks its containers) is on or off. A round is three blocks, off, on and off, every
other one in the turned order; it gives the ratio of on over off, and that of off over off, which shows what the machine
alone can do. Off means that the hooks stay in and find no recorder: their own cost, below a microsecond each, is in
both. The model is so small that a step takes a few milliseconds, of which the scheduler has a good part; on a GPU a
step takes longer and the part is smaller.

*Figures.* Output tokens per second; output tokens per second of CPU time of the process, which other processes disturb
less; the 99th percentile, over the requests of a block, of the time per output token after the first; and the 99th
percentile, over the steps of a block, of a step's time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__" and str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: an unzipped wheel on PYTHONPATH wins over the checkout

RELEASE = "0.25.1"
SECONDS = 270.0  # in which rounds are made
CONCURRENCY = 64
REQUESTS = 128
PROMPT = (17, 64)
ANSWER = (64, 160)
ARMS = ("off", "on", "off again")
BENCHMARK_S = 420  # a limit for the engine's process


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  a command's output


# -- in the engine's process --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """What one block gave: output tokens per second, of wall and CPU time; at the p99, seconds a token and a step."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    p99_s: float
    p99_step_s: float


class _Switch:
    """Connects the recorders of this process to the hooks, and disconnects them; so, too, the voice of the process."""

    def __init__(self) -> None:
        from vllm_kvfix import observe, plugin  # noqa: PLC0415  the package under test

        (observation,) = plugin._observations  # noqa: SLF001  no user needs to switch
        self._voice = observation._roots._voice  # noqa: SLF001  as above
        self._connected = observe._recorders  # noqa: SLF001  no user needs to switch
        self._all = dict(self._connected)
        if not self._all:
            raise SystemExit("nothing is recorded: nothing to measure")

    def turn(self, *, on: bool) -> None:
        """Nothing may run."""
        self._connected.clear()
        thread = self._voice._thread  # noqa: SLF001  as above
        self._voice.stop()
        if thread is not None:
            thread.join()
        if on:
            self._connected.update(self._all)
            for recorder in set(self._all.values()):
                self._voice.start(recorder)

    @property
    def events(self) -> int:
        """Events in the rings so far."""
        from vllm_kvfix.ring.reader import RingReader  # noqa: PLC0415  the package under test

        total = 0
        for path in {recorder.writer.path for recorder in self._all.values()}:
            reader = RingReader(path)
            reader.close()
            total += reader.header.events
        return total


@dataclass
class _Load:
    """The engine, and the requests that it gets over and over."""

    engine: Any
    plans: list[tuple[list[int], Any]]
    blocks: int = 0
    steps: int = 0

    def block(self) -> Block:
        """Run all requests, so many at a time, to the end."""
        self.engine.reset_prefix_cache()
        self.blocks += 1
        waiting = list(enumerate(self.plans))[::-1]
        first: dict[str, float] = {}
        per_token: list[float] = []
        per_step: list[float] = []
        tokens = 0
        cpu, began = time.process_time(), time.perf_counter()
        while waiting or self.engine.has_unfinished_requests():
            while waiting and self.engine.get_num_unfinished_requests() < CONCURRENCY:
                number, (prompt, sampling) = waiting.pop()
                self.engine.add_request(f"{self.blocks}-{number}", {"prompt_token_ids": prompt}, sampling)
            step_began = time.perf_counter()
            outputs = self.engine.step()
            self.steps += 1
            now = time.perf_counter()
            per_step.append(now - step_began)
            for output in outputs:
                first.setdefault(output.request_id, now)
                if output.finished:
                    count = len(output.outputs[0].token_ids)
                    tokens += count
                    per_token.append((now - first[output.request_id]) / (count - 1))
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        return Block(tokens / took, tokens / cpu, _p99(per_token), _p99(per_step))


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


def _engine(model: str) -> Any:
    from vllm import LLM  # noqa: PLC0415  only in the engine's process

    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test

    plugin.register()
    return LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=16,
        num_gpu_blocks_override=4096,
        max_num_seqs=CONCURRENCY,
        enforce_eager=True,
        disable_log_stats=False,
    ).llm_engine


def _plans() -> list[tuple[list[int], Any]]:
    from vllm import SamplingParams  # noqa: PLC0415  only in the engine's process

    draw = random.Random(1)  # noqa: S311  prompts, not secrets
    return [
        (
            draw.choices(range(1, 512), k=draw.randint(*PROMPT)),
            SamplingParams(temperature=0, max_tokens=draw.randint(*ANSWER), ignore_eos=True, detokenize=False),
        )
        for _ in range(REQUESTS)
    ]


def _inside(model: str, seconds: float) -> dict[str, Any]:
    """Everything that is measured in the engine's process."""
    load = _Load(_engine(model), _plans())
    switch = _Switch()
    _say("  the engine is up; two blocks of warm-up")
    for on in (True, False):
        switch.turn(on=on)
        load.block()
    begun, recorded = time.monotonic(), 0
    rounds: list[dict[str, Block]] = []
    load.steps, events = 0, switch.events
    while len(rounds) < 3 or time.monotonic() - begun < seconds:  # noqa: PLR2004  a spread needs some
        order = ARMS if len(rounds) % 2 == 0 else ARMS[::-1]
        made = {}
        for arm in order:
            switch.turn(on=arm == "on")
            before = load.steps
            made[arm] = load.block()
            recorded += load.steps - before if arm == "on" else 0
        rounds.append(made)
    return {
        "rounds": len(rounds),
        "step_ms": (time.monotonic() - begun) / load.steps * 1e3,
        "events_per_step": (switch.events - events) / recorded,
        "figures": {name: _figure(rounds, name) for name in Block.__dataclass_fields__},
    }


def _figure(rounds: list[dict[str, Block]], name: str) -> dict[str, Any]:
    values = [{arm: getattr(block, name) for arm, block in made.items()} for made in rounds]
    return {
        "off": statistics.median([(v["off"] + v["off again"]) / 2 for v in values]),
        "on": statistics.median([v["on"] for v in values]),
        "on_over_off": _spread([2 * v["on"] / (v["off"] + v["off again"]) for v in values]),
        "off_over_off": _spread([v["off"] / v["off again"] for v in values]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    # Of the median, if the rounds are independent and most of them about normal: the quartiles tell how wide.
    error = 1.253 * (cuts[14] - cuts[4]) / 1.349 / len(values) ** 0.5
    return {"median": statistics.median(values), "p5": cuts[0], "p95": cuts[-1], "error": error}


# -- the parent ---------------------------------------------------------------------------------------------------


def measure(package: Path, seconds: float) -> dict[str, Any]:
    """All figures, as plain JSON."""
    from vllm_kvfix.demo.engine import distribution_name, engine_environ  # noqa: PLC0415  the path comes first
    from vllm_kvfix.demo.environment import ensure  # noqa: PLC0415  as above
    from vllm_kvfix.demo.model import make_model  # noqa: PLC0415  as above

    environment = ensure(RELEASE)
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as folder:
        work = Path(folder)
        model = make_model(work / "model")
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_KVFIX_RING_DIR": str(work / "rings"),
            "VLLM_LOGGING_LEVEL": "WARNING",
            # Threads that wait for each other by spinning multiply every disturbance from outside.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        environ = engine_environ(settings, [package, distribution_name(environment, work / "metadata")])
        _say(f"an engine of vLLM {RELEASE} on CPUs, watching off and on in turn")
        script = str(Path(__file__).resolve())
        command = [str(environment.python), script, "--inside", str(model), "--seconds", str(seconds)]
        done = subprocess.run(  # noqa: S603  our own arguments
            command, env=environ, stdout=subprocess.PIPE, text=True, check=False, timeout=BENCHMARK_S
        )
    if done.returncode:
        raise SystemExit(f"the engine's process failed with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_1m": os.getloadavg()[0]}
    return {"release": RELEASE, "machine": machine, **result}


_FIGURES = {
    "tokens_per_s": ("output tokens/s", 1.0, ""),
    "tokens_per_cpu_s": ("output tokens per CPU second", 1.0, ""),
    "p99_s": ("p99 time per output token", 1e3, " ms"),
    "p99_step_s": ("p99 time of a step", 1e3, " ms"),
}


def table(result: dict[str, Any]) -> str:
    """The figures for a reader: medians, the 5th to 95th percentile of the rounds, and the median's standard error."""
    lines = [
        f"vLLM {result['release']} on CPUs, {CONCURRENCY} requests at a time, watching off and on;",
        "medians (5th to 95th percentile of the rounds) and the standard error of the median",
        f"{'':30} {'off':>11} {'on':>11}  {'on/off':31} off/off",
    ]
    for name, (title, scale, unit) in _FIGURES.items():
        figure = result["figures"][name]
        off, on = (f"{figure[arm] * scale:.{2 if unit else 0}f}{unit}" for arm in ("off", "on"))
        lines.append(
            f"{title:30} {off:>11} {on:>11}  {_range(figure['on_over_off']):31} {_range(figure['off_over_off'])}"
        )
    noise = max(figure["off_over_off"]["error"] for figure in result["figures"].values())
    lines += [
        f"{result['rounds']} rounds of three blocks of {REQUESTS} requests",
        f"{result['step_ms']:.1f} ms a step, {result['events_per_step']:.1f} events a step",
        f"the noise of this machine (error of off/off) is up to {noise:.1%}: "
        + ("too much to see 1 %" if noise > 0.005 else "1 % would be seen"),  # noqa: PLR2004  two of them make 1 %
        f"{result['machine']['cpus']} CPUs, load {result['machine']['load_1m']:.1f} at the end",
    ]
    return "\n".join(lines)


def _range(spread: dict[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['p5']:.3f}..{spread['p95']:.3f}) ±{spread['error']:.3f}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_cost", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--package", type=Path, default=ROOT, help="folder in which vllm_kvfix lies (the checkout)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for how long to measure (%(default)s)")
    parser.add_argument("--inside", metavar="MODEL", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inside:
        print(json.dumps(_inside(chosen.inside, chosen.seconds)))  # noqa: T201  a command's output
        return 0
    result = measure(chosen.package, chosen.seconds)
    print(json.dumps(result) if chosen.json else table(result))  # noqa: T201  a command's output
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
