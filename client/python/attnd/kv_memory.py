# SPDX-License-Identifier: Apache-2.0
"""Memory that is shared with a server, from which it takes uploads (proto, KvMemory)."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt

from attnd.errors import AttndError
from attnd.memory_socket import ALIGNMENT_BYTES, MemorySocket
from attnd.tensors import Array, as_dtype
from attnd.v1 import attnd_pb2

# So long a failed upload waits for a server that may be what it failed of.
_GIVE_BACK_S = 1.0


@contextlib.contextmanager
def closed_by_errors(memory: KvMemory | None, *, wait: bool) -> Iterator[None]:
    """Around an upload: one that fails leaves it open when the server reads its memory for the last
    time.

    Args:
        wait: as of :meth:`KvMemory.close`.
    """
    try:
        yield
    except BaseException:
        if memory is not None:
            memory.close(wait=wait)
        raise


class KvMemory:
    """A region for keys and values on their way to the server, for one upload at a time. Made by
    :meth:`Client.kv_memory`; use it in a ``with`` statement.

    Write keys and values to arrays of it, and give chunks of these to :meth:`Client.append_kv` with
    ``memory=``: the messages then carry no data, and the server copies it from here. Until the call
    returns the arrays must stay as they are. A call that fails closes the memory, as the server may
    be about to read it: make another one. It waits for the server's word on that for a second
    (:mod:`attnd.aio` does not): until it comes leave the arrays as they are.
    """

    def __init__(self, socket: MemorySocket, bytes_: int) -> None:
        """Registers the region, by a connection that becomes its own, and is closed if that fails.
        Raises as :meth:`MemorySocket.register`."""
        try:
            self._region = socket.register(bytes_)
        except BaseException:
            socket.close()
            raise
        self._socket = socket
        self._start: int = np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]

    def __enter__(self) -> KvMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, *, wait: bool = False) -> None:
        """Gives the region back. Its arrays stay readable.

        Args:
            wait: until the server has it, which otherwise is soon, but for a second at most: what
                is written to the arrays from then on is in no sequence.
        """
        try:
            if wait and not self._socket.ended():
                with contextlib.suppress(AttndError, OSError):  # the server was faster
                    self._socket.unregister(self._region.id, timeout_s=_GIVE_BACK_S)
        finally:
            self._socket.close()

    def ended(self) -> bool:
        """Whether the server has ended, or close() was called: it takes nothing from here any
        more."""
        return self._socket.ended()

    @property
    def memory(self) -> mmap.mmap:
        """Its bytes."""
        return self._region.memory

    @property
    def bytes(self) -> int:
        """Of all arrays together."""
        return len(self._region.memory)

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A view of the memory, of "bf16", "fp16" or "fp32".

        Args:
            offset: where it begins: a multiple of 64 bytes.

        Raises:
            ValueError: if it does not lie in the memory, or attnd has no such element type.
        """
        found = as_dtype(dtype)
        size = math.prod(shape) * found.itemsize
        if offset % ALIGNMENT_BYTES or not 0 <= offset <= self.bytes - size:
            raise ValueError(
                f"{size} bytes at {offset}; allowed are multiples of {ALIGNMENT_BYTES} within "
                f"{self.bytes} bytes"
            )
        array: Array = np.ndarray(shape, found, self._region.memory, offset)
        return array

    def places(self, k: Array, v: Array | None) -> attnd_pb2.KvMemory:
        """Where a chunk's arrays lie.

        Raises:
            ValueError: if they are not of this memory.
        """
        places = attnd_pb2.KvMemory(region_id=self._region.id, k_offset=self._offset("k", k))
        if v is not None:
            places.v_offset = self._offset("v", v)
        return places

    def _offset(self, name: str, array: Array) -> int:
        offset: int = array.__array_interface__["data"][0] - self._start
        if not array.flags.c_contiguous or not 0 <= offset <= self.bytes - array.nbytes:
            raise ValueError(f"{name} is no dense array of the memory: KvMemory.array() makes them")
        if offset % ALIGNMENT_BYTES:
            raise ValueError(
                f"{name} begins at {offset}; allowed are multiples of {ALIGNMENT_BYTES} bytes"
            )
        return offset
