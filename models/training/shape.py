# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model, and the config.json that Hugging Face's classes read them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grammar import VOCABULARY, Token

RMS_NORM_EPS = 1e-6
INITIAL_DEVIATION = 0.02
POSITIONS_MAX = 65536


@dataclass(frozen=True)
class GroupedHeads:
    """Query heads in groups, each group over one KV head: Llama, and Qwen3 with normed heads.

    Attributes:
        normed: whether each query and key head passes an RMS norm before its rotation (Qwen3).
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    normed: bool

    def config(self) -> dict[str, Any]:
        """Those entries of config.json that are of this kind alone."""
        return {
            "architectures": ["Qwen3ForCausalLM" if self.normed else "LlamaForCausalLM"],
            "head_dim": self.head_dim,
            "model_type": "qwen3" if self.normed else "llama",
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
        }


@dataclass(frozen=True)
class LatentHeads:
    """DeepSeek's multi-head latent attention: all heads read one latent vector a token.

    Attributes:
        query_heads: heads in all; each has keys and values of its own, made from the latent.
        rank: elements of the latent vector.
        plain_dim: elements of a query or key head that are not rotated.
        rotary_dim: elements that are rotated; all heads share one such key.
        value_dim: elements of a value head.
    """

    query_heads: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    def config(self) -> dict[str, Any]:
        """Those entries of config.json that are of this kind alone."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "head_dim": self.rotary_dim,  # Hugging Face's rotation reads its size here
            "kv_lora_rank": self.rank,
            "model_type": "deepseek_v3",
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.query_heads,
            "q_lora_rank": None,
            "qk_head_dim": self.plain_dim + self.rotary_dim,
            "qk_nope_head_dim": self.plain_dim,
            "qk_rope_head_dim": self.rotary_dim,
            "rope_interleave": False,  # pairs are an element and the one half the size behind it
            "v_head_dim": self.value_dim,
        }


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the base of its rotary frequencies."""

    layers: int
    hidden: int
    intermediate: int
    rope_theta: float
    heads: GroupedHeads | LatentHeads

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.heads.head_dim if isinstance(self.heads, GroupedHeads) else self.heads.rotary_dim

    def config(self) -> dict[str, Any]:
        """The entries of config.json."""
        entries = self.heads.config() | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": int(Token.BOS),
            "dtype": "bfloat16",
            "eos_token_id": 2,  # the usual entry; nothing generates freely with these models
            # DeepSeek's layers below this one have no experts: here all of them.
            "first_k_dense_replace": self.layers,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": INITIAL_DEVIATION,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": POSITIONS_MAX,
            "mlp_bias": False,
            "num_hidden_layers": self.layers,
            "pad_token_id": None,
            "pretraining_tp": 1,
            "rms_norm_eps": RMS_NORM_EPS,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCABULARY,
        }
        if isinstance(self.heads, GroupedHeads):
            del entries["first_k_dense_replace"]
        return dict(sorted(entries.items()))

    @staticmethod
    def of_config(entries: dict[str, Any]) -> Shape:
        """The reverse of config()."""
        return Shape(
            layers=entries["num_hidden_layers"],
            hidden=entries["hidden_size"],
            intermediate=entries["intermediate_size"],
            rope_theta=entries["rope_parameters"]["rope_theta"],
            heads=_heads_of_config(entries),
        )


def _heads_of_config(entries: dict[str, Any]) -> GroupedHeads | LatentHeads:
    if entries["model_type"] == "deepseek_v3":
        return LatentHeads(
            query_heads=entries["num_attention_heads"],
            rank=entries["kv_lora_rank"],
            plain_dim=entries["qk_nope_head_dim"],
            rotary_dim=entries["qk_rope_head_dim"],
            value_dim=entries["v_head_dim"],
        )
    return GroupedHeads(
        query_heads=entries["num_attention_heads"],
        kv_heads=entries["num_key_value_heads"],
        head_dim=entries["head_dim"],
        normed=entries["model_type"] == "qwen3",
    )
