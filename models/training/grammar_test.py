# SPDX-License-Identifier: Apache-2.0
"""Goal: the generator's texts are the language of the evaluation set, and their answers are right.
Method: a reader written apart from the generator parses texts slot by slot and answers every
question; it must agree with the generator's texts and with the models' evaluation sets alike.
Shares of each kind of slot are compared between the two. Where PyTorch is not installed the
generator runs over numpy_torch.

    python3 -m pytest models/training
"""

from __future__ import annotations

import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from generators import grammar

SEED = 11
MODELS = pathlib.Path(__file__).parents[1]
EVAL_SET = MODELS / "nano-llama" / "nano_eval.npz"
LONG_EVAL_SET = MODELS / "nano-llama-long" / "nano_long_eval.npz"
Texts = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]
KINDS = {2: "key", 3: "assignment", 4: "purchase"}
OPENINGS = {9: "niah", 10: "trace", 11: "before", 12: "top"}


class Reader:
    """Reads a text's haystack and knows every acceptable answer.

    A name may occur twice in a text: any of its records' answers is then acceptable.
    """

    def __init__(self, slots: np.ndarray) -> None:
        self.kinds: Counter[str] = Counter()
        self.niah: dict[tuple[int, ...], set] = defaultdict(set)
        self.assigned: dict[tuple[int, ...], set] = defaultdict(set)
        self.before: dict[tuple[int, ...], set] = defaultdict(set)
        self.counts: Counter[int] = Counter()
        self.last_item: tuple[int, ...] | None = None
        # BOS stands in place of what opens a key record, or in place of a word of filler.
        first = slots[0]
        self.read(*((2, first) if first[3] == 5 else (int(first[1]), first[1:])))
        for slot in slots[1:]:
            self.read(int(slot[0]), slot)

    def read(self, opening: int, slot: np.ndarray) -> None:
        name, pair = tuple(slot[1:3]), tuple(slot[4:6])
        counted = 1056 <= opening < 1120
        self.kinds["counted" if counted else KINDS.get(opening, "filler")] += 1
        if counted:
            assert all(1056 <= word < 1120 for word in slot[::2])
            self.counts.update(slot[::2].tolist())
        elif opening == 2:
            assert (slot[3], slot[6]) == (5, 7)
            self.niah[name].add(pair)
        elif opening == 3:
            assert (slot[3], slot[6]) == (5, 7)
            self.assigned[name].add(pair)
        elif opening == 4:
            assert (slot[3], slot[5]) == (6, 7)
            if self.last_item:
                self.before[name].add(self.last_item)
            self.last_item = name
        else:
            assert min(slot) >= 1120

    def roots(self, name: tuple[int, ...], references: int = 0) -> set:
        """Values are words from 544 on, names are below. Questions follow at most two references;
        where a name occurs twice, one of its chains may be longer."""
        found: set = set()
        if references > 2:
            return found
        for pair in self.assigned[name]:
            found |= {pair} if pair[0] >= 544 else self.roots(pair, references + 1)
        return found

    def check(self, question: np.ndarray) -> str:
        task = OPENINGS[int(question[0])]
        name, answer = tuple(question[1:3]), tuple(question[4:6])
        assert question[3] == 5
        assert question[6:].tolist() == [7, 8]
        if task == "top":
            assert question[1] == 12
            ranked = [count for _, count in self.counts.most_common()]
            # A tie may be broken either way; a word never seen counts 0.
            ranked += [0] * 3
            assert self.counts[int(question[4])] == ranked[question[2] - 16]
        elif task == "trace":
            assert answer in self.roots(name)
        else:
            assert answer in getattr(self, task)[name]
        return task


def generated(length: int, texts: int) -> Texts:
    generator = grammar.TextGenerator(grammar.read_successors("cpu"), SEED)
    for task in grammar.Task:
        batch = generator.task_batch(texts, length, task)
        yield from zip(batch.tokens.numpy(), batch.answers.numpy(), batch.tasks.numpy())


def evaluation_set(length: int, path: pathlib.Path = EVAL_SET, limit: int | None = None) -> Texts:
    """The first `limit` texts of each of the grammar's tasks, or all."""
    with np.load(path) as data:
        arrays = (data[f"{name}_{length}"] for name in ("tokens", "answer_mask", "task"))
        seen: Counter[int] = Counter()
        for row, mask, task in zip(*arrays):
            seen[task] += 1
            if task < len(OPENINGS) and (limit is None or seen[task] <= limit):
                yield row.astype(np.int64), mask, np.full(length, task)


def read_all(texts: Texts) -> Counter[str]:
    """Checks all questions; -> number of slots of each kind."""
    kinds: Counter[str] = Counter()
    for tokens, mask, tasks in texts:
        slots = tokens.reshape(-1, 8)
        reader = Reader(slots[:-16])
        kinds += reader.kinds
        marked = mask.reshape(-1, 8)
        assert not marked[:-16].any()
        for question, places, task in zip(slots[-16:], marked[-16:], tasks[-128::8]):
            assert list(OPENINGS.values()).index(reader.check(question)) == task
            assert np.flatnonzero(places).tolist() == ([4] if task == 3 else [4, 5])
    return kinds


def check_share(key: object, ours: Counter, theirs: Counter) -> None:
    """The shares of key in both counts differ by less than five standard deviations."""
    share, expected = ours[key] / ours.total(), theirs[key] / theirs.total()
    variance = expected * (1 - expected) * (1 / ours.total() + 1 / theirs.total())
    assert abs(share - expected) < 5 * variance**0.5, (key, share, expected, SEED)


@pytest.mark.parametrize("length", [2048, 8192])
def test_generated_texts_are_those_of_the_evaluation_set(length: int) -> None:
    ours, theirs = read_all(generated(length, 8)), read_all(evaluation_set(length))
    for kind in ("key", "assignment", "purchase", "counted", "filler"):
        check_share(kind, ours, theirs)


@pytest.mark.parametrize("length", [16384, 32768, 65536])
def test_the_set_of_long_texts_is_of_the_same_language(length: int) -> None:
    ours = read_all(evaluation_set(length, LONG_EVAL_SET, limit=1))
    theirs = read_all(evaluation_set(8192))
    for kind in ("key", "assignment", "purchase", "counted", "filler"):
        check_share(kind, ours, theirs)


def test_training_texts_mix_all_tasks_and_answer_them() -> None:
    generator = grammar.TextGenerator(grammar.read_successors("cpu"), SEED)
    batch = generator.training_batch(16, 1024)
    questions = 32
    asked: Counter[str] = Counter()
    for tokens in batch.tokens.numpy().reshape(16, -1, 8):
        reader = Reader(tokens[:-questions])
        asked.update(reader.check(question) for question in tokens[-questions:])
    expected = {"niah": 0.4, "trace": 0.2, "before": 0.3, "top": 0.1}
    for task, share in expected.items():
        assert abs(asked[task] / asked.total() - share) < 0.08, (asked, SEED)


def test_the_counted_words_frequencies_are_those_of_the_evaluation_set() -> None:
    def by_rank(texts: Texts) -> Counter[int]:
        total: Counter[int] = Counter()
        for tokens, _, _ in texts:
            counts = Reader(tokens.reshape(-1, 8)[:-16]).counts
            total.update(dict(enumerate(sorted(counts.values(), reverse=True))))
        return total

    ours, theirs = by_rank(generated(8192, 8)), by_rank(evaluation_set(8192))
    for rank in range(10):
        check_share(rank, ours, theirs)


def test_filler_follows_the_table() -> None:
    generator = grammar.TextGenerator(grammar.read_successors("cpu"), SEED)
    successors = grammar.read_successors("cpu").numpy()
    generated_text = generator.training_batch(4, 512).tokens.numpy()
    for text in (generated_text, next(evaluation_set(2048))[0]):
        slots = text.reshape(-1, 8)
        filler = slots[(slots >= 1120).all(1)] - 1120
        assert len(filler) > 30, SEED
        assert (successors[filler[:, :-1]] == filler[:, 1:, None]).any(-1).all(), SEED
