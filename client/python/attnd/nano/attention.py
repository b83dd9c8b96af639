# SPDX-License-Identifier: Apache-2.0
"""Dense causal attention in float32 numpy, in blocks that stay in the processor's cache.

Blocks of one query range against one key range are two matrix products (OpenBLAS) and an
exponential between them, merged by the running maximum and sum of a streaming softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from attnd.nano.parallel import run_all
from attnd.tensors import Array

_QUERY_BLOCK = 64
_KEY_BLOCK = 512
# Below this many products a thread pool costs more than it brings.
_THREADED_PRODUCTS_MIN = 1 << 22


def causal_attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Attention of the newest tokens over all tokens.

    Args:
        q: [queries, query_heads, head_dim] float32: the last `queries` of the tokens.
        k: [kv_heads, tokens, head_dim] float32.
        v: [kv_heads, tokens, value_dim] float32.
        scale: logits are scale * q.k.

    Returns:
        [queries, query_heads, value_dim] float32. Query i attends to tokens up to tokens - queries
        + i.
    """
    queries, query_heads, _ = q.shape
    kv_heads, tokens, _ = k.shape
    group = query_heads // kv_heads
    out = np.empty((queries, query_heads, v.shape[2]), np.float32)

    def attend(head: int, start: int) -> None:
        heads = slice(head * group, (head + 1) * group)
        block = q[start : start + _QUERY_BLOCK, heads]
        first = tokens - queries + start
        out[start : start + _QUERY_BLOCK, heads] = _attend_block(
            block, k[head], v[head], scale, first
        )

    # The last blocks see the most keys: they come first, so that all threads end at about the same
    # time.
    starts = reversed(range(0, queries, _QUERY_BLOCK))
    jobs = [partial(attend, head, start) for start in starts for head in range(kv_heads)]
    if queries * query_heads * tokens < _THREADED_PRODUCTS_MIN:
        for job in jobs:
            job()
    else:
        run_all(jobs)
    return out


def _attend_block(q: Array, k: Array, v: Array, scale: float, first: int) -> Array:
    """q: [n, group, head_dim], its first token at position `first`; k, v: [tokens, dim] -> [n,
    group, value_dim]."""
    count, group, head_dim = q.shape
    rows = np.ascontiguousarray(q).reshape(count * group, head_dim) * np.float32(scale)
    maximum = np.full((len(rows), 1), -np.inf, np.float32)
    total = np.zeros((len(rows), 1), np.float32)
    weighted = np.zeros((len(rows), v.shape[1]), np.float32)
    for keys in _key_blocks(first + count):
        logits = rows @ k[keys].T
        if keys.stop - 1 > first:
            _hide_future(logits.reshape(count, group, -1), first, keys.start)
        higher = np.maximum(maximum, logits.max(1, keepdims=True))
        logits -= higher
        weights = np.exp(logits, out=logits)
        shrink = np.exp(maximum - higher)
        total = total * shrink + weights.sum(1, keepdims=True)
        weighted = weighted * shrink + weights @ v[keys]
        maximum = higher
    return (weighted / total).reshape(count, group, -1)


def _key_blocks(tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, _KEY_BLOCK):
        yield slice(start, min(start + _KEY_BLOCK, tokens))


def _hide_future(logits: Array, first_query: int, first_key: int) -> None:
    """Sets the logits [queries, group, keys] of keys after their query to -infinity.

    Every query sees the first block of keys, so that a row of -infinity never meets an empty
    maximum.
    """
    positions = np.arange(first_query, first_query + len(logits))
    keys = np.arange(first_key, first_key + logits.shape[2])
    logits[np.broadcast_to((keys > positions[:, None])[:, None], logits.shape)] = -np.inf
