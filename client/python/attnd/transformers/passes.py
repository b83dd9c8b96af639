# SPDX-License-Identifier: Apache-2.0
"""The passes of one cache, each as messages, through shared memory, or on a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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

if TYPE_CHECKING:
    from attnd.transformers.graphs import TokenGraph

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
        self.session = session
        self._whole = whole
        self._step = step
        self._counter = counter
        self._layer = 0

    def answer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        begun = time.monotonic()
        out = enqueue_layer(self.session, self._layer, query, key, value, self._step)
        self._layer += 1
        if self._layer == self._whole.layers:
            self._finish(begun, 1)
        else:
            self._counter.add((), time.monotonic() - begun, 0.0, through_memory=True)
        return out

    def replay(self, graph: TokenGraph) -> None:
        """All layers, by a graph that has them."""
        begun = time.monotonic()
        graph.replay()
        self._finish(begun, self._whole.layers)

    def _finish(self, begun: float, answers: int) -> None:
        self._whole.finish()
        waited = time.monotonic() - begun
        self._counter.add((), waited, 0.0, through_memory=True, answers=answers)
        self._counter.add_later(self._whole)


def enqueue_layer(
    session: StreamSession,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Step,
) -> torch.Tensor:
    """Has a session's kernel answer a layer in stream order; tensors and answer as of
    Passes.answer()."""
    q, k, v = (_dense(tokens_of(tensor.detach(), step)) for tensor in (query, key, value))
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    session.layer(layer, q, k, v, out)
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
        graphs: captured passes of the session on the GPU's stream by which passes go, by what tells
            them apart.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._writer: DecodeSession | MemoryStream | StreamSession | None = None
        # Query tokens for which there was no room in a session on the GPU's stream.
        self._refused: int | None = None
        self._borrowed: PassMemory | None = None  # of the pass under way, if it goes through memory
        self._way: _Way | None = None
        self.layer = server.layers
        self.graphs: dict[Any, TokenGraph] = {}

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
        session = self._session_for(tokens)
        if session is None:
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

    def _session_for(self, tokens: int) -> StreamSession | None:
        """The session that writes the sequences, if it has room for a pass of so many tokens."""
        session = self._writer
        if isinstance(session, StreamSession) and session.query_tokens_max >= tokens:
            return session
        return None

    def stream_session(self, shape: ModelShape, rows: int) -> StreamSession | None:
        """The session by which a pass of one token a row goes, of tensors on the model's GPU; None
        if it goes another way, or its session is not there yet."""
        streams = self._server.streams
        if streams is None or not streams.serves(shape, rows, rows, streams.device):
            return None
        return self._session_for(rows)

    def _write_by(self, kind: type[_Writer], make: Callable[[], _Writer]) -> _Writer:
        """The stream of this kind that writes the sequences from here on."""
        if not isinstance(self._writer, kind):
            self._end_writer()
            self._writer = make()
        assert isinstance(self._writer, kind)
        return self._writer

    def _end_writer(self) -> None:
        writer, self._writer = self._writer, None
        self.graphs.clear()  # they must not outlive their session
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

    def replay(self, graph: TokenGraph) -> None:
        """All layers of the pass that was begun, by a graph of the session by which it goes."""
        assert isinstance(self._way, _OnStream) and self._way.session is graph.session
        self._way.replay(graph)
        self.layer = self._server.layers

    def close(self) -> None:
        """Ends the stream; gives a pass under way up. The next pass has a stream of its own."""
        self._way = None
        self.layer = self._server.layers
        self._end_writer()
        if self._borrowed is not None:
            assert self._server.regions is not None
            self._server.regions.drop(self._borrowed)
            self._borrowed = None
