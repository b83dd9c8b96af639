# SPDX-License-Identifier: Apache-2.0
"""The passes of one cache, each as messages, through shared memory, or on a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from attnd.cuda.session import StreamSession
from attnd.cuda.stream_pass import StreamPass
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
from attnd.transformers.streams import close_quietly

_Writer = TypeVar("_Writer", DecodeSession, MemoryStream)


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


class _OnStream:
    """Its answers are there in the order of the CUDA stream; the last one waits for all of them, so
    that no token is made of a pass that failed."""

    def __init__(
        self, session: StreamSession, whole: StreamPass, step: Step, counter: StatsCounter
    ) -> None:
        self._session = session
        self._whole = whole
        self._step = step
        self._counter = counter
        self._layer = 0

    def answer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (_dense(tokens_of(tensor.detach(), self._step)) for tensor in (query, key, value))
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        begun = time.monotonic()
        self._session.layer(self._layer, q, k, v, out)
        self._layer += 1
        if self._layer == self._whole.layers:
            self._whole.finish()
        self._counter.add((), time.monotonic() - begun, 0.0, through_memory=True)
        if self._whole.complete:
            self._counter.add_later(self._whole)
        return out


def _dense(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens whose own elements lie together, as a session takes them."""
    if tokens.stride(2) == 1 and tokens.stride(1) == tokens.shape[2]:
        return tokens
    return tokens.contiguous()


class Passes:
    """The passes of one cache, for one thread. A sequence is written by one stream: where the next
    pass goes another way, the stream of the ones before is ended first.

    Attributes:
        layer: the next one of the pass under way; as many as the model has if there is none.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._writer: DecodeSession | MemoryStream | StreamSession | None = None
        # Query tokens for which there was no room in a session on the GPU's stream.
        self._refused: int | None = None
        self._borrowed: PassMemory | None = None  # of the pass under way, if it goes through memory
        self._way: _Way | None = None
        self.layer = server.layers

    def begin(
        self, shape: ModelShape, rows: Sequence[Row], step: Step, device: torch.device
    ) -> None:
        """Begins a pass of all layers; none may be under way. It goes through memory if the
        attachment shares some and has room for it, and on the GPU's stream if the model is there.

        Args:
            shape: of the model.
            rows: those of the batch that have new tokens.
            step: which of the new columns hold them.
            device: where the tensors are.

        Raises:
            AttndError: if the server cannot be reached.
        """
        tokens = sum(row.query_tokens for row in rows)
        self._way = (
            self._on_stream(shape, rows, step, tokens, device)
            or self._through_memory(shape, rows, step, tokens)
            or self._as_messages(shape, rows, step)
        )
        self.layer = 0

    def _as_messages(self, shape: ModelShape, rows: Sequence[Row], step: Step) -> _Way:
        session = self._write_by(DecodeSession, self._server.client.decode_session)
        whole = session.begin_pass(shape.layers, rows, output_dtype=shape.dtype)
        return _AsMessages(whole, step, self._server.counter)

    def _through_memory(
        self, shape: ModelShape, rows: Sequence[Row], step: Step, tokens: int
    ) -> _Way | None:
        regions = self._server.regions
        memory = None if regions is None else regions.borrow(shape, len(rows), tokens)
        if memory is None:
            return None
        self._borrowed = memory
        stream = self._write_by(MemoryStream, self._server.client.memory_stream)
        whole = stream.begin_pass(memory, rows, PassOptions())
        return _ThroughMemory(whole, step, self._server.counter)

    def _on_stream(
        self,
        shape: ModelShape,
        rows: Sequence[Row],
        step: Step,
        tokens: int,
        device: torch.device,
    ) -> _Way | None:
        streams = self._server.streams
        if streams is None or not streams.serves(shape, len(rows), tokens, device):
            return None
        session = self._writer
        if not isinstance(session, StreamSession) or session.query_tokens_max < tokens:
            if self._refused is not None and tokens >= self._refused:
                return None
            session = streams.open(shape, tokens)
            if session is None:
                self._refused = tokens
                return None
            self._end_writer()
            self._writer = session
        whole = session.begin_pass(rows)
        return _OnStream(session, whole, step, self._server.counter)

    def _write_by(self, kind: type[_Writer], make: Callable[[], _Writer]) -> _Writer:
        """The stream of this kind that writes the sequences from here on."""
        if not isinstance(self._writer, kind):
            self._end_writer()
            self._writer = make()
        assert isinstance(self._writer, kind)
        return self._writer

    def _end_writer(self) -> None:
        writer, self._writer = self._writer, None
        if isinstance(writer, StreamSession):
            close_quietly(writer)
        elif writer is not None:
            writer.close()

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
        self._end_writer()
        if self._borrowed is not None:
            assert self._server.regions is not None
            self._server.regions.drop(self._borrowed)
            self._borrowed = None
