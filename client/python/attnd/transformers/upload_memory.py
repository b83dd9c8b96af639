# SPDX-License-Identifier: Apache-2.0
"""Shared memory for prompts on their way to the server."""

from __future__ import annotations

import logging
import threading

import torch

from attnd.client import Client
from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import Gpu
from attnd.errors import ResourceExhaustedError
from attnd.kv_memory import KvMemory
from attnd.transformers.regions import OneWarning

_LOGGER = logging.getLogger(__name__)
# Parts of a prompt that are under way at once: while the server takes one the next is written.
PARTS = 2
# Of a part, keys and values together, and their alignment.
PART_BYTES = (32 << 20) + 64
# Memories whose unmapping CUDA has refused, or that copies may be on their way to: they must not
# go, as it would take what lies there later for them.
_kept: list[KvMemory] = []


class UploadMemory:
    """Memory that prompts borrow, each for as long as it lasts. One is kept for the next prompt, as
    making it takes time; it counts against client_memory_bytes, as the regions of passes do.
    Threads may share it."""

    def __init__(self, client: Client, gpu: Gpu | None) -> None:
        """gpu: that holds the model, and copies faster to memory that it knows; None: the host
        does."""
        self._client = client
        self._gpu = gpu
        self._lock = threading.Lock()
        self._free: KvMemory | None = None  # guarded by the lock, as the next three
        self._mapped: list[KvMemory] = []  # that the GPU knows
        self._streams: list[torch.cuda.Stream] = []
        self._closed = False
        self._warn = OneWarning("prompts are sent as messages, not through shared memory")

    def borrow(self) -> KvMemory | None:
        """Memory of PARTS * PART_BYTES; None if the server, or this process, has no room for it.

        Raises:
            AttndError: if the server cannot be reached.
        """
        with self._lock:
            memory, self._free = self._free, None
            if memory is not None and not memory.ended():
                return memory
            if memory is not None:
                self._end(memory)
        try:
            memory = self._client.kv_memory(PARTS * PART_BYTES)
        except (ResourceExhaustedError, OSError) as error:
            self._warn(error)
            return None
        with self._lock:
            self._map(memory)
        return memory

    def _map(self, memory: KvMemory) -> None:
        if self._gpu is None:
            return
        try:
            self._gpu.map(memory.memory)
            self._mapped.append(memory)
        except CudaError as error:
            _LOGGER.info("a prompt's memory is not known to the GPU: %s", error)

    def give_back(self, memory: KvMemory) -> None:
        """What was borrowed; closed, if the server may still read it."""
        with self._lock:
            if self._closed or self._free is not None or memory.ended():
                self._end(memory)
            else:
                self._free = memory

    def abandon(self, memory: KvMemory) -> None:
        """In place of give_back, of memory that copies may still be on their way to: the server has
        no more of it, and it stays where it is."""
        with self._lock:
            _kept.append(memory)
        memory.close()

    def take_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """For copies from the GPU that knows the memory: a stream that neither a model nor another
        upload has, until give_stream. None for another GPU, where PyTorch has shared ones alone."""
        if self._gpu is None or device != self._gpu.device:
            return None
        with self._lock:
            return self._streams.pop() if self._streams else self._gpu.new_stream()

    def give_stream(self, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._streams.append(stream)

    def close(self) -> None:
        """What is given back from here on ends."""
        with self._lock:
            self._closed = True
            memory, self._free = self._free, None
            if memory is not None:
                self._end(memory)

    def _end(self, memory: KvMemory) -> None:
        """The caller holds the lock."""
        memory.close(wait=True)
        if memory not in self._mapped:
            return
        assert self._gpu is not None
        self._mapped.remove(memory)
        try:
            self._gpu.unmap(memory.memory)
        except CudaError as error:
            _kept.append(memory)
            _LOGGER.warning("a prompt's memory stays: %s", error)
