# SPDX-License-Identifier: Apache-2.0
"""Shared memory for prompts on their way to the server."""

from __future__ import annotations

import contextlib
import threading

from attnd.client import Client
from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import Gpu
from attnd.errors import ResourceExhaustedError
from attnd.kv_memory import KvMemory
from attnd.transformers.regions import OneWarning

# Parts of a prompt that are under way at once: while the server takes one the next is written.
PARTS = 4
# Of a part, keys and values together.
PART_BYTES = 32 << 20


class UploadMemory:
    """Memory that prompts borrow, each for as long as it lasts: as many regions as prompts are
    uploaded at once. Threads may share it."""

    def __init__(self, client: Client, gpu: Gpu | None) -> None:
        """gpu: that holds the model, and copies faster to memory that it knows; None: the host
        does."""
        self._client = client
        self._gpu = gpu
        self._lock = threading.Lock()
        self._free: list[KvMemory] = []  # guarded by the lock, as the next two
        self._mapped: set[int] = set()  # ids of memories that the GPU knows
        self._closed = False
        self._warn = OneWarning("prompts are sent as messages, not through shared memory")

    def borrow(self) -> KvMemory | None:
        """Memory of PARTS * PART_BYTES; None if the server has no room for it.

        Raises:
            AttndError: if the server cannot be reached.
        """
        with self._lock:
            while self._free:
                memory = self._free.pop()
                if not memory.ended():
                    return memory
                self._end(memory)
        try:
            memory = self._client.kv_memory(PARTS * PART_BYTES)
        except ResourceExhaustedError as error:
            self._warn(error)
            return None
        with self._lock, contextlib.suppress(CudaError):
            if self._gpu is not None:
                self._gpu.map(memory.memory)
                self._mapped.add(id(memory))
        return memory

    def give_back(self, memory: KvMemory, *, used: bool) -> None:
        """used: whether the server may still read it: an upload has failed."""
        with self._lock:
            if used or self._closed:
                self._end(memory)
            else:
                self._free.append(memory)

    def close(self) -> None:
        """What is given back from here on ends."""
        with self._lock:
            self._closed = True
            while self._free:
                self._end(self._free.pop())

    def _end(self, memory: KvMemory) -> None:
        """The caller holds the lock."""
        if id(memory) in self._mapped:
            assert self._gpu is not None
            self._mapped.remove(id(memory))
            self._gpu.unmap(memory.memory)
        memory.close()
