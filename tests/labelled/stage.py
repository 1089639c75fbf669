# SPDX-License-Identifier: Apache-2.0
"""A real scheduler under a made-up load, and what a case can do at each of its events."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.contract import driver as d
from tests.contract.running_release import code, module

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.labelled.scenes import Scene


WHILE = 9  # ticks


class LoadDriver(d.Driver):
    """A driver that hands on what the scheduler answers to each step, and forgets the requests that ended."""

    def __init__(self, options: d.Options, on_answer: Any) -> None:
        super().__init__(options)
        self._on_answer = on_answer
        if not options.prefix_caching:
            self._hasher = None

    def update(self) -> None:
        """Answer the oldest step in flight."""
        output, sampling = self._in_flight.popleft()
        self._on_answer(self.scheduler.update_from_output(output, self._runner_output(output, sampling)))

    def forget(self, name: str) -> None:
        """What a driver keeps of its requests would be a leak of its own."""
        self.requests.pop(name, None)
        self._sampled.pop(name, None)


@dataclass(frozen=True)
class Load:
    """What comes in a tick, on average; each tick draws its own.

    Attributes:
        requests: Requests a tick.
        aborted: The share of them whose clients go away.
        prompt: Tokens of a prompt.
        answer: Tokens of an answer.
        distinct: Whether each request has a prompt of its own; else all have the same.
        spread: How far requests, answers, prompts and aborts stray from these figures, as a share of them, each by
            itself: for a while, and from one to the next.
        most_steps: Steps in a tick at most; None: until nothing is left to do.
    """

    requests: int = 20
    aborted: float = 0.2
    prompt: int = 64
    answer: int = 4
    distinct: bool = False
    spread: float = 0.4
    most_steps: int | None = None


@dataclass
class Totals:
    """What has happened since the begin, as the recorder counts it."""

    requests: int = 0
    aborts: int = 0
    generated_tokens: int = 0
    blocks: int = 0
    steps: int = 0


@dataclass
class Stage:
    """The scheduler, its load and the scene that is played on it.

    Attributes:
        scene: What is played.
        totals: What has happened since the begin.
        roots: By name, the objects that a census of this process begins at; the scene puts them there.
    """

    scene: Scene
    totals: Totals = field(default_factory=Totals)
    roots: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(code(self.scene.name))  # noqa: S311  # reproducible is the point
        self.driver = LoadDriver(d.Options(**self.scene.options), self._answered)
        self.scheduler = self.driver.scheduler
        self._tokens: list[int] = []
        self._number = 0
        self._leaving: set[str] = set()
        self._front = FrontEnd() if self.scene.role == "api server" else None
        self._worker = Worker() if self.scene.role == "worker" else None
        if self._front is not None:
            self.roots["output_processor"] = self._front.output_processor
        elif self._worker is not None:
            self.roots["worker"] = self._worker
        else:
            self.roots["scheduler"] = self.scheduler
        self.driver.on_output = self._scheduled

    def _scheduled(self, output: Any) -> None:
        """Count the blocks that a step gave out; nothing of ours may hang on the scheduler, where a census finds it."""
        if self._worker is not None:
            self._worker.execute_model(output)
        given = [new.block_ids for new in output.scheduled_new_reqs]
        given += [ids for ids in output.scheduled_cached_reqs.new_block_ids if ids]
        self.totals.blocks += sum(len(group) for groups in given for group in groups)

    def tick(self, number: int) -> None:
        """Put a tick's load on the scheduler."""
        self.scene.before_tick(self, number)
        load = self._in_these_days(self.scene.load(number), number // WHILE)
        for _ in range(self._draw(load.requests, load.spread)):
            self._request(load)
        steps = 0
        while self.scheduler.has_unfinished_requests() and (load.most_steps is None or steps < load.most_steps):
            self.driver.step()
            steps += 1
            self.totals.steps += 1
            self.scene.stepped(self)
            self._leave()
        self.scene.after_tick(self, number)

    def _in_these_days(self, load: Load, era: int) -> Load:
        """The load of a while: what users want changes, and so growth can be seen to follow one driver or another."""
        drawn = random.Random(code(self.scene.name, era))  # noqa: S311  # reproducible is the point
        requests, aborted, prompt, answer = (drawn.uniform(1 - load.spread, 1 + load.spread) for _ in range(4))
        return dataclasses.replace(
            load,
            requests=round(load.requests * requests),
            aborted=load.aborted * aborted,
            prompt=round(load.prompt * prompt),
            answer=max(1, round(load.answer * answer)),
        )

    def _draw(self, average: float, spread: float) -> int:
        return max(0, round(average * self._random.uniform(1 - spread, 1 + spread)))

    def _request(self, load: Load) -> None:
        self._number += 1
        name = f"cmpl-{code('name', self._number):08x}-{code('id', self._number):08x}-{self._number:08d}-0"
        answer = max(1, self._draw(load.answer, load.spread))
        request = self.driver.make_request(name, prompt=self._prompt(load), max_tokens=answer)
        if self._random.random() < load.aborted:
            self._leaving.add(name)
        if self._front is not None:
            self._front.add(request)
        self.driver.scheduler.add_request(request)
        self.scene.arrived(self, name)

    def _prompt(self, load: Load) -> list[int]:
        if len(self._tokens) < load.prompt:
            self._tokens = d.prompt_tokens(0, load.prompt)
        tokens = self._tokens[: load.prompt]
        if load.distinct:  # from the first block on
            tokens[:4] = [3 + (self._number >> shift) % 500 for shift in (0, 8, 16, 24)]
        return tokens

    def _leave(self) -> None:
        """Have those go away whose clients do, after their first step."""
        for name in sorted(self._leaving):
            request = self.scheduler.requests.get(name)
            if request is None:
                self._leaving.discard(name)  # it was answered before its client went away
            elif request.num_computed_tokens:
                self._leaving.discard(name)
                if self._front is not None:
                    self._front.abort(name)
                self.driver.finish(name)
                self.totals.aborts += 1
                self._ended(name, request)
                self.scene.aborted(self, name)

    def _answered(self, results: dict[int, Any]) -> None:
        for outputs in results.values():
            if self._front is not None:
                self._front.process(outputs.outputs)
            for output in outputs.outputs:
                self.scene.generated(self, output.request_id, len(output.new_token_ids))
                if output.finished:
                    self._ended(output.request_id, self.driver.requests[output.request_id])
                    self.scene.finished(self, output.request_id)

    def _ended(self, name: str, request: Any) -> None:
        self.totals.requests += 1
        self.totals.generated_tokens += request.num_output_tokens
        self.driver.forget(name)


class ModelRunner:
    """What a worker keeps of the requests that run, reduced to that."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.input_batch = [0] * 64

    def update_states(self, output: Any) -> None:
        """Follow the scheduler."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = [block for group in new.block_ids for block in group]


class Worker:
    """A worker as the executor has it."""

    def __init__(self) -> None:
        self.rank = 0
        self.model_runner = ModelRunner()

    def execute_model(self, output: Any) -> None:
        """A step."""
        self.model_runner.update_states(output)


class FrontEnd:
    """The real output processor, as the API server has it, and a consumer of what it puts out."""

    def __init__(self) -> None:
        processors = module("vllm.v1.engine.output_processor")
        self.output_processor = processors.OutputProcessor(None, log_stats=False)
        self._collector = processors.RequestOutputCollector
        self._queues: dict[str, Any] = {}

    def add(self, request: Any) -> None:
        """A request goes to the engine."""
        made = module("vllm.v1.engine").EngineCoreRequest(
            request_id=request.request_id,
            external_req_id=request.request_id[:-2],
            prompt_token_ids=request.prompt_token_ids,
            mm_features=None,
            sampling_params=request.sampling_params,
            pooling_params=None,
            arrival_time=request.arrival_time,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queue = self._collector(request.sampling_params.output_kind, request.request_id)
        self._queues[request.request_id] = queue
        self.output_processor.add_request(made, None, queue=queue)

    def abort(self, name: str) -> None:
        """A client went away."""
        self.output_processor.abort_requests([name], internal=True)
        self._queues.pop(name)

    def process(self, outputs: Iterable[Any]) -> None:
        """What the engine answered is put out and taken."""
        outputs = list(outputs)
        self.output_processor.process_outputs(outputs)
        for output in outputs:
            if output.request_id in self._queues:
                self._queues[output.request_id].get_nowait()
                if output.finished:
                    self._queues.pop(output.request_id)
