# SPDX-License-Identifier: Apache-2.0
"""Weights of a Hugging Face folder, converted to float32 and checked against the configuration."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  teaches numpy the name "bfloat16", which safetensors looks up
import numpy as np

from attnd.nano.config import Config, LatentConfig
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
class GroupedWeights:
    """One layer's heads, matrices transposed to [in, out]. The head norms are Qwen3's, else None."""

    q: Array  # [hidden, query_heads * head_dim]
    k: Array  # [hidden, kv_heads * head_dim]
    v: Array  # [hidden, kv_heads * head_dim]
    q_norm: Array | None  # [head_dim]
    k_norm: Array | None  # [head_dim]
    o: Array  # [query_heads * head_dim, hidden]


@dataclass(frozen=True)
class LatentWeights:
    """One layer's heads of DeepSeek's latent attention, matrices transposed to [in, out] but for
    key, which acts on queries."""

    q: Array  # [hidden, query_heads * (plain_dim + rotary_dim)]
    kv_a: Array  # [hidden, rank + rotary_dim]
    kv_a_norm: Array  # [rank]
    key: Array  # [query_heads, plain_dim, rank]
    value: Array  # [query_heads, rank, head_value_dim]
    o: Array  # [query_heads * head_value_dim, hidden]


@dataclass(frozen=True)
class LayerWeights:
    """One layer, float32, contiguous; matrices transposed to [in, out]."""

    input_norm: Array  # [hidden]
    heads: GroupedWeights | LatentWeights
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
        return LayerWeights(
            input_norm=self._take(f"{name}.input_layernorm.weight", hidden),
            heads=(
                self._grouped(config, attention)
                if config.latent is None
                else self._latent(config, config.latent, attention)
            ),
            post_attention_norm=self._take(f"{name}.post_attention_layernorm.weight", hidden),
            gate=self._matrix(f"{mlp}.gate_proj", intermediate, hidden),
            up=self._matrix(f"{mlp}.up_proj", intermediate, hidden),
            down=self._matrix(f"{mlp}.down_proj", hidden, intermediate),
        )

    def _grouped(self, config: Config, name: str) -> GroupedWeights:
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = config.query_heads * dim, config.kv_heads * dim
        normed = config.family == "qwen3"
        return GroupedWeights(
            q=self._matrix(f"{name}.q_proj", queries, hidden),
            k=self._matrix(f"{name}.k_proj", keys, hidden),
            v=self._matrix(f"{name}.v_proj", keys, hidden),
            q_norm=self._take(f"{name}.q_norm.weight", dim) if normed else None,
            k_norm=self._take(f"{name}.k_norm.weight", dim) if normed else None,
            o=self._matrix(f"{name}.o_proj", hidden, queries),
        )

    def _latent(self, config: Config, latent: LatentConfig, name: str) -> LatentWeights:
        hidden, heads = config.hidden_size, config.query_heads
        query_dim = latent.plain_dim + latent.rotary_dim
        kv_dim = latent.plain_dim + latent.head_value_dim
        # [heads, plain_dim + head_value_dim, rank]: keys first, then values.
        kv_b = self._take(f"{name}.kv_b_proj.weight", heads * kv_dim, latent.rank)
        key, value = np.split(kv_b.reshape(heads, kv_dim, -1), [latent.plain_dim], axis=1)
        return LatentWeights(
            q=self._matrix(f"{name}.q_proj", heads * query_dim, hidden),
            kv_a=self._matrix(
                f"{name}.kv_a_proj_with_mqa", latent.rank + latent.rotary_dim, hidden
            ),
            kv_a_norm=self._take(f"{name}.kv_a_layernorm.weight", latent.rank),
            key=np.ascontiguousarray(key),
            value=np.ascontiguousarray(value.swapaxes(1, 2)),
            o=self._matrix(f"{name}.o_proj", hidden, heads * latent.head_value_dim),
        )
