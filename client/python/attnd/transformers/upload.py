# SPDX-License-Identifier: Apache-2.0
"""Uploads of a prompt's keys and values while the model computes its next layers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from attnd.client import Client
from attnd.kv_memory import KvMemory
from attnd.memory import as_torch
from attnd.memory_socket import ALIGNMENT_BYTES, aligned
from attnd.requests import KvChunk
from attnd.tensors import Array
from attnd.transformers.arrays import numpy_dtype, to_numpy
from attnd.transformers.upload_memory import PART_BYTES, PARTS, UploadMemory

# Chunks that may wait, of one layer each. As messages they are copies in host memory; on their way
# through shared memory they keep their layer's tensors alive, which the cache does in any case.
PENDING_MAX = 8
# Of a row's new keys and values in a layer, from which on its prompt goes through shared memory: that
# takes time to make.
MEMORY_BYTES_MIN = 1 << 20


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
        self._pending: deque[Future[None]] = deque()

    def put(
        self,
        sequence_id: int,
        layer: int,
        position: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Queues consecutive tokens of a layer, the last ones of the prompt as far as is known; waits
        while too many are under way. The tensors' contents must stay as they are.

        Args:
            position: of the first token.
            key: [tokens, kv_heads, head_dim].
            value: [tokens, kv_heads, value_dim].

        Raises:
            AttndError: if something before could not be uploaded.
        """
        self._await(PENDING_MAX - 1)
        chunk = _Chunk(sequence_id, layer, position, key.detach(), value.detach())
        tokens = _tokens_of_part(chunk)
        memory = self._memory_for(chunk) if tokens else None
        if memory is None:
            arrays = KvChunk(layer, position, to_numpy(key), to_numpy(value))
            self._pending.append(self._thread.submit(self._send, chunk, arrays, None))
            return
        if self._parts is None:
            self._parts = _Parts(memory, self._send)
        ready = _now(key.device)
        self._pending.append(self._thread.submit(self._parts.send, chunk, tokens, ready))

    def _memory_for(self, chunk: _Chunk) -> KvMemory | None:
        bytes_ = chunk.key.nbytes + chunk.value.nbytes
        if self._borrowed is None and self._memory is not None and bytes_ >= MEMORY_BYTES_MIN:
            self._borrowed = self._memory.borrow()
            if self._borrowed is None:
                self._memory = None  # there is no room: the next chunk need not ask
        return self._borrowed

    def _send(self, chunk: _Chunk, part: KvChunk, memory: KvMemory | None) -> None:
        self._client.append_kv(
            chunk.sequence_id, (part,), memory=memory, prompt_tokens=chunk.end()
        )

    def _await(self, pending_max: int) -> None:
        """Returns when no more are under way; raises as put(), and then each time."""
        while len(self._pending) > pending_max:
            self._pending[0].result()
            self._pending.popleft()

    def finish(self) -> None:
        """Returns when the server has all; raises as put()."""
        self._await(0)

    def close(self) -> None:
        """Drops what waits, and ends the thread after the chunk that is being sent."""
        borrowed, self._borrowed = self._borrowed, None
        try:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()
        except BaseException:  # an interrupt: the server may still read
            if borrowed is not None:
                borrowed.close()
            raise
        finally:
            if borrowed is not None:
                assert self._memory is not None
                self._memory.give_back(borrowed)


@dataclass(frozen=True)
class _Chunk:
    """Tokens of one layer: Uploader.put's arguments."""

    sequence_id: int
    layer: int
    position: int
    key: torch.Tensor
    value: torch.Tensor

    def end(self) -> int:
        """The position behind its last token."""
        return self.position + len(self.key)


class _Parts:
    """Sends chunks through shared memory a part at a time: while the server takes one the next is
    copied, from a GPU by a stream beside the model's. For one thread."""

    def __init__(
        self, memory: KvMemory, send: Callable[[_Chunk, KvChunk, KvMemory], None]
    ) -> None:
        """send: has the server take a part of a chunk that lies in the memory."""
        self._memory = memory
        self._send = send
        self._count = 0  # of parts that were copied
        self._stream: torch.cuda.Stream | None = None
        self._failed: BaseException | None = None

    def send(self, chunk: _Chunk, tokens: int, ready: torch.cuda.Event | None) -> None:
        """
        Args:
            tokens: of a part, at most.
            ready: behind which the chunk's tensors are there; None: they are.
        """
        if self._failed is not None:
            raise self._failed  # the server has a gap, and the memory may be another's by now
        try:
            self._send_all(chunk, tokens, ready)
        except BaseException as error:
            self._failed = error
            raise

    def _send_all(self, chunk: _Chunk, tokens: int, ready: torch.cuda.Event | None) -> None:
        device = chunk.key.device
        if ready is not None and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with contextlib.ExitStack() as stack:
            if self._stream is not None and ready is not None:
                stack.callback(self._stream.synchronize)  # of copies that nobody waited for
                stack.enter_context(torch.cuda.stream(self._stream))
                self._stream.wait_event(ready)
            before: tuple[KvChunk, torch.cuda.Event | None] | None = None
            for start in range(0, len(chunk.key), tokens):
                copied = self._copy(chunk, slice(start, start + tokens)), _now(device)
                if before is not None:
                    self._take(chunk, *before)
                before = copied
            if before is not None:
                self._take(chunk, *before)

    def _copy(self, chunk: _Chunk, part: slice) -> KvChunk:
        """Begins to copy a part, in the place of the last but one, which the server has taken."""
        key, value = chunk.key[part], chunk.value[part]
        offset = self._count % PARTS * PART_BYTES
        self._count += 1
        dtype = numpy_dtype(key.dtype)
        k = self._memory.array(offset, tuple(key.shape), dtype)
        v = self._memory.array(offset + aligned(k.nbytes), tuple(value.shape), dtype)
        as_torch(k).copy_(key, non_blocking=True)
        as_torch(v).copy_(value, non_blocking=True)
        return KvChunk(chunk.layer, chunk.position + part.start, k, v)

    def _take(self, chunk: _Chunk, part: KvChunk, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self._send(chunk, part, self._memory)


def _now(device: torch.device) -> torch.cuda.Event | None:
    """Behind what the current stream of the device has to do; None for the CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _tokens_of_part(chunk: _Chunk) -> int:
    """How many tokens a part has at most."""
    token_bytes = chunk.key[0].nbytes + chunk.value[0].nbytes
    return (PART_BYTES - ALIGNMENT_BYTES) // token_bytes
