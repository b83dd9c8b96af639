# SPDX-License-Identifier: Apache-2.0
"""Uploads of a prompt's keys and values while the model computes its next layers."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from attnd.client import Client
from attnd.kv_memory import KvMemory
from attnd.memory import as_torch
from attnd.memory_socket import ALIGNMENT_BYTES, aligned
from attnd.requests import KvChunk
from attnd.transformers.arrays import numpy_dtype, to_numpy
from attnd.transformers.upload_memory import PART_BYTES, PARTS, UploadMemory

# What may wait: chunks, each of one layer, and their bytes. A chunk keeps its tensors alive until
# it is sent; those of a padded batch are no one else's.
PENDING_MAX = 8
PENDING_BYTES_MAX = 1 << 30
# Of a row's new keys and values in a layer, from which on its prompt goes through shared memory:
# that takes time to make.
MEMORY_BYTES_MIN = 1 << 20


@dataclass(frozen=True)
class _Chunk:
    """Tokens of one layer: Uploader.put's arguments."""

    sequence_id: int
    layer: int
    position: int
    key: torch.Tensor
    value: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def prompt_tokens(self) -> int:
        """Where the prompt ends, as far as is known: what comes behind earlier tokens is a piece of
        a prompt, or a turn, of which the server builds nothing ahead."""
        return len(self.key) if self.position == 0 else 0


class Uploader:
    """Sends keys and values in order, on one thread of its own: as messages, or through shared
    memory. For one caller at a time."""

    def __init__(self, client: Client, memory: UploadMemory | None) -> None:
        """memory: None: all goes as messages."""
        self._client = client
        self._memory = memory
        self._borrowed: KvMemory | None = None
        self._parts: _Parts | None = None  # of the borrowed memory; the thread's
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attnd-upload")
        self._pending: deque[tuple[int, Future[None]]] = deque()  # with their bytes

    def put(
        self,
        sequence_id: int,
        layer: int,
        position: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Queues consecutive tokens of a layer; waits while too many are under way. The tensors'
        contents must stay as they are.

        Args:
            position: of the first token.
            key: [tokens, kv_heads, head_dim].
            value: [tokens, kv_heads, value_dim].

        Raises:
            AttndError: if something before could not be uploaded.
            RuntimeError: PyTorch's, if it could not be copied.
        """
        chunk = _Chunk(sequence_id, layer, position, key.detach(), value.detach())
        self._await(PENDING_MAX - 1, PENDING_BYTES_MAX - chunk.bytes)
        part_tokens = _tokens_of_part(chunk)
        memory = self._memory_for(chunk) if part_tokens else None
        if memory is None:
            arrays = KvChunk(layer, position, to_numpy(key), to_numpy(value))
            self._submit(chunk, self._thread.submit(_append, self._client, chunk, arrays, None))
            return
        assert self._memory is not None
        if self._parts is None:
            self._parts = _Parts(self._client, memory, self._memory)
        ready = _now(key.device)
        self._submit(chunk, self._thread.submit(self._parts.send, chunk, part_tokens, ready))

    def _submit(self, chunk: _Chunk, sent: Future[None]) -> None:
        self._pending.append((chunk.bytes, sent))

    def _memory_for(self, chunk: _Chunk) -> KvMemory | None:
        if self._borrowed is None and self._memory is not None and chunk.bytes >= MEMORY_BYTES_MIN:
            self._borrowed = self._memory.borrow()
            if self._borrowed is None:
                self._memory = None  # there is no room: the next chunk need not ask
        return self._borrowed

    def _await(self, pending_max: int, bytes_max: int) -> None:
        """Returns when no more are under way; raises as put(), and then each time."""
        while len(self._pending) > pending_max or (
            self._pending and sum(size for size, _ in self._pending) > bytes_max
        ):
            self._pending[0][1].result()
            self._pending.popleft()

    def finish(self) -> None:
        """Returns when the server has all; raises as put()."""
        self._await(0, 0)

    def close(self) -> None:
        """Drops what waits, and ends the thread after the part that is being sent."""
        borrowed, self._borrowed = self._borrowed, None
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.stop()
        try:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()
            if parts is not None:
                parts.close()
        except BaseException:  # an interrupt: the thread may still write there, and the server read
            if borrowed is not None:
                assert self._memory is not None
                self._memory.abandon(borrowed)
                borrowed = None
            raise
        finally:
            if borrowed is not None:
                assert self._memory is not None
                self._memory.give_back(borrowed)


class _Stopped(Exception):
    """The upload was closed; whoever did that does not ask for it."""


class _Parts:
    """Sends chunks through shared memory a part at a time: while the server takes one the next is
    copied, from the model's GPU by a stream beside the model's. For one thread, but for stop()."""

    def __init__(self, client: Client, memory: KvMemory, owner: UploadMemory) -> None:
        """owner: of the memory."""
        assert PARTS >= 2, "one that the server takes, and one that is copied"
        self._client = client
        self._memory = memory
        self._owner = owner
        self._stream: torch.cuda.Stream | None = None
        self._count = 0  # of parts that were copied
        self._stopped = threading.Event()
        self._failed = False

    def stop(self) -> None:
        """No further part is begun."""
        self._stopped.set()

    def close(self) -> None:
        """Once the thread has ended."""
        if self._stream is not None:
            self._owner.give_stream(self._stream)

    def send(self, chunk: _Chunk, part_tokens: int, ready: torch.cuda.Event | None) -> None:
        """
        Args:
            part_tokens: of a part, at most.
            ready: behind which the chunk's tensors are there; None: they are.
        """
        if self._failed:
            return  # the server has a gap, and the memory may be another's: who failed says so
        try:
            self._send_all(chunk, part_tokens, ready)
        except BaseException:
            self._failed = True
            raise

    def _send_all(self, chunk: _Chunk, part_tokens: int, ready: torch.cuda.Event | None) -> None:
        if ready is not None and self._stream is None:
            self._stream = self._owner.take_stream(chunk.key.device)
        if ready is None or self._stream is None:
            if ready is not None:
                ready.synchronize()
            self._send_parts(chunk, part_tokens, beside=False)
            return
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                self._send_parts(chunk, part_tokens, beside=True)
        except BaseException:
            self._stream.synchronize()  # nobody has waited for the last copy
            raise

    def _send_parts(self, chunk: _Chunk, part_tokens: int, *, beside: bool) -> None:
        """beside: copies are the stream's."""
        before: tuple[KvChunk, torch.cuda.Event | None] | None = None
        for start in range(0, len(chunk.key), part_tokens):
            part = self._copy(chunk, slice(start, start + part_tokens), beside)
            copied = part, _now(chunk.key.device) if beside else None
            if before is not None:
                self._hand_over(chunk, *before)
            before = copied
        if before is not None:
            self._hand_over(chunk, *before)

    def _copy(self, chunk: _Chunk, part: slice, beside: bool) -> KvChunk:
        """Begins to copy a part, in the place of the last but one, which the server has taken.

        Args:
            beside: whether it need not have been copied when this returns.
        """
        key, value = chunk.key[part], chunk.value[part]
        offset = self._count % PARTS * PART_BYTES
        self._count += 1
        dtype = numpy_dtype(key.dtype)
        k = self._memory.array(offset, tuple(key.shape), dtype)
        v = self._memory.array(offset + aligned(k.nbytes), tuple(value.shape), dtype)
        as_torch(k).copy_(key, non_blocking=beside)
        as_torch(v).copy_(value, non_blocking=beside)
        return KvChunk(chunk.layer, chunk.position + part.start, k, v)

    def _hand_over(self, chunk: _Chunk, part: KvChunk, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        if self._stopped.is_set():
            raise _Stopped
        _append(self._client, chunk, part, self._memory)


def _append(client: Client, chunk: _Chunk, part: KvChunk, memory: KvMemory | None) -> None:
    """Has the server take a part of a chunk, or all of it."""
    client.append_kv(
        chunk.sequence_id, (part,), memory=memory, prompt_tokens=chunk.prompt_tokens()
    )


def _now(device: torch.device) -> torch.cuda.Event | None:
    """Behind what the current stream of the device has to do; None for the CPU."""
    if device.type != "cuda":
        return None
    # One that is waited for asleep: the server wants the cores.
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))


def _tokens_of_part(chunk: _Chunk) -> int:
    """How many tokens a part has at most."""
    token_bytes = chunk.key[0].nbytes + chunk.value[0].nbytes
    return (PART_BYTES - ALIGNMENT_BYTES) // token_bytes
