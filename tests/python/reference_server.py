# SPDX-License-Identifier: Apache-2.0
"""A small attnd in Python: the contract of proto/attnd/v1 with dense attention in float64, whatever
the policy.

It is an oracle for the clients' tests and for the end-to-end tests, which run against it and
against the real server. It shares no code with the package `attnd` but the generated messages. One
lock serialises everything.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent import futures
from typing import Any

import grpc
import numpy as np

import oracle
from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import attnd_pb2_grpc, types_pb2
from reference_passes import DecodeState, Failed
from reference_rules import (
    DTYPES,
    LIMITS,
    PRECONDITION,
    PRESETS,
    SEGMENT_MIN,
    WINDOW,
    Refused,
    Sequence,
    append,
    check,
    check_policy,
    check_shape,
    lengths_of,
    nan_like,
    read_tensor,
    read_values,
    refuse,
    row_result,
    write_tensor,
)


class Servicer(attnd_pb2_grpc.AttndServicer):
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sequences: dict[int, Sequence] = {}
        self._sealed: dict[int, Sequence] = {}
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

    def _close_ended(self) -> None:
        """Closes sequences whose leases have ended, also under an upload that pauses."""
        for sequence in [s for s in self._sequences.values() if s.lease_ended]:
            del self._sequences[sequence.id]

    def _find(self, sequence_id: int, tenant: str) -> Sequence:
        self._close_ended()
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.tenant != tenant:
            refuse(grpc.StatusCode.NOT_FOUND, f"sequence_id {sequence_id}: no such sequence")
        sequence.used_s = time.monotonic()
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
                gpu_sharing=pb.GPU_SHARING_NONE,
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
            check(len(request.indexes) <= 8, "indexes: at most 8")
            check(all(1 <= index <= 5 for index in request.indexes), "indexes: unknown index")
            clusters, blocks = 1 in request.indexes, {2, 3} & set(request.indexes)
            check(request.layout != 2 or not clusters, "layout: token order has no clusters")
            check(request.layout != 1 or clusters or not request.indexes, "layout: no clusters")
            check(not (clusters and blocks), "indexes: clusters or blocks")
            check(not request.HasField("tree"), "tree: none to have leaf_tokens, fan, levels")
            check_policy(request.policy)
            check(len(request.token_ids) <= LIMITS.max_sequence_tokens, "token_ids: too many")
            check(request.lease_seconds <= 604800, "lease_seconds must be 0..604800")
            check(
                len(self._sequences) < LIMITS.max_sequences,
                "max_sequences",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
            check(
                request.resume_sealed_id == 0 or not request.token_ids,
                "token_ids must be empty where resume_sealed_id is given",
            )
            if request.resume_sealed_id:
                child = self._copy(self._find_sealed(request.resume_sealed_id, tenant))
                child.lease_seconds = request.lease_seconds
                return pb.OpenSequenceResponse(
                    sequence_id=child.id, tokens_present=child.committed, backend="reference"
                )
            shape, number = request.model.shape, next(self._ids)
            sequence = Sequence(number, tenant, request.model, request.policy, [], [])
            for _ in range(shape.layers):
                sequence.k.append(np.zeros((0, shape.kv_heads, shape.head_dim), sequence.dtype))
                sequence.v.append(np.zeros((0, shape.kv_heads, sequence.value_dim), sequence.dtype))
            sequence.lease_seconds = request.lease_seconds
            self._sequences[number] = sequence
            return pb.OpenSequenceResponse(sequence_id=number, backend="reference")

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
            child = self._copy(parent)
            child.lease_seconds = parent.lease_seconds
            self._cut(child, length)
            return pb.ForkSequenceResponse(sequence_id=child.id, committed_tokens=length)

        return self._unary("ForkSequence", context, answer)

    def _copy(self, parent: Sequence) -> Sequence:
        child = Sequence(
            next(self._ids),
            parent.tenant,
            parent.model,
            parent.policy,
            parent.k,
            parent.v,
            parent.token_ids,
            parent.segmented,
        )
        self._sequences[child.id] = child
        return child

    def _find_sealed(self, sealed_id: int, tenant: str) -> Sequence:
        sealed = self._sealed.get(sealed_id)
        if sealed is None or sealed.tenant != tenant:
            refuse(grpc.StatusCode.NOT_FOUND, f"sealed sequence {sealed_id} is unknown")
        return sealed

    def SealSequence(self, request, context):  # noqa: N802
        def answer(tenant):
            sequence = self._find(request.sequence_id, tenant)
            check(sequence.committed > 0, "nothing is committed", PRECONDITION)
            sealed = self._copy(sequence)
            del self._sequences[sealed.id]
            self._cut(sealed, sequence.committed)
            self._sealed[sealed.id] = sealed
            return pb.SealSequenceResponse(sealed_id=sealed.id, tokens=sealed.committed)

        return self._unary("SealSequence", context, answer)

    def ListSealed(self, request, context):  # noqa: N802
        def answer(tenant):
            check(request.page_size <= 1000, "page_size must be 0..1000")
            found = [
                pb.SealedSequence(sealed_id=number, tokens=sealed.committed)
                for number, sealed in self._sealed.items()
                if sealed.tenant == tenant and number > request.after_sealed_id
            ]
            size = request.page_size or 1000
            last = found[size - 1].sealed_id if len(found) > size else 0
            return pb.ListSealedResponse(sealed=found[:size], next_after_sealed_id=last)

        return self._unary("ListSealed", context, answer)

    def DropSealed(self, request, context):  # noqa: N802
        def answer(tenant):
            self._find_sealed(request.sealed_id, tenant)
            del self._sealed[request.sealed_id]
            return pb.DropSealedResponse()

        return self._unary("DropSealed", context, answer)

    def CloseSequence(self, request, context):  # noqa: N802
        def answer(tenant):
            del self._sequences[self._find(request.sequence_id, tenant).id]
            return pb.CloseSequenceResponse()

        return self._unary("CloseSequence", context, answer)

    def RenewLease(self, request, context):  # noqa: N802
        def answer(tenant):
            sequence = self._find(request.sequence_id, tenant)
            return pb.RenewLeaseResponse(lease_seconds=sequence.lease_seconds)

        return self._unary("RenewLease", context, answer)

    def ListSequences(self, request, context):  # noqa: N802
        def answer(tenant):
            check(request.page_size <= 1000, "page_size must be 0..1000")
            self._close_ended()
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
                    backend="reference",
                    lease_seconds=s.lease_seconds,
                    lease_left_seconds=s.lease_left_seconds,
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
                return lengths_of(self._find(sequence_id, tenant))
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
            v = read_values(sequence, request, k)
            check(len(request.token_ids) in (0, tokens), f"token_ids must be none or {tokens}")
            self._claim(sequence, stream)
            append(sequence, request.layer, request.first_position, k, v, request.token_ids, 0)
        if request.prefill_complete:
            self._complete(sequence)

    def _complete(self, sequence: Sequence) -> pb.AppendKvResponse:
        lengths = {len(k) for k in sequence.k}
        differ = f"prefill_complete: layers' lengths differ: {lengths}"
        check(len(lengths) == 1, differ, PRECONDITION)
        if sequence.committed - WINDOW >= SEGMENT_MIN:
            sequence.segmented = sequence.committed - WINDOW
        return lengths_of(sequence)

    def Decode(self, request_iterator, context):  # noqa: N802
        self.calls.append("Decode")
        tenant, stream = self._tenant(context), object()
        state = DecodeState(
            lambda request, failed: self._answer(request, tenant, stream, failed),
            lambda sequence_id: self._find(sequence_id, tenant),
            lambda sequence_id: self._complete(self._find(sequence_id, tenant)),
        )
        try:
            for request in request_iterator:
                if self.unavailable > 0:
                    self.unavailable -= 1
                    context.abort(grpc.StatusCode.UNAVAILABLE, "told to fail")
                if self.pause_s:
                    threading.Event().wait(self.pause_s)
                with self._lock:
                    yield self._step(request, state)
        finally:
            with self._lock:
                state.give_up()
            self._release(stream)

    def _step(self, request: pb.DecodeRequest, state: DecodeState) -> pb.DecodeResponse:
        try:
            return state.step(request)
        except Refused as error:
            status = types_pb2.Status(code=error.code.value[0], message=error.message)
            return pb.DecodeResponse(step_id=request.step_id, status=status)

    def _answer(
        self, request: pb.DecodeRequest, tenant: str, stream: object, failed: Failed
    ) -> pb.DecodeResponse:
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
        for number, row in enumerate(rows):
            try:
                if number in failed:
                    raise failed[number]
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
            v = read_values(first, request, k)

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
