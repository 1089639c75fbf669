# SPDX-License-Identifier: Apache-2.0
"""Drive the real `Scheduler` of whichever vLLM release is first on `sys.path`, without running a model.

What differs between releases is hidden here and in the modules beside it: constructor signatures, spec classes
that do not exist yet, fields of `ModelRunnerOutput`, attributes that old releases ask of `torch._C._cpu`. Callers see
`make_scheduler`, and on what it returns `add_request`, `step`, `finish`, `reset_prefix_cache`; and `backlog` and
`allocated`.

Deterministic: token ids, accepted draft tokens and connector answers depend on request names and counts alone,
so the same operations on two schedulers must give the same stream of outputs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import tempfile
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contract.connectors import connector_config
from tests.contract.families import FAMILIES, kv_cache_config
from tests.contract.running_release import code, fitting, module, release
from vllm_kvfix.demo.model import make_model

if TYPE_CHECKING:
    from collections.abc import Callable

# vLLM's types differ by release and are not installed where this file is type-checked: they are `Any` here.
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
ASYNC_DEPTH = 1  # batches in flight beside the one being scheduled, as EngineCore's batch queue of two keeps


def _inspect_without_a_subprocess() -> None:
    """Answer vLLM's model inspection (10 s, and a process of its own) for the tiny Llama ourselves."""
    registry = module("vllm.model_executor.models.registry")
    texts = {
        "architecture": "LlamaForCausalLM",
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "default_pooling_type": "LAST",
        "score_type": "bi-encoder",
    }
    values: dict[str, Any] = {}
    for field in dataclasses.fields(registry._ModelInfo):
        if field.name in texts:
            values[field.name] = texts[field.name]
        elif str(field.type).startswith("tuple"):
            values[field.name] = ()
        else:
            values[field.name] = field.name in {"is_text_generation_model", "supports_pp"}
    info = registry._ModelInfo(**values)
    registry._try_inspect_model_cls = lambda *_args, **_kwargs: info


@functools.cache
def _base_config() -> tuple[Any, Any]:
    """The `VllmConfig` of the tiny model, and a `SpeculativeConfig` to copy from. Seconds, once a process."""
    _inspect_without_a_subprocess()
    with tempfile.TemporaryDirectory(prefix="kvfix-tiny-") as folder:
        config = (
            module("vllm.engine.arg_utils")
            .EngineArgs(
                model=str(make_model(Path(folder))),
                skip_tokenizer_init=True,
                enforce_eager=True,
                load_format="dummy",
                dtype="bfloat16",
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
            )
            .create_engine_config()
        )
    speculative = module("vllm.config").SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    utils = module("vllm.v1.core.kv_cache_utils")
    utils.init_none_hash(module("vllm.utils.hashing").sha256)
    return config, speculative


@functools.cache
def _structured_output_manager() -> Any:
    return module("vllm.v1.structured_output").StructuredOutputManager(_base_config()[0])


def _changed(config: Any, **changes: Any) -> Any:
    """A shallow copy of a configuration object with some attributes replaced; unknown names are an error."""
    result = copy.copy(config)
    for name, value in changes.items():
        if not hasattr(result, name):
            msg = f"{type(config).__name__} of vLLM {release()} has no {name}"
            raise AttributeError(msg)
        object.__setattr__(result, name, value)
    return result


def prompt_tokens(seed: int, length: int) -> list[int]:
    """A prompt: two of the same seed share their common length, so prefix caching finds it."""
    return [3 + code("prompt", seed, i) % 500 for i in range(length)]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a scheduler is made of.

    Attributes:
        family: A key of `FAMILIES`.
        num_blocks: Blocks in the pool (one of them is vLLM's null block).
        block_size: Tokens per block.
        prefix_caching: Whether the prefix cache is on.
        async_scheduling: `AsyncScheduler`, with one more batch in flight, in place of `Scheduler`.
        chunked_prefill: Whether a prompt may be spread over steps.
        spec_tokens: Draft tokens per step; 0 is no speculative decoding.
        spec_method: "ngram" (no lookahead slots) or "eagle" (lookahead slots, and the last hit block dropped).
        connector: None, "bench" (vLLM's DecodeBenchConnector) or "remote" (loads asynchronously).
        max_num_seqs: Most running requests.
        max_num_batched_tokens: Most tokens in a step.
        block_align_mamba: Mamba's prefix caching, "align" in vLLM's terms, where the family has Mamba.
        log_stats: Passed on to the scheduler.
        policy: "fcfs" or "priority".
        max_model_len: Most tokens of a request, prompt and answer.
        kv_events: vLLM's KV-cache events, published over ZeroMQ on a port of the machine's choice.
        block_metrics: vLLM's KV-cache residency metrics, of every block.
    """

    family: str = "full"
    num_blocks: int = 64
    block_size: int = BLOCK_SIZE
    prefix_caching: bool = True
    async_scheduling: bool = False
    chunked_prefill: bool = True
    spec_tokens: int = 0
    spec_method: str = "ngram"
    connector: str | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    block_align_mamba: bool = False
    log_stats: bool = False
    policy: str = "fcfs"
    max_model_len: int = MAX_MODEL_LEN
    kv_events: bool = False
    block_metrics: bool = False


def make_scheduler(family: str = "full", *, scheduler_cls: Any = None, count: bool = False, **options: Any) -> Driver:
    """Make a real scheduler and what drives it.

    Args:
        family: A key of `FAMILIES`.
        scheduler_cls: A class in place of `Scheduler` or `AsyncScheduler`.
        count: Count the blocks that each manager allocates (wraps this scheduler's own block pool).
        options: See `Options`.
    """
    return Driver(Options(family=family, **options), scheduler_cls=scheduler_cls, count=count)


def vllm_config(options: Options) -> Any:
    """The `VllmConfig` that these options ask for."""
    base, speculative = _base_config()
    mamba = "MambaSpec" in FAMILIES[options.family].specs
    scheduler_changes: dict[str, Any] = {}
    if hasattr(base.scheduler_config, "max_num_scheduled_tokens"):  # from 0.17.0
        scheduler_changes["max_num_scheduled_tokens"] = options.max_num_batched_tokens
    cache_changes: dict[str, Any] = {
        "block_size": options.block_size,
        "enable_prefix_caching": options.prefix_caching,
        "num_gpu_blocks": options.num_blocks,
    }
    if mamba:
        cache_changes["mamba_cache_mode"] = "align" if options.block_align_mamba else "none"
    changes: dict[str, Any] = {
        "scheduler_config": _changed(
            base.scheduler_config,
            policy=options.policy,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_chunked_prefill=options.chunked_prefill,
            async_scheduling=options.async_scheduling,
            # vLLM's own connector without support for hybrid models says so and stops otherwise (to 0.22).
            disable_hybrid_kv_cache_manager=options.connector == "bench",
            **scheduler_changes,
        ),
        "cache_config": _changed(base.cache_config, **cache_changes),
    }
    if options.max_model_len != MAX_MODEL_LEN:
        changes["model_config"] = _changed(base.model_config, max_model_len=options.max_model_len)
    if options.spec_tokens:
        changes["speculative_config"] = _changed(
            speculative, num_speculative_tokens=options.spec_tokens, method=options.spec_method
        )
    if options.connector:
        changes["kv_transfer_config"] = connector_config(options.connector)
    if options.kv_events:
        events = module("vllm.config.kv_events").KVEventsConfig
        endpoint = "tcp://127.0.0.1:*"
        changes["kv_events_config"] = events(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    if options.block_metrics:
        changes["observability_config"] = _changed(
            base.observability_config, kv_cache_metrics=True, kv_cache_metrics_sample=1.0
        )
    return _changed(base, **changes)


class Driver:
    """One scheduler and the made-up model that answers it.

    Attributes:
        scheduler: vLLM's own object.
        options: What it was made of.
        requests: Every request that was ever added, by name.
        on_output: Called with each `SchedulerOutput` as `schedule()` gives it.
        counts: Blocks allocated per manager, if asked for; see `allocated`.
    """

    def __init__(self, options: Options, *, scheduler_cls: Any = None, count: bool = False) -> None:
        self.options = options
        self.config = vllm_config(options)
        self.kv_cache_config = kv_cache_config(
            options.family,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            mamba_cache_mode="align" if options.block_align_mamba else "none",
            spec_tokens=options.spec_tokens,
        )
        if scheduler_cls is None:
            scheduler_cls = (
                module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
                if options.async_scheduling
                else module("vllm.v1.core.sched.scheduler").Scheduler
            )
        self.scheduler: Any = scheduler_cls(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=_structured_output_manager(),
            block_size=options.block_size,
            log_stats=options.log_stats,
        )
        self._hasher = module("vllm.v1.core.kv_cache_utils").get_request_block_hasher(
            options.block_size, module("vllm.utils.hashing").sha256
        )
        self._in_flight: deque[tuple[Any, dict[str, bool]]] = deque()
        self._remote: list[str] = []
        self._added = 0
        self._sampled: Counter[str] = Counter()
        self.requests: dict[str, Any] = {}
        self.on_output: Callable[[Any], None] | None = None
        self.counts: Counter[int] | None = count_allocations(self) if count else None

    # -- operations ----------------------------------------------------------------------------------------------

    def add_request(self, name: str, **properties: Any) -> Any:
        """Queue a request; `properties` are those of `make_request`."""
        request = self.make_request(name, **properties)
        self.scheduler.add_request(request)
        return request

    def make_request(  # noqa: PLR0913  each is a property of a request
        self,
        name: str,
        *,
        prompt_seed: int = 0,
        prompt_length: int = 40,
        max_tokens: int = 8,
        external: int = 0,
        priority: int = 0,
        prompt: list[int] | None = None,
    ) -> Any:
        """Make a request, to be queued by `scheduler.add_request`.

        Args:
            name: Its id.
            prompt_seed: Prompts of one seed share their prefix.
            prompt_length: Tokens.
            max_tokens: Tokens to generate.
            external: Leading tokens that the "remote" connector says it holds.
            priority: Passed on.
            prompt: The prompt itself, in place of seed and length.
        """
        params = module("vllm.sampling_params").SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            extra_args={"kv_transfer_params": {"external": external}} if external else None,
        )
        self._added += 1
        request = fitting(
            module("vllm.v1.request").Request,
            request_id=name,
            prompt_token_ids=prompt or prompt_tokens(prompt_seed, prompt_length),
            sampling_params=params,
            pooling_params=None,
            eos_token_id=None,
            arrival_time=float(self._added),
            priority=priority,
            block_hasher=self._hasher,
        )
        self.requests[name] = request
        return request

    def schedule(self) -> Any:
        """Schedule one step and put it in flight; returns the `SchedulerOutput`."""
        output = self.scheduler.schedule()
        self.put_in_flight(output)
        return output

    def answer(self, output: Any) -> Any:
        """What the made-up model answers to a `SchedulerOutput`, for whoever calls `update_from_output` itself."""
        return self._runner_output(output, self._sampling(output))

    def put_in_flight(self, output: Any) -> None:
        """Take a `SchedulerOutput` that somebody else got from this scheduler just now; `update` answers it."""
        self._in_flight.append((output, self._sampling(output)))
        if self.on_output is not None:
            self.on_output(output)

    def update(self) -> None:
        """Answer the oldest step in flight as a model runner would; nothing in flight is no error."""
        if not self._in_flight:
            return
        output, sampling = self._in_flight.popleft()
        self.scheduler.update_from_output(output, self._runner_output(output, sampling))
        if self.options.spec_tokens and not self.options.async_scheduling:
            self._draft(sampling)

    def step(self) -> Any:
        """One turn of the engine's loop; returns the `SchedulerOutput`, as it was after `schedule()`."""
        output = self.schedule()
        depth = ASYNC_DEPTH if self.options.async_scheduling else 0
        while len(self._in_flight) > depth:
            self.update()
        return output

    def drain(self) -> None:
        """Answer everything in flight."""
        while self._in_flight:
            self.update()

    def run(self, most: int = 1000) -> int:
        """Step until no request is left, at most so many times; returns the number of steps."""
        for done in range(most):
            if not self.scheduler.has_unfinished_requests():
                self.drain()
                return done
            self.step()
        return most

    def finish(self, *names: str) -> None:
        """Abort requests, known or not, as a client's disconnect does."""
        status = module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(list(names), status)

    abort = finish

    def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Reset the prefix cache, of running requests too if asked; returns what vLLM returns."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=running))

    def state(self, name: str) -> str | None:
        """A request's status ("WAITING", "RUNNING", "PREEMPTED", ...), or None once the scheduler forgot it."""
        request = self.scheduler.requests.get(name)
        return None if request is None else str(request.status.name)

    @property
    def in_flight(self) -> int:
        """Steps that were scheduled and not yet answered."""
        return len(self._in_flight)

    @property
    def managers(self) -> tuple[Any, ...]:
        """The single-type managers of this scheduler, one per KV-cache group."""
        return tuple(self.scheduler.kv_cache_manager.coordinator.single_type_managers)

    # -- the made-up model ---------------------------------------------------------------------------------------

    def _sampling(self, output: Any) -> dict[str, bool]:
        """For each request of a step, whether the model would sample for it: all known tokens are computed then."""
        result = {}
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            result[name] = request.num_computed_tokens >= request.num_tokens
        return result

    def _tokens(self, name: str, drafts: int) -> list[int]:
        self._sampled[name] += 1
        turn = self._sampled[name]
        accepted = code("accepted", name, turn) % (drafts + 1)
        return [3 + code("token", name, turn, i) % 500 for i in range(accepted + 1)]

    def _runner_output(self, output: Any, sampling: dict[str, bool]) -> Any:
        names = list(sampling)
        drafts = output.scheduled_spec_decode_tokens
        sampled = [self._tokens(n, len(drafts.get(n, ()))) if sampling[n] else [] for n in names]
        connector_output = None
        if self.options.connector == "remote":
            arrived, self._remote = self._remote, self._waiting_for_remote()
            arrived = [n for n in arrived if n in self.scheduler.requests]
            connector_output = fitting(module("vllm.v1.outputs").KVConnectorOutput, finished_recving=set(arrived))
        return fitting(
            module("vllm.v1.outputs").ModelRunnerOutput,
            req_ids=names,
            req_id_to_index={n: i for i, n in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=connector_output,
        )

    def _waiting_for_remote(self) -> list[str]:
        """Requests whose blocks a remote load is filling and that nobody has yet reported as arrived."""
        finished = self.scheduler.finished_recving_kv_req_ids
        return [
            n
            for n, r in self.scheduler.requests.items()
            if r.status.name == "WAITING_FOR_REMOTE_KVS" and n not in finished and n not in self._remote
        ]

    def _draft(self, sampling: dict[str, bool]) -> None:
        names = [n for n, s in sampling.items() if s and n in self.scheduler.requests]
        tokens = [
            [3 + code("draft", n, self._sampled[n], i) % 500 for i in range(self.options.spec_tokens)] for n in names
        ]
        self.scheduler.update_draft_token_ids(
            module("vllm.v1.outputs").DraftTokenIds(req_ids=names, draft_token_ids=tokens)
        )


# -- measuring ----------------------------------------------------------------------------------------------------


def backlog(scheduler: Any) -> tuple[int, ...]:
    """Per single-type manager, the ids that wait in `new_block_ids`; 0 on releases that have no such list."""
    if isinstance(scheduler, Driver):
        scheduler = scheduler.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return tuple(len(m.new_block_ids) if hasattr(m, "new_block_ids") else 0 for m in managers)


def count_allocations(driver: Driver) -> Counter[int]:
    """Count, from now on, the blocks that each manager (by its index) takes from this scheduler's pool.

    Independent of what is being tested: the pool is wrapped, and the caller's frame says which manager asks.
    """
    managers = driver.managers
    pool = driver.scheduler.kv_cache_manager.block_pool
    original = pool.get_new_blocks
    counts: Counter[int] = Counter()

    def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
        blocks = original(*args, **kwargs)
        asker = sys._getframe(1).f_locals.get("self")
        index = next((i for i, m in enumerate(managers) if m is asker), -1)
        counts[index] += len(blocks)
        return blocks

    pool.get_new_blocks = get_new_blocks
    return counts


def allocated(driver: Driver) -> tuple[int, ...]:
    """Blocks allocated so far per manager; the driver was made with `count=True`.

    Raises:
        AssertionError: Nobody counted, or somebody who is no manager of this scheduler took blocks.
    """
    if driver.counts is None:
        msg = "make_scheduler(count=True) was not asked for"
        raise AssertionError(msg)
    if driver.counts[-1]:
        msg = f"{driver.counts[-1]} blocks were taken by no known manager"
        raise AssertionError(msg)
    return tuple(driver.counts[i] for i in range(len(driver.managers)))
