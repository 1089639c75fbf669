# SPDX-License-Identifier: Apache-2.0
"""A script for the interpreter of a vLLM environment: an engine in this very process, some tokens, a JSON report.

Arguments: the model's folder, the file to write.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_kvfix import plugin


def main(model: str, report_file: str) -> None:
    """Generate, and write what became of the back-port, of the backlog, and of the prompts."""
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=128,
        enforce_eager=True,
        disable_log_stats=True,
    )
    draw = random.Random(1)  # noqa: S311  prompts, not secrets
    prompts = [{"prompt_token_ids": draw.choices(range(1, 512), k=draw.randint(8, 300))} for _ in range(24)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    report = {
        "replaced": [name for state in plugin.report() for name in state.replaced],
        "backlog": sum(len(manager.new_block_ids) for manager in managers),
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
    }
    Path(report_file).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
