# SPDX-License-Identifier: Apache-2.0
"""The clients of the crash runs (crash.py): what they do at random, and what they know of it."""

from __future__ import annotations

import functools
import random
import threading
from dataclasses import dataclass, field

import numpy as np

import attnd
from cases import Case, step

SHAPE = attnd.ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32, dtype="fp32")
LENGTHS = (40, 130, 600, 700, 1200)
TOLERANCE = 2e-5
GONE = (attnd.UnavailableError, attnd.AbortedError, attnd.DeadlineExceededError)


@dataclass(frozen=True)
class Content:
    """A sequence's tokens: the first `tokens` of the case with this number."""

    case: int
    tokens: int


@dataclass
class Known:
    """What must be on disk, and what may be. Guarded by `lock`."""

    sealed: dict[int, Content] = field(default_factory=dict)
    sealing: list[Content] = field(default_factory=list)  # not acknowledged
    dropping: set[int] = field(default_factory=set)
    damaged: int | None = None  # a sealed sequence whose file was changed
    lock: threading.Lock = field(default_factory=threading.Lock)


@functools.cache
def case_of(number: int) -> Case:
    return Case.random(max(LENGTHS) + 64, SHAPE, seed=number)


def model_of(number: int) -> attnd.Model:
    return attnd.Model(f"case {number}", SHAPE)  # so that only equal contents share segments


def answer(client: attnd.Client, sequence: int, content: Content) -> tuple[bool, int]:
    """Whether a sequence of this content answers its next token as dense attention over it does,
    and how many tokens were read from disk for it."""
    case = case_of(content.case)
    tokens = slice(content.tokens, content.tokens + 1)
    with client.decode_session() as session:
        result = step(session, case, sequence, 0, tokens)
    out, lse = case.expected(0, tokens)
    right = bool(
        np.allclose(np.asarray(result.out), out, rtol=TOLERANCE, atol=TOLERANCE)
        and np.allclose(np.asarray(result.lse), lse, rtol=TOLERANCE, atol=TOLERANCE)
    )
    return right, result.rows[0].stats.ssd_tokens


def answers(client: attnd.Client, sequence: int, content: Content) -> bool:
    return answer(client, sequence, content)[0]


class Worker:
    """One client's life until the server is gone."""

    def __init__(self, target: str, known: Known, seed: int) -> None:
        self.known, self.random = known, random.Random(seed)
        self.client = attnd.Client(target, timeout_s=20)
        self.open: dict[int, Content] = {}
        self.whole: set[int] = set()  # of the open ones, those that brought all of their tokens
        self.wrong = self.moved = 0  # moved: steps over segments that were moved to disk

    def run(self) -> None:
        actions = (self.upload, self.upload, self.decode, self.fork, self.seal, self.seal)
        actions += (self.resume, self.drop)
        with self.client:
            try:
                while True:
                    try:
                        self.random.choice(actions)()
                    except attnd.ResourceExhaustedError:
                        self.make_room()
            except GONE:
                pass

    def make_room(self) -> None:
        """The server's memory is full: all that is open goes, whatever became of it."""
        for sequence in self.open:
            self.client.close_sequence(sequence)
        self.open.clear()

    def any_open(self) -> int | None:
        return self.random.choice(list(self.open)) if self.open else None

    def upload(self) -> None:
        content = Content(self.random.randrange(6), self.random.choice(LENGTHS))
        case = case_of(content.case)
        # Half of them without ids: nobody has those yet, so that memory fills.
        ids = range(content.tokens) if self.random.random() < 0.5 else ()
        found = self.client.open_sequence(model_of(content.case), token_ids=ids)
        self.open[found.sequence_id] = content  # to be closed, should memory be full
        rest = slice(found.tokens_present, content.tokens)
        chunks = attnd.layer_chunks(
            case.layers(rest), first_position=rest.start, token_ids=ids[rest]
        )
        self.client.append_kv(found.sequence_id, chunks, prefill_complete=True)
        if found.tokens_present == 0:
            self.whole.add(found.sequence_id)
        if len(self.open) > 8:
            oldest = next(iter(self.open))
            self.client.close_sequence(oldest)
            del self.open[oldest]

    def decode(self) -> None:
        sequence = self.any_open()
        if sequence is None or self.open[sequence].tokens >= max(LENGTHS) + 60:
            return
        content = self.open[sequence]
        right, from_disk = answer(self.client, sequence, content)
        self.wrong += not right
        self.moved += from_disk > 0 and sequence in self.whole
        self.open[sequence] = Content(content.case, content.tokens + 1)

    def fork(self) -> None:
        sequence = self.any_open()
        if sequence is not None:
            self.open[self.client.fork_sequence(sequence)] = self.open[sequence]

    def seal(self) -> None:
        sequence = self.any_open()
        if sequence is None:
            return
        content = self.open[sequence]
        with self.known.lock:
            self.known.sealing.append(content)
        try:
            sealed = self.client.seal_sequence(sequence)
        except attnd.ResourceExhaustedError:
            with self.known.lock:
                self.known.sealing.remove(content)
            raise
        self.wrong += sealed.tokens != content.tokens
        with self.known.lock:
            self.known.sealing.remove(content)
            self.known.sealed[sealed.sealed_id] = content

    def any_sealed(self, *, drop: bool) -> tuple[int, Content] | None:
        with self.known.lock:
            left = [i for i in self.known.sealed.items() if i[0] not in self.known.dropping]
            if not left or (drop and len(left) < 20):
                return None
            found = self.random.choice(left)
            if drop:
                self.known.dropping.add(found[0])
            return found

    def resume(self) -> None:
        found = self.any_sealed(drop=False)
        if found is None:
            return
        try:
            back = self.client.open_sequence(model_of(found[1].case), resume=found[0])
        except attnd.NotFoundError:
            with self.known.lock:  # another client dropped it meanwhile
                self.wrong += found[0] in self.known.sealed and found[0] not in self.known.dropping
            return
        self.wrong += back.tokens_present != found[1].tokens
        self.open[back.sequence_id] = found[1]

    def drop(self) -> None:
        found = self.any_sealed(drop=True)
        if found is None:
            return
        self.client.drop_sealed(found[0])
        with self.known.lock:
            del self.known.sealed[found[0]]
            self.known.dropping.discard(found[0])
