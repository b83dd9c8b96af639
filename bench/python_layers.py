# SPDX-License-Identifier: Apache-2.0
"""What a layer takes from Python, by steps of single layers and by passes, beside one another.

Starts a server, fills a sequence for each way, and decodes tokens in blocks that take turns. Prints
the median time of a layer by the clock and of this process's processor time, and the ratio of each
round's blocks. The keys are random: they matter to no time measured here.

  PYTHONPATH=client/python python bench/python_layers.py --server build/bin/attnd
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import numpy as np

import attnd
from attnd.eval import server as servers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", type=pathlib.Path, default=pathlib.Path("build/bin/attnd"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256, help="of each sequence's prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=10, help="tokens of a block")
    return parser.parse_args()


class Decoder:
    """One session with sequences of its own."""

    def __init__(self, client: attnd.Client, options: argparse.Namespace) -> None:
        self._layers = options.layers
        shape = attnd.ModelShape(
            layers=options.layers, query_heads=32, kv_heads=8, head_dim=128, dtype="bf16"
        )
        rng = np.random.default_rng(1)
        normal = lambda *extents: rng.standard_normal(extents).astype(attnd.BF16)  # noqa: E731
        self._sequences = []
        for _ in range(options.rows):
            opened = client.open_sequence(attnd.Model("bench", shape))
            prompt = (normal(options.tokens, 8, 128), normal(options.tokens, 8, 128))
            chunks = attnd.layer_chunks([prompt] * options.layers)
            client.append_kv(opened.sequence_id, chunks)
            self._sequences.append(opened.sequence_id)
        self._q, self._k, self._v = (normal(options.rows, heads, 128) for heads in (32, 8, 8))
        self._position = options.tokens
        self._session = client.decode_session()

    def _rows(self) -> list[attnd.Row]:
        return [attnd.Row(s, self._position, token_ids=[7]) for s in self._sequences]

    def steps(self) -> None:
        rows = self._rows()
        for layer in range(self._layers):
            self._session.step(layer, rows, self._q, self._k, self._v)
        self._position += 1

    def a_pass(self) -> None:
        whole = self._session.begin_pass(self._layers, self._rows())
        for _ in range(self._layers):
            whole.step(self._q, self._k, self._v)
        self._position += 1

    def close(self) -> None:
        self._session.close()


def main() -> None:
    options = parse()
    with servers.running(options.server) as target:
        run(target, options)


def run(target: str, options: argparse.Namespace) -> None:
    times: dict[str, list[tuple[float, float]]] = {"steps": [], "pass": []}
    with attnd.Client(target, timeout_s=60) as client:
        single, passes = Decoder(client, options), Decoder(client, options)
        ways = [("steps", single.steps), ("pass", passes.a_pass)]
        for number in range(options.rounds + 1):
            for name, way in ways if number % 2 else ways[::-1]:
                begun, processor = time.perf_counter(), time.process_time()
                for _ in range(options.block):
                    way()
                layers = options.block * options.layers
                clock = (time.perf_counter() - begun) / layers * 1e6
                spent = (time.process_time() - processor) / layers * 1e6
                if number:  # the first round warms up
                    times[name].append((clock, spent))
        single.close()
        passes.close()
    print(
        f"{options.rows} rows of {options.tokens} tokens, {options.layers} layers, "
        f"{options.rounds} rounds of {options.block} tokens; microseconds a layer, medians"
    )
    for name, found in times.items():
        clock, spent = (statistics.median(column) for column in zip(*found))
        print(f"  {name:6} {clock:8.1f} by the clock, {spent:8.1f} of this process's processor time")
    ratios = [p / s for (p, _), (s, _) in zip(times["pass"], times["steps"])]
    processor = [p / s for (_, p), (_, s) in zip(times["pass"], times["steps"])]
    print(
        f"  pass / steps {statistics.median(ratios):.3f} [{min(ratios):.3f} .. {max(ratios):.3f}] "
        f"by the clock, {statistics.median(processor):.3f} of processor time"
    )


if __name__ == "__main__":
    main()
