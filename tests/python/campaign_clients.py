# SPDX-License-Identifier: Apache-2.0
"""The well-behaved clients of the campaigns (crash.py, soak.py, fuzz.py): what they do at random,
and what they know of it."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import grpc

import attnd
from attnd.memory_socket import ALIGNMENT_BYTES, aligned
from cases import Case
from probes import COMPLETION, KINDS, OBSERVED, Checked, Kind, decoded, probe

SHAPE = attnd.ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32, dtype="fp32")
LENGTHS = (40, 130, 600, 700, 1200, 1700)  # none, one, two and three segments
TENANTS = ("red", "blue")  # with equal models and token ids, and other keys and values
CASES = range(2 * len(KINDS))
COMPLETED_CASE = -1  # of the kind COMPLETION
SEALED_MOST = 150  # of which verifying and rebuilding after each cycle takes a second
SEALED_LEAST = 10  # of a tenant, before any is dropped
OPEN_MOST = 8
UPLOAD_S = 60.0  # for one upload
PATIENCE_S = (0.001, 0.003, 0.01, 0.03)  # for one that is given up
RETRIES = 300


@dataclass(frozen=True)
class Content:
    """A sequence's tokens: the first `tokens` of the tenant's case with this number."""

    tenant: str
    case: int
    tokens: int
    shape: attnd.ModelShape = SHAPE

    @property
    def kind(self) -> Kind:
        return COMPLETION if self.case == COMPLETED_CASE else KINDS[self.case % len(KINDS)]

    @property
    def data(self) -> Case:
        return _case(self.tenant, self.case, self.shape)

    @property
    def model(self) -> attnd.Model:
        """So that only equal contents share segments; the other tenant has one of this name."""
        return model_of(self.case, self.shape)

    @property
    def full(self) -> bool:
        return self.tokens >= max(LENGTHS) + 60


def model_of(case: int, shape: attnd.ModelShape) -> attnd.Model:
    return attnd.Model(f"case {case}", shape)


def room_of(tokens: int, shape: attnd.ModelShape) -> int:
    """Bytes for so many tokens' keys and values in all layers, each beginning where it may."""
    token_bytes = shape.kv_heads * (shape.head_dim + shape.value_elements) * 4
    return shape.layers * (tokens * token_bytes + 2 * ALIGNMENT_BYTES)


def placed(memory: attnd.KvMemory, chunks: Iterable[attnd.KvChunk]) -> list[attnd.KvChunk]:
    """The chunks with keys and values that lie in the memory."""
    there, offset = [], 0
    for chunk in chunks:
        arrays = []
        for array in (chunk.k, chunk.v):
            arrays.append(memory.array(offset, array.shape, array.dtype))
            arrays[-1][...] = array
            offset += aligned(array.nbytes)
        there.append(replace(chunk, k=arrays[0], v=arrays[1]))
    return there


@functools.cache
def _case(tenant: str, number: int, shape: attnd.ModelShape) -> Case:
    seed = zlib.crc32(f"{tenant} {number}".encode())
    return Case.random(max(LENGTHS) + 64, shape, seed=seed)


@dataclass
class Known:
    """What must be on disk, and what may be. Guarded by `lock`."""

    sealed: dict[int, Content] = field(default_factory=dict)
    sealing: list[Content] = field(default_factory=list)  # not acknowledged
    dropping: set[int] = field(default_factory=set)
    damaged: int | None = None  # a sealed sequence whose file was changed
    lock: threading.Lock = field(default_factory=threading.Lock)


def answer_fault(client: attnd.Client, sequence: int, content: Content) -> str:
    """What is wrong with how a sequence of this content answers its next token."""
    with client.decode_session() as session:
        return decoded(session, content.data, sequence, content.tokens).fault


def unreachable(error: attnd.AttndError, server_gone: Callable[[], bool]) -> bool:
    """Whether a call ended so because the server did: a server that is there answers."""
    return error.code is grpc.StatusCode.UNAVAILABLE and server_gone()


def never() -> bool:
    """Of a server that nobody ends while clients work."""
    return False


class Worker:
    """One client's life until the server is gone, or it is told to stop. Deeds say whether they did
    something: there may be nothing to do it to. `server_gone`: campaign_server.Server.is_gone."""

    def __init__(
        self,
        client: attnd.Client,
        tenant: str,
        known: Known,
        seed: int,
        *,
        shape: attnd.ModelShape = SHAPE,
        cases: Sequence[int] = CASES,
        shares_memory: bool = False,
        server_gone: Callable[[], bool] = never,
    ) -> None:
        """shares_memory: whether to upload through memory, too."""
        self.client, self.tenant, self.known = client, tenant, known
        self.random = random.Random(seed)
        self.shape, self.cases, self.server_gone = shape, cases, server_gone
        self.shares_memory = shares_memory
        self.stop = threading.Event()
        self.open: dict[int, Content] = {}
        # Of the open ones, those that brought all of their tokens, and those with a keep-set.
        self.whole: set[int] = set()
        self.kept: set[int] = set()
        self.last = 0  # the sequence that something was done to; none has this id
        self.wrong = 0
        self.done: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        actions = (self.upload, self.upload, self.decode, self.probe, self.fork, self.truncate)
        actions += (self.seal, self.seal, self.resume, self.drop)
        actions += (self.abandon,) * self.shares_memory
        with self.client:
            try:
                while not self.stop.is_set():
                    self.act(self.random.choice(actions))
                self.make_room()
            except attnd.AttndError as error:
                if not unreachable(error, self.server_gone):
                    self.fault(str(error))
            except Exception:
                self.fault(traceback.format_exc())

    def act(self, action: Callable[[], bool]) -> None:
        try:
            self.done[action.__name__] += action()
        except attnd.AttndError as error:  # of a call, or of a row
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            self.done["memory full"] += 1
            self.make_room()

    def fault(self, what: str) -> None:
        self.wrong += 1
        print(f"{self.tenant}: {what}", flush=True)

    def make_room(self) -> None:
        """The server's memory is full: all that is open goes, whatever became of it."""
        for sequence in self.open:
            self.client.close_sequence(sequence)
        self.open.clear()

    def any_open(self) -> int | None:
        """Often the one before: some faults take several deeds to one sequence."""
        if self.last not in self.open or self.random.random() < 0.5:
            self.last = self.random.choice(list(self.open)) if self.open else 0
        return self.last or None

    def upload(self) -> bool:
        content = Content(
            self.tenant,
            self.random.choice(self.cases),
            self.random.choice(LENGTHS),
            self.shape,
        )
        # Half of them without ids: nobody has those yet, so that memory fills.
        ids = range(content.tokens) if self.random.random() < 0.5 else ()
        kind, case = content.kind, content.data
        found = self.client.open_sequence(
            content.model, policy=kind.policy, indexes=kind.indexes, token_ids=ids
        )
        self.open[found.sequence_id] = content  # to be closed, should memory be full
        rest = slice(found.tokens_present, content.tokens)
        chunks = attnd.layer_chunks(
            case.layers(rest), first_position=rest.start, token_ids=ids[rest]
        )
        observed = case.q[:, max(rest.start, content.tokens - OBSERVED) : content.tokens]
        with self.memory_of(rest) as memory:
            self.client.append_kv(
                found.sequence_id,
                chunks if memory is None else placed(memory, chunks),
                prefill_complete=True,
                observed_queries=(
                    list(observed) if kind.kept or self.random.random() < 0.2 else None
                ),
                memory=memory,
                timeout_s=UPLOAD_S,
            )
        self.done["through memory"] += memory is not None
        if kind.kept:
            self.kept.add(found.sequence_id)
        if found.tokens_present == 0:
            self.whole.add(found.sequence_id)
        self.close_oldest()
        return True

    def memory_of(self, tokens: slice) -> contextlib.AbstractContextManager[attnd.KvMemory | None]:
        """Room for these tokens' keys and values in all layers, or none: then they are messages."""
        if not self.shares_memory or tokens.start == tokens.stop or self.random.random() < 0.5:
            return contextlib.nullcontext()
        return self.client.kv_memory(room_of(tokens.stop - tokens.start, self.shape))

    def abandon(self) -> bool:
        """An upload that its client gives up: what it writes to the memory then is in no sequence.
        The tokens that the server has taken are those that were there before."""
        content = Content(self.tenant, self.random.choice(self.cases), max(LENGTHS), self.shape)
        sequence = self.client.open_sequence(content.model, policy=content.kind.policy).sequence_id
        self.open[sequence] = content
        chunks = list(attnd.layer_chunks(content.data.layers(slice(0, content.tokens))))
        with self.client.kv_memory(room_of(content.tokens, self.shape)) as memory:
            there = placed(memory, chunks)
            assert self.client.limits  # asked before: what is given up is the upload
            try:
                self.client.append_kv(
                    sequence, there, memory=memory, timeout_s=self.random.choice(PATIENCE_S)
                )
            except attnd.DeadlineExceededError:
                self.done["given up"] += 1
            for chunk in there:
                chunk.k[...] = chunk.v[...] = 7
        self.append_again(sequence, chunks)
        self.client.close_sequence(sequence)
        del self.open[sequence]
        return True

    def append_again(self, sequence: int, chunks: Sequence[attnd.KvChunk]) -> None:
        """As soon as the stream before is no longer the sequence's writer."""
        for _ in range(RETRIES):
            try:
                self.client.append_kv(sequence, chunks, timeout_s=UPLOAD_S)
                return
            except attnd.AbortedError:
                time.sleep(0.1)
        self.fault("a stream that was given up is a sequence's writer still")

    def close_oldest(self) -> None:
        while len(self.open) > OPEN_MOST:
            oldest = next(iter(self.open))
            self.client.close_sequence(oldest)
            del self.open[oldest]

    def decode(self) -> bool:
        sequence = self.any_open()
        if sequence is None or self.open[sequence].full:
            return False
        content = self.open[sequence]
        ids = (content.tokens,) if self.random.random() < 0.5 else ()
        policy = self.random.choice(content.kind.exact)
        with self.client.decode_session() as session:
            checked = decoded(session, content.data, sequence, content.tokens, policy, ids)
        self.note(sequence, checked)
        self.open[sequence] = replace(content, tokens=content.tokens + 1)
        return True

    def note(self, sequence: int, checked: Checked) -> None:
        """What was uploaded whole and is read from disk was moved there."""
        if checked.fault:
            self.fault(f"{self.open[sequence]}: {checked.fault}")
        self.done["compared"] += checked.compared
        self.done["missed"] += checked.missed > 0
        if checked.from_disk > 0 and sequence in self.whole:
            self.done["moved"] += 1
            self.done["moved in token order"] += self.open[sequence].kind.token_order

    def probe(self) -> bool:
        sequence = self.any_open()
        if sequence is None:
            return False
        content = self.open[sequence]
        kind, exact = content.kind, self.random.random() < 0.5
        lossy = kind.lossy + (kind.kept if sequence in self.kept else ())
        policy = self.random.choice(kind.exact if exact else lossy)
        layer = self.random.randrange(self.shape.layers)
        with self.client.decode_session() as session:
            checked = probe(
                session, content.data, sequence, layer, content.tokens, policy, exact=exact
            )
        self.note(sequence, checked)
        self.done[policy.partition(":")[0]] += 1
        return True

    def shorter(self, content: Content) -> Content:
        """Of any length, that of all of it too."""
        whole = self.random.random() < 0.3
        return content if whole else replace(content, tokens=self.random.randint(1, content.tokens))

    def fork(self) -> bool:
        sequence = self.any_open()
        if sequence is None:
            return False
        content = self.shorter(self.open[sequence])
        forked = self.client.fork_sequence(sequence, length=content.tokens)
        self.open[forked] = content
        if sequence in self.kept:
            self.kept.add(forked)
        self.close_oldest()
        return True

    def truncate(self) -> bool:
        sequence = self.any_open()
        if sequence is None:
            return False
        content = self.shorter(self.open[sequence])
        self.client.truncate_sequence(sequence, content.tokens)
        self.open[sequence] = content
        return True

    def seal(self) -> bool:
        sequence = self.any_open()
        if sequence is None:
            return False
        if len(self.known.sealed) >= SEALED_MOST:
            self.drop()
        content = self.open[sequence]
        with self.known.lock:
            self.known.sealing.append(content)
        try:
            sealed = self.client.seal_sequence(sequence)
        except attnd.ResourceExhaustedError:
            with self.known.lock:
                self.known.sealing.remove(content)
            raise  # nothing of it is kept
        if sealed.tokens != content.tokens:
            self.fault(f"{content} was sealed as {sealed.tokens} tokens")
        with self.known.lock:
            self.known.sealing.remove(content)
            self.known.sealed[sealed.sealed_id] = content
        return True

    def any_sealed(self, *, drop: bool) -> tuple[int, Content] | None:
        with self.known.lock:
            left = [
                (number, content)
                for number, content in self.known.sealed.items()
                if content.tenant == self.tenant and number not in self.known.dropping
            ]
            if not left or (drop and len(left) < SEALED_LEAST):
                return None
            found = self.random.choice(left)
            if drop:
                self.known.dropping.add(found[0])
            return found

    def resume(self) -> bool:
        found = self.any_sealed(drop=False)
        if found is None:
            return False
        number, content = found
        try:
            back = self.client.open_sequence(content.model, resume=number)
        except attnd.NotFoundError:
            if not self.dropped(number):
                self.fault(f"sealed {number} of {content} is not found")
            return False
        if back.tokens_present != content.tokens:
            self.fault(f"sealed {number} of {content} came back with {back.tokens_present} tokens")
        self.open[back.sequence_id] = content
        self.close_oldest()
        return True

    def dropped(self, number: int) -> bool:
        """Whether another client has dropped it, or is about to."""
        with self.known.lock:
            return number not in self.known.sealed or number in self.known.dropping

    def drop(self) -> bool:
        found = self.any_sealed(drop=True)
        if found is None:
            return False
        self.client.drop_sealed(found[0])
        with self.known.lock:
            del self.known.sealed[found[0]]
            self.known.dropping.discard(found[0])
        return True
