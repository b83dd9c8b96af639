# SPDX-License-Identifier: Apache-2.0
"""The passes of one cache, each as messages or through shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from attnd.memory import as_torch
from attnd.memory_stream import MemoryPass, MemoryStream
from attnd.model import ModelShape
from attnd.pass_memory import PassMemory
from attnd.passes import Pass
from attnd.requests import PassOptions, Row
from attnd.session import DecodeSession
from attnd.transformers.arrays import to_numpy, to_torch
from attnd.transformers.columns import Place, Step, tokens_of
from attnd.transformers.server import Server
from attnd.transformers.stats import StatsCounter


class _Way(Protocol):
    """A pass under way; as Passes.answer(), which counts nothing itself."""

    def answer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


class _AsMessages:
    def __init__(self, whole: Pass, step: Step, counter: StatsCounter) -> None:
        self._whole = whole
        self._step = step
        self._counter = counter

    def answer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (to_numpy(tokens_of(tensor, self._step)) for tensor in (query, key, value))
        begun = time.monotonic()
        result = self._whole.step(q, k, v)
        waited = time.monotonic() - begun
        server_s = (result.queue_us + result.engine_us) / 1e6
        self._counter.add(result.rows, waited, server_s, through_memory=False)
        return to_torch(result.out, query.device)


class _ThroughMemory:
    def __init__(self, whole: MemoryPass, step: Step, counter: StatsCounter) -> None:
        self._whole = whole
        self._counter = counter
        self._q, self._k, self._v = (
            Place(as_torch(array), step) for array in (whole.q, whole.k, whole.v)
        )
        self._out = as_torch(whole.out)

    def answer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self._q.write(query)
        self._k.write(key)
        self._v.write(value)
        begun = time.monotonic()
        self._whole.step()
        self._counter.add((), time.monotonic() - begun, 0.0, through_memory=True)
        if self._whole.complete:
            self._counter.add_later(self._whole)
        # A copy, as the next layer's answer comes to the same place.
        return self._out.to(query.device, copy=True)


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

    def begin(self, shape: ModelShape, rows: Sequence[Row], step: Step) -> None:
        """Begins a pass of all layers; none may be under way. It goes through memory if the
        attachment shares some and has room for it.

        Args:
            shape: of the model.
            rows: those of the batch that have new tokens.
            step: which of the new columns hold them.

        Raises:
            AttndError: if the server cannot be reached.
        """
        regions = self._server.regions
        tokens = sum(row.query_tokens for row in rows)
        memory = None if regions is None else regions.borrow(shape, len(rows), tokens)
        if memory is None:
            whole = self._messages().begin_pass(shape.layers, rows, output_dtype=shape.dtype)
            self._way = _AsMessages(whole, step, self._server.counter)
        else:
            self._borrowed = memory
            through = self._memory().begin_pass(memory, rows, PassOptions())
            self._way = _ThroughMemory(through, step, self._server.counter)
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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The next layer's answer, [tokens, query_heads, value_dim], on the query's device.

        Args:
            query: [rows, query_heads, new, head_dim].
            key: [rows, kv_heads, new, head_dim].
            value: [rows, kv_heads, new, value_dim].

        Raises:
            AttndError: if the server fails: the pass was given up, or a row of it has failed.
        """
        assert self._way is not None
        out = self._way.answer(query, key, value)
        self.layer += 1
        if self.layer == self._server.layers and self._borrowed is not None:
            assert self._server.regions is not None
            self._server.regions.give_back(self._borrowed)
            self._borrowed = None
        return out

    def close(self) -> None:
        """Ends the stream; gives a pass under way up. The next pass has a stream of its own."""
        self._way = None
        self.layer = self._server.layers
        self._end_stream()
        if self._borrowed is not None:
            assert self._server.regions is not None
            self._server.regions.drop(self._borrowed)
            self._borrowed = None
