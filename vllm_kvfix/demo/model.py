# SPDX-License-Identifier: Apache-2.0
"""A Llama of 150,000 parameters with a tokenizer of 512 tokens, made from a seed without network or libraries.

Its weights are random but large enough that each token depends on all that precede it: a wrong KV block would change
what the model says.
"""

from __future__ import annotations

import json
import random
import struct
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCABULARY = 512
MAX_POSITIONS = 2048
END_OF_TEXT = "<|endoftext|>"

_HIDDEN = 64
_INTERMEDIATE = 128
_LAYERS = 2
_HEADS = 2
_SEED = 20260717
_WEIGHT_SPREAD = 0.25
_LETTERS = "etaoinshrdlucmfw"


def make_model(folder: Path) -> Path:
    """Write the model to ``folder``, which is made if need be, and return it. The same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", _config()),
        ("generation_config.json", {"eos_token_id": 0}),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", _tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(_weights())
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        # Older transformers know no newer class; every release of interest knows this one.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


def _tokenizer() -> dict[str, object]:
    """Return a byte-level BPE: a special token, the 256 bytes, and merges of letter pairs up to the vocabulary."""
    tokens = [END_OF_TEXT, *sorted(_byte_characters())]
    merges = []
    for first in _LETTERS:
        for second in _LETTERS:
            if len(tokens) < VOCABULARY:
                merges.append(f"{first} {second}")
                tokens.append(first + second)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": END_OF_TEXT, **special}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _byte_characters() -> Iterator[str]:
    """Yield the character that stands for each byte: itself if Latin-1 can show it, else one from U+0100 on."""
    spare = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:  # noqa: PLR2004  the format's own table
            yield chr(byte)
        else:
            yield chr(spare)
            spare += 1


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    square, up, down = (_HIDDEN, _HIDDEN), (_INTERMEDIATE, _HIDDEN), (_HIDDEN, _INTERMEDIATE)
    yield "model.embed_tokens.weight", (VOCABULARY, _HIDDEN)
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (_HIDDEN,)
        for projection in ("q", "k", "v", "o"):
            yield f"{layer}.self_attn.{projection}_proj.weight", square
        yield f"{layer}.post_attention_layernorm.weight", (_HIDDEN,)
        yield f"{layer}.mlp.gate_proj.weight", up
        yield f"{layer}.mlp.up_proj.weight", up
        yield f"{layer}.mlp.down_proj.weight", down
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, _HIDDEN)


def _weights() -> bytes:
    """Return a safetensors file: the header's length (8 bytes, little endian), a JSON header, the raw tensors."""
    draw = random.Random(_SEED)  # noqa: S311  weights, not secrets
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape in _shapes():
        if len(shape) == 1:
            values = array("f", [1.0]) * shape[0]
        else:
            values = array("f", (draw.gauss(0.0, _WEIGHT_SPREAD) for _ in range(shape[0] * shape[1])))
        start = len(body)
        body += values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(body)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)
