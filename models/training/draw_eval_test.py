# SPDX-License-Identifier: Apache-2.0
"""Goal: the sets of models/texts are what their README says, and can be made again.
Method: the README's own commands, for fewer texts, make the first ones of each task bit for bit;
the readers of the other tests answer the sets' questions.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from grammar_test import EVAL_SET, LONG_EVAL_SET, check_share, evaluation_set, read_all
from ruler_test import CHECKS, QUESTIONS, Text

TRAINING = pathlib.Path(__file__).parent
ROOT = TRAINING.parents[1]
TEXTS = ROOT / "models" / "texts"
TASKS = ["niah", "trace", "before", "top", *CHECKS]
SETS = {
    "nano_eval_2.npz": [2048, 8192, 16384],
    "nano_long_eval_2.npz": [32768, 65536],
    "nano_latent_eval_2.npz": [8192, 16384],
}
PARTS = ("task", "tokens", "answer_mask", "seeds")
LENGTHS = [(name, length) for name, lengths in SETS.items() for length in lengths]


def commands() -> dict[str, dict[str, str]]:
    """The options of each command of the README, by the name of the set that it writes."""
    text = (TEXTS / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in re.findall(r"draw_eval\.py (.*)", text):
        words = shlex.split(line)
        options = dict(zip(words[::2], words[1::2]))
        found[pathlib.Path(options["--out"]).name] = options
    return found


def draw(*options: str) -> str:
    command = [sys.executable, str(TRAINING / "draw_eval.py"), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def counts(options: dict[str, str], place: int) -> list[int]:
    """How many texts of each task the command draws of the length at this place."""
    given = [options.get(name, "0").split(",") for name in ("--niah", "--others", "--ruler")]
    niah, others, of_ruler = (int(numbers[place % len(numbers)]) for numbers in given)
    return [niah, *[others] * 3, *[of_ruler] * len(CHECKS)]


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_the_texts_of_its_command(name: str) -> None:
    options = commands()[name]
    assert options["--lengths"] == ",".join(map(str, SETS[name]))
    with np.load(TEXTS / name) as data:
        assert data["task_names"].tolist() == TASKS
        assert data["seed"] == int(options["--seed"])
        for place, length in enumerate(SETS[name]):
            tasks = [task for task, n in enumerate(counts(options, place)) for _ in range(n)]
            assert data[f"task_{length}"].tolist() == tasks
            assert data[f"tokens_{length}"].shape == (len(tasks), length)


@pytest.mark.parametrize("name", SETS)
def test_its_command_makes_the_first_texts_again(name: str, tmp_path: pathlib.Path) -> None:
    """Other lengths and fewer texts leave a text as it is."""
    options, length = commands()[name], SETS[name][0]
    of_ruler = min(1, int(options.get("--ruler", "0")))
    few = ["--niah", "2", "--others", "1", "--ruler", str(of_ruler)]
    out = tmp_path / "few.npz"
    said = draw("--seed", options["--seed"], "--lengths", str(length), *few, "--out", str(out))
    assert f"seed {options['--seed']}\n" in said
    with np.load(TEXTS / name) as whole, np.load(out) as again:
        seen: Counter[int] = Counter()
        for task, *text in zip(*(again[f"{part}_{length}"] for part in PARTS)):
            place = np.flatnonzero(whole[f"task_{length}"] == task)[seen[task]]
            seen[task] += 1
            for part, made in zip(PARTS[1:], text):
                assert (whole[f"{part}_{length}"][place] == made).all(), (part, task)
        assert seen[0] == 2 and len(seen) == 4 + of_ruler * len(CHECKS)


@pytest.mark.parametrize("name, length", LENGTHS)
def test_its_texts_are_of_the_language(name: str, length: int) -> None:
    ours = read_all(evaluation_set(length, TEXTS / name, limit=2 if length < 32768 else 1))
    theirs = read_all(evaluation_set(8192))
    for kind in ("key", "assignment", "purchase", "counted", "filler"):
        check_share(kind, ours, theirs)


@pytest.mark.parametrize("length", SETS["nano_eval_2.npz"])
def test_its_texts_of_rulers_tasks_are_what_they_are_called(length: int) -> None:
    with np.load(TEXTS / "nano_eval_2.npz") as data:
        task_of, tokens, mask = (data[f"{part}_{length}"] for part in PARTS[:3])
    for number, task in enumerate(TASKS):
        if task in CHECKS:
            for place in np.flatnonzero(task_of == number)[: 8192 // length + 1]:
                text = Text(tokens[place].astype(np.int64), mask[place], task)
                CHECKS[task](text, length // 8 - QUESTIONS)


def test_no_text_is_in_two_sets_or_there_twice() -> None:
    """Nor is a seed."""
    texts, seeds = [], []
    for path in (EVAL_SET, LONG_EVAL_SET, *(TEXTS / name for name in SETS)):
        with np.load(path) as data:
            for name in data:
                if name.startswith("tokens_"):
                    texts += [row.tobytes() for row in data[name][:, :2048]]
                if name.startswith("seeds_"):
                    seeds += data[name].tolist()
    assert len(set(texts)) == len(texts) and len(set(seeds)) == len(seeds) > 500
