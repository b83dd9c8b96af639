# SPDX-License-Identifier: Apache-2.0
"""What a token of generate() takes when attnd answers, through messages and through shared memory.

Starts a server and attaches two copies of a model, one each way; both go on with the same text in
blocks that take turns. Prints the medians of a token's time and of what the model waited for a
layer, the server's own time of that, and the ratio of each round's blocks. Tokens of both must be
equal.

  PYTHONPATH=client/python python bench/transformers_memory.py --server build/bin/attnd
  PYTHONPATH=client/python python bench/transformers_memory.py --random-layers 32
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from typing import Any

import numpy as np
import torch
import transformers

import attnd.transformers
from attnd.eval import server as servers

ROOT = pathlib.Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", type=pathlib.Path, default=pathlib.Path("build/bin/attnd"))
    parser.add_argument("--model", default=str(ROOT / "models/nano-llama"))
    parser.add_argument(
        "--random-layers", type=int, help="in place of it, a random Llama of so many small layers"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--policy", default="error-target:tolerance=0.1")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of each row, to 16,384")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--block", type=int, default=16, help="tokens of a block")
    return parser.parse_args()


def load(options: argparse.Namespace) -> Any:
    if not options.random_layers:
        return transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=DTYPES[options.dtype]
        ).eval()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=transformers.AutoConfig.from_pretrained(options.model).vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=options.random_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
    )
    return transformers.LlamaForCausalLM(config).to(DTYPES[options.dtype]).eval()


class Way:
    """A copy of the model, and the text so far."""

    def __init__(self, options: argparse.Namespace, target: str, memory: bool) -> None:
        self.model = load(options)
        self._block = options.block
        self.attachment = attnd.transformers.attach(
            self.model, target, policy=options.policy, memory=memory
        )
        self._cache = self.attachment.new_cache()
        with np.load(ROOT / "models/nano-llama/nano_eval.npz") as texts:
            text = texts["tokens_16384"][: options.rows, : options.prompt_tokens]
        self.ids = torch.from_numpy(text.astype(np.int64))

    def run(self) -> tuple[float, float, float]:
        """Milliseconds a token, and microseconds a layer: waited, and of that the server's."""
        self.attachment.reset_stats()
        begun = time.perf_counter()
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self._cache,
            do_sample=False,
            min_new_tokens=self._block,
            max_new_tokens=self._block,
            pad_token_id=0,
        )
        token = (time.perf_counter() - begun) / self._block
        stats = self.attachment.stats
        layers = stats.answers or 1
        return token * 1e3, stats.wait_s / layers * 1e6, stats.server_s / layers * 1e6


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    with servers.running(options.server, ["--allow-client-memory"]) as target:
        run(target, options)


def run(target: str, options: argparse.Namespace) -> None:
    ways = {"messages": Way(options, target, False), "memory": Way(options, target, True)}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        names = list(ways) if number % 2 else list(ways)[::-1]
        for name in names:
            found = ways[name].run()
            if number:  # the first block has the prompt
                times[name].append(found)
        assert torch.equal(ways["messages"].ids, ways["memory"].ids), "tokens differ"
    print(
        f"{options.rows} rows of {options.prompt_tokens} tokens, "
        f"{ways['memory'].model.config.num_hidden_layers} layers, {options.dtype}, "
        f"{options.policy}, {options.rounds} rounds of {options.block} tokens; medians"
    )
    for name, blocks in times.items():
        token, waited, server = map(statistics.median, zip(*blocks))
        print(
            f"  {name:8} {token:8.2f} ms a token; us a layer: {waited:7.1f} waited, "
            f"{server:7.1f} of them the server"
        )
    for what, column in (("a token", 0), ("waited", 1)):
        pairs = zip(times["memory"], times["messages"])
        ratios = sorted(ours[column] / theirs[column] for ours, theirs in pairs)
        print(
            f"  memory / messages, {what}: {statistics.median(ratios):.2f} "
            f"[{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
        )
    for way in ways.values():
        way.attachment.close()


if __name__ == "__main__":
    main()
