# SPDX-License-Identifier: Apache-2.0
"""What is computed locally for an example: its haystack's KV, and the dense run that attnd is
compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from attnd.eval.cache import Cache, cache_key
from attnd.eval.evalset import QUESTION_TOKENS, Example
from attnd.nano import LayerKv, LocalKv, Model, causal_attention
from attnd.nano.model import heads_first
from attnd.tensors import Array, dtype_name

Progress = Callable[[float], None]
# Queries of a prompt's end that policies look at (docs/POLICIES.md, "Observed queries").
OBSERVED_TOKENS = 256


@dataclass(frozen=True)
class DenseRun:
    """The questions through the model with local dense attention.

    Attributes:
        best: [QUESTION_TOKENS] arg-max token after each question token.
        gap: [QUESTION_TOKENS] difference of the two largest logits.
        decode_us: [QUESTION_TOKENS * layers] time of attention for one token in one layer.
    """

    best: Array
    gap: Array
    decode_us: Array


def round_to(x: Array, dtype: np.dtype[Any]) -> Array:
    """x float32 rounded to dtype and back: what attnd stores."""
    return x.astype(dtype).astype(np.float32)


def prefill(model: Model, example: Example, cache: Cache, progress: Progress) -> list[LayerKv]:
    """Keys and values of the haystack, for each layer [tokens, kv_heads, head_dim] float32; from
    the cache if there."""
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        told += share
        progress(share)

    def make() -> dict[str, Array]:
        layers = model.prefill(example.haystack, tell)
        return {f"{name}{layer}": x for layer, kv in enumerate(layers) for name, x in zip("kv", kv)}

    found = cache.get("prefill", cache_key(model.fingerprint, example.haystack), make)
    progress(1 - told)
    return [(found[f"k{layer}"], found[f"v{layer}"]) for layer in range(model.config.layers)]


def observed_queries(
    model: Model, example: Example, haystack: Sequence[LayerKv], cache: Cache
) -> list[Array]:
    """Of each layer, the queries [tokens, query_heads, head_dim] of the haystack's last
    OBSERVED_TOKENS tokens, rotated; from the cache if there."""

    def make() -> dict[str, Array]:
        start = max(0, len(example.haystack) - OBSERVED_TOKENS)
        queries: dict[str, Array] = {}

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            queries[f"q{layer}"] = q
            keys, values = (heads_first(x) for x in haystack[layer])
            return causal_attention(q, keys, values, model.config.softmax_scale)

        positions = np.arange(start, len(example.haystack))
        model.forward(example.haystack[start:], positions, attend)
        return queries

    key = cache_key(model.fingerprint, example.haystack, str(OBSERVED_TOKENS))
    found = cache.get("observed", key, make)
    return [found[f"q{layer}"] for layer in range(model.config.layers)]


def dense_run(
    model: Model,
    example: Example,
    haystack: Sequence[LayerKv],
    dtype: np.dtype[Any],
    cache: Cache,
) -> DenseRun:
    """The dense run over KV rounded to dtype as attnd's is, token by token; from the cache if
    there."""

    def make() -> dict[str, Array]:
        run = _run_dense(model, example, haystack, dtype)
        return {"best": run.best, "gap": run.gap, "decode_us": run.decode_us}

    key = cache_key(model.fingerprint, example.haystack, example.questions, dtype_name(dtype))
    found = cache.get("dense", key, make)
    return DenseRun(found["best"], found["gap"], found["decode_us"])


def _run_dense(
    model: Model, example: Example, haystack: Sequence[LayerKv], dtype: np.dtype[Any]
) -> DenseRun:
    rounded = [(round_to(k, dtype), round_to(v, dtype)) for k, v in haystack]
    start = len(example.haystack)
    kv = LocalKv(rounded, start + QUESTION_TOKENS, model.config.softmax_scale)
    decode_us = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        began = time.perf_counter()
        out = kv.attend(layer, q, round_to(k, dtype), round_to(v, dtype))
        decode_us.append((time.perf_counter() - began) * 1e6)
        return out

    logits = [
        model.forward(token[None], np.array([start + index]), attend)[0]
        for index, token in enumerate(example.questions)
    ]
    top = np.partition(np.stack(logits), -2, axis=-1)[:, -2:]
    return DenseRun(np.argmax(logits, axis=-1), top[:, 1] - top[:, 0], np.array(decode_us))


def dense_outputs(
    haystack: LayerKv, q: Array, k: Array, v: Array, dtype: np.dtype[Any], scale: float
) -> Array:
    """Dense attention of one layer for the queries that a run really made.

    Args:
        haystack: k and v [tokens, kv_heads, head_dim] float32, not rounded yet.
        q: [n, query_heads, head_dim] of the question tokens.
        k, v: [n, kv_heads, head_dim] of the question tokens, rounded already.

    Returns:
        [n, query_heads, head_dim] float32.
    """
    keys, values = (
        heads_first(np.concatenate([round_to(old, dtype), new]))
        for old, new in zip(haystack, (k, v))
    )
    return causal_attention(q, keys, values, scale)
