# SPDX-License-Identifier: Apache-2.0
"""Goal: RULER's tasks are what README.md says of them, and their answers are right.
Method: grammar_test's reader, which knows nothing of the generator, parses texts and answers every
question; what makes the task is then counted in the haystack.

    python3 -m pytest models/training
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from generators import grammar, ruler
from grammar_test import Reader, check_share

SEED = 12
QUESTIONS = 16


class Text:
    """A text that was read: its haystack's reader, and its questions [QUESTIONS, 8]."""

    def __init__(self, tokens: np.ndarray, mask: np.ndarray, task: str) -> None:
        """Checks that every question is of the task's form, answered rightly and marked."""
        slots, marked = tokens.reshape(-1, 8), mask.reshape(-1, 8)
        self.haystack, self.questions = slots[:-QUESTIONS], slots[-QUESTIONS:]
        self.reader = Reader(self.haystack)
        self.kinds = {kind: count for kind, count in self.reader.kinds.items() if count}
        self.names = [tuple(slot[1:3]) for slot in self.haystack if slot[3] == 5]
        self.asked = Counter(tuple(question[1:3]) for question in self.questions)
        for question in self.questions:
            assert self.reader.check(question) == FORMS[task]
        answers = {"niah_multivalue": [5], "cwe": [4], "fwe": [4]}.get(task, [4, 5])
        assert not marked[:-QUESTIONS].any()
        assert all(np.flatnonzero(places).tolist() == answers for places in marked[-QUESTIONS:])
        assert slots[0, 0] == 1 and min(slots[0, 1:]) >= 1120

    def frequencies(self) -> list[int]:
        """Of the counted words, from the highest."""
        return sorted(self.reader.counts.values(), reverse=True)


def single(text: Text, slots: int) -> None:
    """Filler, and as many keys as questions."""
    assert text.kinds == {"key": QUESTIONS, "filler": slots - QUESTIONS}
    assert text.asked == Counter(text.names) and max(text.asked.values()) == 1


def multikey(text: Text, slots: int) -> None:
    """Keys alone, all different."""
    assert text.kinds == {"key": slots - 1, "filler": 1}
    assert len(set(text.names)) == len(text.names) and len(text.asked) == QUESTIONS


def multikey_of_a_few(text: Text, slots: int) -> None:
    """The same, of as few first words as 464 second words allow, but of four at least."""
    multikey(text, slots)
    assert len({first for first, _ in text.names}) == max(4, -(-len(text.names) // 464))


def multivalue(text: Text, slots: int) -> None:
    """Every value is asked for once. Key and first word say which, and neither says it alone."""
    assert text.kinds == {"key": QUESTIONS, "filler": slots - QUESTIONS}
    assert list(text.asked.values()) == [4] * 4
    records = {(*slot[1:3], *slot[4:6]) for slot in text.haystack if slot[3] == 5}
    assert records == {(*question[1:3], *question[4:6]) for question in text.questions}
    assert len({(*key, first) for *key, first, _ in records}) == 16
    assert len({first for *_, first, _ in records}) == 4
    assert len({second for *_, second in records}) == 16


def chains(text: Text, slots: int) -> None:
    """Eight of two references, each after what it refers to; each is asked for once."""
    assert text.kinds == {"assignment": 24, "filler": slots - 24}
    assert len(set(text.names)) == 24
    references = {name: pair for name, (pair,) in text.reader.assigned.items() if pair[0] < 544}
    assert text.asked == Counter(references.keys())
    assert Counter(pair in references for pair in references.values()) == {False: 8, True: 8}
    placed = {name: place for place, name in enumerate(text.names)}
    assert all(placed[pair] < placed[name] for name, pair in references.items())


def common_words(text: Text, slots: int) -> None:
    """Three words ten times as often as the others, in as long a list as fits."""
    counts = text.frequencies()
    assert counts == [share * counts[-1] for share in (13, 10, 8, *[1] * 61)]
    assert 1 <= slots - text.kinds["counted"] <= 23


def frequent_words(text: Text, slots: int) -> None:
    assert text.kinds == {"counted": slots - 1, "filler": 1}


# Of each task, the form of its questions, and what makes it RULER's.
FORMS = {
    "niah_single": "niah",
    "niah_multikey_2": "niah",
    "niah_multikey_3": "niah",
    "niah_multivalue": "niah",
    "vt": "trace",
    "cwe": "top",
    "fwe": "top",
}
CHECKS = {
    "niah_single": single,
    "niah_multikey_2": multikey,
    "niah_multikey_3": multikey_of_a_few,
    "niah_multivalue": multivalue,
    "vt": chains,
    "cwe": common_words,
    "fwe": frequent_words,
}


def drawn(task: str, length: int, texts: int) -> Iterator[Text]:
    generator = ruler.RulerGenerator(grammar.read_successors("cpu"), SEED)
    number = ruler.Task[task.upper()]
    batch = generator.ruler_batch(texts, length, number)
    assert (batch.tasks.numpy().reshape(texts, -1, 8)[:, -QUESTIONS:] == number).all()
    for tokens, mask in zip(batch.tokens.numpy(), batch.answers.numpy()):
        yield Text(tokens, mask, task)


@pytest.mark.parametrize("length", [2048, 8192, 32768])
@pytest.mark.parametrize("task", CHECKS)
def test_a_task_is_what_it_is_called(task: str, length: int) -> None:
    for text in drawn(task, length, texts=2 if length < 32768 else 1):
        CHECKS[task](text, length // 8 - QUESTIONS)


def test_every_task_has_a_number_of_its_own() -> None:
    assert [task.name.lower() for task in ruler.Task] == list(CHECKS)
    numbers = [*grammar.Task, *ruler.Task]
    assert [int(task) for task in numbers] == list(range(len(numbers)))


def test_frequent_words_follow_a_zeta_law() -> None:
    total: Counter[int] = Counter()
    for text in drawn("fwe", 8192, texts=8):
        total.update(dict(enumerate(text.frequencies())))
    expected = Counter({rank: round(1e8 / (rank + 1) ** 2) for rank in range(64)})
    for rank in range(4):
        check_share(rank, total, expected)


def test_texts_differ_in_what_is_frequent_and_where_records_stand() -> None:
    one, two = drawn("fwe", 2048, texts=2)
    assert one.reader.counts.most_common(3) != two.reader.counts.most_common(3)
    one, two = drawn("niah_single", 2048, texts=2)
    assert not set(one.names) & set(two.names)
    places = [np.flatnonzero(text.haystack[:, 3] == 5).tolist() for text in (one, two)]
    assert places[0] != places[1]
