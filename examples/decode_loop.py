#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decodes with a model of Llama's shape on a GPU, its steps in a CUDA graph: with attention computed
on the GPU, and answered by attnd on the same machine, where the graph itself waits for each answer.

    examples/decode_loop.py --target unix:/run/user/1000/attnd/attnd.sock --rows 4 --prompt-tokens 131072

prints the milliseconds of a token each way. Weights, prompts, keys and values are random, so only times
mean something; rotation is left out. The prompt's keys and values are made on the GPU. With `--keys` the
prompt's keys and values and each token's queries, keys and values are a trained model's, the same in all
layers and rows, from a file of bench/pages/page_trace_capture.py. `--check` takes a small model instead,
and compares every answer with attention computed beside it: any difference beyond --check-bound is a
failure. `--round-trips` measures empty answers alone. docs/MODEL_SERVER.md, "From a GPU", is the guide.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import attnd
from decode_attention import (
    AttndAttention,
    Cache,
    CapturedAttention,
    CheckedAttention,
    LocalAttention,
    NoAttention,
    Way,
    fast_ways,
    fused,
    name_of,
)
from decode_prompts import DTYPE, Capture, upload

WEIGHT_STD = 0.02
GIB = 1 << 30
ROUND_TRIPS_MAX = 10_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", help="the server, unix:PATH, with --allow-client-memory; not for local alone")
    add("--attention", default="local,attnd", help="ways to time: local, attnd (default both)")
    add("--policy", default="error-target:tolerance=0.02", help="attnd's")
    add("--leaf-tokens", type=int, default=0, help="of the policy's tree (default: the server's)")
    add("--fan", type=int, default=0, help="likewise")
    add("--rows", type=int, default=1, help="sequences of the batch (default 1)")
    add("--prompt-tokens", type=int, default=32768, help="of each row (default 32768)")
    add("--new-tokens", type=int, default=64, help="tokens that are timed (default 64)")
    # The first passes bring the server's device copies.
    add("--warm-up", type=int, default=3, help="tokens generated ahead of them (default 3)")
    add("--hidden", type=int, default=4096)
    add("--intermediate", type=int, default=14336)
    add("--layers", type=int, default=32)
    add("--query-heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--vocabulary", type=int, default=128256)
    add("--distinct-layers", type=int, help="layers with contents of their own; others repeat them")
    add("--spin-us", type=int, default=1000, help="attnd looks for a layer without pause so long")
    add("--timeout-s", type=float, default=300, help="of a layer and of calls (default 300)")
    add("--chunk-tokens", type=int, default=0, metavar="N",
        help="upload N tokens of all layers at a time, for a server whose memory the prompts exceed")
    add("--keys", help="a capture of one layer, of the loop's heads; default: random keys")
    add("--seed", type=int, default=0)
    add("--eager", action="store_true", help="without torch.compile, which fuses what lies between products")
    add("--no-graph", action="store_true", help="enqueue each layer instead")
    add("--in-turn", action="store_true", help="begin a pass when the one before has ended")
    add("--round-trips", type=int, default=0, metavar="N", help="measure N empty ones, no more")
    add("--check", action="store_true", help="compare answers, of a small model and policy dense")
    add("--check-bound", type=float, default=0.02, help="of |difference| / |out| (default 0.02)")
    options = parser.parse_args()
    if options.check:
        small = {
            "hidden": 512, "intermediate": 1024, "layers": 4, "query_heads": 8, "kv_heads": 2,
            "head_dim": 128, "vocabulary": 1000, "prompt_tokens": 1500, "new_tokens": 16, "rows": 3,
            "attention": "attnd", "policy": "dense",
        }  # fmt: skip
        vars(options).update(small)
    ways = options.attention.split(",")
    if not set(ways) <= {"local", "attnd"}:
        parser.error(f"--attention is {options.attention}; allowed are local, attnd, and both")
    if options.check and options.keys:
        parser.error("--check has random keys: leave --keys out")
    if options.check and (options.leaf_tokens or options.fan):
        parser.error("--check has no tree: leave --leaf-tokens and --fan out")
    if not 0 <= options.round_trips <= ROUND_TRIPS_MAX:
        parser.error(
            f"--round-trips is {options.round_trips}; allowed are 0..{ROUND_TRIPS_MAX}, 0 for none"
        )
    if ("attnd" in ways or options.round_trips) and not options.target:
        parser.error("--target is missing: attnd answers there")
    options.distinct_layers = options.distinct_layers or options.layers
    if not 1 <= options.distinct_layers <= options.layers:
        parser.error(f"--distinct-layers is {options.distinct_layers}; allowed are 1..--layers")
    if options.warm_up < 1 or options.new_tokens < 1:
        parser.error("--warm-up and --new-tokens are at least 1")
    if options.chunk_tokens < 0:
        parser.error(f"--chunk-tokens is {options.chunk_tokens}; allowed are 0, for whole layers, and more")
    return options


# The model: what a serving engine has.


class Weights:
    """Of a decoder of Llama's shape, random."""

    def __init__(self, options: argparse.Namespace) -> None:
        generator = torch.Generator("cuda").manual_seed(options.seed)

        def random(*shape: int) -> torch.Tensor:
            weight = torch.empty(*shape, device="cuda", dtype=DTYPE)
            return weight.normal_(0, WEIGHT_STD, generator=generator)

        heads = options.query_heads + 2 * options.kv_heads
        self.embedding = random(options.vocabulary, options.hidden)
        self.head = random(options.vocabulary, options.hidden)
        self.norm = torch.ones(options.hidden, device="cuda", dtype=DTYPE)
        self.layers = [
            (
                random(heads * options.head_dim, options.hidden),
                random(options.hidden, options.query_heads * options.head_dim),
                random(2 * options.intermediate, options.hidden),
                random(options.hidden, options.intermediate),
            )
            for _ in range(options.layers)
        ]


def norm_of(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.shape, norm)


def projected(x: torch.Tensor, norm: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    return norm_of(x, norm) @ qkv.T


def behind_attention(
    x: torch.Tensor, attended: torch.Tensor, output: torch.Tensor, norm: torch.Tensor,
    gate_up: torch.Tensor, down: torch.Tensor,
) -> torch.Tensor:
    x = x + attended @ output.T
    gate, up = (norm_of(x, norm) @ gate_up.T).chunk(2, dim=1)
    return x + (F.silu(gate) * up) @ down.T


def likeliest(x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return (norm_of(x, norm) @ head.T).argmax(-1)


class Decoder:
    """A step of the batch: a token of each row, from `tokens` to `tokens`."""

    def __init__(self, options: argparse.Namespace, weights: Weights, attention: Any) -> None:
        self._options = options
        self._weights = weights
        self._attention = attention
        self._projected = fused(options, projected)
        self._behind_attention = fused(options, behind_attention)
        self._likeliest = fused(options, likeliest)
        self.tokens = torch.zeros(options.rows, device="cuda", dtype=torch.long)

    def start(self) -> None:
        """Ahead of a text's first step."""
        self.tokens.zero_()
        self._attention.start()

    def step(self) -> None:
        options, weights = self._options, self._weights
        shape = (options.rows, -1, options.head_dim)
        sizes = [options.query_heads, options.kv_heads, options.kv_heads]
        x = F.embedding(self.tokens, weights.embedding)
        for layer, (qkv, output, gate_up, down) in enumerate(weights.layers):
            # Views of one product: tokens lie apart.
            q, k, v = self._projected(x, weights.norm, qkv).view(*shape).split(sizes, dim=1)
            attended = self._attention(layer, q, k, v).reshape(options.rows, -1)
            x = self._behind_attention(x, attended, output, weights.norm, gate_up, down)
        self.tokens.copy_(self._likeliest(x, weights.norm, weights.head))
        self._attention.end()


# The loop.


def upload_all(options: argparse.Namespace, client: attnd.Client, shape: Any) -> list[int]:
    """Sequences with the rows' prompts; the rows side by side."""
    model = attnd.Model("examples/decode_loop", shape)
    sizes = attnd.TreeOptions(options.leaf_tokens, options.fan)
    tree = sizes if sizes != attnd.TreeOptions() else None

    def one(row: int) -> tuple[int, float]:
        opened = client.open_sequence(model, policy=options.policy, tree=tree)
        appended = upload(options, client, opened.sequence_id, row)
        return opened.sequence_id, appended.index_build_us / 1e6

    start = time.perf_counter()
    with ThreadPoolExecutor(min(options.rows, 8)) as threads:
        done = list(threads.map(one, range(options.rows)))
    seconds = time.perf_counter() - start
    token_bytes = 2 * options.layers * options.kv_heads * options.head_dim * 2
    size = options.rows * options.prompt_tokens * token_bytes / GIB
    built = sum(seconds for _, seconds in done)
    print(
        f"uploaded {size:.2f} GiB in {seconds:.1f} s, {size / seconds:.2f} GiB/s; "
        f"indexes took {built:.1f} s of it, summed over the rows",
        flush=True,
    )
    return [sequence for sequence, _ in done]


@contextlib.contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[Any, list[int]]]:
    """A session, and sequences with the rows' prompts."""
    shape = attnd.ModelShape(
        options.layers, options.query_heads, options.kv_heads, options.head_dim, dtype="bf16"
    )
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(attnd.Client(options.target, timeout_s=options.timeout_s))
        sequences = upload_all(options, client, shape)
        torch.cuda.empty_cache()  # the server may want the memory
        for sequence in sequences:
            stack.callback(client.close_sequence, sequence)
        session = stack.enter_context(
            client.cuda_session(shape, query_tokens_max=options.rows, spin_us=options.spin_us)
        )
        yield session, sequences


@dataclass
class Times:
    """Of the timed tokens.

    Attributes:
        token_ms: on the GPU, from the end of the step before to its own.
        begin_ms, finish_ms: the host's part of each: declaring the pass; from the replay to the end
            of the last layer, of the step before unless --in-turn.
        passes: what the server told of each.
    """

    token_ms: list[float]
    begin_ms: list[float]
    finish_ms: list[float]
    passes: list[Any]


def decoder_with(options: argparse.Namespace, weights: Weights, attention: Any) -> Decoder:
    if options.capture is not None:
        attention = CapturedAttention(options, attention)
    return Decoder(options, weights, attention)


def stepper(options: argparse.Namespace, decoder: Decoder) -> Any:
    """A function that enqueues a step."""
    if options.no_graph:
        return decoder.step
    torch.cuda.synchronize()  # what the step reads is made on another stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decoder.step()  # libraries take their memory; outside a pass attnd's layers wait for nothing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    return graph.replay


def decode(options: argparse.Namespace, decoder: Decoder, session: Any, sequences: Any) -> Times:
    """Decodes warm_up + new_tokens tokens. The host declares and enqueues a step while the GPU is at
    the one before, as engines do that schedule ahead: the GPU waits for the server alone."""
    enqueue = stepper(options, decoder)
    decoder.start()
    times = Times([], [], [], [])
    count = options.warm_up + options.new_tokens
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    torch.cuda.synchronize()
    under_way = []
    for index, end in enumerate(ends):
        position = options.prompt_tokens + index
        start = time.perf_counter()
        if session is not None:
            under_way.append(session.begin_pass([attnd.Row(one, position) for one in sequences]))
        begun = time.perf_counter()
        enqueue()
        end.record()
        if len(under_way) > (0 if options.in_turn else 1):
            under_way[0].finish()
            times.passes.append(under_way.pop(0))
        times.begin_ms.append((begun - start) * 1e3)
        times.finish_ms.append((time.perf_counter() - begun) * 1e3)
    for whole in under_way:
        whole.finish()
        times.passes.append(whole)
    torch.cuda.synchronize()  # the tokens are there
    for measured in (times.begin_ms, times.finish_ms, times.passes):
        del measured[: options.warm_up]
    for index in range(options.warm_up, count):
        times.token_ms.append(ends[index - 1].elapsed_time(ends[index]))
    return times


def decode_locally(options: argparse.Namespace, weights: Weights) -> tuple[str, Times]:
    """By the way that is fastest in some tokens of the loop: its name, and its times."""
    cache = Cache(options)

    def times_of(way: Way, options: argparse.Namespace) -> Times:
        local = LocalAttention(options, cache, way)
        return decode(options, decoder_with(options, weights, local), None, ())

    # Within what the cache and a capture have.
    counts = {"warm_up": min(3, options.warm_up), "new_tokens": min(16, options.new_tokens)}
    few = argparse.Namespace(**{**vars(options), **counts})
    ms = {way: statistics.median(times_of(way, few).token_ms) for way in fast_ways(options, cache)}
    for way, token_ms in ms.items():
        print(f" a token by {name_of(way)}: {token_ms:.3f} ms")
    fastest = min(ms, key=lambda way: ms[way])
    return name_of(fastest), times_of(fastest, options)


def report(name: str, options: argparse.Namespace, times: Times, rest_ms: float) -> float:
    """Prints; returns the median of a token."""
    ms = sorted(times.token_ms)
    median = statistics.median(ms)
    p10, p90, p99 = ms[len(ms) // 10], ms[-1 - len(ms) // 10], ms[-1 - len(ms) // 100]
    line = f"{name:>6}: {median:.3f} ms a token (p10 {p10:.3f}, p90 {p90:.3f}, p99 {p99:.3f})"
    if rest_ms:
        line += f"; attention {(median - rest_ms) / options.layers * 1e3:.1f} us a layer"
    print(line, flush=True)
    return median


def report_server(options: argparse.Namespace, times: Times) -> None:
    """What attnd told of its passes."""
    stats = [row.stats for whole in times.passes for row in whole.rows]
    read = sum(one.zone_tokens + one.exact_tokens for one in stats)
    seen = read + sum(one.estimated_tokens + one.dropped_tokens for one in stats)
    errors = [
        one.predicted_error_mean for one in stats if one.predicted_error_mean is not None
    ]
    layers = options.layers * len(times.passes)
    engine = sum(whole.engine_us for whole in times.passes) / layers
    queue = sum(whole.queue_us for whole in times.passes) / layers
    error = f"{statistics.mean(errors):.4f}" if errors else "none"
    print(
        f"        the server: engine {engine:.1f} us a layer, queue {queue:.1f}; "
        f"predicted error {error}, {read / max(seen, 1):.2%} of the tokens read\n"
        f"        the host: begin_pass {statistics.median(times.begin_ms):.3f} ms, from the replay to "
        f"a pass's end {statistics.median(times.finish_ms):.3f} ms"
    )


def check(
    options: argparse.Namespace, weights: Weights, answered: AttndAttention, session: Any,
    sequences: list[int],
) -> bool:
    """Whether every layer of every pass is near local attention."""
    local = LocalAttention(options, Cache(options), way=None)
    checked = CheckedAttention(answered, local, options.layers)
    decoder = Decoder(options, weights, checked)
    enqueue = stepper(options, decoder)
    decoder.start()
    for index in range(options.new_tokens):
        rows = [attnd.Row(one, options.prompt_tokens + index) for one in sequences]
        whole = session.begin_pass(rows)
        enqueue()
        whole.finish()
    torch.cuda.synchronize()
    errors = checked.errors.tolist()
    largest = max(errors)
    good = 0 < largest <= options.check_bound
    print(
        f"{'OK' if good else 'FAILED'}: {options.new_tokens} passes of {options.layers} layers and "
        f"{options.rows} rows; largest difference {largest:.5f}, allowed {options.check_bound}; "
        f"by layer {[round(error, 5) for error in errors]}"
    )
    return good


def measure_round_trips(options: argparse.Namespace) -> None:
    """What an empty answer takes, beside the server and in time slices (docs/OPERATIONS.md)."""
    with attnd.Client(options.target, timeout_s=options.timeout_s) as client:
        measured = [client.measure_round_trip() for _ in range(options.round_trips)]
        sharing = client.get_server_info().gpu_sharing
    for what in ("device_us", "stream_us"):
        times = sorted(getattr(one, what) for one in measured)
        middle = statistics.median(times)
        print(f"{what}: median {middle:.1f}, least {times[0]:.1f}, greatest {times[-1]:.1f}")
    slices = sum(one.time_slices for one in measured)
    print(f"time slices: {slices} of {len(measured)}; by MPS's pipe the server says {sharing}")


def main() -> int:
    options = arguments()
    if options.round_trips:
        measure_round_trips(options)
        return 0
    torch.set_grad_enabled(False)
    options.capture = Capture(options.keys, options) if options.keys else None
    weights = Weights(options)
    ways = options.attention.split(",")
    print(
        f"{torch.cuda.get_device_name()}: {options.layers} layers, {options.rows} x "
        f"{options.prompt_tokens} tokens, {'no graph' if options.no_graph else 'graph'}"
    )
    rest_ms = 0.0
    if not options.check:
        decoder = decoder_with(options, weights, NoAttention())
        rest_ms = report("none", options, decode(options, decoder, None, ()), 0)
    if "local" in ways:
        name, times = decode_locally(options, weights)
        print(f" local: {name}")
        report("local", options, times, rest_ms)
        torch.cuda.empty_cache()
    if "attnd" not in ways:
        return 0
    with opened(options) as (session, sequences):
        met = "GPU memory" if session.in_gpu_memory else "the host's memory"
        print(f"the loop's kernels and the server's meet in {met}")
        attention = AttndAttention(options, session)
        if options.check:
            return 0 if check(options, weights, attention, session, sequences) else 1
        decoder = decoder_with(options, weights, attention)
        times = decode(options, decoder, session, sequences)
        report("attnd", options, times, rest_ms)
        report_server(options, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
