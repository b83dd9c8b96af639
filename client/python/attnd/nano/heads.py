# SPDX-License-Identifier: Apache-2.0
"""What a layer does before and after attention: queries, keys and values out of the hidden state,
and the answers back into it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from attnd.nano.config import Config, LatentConfig
from attnd.nano.weights import GroupedWeights, LatentWeights
from attnd.tensors import Array


class Heads(Protocol):
    """One layer's heads. Arrays are float32."""

    def project(self, h: Array, positions: Array) -> tuple[Array, Array, Array]:
        """h [n, hidden], normed -> q [n, query_heads, head_dim], k [n, kv_heads, head_dim] and v
        [n, kv_heads, value_dim]; q and k rotated."""

    def mix(self, out: Array) -> Array:
        """out [n, query_heads, value_dim], attention's answers -> [n, hidden]"""


def heads_of(config: Config, weights: GroupedWeights | LatentWeights) -> Heads:
    """The heads of one layer, of the weights' kind."""
    if isinstance(weights, LatentWeights):
        assert config.latent is not None
        return LatentHeads(config, config.latent, weights)
    return GroupedHeads(config, weights)


class GroupedHeads:
    """Llama's, and Qwen3's, whose queries and keys are normed head by head."""

    def __init__(self, config: Config, weights: GroupedWeights) -> None:
        self._config = config
        self._weights = weights

    def project(self, h: Array, positions: Array) -> tuple[Array, Array, Array]:
        weights, config = self._weights, self._config
        q, k, v = (
            (h @ matrix).reshape(len(h), -1, config.head_dim)
            for matrix in (weights.q, weights.k, weights.v)
        )
        if weights.q_norm is not None and weights.k_norm is not None:
            q = rms_norm(q, weights.q_norm, config.rms_norm_eps)
            k = rms_norm(k, weights.k_norm, config.rms_norm_eps)
        cos, sin = rotations(positions, config.head_dim, config.rope_theta)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def mix(self, out: Array) -> Array:
        mixed: Array = out.reshape(len(out), -1) @ self._weights.o
        return mixed


class LatentHeads:
    """DeepSeek's, over the latent vectors themselves (arXiv 2405.04434, section 2.1.2): a key is
    the token's normed latent vector and behind it the rotated key that all heads share; its value
    is the latent vector. The matrices that make a head's keys and values of the latent act on the
    query and on the answer instead."""

    def __init__(self, config: Config, latent: LatentConfig, weights: LatentWeights) -> None:
        self._config = config
        self._latent = latent
        self._weights = weights

    def project(self, h: Array, positions: Array) -> tuple[Array, Array, Array]:
        weights, config, latent = self._weights, self._config, self._latent
        cos, sin = rotations(positions, latent.rotary_dim, config.rope_theta)
        q = (h @ weights.q).reshape(len(h), config.query_heads, -1)
        plain, rotary = np.split(q, [latent.plain_dim], axis=-1)
        over_latent = np.einsum("nhp,hpr->nhr", plain, weights.key, optimize=True)
        q = np.concatenate([over_latent, rotate(rotary, cos, sin)], axis=-1)

        compressed, shared = np.split(h @ weights.kv_a, [latent.rank], axis=-1)
        v = rms_norm(compressed, weights.kv_a_norm, config.rms_norm_eps)[:, None]
        k = np.concatenate([v, rotate(shared[:, None], cos, sin)], axis=-1)
        return q, k, k[..., : latent.rank]

    def mix(self, out: Array) -> Array:
        values = np.einsum("nhr,hrv->nhv", out, self._weights.value, optimize=True)
        mixed: Array = values.reshape(len(out), -1) @ self._weights.o
        return mixed


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last dimension."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normalised: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normalised


def rotations(positions: Array, rotary_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin, each [n, 1, rotary_dim / 2] float32; the angles are computed in float64, as
    positions are large."""
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.asarray(positions, np.float64)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE over [n, heads, rotary_dim]; element i and i + rotary_dim / 2 are a pair."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
