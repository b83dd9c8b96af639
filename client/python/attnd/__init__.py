# SPDX-License-Identifier: Apache-2.0
"""Client of attnd, which answers attention from a clustered KV cache over gRPC.

:class:`Client` is synchronous, :class:`attnd.aio.Client` for asyncio. Arrays are numpy's:
``ml_dtypes.bfloat16``, ``float16`` or ``float32``.
"""

from attnd.client import Client
from attnd.errors import (
    AbortedError,
    AlreadyExistsError,
    AttndError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    RowError,
    UnavailableError,
    UnimplementedError,
)
from attnd.kv_memory import KvMemory
from attnd.memory import MemorySession, as_torch
from attnd.memory_stream import MemoryPass
from attnd.model import Model, ModelShape, Shard
from attnd.passes import Pass
from attnd.policy import INDEXES, Policy, Preset, TreeOptions
from attnd.requests import KvChunk, Row, layer_chunks
from attnd.results import (
    AppendedKv,
    LayerResult,
    Limits,
    OpenedSequence,
    RoundTrip,
    RowResult,
    RowStats,
    SealedSequence,
    SealResult,
    SequenceInfo,
    ServerInfo,
    StepResult,
)
from attnd.session import DecodeSession
from attnd.tensors import BF16, FP16, FP32

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "AbortedError",
    "AlreadyExistsError",
    "AppendedKv",
    "AttndError",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "DecodeSession",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "KvChunk",
    "KvMemory",
    "LayerResult",
    "Limits",
    "MemoryPass",
    "MemorySession",
    "Model",
    "ModelShape",
    "NotFoundError",
    "OpenedSequence",
    "Pass",
    "Policy",
    "Preset",
    "ResourceExhaustedError",
    "RoundTrip",
    "Row",
    "RowError",
    "RowResult",
    "RowStats",
    "SealResult",
    "SealedSequence",
    "SequenceInfo",
    "ServerInfo",
    "Shard",
    "StepResult",
    "TreeOptions",
    "UnavailableError",
    "UnimplementedError",
    "as_torch",
    "layer_chunks",
]
