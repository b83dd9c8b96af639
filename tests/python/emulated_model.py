# SPDX-License-Identifier: Apache-2.0
"""A model server's tensors and layers on the emulated GPU."""

from __future__ import annotations

import numpy as np

from attnd.cuda.session import StreamSession
from attnd.pass_memory import PassLayout, PassMemory
from attnd.tensors import as_dtype
from cases import SHAPE, Case


class Model:
    """The tensors of a model's step in "GPU" memory, and its layers on the stream: as a serving
    engine has them, with room for a batch's rows."""

    def __init__(self, client, gpu, shape=SHAPE, tokens=1, *, lse=True, timeout_s=None, dtype="fp32", twin=False) -> None:
        layout = PassLayout(shape, tokens, dtype)
        self.connection = connection = client.memory_socket()
        memory = PassMemory(connection, layout, twin_gpu=gpu.uuid() if twin else b"")
        stream = client.memory_stream()
        if timeout_s is not None:
            stream._timeout_s = timeout_s
        self.gpu, self.shape, self.tokens = gpu, shape, tokens
        self.session = StreamSession(gpu, stream, memory, connection.close)

        def arrays(heads, dim, dtype):
            return [np.zeros((tokens, heads, dim), dtype) for _ in range(shape.layers)]

        self.q = arrays(shape.query_heads, shape.head_dim, as_dtype(dtype))
        self.k = arrays(shape.kv_heads, shape.head_dim, shape.dtype)
        self.v = arrays(shape.kv_heads, shape.value_elements, shape.dtype)
        self.out = arrays(shape.query_heads, shape.value_elements, as_dtype(dtype))
        self.lse = [np.zeros((tokens, shape.query_heads), np.float32) for _ in self.q]
        self.want_lse = lse

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()
        assert self.gpu.mapped == []
        assert self.gpu.imported == {}

    def layer(self, layer: int) -> None:
        v = None if self.shape.latent else self.v[layer]
        lse = self.lse[layer] if self.want_lse else None
        self.session.layer(layer, self.q[layer], self.k[layer], v, self.out[layer], lse)

    def layers(self) -> None:
        for layer in range(self.shape.layers):
            self.layer(layer)

    def graph(self) -> list:
        self.gpu.captured = []
        self.layers()
        graph, self.gpu.captured = self.gpu.captured, None
        return graph

    def write(self, case: Case, tokens: slice, at: int = 0) -> None:
        """The layers' tensors of these tokens, which end as rubbish if the kernels miss them."""
        places = slice(at, at + tokens.stop - tokens.start)
        for layer in range(self.shape.layers):
            self.q[layer][places] = case.q[layer, tokens]
            self.k[layer][places] = case.k[layer, tokens]
            if not self.shape.latent:
                self.v[layer][places] = case.v[layer, tokens]
            self.out[layer][:] = 7
            self.lse[layer][:] = 7

    def all_nan(self, first: int = 0) -> bool:
        return all(np.isnan(out).all() for out in self.out[first:])
