# SPDX-License-Identifier: Apache-2.0
"""What the reference server keeps of a sequence, and what the contract refuses."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import ml_dtypes
import numpy as np

from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import types_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
DTYPES = {
    types_pb2.DTYPE_BF16: np.dtype(ml_dtypes.bfloat16),
    types_pb2.DTYPE_FP16: np.dtype(np.float16),
    types_pb2.DTYPE_FP32: np.dtype(np.float32),
}
PRESETS = {
    "dense": {},
    "streaming": {"sink": "4", "window": "64"},
    "clusters-top-k": {"exact": "0.018", "estimated": "0.232"},
    "double-p": {"p1": "0.95", "p2": "0.7"},
    "error-target": {"tolerance": "0.2", "floor": "0.01"},
}
LIMITS = pb.Limits(
    max_message_bytes=64 << 20,
    max_rows=64,
    max_query_tokens=1024,
    max_sequences=100,
    max_sequence_tokens=1 << 20,
    memory_budget_bytes=1 << 30,
    max_streams=16,
    max_queued_steps=64,
)
# Tokens that a finished prompt leaves outside segments, and the fewest that make a segment.
WINDOW = 64
SEGMENT_MIN = 512


class Refused(Exception):
    """A request that the contract refuses."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def refuse(code: grpc.StatusCode, message: str) -> NoReturn:
    raise Refused(code, message)


def check(condition: bool, message: str, code: grpc.StatusCode = INVALID) -> None:
    if not condition:
        refuse(code, message)


@dataclass
class Sequence:
    id: int
    tenant: str
    model: types_pb2.Model
    policy: types_pb2.Policy
    k: list[np.ndarray]  # of each layer, [tokens, kv_heads, head_dim]
    v: list[np.ndarray]
    token_ids: dict[int, int] = field(default_factory=dict)
    segmented: int = 0
    writer: object = None  # the stream that appends, if one does
    lease_seconds: int = 0  # 0: none
    used_s: float = field(default_factory=time.monotonic)  # when a call last named it

    @property
    def lease_left_seconds(self) -> int:
        left = self.used_s + self.lease_seconds - time.monotonic()
        return math.ceil(max(0, left)) if self.lease_seconds else 0

    @property
    def lease_ended(self) -> bool:
        return self.lease_seconds > 0 and self.lease_left_seconds == 0

    @property
    def shape(self) -> types_pb2.ModelShape:
        return self.model.shape

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.shape.dtype]

    @property
    def value_dim(self) -> int:
        return self.shape.value_dim or self.shape.head_dim

    @property
    def committed(self) -> int:
        return min(map(len, self.k))

    @property
    def scale(self) -> float:
        return self.shape.softmax_scale or 1 / math.sqrt(self.shape.head_dim)


# ---- Checks ----


def check_shape(shape: types_pb2.ModelShape) -> None:
    check(1 <= shape.layers <= 1024, "model.shape.layers must be 1..1024")
    check(1 <= shape.kv_heads <= 1024, "model.shape.kv_heads must be 1..1024")
    heads, kv_heads = shape.query_heads, shape.kv_heads
    allowed = 1 <= heads <= 1024 and heads % kv_heads == 0 and heads <= 128 * kv_heads
    check(allowed, "model.shape.query_heads must be 1..1024 and 1..128 times kv_heads")
    check(
        shape.head_dim % 16 == 0 and 16 <= shape.head_dim <= 576,
        "model.shape.head_dim must be 16, 32, .. 576",
    )
    check(
        shape.value_dim % 16 == 0 and shape.value_dim <= 576,
        "model.shape.value_dim must be 0, 16, .. 576",
    )
    check(shape.dtype in DTYPES, "model.shape.dtype must be bf16, fp16 or fp32")
    scale = shape.softmax_scale
    check(
        math.isfinite(scale) and scale >= 0,
        "model.shape.softmax_scale must be finite and not negative",
    )
    if shape.latent:
        check(kv_heads == 1, "model.shape.kv_heads must be 1 if latent")
        fits = (shape.value_dim or shape.head_dim) <= shape.head_dim
        check(fits, "model.shape.value_dim must be at most head_dim if latent")


def check_policy(policy: types_pb2.Policy) -> None:
    check(len(policy.parameters) <= 32, "policy.parameters: at most 32")
    check(
        policy.preset in PRESETS or not policy.preset, f"policy.preset: one of {', '.join(PRESETS)}"
    )
    known = {"sink", "window", "dense_layers", *(PRESETS[policy.preset] if policy.preset else ())}
    for name, value in policy.parameters.items():
        check(name in known, f"policy parameter {name} is unknown")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        check(
            math.isfinite(number) and number >= 0,
            f"policy parameter {name} = {value}: not a number from 0",
        )


def read_tensor(
    tensor: types_pb2.Tensor, name: str, shape: tuple[int, ...], dtype: Any = None
) -> np.ndarray:
    check(tensor.dtype in DTYPES, f"{name}.dtype must be bf16, fp16 or fp32")
    check(
        dtype is None or DTYPES[tensor.dtype] == dtype, f"{name}.dtype must be the model's, {dtype}"
    )
    check(
        tuple(tensor.shape) == shape, f"{name}.shape must be {list(shape)}, is {list(tensor.shape)}"
    )
    expected = math.prod(shape) * DTYPES[tensor.dtype].itemsize
    check(len(tensor.data) == expected, f"{name}.data must have {expected} bytes")
    array = np.frombuffer(tensor.data, DTYPES[tensor.dtype]).reshape(shape)
    check(bool(np.isfinite(array.astype(np.float64)).all()), f"{name} has a NaN or an infinity")
    return array


def read_values(sequence: Sequence, message: Any, k: np.ndarray) -> np.ndarray:
    """The v of a message with these keys; a latent sequence's is the front of its keys."""
    value_dim, latent = sequence.value_dim, sequence.shape.latent
    check(message.HasField("v") != latent, "v must be absent if, and only if, the model is latent")
    if latent:
        return k[..., :value_dim]
    return read_tensor(message.v, "v", (len(k), k.shape[1], value_dim), sequence.dtype)


def write_tensor(array: np.ndarray, number: int) -> types_pb2.Tensor:
    with np.errstate(over="ignore"):
        data = array.astype(DTYPES[number]).tobytes()
    return types_pb2.Tensor(dtype=number, shape=array.shape, data=data)


# ---- Appending ----


def append(
    sequence: Sequence,
    layer: int,
    position: int,
    k: np.ndarray,
    v: np.ndarray,
    ids: Any,
    repeat: int,
) -> None:
    """Appends what is new. `repeat`: the first position that may be repeated."""
    length = len(sequence.k[layer])
    check(repeat <= position <= length, f"position must be {length}, is {position}", PRECONDITION)
    check(
        position + len(k) <= LIMITS.max_sequence_tokens,
        "position: beyond max_sequence_tokens",
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    known = min(length - position, len(k))
    for old, new, name in ((sequence.k, k, "k"), (sequence.v, v, "v")):
        same = old[layer][position : position + known].tobytes() == new[:known].tobytes()
        check(
            same,
            f"{name} differs from what position {position} has",
            grpc.StatusCode.ALREADY_EXISTS,
        )
    for offset, token in enumerate(ids):
        check(
            sequence.token_ids.get(position + offset, token) == token,
            f"token_ids differ at position {position + offset}",
            grpc.StatusCode.ALREADY_EXISTS,
        )
    sequence.token_ids.update({position + offset: token for offset, token in enumerate(ids)})
    sequence.k[layer] = np.concatenate([sequence.k[layer], k[known:]])
    sequence.v[layer] = np.concatenate([sequence.v[layer], v[known:]])


def row_result(error: Refused | None, stats: pb.RowStats | None = None) -> pb.RowResult:
    if error is None:
        return pb.RowResult(status=types_pb2.Status(), stats=stats)
    return pb.RowResult(status=types_pb2.Status(code=error.code.value[0], message=error.message))


def nan_like(request: pb.DecodeRequest, tokens: int) -> types_pb2.Tensor:
    check(len(request.q.shape) == 3, "q.shape must have 3 dimensions")
    return write_tensor(
        np.full((tokens, *request.q.shape[1:]), np.nan), request.output_dtype or request.q.dtype
    )


def lengths_of(sequence: Sequence) -> pb.AppendKvResponse:
    return pb.AppendKvResponse(
        committed_tokens=sequence.committed, segmented_tokens=sequence.segmented
    )
