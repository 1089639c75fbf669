# SPDX-License-Identifier: Apache-2.0
"""The vLLM release that is first on `sys.path` of this process, made importable, and what hides its differences."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import zlib
from typing import Any

_CPU_FEATURES = (
    "_is_avx512_supported",
    "_is_avx2_supported",
    "_is_amx_tile_supported",
    "_is_avx512_bf16_supported",
    "_is_amx_fp16_supported",
)


@functools.cache
def prepare() -> None:
    """Make this process able to import the release on `sys.path`; call before anything of vLLM is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_PLUGINS", "")
    import torch  # noqa: PLC0415  only the release's process has it

    for name in _CPU_FEATURES:
        if not hasattr(torch._C._cpu, name):
            setattr(torch._C._cpu, name, lambda: False)


def module(name: str) -> Any:
    """A module of the release on `sys.path`, imported when first asked for."""
    prepare()
    return importlib.import_module(name)


@functools.cache
def release() -> str:
    """The version that the sources on `sys.path` carry, e.g. "0.25.1", without a local part."""
    return str(module("vllm._version").__version__).split("+", maxsplit=1)[0]


def fitting(cls: Any, **wanted: Any) -> Any:
    """An instance of a class with those of the arguments that its constructor takes."""
    accepted = inspect.signature(cls).parameters
    return cls(**{k: v for k, v in wanted.items() if k in accepted})


def code(*parts: object) -> int:
    """A number that depends on the parts alone (`hash()` differs from process to process)."""
    return zlib.crc32("/".join(map(str, parts)).encode())
