# SPDX-License-Identifier: Apache-2.0
"""A transformer of the Llama, Qwen3 or DeepSeek-V3 family in float32 numpy, with attention left to
the caller."""

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
from attnd.nano.heads import heads_of, rms_norm
from attnd.nano.parallel import map_blocks
from attnd.nano.weights import Weights, read_weights
from attnd.tensors import FP32, Array

# Attention of one layer: (layer, q [tokens, query_heads, head_dim], k [tokens, kv_heads, head_dim],
# v [tokens, kv_heads, value_dim]) of the new tokens -> out [tokens, query_heads, value_dim]. All
# float32; q and k are rotated. Of a latent model v is the front of k.
Attend = Callable[[int, Array, Array, Array], Array]
# Keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, value_dim] of one layer, float32,
# keys rotated.
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
        self._heads = [heads_of(config, layer.heads) for layer in self._weights.layers]

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
            value_dim=self.config.value_dim,
            dtype=dtype,
            softmax_scale=self.config.softmax_scale,
            latent=self.config.latent is not None,
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
        h = rms_norm(x, self._weights.final_norm, self.config.rms_norm_eps)
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
            For each layer k [n, kv_heads, head_dim] and v [n, kv_heads, value_dim] float32, keys
            rotated.
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
        """x [n, hidden] -> q, k and v, as Heads.project."""
        h = rms_norm(x, self._weights.layers[layer].input_norm, self.config.rms_norm_eps)
        return self._heads[layer].project(h, positions)

    def _finish_block(self, layer: int, x: Array, out: Array) -> tuple[Array]:
        return (self._finish_layer(layer, x, out),)

    def _finish_layer(self, layer: int, x: Array, out: Array) -> Array:
        """x [n, hidden], out [n, query_heads, value_dim] -> x of the next layer."""
        weights = self._weights.layers[layer]
        y = x + self._heads[layer].mix(out)
        h = rms_norm(y, weights.post_attention_norm, self.config.rms_norm_eps)
        finished: Array = y + (_silu(h @ weights.gate) * (h @ weights.up)) @ weights.down
        return finished


def heads_first(x: Array) -> Array:
    """[tokens, heads, dim] -> [heads, tokens, dim], contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1))


def _silu(x: Array) -> Array:
    # exp overflows to infinity for very negative x, and the quotient is then the right 0.
    with np.errstate(over="ignore"):
        activated: Array = x / (1 + np.exp(-x))
    return activated
