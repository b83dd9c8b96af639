# SPDX-License-Identifier: Apache-2.0
"""Configurations of tiny models of every family that attnd.nano runs, and random weights of them."""

from __future__ import annotations

import math

import numpy as np

TINY = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
}
FAMILIES = {
    "llama, tied, theta in rope_parameters": {
        **TINY,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama, untied, theta at the top": {
        **TINY,
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    "qwen3, untied": {
        **TINY,
        "model_type": "qwen3",
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
    },
    "qwen3, tied, theta in rope_parameters": {
        **TINY,
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "deepseek_v3": {
        **TINY,
        "model_type": "deepseek_v3",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_interleave": False,
        "q_lora_rank": None,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 12,
        "v_head_dim": 10,
        "first_k_dense_replace": 3,
    },
}


def head_shapes(config: dict) -> dict[str, tuple[int, int]]:
    """Shapes of a layer's matrices around attention, by their Hugging Face names."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["model_type"] == "deepseek_v3":
        rank, plain, rotary = (
            config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        return {
            "q_proj": (heads * (plain + rotary), hidden),
            "kv_a_proj_with_mqa": (rank + rotary, hidden),
            "kv_b_proj": (heads * (plain + config["v_head_dim"]), rank),
            "o_proj": (hidden, heads * config["v_head_dim"]),
        }
    queries, keys = (n * config["head_dim"] for n in (heads, config["num_key_value_heads"]))
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }


def head_norms(config: dict) -> dict[str, int]:
    """Sizes of the norms between these matrices."""
    if config["model_type"] == "deepseek_v3":
        return {"kv_a_layernorm": config["kv_lora_rank"]}
    if config["model_type"] == "qwen3":
        return {"q_norm": config["head_dim"], "k_norm": config["head_dim"]}
    return {}


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by their Hugging Face names; norms near 1, the head there unless the embeddings are
    tied."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]

    def matrix(*shape):
        return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)

    def norm(size):
        return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 4,
        "model.norm.weight": norm(hidden),
    }
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part, shape in head_shapes(config).items():
            weights[f"{name}self_attn.{part}.weight"] = 2 * matrix(*shape)
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        weights |= {f"{name}mlp.{p}_proj.weight": matrix(*shape) for p, shape in shapes.items()}
        weights[f"{name}input_layernorm.weight"] = norm(hidden)
        weights[f"{name}post_attention_layernorm.weight"] = norm(hidden)
        for part, size in head_norms(config).items():
            weights[f"{name}self_attn.{part}.weight"] = norm(size)
    return weights
