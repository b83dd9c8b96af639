# SPDX-License-Identifier: Apache-2.0
r"""Draws an evaluation set from a seed.

    python3 draw_eval.py --seed 1 --lengths 2048,8192 --niah 32,100 --others 16 --ruler 8 \
        --out SET.npz

The file has for each length N tokens_N int16 [n, N], answer_mask_N bool [n, N], task_N int8 [n] and
seeds_N uint64 [n], each text's own seed; task_names [tasks], what the numbers in task_N mean; and
seed. Texts come task by task, in the order of the numbers.

Each text is drawn from a seed made of --seed, its length, its task and its number among those: more
texts, lengths or tasks leave the others as they are. It is drawn over numpy_torch also where
PyTorch is installed, so that the same command writes the same texts everywhere.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import numpy as np

import numpy_torch

sys.modules["torch"] = numpy_torch  # type: ignore[assignment]
import grammar  # noqa: E402
import ruler  # noqa: E402

Task = grammar.Task | ruler.Task
TASKS: list[Task] = [*grammar.Task, *ruler.Task]


def text_seed(seed: int, length: int, task: Task, number: int) -> np.uint64:
    """Of the text of this number, counted from 0, of its length and task."""
    return np.random.SeedSequence([seed, length, task, number]).generate_state(1, np.uint64)[0]


def draw_text(seed: np.uint64, length: int, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """-> tokens [length], answer mask [length]"""
    texts = ruler.RulerGenerator(grammar.read_successors("cpu"), int(seed))
    draw = texts.ruler_batch if isinstance(task, ruler.Task) else texts.task_batch
    batch = draw(1, length, task)
    return batch.tokens.numpy()[0], batch.answers.numpy()[0]


def draw_set(seed: int, length: int, counts: dict[Task, int]) -> dict[str, np.ndarray]:
    """The arrays of one length; counts: texts of each task."""
    tasks = [task for task, count in counts.items() for _ in range(count)]
    numbers = [number for count in counts.values() for number in range(count)]
    seeds = [text_seed(seed, length, task, number) for task, number in zip(tasks, numbers)]
    drawn = [draw_text(own, length, task) for own, task in zip(seeds, tasks)]
    tokens, masks = zip(*drawn)
    return {
        f"tokens_{length}": np.stack(tokens).astype(np.int16),
        f"answer_mask_{length}": np.stack(masks),
        f"task_{length}": np.array(tasks, np.int8),
        f"seeds_{length}": np.array(seeds, np.uint64),
    }


def counts_of(niah: int, others: int, ruler_texts: int) -> dict[Task, int]:
    counts: dict[Task, int] = dict.fromkeys(TASKS, others)
    counts |= dict.fromkeys(ruler.Task, ruler_texts)
    return {**counts, grammar.Task.NIAH: niah}


def parse_options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, required=True)
    add("--lengths", type=numbers, required=True, help="tokens of a text, as 2048,8192")
    per_length = "texts of {}: one number, or one for each length"
    add("--niah", type=numbers, required=True, help=per_length.format("niah"))
    add("--others", type=numbers, required=True, help=per_length.format("trace, before, top each"))
    add("--ruler", type=numbers, default=[0], help=per_length.format("each of RULER's tasks"))
    add("--out", type=pathlib.Path, required=True, help=".npz file to write")
    options = parser.parse_args()
    if any(length % grammar.SLOT_TOKENS for length in options.lengths):
        parser.error(f"lengths are multiples of {grammar.SLOT_TOKENS}")
    for name in ("niah", "others", "ruler"):
        given = getattr(options, name)
        if len(given) not in (1, len(options.lengths)) or min(given) < 0:
            parser.error(f"--{name} has one number, or one for each length")
        setattr(options, name, given * (len(options.lengths) // len(given)))
    return options


def main() -> None:
    options = parse_options()
    names = [task.name.lower() for task in TASKS]
    arrays = {"seed": np.array(options.seed), "task_names": np.array(names)}
    print(f"seed {options.seed}")
    wanted = zip(options.lengths, options.niah, options.others, options.ruler)
    for length, *texts in wanted:
        counts = counts_of(*texts)
        drawn = draw_set(options.seed, length, counts)
        arrays |= drawn
        said = ", ".join(f"{task.name.lower()} {count}" for task, count in counts.items() if count)
        print(f"{length} tokens: {said}; the first text's seed is {drawn[f'seeds_{length}'][0]}")
    np.savez_compressed(options.out, **arrays)


if __name__ == "__main__":
    main()
