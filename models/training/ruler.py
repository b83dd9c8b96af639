# SPDX-License-Identifier: Apache-2.0
"""Draws RULER's synthetic tasks (arXiv 2404.06654, section 3) in the nano models' language.

A task is a haystack of one kind and 16 questions about it, in the forms that the models were
trained on (grammar.py): they answer zero-shot. README.md has a table of the tasks, and says what
was left out. The first slot of a text is always filler, as BOS overwrites a token of it.

A key of niah_multivalue has four right answers, and a text has room for one. Each question has one
of them, of which the second word alone is an answer: the values of a key have different first
words, the same four for every key, so that key and first word say which second word is right, and
neither says it alone.
"""

from __future__ import annotations

import enum
import itertools

import torch
from torch import Tensor

import grammar
from grammar import COUNTED, FIRST_WORDS, SECOND_WORDS, VALUES, Token

# Of niah_multikey_3; more where that is less than the haystack's keys need.
FEW_FIRST_WORDS = 4
VALUES_A_KEY = 4
# RULER's common words come 30 times and all others 3 times. Here the three common ones come 39, 30
# and 24 times for the others' 3, as questions ask for the most, second and third most frequent.
COMMON_SHARES = (13, 10, 8)
ZETA_EXPONENT = 2.0


class Task(enum.IntEnum):
    """The numbers are those of evaluation sets, behind grammar.Task's."""

    NIAH_SINGLE = 4  # filler with as many key records as questions
    NIAH_MULTIKEY_2 = 5  # key records alone
    NIAH_MULTIKEY_3 = 6  # key records alone, whose first words are a few
    NIAH_MULTIVALUE = 7  # filler with keys of several values each
    VT = 8  # variable tracking: filler with chains of assignments
    CWE = 9  # common words extraction: a few counted words often, all others equally rarely
    FWE = 10  # frequent words extraction: counted words by a zeta law


# Which tokens of a question's slot are answers.
_ANSWERS = {
    Task.NIAH_SINGLE: (4, 5),
    Task.NIAH_MULTIKEY_2: (4, 5),
    Task.NIAH_MULTIKEY_3: (4, 5),
    Task.NIAH_MULTIVALUE: (5,),
    Task.VT: (4, 5),
    Task.CWE: (4,),
    Task.FWE: (4,),
}


class RulerGenerator(grammar.TextGenerator):
    """Draws texts of both modules' tasks.

    Its writers write records into haystack [texts, n, SLOT_TOKENS] and questions into asked [texts,
    questions, SLOT_TOKENS], in place, both filler before.
    """

    @torch.no_grad()
    def ruler_batch(
        self, texts: int, length: int, task: Task, questions: int = 16
    ) -> grammar.Batch:
        slots = self._filler(texts, length // grammar.SLOT_TOKENS)
        writers = {
            Task.NIAH_SINGLE: self._write_single,
            Task.NIAH_MULTIKEY_2: self._write_multikey_2,
            Task.NIAH_MULTIKEY_3: self._write_multikey_3,
            Task.NIAH_MULTIVALUE: self._write_multivalue,
            Task.VT: self._write_chains,
            Task.CWE: self._write_common_words,
            Task.FWE: self._write_frequent_words,
        }
        writers[task](slots[:, 1:-questions], slots[:, -questions:])
        slots[:, 0, 0] = Token.BOS

        task_of = torch.full_like(slots, -1)
        task_of[:, -questions:] = int(task)
        answers = torch.zeros_like(slots, dtype=torch.bool)
        for token in _ANSWERS[task]:
            answers[:, -questions:, token] = True
        return grammar.Batch(slots.flatten(1), answers.flatten(1), task_of.flatten(1))

    # ---- Keys ----

    def _write_single(self, haystack: Tensor, asked: Tensor) -> None:
        self._write_keys(haystack, asked, self._names(*asked.shape[:2], FIRST_WORDS.count))

    def _write_multikey_2(self, haystack: Tensor, asked: Tensor) -> None:
        self._write_keys(haystack, asked, self._names(*haystack.shape[:2], FIRST_WORDS.count))

    def _write_multikey_3(self, haystack: Tensor, asked: Tensor) -> None:
        needed = -(-haystack.shape[1] // SECOND_WORDS.count)
        few = max(FEW_FIRST_WORDS, needed)
        self._write_keys(haystack, asked, self._names(*haystack.shape[:2], few))

    def _write_multivalue(self, haystack: Tensor, asked: Tensor) -> None:
        texts, questions = asked.shape[:2]
        keys = questions // VALUES_A_KEY
        record = self._shuffled(texts, keys * VALUES_A_KEY)
        names = grammar.at(self._names(texts, keys, FIRST_WORDS.count), record % keys)
        words = self._shuffled(texts, VALUES.count)  # no word comes twice
        first, second = words.gather(1, record // keys), words[:, VALUES_A_KEY:]
        values = torch.stack([first, second[:, : record.shape[1]]], 2)
        self._write_lookups(haystack, asked, names, VALUES.first + values)

    def _write_keys(self, haystack: Tensor, asked: Tensor, names: Tensor) -> None:
        self._write_lookups(haystack, asked, names, self._words(VALUES, *names.shape))

    def _write_lookups(
        self, haystack: Tensor, asked: Tensor, names: Tensor, values: Tensor
    ) -> None:
        """names, values: [texts, n, 2]; asks no record twice."""
        self._place(haystack, Token.RECORD, names, values)
        record = self._shuffled(*names.shape[:2])[:, : asked.shape[1]]
        self._ask(asked, Token.ASK, grammar.at(names, record), grammar.at(values, record))

    # ---- Chains ----

    def _write_chains(self, haystack: Tensor, asked: Tensor) -> None:
        """Chains of a value and the references that questions follow, dealt as the grammar does;
        each name with a reference is asked for once."""
        chains, references = grammar.CHAINS, grammar.TRACE_REFERENCES_MAX
        texts, questions = asked.shape[:2]
        names = self._names(texts, chains * (1 + references), FIRST_WORDS.count)
        roots = self._words(VALUES, texts, chains, 2)
        self._place(haystack, Token.LET, names, torch.cat([roots, names[:, :-chains]], 1))
        record = chains + self._shuffled(texts, chains * references)[:, :questions]
        self._ask(asked, Token.TRACE, grammar.at(names, record), grammar.at(roots, record % chains))

    # ---- Counted words ----

    def _write_common_words(self, haystack: Tensor, asked: Tensor) -> None:
        """A list as long as fits, each word exactly as often as its share says."""
        shares = [*COMMON_SHARES, *[1] * (COUNTED.count - len(COMMON_SHARES))]
        times = haystack.shape[1] * grammar.COUNTED_PER_SLOT // sum(shares)
        listed = [word for word, share in enumerate(shares) for _ in range(share * times)]
        ranks = torch.tensor(listed, device=self._device)
        self._write_words(haystack, asked, ranks[self._shuffled(len(haystack), len(listed))])

    def _write_frequent_words(self, haystack: Tensor, asked: Tensor) -> None:
        shares = [rank**-ZETA_EXPONENT for rank in range(1, COUNTED.count + 1)]
        upto = [share / sum(shares) for share in itertools.accumulate(shares)]
        bounds = torch.tensor(upto[:-1], device=self._device)
        uniform = self._uniform(len(haystack), haystack.shape[1] * grammar.COUNTED_PER_SLOT)
        self._write_words(haystack, asked, torch.searchsorted(bounds, uniform))

    def _write_words(self, haystack: Tensor, asked: Tensor, ranks: Tensor) -> None:
        """ranks: [texts, slots to write * COUNTED_PER_SLOT] which word comes next."""
        texts, questions = asked.shape[:2]
        words = self._counted_words(ranks).view(texts, -1, grammar.COUNTED_PER_SLOT)
        chosen, record = self._places(haystack, words.shape[1])
        top = grammar.write_counted(haystack, chosen, grammar.at(words, record).flatten(1))
        rank = self._integers(grammar.TOP_RANKS, texts, questions)
        grammar.ask_top(asked, _all(asked), rank, top)

    # ---- Parts ----

    def _place(self, haystack: Tensor, opening: Token, names: Tensor, values: Tensor) -> None:
        """Writes records [texts, n, 2] in their order into slots anywhere."""
        chosen, record = self._places(haystack, names.shape[1])
        pair = grammar.at(names, record), Token.IS, grammar.at(values, record)
        grammar.write(haystack, chosen, opening, *pair, Token.DOT)

    def _places(self, haystack: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[texts, n] which `count` slots are written, and which record into each of them."""
        chosen = self._shuffled(*haystack.shape[:2]) < count
        return chosen, grammar.ordered(chosen)[0].clamp(min=0)

    def _ask(self, asked: Tensor, opening: Token, names: Tensor, answers: Tensor) -> None:
        grammar.ask(asked, _all(asked), opening, names, answers)

    def _names(self, texts: int, count: int, first_words: int) -> Tensor:
        """[texts, count, 2] different names, with so many first words in each text."""
        pair = self._shuffled(texts, first_words * SECOND_WORDS.count)[:, :count]
        first = self._shuffled(texts, FIRST_WORDS.count).gather(1, pair // SECOND_WORDS.count)
        second = pair % SECOND_WORDS.count
        return torch.stack([FIRST_WORDS.first + first, SECOND_WORDS.first + second], 2)

    def _shuffled(self, texts: int, count: int) -> Tensor:
        """[texts, count] 0..count - 1 in random order."""
        return self._uniform(texts, count).argsort(1)


def _all(slots: Tensor) -> Tensor:
    return torch.ones_like(slots[..., 0], dtype=torch.bool)
