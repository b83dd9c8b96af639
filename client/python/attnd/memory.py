# SPDX-License-Identifier: Apache-2.0
"""Decode passes whose arrays lie in memory that client and server share (proto, PassMemory)."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Callable

import grpc
import numpy as np
import numpy.typing as npt

from attnd import channel as channels
from attnd import replies, requests
from attnd.errors import (
    DeadlineExceededError,
    UnavailableError,
    from_rpc_error,
)
from attnd.memory_socket import MemorySocket
from attnd.model import ModelShape
from attnd.requests import Row
from attnd.results import LayerResult, RowResult
from attnd.tensors import BF16, FP32, Array, as_dtype, to_wire_dtype
from attnd.v1 import attnd_pb2, types_pb2
from attnd.words import WORDS_BYTES, ClientTurns, check_machine

_ALIGNMENT_BYTES = 64
SPIN_US_MAX = 10_000
# Between two looks at whether the stream has a reply or has ended.
_LOOK_PERIOD_S = 0.005


class _Stream:
    """One Decode call. A thread takes its replies, so that the caller can look without waiting."""

    def __init__(self, method: Callable[..., Any], metadata: channels.Metadata) -> None:
        self._requests: queue.SimpleQueue[attnd_pb2.DecodeRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[attnd_pb2.DecodeResponse | Exception] = queue.SimpleQueue()
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="attnd-memory-replies", daemon=True).start()

    def send(self, request: attnd_pb2.DecodeRequest) -> None:
        self._requests.put(request)

    def arrived(self) -> bool:
        """Whether receive would return or raise at once."""
        return not self._replies.empty()

    def receive(self, timeout_s: float) -> attnd_pb2.DecodeResponse:
        try:
            reply = self._replies.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise DeadlineExceededError(
                grpc.StatusCode.DEADLINE_EXCEEDED, "no reply in time"
            ) from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        self._call.cancel()
        self._requests.put(None)

    def _read(self) -> None:
        ended: Exception = UnavailableError(
            grpc.StatusCode.UNAVAILABLE, "the server ended the stream"
        )
        try:
            for reply in self._call:
                self._replies.put(reply)
        except grpc.RpcError as error:
            ended = from_rpc_error(error)
        self._replies.put(ended)


class _Tensor:
    """One tensor's place in a region, and its arrays of so many tokens."""

    def __init__(
        self, offset: int, tokens_max: int, heads: int, dim: int, dtype: np.dtype[Any]
    ) -> None:
        self.offset = offset
        self.heads = heads
        self.dim = dim
        self.dtype = dtype
        self.end = offset + self._bytes(tokens_max)

    def _bytes(self, tokens: int) -> int:
        bytes_ = tokens * self.heads * self.dim * self.dtype.itemsize
        return math.ceil(bytes_ / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def array(self, memory: Any, tokens: int) -> Array:
        array: Array = np.ndarray((tokens, self.heads, self.dim), self.dtype, memory, self.offset)
        return array

    def shape(self, tokens: int) -> types_pb2.Tensor:
        wire = to_wire_dtype(self.dtype)
        return types_pb2.Tensor(dtype=wire, shape=(tokens, self.heads, self.dim))


class MemorySession:
    """Decode passes over one region, for one thread. Made by :meth:`Client.memory_session`; use it
    in a `with` statement.

    Nothing is repeated by itself. A pass that failed was given up and may be begun again: in this
    session if the server told the error, in a new one if the stream ended or a step's time was over
    (every later call raises the same then).
    """

    def __init__(
        self,
        method: Callable[..., Any],
        metadata: channels.Metadata,
        tenant: str,
        timeout_s: float,
        shape: ModelShape,
        query_tokens_max: int,
        query_dtype: npt.DTypeLike | None,
        output_dtype: npt.DTypeLike | None,
        spin_us: int,
        socket: str,
    ) -> None:
        check_machine()
        if query_tokens_max < 1:
            raise ValueError(f"query_tokens_max is {query_tokens_max}; allowed are 1 and more")
        if not 0 <= spin_us <= SPIN_US_MAX:
            raise ValueError(f"spin_us is {spin_us}; allowed are 0..{SPIN_US_MAX}")
        self._shape = shape
        self._timeout_s = timeout_s
        self._query_tokens_max = query_tokens_max
        self._spin_us = spin_us
        kv_dtype = as_dtype(shape.dtype)
        q_dtype = kv_dtype if query_dtype is None else as_dtype(query_dtype)
        out_dtype = q_dtype if output_dtype is None else as_dtype(output_dtype)
        end = WORDS_BYTES
        placed: list[_Tensor] = []
        for heads, dim, dtype in (
            (shape.query_heads, shape.head_dim, q_dtype),
            (shape.kv_heads, shape.head_dim, kv_dtype),
            (shape.kv_heads, 0 if shape.latent else shape.value_elements, kv_dtype),
            (shape.query_heads, shape.value_elements, out_dtype),
            (shape.query_heads, 1, FP32),
        ):
            placed.append(_Tensor(end, query_tokens_max, heads, dim, dtype))
            end = placed[-1].end
        self._q, self._k, self._v, self._out, self._lse = placed
        self._socket = MemorySocket(socket, timeout_s)
        try:
            self._region = self._socket.register(end, tenant)
        except BaseException:
            self._socket.close()
            raise
        self._turns = ClientTurns(self._region.memory, 0)
        self._stream = _Stream(method, metadata)
        self._ended: Exception | None = None
        self._pass: MemoryPass | None = None  # under way
        self._step_id = 0

    def __enter__(self) -> MemorySession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream and unregisters the region; a pass under way is given up. Arrays of
        passes stay readable."""
        self._pass = None
        self._ended = self._ended or ValueError("the session is closed")
        self._stream.close()
        self._socket.close()

    def begin_pass(
        self,
        rows: Sequence[Row],
        *,
        deadline_us: int = 0,
        pass_deadline_us: int = 0,
        want_lse: bool = False,
        stats: str = "pass",
        raise_on_row_error: bool = True,
    ) -> MemoryPass:
        """Declares a pass of all layers over these rows; does not wait for the server, whose errors
        the steps raise.

        Args:
            rows: the batch; each sequence at most once, at most query_tokens_max tokens together.
            deadline_us: time that the server may take for a layer; 0 is no limit.
            pass_deadline_us: time that the whole pass may take; 0 is no limit.
            want_lse: whether there is an lse.
            stats: "pass" or "none": whether the rows' results have statistics, over all layers.
            raise_on_row_error: whether the last step raises if a row has failed; otherwise look at
                the pass's rows.

        Raises:
            ValueError: for rows that do not fit, other stats, or while a pass is under way.
        """
        if self._ended is not None:
            raise self._ended
        if self._pass is not None:
            raise ValueError("a pass is under way")
        if stats == "layer":
            raise ValueError('stats is "layer": a pass over memory has "pass" or "none"')
        query_tokens = sum(row.query_tokens for row in rows)
        new_tokens = sum(row.query_tokens for row in rows if not row.query_only)
        if not 0 < query_tokens <= self._query_tokens_max:
            raise ValueError(
                f"the rows have {query_tokens} query tokens; allowed are "
                f"1..{self._query_tokens_max}"
            )
        options = requests.PassOptions(
            deadline_us, pass_deadline_us, self._out.dtype, want_lse, stats
        )
        self._step_id += 1
        request = requests.memory_pass_request(
            self._step_id,
            self._shape.layers,
            rows,
            options,
            self._tensors(query_tokens, new_tokens),
        )
        memory = request.begin_pass.memory
        memory.region_id = self._region.id
        memory.first_epoch = self._turns.begin(self._shape.layers)
        memory.spin_us = self._spin_us
        for span, tensor in (
            (memory.q, self._q),
            (memory.k, self._k),
            (memory.v, self._v),
            (memory.out, self._out),
            (memory.lse, self._lse),
        ):
            span.offset = tensor.offset
        self._stream.send(request)
        self._pass = MemoryPass(self, rows, query_tokens, new_tokens, want_lse, raise_on_row_error)
        return self._pass

    def _tensors(
        self, query_tokens: int, new_tokens: int
    ) -> Iterator[tuple[str, types_pb2.Tensor]]:
        yield "q", self._q.shape(query_tokens)
        if new_tokens:
            yield "k", self._k.shape(new_tokens)
        if new_tokens and not self._shape.latent:
            yield "v", self._v.shape(new_tokens)

    def _exchange(self, last: bool, timeout_s: float | None) -> attnd_pb2.DecodeResponse | None:
        """Rings for a layer and waits for its answer; of the last one also for the reply.

        Raises:
            AttndError: if the pass is over.
        """
        if self._ended is not None:
            raise self._ended
        end = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        self._pass, under_way = None, self._pass  # unless this step succeeds
        self._turns.ring()
        answered = self._turns.await_answer(self._spin_us * 1e-6, _LOOK_PERIOD_S)
        while not answered and not self._stream.arrived():
            left = end - time.monotonic()
            if left <= 0:
                self._stream.close()
                self._ended = DeadlineExceededError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"
                )
                raise self._ended
            answered = self._turns.await_answer(0, min(left, _LOOK_PERIOD_S))
        if self._turns.answered() and not last:
            self._pass = under_way
            return None
        return self._reply(end)

    def _reply(self, end: float) -> attnd_pb2.DecodeResponse:
        try:
            reply = self._stream.receive(end - time.monotonic())
        except Exception as error:
            self._stream.close()
            self._ended = error
            raise
        refused = replies.step_error(self._step_id, reply)
        if refused is not None:
            raise refused
        return reply


class MemoryPass:
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
        rows: one outcome for each row, in order, once the pass is complete; empty if all are OK and
            the pass has no statistics to tell.
    """

    def __init__(
        self,
        session: MemorySession,
        rows: Sequence[Row],
        query_tokens: int,
        new_tokens: int,
        want_lse: bool,
        raise_on_row_error: bool,
    ) -> None:
        memory = session._region.memory
        self.q = session._q.array(memory, query_tokens)
        self.k = session._k.array(memory, new_tokens)
        self.v = session._v.array(memory, new_tokens)
        self.out = session._out.array(memory, query_tokens)
        self.lse: Array | None = (
            session._lse.array(memory, query_tokens)[:, :, 0] if want_lse else None
        )
        self.layer = 0
        self.rows: tuple[RowResult, ...] = ()
        self._session = session
        self._declared = tuple(rows)
        self._raise_on_row_error = raise_on_row_error

    @property
    def failed_rows(self) -> int:
        """How many rows have left the pass so far."""
        return self._session._turns.failed_rows()

    def step(self, *, timeout_s: float | None = None) -> None:
        """Has the next layer answered: q, k and v have been written, out and lse are there when it
        returns. After the last layer the tokens are committed and `rows` is there.

        Args:
            timeout_s: seconds to wait for the answer; None is the client's timeout.

        Raises:
            RowError: after the last layer, if a row failed; its `result` is a LayerResult with
                copies of out and lse.
            AttndError: if the pass failed as a whole: it was given up.
            ValueError: if the pass is complete, failed, or its session was closed.
        """
        session = self._session
        if session._pass is not self:
            raise ValueError("the pass is complete or failed")
        last = self.layer + 1 == session._shape.layers
        reply = session._exchange(last, timeout_s)
        self.layer += 1
        if reply is None:
            return
        self.rows = tuple(map(RowResult.from_proto, reply.rows))
        if self._raise_on_row_error and not all(row.ok for row in self.rows):
            lse = None if self.lse is None else self.lse.copy()
            result = LayerResult(self.out.copy(), lse, self.rows, reply.queue_us, reply.engine_us)
            failed = replies.row_error(self._declared, result)
            if failed is not None:
                raise failed


def as_torch(array: Array) -> Any:
    """A torch tensor of the same memory, for arrays of a pass: also of bfloat16, which numpy's
    DLPack does not know. Needs torch."""
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
