# SPDX-License-Identifier: Apache-2.0
"""Which channels of a model's keys labels are made of, and the file that says so.

A channel i of a KV head counts by ``mean_h max|q_h[i]| * max|k[i]|`` (Double Sparsity as AsyncTLS,
section 4.1, states it): h goes over the query heads that share the KV head, and both maxima are
over all tokens of all calibration texts, queries and keys as attention sees them, rotated.
"""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Iterable, Mapping

import numpy as np

from attnd.nano import Model, causal_attention
from attnd.nano.model import heads_first
from attnd.tensors import Array

FORMAT = "attnd.label_channels.1"
# Of a label, as the server has it: a quarter of the key's channels, at most so many.
CHANNELS_MAX = 128


def label_channels(head_dim: int) -> int:
    """Channels of a label."""
    return min(head_dim // 4, CHANNELS_MAX)


def importance(model: Model, texts: Iterable[Array]) -> Array:
    """How much each channel counts: [layers, kv_heads, head_dim] float64.

    Args:
        texts: of each, [tokens] integers; a text is one sequence from position 0 on.

    Raises:
        ValueError: if there is no text, a text has no tokens or others than the model's, or what
            the model makes of one is not finite.
    """
    config = model.config
    queries = np.zeros((config.layers, config.query_heads, config.head_dim))
    keys = np.zeros((config.layers, config.kv_heads, config.head_dim))

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        np.maximum(queries[layer], np.abs(q).max(0), out=queries[layer])
        np.maximum(keys[layer], np.abs(k).max(0), out=keys[layer])
        return causal_attention(q, heads_first(k), heads_first(v), config.softmax_scale)

    count = 0
    for count, tokens in enumerate(texts, 1):
        if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise ValueError(
                f"text {count}: {len(tokens)} tokens; wanted are 1 or more of 0.."
                f"{config.vocab_size - 1}"
            )
        model.run_layers(tokens, np.arange(len(tokens)), attend)
    if count == 0:
        raise ValueError("there are no calibration texts")
    grouped = queries.reshape(config.layers, config.kv_heads, -1, config.head_dim)
    weights: Array = grouped.mean(2) * keys
    if not np.isfinite(weights).all():
        raise ValueError("the model's queries or keys over the texts are not finite")
    return weights


def choose(weights: Array, count: int) -> Array:
    """The `count` channels of each head that count most, the lower of equals first.

    Args:
        weights: [layers, kv_heads, head_dim], as importance().

    Returns:
        [layers, kv_heads, count] int64, ascending.
    """
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :count]
    chosen: Array = np.sort(order, axis=-1).astype(np.int64)
    return chosen


def save(
    path: pathlib.Path, channels: Array, fingerprint: str, head_dim: int, notes: Mapping[str, str]
) -> None:
    """Writes the file for a server. It is replaced whole.

    Args:
        channels: [layers, kv_heads, channels] int64, ascending, below head_dim.
        fingerprint: the model's, as its sequences are opened with.
        notes: further metadata, for people.
    """
    from safetensors.numpy import save as encode

    metadata = {
        "format": FORMAT, "fingerprint": fingerprint, "head_dim": str(head_dim), **notes,
    }  # fmt: skip
    content = encode({"channels": np.ascontiguousarray(channels)}, metadata)
    # A name that nobody else's file has.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with partial.open("xb") as file:
        try:
            file.write(content)
            file.flush()
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
