# SPDX-License-Identifier: Apache-2.0
"""What a model shard's attention looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy.typing as npt

from attnd.tensors import BF16, as_dtype, from_wire_dtype, to_wire_dtype
from attnd.v1 import types_pb2


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one shard's attention; the server checks them.

    Attributes:
        layers: attention layers of this shard.
        query_heads: a multiple of kv_heads.
        kv_heads: key/value heads.
        head_dim: elements of a query or key head, a multiple of 16.
        value_dim: elements of a value head; 0 means head_dim.
        dtype: element type of keys and values: "bf16", "fp16", "fp32" or a numpy dtype. Stored as
            sent.
        softmax_scale: logits are softmax_scale * q.k; 0 means 1/sqrt(head_dim).
        latent: multi-head latent attention: one KV head whose value is the first value_dim elements
            of its key. Then no v is sent.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    dtype: npt.DTypeLike = BF16
    softmax_scale: float = 0.0
    latent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))

    @property
    def value_elements(self) -> int:
        """Elements of a value head."""
        return self.value_dim or self.head_dim

    def to_proto(self) -> types_pb2.ModelShape:
        return types_pb2.ModelShape(
            layers=self.layers,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=to_wire_dtype(self.dtype),
            softmax_scale=self.softmax_scale,
            latent=self.latent,
        )

    @staticmethod
    def from_proto(message: types_pb2.ModelShape) -> ModelShape:
        return ModelShape(
            layers=message.layers,
            query_heads=message.query_heads,
            kv_heads=message.kv_heads,
            head_dim=message.head_dim,
            value_dim=message.value_dim,
            dtype=from_wire_dtype(message.dtype),
            softmax_scale=message.softmax_scale,
            latent=message.latent,
        )


@dataclass(frozen=True)
class Shard:
    """Which part of a model a sequence holds; the default is all of it.

    Attributes:
        kind: "" for the whole model, "heads" or "context".
        index: this shard's number, below count.
        count: shards in all.
    """

    kind: str = ""
    index: int = 0
    count: int = 1

    _KINDS: ClassVar[dict[str, types_pb2.Shard.Kind]] = {
        "": types_pb2.Shard.KIND_UNSPECIFIED,
        "heads": types_pb2.Shard.KIND_HEADS,
        "context": types_pb2.Shard.KIND_CONTEXT,
    }

    def to_proto(self) -> types_pb2.Shard:
        if self.kind not in self._KINDS:
            raise ValueError(f"shard kind {self.kind!r} is none of '', 'heads', 'context'")
        return types_pb2.Shard(kind=self._KINDS[self.kind], index=self.index, count=self.count)

    @staticmethod
    def from_proto(message: types_pb2.Shard) -> Shard:
        kinds = {number: kind for kind, number in Shard._KINDS.items()}
        return Shard(kinds.get(message.kind, ""), message.index, message.count or 1)


@dataclass(frozen=True)
class Model:
    """Which model a sequence belongs to.

    Attributes:
        fingerprint: anything that tells two sets of weights apart, for example a hash; at most 256
            bytes.
        shape: sizes of this shard.
        shard: which part of the model this is.
    """

    fingerprint: str
    shape: ModelShape
    shard: Shard = field(default_factory=Shard)

    def to_proto(self) -> types_pb2.Model:
        return types_pb2.Model(
            fingerprint=self.fingerprint,
            shape=self.shape.to_proto(),
            shard=self.shard.to_proto(),
        )

    @staticmethod
    def from_proto(message: types_pb2.Model) -> Model:
        return Model(
            message.fingerprint,
            ModelShape.from_proto(message.shape),
            Shard.from_proto(message.shard),
        )
