# SPDX-License-Identifier: Apache-2.0
"""Dense attention over a KV cache in local memory: what attnd is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnd.nano.attention import causal_attention
from attnd.nano.model import LayerKv, heads_first
from attnd.tensors import Array


class LocalKv:
    """KV of one sequence, float32, growing up to a capacity; attend() is an `Attend` of
    :class:`attnd.nano.Model`."""

    def __init__(self, layers: Sequence[LayerKv], capacity: int, scale: float) -> None:
        """layers: prefilled k and v of each layer, [tokens, kv_heads, head_dim]; capacity: tokens
        in all."""
        self._k = [_grown(k, capacity) for k, _ in layers]  # [kv_heads, capacity, head_dim]
        self._v = [_grown(v, capacity) for _, v in layers]
        self._tokens = [len(k) for k, _ in layers]
        self._scale = scale

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Appends k and v [n, kv_heads, head_dim] and answers q [n, query_heads, head_dim],
        causal."""
        start = self._tokens[layer]
        end = start + len(k)
        if end > self._k[layer].shape[1]:
            raise ValueError(f"{end} tokens exceed the capacity of {self._k[layer].shape[1]}")
        self._k[layer][:, start:end] = k.swapaxes(0, 1)
        self._v[layer][:, start:end] = v.swapaxes(0, 1)
        self._tokens[layer] = end
        return causal_attention(q, self._k[layer][:, :end], self._v[layer][:, :end], self._scale)


def _grown(x: Array, capacity: int) -> Array:
    """[tokens, heads, dim] -> [heads, capacity, dim], the rest unset."""
    grown = np.empty((x.shape[1], capacity, x.shape[2]), np.float32)
    grown[:, : len(x)] = heads_first(x)
    return grown
