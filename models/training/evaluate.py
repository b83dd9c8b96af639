# SPDX-License-Identifier: Apache-2.0
"""Scores a nano model on an evaluation set, and on texts drawn anew, as Markdown tables.

    python3 evaluate.py --model ../nano-llama-b --eval-set ../nano-llama/nano_eval.npz

Everything is float32 with dense attention, on the weights as saved. An answer token is right if
the arg-max of the logits one position before equals it.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

import grammar
from transformer import Transformer

DRAWN_SEED = 99
GRAMMAR_TASKS = [task.name.lower() for task in grammar.Task]
# Float32 attention holds all scores of a batch: its texts times their length squared stay below.
SCORES_MAX = 16384**2


@torch.no_grad()
def predict(model: Transformer, tokens: Tensor, answers: Tensor) -> Tensor:
    """tokens, answers: [texts, length] -> [answer tokens] what the model says at each, in the
    order of answers.nonzero()."""
    length = tokens.shape[1]
    texts = max(1, SCORES_MAX // length**2)
    predicted = []
    for some, marked in zip(tokens.split(texts), answers.split(texts)):
        hidden = model.model(some)[:, :-1][marked[:, 1:]]
        predicted.append(model.logits(hidden).argmax(-1))
    return torch.cat(predicted)


def read_task_names(path: pathlib.Path) -> list[str]:
    """What the numbers of an evaluation set's tasks mean; a set without names has the grammar's."""
    with np.load(path) as data:
        return data["task_names"].tolist() if "task_names" in data else GRAMMAR_TASKS


def read_set(path: pathlib.Path, length: int, device: str) -> grammar.Batch:
    """The texts of one length of an evaluation set."""
    with np.load(path) as data:
        tokens = torch.from_numpy(data[f"tokens_{length}"].astype(np.int64))
        answers = torch.from_numpy(data[f"answer_mask_{length}"])
        tasks = torch.from_numpy(data[f"task_{length}"].astype(np.int64))
    tasks = tasks[:, None].expand(tokens.shape)
    return grammar.Batch(tokens.to(device), answers.to(device), tasks.to(device))


def draw_sets(lengths: Iterable[int], texts: int, device: str) -> Iterator[grammar.Batch]:
    """For each length as many texts of each task."""
    generator = grammar.TextGenerator(grammar.read_successors(device), DRAWN_SEED)
    for length in lengths:
        batches = [generator.task_batch(texts, length, task) for task in grammar.Task]
        yield grammar.Batch(
            torch.cat([batch.tokens for batch in batches]),
            torch.cat([batch.answers for batch in batches]),
            torch.cat([batch.tasks for batch in batches]),
        )


def table_head(title: str, names: Sequence[str]) -> str:
    head = f"| length | {' | '.join(names)} | answer tokens |"
    return f"\n{title}\n\n{head}\n|{'---|' * (len(names) + 2)}"


def table_row(batch: grammar.Batch, predicted: Tensor, names: Sequence[str]) -> str:
    right = predicted == batch.tokens[batch.answers]
    tasks = batch.tasks[batch.answers]
    cells = [f"{right[tasks == task].float().mean().item():.3f}" for task in range(len(names))]
    return f"| {batch.tokens.shape[1]} | {' | '.join(cells)} | {len(right)} |"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, required=True, help="Hugging Face folder")
    parser.add_argument("--eval-set", type=pathlib.Path, required=True, help=".npz file")
    parser.add_argument("--lengths", default="2048,8192,16384")
    parser.add_argument("--drawn", type=int, default=0, help="texts of each task to draw anew")
    parser.add_argument(
        "--answers",
        type=pathlib.Path,
        help=".npz file to write: what the model says at each answer",
    )
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    lengths = [int(length) for length in options.lengths.split(",")]
    torch.set_float32_matmul_precision("highest")
    model = Transformer.load(options.model, max(lengths)).to(options.device).eval()

    names = read_task_names(options.eval_set)
    print(table_head(f"{options.model.name} on {options.eval_set.name}", names))
    said = {}
    for length in lengths:
        batch = read_set(options.eval_set, length, options.device)
        predicted = predict(model, batch.tokens, batch.answers)
        said[f"answers_{length}"] = predicted.cpu().numpy().astype(np.int16)
        print(table_row(batch, predicted, names), flush=True)
    if options.answers:
        np.savez(options.answers, **said)

    if options.drawn:
        title = f"{options.model.name} on {options.drawn} drawn texts of each task"
        print(table_head(title, GRAMMAR_TASKS))
        for batch in draw_sets(lengths, options.drawn, options.device):
            predicted = predict(model, batch.tokens, batch.answers)
            print(table_row(batch, predicted, GRAMMAR_TASKS), flush=True)


if __name__ == "__main__":
    main()
