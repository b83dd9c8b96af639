# SPDX-License-Identifier: Apache-2.0
"""Evaluation sets: token sequences with marked answers.

A set is a .npz file with, for each length N: tokens_N int16 [n, N], answer_mask_N bool [n, N],
task_N int8 [n]. The last QUESTION_TOKENS tokens of a sequence are questions with their answers;
what precedes them is the haystack. task_names [tasks], text, says what the numbers in task_N mean;
sets of TASKS alone need not have it. What else a set has is left alone.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnd.tensors import Array

QUESTION_TOKENS = 128
# Names of the tasks by their numbers in task_N, in a set that does not name its own.
TASKS = ("niah", "trace", "before", "top")


@dataclass(frozen=True)
class Example:
    """One sequence.

    Attributes:
        task: name of its task.
        haystack: [N - QUESTION_TOKENS] int64 tokens to prefill.
        questions: [QUESTION_TOKENS] int64 tokens to decode, teacher-forced.
        answers: indexes into `questions` of the answer tokens, each 1 or more: the logits one
            before predict it.
    """

    task: str
    haystack: Array
    questions: Array
    answers: Array


def read_examples(
    path: pathlib.Path, length: int, tasks: Sequence[str] | None = None, limit: int | None = None
) -> list[Example]:
    """The first `limit` sequences of each task, or all, task by task; tasks are the set's own, by
    their numbers, unless given.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has no such length or task, or is not an evaluation set.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} is below 1")
    with np.load(path) as data:
        if f"tokens_{length}" not in data:
            lengths = sorted(int(name.split("_")[1]) for name in data if name.startswith("tokens_"))
            raise ValueError(f"{path} has lengths {', '.join(map(str, lengths))}, not {length}")
        tokens, mask, task_of = (
            data[f"{name}_{length}"] for name in ("tokens", "answer_mask", "task")
        )
        names = data["task_names"].tolist() if "task_names" in data else list(TASKS)
    if tokens.shape != mask.shape or len(task_of) != len(tokens) or length <= QUESTION_TOKENS:
        raise ValueError(
            f"{path}: tokens, answer_mask and task of length {length} do not fit each other"
        )
    if task_of.size and not 0 <= task_of.min() <= task_of.max() < len(names):
        raise ValueError(f"{path}: of length {length} there are tasks without a name")
    for task in tasks or []:
        if task not in names:
            raise ValueError(f"task {task!r} is none of {', '.join(names)}")
    chosen = [
        index
        for task in (names if tasks is None else tasks)
        for index in np.flatnonzero(task_of == names.index(task))[:limit]
    ]
    return [_example(names[task_of[index]], tokens[index], mask[index]) for index in chosen]


def _example(task: str, tokens: Array, mask: Array) -> Example:
    haystack, questions = np.split(tokens.astype(np.int64), [len(tokens) - QUESTION_TOKENS])
    answers = np.flatnonzero(mask) - len(haystack)
    if len(answers) == 0 or answers[0] < 1:
        raise ValueError("an answer lies outside the questions, or there is none")
    return Example(task, haystack, questions, answers)
