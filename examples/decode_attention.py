# SPDX-License-Identifier: Apache-2.0
"""decode_loop.py's attention: none, computed on this GPU, answered by attnd, and both compared. Each takes
a layer's q [rows, query_heads, head_dim] and k and v [rows, kv_heads, head_dim], and returns [rows,
query_heads, head_dim] or the same elements by KV head; `start` comes ahead of a text, `end` behind a step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode_prompts import DTYPE, contents

# Backends of PyTorch's like lengths that divide by it.
CAPACITY_UNIT = 128
TIMED_CALLS, TIMED_REPLAYS = 5, 5
# A way is tried in the loop whose call takes at most so many times the least.
FAST = 1.1


def fused(options: argparse.Namespace, function: Any) -> Any:
    """The function with what it does between its products in few kernels, as serving engines have it."""
    return function if options.eager else torch.compile(function, dynamic=False)


class NoAttention:
    """For the time of all else."""

    def start(self) -> None:
        pass

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        return q

    def end(self) -> None:
        pass


class Cache:
    """Keys and values of the prompt and room for new tokens, [rows, kv_heads, tokens, head_dim];
    one of each layer that has contents of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        tokens = options.prompt_tokens + options.warm_up + options.new_tokens
        tokens += 2  # a graph's warm-up and capture
        self.capacity = -(-tokens // CAPACITY_UNIT) * CAPACITY_UNIT
        shape = (options.rows, options.kv_heads, self.capacity, options.head_dim)
        count = options.distinct_layers
        self._layers = [
            tuple(torch.zeros(shape, device="cuda", dtype=DTYPE) for _ in range(2))
            for _ in range(count)
        ]
        for index in range(count):
            for row in range(options.rows):
                for cached, made in zip(self._layers[index], contents(options, row, index)):
                    cached[row, :, : options.prompt_tokens] = made.transpose(0, 1)

    def layer(self, layer: int) -> Any:
        return self._layers[layer % len(self._layers)]


# A backend of PyTorch's, and whether query heads are heads; otherwise they are their KV head's queries.
Way = tuple[SDPBackend, bool]
WAYS: list[Way] = [
    (backend, as_heads)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    for as_heads in (False, True)
]


def name_of(way: Way) -> str:
    return f"{way[0].name} of {'heads' if way[1] else 'groups'}"


def _attend(way: Way, grouped: Any, keys: Any, values: Any) -> Any:
    backend, as_heads = way
    with sdpa_kernel(backend):
        if not as_heads:
            return F.scaled_dot_product_attention(grouped, keys, values)
        heads = grouped.flatten(1, 2).unsqueeze(2)
        return F.scaled_dot_product_attention(heads, keys, values, enable_gqa=True)


def _call_us(way: Way, grouped: Any, keys: Any, values: Any) -> float:
    """Microseconds of a call in a graph: the host's time for cuDNN is longer than the GPU's. Infinite if
    PyTorch refuses."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        _attend(way, grouped, keys, values)  # libraries take their memory
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(TIMED_CALLS):
                _attend(way, grouped, keys, values)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        return float("inf")
    times = []
    for _ in range(TIMED_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / TIMED_CALLS * 1e3)
    return min(times)


def fast_ways(options: argparse.Namespace, cache: Cache) -> list[Way]:
    """PyTorch's ways whose calls take at most FAST times the least. All ways differ by ten times; those
    whose calls take as long may differ in the loop, where the model's products lie between calls.

    Raises:
        RuntimeError: if PyTorch refuses all of them.
    """
    group = options.query_heads // options.kv_heads
    shape = (options.rows, options.kv_heads, group, options.head_dim)
    q = torch.zeros(shape, device="cuda", dtype=DTYPE)
    times = {way: _call_us(way, q, *cache.layer(0)) for way in WAYS}
    for way, time in times.items():
        print(f" a call of {name_of(way)}: {time:.0f} us")
    if min(times.values()) == float("inf"):
        raise RuntimeError("PyTorch refuses every way of local attention")
    return [way for way in WAYS if times[way] <= FAST * min(times.values())]


def _append(keys: Any, values: Any, position: Any, k: Any, v: Any) -> None:
    keys.index_copy_(2, position, k.unsqueeze(2))
    values.index_copy_(2, position, v.unsqueeze(2))


class LocalAttention:
    """Over keys and values on this GPU. A graph has one length: that of the whole cache, which is a
    few tokens more than there are. Without a way it is exact, and slow."""

    def __init__(self, options: argparse.Namespace, cache: Cache, way: Way | None) -> None:
        self._options = options
        self._cache = cache
        self._way = way
        self.position = torch.full((1,), options.prompt_tokens, device="cuda", dtype=torch.long)
        self._columns = torch.arange(cache.capacity, device="cuda")
        self._append = fused(options, _append)

    def start(self) -> None:
        self.position.fill_(self._options.prompt_tokens)

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        options = self._options
        keys, values = self._cache.layer(layer)
        self._append(keys, values, self.position, k, v)
        # The query heads of a KV head as its queries: each key and value is read once.
        grouped = q.reshape(options.rows, options.kv_heads, -1, options.head_dim)
        if self._way is not None:
            return _attend(self._way, grouped, keys, values)
        mask = (self._columns <= self.position)[None, None, None]
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)

    def end(self) -> None:
        self.position.add_(1)


class AttndAttention:
    """Answered by attnd: the stream brings q, k and v, and waits."""

    def __init__(self, options: argparse.Namespace, session: Any) -> None:
        self._session = session
        shape = (options.rows, options.query_heads, options.head_dim)
        self._out = torch.empty(shape, device="cuda", dtype=DTYPE)

    def start(self) -> None:
        pass

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        self._session.layer(layer, q, k, v, self._out)
        return self._out

    def end(self) -> None:
        pass


class CheckedAttention:
    """attnd's, with the largest difference from local attention of each layer."""

    def __init__(self, answered: AttndAttention, local: LocalAttention, layers: int) -> None:
        self._answered = answered
        self._local = local
        self.errors = torch.zeros(layers, device="cuda")

    def start(self) -> None:
        self._local.start()
        self.errors.zero_()  # warming up left NaN

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        out = self._answered(layer, q, k, v)
        expected = self._local(layer, q, k, v).reshape(out.shape).float()
        difference = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        # A comparison with NaN is false: NaN counts as an error of 1e9.
        worst = torch.nan_to_num(difference, nan=1e9).max()
        self.errors[layer] = torch.maximum(self.errors[layer], worst)
        return out

    def end(self) -> None:
        self._local.end()


class CapturedAttention:
    """Another one's, over a trained model's queries, keys and values in the place of the loop's own."""

    def __init__(self, options: argparse.Namespace, answered: Any) -> None:
        self._answered = answered
        self._rows = options.rows
        self._decoded = options.capture.decoded
        self._step = torch.zeros(1, device="cuda", dtype=torch.long)
        self._token: list[torch.Tensor] = []

    def start(self) -> None:
        self._step.zero_()
        self._answered.start()

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        if layer == 0:
            self._token = [
                of_all.index_select(0, self._step).repeat(self._rows, 1, 1)
                for of_all in self._decoded
            ]
        return self._answered(layer, *self._token)

    def end(self) -> None:
        self._step.add_(1)
        self._answered.end()
