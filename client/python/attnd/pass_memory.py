# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a pass lie in memory that client and server share (proto, PassMemory)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnd.errors import AttndError
from attnd.memory_socket import MemorySocket, aligned
from attnd.model import ModelShape
from attnd.tensors import FP32, Array, as_dtype, without_data
from attnd.v1 import attnd_pb2, types_pb2
from attnd.words import WORDS_BYTES, ClientTurns

if TYPE_CHECKING:
    from attnd.pass_reply import PassReply

# Of a layer's q, k and v. With more a server's GPU begins when its host says so, by what is in the region
# (gpu/layout/step_gate.h), and the twin would only be in the way.
_TWIN_BYTES_MAX = 128 << 10


class TensorPlace:
    """One tensor's place in a region, and its arrays of so many tokens.

    Attributes:
        offset, end: bytes from the region's start.
        heads, dim: of a token.
        dtype: of the elements.
    """

    def __init__(
        self, offset: int, tokens_max: int, heads: int, dim: int, dtype: np.dtype[Any]
    ) -> None:
        self.offset = offset
        self.dtype = dtype
        self.heads = heads
        self.dim = dim
        bytes_ = self.bytes_of(tokens_max)
        self.end = offset + aligned(bytes_)

    def bytes_of(self, tokens: int) -> int:
        return tokens * self.heads * self.dim * self.dtype.itemsize

    def array(self, memory: Any, tokens: int) -> Array:
        """[tokens, heads, dim], a view of the memory."""
        array: Array = np.ndarray((tokens, self.heads, self.dim), self.dtype, memory, self.offset)
        return array

    def message(self, tokens: int) -> types_pb2.Tensor:
        """The tensor without its data."""
        return without_data(self.dtype, (tokens, self.heads, self.dim))


class PassLayout:
    """Places of a layer's tensors, one layer's at a time, behind the words.

    Attributes:
        shape: of the models of all sequences.
        query_tokens_max: query tokens of a pass, all rows together.
        q, k, v, out, lse: the places.
        bytes: of a region with all of them.
    """

    def __init__(
        self,
        shape: ModelShape,
        query_tokens_max: int,
        query_dtype: npt.DTypeLike | None = None,
        output_dtype: npt.DTypeLike | None = None,
    ) -> None:
        """query_dtype, output_dtype: None: the shape's, and q's.

        Raises:
            ValueError: if query_tokens_max is not 1 or more, or attnd has no such element type.
        """
        if query_tokens_max < 1:
            raise ValueError(f"query_tokens_max is {query_tokens_max}; allowed are 1 and more")
        self.shape = shape
        self.query_tokens_max = query_tokens_max
        kv_dtype = as_dtype(shape.dtype)
        q_dtype = kv_dtype if query_dtype is None else as_dtype(query_dtype)
        out_dtype = q_dtype if output_dtype is None else as_dtype(output_dtype)
        self.bytes = WORDS_BYTES

        def place(heads: int, dim: int, dtype: np.dtype[Any]) -> TensorPlace:
            made = TensorPlace(self.bytes, query_tokens_max, heads, dim, dtype)
            self.bytes = made.end
            return made

        self.q = place(shape.query_heads, shape.head_dim, q_dtype)
        self.k = place(shape.kv_heads, shape.head_dim, kv_dtype)
        self.v = place(shape.kv_heads, 0 if shape.latent else shape.value_elements, kv_dtype)
        self.out = place(shape.query_heads, shape.value_elements, out_dtype)
        self.lse = place(shape.query_heads, 1, FP32)


class PassMemory:
    """A region with a layout. Passes use it one after the other, on any stream of its tenant's.

    Attributes:
        layout: where the tensors lie.
        region_id: what the server knows it by.
        memory: its bytes.
        twin: GPU memory with the same layout, if the server has some for this region; else None.
        no_twin: why not, if it was asked for.
        in_twin: whether a GPU's passes take their turns there, too.
        turns: the client's end of its words.
        reply: to the newest pass that the server was told of; it has the region until the reply has
            been sent.
    """

    def __init__(self, socket: MemorySocket, layout: PassLayout, *, twin_gpu: bytes = b"") -> None:
        """Registers the region.

        Args:
            twin_gpu: as :meth:`MemorySocket.register`.

        Raises:
            AttndError: likewise.
        """
        region = socket.register(layout.bytes, twin_gpu=twin_gpu)
        self.layout = layout
        self.region_id = region.id
        self.memory = region.memory
        self.twin = region.twin
        self.no_twin = region.no_twin
        self.in_twin = False
        self.turns = ClientTurns(region.memory, 0)
        self.reply: PassReply | None = None

    def await_free(self, timeout_s: float) -> None:
        """Waits until the server has let the region go, after the newest pass; at most so long, and
        not where the pass's stream has ended."""
        if self.reply is not None:
            with contextlib.suppress(AttndError):
                self.reply.get(timeout_s)

    def begin(
        self, message: attnd_pb2.PassMemory, query_tokens: int, new_tokens: int
    ) -> None:
        """Begins a pass in the words and fills in where it lies; the message says whether a GPU rings."""
        layout = self.layout
        message.region_id = self.region_id
        sent = layout.q.bytes_of(query_tokens)
        sent += layout.k.bytes_of(new_tokens) + layout.v.bytes_of(new_tokens)
        message.in_twin = self.in_twin and message.device_rings and sent <= _TWIN_BYTES_MAX
        message.first_epoch = self.turns.begin(
            layout.shape.layers, device_rings=message.device_rings
        )
        message.q.offset = layout.q.offset
        message.k.offset = layout.k.offset
        message.v.offset = layout.v.offset
        message.out.offset = layout.out.offset
        message.lse.offset = layout.lse.offset
