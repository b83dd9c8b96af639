# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's dense decode attention, the peer that attnd's GPU figures are held against.

One query token a row, 32 query heads, 8 KV heads, bf16; scaled_dot_product_attention with
FlashAttention and with cuDNN, replayed from a CUDA graph. Prints microseconds: the median of 30
replays, and the mean of 30 back to back. Needs a GPU and PyTorch.

    python3 bench/peers/sdpa_decode.py [--head_dim 128] [--json FILE]
"""

import argparse
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = [(4, 131072), (1, 131072), (8, 32768), (1, 32768), (32, 32768), (1, 1048576)]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
REPLAYS = 30


def captured(backend, q, k, v):
    """A CUDA graph of one decode step, or None if the backend refuses the shape."""

    def step():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph
    except RuntimeError as error:
        print(f"    refused: {str(error).splitlines()[0]}")
        return None


def replay_us(graph):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for i in range(REPLAYS + 10):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 10:
            times.append(start.elapsed_time(end) * 1000)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return statistics.median(times), start.elapsed_time(end) * 1000 / REPLAYS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()
    figures = {}
    for rows, tokens in SHAPES:
        k, v = (
            torch.randn(rows, 8, tokens, args.head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        q = torch.randn(rows, 32, 1, args.head_dim, device="cuda", dtype=torch.bfloat16)
        for name, backend in BACKENDS.items():
            graph = captured(backend, q, k, v)
            if graph is None:
                continue
            median, mean = replay_us(graph)
            figures[f"{rows}x{tokens} {name}"] = {"median_us": median, "back_to_back_us": mean}
            print(f"  {rows} x {tokens:6d} {name:6s} median {median:8.1f} us  each of 30 {mean:8.1f} us",
                  flush=True)
    if not figures:
        raise SystemExit("no peer was timed: PyTorch refuses every shape")
    copied = torch.empty(1 << 32, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(copied)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        other.copy_(copied)
    start.record()
    for _ in range(10):
        other.copy_(copied)
    end.record()
    torch.cuda.synchronize()
    rate = 2 * 10 * copied.numel() / (start.elapsed_time(end) / 1000) / 1e12
    figures["copy_tb_s"] = rate
    print(f"  device-to-device copy, bytes read and written: {rate:.2f} TB/s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
