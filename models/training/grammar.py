# SPDX-License-Identifier: Apache-2.0
"""Draws the texts that the nano models are trained on: a haystack of records in filler, then
questions about it with their answers.

A text is a row of slots of 8 tokens (models/nano-llama/README.md describes the language). Every
slot is filler at first, a Markov chain that starts anew in each slot, so that all slots are drawn
at once; records and questions then overwrite what they need. All arrays stay on one device: at
training speed, copies from the host would cost more than the draws.
"""

from __future__ import annotations

import enum
import pathlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SLOT_TOKENS = 8
VOCABULARY = 2048
# Assignments are dealt to this many chains in turn: each refers to the one this many before it.
CHAINS = 8
# Questions follow a name over at most this many references.
TRACE_REFERENCES_MAX = 2
COUNTED_PER_SLOT = 4
TOP_RANKS = 3
# Frequencies of the counted words: a uniform number to this power chooses the rank.
COUNTED_SKEW = 2.5
# Share of slots that are records: drawn for each text from this range while training.
DENSITY_RANGE = (0.1, 0.6)
# Share of a training text's slots that are questions.
QUESTION_SHARE = 0.25
QUESTIONS_MIN = 4


class Token(enum.IntEnum):
    """Tokens with a meaning of their own; the words' ranges follow below."""

    PAD = 0
    BOS = 1
    RECORD = 2
    LET = 3
    BUY = 4
    IS = 5
    AT = 6
    DOT = 7
    END = 8
    ASK = 9
    TRACE = 10
    BEFORE = 11
    TOP = 12


@dataclass(frozen=True)
class Words:
    """A range of token ids."""

    first: int
    count: int


RANKS = Words(16, TOP_RANKS)
# Keys, names and items are one first and one second word of the same sets: near matches abound.
FIRST_WORDS = Words(32, 48)
SECOND_WORDS = Words(80, 464)
VALUES = Words(544, 512)
COUNTED = Words(1056, 64)
FILLER = Words(1120, 928)


class Kind(enum.IntEnum):
    """What a slot of the haystack holds."""

    FILLER = -1
    KEY = 0
    ASSIGNMENT = 1
    PURCHASE = 2
    COUNTED = 3


class Task(enum.IntEnum):
    """What a question asks; the numbers are those of evaluation sets."""

    NIAH = 0
    TRACE = 1
    BEFORE = 2
    TOP = 3


# Each list is drawn from uniformly: repeats are weights.
_KIND_WEIGHTS = [Kind.KEY] * 3 + [Kind.ASSIGNMENT] + [Kind.PURCHASE] * 2 + [Kind.COUNTED] * 2
_TASK_WEIGHTS = [Task.NIAH] * 4 + [Task.TRACE] * 2 + [Task.BEFORE] * 3 + [Task.TOP]
# The first slots are the same in every text, so that every question has something to ask about.
_FIRST_KINDS = [Kind.KEY, Kind.ASSIGNMENT, Kind.PURCHASE, Kind.COUNTED, Kind.PURCHASE]


@dataclass(frozen=True)
class Batch:
    """Texts of one length.

    Attributes:
        tokens: [texts, length] int64.
        answers: [texts, length] bool, true at the answers' tokens.
        tasks: [texts, length] int64, each question's Task over its whole slot, -1 elsewhere.
    """

    tokens: Tensor
    answers: Tensor
    tasks: Tensor


@dataclass(frozen=True)
class _Records:
    """What the questions of a text may ask for; [texts, slots] or [texts, slots, 2] words.

    Attributes:
        kinds: Kind of each slot.
        name: the slot's key, name or item.
        value: the slot's value; a purchase's place is its first word.
        root: value at the end of an assignment's chain.
        references: references from an assignment to its root.
        previous: item of the purchase before a purchase.
        purchases: purchases before a purchase.
        top: [texts, TOP_RANKS] the most frequent counted words.
    """

    kinds: Tensor
    name: Tensor
    value: Tensor
    root: Tensor
    references: Tensor
    previous: Tensor
    purchases: Tensor
    top: Tensor


def read_successors(device: torch.device | str) -> Tensor:
    """The filler's Markov table [FILLER.count, 8]: what may follow each word, equally likely."""
    path = pathlib.Path(__file__).with_name("filler_transitions.npy")
    return torch.from_numpy(np.load(path).astype(np.int64)).to(device)


class TextGenerator:
    """Draws texts; the same seed gives the same texts on the same kind of device."""

    def __init__(self, successors: Tensor, seed: int) -> None:
        """successors: as read_successors(); the texts are made on its device."""
        self._successors = successors
        self._device = successors.device
        self._random = torch.Generator(self._device)
        self._random.manual_seed(seed)

    @torch.no_grad()
    def training_batch(self, texts: int, length: int) -> Batch:
        """Texts of mixed questions, the density of records drawn for each."""
        slots = length // SLOT_TOKENS
        questions = max(QUESTIONS_MIN, int(slots * QUESTION_SHARE))
        low, high = DENSITY_RANGE
        density = low + (high - low) * self._uniform(texts, 1)
        tasks = self._choice(_TASK_WEIGHTS, texts, questions)
        return self._draw(slots - questions, density, tasks)

    @torch.no_grad()
    def task_batch(
        self, texts: int, length: int, task: Task, questions: int = 16, density: float = 0.2
    ) -> Batch:
        """Texts whose questions are all of one task, as those of the evaluation set."""
        slots = length // SLOT_TOKENS
        densities = torch.full((texts, 1), density, device=self._device)
        tasks = torch.full((texts, questions), int(task), device=self._device)
        return self._draw(slots - questions, densities, tasks)

    def _draw(self, haystack_slots: int, density: Tensor, tasks: Tensor) -> Batch:
        """density: [texts, 1]; tasks: [texts, questions]."""
        texts, questions = tasks.shape
        slots = self._filler(texts, haystack_slots + questions)
        haystack, asked = slots[:, :haystack_slots], slots[:, haystack_slots:]
        records = self._write_records(haystack, density)
        self._write_questions(asked, tasks, records)
        slots[:, 0, 0] = Token.BOS

        task_of = torch.full_like(slots, -1)
        task_of[:, haystack_slots:] = tasks[..., None]
        answers = torch.zeros_like(slots, dtype=torch.bool)
        answers[:, haystack_slots:, 4] = True
        answers[:, haystack_slots:, 5] = tasks != Task.TOP  # its answers are single words
        return Batch(slots.flatten(1), answers.flatten(1), task_of.flatten(1))

    def _filler(self, texts: int, slots: int) -> Tensor:
        """[texts, slots, SLOT_TOKENS]"""
        word = self._integers(FILLER.count, texts, slots)
        words = [word]
        for _ in range(SLOT_TOKENS - 1):
            word = self._successors[word, self._integers(self._successors.shape[1], texts, slots)]
            words.append(word)
        return torch.stack(words, dim=-1) + FILLER.first

    def _write_records(self, slots: Tensor, density: Tensor) -> _Records:
        """slots: [texts, n, SLOT_TOKENS], the haystack; written in place."""
        shape = slots.shape[:2]
        kinds = self._kinds(density, *shape)
        name = torch.stack([self._words(FIRST_WORDS, *shape), self._words(SECOND_WORDS, *shape)], 2)
        value = self._words(VALUES, *shape, 2)

        chosen = kinds == Kind.ASSIGNMENT
        order, places = ordered(chosen)
        referred = places.gather(1, (order - CHAINS).clamp(min=0))
        assigned = torch.where((order >= CHAINS)[..., None], at(name, referred), value)
        root = at(value, places.gather(1, order.clamp(min=0) % CHAINS))
        references = order // CHAINS
        write(slots, chosen, Token.LET, name, Token.IS, assigned, Token.DOT)

        chosen = kinds == Kind.PURCHASE
        order, places = ordered(chosen)
        previous = at(name, places.gather(1, (order - 1).clamp(min=0)))
        write(slots, chosen, Token.BUY, name, Token.AT, value[..., :1], Token.DOT)

        chosen = kinds == Kind.KEY
        write(slots, chosen, Token.RECORD, name, Token.IS, value, Token.DOT)
        top = self._write_counted(slots, kinds == Kind.COUNTED)
        return _Records(kinds, name, value, root, references, previous, order, top)

    def _kinds(self, density: Tensor, texts: int, slots: int) -> Tensor:
        record = self._uniform(texts, slots) < density
        kinds = torch.where(record, self._choice(_KIND_WEIGHTS, texts, slots), int(Kind.FILLER))
        kinds[:, : len(_FIRST_KINDS)] = torch.tensor(_FIRST_KINDS, device=self._device)
        return kinds

    def _write_counted(self, slots: Tensor, chosen: Tensor) -> Tensor:
        """Writes the chosen slots; -> the most frequent words."""
        texts, n = chosen.shape
        uniform = self._uniform(texts, n * COUNTED_PER_SLOT)
        rank = (uniform**COUNTED_SKEW * COUNTED.count).long()
        return write_counted(slots, chosen, self._counted_words(rank))

    def _counted_words(self, rank: Tensor) -> Tensor:
        """rank: [texts, n] in 0..COUNTED.count - 1 -> [texts, n] the words of these ranks, other
        ones in each text, so that they must be counted there."""
        by_rank = self._uniform(len(rank), COUNTED.count).argsort(1)
        return COUNTED.first + by_rank.gather(1, rank)

    def _write_questions(self, slots: Tensor, tasks: Tensor, records: _Records) -> None:
        """slots: [texts, questions, SLOT_TOKENS], written in place; tasks: [texts, questions]."""
        kinds, name = records.kinds, records.name
        traceable = (kinds == Kind.ASSIGNMENT) & (records.references <= TRACE_REFERENCES_MAX)
        second_or_later = (kinds == Kind.PURCHASE) & (records.purchases >= 1)
        lookups = [
            (Task.NIAH, Token.ASK, kinds == Kind.KEY, records.value),
            (Task.TRACE, Token.TRACE, traceable, records.root),
            (Task.BEFORE, Token.BEFORE, second_or_later, records.previous),
        ]
        for task, opening, valid, answer in lookups:
            place = self._pick(valid, tasks.shape[1])
            ask(slots, tasks == task, opening, at(name, place), at(answer, place))
        rank = self._integers(TOP_RANKS, *tasks.shape)
        ask_top(slots, tasks == Task.TOP, rank, records.top)

    def _pick(self, valid: Tensor, count: int) -> Tensor:
        """[texts, count] places where valid [texts, slots] is true, each equally likely."""
        return torch.multinomial(valid.float(), count, replacement=True, generator=self._random)

    def _words(self, words: Words, *shape: int) -> Tensor:
        return words.first + self._integers(words.count, *shape)

    def _choice(self, values: list[Kind] | list[Task], *shape: int) -> Tensor:
        table = torch.tensor([int(value) for value in values], device=self._device)
        return table[self._integers(len(values), *shape)]

    def _integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, device=self._device, generator=self._random)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self._device, generator=self._random)


def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For chosen [texts, slots]: how many chosen slots precede each chosen slot, and the places of
    the chosen slots in order. Elsewhere both hold what is a valid index or -1, and means nothing.
    """
    slots = chosen.shape[1]
    every = torch.arange(slots, device=chosen.device)
    places = torch.where(chosen, every, slots - 1).sort(1).values
    return chosen.cumsum(1) - 1, places


def at(words: Tensor, places: Tensor) -> Tensor:
    """words [texts, slots, k] at places [texts, n] -> [texts, n, k]"""
    return words.gather(1, places[..., None].expand(-1, -1, words.shape[2]))


def ask(slots: Tensor, chosen: Tensor, opening: Token, name: Tensor, answer: Tensor) -> None:
    """Writes questions with their answers into the chosen of slots [texts, n, SLOT_TOKENS], in
    place; name, answer: [texts, n, 2]."""
    write(slots, chosen, opening, name, Token.IS, answer, Token.DOT, Token.END)


def ask_top(slots: Tensor, chosen: Tensor, rank: Tensor, top: Tensor) -> None:
    """The same for counted words; rank: [texts, n], top: [texts, TOP_RANKS] the words."""
    answer = top.gather(1, rank)[..., None]
    asked = (RANKS.first + rank)[..., None]
    closing = (Token.DOT, Token.DOT, Token.END)
    write(slots, chosen, Token.TOP, Token.TOP, asked, Token.IS, answer, *closing)


def write_counted(slots: Tensor, chosen: Tensor, words: Tensor) -> Tensor:
    """Writes every other token of the chosen slots, in place.

    Args:
        slots: [texts, n, SLOT_TOKENS].
        chosen: [texts, n] bool.
        words: [texts, n * COUNTED_PER_SLOT] counted words, of each slot in turn.

    Returns:
        [texts, TOP_RANKS] the most frequent of the words written.
    """
    counts = torch.zeros(len(words), COUNTED.count, device=words.device)
    written = chosen.repeat_interleave(COUNTED_PER_SLOT, 1).float()
    counts.scatter_add_(1, words - COUNTED.first, written)
    places = slots[..., :: SLOT_TOKENS // COUNTED_PER_SLOT]
    shown = words.view(*chosen.shape, COUNTED_PER_SLOT)
    places.copy_(torch.where(chosen[..., None], shown, places))
    return COUNTED.first + counts.topk(TOP_RANKS, 1).indices


def write(slots: Tensor, chosen: Tensor, *words: int | Tensor) -> None:
    """Overwrites the first tokens of the chosen slots, in place.

    Args:
        slots: [texts, n, SLOT_TOKENS].
        chosen: [texts, n] bool.
        words: one after the other; an int, or one or two words of each slot [texts, n, 1 or 2].
    """
    start = 0
    for word in words:
        end = start + (word.shape[2] if isinstance(word, Tensor) else 1)
        span = slots[..., start:end]
        span.copy_(torch.where(chosen[..., None], word, span))
        start = end
