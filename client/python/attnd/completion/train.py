# SPDX-License-Identifier: Apache-2.0
"""Trains a model's feature maps by distillation and writes them for the server's --feature-maps.

    python -m attnd.completion.train --model models/nano-llama --texts models/training \\
        --prefill 16384 --seed 1 --out models/nano-llama/feature_maps_16384.safetensors

The model is frozen. Each step runs it over a new text and logs the queries behind the prefill and
the keys of its middle; the maps learn the scores (Top-K with Linear-Attention Completion,
appendices B, J and K). Then each query head is measured on held-out texts: it is completed if its
answers with the maps have a smaller error than those of the retrieved tokens alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Callable

import numpy as np
import torch
from torch import Tensor

from attnd.completion.benefit import Zones, measure
from attnd.completion.capture import Captured, Teacher
from attnd.completion.loss import LossWeights, distillation_loss
from attnd.completion.maps import ModelMaps, student_logits

LEARNING_RATE_FLOOR = 0.02
WARM_UP_STEPS = 100
GRADIENT_NORM_MAX = 1.0
# Texts of the generator: questions behind the haystack, as in the evaluation sets.
SLOT_TOKENS = 8
HELD_OUT_SEED = 1 << 20  # added to the seed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="Hugging Face folder")
    parser.add_argument(
        "--texts",
        type=pathlib.Path,
        required=True,
        help=".npy file of token ids [texts, tokens], or a folder with the generator grammar.py",
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--report", type=pathlib.Path, help="file for the figures, JSON")
    parser.add_argument("--prefill", type=int, default=16384, help="tokens of a text")
    parser.add_argument("--queries", type=int, default=128, help="its last tokens, whose are used")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the training by then")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--inner", type=int, default=128)
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.01, help="of all tokens, that is read")
    parser.add_argument("--held-out", type=int, default=16, help="texts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device
    )
    return parser.parse_args()


def fingerprint(folder: pathlib.Path) -> str:
    """That of attnd.nano.Model.load."""
    digests = (
        hashlib.sha256((folder / name).read_bytes()).digest()
        for name in ("config.json", "model.safetensors")
    )
    return hashlib.sha256(b"".join(digests)).hexdigest()


def generated(folder: pathlib.Path, options: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """Texts of the project's generator, one task after another."""
    sys.path.insert(0, str(folder))
    grammar = importlib.import_module("grammar")
    texts = grammar.TextGenerator(grammar.read_successors(options.device), seed=seed)
    questions = options.queries // SLOT_TOKENS
    for task in itertools.cycle(grammar.Task):
        yield texts.task_batch(1, options.prefill, task, questions=questions).tokens[0]


def drawn(texts: Tensor, options: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """Texts of a file, in a random order, again and again."""
    order = torch.Generator().manual_seed(seed)
    while True:
        for i in torch.randperm(len(texts), generator=order):
            yield texts[i, : options.prefill].to(options.device)


def texts_of(options: argparse.Namespace) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """For training, and held out."""
    if options.texts.is_dir():
        held_out = options.seed + HELD_OUT_SEED
        return (
            generated(options.texts, options, options.seed),
            generated(options.texts, options, held_out),
        )
    texts = torch.from_numpy(np.load(options.texts).astype(np.int64))
    if texts.ndim != 2 or texts.shape[1] < options.prefill or len(texts) <= options.held_out:
        raise SystemExit(
            f"{options.texts} has {list(texts.shape)}; wanted are more than {options.held_out} "
            f"texts of {options.prefill} tokens or more"
        )
    train, held_out_texts = texts[options.held_out :], texts[: options.held_out]
    return drawn(train, options, options.seed), drawn(held_out_texts, options, options.seed)


def middle_of(text: Captured, options: argparse.Namespace) -> Tensor:
    """The keys of the middle at the end of the prefill: [heads, tokens, head_dim]."""
    return text.keys[:, options.sink : options.prefill - options.queries - options.window]


def text_loss(
    maps: ModelMaps, text: Captured, options: argparse.Namespace, scale: float
) -> Tensor:
    keys = middle_of(text, options)
    heads = keys.shape[0]
    queries = text.queries.flatten(1, 2)  # [heads, group * queries, head_dim]
    log_queries = maps.query(text.queries.flatten(0, 1)).unflatten(0, (heads, -1)).flatten(1, 2)
    student = student_logits(log_queries, maps.key(keys))
    weights = LossWeights(temperature=options.temperature)
    return distillation_loss(scale * queries @ keys.mT, student, weights)


def train(
    maps: ModelMaps, capture: Callable[[Tensor], Captured], texts: Iterator[Tensor],
    options: argparse.Namespace, scale: float,
) -> dict[str, float]:  # fmt: skip
    """Learning rate: warm-up, then a half cosine by steps or by the clock, whichever is further."""
    optimiser = torch.optim.Adam(maps.parameters(), lr=options.learning_rate, betas=(0.9, 0.98))
    begun = time.monotonic()
    recent: list[float] = []
    step = 0
    for step in range(options.steps):
        progress = max(step / options.steps, (time.monotonic() - begun) / options.seconds)
        if progress >= 1:
            break
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        rate = options.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        for group in optimiser.param_groups:
            group["lr"] = rate * (LEARNING_RATE_FLOOR + (1 - LEARNING_RATE_FLOOR) * cosine)
        loss = text_loss(maps, capture(next(texts)), options, scale)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(maps.parameters(), GRADIENT_NORM_MAX)
        optimiser.step()
        if step % 20 == 0:
            recent.append(loss.item())
        if step % 400 == 0:
            elapsed = time.monotonic() - begun
            print(f"step {step}, {elapsed:.0f} s: loss {np.mean(recent[-20:]):.4f}", flush=True)
    return {
        "steps": step + 1,
        "seconds": time.monotonic() - begun,
        "first_loss": recent[0],
        "last_loss": float(np.mean(recent[-20:])),
    }


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    teacher = Teacher(options.model, options.device)
    config = teacher.config
    maps = ModelMaps(
        config.layers, config.query_heads, config.kv_heads, config.head_dim,
        options.width, options.inner,
    ).to(options.device)  # fmt: skip
    texts, held_out = texts_of(options)

    def capture(tokens: Tensor) -> Captured:
        return teacher.capture(tokens, options.queries)

    figures = train(maps, capture, texts, options, config.softmax_scale)

    torch.set_float32_matmul_precision("highest")
    zones = Zones(options.sink, options.window, options.share)
    alone: list[Tensor] = []
    completed: list[Tensor] = []
    losses: list[float] = []
    for tokens in itertools.islice(held_out, options.held_out):
        text = capture(tokens)
        with torch.no_grad():
            losses.append(text_loss(maps, text, options, config.softmax_scale).item())
        errors = measure(
            maps, text, options.prefill - options.queries, config.softmax_scale, zones
        )
        alone.append(errors.alone)
        completed.append(errors.completed)
    error_alone = torch.stack(alone).mean(0).reshape(config.layers, config.query_heads)
    error_completed = torch.stack(completed).mean(0).reshape(config.layers, config.query_heads)
    helps = error_completed < error_alone

    command = "python -m attnd.completion.train " + shlex.join(sys.argv[1:])
    summary = {
        **figures,
        "held_out_loss": float(np.mean(losses)),
        "error_alone": error_alone.mean().item(),
        "error_completed": error_completed.mean().item(),
        "error_switched": torch.minimum(error_alone, error_completed).mean().item(),
        "completed_heads": int(helps.sum()),
    }
    maps.save(
        options.out,
        helps,
        {
            "fingerprint": fingerprint(options.model),
            "prefill_tokens": str(options.prefill),
            "softmax_scale": repr(config.softmax_scale),
            "seed": str(options.seed),
            "command": command,
            "figures": json.dumps({key: round(value, 5) for key, value in summary.items()}),
        },
    )
    heads = {
        "error_alone": error_alone.tolist(),
        "error_completed": error_completed.tolist(),
        "completed": helps.tolist(),
    }
    if options.report is not None:
        report = {"command": command, **summary, "heads": heads}
        options.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    for layer in range(config.layers):
        pairs = zip(error_alone[layer].tolist(), error_completed[layer].tolist())
        print(f"layer {layer}:", "  ".join(f"{a:.3f} -> {c:.3f}" for a, c in pairs))


if __name__ == "__main__":
    main()
