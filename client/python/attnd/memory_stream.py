# SPDX-License-Identifier: Apache-2.0
"""Decode streams whose passes lie in memory that client and server share (proto, PassMemory)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, TypeVar

import grpc

from attnd import channel as channels
from attnd import replies, requests
from attnd.errors import AttndError, DeadlineExceededError
from attnd.pass_memory import PassLayout, PassMemory
from attnd.pass_reply import PassCall, PassReply
from attnd.requests import PassOptions, Row
from attnd.results import LayerResult, RowResult
from attnd.tensors import Array
from attnd.v1 import attnd_pb2, types_pb2
from attnd.words import ClientTurns, check_machine

SPIN_US_MAX = 10_000
# Between two looks at whether the stream has a reply or has ended.
_LOOK_PERIOD_S = 0.005

# Passes of a GPU that may be under way: the older one's layers are answered, the other is declared
# ahead.
DEVICE_PASSES_MAX = 2

DevicePass = TypeVar("DevicePass", bound="DeclaredPass")


class MemoryStream:
    """Passes of one Decode stream, for one thread, each over memory that the caller has for it.
    Made by :meth:`Client.memory_stream`.

    A pass that failed was given up and may be begun again: on this stream if the server told the
    error, on a new one if the stream ended or a step's time was over (every later call raises the
    same then).
    """

    def __init__(
        self,
        method: Callable[..., Any],
        metadata: channels.Metadata,
        timeout_s: float,
        spin_us: int,
    ) -> None:
        check_machine()
        if not 0 <= spin_us <= SPIN_US_MAX:
            raise ValueError(f"spin_us is {spin_us}; allowed are 0..{SPIN_US_MAX}")
        self._timeout_s = timeout_s
        self._spin_us = spin_us
        self._call = PassCall(method, metadata)
        self._ended: Exception | None = None
        self._passes: list[DeclaredPass] = []  # under way, the oldest first
        self._reply: PassReply | None = None  # to the newest pass that was sent
        self._step_id = 0

    def close(self) -> None:
        """Ends the stream; the sequences may then have another writer. A pass under way is given
        up, which the server notices within some 20 ms."""
        under_way, self._passes = self._passes, []
        if self._ended is None:
            self._ended = ValueError("the session is closed")
            if under_way:
                self._call.cancel()
            else:
                self._call.finish(self._timeout_s)

    @property
    def timeout_s(self) -> float:
        """Seconds for a step, unless it says otherwise."""
        return self._timeout_s

    def begin_pass(
        self,
        memory: PassMemory,
        rows: Sequence[Row],
        options: PassOptions,
        raise_on_row_error: bool = True,
    ) -> MemoryPass:
        """Declares a pass; as :meth:`MemorySession.begin_pass`. Waits for the reply to another
        stream's pass over the same memory.

        Args:
            memory: which no other pass uses until this one is over.
            options: without output_dtype, which is the layout's.
        """
        declaration = self._declaration(memory, rows, options, device_rings=False)
        whole = MemoryPass(self, memory, declaration, raise_on_row_error)
        self._declare(whole, memory, declaration)
        return whole

    def begin_device_pass(
        self,
        memory: PassMemory,
        rows: Sequence[Row],
        options: PassOptions,
        make: Callable[[Declaration], DevicePass],
    ) -> DevicePass:
        """As begin_pass, of a pass whose rings a GPU writes; one of these may be declared while
        another one is under way over the same memory, in stream order. Whoever calls this ends the
        pass with :meth:`let_go` or :meth:`give_up`.

        Args:
            make: the pass; called before the server hears of it.
        """
        declaration = self._declaration(memory, rows, options, device_rings=True)
        whole = make(declaration)
        self._declare(whole, memory, declaration)
        return whole

    def let_go(self, whole: DeclaredPass) -> None:
        """The pass is over on the server, too: the stream may have another one."""
        if self.has(whole):
            self._passes.remove(whole)

    def has(self, whole: DeclaredPass) -> bool:
        """Whether the pass is under way."""
        return whole in self._passes

    def give_up(self, error: AttndError) -> None:
        """Ends the stream, and with it the passes under way. Every later one raises the error."""
        self._passes = []
        self._call.cancel()
        if self._ended is None:
            self._ended = error

    def _declaration(
        self, memory: PassMemory, rows: Sequence[Row], options: PassOptions, *, device_rings: bool
    ) -> Declaration:
        """The message that declares a pass, whose epochs have begun in the memory's words."""
        if self._ended is not None:
            raise self._ended
        passes_max = DEVICE_PASSES_MAX if device_rings else 1
        if len(self._passes) >= passes_max:
            raise ValueError(f"passes under way: {len(self._passes)}; allowed are {passes_max}")
        if options.stats == "layer":
            raise ValueError('stats is "layer": a pass over memory has "pass" or "none"')
        layout = memory.layout
        query_tokens = sum(row.query_tokens for row in rows)
        new_tokens = sum(row.query_tokens for row in rows if not row.query_only)
        if not 0 < query_tokens <= layout.query_tokens_max:
            raise ValueError(
                f"the rows have {query_tokens} query tokens; allowed are "
                f"1..{layout.query_tokens_max}"
            )
        self._await_room(memory)
        self._step_id += 1
        request = requests.memory_pass_request(
            self._step_id,
            layout.shape.layers,
            rows,
            replace(options, output_dtype=layout.out.dtype),
            _tensors(layout, query_tokens, new_tokens),
        )
        request.begin_pass.memory.device_rings = device_rings
        request.begin_pass.memory.spin_us = self._spin_us
        memory.begin(request.begin_pass.memory, query_tokens, new_tokens)
        reply = PassReply(self._call, self._step_id, self._reply)
        return Declaration(
            request, tuple(rows), query_tokens, new_tokens, options.want_lse, reply
        )

    def _await_room(self, memory: PassMemory) -> None:
        """Waits until another pass may be declared over the memory. The server takes a stream's
        passes one after the other, so the reply to the one before may still be on its way. It is
        the only one, and what the server has told by now is heard."""
        if self._reply is not None and self._reply.arrived():
            self._await(self._reply.get, self._timeout_s)
        elif self._reply is not None:
            self._await(self._reply.await_before, self._timeout_s)
        if memory.reply is not self._reply:
            memory.await_free(self._timeout_s)

    def _declare(self, whole: DeclaredPass, memory: PassMemory, declaration: Declaration) -> None:
        """Sends the message. A reply is waited for only where there is one to come."""
        self._passes.append(whole)  # before it is sent: whatever comes between, close() gives it up
        try:
            self._call.send(declaration.request)
            self._reply = memory.reply = declaration.reply
        except BaseException as error:  # an interrupt, too: nobody knows whether it was sent
            self.give_up(_interrupted("the declaration of a pass", error))
            raise

    def _exchange(self, memory: PassMemory, reply: PassReply, timeout_s: float | None) -> None:
        """Rings for a layer of the one pass under way and waits for its answer.

        Raises:
            AttndError: if the pass is over.
        """
        if self._ended is not None:
            raise self._ended
        turns = memory.turns
        end = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        self._passes, under_way = [], self._passes  # unless this step succeeds
        try:
            self._ring_and_wait(turns, reply, end)
        except BaseException as error:  # an interrupt, too: nobody counts the pass's layers now
            self._call.cancel()
            self._ended = _interrupted("a step", error)
            raise
        if turns.answered():
            self._passes = under_way
            return
        self._await(reply.get, end - time.monotonic())
        reply.check(0)
        raise AttndError(grpc.StatusCode.INTERNAL, "the server ended a pass before its last layer")

    def _ring_and_wait(self, turns: ClientTurns, reply: PassReply, end: float) -> None:
        """Returns when the layer is answered, or the reply to the pass is there.

        Raises:
            DeadlineExceededError: if neither came by `end`, of time.monotonic().
        """
        turns.ring()
        answered = turns.await_answer(self._spin_us * 1e-6, _LOOK_PERIOD_S)
        while not answered and not reply.arrived():
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"
                )
            answered = turns.await_answer(0, min(left, _LOOK_PERIOD_S))

    def _await(self, wait: Callable[[float], object], timeout_s: float) -> None:
        """Waits for a reply to a pass of this stream. Raises as PassReply.get()."""
        try:
            wait(timeout_s)
        except AttndError as error:
            self._ended = error
            raise


def _interrupted(what: str, error: BaseException) -> AttndError:
    """Why a stream has ended in which this was raised."""
    if isinstance(error, AttndError):
        return error
    return AttndError(grpc.StatusCode.CANCELLED, f"{what} of the stream was interrupted")


def _tensors(
    layout: PassLayout, query_tokens: int, new_tokens: int
) -> Iterator[tuple[str, types_pb2.Tensor]]:
    yield "q", layout.q.message(query_tokens)
    if new_tokens:
        yield "k", layout.k.message(new_tokens)
    if new_tokens and not layout.shape.latent:
        yield "v", layout.v.message(new_tokens)


@dataclass(frozen=True)
class Declaration:
    """A pass as it is declared.

    Attributes:
        request: the message.
        rows: the batch.
        query_tokens: of all rows together.
        new_tokens: those of them that are appended.
        want_lse: whether there is an lse.
        reply: to the message, some day.
    """

    request: attnd_pb2.DecodeRequest
    rows: tuple[Row, ...]
    query_tokens: int
    new_tokens: int
    want_lse: bool
    reply: PassReply


class DeclaredPass:
    """What passes over memory have in common: rows, and the one reply.

    Attributes:
        layer: the next one; layers if the pass is complete.
    """

    def __init__(
        self,
        stream: MemoryStream,
        memory: PassMemory,
        declaration: Declaration,
        raise_on_row_error: bool,
    ) -> None:
        self.layer = 0
        self._reply = declaration.reply
        self._stream = stream
        self._memory = memory
        self._declared = declaration.rows
        self._raise_on_row_error = raise_on_row_error
        layout, region = memory.layout, memory.memory
        self._out = layout.out.array(region, declaration.query_tokens)
        self._lse: Array | None = (
            layout.lse.array(region, declaration.query_tokens)[:, :, 0]
            if declaration.want_lse
            else None
        )

    @property
    def failed_rows(self) -> int:
        """How many rows have left the pass so far."""
        return self._memory.turns.failed_rows()

    @property
    def complete(self) -> bool:
        """Whether all layers were answered: the tokens are committed."""
        return self.layer == self._memory.layout.shape.layers

    @property
    def told(self) -> bool:
        """Whether the reply to the pass is there, so that `rows` does not wait."""
        return self._reply.arrived()

    @property
    def rows(self) -> tuple[RowResult, ...]:
        """One outcome for each row, in order; empty if all are OK and the pass has no statistics to
        tell, and before the pass is complete. The reply that tells them may be on its way when the
        last layer is answered: this waits for it, at most for the client's timeout, and raises an
        AttndError if there is none; the tokens are committed all the same."""
        return tuple(map(RowResult.from_proto, self._told().rows))

    @property
    def queue_us(self) -> int:
        """The server's time for all layers until their steps began; waits as `rows` does."""
        return self._told().queue_us

    @property
    def engine_us(self) -> int:
        """The server's time for the steps of all layers; waits as `rows` does."""
        return self._told().engine_us

    def _told(self) -> attnd_pb2.DecodeResponse:
        if not self.complete:
            return attnd_pb2.DecodeResponse()
        return self._reply.check(self._stream._timeout_s)

    def _end(self) -> None:
        """After the last layer's answer.

        Raises:
            RowError: if a row failed and the pass is to raise it.
        """
        self._stream.let_go(self)
        if self._raise_on_row_error and self.failed_rows:
            out, lse = self._answer()
            result = LayerResult(out, lse, self.rows, self.queue_us, self.engine_us)
            failed = replies.row_error(self._declared, result)
            if failed is not None:
                raise failed

    def _answer(self) -> tuple[Array, Array | None]:
        """Copies of the last layer's out and lse."""
        return self._out.copy(), None if self._lse is None else self._lse.copy()


class MemoryPass(DeclaredPass):
    """A step of each layer over the same rows, in shared memory. Made by
    :meth:`MemorySession.begin_pass`.

    All arrays are views of the region: write q, k and v of a layer, call :meth:`step`, and read out
    and lse, before the next layer overwrites them. They support the buffer protocol and DLPack;
    :func:`as_torch` makes tensors of them, without a copy.

    Attributes:
        q: [query tokens, query_heads, head_dim], rows one after the other.
        k: [new tokens, kv_heads, head_dim], keys rotated already. No tokens if all rows are
            query_only.
        v: [new tokens, kv_heads, value_dim]; value_dim is 0 for latent models.
        out: [query tokens, query_heads, value_dim]; NaN for rows that have failed.
        lse: [query tokens, query_heads] float32; None unless the pass wants it.
        layer: the next one; layers if the pass is complete.
    """

    def __init__(
        self,
        stream: MemoryStream,
        memory: PassMemory,
        declaration: Declaration,
        raise_on_row_error: bool,
    ) -> None:
        super().__init__(stream, memory, declaration, raise_on_row_error)
        layout, region = memory.layout, memory.memory
        self.q = layout.q.array(region, declaration.query_tokens)
        self.k = layout.k.array(region, declaration.new_tokens)
        self.v = layout.v.array(region, declaration.new_tokens)
        self.out = self._out
        self.lse = self._lse

    def step(self, *, timeout_s: float | None = None) -> None:
        """Has the next layer answered: q, k and v have been written, out and lse are there when it
        returns. After the last layer the tokens are committed.

        Args:
            timeout_s: seconds to wait for the answer; None is the client's timeout.

        Raises:
            RowError: after the last layer, if a row failed; its `result` is a LayerResult with
                copies of out and lse.
            AttndError: if the pass failed as a whole: it was given up.
            ValueError: if the pass is complete, failed, or its session was closed.
        """
        if not self._stream.has(self):
            raise ValueError("the pass is complete or failed")
        self._stream._exchange(self._memory, self._reply, timeout_s)
        self.layer += 1
        if self.complete:
            self._end()
