# SPDX-License-Identifier: Apache-2.0
"""Weights of a Hugging Face folder, converted to float32 and checked against the configuration."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  teaches numpy the name "bfloat16", which safetensors looks up
import numpy as np

from attnd.nano.config import Config
from attnd.tensors import Array


def read_weights(path: pathlib.Path) -> dict[str, Array]:
    """Arrays by name, in the file's dtypes.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a safetensors file.
    """
    import safetensors
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True)
class LayerWeights:
    """Matrices of one layer, transposed to [in, out], float32, contiguous. The head norms are
    Qwen3's, else None."""

    input_norm: Array  # [hidden]
    q: Array  # [hidden, query_heads * head_dim]
    k: Array  # [hidden, kv_heads * head_dim]
    v: Array  # [hidden, kv_heads * head_dim]
    q_norm: Array | None  # [head_dim]
    k_norm: Array | None  # [head_dim]
    o: Array  # [query_heads * head_dim, hidden]
    post_attention_norm: Array  # [hidden]
    gate: Array  # [hidden, intermediate]
    up: Array  # [hidden, intermediate]
    down: Array  # [intermediate, hidden]


class Weights:
    """All of a model's weights, float32."""

    def __init__(self, config: Config, arrays: Mapping[str, Array]) -> None:
        """arrays: by their Hugging Face names, any float dtype. ValueError names what is missing or
        misshapen."""
        self._arrays = arrays
        hidden, vocabulary = config.hidden_size, config.vocab_size
        self.embedding = self._take(
            "model.embed_tokens.weight", vocabulary, hidden
        )  # [vocab, hidden]
        self.final_norm = self._take("model.norm.weight", hidden)  # [hidden]
        self.layers = [self._layer(config, layer) for layer in range(config.layers)]
        tied = config.tied_embeddings
        if tied or (tied is None and "lm_head.weight" not in arrays):
            self.head = np.ascontiguousarray(self.embedding.T)  # [hidden, vocab]
        else:
            self.head = self._matrix("lm_head", vocabulary, hidden)
        del self._arrays

    def _take(self, name: str, *shape: int) -> Array:
        if name not in self._arrays:
            raise ValueError(f"model.safetensors has no {name}")
        array = self._arrays[name]
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, config.json says {shape}")
        return np.ascontiguousarray(array, np.float32)

    def _matrix(self, name: str, outputs: int, inputs: int) -> Array:
        """[inputs, outputs]; the file has it the other way around."""
        return np.ascontiguousarray(self._take(f"{name}.weight", outputs, inputs).T)

    def _layer(self, config: Config, layer: int) -> LayerWeights:
        name = f"model.layers.{layer}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        hidden, intermediate = config.hidden_size, config.intermediate_size
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        head_norms = config.family == "qwen3"
        return LayerWeights(
            input_norm=self._take(f"{name}.input_layernorm.weight", hidden),
            q=self._matrix(f"{attention}.q_proj", queries, hidden),
            k=self._matrix(f"{attention}.k_proj", keys, hidden),
            v=self._matrix(f"{attention}.v_proj", keys, hidden),
            q_norm=self._take(f"{attention}.q_norm.weight", config.head_dim)
            if head_norms
            else None,
            k_norm=self._take(f"{attention}.k_norm.weight", config.head_dim)
            if head_norms
            else None,
            o=self._matrix(f"{attention}.o_proj", hidden, queries),
            post_attention_norm=self._take(f"{name}.post_attention_layernorm.weight", hidden),
            gate=self._matrix(f"{mlp}.gate_proj", intermediate, hidden),
            up=self._matrix(f"{mlp}.up_proj", intermediate, hidden),
            down=self._matrix(f"{mlp}.down_proj", hidden, intermediate),
        )
