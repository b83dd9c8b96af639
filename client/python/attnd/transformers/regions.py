# SPDX-License-Identifier: Apache-2.0
"""The memory that an attachment shares with its server."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading

from attnd.client import Client
from attnd.cuda.gpu import Gpu
from attnd.cuda.twin import twin_gpu_of
from attnd.errors import AttndError, ResourceExhaustedError
from attnd.model import ModelShape
from attnd.pass_memory import PassLayout, PassMemory
from attnd.results import Limits

_LOGGER = logging.getLogger(__name__)


class OneWarning:
    """A warning of which the log has one, with its first reason. Threads may share it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._given = False  # guarded by the lock

    def __call__(self, reason: object) -> None:
        with self._lock:
            given, self._given = self._given, True
        if not given:
            _LOGGER.warning("%s: %s", self._text, reason)


@functools.lru_cache(maxsize=64)  # each pass asks, and few answers differ
def _layout_of(shape: ModelShape, query_tokens: int) -> PassLayout:
    """Of a region for passes of so many query tokens: it has room for a power of two, so that it
    serves batches of about that size."""
    return PassLayout(shape, 1 << (query_tokens - 1).bit_length())


class Regions:
    """Regions that passes borrow, each for as long as it is under way: many caches need few
    regions; and regions that somebody keeps. Threads may share it.

    A region has room for a power of two of query tokens. Where no free one is large enough, the
    free ones are unregistered and a larger one is made. A server that was started anew is connected
    to again.
    """

    def __init__(self, client: Client, limits: Limits) -> None:
        """Connects to the server's second socket; errors as :meth:`Client.memory_session`."""
        self._client = client
        self._limits = limits
        self._lock = threading.Lock()
        self._socket = client.memory_socket()  # guarded by the lock, as the next three
        try:
            self._socket.list_regions()  # a server that sends clients away says so now
        except BaseException:
            self._socket.close()
            raise
        self._free: list[PassMemory] = []
        self._lent: set[int] = set()  # ids of the socket's regions
        self._closed = False
        self._warn = OneWarning("steps are messages, not through shared memory")

    def allow(self, shape: ModelShape, rows: int, query_tokens: int) -> bool:
        """Whether a pass has no more rows, tokens and bytes than a message may have."""
        limits = self._limits
        return (
            rows <= limits.max_rows
            and query_tokens <= limits.max_query_tokens
            and _layout_of(shape, query_tokens).bytes <= limits.max_message_bytes
        )

    def borrow(self, shape: ModelShape, rows: int, query_tokens: int) -> PassMemory | None:
        """Memory for a pass; None if the pass is one for messages: it has more rows, tokens or
        bytes than a message may have, or the server has no room for a region.

        Raises:
            AttndError: if the server cannot be reached.
            ValueError: after close().
        """
        if not self.allow(shape, rows, query_tokens):
            return None
        try:
            return self._register(_layout_of(shape, query_tokens), free=True)
        except ResourceExhaustedError as error:
            self._warn(error)
            return None

    def reserve(self, shape: ModelShape, query_tokens: int, gpu: Gpu) -> PassMemory:
        """Memory that is the caller's until drop(), which no pass has used before; with a twin in the
        GPU's memory if the server has one.

        Raises:
            AttndError: if the server cannot be reached; ResourceExhaustedError if it has no room.
            ValueError: after close().
        """
        layout = _layout_of(shape, query_tokens)
        return self._register(layout, free=False, twin_gpu=twin_gpu_of(gpu, layout))

    def _register(self, layout: PassLayout, *, free: bool, twin_gpu: bytes = b"") -> PassMemory:
        """free: a region that was given back would do."""
        with self._lock:
            if self._closed:
                raise ValueError("the attachment is closed")
            if self._socket.ended():
                self._reconnect()
            memory = self._take(layout) if free else None
            if memory is None:
                memory = PassMemory(self._socket, layout, twin_gpu=twin_gpu)
            self._lent.add(memory.region_id)
            return memory

    def _reconnect(self) -> None:
        self._free.clear()
        self._lent.clear()
        self._socket.close()
        self._socket = self._client.memory_socket()

    def _take(self, layout: PassLayout) -> PassMemory | None:
        """A free region with room for such a pass; unregisters all if there is none."""
        for number, memory in enumerate(self._free):
            has = memory.layout
            if has.shape == layout.shape and has.query_tokens_max >= layout.query_tokens_max:
                return self._free.pop(number)
        while self._free:
            memory = self._free.pop()
            memory.await_free(self._client.timeout_s)  # else its room is not free either
            self._socket.unregister(memory.region_id)
        return None

    def give_back(self, memory: PassMemory) -> None:
        """After a pass that is complete."""
        with self._lock:
            if memory.region_id in self._lent:
                self._lent.remove(memory.region_id)
                self._free.append(memory)

    def drop(self, memory: PassMemory) -> None:
        """After a pass that the server may still write to, and of memory that was reserved."""
        with self._lock:
            if memory.region_id in self._lent:
                self._lent.remove(memory.region_id)
                with contextlib.suppress(AttndError, OSError):  # the server or close() was faster
                    self._socket.unregister(memory.region_id)

    def close(self) -> None:
        """Unregisters all regions."""
        with self._lock:
            self._closed = True
            self._free.clear()
            self._lent.clear()
            self._socket.close()
