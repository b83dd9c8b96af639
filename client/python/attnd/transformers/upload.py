# SPDX-License-Identifier: Apache-2.0
"""Uploads of a prompt's keys and values while the model computes its next layers."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from attnd.client import Client
from attnd.kv_memory import KvMemory
from attnd.memory import as_torch
from attnd.memory_socket import ALIGNMENT_BYTES, aligned
from attnd.requests import KvChunk
from attnd.tensors import Array
from attnd.transformers.arrays import numpy_dtype, to_numpy
from attnd.transformers.upload_memory import PART_BYTES, PARTS, UploadMemory

# Chunks that may wait: they are copies in host memory, and a model may be faster than the server.
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
        self._parts = 0  # that were written to the borrowed memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attnd-upload")
        self._pending: deque[Future[object]] = deque()

    def put(
        self, sequence_id: int, layer: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Queues consecutive tokens of a layer; waits while too many are under way.

        Args:
            position: of the first token.
            key: [tokens, kv_heads, head_dim].
            value: [tokens, kv_heads, value_dim].

        Raises:
            AttndError: if something before could not be uploaded.
        """
        step = _tokens_of_part(key, value)
        memory = self._memory_for(key.nbytes + value.nbytes) if step else None
        if memory is None:
            self._await(PENDING_MAX - 1)
            chunk = KvChunk(layer, position, to_numpy(key), to_numpy(value))
            self._send(sequence_id, chunk, None)
            return
        for start in range(0, len(key), step):
            part = slice(start, start + step)
            self._await(PARTS - 1)  # then the part that lay in this one's place is gone
            k, v = _write(memory, self._parts % PARTS * PART_BYTES, key[part], value[part])
            self._parts += 1
            chunk = KvChunk(layer, position + start, k, v)
            self._send(sequence_id, chunk, memory)

    def _memory_for(self, bytes_: int) -> KvMemory | None:
        if self._borrowed is None and self._memory is not None and bytes_ >= MEMORY_BYTES_MIN:
            self._borrowed = self._memory.borrow()
            if self._borrowed is None:
                self._memory = None  # there is no room: the next chunk need not ask
        return self._borrowed

    def _send(self, sequence_id: int, chunk: KvChunk, memory: KvMemory | None) -> None:
        append = self._client.append_kv
        self._pending.append(self._thread.submit(append, sequence_id, (chunk,), memory=memory))

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


def _tokens_of_part(key: torch.Tensor, value: torch.Tensor) -> int:
    """How many tokens a part has room for."""
    token_bytes = key[0].nbytes + value[0].nbytes
    return (PART_BYTES - ALIGNMENT_BYTES) // token_bytes


def _write(
    memory: KvMemory, offset: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[Array, Array]:
    """Copies both to the memory, one behind the other; waits for their device."""
    dtype = numpy_dtype(key.dtype)
    k = memory.array(offset, tuple(key.shape), dtype)
    v = memory.array(offset + aligned(k.nbytes), tuple(value.shape), dtype)
    as_torch(k).copy_(key.detach())
    as_torch(v).copy_(value.detach())
    return k, v
