# SPDX-License-Identifier: Apache-2.0
"""A script for the interpreter of a vLLM environment: an engine in this very process.

Arguments: the model's folder, and a file: some tokens are generated, and a JSON report written. Without the file it
answers each line of standard input by a line of JSON: what it generates now, and what is in it.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from pathlib import Path
from typing import Any

# What vLLM prints is not for who reads our answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm import LLM, SamplingParams  # noqa: E402  # see above
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402  # see above
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager  # noqa: E402  # see above

CLASSES = (Scheduler, SingleTypeKVCacheManager)


def make_engine(model: str) -> LLM:
    """The engine."""
    return LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=128,
        enforce_eager=True,
        disable_log_stats=True,
    )


def generate(llm: LLM) -> list[list[int]]:
    """The tokens for the same prompts each time."""
    draw = random.Random(1)  # noqa: S311  prompts, not secrets
    prompts = [{"prompt_token_ids": draw.choices(range(1, 512), k=draw.randint(8, 300))} for _ in range(24)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]


def backlog(llm: LLM) -> int:
    """The ids that have piled up."""
    managers = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(len(manager.new_block_ids) for manager in managers)


def report(model: str, report_file: str) -> None:
    """Generate, and write what became of the back-port, of the backlog, and of the prompts."""
    from vllm_kvfix import plugin  # noqa: PLC0415  # to be attached to, it must not be there

    llm = make_engine(model)
    said = {
        "token_ids": generate(llm),
        "replaced": [name for state in plugin.report() for name in state.replaced],
        "backlog": backlog(llm),
    }
    Path(report_file).write_text(json.dumps(said), encoding="utf-8")


def converse(model: str) -> None:
    """Answer until standard input ends."""
    llm = make_engine(model)
    stock = [dict(vars(made)) for made in CLASSES]
    # One waits where a thread may be taken for a moment; in read(2) it may not.
    while select.select([sys.stdin], [], [])[0] and sys.stdin.readline():
        said: dict[str, Any] = {
            "token_ids": generate(llm),
            "backlog": backlog(llm),
            "as_before": [dict(vars(made)) for made in CLASSES] == stock,
            "ours": sorted(name for name in sys.modules if name.partition(".")[0] == "vllm_kvfix"),
        }
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    (report if sys.argv[2:] else converse)(*sys.argv[1:])
