# SPDX-License-Identifier: Apache-2.0
"""A Llama or Qwen3 transformer in float32 numpy, with attention left to the caller."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Callable

import numpy as np

from attnd.model import Model as AttndModel
from attnd.model import ModelShape
from attnd.nano.attention import causal_attention
from attnd.nano.config import Config
from attnd.nano.parallel import map_blocks
from attnd.nano.weights import Weights, read_weights
from attnd.tensors import FP32, Array

# Attention of one layer: (layer, q [tokens, query_heads, head_dim], k and v [tokens, kv_heads,
# head_dim]) of the new # tokens -> out [tokens, query_heads, head_dim]. All float32; q and k are
# rotated.
Attend = Callable[[int, Array, Array, Array], Array]
# Keys and values of one layer, each [tokens, kv_heads, head_dim] float32, keys rotated.
LayerKv = tuple[Array, Array]


class Model:
    """A model's weights and the arithmetic around attention. Read-only after construction; threads
    may share it."""

    def __init__(self, config: Config, weights: Mapping[str, Array], fingerprint: str = "") -> None:
        """weights: arrays by their Hugging Face names.

        Raises:
            ValueError: if a weight is missing or has another shape than the configuration says.
        """
        self.config = config
        self.fingerprint = fingerprint
        self._weights = Weights(config, weights)

    @staticmethod
    def load(folder: str | pathlib.Path) -> Model:
        """Reads config.json and model.safetensors of a Hugging Face folder; the fingerprint is a
        hash of both.

        Raises:
            OSError: if a file cannot be read.
            ValueError: if the model is not supported or the files do not fit each other.
        """
        folder = pathlib.Path(folder)
        files = [folder / "config.json", folder / "model.safetensors"]
        fingerprint = hashlib.sha256(
            b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
        )
        return Model(Config.read(files[0]), read_weights(files[1]), fingerprint.hexdigest())

    def attnd_model(self, dtype: Any = FP32) -> AttndModel:
        """What OpenSequence is told; dtype is that of the keys and values that will be sent."""
        shape = ModelShape(
            layers=self.config.layers,
            query_heads=self.config.query_heads,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            softmax_scale=self.config.softmax_scale,
        )
        return AttndModel(self.fingerprint, shape)

    def forward(self, tokens: Array, positions: Array, attend: Attend) -> Array:
        """Runs tokens through the model, attention answered by the caller.

        Args:
            tokens: [n] integers below vocab_size.
            positions: [n] their places, each in its own sequence.
            attend: called once for each layer, from 0.

        Returns:
            Logits [n, vocab_size] float32.
        """
        x = self.run_layers(tokens, positions, attend)
        h = _rms_norm(x, self._weights.final_norm, self.config.rms_norm_eps)
        logits: Array = h @ self._weights.head
        return logits

    def run_layers(self, tokens: Array, positions: Array, attend: Attend) -> Array:
        """The same without the logits, which of a long text with a large vocabulary are gigabytes:
        what the last layer gives, [n, width] float32."""
        x: Array = self._weights.embedding[tokens]
        for layer in range(self.config.layers):
            q, k, v = self._project(layer, x, positions)
            x = self._finish_layer(layer, x, attend(layer, q, k, v))
        return x

    def prefill(
        self, tokens: Array, progress: Callable[[float], None] = lambda share: None
    ) -> list[LayerKv]:
        """Keys and values of a prompt, by dense causal attention.

        The last layer's attention is not computed: nothing follows from it but the logits, which
        nobody asked for.

        Args:
            tokens: [n] integers below vocab_size.
            progress: called with the share of the work that each layer was, 1 in all.

        Returns:
            For each layer k and v, [n, kv_heads, head_dim] float32, keys rotated.
        """
        positions = np.arange(len(tokens))
        x = self._weights.embedding[tokens]
        layers: list[LayerKv] = []
        for layer in range(self.config.layers):
            q, k, v = map_blocks(partial(self._project, layer), x, positions)
            layers.append((k, v))
            if layer + 1 < self.config.layers:
                out = causal_attention(q, heads_first(k), heads_first(v), self.config.softmax_scale)
                (x,) = map_blocks(partial(self._finish_block, layer), x, out)
            progress(1 / self.config.layers)
        return layers

    def _project(self, layer: int, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """x [n, hidden] -> q [n, query_heads, head_dim], k and v [n, kv_heads, head_dim]; q and k
        rotated."""
        weights, config = self._weights.layers[layer], self.config
        h = _rms_norm(x, weights.input_norm, config.rms_norm_eps)
        q, k, v = (
            (h @ matrix).reshape(len(x), -1, config.head_dim)
            for matrix in (weights.q, weights.k, weights.v)
        )
        if weights.q_norm is not None and weights.k_norm is not None:
            q = _rms_norm(q, weights.q_norm, config.rms_norm_eps)
            k = _rms_norm(k, weights.k_norm, config.rms_norm_eps)
        cos, sin = _rotations(positions, config.head_dim, config.rope_theta)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _finish_block(self, layer: int, x: Array, out: Array) -> tuple[Array]:
        return (self._finish_layer(layer, x, out),)

    def _finish_layer(self, layer: int, x: Array, out: Array) -> Array:
        """x [n, hidden], out [n, query_heads, head_dim] -> x of the next layer."""
        weights = self._weights.layers[layer]
        y = x + out.reshape(len(x), -1) @ weights.o
        h = _rms_norm(y, weights.post_attention_norm, self.config.rms_norm_eps)
        finished: Array = y + (_silu(h @ weights.gate) * (h @ weights.up)) @ weights.down
        return finished


def heads_first(x: Array) -> Array:
    """[tokens, heads, dim] -> [heads, tokens, dim], contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1))


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last dimension."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normalised: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normalised


def _silu(x: Array) -> Array:
    # exp overflows to infinity for very negative x, and the quotient is then the right 0.
    with np.errstate(over="ignore"):
        activated: Array = x / (1 + np.exp(-x))
    return activated


def _rotations(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin, each [n, 1, head_dim / 2] float32; the angles are computed in float64, as
    positions are large."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.asarray(positions, np.float64)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE over [n, heads, head_dim]; element i and i + head_dim / 2 are a pair."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
