# SPDX-License-Identifier: Apache-2.0
"""The passes of one cache, each as messages or through shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from attnd.memory import as_torch
from attnd.memory_stream import MemoryPass, MemoryStream
from attnd.model import ModelShape
from attnd.pass_memory import PassMemory
from attnd.passes import Pass
from attnd.requests import PassOptions, Row
from attnd.results import RowResult
from attnd.session import DecodeSession
from attnd.transformers.arrays import to_numpy, to_torch
from attnd.transformers.columns import Step, place_tokens, tokens_of
from attnd.transformers.server import Server


class _Answer(NamedTuple):
    """out: [tokens, query_heads, value_dim] on the query's device; rows: what the server says of
    them, if it says something with this layer; server_us: the server's part of wait_s, but for
    passes through memory, whose last layer has it of all."""

    out: torch.Tensor
    rows: tuple[RowResult, ...]
    wait_s: float
    server_us: int


class _Way(Protocol):
    """A pass under way; arguments as of Passes.answer()."""

    def answer(
        self, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> _Answer: ...


class _AsMessages:
    def __init__(self, whole: Pass) -> None:
        self._whole = whole

    def answer(
        self, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> _Answer:
        q, k, v = (to_numpy(tokens_of(tensor, step)) for tensor in (query, key, value))
        begun = time.monotonic()
        result = self._whole.step(q, k, v)
        waited = time.monotonic() - begun
        out = to_torch(result.out, query.device)
        return _Answer(out, result.rows, waited, result.queue_us + result.engine_us)


class _ThroughMemory:
    def __init__(self, whole: MemoryPass) -> None:
        self._whole = whole
        self._q, self._k, self._v, self._out = map(
            as_torch, (whole.q, whole.k, whole.v, whole.out)
        )

    def answer(
        self, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> _Answer:
        place_tokens(query, step, self._q)
        place_tokens(key, step, self._k)
        place_tokens(value, step, self._v)
        whole = self._whole
        begun = time.monotonic()
        whole.step()
        waited = time.monotonic() - begun
        # A copy, as the next layer's answer comes to the same place.
        out = self._out.to(query.device, copy=True)
        return _Answer(out, whole.rows, waited, whole.queue_us + whole.engine_us)


class Passes:
    """The passes of one cache, for one thread. A sequence is written by one stream: where the next
    pass goes another way, the stream of the ones before is ended first.

    Attributes:
        layer: the next one of the pass under way; as many as the model has if there is none.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: DecodeSession | None = None
        self._stream: MemoryStream | None = None
        self._borrowed: PassMemory | None = None  # of the pass under way, if it goes through memory
        self._way: _Way | None = None
        self.layer = server.layers

    def begin(self, shape: ModelShape, rows: Sequence[Row]) -> None:
        """Begins a pass of all layers over these rows, of which none may be under way. It goes
        through memory if the attachment shares some and has room for it.

        Raises:
            AttndError: if the server cannot be reached.
        """
        regions = self._server.regions
        tokens = sum(row.query_tokens for row in rows)
        memory = None if regions is None else regions.borrow(shape, len(rows), tokens)
        if memory is None:
            whole = self._messages().begin_pass(shape.layers, rows, output_dtype=shape.dtype)
            self._way = _AsMessages(whole)
        else:
            self._borrowed = memory
            self._way = _ThroughMemory(self._memory().begin_pass(memory, rows, PassOptions()))
        self.layer = 0

    def _messages(self) -> DecodeSession:
        if self._session is None:
            self._end_stream()
            self._session = self._server.client.decode_session()
        return self._session

    def _memory(self) -> MemoryStream:
        if self._stream is None:
            self._end_stream()
            self._stream = self._server.client.memory_stream()
        return self._stream

    def _end_stream(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def answer(
        self, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The next layer's answer, [tokens, query_heads, value_dim], on the query's device.

        Args:
            step: which of the columns hold tokens.
            query: [rows, query_heads, new, head_dim].
            key: [rows, kv_heads, new, head_dim].
            value: [rows, kv_heads, new, value_dim].

        Raises:
            AttndError: if the server fails: the pass was given up, or a row of it has failed.
        """
        assert self._way is not None
        answer = self._way.answer(step, query, key, value)
        through_memory = self._borrowed is not None
        self._server.counter.add(
            answer.rows, answer.wait_s, answer.server_us / 1e6, through_memory
        )
        self.layer += 1
        if self.layer == self._server.layers and self._borrowed is not None:
            assert self._server.regions is not None
            self._server.regions.give_back(self._borrowed)
            self._borrowed = None
        return answer.out

    def close(self) -> None:
        """Ends the stream; gives a pass under way up. The next pass has a stream of its own."""
        self._way = None
        self.layer = self._server.layers
        self._end_stream()
        if self._borrowed is not None:
            assert self._server.regions is not None
            self._server.regions.drop(self._borrowed)
            self._borrowed = None
