#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates with a model of Transformers, with attention computed here and answered by attnd.

    examples/transformers_generate.py --target unix:/run/user/1000/attnd/attnd.sock

prints the tokens of both, the tokens a second of both, and what the server read. The prompt is text
if the model's folder has a tokenizer, otherwise token ids; docs/MODEL_SERVER.md is the guide.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache, StaticCache

import attnd.transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, help="the server: unix:PATH or HOST:PORT")
    add("--model", default=str(ROOT / "models/nano-llama"), help="a Hugging Face folder")
    add("--config", help="a config.json in place of --model: random weights of that shape")
    add("--policy", action="append", help="may come several times; default dense and error-target")
    add("--prompt", help="text, for a folder with a tokenizer")
    add("--token-ids", help="a prompt's token ids, separated by commas")
    add("--prompt-tokens", type=int, default=2048, help="without a prompt: tokens of a stored text")
    add("--new-tokens", type=int, default=32, help="tokens to generate (default 32)")
    add("--dtype", choices=DTYPES, default="fp32", help="of the model (default fp32)")
    add(
        "--memory",
        action="store_true",
        help="steps through memory shared with the server; of a model on a GPU by its stream",
    )
    add("--cuda-graphs", action="store_true", help="with --memory: tokens are CUDA graphs")
    add("--again", type=int, default=0, help="further answers by attnd, each with a new cache")
    add("--local-static", action="store_true", help="local, compiled, over a static cache, too")
    add("--local-again", action="store_true", help="local once more, last: does its place matter?")
    add("--threads", type=int, help="of PyTorch on the CPU (default: as many as cores)")
    add("--device", default="cpu", help="of the model (default cpu)")
    return parser.parse_args()


def prompt_of(options: argparse.Namespace, tokenizer: Any) -> torch.Tensor:
    """[1, tokens] ids of the prompt."""
    if options.token_ids:
        return torch.tensor([[int(token) for token in options.token_ids.split(",")]])
    if options.prompt is None:
        return stored_text(options.prompt_tokens)
    if tokenizer is None:
        raise SystemExit(f"--prompt: {options.model} has no tokenizer, give --token-ids")
    return tokenizer(options.prompt, return_tensors="pt").input_ids


def stored_text(tokens: int) -> torch.Tensor:
    """The beginning of a text that the nano models read, of 16,384 tokens; longer ones repeat it."""
    with np.load(ROOT / "models/nano-llama/nano_eval.npz") as texts:
        sizes = sorted(int(name.split("_")[1]) for name in texts if name.startswith("tokens_"))
        size = next((size for size in sizes if size >= tokens), sizes[-1])
        text = np.resize(texts[f"tokens_{size}"][0], tokens)
        return torch.from_numpy(text.astype(np.int64))[None]


def model_of(options: argparse.Namespace) -> Any:
    dtype = DTYPES[options.dtype]
    if options.config is None:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        return model.to(options.device).eval()
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(options.config), dtype=dtype
        )
    return model.eval()


def tokenizer_of(options: argparse.Namespace) -> Any:
    """The folder's tokenizer; None if it has none."""
    if options.config is not None:
        return None
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((pathlib.Path(options.model) / name).exists() for name in names):
        return None
    return AutoTokenizer.from_pretrained(options.model)


@dataclasses.dataclass(frozen=True)
class Answer:
    """New tokens, and seconds: for the prompt with the server's index over it, and for the rest."""

    tokens: list[int]
    prompt_s: float
    tokens_s: float


def generate(model: Any, ids: torch.Tensor, cache: Cache, new_tokens: int) -> Answer:
    """Chooses tokens greedily."""
    begun = time.monotonic()
    with torch.no_grad():  # a static cache is written to by generate(), which is in no other mode
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    if isinstance(cache, attnd.transformers.AttndCache):
        cache.end_prompt()
    if ids.is_cuda:
        torch.cuda.synchronize()  # local attention has only been launched
    prompt_done = time.monotonic()
    answer = model.generate(
        ids,
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    done = time.monotonic()
    new = answer[0, ids.shape[1] :].tolist()
    return Answer(new, prompt_done - begun, done - prompt_done)


def show(title: str, answer: Answer, tokenizer: Any) -> None:
    said = answer.tokens if tokenizer is None else repr(tokenizer.decode(answer.tokens))
    speed = len(answer.tokens) / answer.tokens_s
    print(f"{title}: prompt {answer.prompt_s:.2f} s, then {speed:.1f} tokens/s\n  {said}")


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = tokenizer_of(options)
    model = model_of(options)
    ids = prompt_of(options, tokenizer).to(options.device)
    print(f"prompt: {ids.shape[1]} tokens")

    # What is made once, such as the libraries' memory, is not timed.
    generate(model, ids[:, :64], DynamicCache(), 2)

    def local() -> Answer:
        return generate(model, ids, DynamicCache(), options.new_tokens)

    show("local", local(), tokenizer)
    for policy in options.policy or ["dense", "error-target:tolerance=0.1"]:
        with attnd.transformers.attach(
            model,
            options.target,
            policy=policy,
            memory=options.memory,
            cuda_graphs=options.cuda_graphs,
        ) as attachment:
            for _ in range(1 + options.again):  # the first one makes memory for the others, too
                with attachment.new_cache() as cache:
                    show(policy, generate(model, ids, cache, options.new_tokens), tokenizer)
            print(f"  {attachment.stats}")
    if options.local_again:
        show("local", local(), tokenizer)
    if options.local_static:
        for title in ("local, static, with compiling", "local, static"):
            tokens = ids.shape[1] + options.new_tokens
            cache = StaticCache(config=model.config, max_cache_len=tokens)
            show(title, generate(model, ids, cache, options.new_tokens), tokenizer)


if __name__ == "__main__":
    main()
