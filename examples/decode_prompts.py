# SPDX-License-Identifier: Apache-2.0
"""decode_loop.py's prompts: random keys and values, or a trained model's."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

import attnd

DTYPE = torch.bfloat16


class Capture:
    """A file of bench/pages/page_trace_capture.py, which has its format.

    Attributes:
        prompt: keys and values of the prompt's last tokens, [tokens, kv_heads, head_dim].
        decoded: queries, keys and values of the tokens behind it, [tokens, heads, head_dim].
    """

    MAGIC = b"ATNDCAP1"
    HEADER = struct.Struct("<8s6If")

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        with open(path, "rb") as file:
            magic, layers, *heads, dim, prompt, decoded, _ = self.HEADER.unpack(
                file.read(self.HEADER.size)
            )
        expected = (self.MAGIC, 1, [options.query_heads, options.kv_heads], options.head_dim)
        if (magic, layers, heads, dim) != expected:
            raise ValueError(f"{path} is not of one layer of the loop's heads ({expected})")
        steps = options.warm_up + options.new_tokens
        if prompt < options.prompt_tokens or decoded < steps:
            raise ValueError(
                f"{path} has {prompt} tokens and {decoded} behind them; the loop wants "
                f"{options.prompt_tokens} and {steps}"
            )
        values = np.memmap(path, np.int16, "r", self.HEADER.size)
        kv_shape = (options.kv_heads, prompt + decoded, dim)
        count = int(np.prod(kv_shape))

        def tensor(first: int, shape: tuple[int, ...], tokens: slice) -> torch.Tensor:
            part = values[first : first + int(np.prod(shape))].reshape(shape)[:, tokens]
            return torch.from_numpy(part.copy()).view(DTYPE).transpose(0, 1).contiguous().cuda()

        seen, behind = slice(prompt - options.prompt_tokens, prompt), slice(prompt, None)
        self.prompt = [tensor(first, kv_shape, seen) for first in (0, count)]
        by_token = (1, decoded * options.query_heads, dim)
        q = tensor(2 * count, by_token, slice(None)).view(decoded, options.query_heads, dim)
        self.decoded = [q, *(tensor(first, kv_shape, behind) for first in (0, count))]


def contents(options: argparse.Namespace, row: int, layer: int) -> list[torch.Tensor]:
    """Keys and values of a row's prompt, [tokens, kv_heads, head_dim], the same in each call."""
    if options.capture is not None:
        return options.capture.prompt
    seed = (options.seed * 1009 + row) * 1009 + layer
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (options.prompt_tokens, options.kv_heads, options.head_dim)
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE) for _ in range(2)
    ]


def chunks(options: argparse.Namespace, row: int) -> Iterator[attnd.KvChunk]:
    """A row's prompt. The host has one layer of it at a time: append_kv has copied a chunk when it
    asks for the next one. With --chunk-tokens it has all layers whose contents differ."""

    def layer_of(distinct: int) -> list[Any]:
        return [
            made.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
            for made in contents(options, row, distinct)
        ]

    if options.chunk_tokens:
        layers = [layer_of(distinct) for distinct in range(options.distinct_layers)]
        for first in range(0, options.prompt_tokens, options.chunk_tokens):
            part = slice(first, min(first + options.chunk_tokens, options.prompt_tokens))
            for layer in range(options.layers):
                k, v = layers[layer % options.distinct_layers]
                yield attnd.KvChunk(layer, first, k[part], v[part])
        return
    for distinct in range(options.distinct_layers):
        k, v = layer_of(distinct)
        for layer in range(distinct, options.layers, options.distinct_layers):
            yield attnd.KvChunk(layer, 0, k, v)
