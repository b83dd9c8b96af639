# SPDX-License-Identifier: Apache-2.0
"""Models of Transformers for the tests: tiny random ones, and this repository's nano models."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache

import attnd.transformers

# Models this small gain nothing from threads, which would take the server's processors from it.
torch.set_num_threads(1)

MODELS = pathlib.Path(__file__).resolve().parents[2] / "models"
TINY = ("tiny-llama", "tiny-qwen3")
NANO = ("nano-llama", "nano-llama-b", "nano-qwen3")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def tiny(name: str, seed: int = 0, **over):
    """A model of random weights, large enough for attention to decide between tokens."""
    config, model = {
        "tiny-llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "tiny-qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[name]
    torch.manual_seed(seed)
    made = model(config(**{**SIZES, **over})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return made


@functools.cache
def load(name: str):
    """A model in float32, one for all tests; they leave it as it was."""
    if name in TINY:
        return tiny(name)
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / name, dtype=torch.float32
    ).eval()


@functools.cache
def texts(tokens: int) -> np.ndarray:
    """Token ids of the nano models' evaluation set."""
    with np.load(MODELS / "nano-llama/nano_eval.npz") as stored:
        return stored[f"tokens_{tokens}"].astype(np.int64)


def prompt(name: str, rows: int, columns: int):
    """Token ids [rows, columns]: random ones, or the beginnings of texts that the model knows."""
    if name in TINY:
        generator = torch.Generator().manual_seed(rows * 1000 + columns)
        return torch.randint(2, SIZES["vocab_size"], (rows, columns), generator=generator)
    return torch.from_numpy(texts(2048)[:rows, :columns])


def generate(model, ids, cache, **options):
    """Greedy, 12 tokens and no end before; the dictionary that generate() returns, with logits."""
    tokens = options.setdefault("max_new_tokens", 12)
    defaults = {
        "do_sample": False,
        "min_new_tokens": tokens,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    return model.generate(ids, past_key_values=cache, **{**defaults, **options})


def local(model, ids, **options):
    """The same with attention computed here: scaled_dot_product_attention over a DynamicCache."""
    assert model.config._attn_implementation == "sdpa"
    return generate(model, ids, DynamicCache(), **options)


def local_of(model, ids):
    """Its tokens with local attention, while it is attached."""
    model.set_attn_implementation("sdpa")
    try:
        return local(model, ids).sequences
    finally:
        model.set_attn_implementation("attnd")


def attached(model, target: str, policy: str | None = "dense", **options):
    """With memory as attach_options says, unless the test does."""
    options = {**attach_options, **options}
    return attnd.transformers.attach(model, target, policy=policy, tenant="test", **options)


#: Of every attached(): test_transformers_through_memory.py runs tests of other files with memory.
attach_options: dict[str, object] = {}
