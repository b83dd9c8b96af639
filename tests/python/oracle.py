# SPDX-License-Identifier: Apache-2.0
"""Attention by its definition, in float64 and loops: shares no code with what it checks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def attention(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, scale: float, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention.

    Args:
        q: [queries, query_heads, head_dim]; query i stands at position first + i.
        k: [tokens, kv_heads, head_dim].
        v: [tokens, kv_heads, value_dim].
        scale: logits are scale * q.k.
        first: position of the first query; tokens or more means that every query sees everything.

    Returns:
        out [queries, query_heads, value_dim] and log-sum-exp [queries, query_heads], float64.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    queries, query_heads, _ = q.shape
    group = query_heads // k.shape[1]
    out = np.zeros((queries, query_heads, v.shape[2]))
    lse = np.full((queries, query_heads), -np.inf)
    for i in range(queries):
        seen = min(first + i + 1, len(k))
        for head in range(query_heads if seen else 0):
            logits = scale * k[:seen, head // group] @ q[i, head]
            weights = np.exp(logits - logits.max())
            out[i, head] = weights @ v[:seen, head // group] / weights.sum()
            lse[i, head] = logits.max() + np.log(weights.sum())
    return out, lse
