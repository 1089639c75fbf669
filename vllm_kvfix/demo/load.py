# SPDX-License-Identifier: Apache-2.0
"""A bounded HTTP load from the ``openai`` client, as a script for the interpreter of a vLLM environment.

``leak``: prompts of random tokens, one token asked for, as many as the time allows: blocks are allocated as fast as
they can be. ``mixed``: a fixed number of requests, plain and streamed, some with a shared prefix, some given up by the
client midway; what each one got is written down, so that two engines can be compared token by token. On SIGTERM no
further request is sent, and the report written once those under way are answered.

It imports nothing of this package: the environment it runs in has none of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 512
REQUEST_TIMEOUT_S = 180.0
SHARED_PREFIXES = 4
SHARED_TOKENS = 256
MOST_FAILURES_SHOWN = 5


@dataclass(frozen=True)
class Plan:
    """One request: ``abort_after`` is the number of streamed chunks after which the client hangs up, if any."""

    index: int
    prompt: list[int]
    max_tokens: int
    stream: bool = False
    abort_after: int | None = None


@dataclass
class Outcome:
    """What one request got; ``state`` is completed, aborted or failed."""

    index: int
    stream: bool
    state: str = "completed"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class Totals:
    """Counts over the whole load, and the outcomes worth keeping."""

    sent: int = 0
    completed: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    requests: list[Outcome] = field(default_factory=list)


def leak_plans(seed: int, prompt_tokens: int) -> Iterator[Plan]:
    """Yield requests without end, each with a prompt of its own and one token to make."""
    draw = random.Random(seed)  # noqa: S311  a load, not a secret
    for index in itertools.count():
        yield Plan(index, _tokens(draw, prompt_tokens), max_tokens=1)


def mixed_plans(seed: int, count: int) -> Iterator[Plan]:
    """Yield ``count`` requests of four kinds: plain, streamed, aborted, and with a shared prefix."""
    draw = random.Random(seed)  # noqa: S311  a load, not a secret
    prefixes = [_tokens(draw, SHARED_TOKENS) for _ in range(SHARED_PREFIXES)]
    for index in range(count):
        prompt = _tokens(draw, draw.randint(8, 600))
        max_tokens = draw.randint(4, 64)
        kind = index % 4
        if kind == 3:  # noqa: PLR2004  the fourth kind
            prompt = draw.choice(prefixes) + prompt[:200]
        yield Plan(
            index,
            prompt,
            max_tokens=max_tokens if kind != 2 else 128,  # noqa: PLR2004  the third kind
            stream=kind in {1, 2},
            abort_after=draw.randint(1, 12) if kind == 2 else None,  # noqa: PLR2004
        )


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(1, VOCABULARY), k=count)


async def send(client: openai.AsyncOpenAI, model: str, plan: Plan) -> Outcome:
    """Send one request and return what became of it."""
    outcome = Outcome(plan.index, plan.stream)
    arguments: dict[str, Any] = {
        "model": model,
        "prompt": plan.prompt,
        "max_tokens": plan.max_tokens,
        "temperature": 0,
        "seed": 1,
        "logprobs": 1 if plan.max_tokens > 1 else None,
        # A single token says nothing of an engine; to send the prompt back for it would take half of the client's time.
        "extra_body": {"return_token_ids": plan.max_tokens > 1, "ignore_eos": True},
    }
    try:
        if not plan.stream:
            _take(outcome, (await client.completions.create(**arguments)).choices[0])
            return outcome
        chunks = await client.completions.create(**arguments, stream=True)
        received = 0
        async for chunk in chunks:
            if chunk.choices:
                _take(outcome, chunk.choices[0])
                received += 1
            if received == plan.abort_after:
                outcome.state = "aborted"
                await chunks.close()
                break
    except openai.OpenAIError as error:
        outcome.state, outcome.error = "failed", repr(error)
    return outcome


def _take(outcome: Outcome, choice: Any) -> None:
    outcome.text += choice.text
    outcome.token_ids += getattr(choice, "token_ids", None) or []
    if choice.logprobs is not None:
        outcome.logprobs += choice.logprobs.token_logprobs or []
    outcome.finish_reason = choice.finish_reason or outcome.finish_reason


async def drive(options: argparse.Namespace) -> Totals:
    """Send the planned requests, ``concurrency`` at a time, until the plan or the time ends."""
    totals = Totals()
    leak = options.mode == "leak"
    plans = leak_plans(options.seed, options.prompt_tokens) if leak else mixed_plans(options.seed, options.requests)
    deadline = time.monotonic() + options.seconds
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)

    async def worker() -> None:
        for plan in plans:
            if told_to_end.is_set() or time.monotonic() >= deadline:
                return
            totals.sent += 1
            totals.prompt_tokens += len(plan.prompt)
            outcome = await send(client, options.model, plan)
            setattr(totals, outcome.state, getattr(totals, outcome.state) + 1)
            if outcome.state == "failed" and totals.failed <= MOST_FAILURES_SHOWN:
                sys.stderr.write(f"request {plan.index} failed: {outcome.error}\n")
            if not leak:
                totals.requests.append(outcome)

    client = openai.AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)
    async with client:
        await asyncio.gather(*(worker() for _ in range(options.concurrency)))
    totals.requests.sort(key=lambda outcome: outcome.index)
    return totals


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the model's served name")
    parser.add_argument("--mode", choices=("leak", "mixed"), required=True)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--seconds", type=float, default=60.0, help="no request starts later than this")
    parser.add_argument("--requests", type=int, default=100, help="how many, in mixed mode")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=600, help="the length of each prompt, in leak mode")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the load; exit code 1 if any request failed."""
    options = parse(arguments)
    started = time.monotonic()
    totals = asyncio.run(drive(options))
    report = {"mode": options.mode, "seed": options.seed, "seconds": time.monotonic() - started, **asdict(totals)}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
