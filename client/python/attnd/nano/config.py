# SPDX-License-Identifier: Apache-2.0
"""config.json of a Hugging Face folder: the Llama, Qwen3 and DeepSeek-V3 families."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FAMILIES = ("llama", "qwen3", "deepseek_v3")
# Options that change the mathematics and that this runner does not have, with the values that leave
# them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "hidden_act": (None, "silu"),
}
# The same of deepseek_v3; what Hugging Face takes for a missing entry is not off.
_LATENT_OFF: dict[str, tuple[Any, ...]] = {
    "q_lora_rank": (None,),
    "rope_interleave": (False,),
}


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of DeepSeek's latent attention.

    Attributes:
        rank: elements of a token's latent vector.
        plain_dim: elements of a query or key head that are not rotated.
        rotary_dim: those that are.
        head_value_dim: elements of a value head, which is made of the latent after attention.
    """

    rank: int
    plain_dim: int
    rotary_dim: int
    head_value_dim: int


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a model.

    Attributes:
        family: "llama", "qwen3" (which normalises each query and key head before RoPE) or
            "deepseek_v3" without experts.
        kv_heads: KV heads as attention sees them: of a latent model one, the latent vector.
        head_dim: elements of a query or key head as attention sees them: of a latent model rank +
            rotary_dim.
        value_dim: the same of a value head: of a latent model rank.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square.
        tied_embeddings: whether the output head is the embedding; None: if the file has no head.
        softmax_scale: logits are softmax_scale * q.k.
        latent: sizes that only a latent model has.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool | None
    softmax_scale: float
    latent: LatentConfig | None = None

    @staticmethod
    def read(path: pathlib.Path) -> Config:
        """Reads a config.json.

        Raises:
            ValueError: if the model is of another family or uses what this runner does not have.
            OSError: if the file cannot be read.
        """
        return Config.parse(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def parse(entries: Mapping[str, Any]) -> Config:
        """Reads the entries of a config.json; ValueError as read()."""
        family = entries.get("model_type")
        if family not in _FAMILIES:
            raise ValueError(f"model_type {family!r} is none of {', '.join(_FAMILIES)}")
        for name, off in _OFF.items():
            if entries.get(name) not in off:
                raise ValueError(f"{name} = {entries[name]!r} is not supported")
        try:
            latent = _latent(entries) if family == "deepseek_v3" else None
            return Config(
                family=family,
                vocab_size=entries["vocab_size"],
                hidden_size=entries["hidden_size"],
                intermediate_size=entries["intermediate_size"],
                layers=entries["num_hidden_layers"],
                query_heads=entries["num_attention_heads"],
                rope_theta=_rope_theta(entries),
                rms_norm_eps=entries["rms_norm_eps"],
                tied_embeddings=entries.get("tie_word_embeddings"),
                latent=latent,
                **(_grouped_sizes(entries) if latent is None else _latent_sizes(latent)),
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing.args[0]}") from None


def _grouped_sizes(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Of attention with KV heads."""
    query_heads = entries["num_attention_heads"]
    head_dim = entries.get("head_dim") or entries["hidden_size"] // query_heads
    return {
        "kv_heads": entries.get("num_key_value_heads") or query_heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "softmax_scale": float(head_dim**-0.5),
    }


def _latent_sizes(latent: LatentConfig) -> dict[str, Any]:
    """Of attention over latent vectors. Logits are scaled as those of the heads that the latent
    stands for."""
    return {
        "kv_heads": 1,
        "head_dim": latent.rank + latent.rotary_dim,
        "value_dim": latent.rank,
        "softmax_scale": float((latent.plain_dim + latent.rotary_dim) ** -0.5),
    }


def _latent(entries: Mapping[str, Any]) -> LatentConfig:
    for name, off in _LATENT_OFF.items():
        if entries.get(name, "absent") not in off:
            raise ValueError(f"{name} = {entries.get(name)!r} is not supported with deepseek_v3")
    if entries["first_k_dense_replace"] < entries["num_hidden_layers"]:
        raise ValueError("layers with experts are not supported: first_k_dense_replace is too low")
    return LatentConfig(
        rank=entries["kv_lora_rank"],
        plain_dim=entries["qk_nope_head_dim"],
        rotary_dim=entries["qk_rope_head_dim"],
        head_value_dim=entries["v_head_dim"],
    )


def _rope_theta(entries: Mapping[str, Any]) -> float:
    """The base, from rope_parameters (transformers 5) or from the top level (before)."""
    parameters = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported")
    theta = parameters.get("rope_theta", entries.get("rope_theta"))
    if theta is None:
        raise ValueError(
            "config.json has rope_theta neither in rope_parameters nor at the top level"
        )
    return float(theta)
