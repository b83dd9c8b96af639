# SPDX-License-Identifier: Apache-2.0
"""A small attnd in Python: the contract of proto/attnd/v1 with dense attention in float64, whatever
the policy.

It is an oracle for the clients' tests and for the end-to-end tests, which run against it and
against the real server. It shares no code with the package `attnd` but the generated messages. One
lock serialises everything.
"""

from __future__ import annotations

import itertools
import math
import threading
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import ml_dtypes
import numpy as np

import oracle
from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import attnd_pb2_grpc, types_pb2

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
    check(not shape.latent, "model.shape.latent is not supported", grpc.StatusCode.UNIMPLEMENTED)


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


class Servicer(attnd_pb2_grpc.AttndServicer):
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sequences: dict[int, Sequence] = {}
        self._ids = itertools.count(1)
        self.calls: list[str] = []  # names of the calls so far, for tests of retries
        self.unavailable = 0  # calls, or steps, that are still to fail with UNAVAILABLE
        self.pause_s = 0.0  # before each step's answer

    # -- Helpers --

    def _begin(self, name: str, context: Any) -> None:
        self.calls.append(name)
        if self.unavailable > 0:
            self.unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "told to fail")

    def _tenant(self, context: Any) -> str:
        return dict(context.invocation_metadata()).get("attnd-tenant", "")

    def _find(self, sequence_id: int, tenant: str) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.tenant != tenant:
            refuse(grpc.StatusCode.NOT_FOUND, f"sequence_id {sequence_id}: no such sequence")
        return sequence

    def _unary(self, name: str, context: Any, answer: Any) -> Any:
        self._begin(name, context)
        try:
            with self._lock:
                return answer(self._tenant(context))
        except Refused as error:
            context.abort(error.code, error.message)

    def _claim(self, sequence: Sequence, stream: object) -> None:
        check(
            sequence.writer in (None, stream),
            "sequence_id: another stream writes it",
            grpc.StatusCode.ABORTED,
        )
        sequence.writer = stream

    def _release(self, stream: object) -> None:
        with self._lock:
            for sequence in self._sequences.values():
                if sequence.writer is stream:
                    sequence.writer = None

    # -- Unary calls --

    def GetServerInfo(self, request, context):  # noqa: N802
        def answer(tenant):
            policies = [types_pb2.Policy(preset=name, parameters=PRESETS[name]) for name in PRESETS]
            return pb.GetServerInfoResponse(
                version="0.0.0",
                backends=["reference"],
                policies=policies,
                default_policy=policies[0],
                limits=LIMITS,
                simd_target="none",
            )

        return self._unary("GetServerInfo", context, answer)

    def OpenSequence(self, request, context):  # noqa: N802
        def answer(tenant):
            check(
                request.HasField("model") and request.model.HasField("shape"), "model is required"
            )
            check(
                len(request.model.fingerprint.encode()) <= 256,
                "model.fingerprint: at most 256 bytes",
            )
            check_shape(request.model.shape)
            shard = request.model.shard
            check(shard.kind in types_pb2.Shard.Kind.values(), "model.shard.kind is unknown")
            check(shard.count <= 4096, "model.shard.count must be at most 4096")
            check(shard.index < max(1, shard.count), "model.shard.index must be below count")
            check(request.layout in (0, 1, 2), "layout is unknown")
            check(
                request.layout != 2,
                "layout: token order is not supported",
                grpc.StatusCode.UNIMPLEMENTED,
            )
            check(len(request.indexes) <= 8, "indexes: at most 8")
            check(all(index in (0, 1) for index in request.indexes), "indexes: unknown index")
            check_policy(request.policy)
            check(len(request.token_ids) <= LIMITS.max_sequence_tokens, "token_ids: too many")
            check(
                len(self._sequences) < LIMITS.max_sequences,
                "max_sequences",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
            shape, number = request.model.shape, next(self._ids)
            sequence = Sequence(number, tenant, request.model, request.policy, [], [])
            for _ in range(shape.layers):
                sequence.k.append(np.zeros((0, shape.kv_heads, shape.head_dim), sequence.dtype))
                sequence.v.append(np.zeros((0, shape.kv_heads, sequence.value_dim), sequence.dtype))
            self._sequences[number] = sequence
            return pb.OpenSequenceResponse(sequence_id=number)

        return self._unary("OpenSequence", context, answer)

    def TruncateSequence(self, request, context):  # noqa: N802
        def answer(tenant):
            sequence = self._find(request.sequence_id, tenant)
            check(
                request.length <= sequence.committed,
                f"length: at most {sequence.committed}",
                PRECONDITION,
            )
            self._cut(sequence, request.length)
            return pb.TruncateSequenceResponse(segmented_tokens=sequence.segmented)

        return self._unary("TruncateSequence", context, answer)

    def _cut(self, sequence: Sequence, length: int) -> None:
        sequence.k = [k[:length] for k in sequence.k]
        sequence.v = [v[:length] for v in sequence.v]
        sequence.token_ids = {at: token for at, token in sequence.token_ids.items() if at < length}
        sequence.segmented = min(sequence.segmented, max(0, length - WINDOW))

    def ForkSequence(self, request, context):  # noqa: N802
        def answer(tenant):
            parent = self._find(request.sequence_id, tenant)
            length = request.length if request.HasField("length") else parent.committed
            check(length <= parent.committed, f"length: at most {parent.committed}", PRECONDITION)
            child = Sequence(
                next(self._ids),
                tenant,
                parent.model,
                parent.policy,
                parent.k,
                parent.v,
                parent.token_ids,
                parent.segmented,
            )
            self._cut(child, length)
            self._sequences[child.id] = child
            return pb.ForkSequenceResponse(sequence_id=child.id, committed_tokens=length)

        return self._unary("ForkSequence", context, answer)

    def CloseSequence(self, request, context):  # noqa: N802
        def answer(tenant):
            del self._sequences[self._find(request.sequence_id, tenant).id]
            return pb.CloseSequenceResponse()

        return self._unary("CloseSequence", context, answer)

    def ListSequences(self, request, context):  # noqa: N802
        def answer(tenant):
            check(request.page_size <= 1000, "page_size must be 0..1000")
            found = [
                s
                for s in self._sequences.values()
                if s.tenant == tenant and s.id > request.after_sequence_id
            ]
            page, rest = found[: request.page_size or 1000], found[request.page_size or 1000 :]
            infos = [
                pb.SequenceInfo(
                    sequence_id=s.id,
                    model=s.model,
                    policy=s.policy,
                    committed_tokens=s.committed,
                    segmented_tokens=s.segmented,
                    segments=int(s.segmented > 0),
                    resident_bytes=sum(x.nbytes for x in (*s.k, *s.v)),
                    layer_tokens=[len(k) for k in s.k],
                )
                for s in page
            ]
            return pb.ListSequencesResponse(
                sequences=infos, next_after_sequence_id=page[-1].id if rest else 0
            )

        return self._unary("ListSequences", context, answer)

    # -- Streams --

    def AppendKv(self, request_iterator, context):  # noqa: N802
        self._begin("AppendKv", context)
        tenant, stream, sequence_id, complete = self._tenant(context), object(), 0, False
        try:
            for request in request_iterator:
                with self._lock:
                    check(not complete, "prefill_complete must be in the last message")
                    check(
                        not sequence_id or request.sequence_id in (0, sequence_id),
                        "sequence_id must stay the same",
                    )
                    sequence_id = sequence_id or request.sequence_id
                    self._append_chunk(self._find(sequence_id, tenant), request, stream)
                    complete = request.prefill_complete
            with self._lock:
                sequence = self._find(sequence_id, tenant)
                return pb.AppendKvResponse(
                    committed_tokens=sequence.committed, segmented_tokens=sequence.segmented
                )
        except Refused as error:
            context.abort(error.code, error.message)
        finally:
            self._release(stream)

    def _append_chunk(
        self, sequence: Sequence, request: pb.AppendKvRequest, stream: object
    ) -> None:
        if request.HasField("k") or request.HasField("v") or not request.prefill_complete:
            shape = sequence.shape
            check(request.layer < shape.layers, f"layer must be below {shape.layers}")
            tokens = request.k.shape[0] if request.k.shape else 0
            check(tokens >= 1, "k.shape must have 1 or more tokens")
            k = read_tensor(
                request.k, "k", (tokens, shape.kv_heads, shape.head_dim), sequence.dtype
            )
            v = read_tensor(
                request.v, "v", (tokens, shape.kv_heads, sequence.value_dim), sequence.dtype
            )
            check(len(request.token_ids) in (0, tokens), f"token_ids must be none or {tokens}")
            self._claim(sequence, stream)
            append(sequence, request.layer, request.first_position, k, v, request.token_ids, 0)
        if request.prefill_complete:
            lengths = {len(k) for k in sequence.k}
            check(
                len(lengths) == 1,
                f"prefill_complete: layers' lengths differ: {lengths}",
                PRECONDITION,
            )
            if sequence.committed - WINDOW >= SEGMENT_MIN:
                sequence.segmented = sequence.committed - WINDOW

    def Decode(self, request_iterator, context):  # noqa: N802
        self.calls.append("Decode")
        tenant, stream = self._tenant(context), object()
        try:
            for request in request_iterator:
                if self.unavailable > 0:
                    self.unavailable -= 1
                    context.abort(grpc.StatusCode.UNAVAILABLE, "told to fail")
                if self.pause_s:
                    threading.Event().wait(self.pause_s)
                with self._lock:
                    yield self._step(request, tenant, stream)
        finally:
            self._release(stream)

    def _step(self, request: pb.DecodeRequest, tenant: str, stream: object) -> pb.DecodeResponse:
        try:
            return self._answer(request, tenant, stream)
        except Refused as error:
            status = types_pb2.Status(code=error.code.value[0], message=error.message)
            return pb.DecodeResponse(step_id=request.step_id, status=status)

    def _answer(self, request: pb.DecodeRequest, tenant: str, stream: object) -> pb.DecodeResponse:
        rows = request.rows
        check(1 <= len(rows) <= LIMITS.max_rows, f"rows must be 1..{LIMITS.max_rows}")
        check(len({row.sequence_id for row in rows}) == len(rows), "rows: a sequence comes twice")
        check(all(row.query_tokens >= 1 for row in rows), "query_tokens must be 1 or more")
        tokens = sum(row.query_tokens for row in rows)
        check(
            tokens <= LIMITS.max_query_tokens,
            f"query_tokens: at most {LIMITS.max_query_tokens} in all",
        )
        new_tokens = sum(row.query_tokens for row in rows if not row.query_only)
        check(request.output_dtype in (0, *DTYPES), "output_dtype is unknown")
        found = []
        for row in rows:
            try:
                found.append(self._find(row.sequence_id, tenant))
            except Refused as error:
                found.append(error)
        good = [sequence for sequence in found if isinstance(sequence, Sequence)]
        if not good:  # nothing tells the shape: the reply has rows only
            results = [row_result(error) for error in found]
            return pb.DecodeResponse(
                step_id=request.step_id,
                status=types_pb2.Status(),
                rows=results,
                out=nan_like(request, tokens),
                lse=write_tensor(
                    np.full((tokens, request.q.shape[1]), np.nan), types_pb2.DTYPE_FP32
                ),
            )
        first = good[0]
        shape = first.shape
        check(request.layer < shape.layers, f"layer must be below {shape.layers}")
        q = read_tensor(request.q, "q", (tokens, shape.query_heads, shape.head_dim))
        check(
            new_tokens or not request.HasField("k"), "k must be absent if all rows are query_only"
        )
        k = v = np.zeros((0, 0, 0))
        if new_tokens:
            k = read_tensor(
                request.k, "k", (new_tokens, shape.kv_heads, shape.head_dim), first.dtype
            )
            v = read_tensor(
                request.v, "v", (new_tokens, shape.kv_heads, first.value_dim), first.dtype
            )

        out = np.full((tokens, shape.query_heads, first.value_dim), np.nan)
        lse = np.full((tokens, shape.query_heads), np.nan)
        results, at, at_new = [], 0, 0
        for row, sequence in zip(rows, found):
            part = slice(at, at + row.query_tokens)
            new = slice(at_new, at_new + (0 if row.query_only else row.query_tokens))
            at, at_new = part.stop, new.stop
            try:
                if isinstance(sequence, Refused):
                    raise sequence
                check(sequence.shape == shape, "rows: the sequences' shapes differ")
                out[part], lse[part] = self._attend(
                    row, sequence, request.layer, q[part], k[new], v[new], stream
                )
                results.append(row_result(None, self._stats(sequence, row, request.layer)))
            except Refused as error:
                results.append(row_result(error))
        number = request.output_dtype or request.q.dtype
        return pb.DecodeResponse(
            step_id=request.step_id,
            status=types_pb2.Status(),
            rows=results,
            out=write_tensor(out, number),
            lse=write_tensor(lse, types_pb2.DTYPE_FP32),
        )

    def _attend(self, row, sequence, layer, q, k, v, stream):
        check(len(row.token_ids) in (0, row.query_tokens), "token_ids must be none or query_tokens")
        check_policy(row.policy)
        length = len(sequence.k[layer])
        if row.query_only:
            check(row.position == length, f"position must be {length}", PRECONDITION)
        else:
            self._claim(sequence, stream)
            append(sequence, layer, row.position, k, v, row.token_ids, sequence.segmented)
        end = row.position + (0 if row.query_only else row.query_tokens)
        first = end if row.query_only else row.position
        return oracle.attention(
            q, sequence.k[layer][:end], sequence.v[layer][:end], sequence.scale, first
        )

    def _stats(self, sequence: Sequence, row: pb.DecodeRow, layer: int) -> pb.RowStats:
        seen = [row.position + i + 1 for i in range(row.query_tokens)]
        heads = sequence.shape.kv_heads
        middle = max(0, sequence.segmented - 4)
        return pb.RowStats(
            zone_tokens=heads * sum(n - middle for n in seen),
            exact_tokens=heads * middle * len(seen),
            covered_mass=1,
            exact_mass=1,
            predicted_error_mean=0,
            predicted_error_max=0,
            tiers=pb.TierTokens(host=heads * sum(seen)),
            stages=pb.StageTimes(attend_us=1),
        )


def row_result(error: Refused | None, stats: pb.RowStats | None = None) -> pb.RowResult:
    if error is None:
        return pb.RowResult(status=types_pb2.Status(), stats=stats)
    return pb.RowResult(status=types_pb2.Status(code=error.code.value[0], message=error.message))


def nan_like(request: pb.DecodeRequest, tokens: int) -> types_pb2.Tensor:
    check(len(request.q.shape) == 3, "q.shape must have 3 dimensions")
    return write_tensor(
        np.full((tokens, *request.q.shape[1:]), np.nan), request.output_dtype or request.q.dtype
    )


def start(address: str) -> tuple[grpc.Server, Servicer]:
    """A server at the address, running."""
    servicer = Servicer()
    server = grpc.server(
        futures.ThreadPoolExecutor(16),
        options=[
            ("grpc.max_receive_message_length", LIMITS.max_message_bytes),
            ("grpc.max_send_message_length", LIMITS.max_message_bytes),
        ],
    )
    attnd_pb2_grpc.add_AttndServicer_to_server(servicer, server)
    assert server.add_insecure_port(address), f"cannot listen at {address}"
    server.start()
    return server, servicer
