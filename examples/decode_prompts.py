# SPDX-License-Identifier: Apache-2.0
"""decode_loop.py's prompts: random keys and values, or a trained model's."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Part:
    """Keys and values of some of a row's tokens, which several layers have.

    Attributes:
        layers: their numbers.
        first: position of the first token.
        k, v: [tokens, kv_heads, head_dim] in GPU memory.
    """

    layers: range
    first: int
    k: torch.Tensor
    v: torch.Tensor


# Tokens of a part: of Llama-3.1-8B's heads in bf16 it has 32 MiB.
PART_TOKENS = 8192


def parts(options: argparse.Namespace, row: int) -> Iterator[Part]:
    """A row's prompt: all tokens of a layer, then those of the next one; with --chunk-tokens so
    many tokens of all layers, then the next ones of all."""
    tokens = options.chunk_tokens or options.prompt_tokens
    for begin in range(0, options.prompt_tokens, tokens):
        end = min(begin + tokens, options.prompt_tokens)
        for distinct in range(options.distinct_layers):
            layers = range(distinct, options.layers, options.distinct_layers)
            k, v = contents(options, row, distinct)
            for first in range(begin, end, PART_TOKENS):
                part = slice(first, min(first + PART_TOKENS, end))
                yield Part(layers, first, k[part], v[part])


def upload(
    options: argparse.Namespace, client: attnd.Client, sequence: int, row: int
) -> attnd.AppendedKv:
    """Has the server take a row's prompt from memory that is shared with it, and index it."""
    tensor_bytes = PART_TOKENS * options.kv_heads * options.head_dim * DTYPE.itemsize
    with client.kv_memory(2 * tensor_bytes) as memory:
        for part in parts(options, row):
            arrays = [
                memory.array(offset, tuple(tensor.shape), "bf16")
                for offset, tensor in ((0, part.k), (tensor_bytes, part.v))
            ]
            for array, tensor in zip(arrays, (part.k, part.v)):
                attnd.as_torch(array).copy_(tensor)
            for layer in part.layers:
                chunk = attnd.KvChunk(layer, part.first, *arrays)
                client.append_kv(
                    sequence, [chunk], memory=memory, prompt_tokens=options.prompt_tokens
                )
    return client.append_kv(sequence, [], prefill_complete=True)
