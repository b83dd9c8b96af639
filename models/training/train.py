# SPDX-License-Identifier: Apache-2.0
"""Trains a nano model and writes it as a Hugging Face folder, bfloat16.

    python3 train.py --out FOLDER --family llama --layers 5 --hidden 320 ... --seed 5 --seconds 490
    python3 train.py --out FOLDER --init EARLIER_FOLDER --plan 8192:0.5,16384:0.5 ...

The schedule runs by the clock: --seconds is the time that the training loop takes, compilation
included, and --plan says which share of it each length of text has, short texts first. Retrieval
is learnt on short texts, where a step sees many questions; longer texts then stretch it.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import grammar
from shape import GroupedHeads, LatentHeads, Shape
from transformer import Transformer

WARM_UP_STEPS = 200
# The learning rate is constant until this share of the time, then falls to its floor in a line.
DECAY_START = 0.6
LEARNING_RATE_FLOOR = 0.03
GRADIENT_NORM_MAX = 1.0
WEIGHT_DECAY = 0.05
# Flags that a shape of each family needs beside those of all families.
COMMON_SIZES = ["layers", "hidden", "intermediate", "query_heads", "rope_theta"]
GROUPED_SIZES = ["kv_heads", "head_dim"]
LATENT_SIZES = ["rank", "plain_dim", "rotary_dim", "value_dim"]
FAMILY_SIZES = {"llama": GROUPED_SIZES, "qwen3": GROUPED_SIZES, "deepseek_v3": LATENT_SIZES}
# Beside the answers, a sample of all tokens is predicted, at a lower weight: the model stays a
# language model, whose keys and values tell all tokens apart.
SAMPLED_SHARE = 0.06
SAMPLED_WEIGHT = 0.2
LOG_SECONDS = 20
SAVE_SECONDS = 60


@dataclass(frozen=True)
class Phase:
    """Texts of one length, until a share of the time has passed."""

    length: int
    until: float


@dataclass(frozen=True)
class StepResult:
    """What one step's batch showed; on the device, as reading it would wait for the step."""

    answer_loss: Tensor
    sampled_loss: Tensor
    right: Tensor  # [answer tokens] bool
    tasks: Tensor  # [answer tokens]

    def accuracies(self) -> str:
        shares = (
            f"{task.name.lower()} {self.right[self.tasks == task].float().mean().item():.2f}"
            for task in grammar.Task
        )
        return ", ".join(shares)


def parse_plan(text: str) -> list[Phase]:
    """Reads lengths with their shares of the time, as 512:0.3,1024:0.7."""
    phases, until = [], 0.0
    for part in text.split(","):
        length, share = part.split(":")
        until += float(share)
        phases.append(Phase(int(length), until))
    if abs(until - 1) > 1e-6:
        raise argparse.ArgumentTypeError(f"the plan's shares add up to {until:g}, not 1")
    if any(phase.length % grammar.SLOT_TOKENS for phase in phases):
        raise argparse.ArgumentTypeError(f"lengths are multiples of {grammar.SLOT_TOKENS}")
    return phases


def length_at(plan: list[Phase], elapsed: float) -> int:
    """elapsed: share of the time that has passed."""
    return next((phase.length for phase in plan if elapsed < phase.until), plan[-1].length)


def learning_rate_at(step: int, elapsed: float, peak: float) -> float:
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    decay = min(1.0, max(LEARNING_RATE_FLOOR, (1 - elapsed) / (1 - DECAY_START)))
    return peak * warm_up * decay


def losses(
    model: Transformer, trunk: Callable[[Tensor], Tensor], batch: grammar.Batch, random: torch.Generator
) -> StepResult:
    """Runs a batch; logits are computed only where a loss needs them."""
    device = batch.tokens.device
    expected = batch.tokens[:, 1:]
    asked = batch.answers[:, 1:]
    sampled = torch.rand(expected.shape, device=device, generator=random) < SAMPLED_SHARE
    with torch.autocast(device.type, torch.bfloat16):
        hidden = trunk(batch.tokens)[:, :-1]
        answers, others = model.logits(hidden[asked]), model.logits(hidden[sampled])
    return StepResult(
        answer_loss=cross_entropy(answers.float(), expected[asked]),
        sampled_loss=cross_entropy(others.float(), expected[sampled]),
        right=answers.argmax(-1) == expected[asked],
        tasks=batch.tasks[:, 1:][asked],
    )


class Trainer:
    """The training loop and its clock."""

    def __init__(self, options: argparse.Namespace, model: Transformer) -> None:
        self._options = options
        self._model = model
        self._texts = grammar.TextGenerator(
            grammar.read_successors(options.device), seed=options.seed
        )
        self._random = torch.Generator(options.device)
        self._random.manual_seed(options.seed)
        # One compilation for each length: with fixed sizes the compiler makes the faster kernels.
        self._trunk: Callable[[Tensor], Tensor] = (
            torch.compile(model.model, dynamic=False) if options.compile else model.model
        )
        self._optimizer = optimizer_of(model, options.learning_rate)
        self._steps = 0
        self._tokens = 0

    def run(self) -> None:
        """Trains until the time is over; logs and saves now and then, and saves at the end."""
        start = time.monotonic()
        logged = saved = start
        while (now := time.monotonic()) - start < self._options.seconds:
            elapsed = (now - start) / self._options.seconds
            length = length_at(self._options.plan, elapsed)
            result = self._step(length, elapsed)
            if now - logged > LOG_SECONDS:
                logged = now
                self._log(now - start, length, result)
            if now - saved > SAVE_SECONDS:
                saved = now
                self._model.save(self._options.out)
        self._model.save(self._options.out)
        print(f"{self._steps} steps, {self._tokens / 1e6:.0f} million tokens", flush=True)

    def _step(self, length: int, elapsed: float) -> StepResult:
        rate = learning_rate_at(self._steps, elapsed, self._options.learning_rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        texts = max(1, self._options.step_tokens // length)
        batch = self._texts.training_batch(texts, length)
        result = losses(self._model, self._trunk, batch, self._random)
        (result.answer_loss + SAMPLED_WEIGHT * result.sampled_loss).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_NORM_MAX)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._tokens += batch.tokens.numel()
        return result

    def _log(self, seconds: float, length: int, result: StepResult) -> None:
        print(
            f"{seconds:.0f} s, step {self._steps}, length {length}:"
            f" answers' loss {result.answer_loss.item():.3f},"
            f" sample's {result.sampled_loss.item():.2f},"
            f" {self._tokens / seconds / 1e3:.0f} thousand tokens/s; {result.accuracies()}",
            flush=True,
        )


def optimizer_of(model: Transformer, rate: float) -> torch.optim.Optimizer:
    """Norms' weights do not decay: where queries and keys are normed, they alone make a head sharp."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def shape_of(options: argparse.Namespace) -> Shape | None:
    """The shape that the flags say; None if they name no family.

    Raises:
        ValueError: if a flag is missing that the family needs, or given that it does not have.
    """
    every = {*COMMON_SIZES, *GROUPED_SIZES, *LATENT_SIZES}
    wanted = {*COMMON_SIZES, *FAMILY_SIZES[options.family]} if options.family else set()
    sizes = {name: value for name in every if (value := getattr(options, name)) is not None}
    if missing := sorted(wanted - sizes.keys()):
        raise ValueError(f"the family {options.family} also needs {', '.join(missing)}")
    if unknown := sorted(sizes.keys() - wanted):
        raise ValueError(f"no such sizes of the family {options.family}: {', '.join(unknown)}")
    if options.family is None:
        return None
    own = {name: sizes.pop(name) for name in ["query_heads", *FAMILY_SIZES[options.family]]}
    heads = (
        LatentHeads(**own)
        if options.family == "deepseek_v3"
        else GroupedHeads(**own, normed=options.family == "qwen3")
    )
    return Shape(**sizes, heads=heads)


def initial_model(options: argparse.Namespace) -> Transformer:
    """A model of the flags' shape with random weights, or the one of --init.

    Raises:
        ValueError: if the flags say neither or both.
    """
    length_max = max(phase.length for phase in options.plan)
    shape = shape_of(options)
    if (shape is None) == (options.init is None):
        raise ValueError("give either a shape or --init, which brings its own")
    if shape is None:
        return Transformer.load(options.init, length_max)
    return Transformer(shape, length_max)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--init", type=pathlib.Path, help="folder of a model to train further")
    shape = parser.add_argument_group("shape, of a model to train from scratch")
    shape.add_argument("--family", choices=list(FAMILY_SIZES))
    shape.add_argument("--layers", type=int)
    shape.add_argument("--hidden", type=int)
    shape.add_argument("--intermediate", type=int)
    shape.add_argument("--query-heads", type=int)
    shape.add_argument("--rope-theta", type=float)
    shape.add_argument("--kv-heads", type=int, help="llama and qwen3")
    shape.add_argument("--head-dim", type=int, help="llama and qwen3")
    shape.add_argument("--rank", type=int, help="deepseek_v3: of the latent vector")
    shape.add_argument("--plain-dim", type=int, help="deepseek_v3: not rotated, of a key head")
    shape.add_argument("--rotary-dim", type=int, help="deepseek_v3: rotated, of a key head")
    shape.add_argument("--value-dim", type=int, help="deepseek_v3: of a value head")
    training = parser.add_argument_group("training")
    training.add_argument("--seed", type=int, default=1)
    training.add_argument("--seconds", type=float, default=490)
    training.add_argument(
        "--plan",
        type=parse_plan,
        default="512:0.28,1024:0.14,2048:0.14,4096:0.14,8192:0.15,16384:0.15",
        help="lengths of texts with their shares of the time",
    )
    training.add_argument("--learning-rate", type=float, default=2e-3, help="its peak")
    training.add_argument("--step-tokens", type=int, default=131072, help="tokens a step")
    training.add_argument("--device", default="cuda")
    training.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    # What autocast leaves in float32 may use the matrix units' shorter mantissa.
    torch.set_float32_matmul_precision("high")
    model = initial_model(options).to(options.device)
    print(f"{model.shape}: {model.parameter_count() / 1e6:.1f} million parameters", flush=True)
    Trainer(options, model).run()


if __name__ == "__main__":
    main()
