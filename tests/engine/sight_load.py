# SPDX-License-Identifier: Apache-2.0
"""A load for the sight: requests with shared prefixes, some with a trace context, some given up by their client."""

from __future__ import annotations

import http.client
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from vllm_kvfix.demo.engine import MODEL_NAME

TIMEOUT_S = 300
PREFIXES = 4
PREFIX_TOKENS = 96


@dataclass(frozen=True)
class Sent:
    """A request as it was sent. ``context``: trace id and span id of the caller, None where it sent none."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    context: tuple[int, int] | None
    given_up: bool
    output_tokens: int


def _prompt(chance: random.Random, number: int) -> list[int]:
    prefix = [3 + (number % PREFIXES * 131 + at * 7) % 500 for at in range(PREFIX_TOKENS)]
    return prefix + [chance.randrange(3, 500) for _ in range(chance.randint(8, 300))]


def send(url: str, number: int, seed: int, *, short: bool = False) -> Sent:
    """Send request ``number``; every seventh is given up after its first tokens, two of three carry a context.

    ``short``: it asks for one token, and is not given up.

    Raises:
        OSError, ValueError: The server did not answer as it should.
    """
    chance = random.Random(seed * 100_003 + number)  # noqa: S311  # a load, not a secret
    prompt, most = _prompt(chance, number), chance.choice((1, 16, 64, 200))
    given_up = number % 7 == 3 and not short
    most = 1 if short else 200 if given_up else most
    context = (chance.getrandbits(128) | 1, chance.getrandbits(64) | 1) if number % 3 else None
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": most,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": f"sight-{number}"}
    if context:
        headers["traceparent"] = f"00-{context[0]:032x}-{context[1]:016x}-01"
    client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = client.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"{answer.status}: {answer.read()!r}")
        tokens = 0
        for line in answer:
            if line.startswith(b"data: {"):
                told = json.loads(line[6:])
                tokens = (told.get("usage") or {}).get("completion_tokens", tokens)
                if given_up and told.get("choices"):
                    break
    finally:
        client.close()
    return Sent(f"cmpl-sight-{number}-0", len(prompt), most, context, given_up, tokens)


def send_all(url: str, requests: int, concurrency: int, seed: int) -> list[Sent]:
    """Send so many requests, so many at a time; in the order of their numbers."""
    gate = threading.Semaphore(concurrency)

    def one(number: int) -> Sent:
        with gate:
            return send(url, number, seed)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, range(requests)))
