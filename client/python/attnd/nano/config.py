# SPDX-License-Identifier: Apache-2.0
"""config.json of a Hugging Face folder: the Llama and Qwen3 families."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FAMILIES = ("llama", "qwen3")
# Options that change the mathematics and that this runner does not have, with the values that leave
# them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "hidden_act": (None, "silu"),
}


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a model.

    Attributes:
        family: "llama" or "qwen3"; qwen3 normalises each query and key head before RoPE.
        head_dim: elements of a query, key or value head.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square.
        tied_embeddings: whether the output head is the embedding; None: if the file has no head.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool | None

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

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
            return Config(
                family=family,
                vocab_size=entries["vocab_size"],
                hidden_size=entries["hidden_size"],
                intermediate_size=entries["intermediate_size"],
                layers=entries["num_hidden_layers"],
                query_heads=entries["num_attention_heads"],
                kv_heads=entries.get("num_key_value_heads") or entries["num_attention_heads"],
                head_dim=entries.get("head_dim")
                or entries["hidden_size"] // entries["num_attention_heads"],
                rope_theta=_rope_theta(entries),
                rms_norm_eps=entries["rms_norm_eps"],
                tied_embeddings=entries.get("tie_word_embeddings"),
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing.args[0]}") from None


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
