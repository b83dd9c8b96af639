# SPDX-License-Identifier: Apache-2.0
"""What calls answer, as plain objects with numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import grpc

from attnd.errors import status_code
from attnd.model import Model
from attnd.policy import Policy, Preset, TreeOptions, from_wire_indexes
from attnd.splitting import Piece
from attnd.tensors import Array, from_tensor
from attnd.v1 import attnd_pb2


@dataclass(frozen=True)
class Limits:
    """Sizes that the server accepts; the names and units are those of
    proto/attnd/v1/attnd.proto."""

    max_message_bytes: int
    max_rows: int
    max_query_tokens: int
    max_sequences: int
    max_sequence_tokens: int
    memory_budget_bytes: int
    max_streams: int
    max_queued_steps: int


@dataclass(frozen=True)
class RoundTrip:
    """An empty round trip between a client's stream and the server's GPU: the least of some turns.

    Attributes:
        device_us: microseconds from the launch of the server's empty kernel to its end, while a
            kernel of the client's stream waited.
        time_slices: whether that is so long that the two take turns on one GPU.
        advice: what to do about it, in words; empty without time_slices.
        stream_us: microseconds of the whole, from the launch of the client's kernel until this
            process saw its end; None where the server tells of it.
    """

    device_us: float
    time_slices: bool
    advice: str = ""
    stream_us: float | None = None

    @staticmethod
    def from_proto(message: attnd_pb2.RoundTrip, stream_us: float | None = None) -> RoundTrip:
        return RoundTrip(message.device_us, message.time_slices, message.advice, stream_us)


@dataclass(frozen=True)
class ServerInfo:
    """What a server is and offers.

    Attributes:
        version: major.minor.patch.
        backends: those that a sequence may have, the preferred one first: "cuda", "cpu".
        policies: presets with their parameters' defaults.
        presets: the same, with what one must know to use them.
        default_policy: policy of a sequence that chooses none.
        limits: sizes that it accepts.
        simd_target: vector instructions of its CPU kernels.
        device: the GPU behind the first backend; empty if that is the CPU.
        backend_status: why the first backend does less than it was made to; empty if it does not.
        gpu_sharing: how kernels of other processes run beside the server's on its GPU: "mps" is
            side by side, "time-slices" never at the same time; "none" without a GPU; empty if the
            server does not say. By the pipe of MPS's control daemon alone.
        round_trip: the newest that a client's stream has measured; None before the first.
    """

    version: str
    backends: tuple[str, ...]
    policies: tuple[Policy, ...]
    default_policy: Policy
    limits: Limits
    simd_target: str
    device: str = ""
    backend_status: str = ""
    presets: tuple[Preset, ...] = ()
    gpu_sharing: str = ""
    round_trip: RoundTrip | None = None

    @staticmethod
    def from_proto(message: attnd_pb2.GetServerInfoResponse) -> ServerInfo:
        limits = {field.name: getattr(message.limits, field.name) for field in _LIMIT_FIELDS}
        return ServerInfo(
            version=message.version,
            backends=tuple(message.backends),
            policies=tuple(Policy.from_proto(policy) for policy in message.policies),
            default_policy=Policy.from_proto(message.default_policy),
            limits=Limits(**limits),
            simd_target=message.simd_target,
            device=message.device,
            backend_status=message.backend_status,
            presets=tuple(Preset.from_proto(preset) for preset in message.presets),
            gpu_sharing=_GPU_SHARING.get(message.gpu_sharing, ""),
            round_trip=(
                RoundTrip.from_proto(message.round_trip) if message.HasField("round_trip") else None
            ),
        )


_GPU_SHARING = {
    attnd_pb2.GPU_SHARING_NONE: "none",
    attnd_pb2.GPU_SHARING_MPS: "mps",
    attnd_pb2.GPU_SHARING_TIME_SLICES: "time-slices",
}
_LIMIT_FIELDS = attnd_pb2.Limits.DESCRIPTOR.fields


@dataclass(frozen=True)
class OpenedSequence:
    """A new sequence; upload starts at position tokens_present.

    Attributes:
        sequence_id: names it.
        tokens_present: leading tokens that it already holds.
        backend: what builds its segments and answers its rows, "cuda" or "cpu".
    """

    sequence_id: int
    tokens_present: int
    backend: str = ""

    @staticmethod
    def from_proto(message: attnd_pb2.OpenSequenceResponse) -> OpenedSequence:
        return OpenedSequence(message.sequence_id, message.tokens_present, message.backend)


@dataclass(frozen=True)
class SealResult:
    """What was written to disk.

    Attributes:
        sealed_id: names it, for ever.
        tokens: all that were committed.
        segments: of it; the tokens behind them are a file of their own.
        written_segments: those that did not lie on disk yet.
        written_bytes: of the files written.
    """

    sealed_id: int
    tokens: int
    segments: int
    written_segments: int
    written_bytes: int

    @staticmethod
    def from_proto(message: attnd_pb2.SealSequenceResponse) -> SealResult:
        return SealResult(
            sealed_id=message.sealed_id,
            tokens=message.tokens,
            segments=message.segments,
            written_segments=message.written_segments,
            written_bytes=message.written_bytes,
        )


@dataclass(frozen=True)
class SealedSequence:
    """A sequence on disk; sealed_unix_s is by the server's clock."""

    sealed_id: int
    tokens: int
    sealed_unix_s: int

    @staticmethod
    def from_proto(message: attnd_pb2.SealedSequence) -> SealedSequence:
        return SealedSequence(message.sealed_id, message.tokens, message.sealed_unix_s)


@dataclass(frozen=True)
class AppendedKv:
    """What an upload left: tokens in every layer, those that segments cover, and time spent
    building segments."""

    committed_tokens: int
    segmented_tokens: int
    index_build_us: int


@dataclass(frozen=True)
class SequenceInfo:
    """One sequence of a listing; layer_tokens differ only while a prompt or a step is being
    sent. backend: as OpenedSequence's. lease_seconds: 0 is no lease; lease_left_seconds: until the
    lease ends unless a call names the sequence before. tree: None without a tree."""

    sequence_id: int
    model: Model
    policy: Policy
    committed_tokens: int
    segmented_tokens: int
    segments: int
    resident_bytes: int
    layer_tokens: tuple[int, ...]
    indexes: tuple[str, ...] = ()
    backend: str = ""
    lease_seconds: int = 0
    lease_left_seconds: int = 0
    tree: TreeOptions | None = None

    @staticmethod
    def from_proto(message: attnd_pb2.SequenceInfo) -> SequenceInfo:
        return SequenceInfo(
            sequence_id=message.sequence_id,
            model=Model.from_proto(message.model),
            policy=Policy.from_proto(message.policy),
            committed_tokens=message.committed_tokens,
            segmented_tokens=message.segmented_tokens,
            segments=message.segments,
            resident_bytes=message.resident_bytes,
            layer_tokens=tuple(message.layer_tokens),
            indexes=from_wire_indexes(message.indexes),
            backend=message.backend,
            lease_seconds=message.lease_seconds,
            lease_left_seconds=message.lease_left_seconds,
            tree=TreeOptions.from_proto(message.tree) if message.HasField("tree") else None,
        )


@dataclass(frozen=True)
class RowStats:
    """What a row's answer was made of; tokens are summed over the row's query tokens and the KV
    heads.

    Attributes:
        zone_tokens: tokens that are always exact: sink, window, and the tail behind early segments.
        exact_tokens, estimated_tokens, dropped_tokens: tokens of the middle by what happened to
            them; a token counts once for each KV head, so divide by the model's kv_heads.
        covered_mass: share of the softmax mass read or estimated; None if the policy did not look.
        exact_mass: share of it that was read exactly; None likewise.
        predicted_error_mean, predicted_error_max: predicted |o - o_dense| / |o_dense|; None if not
            predicted.
        predicted_error_of_kv_head: of each KV head, the mean over its query heads and the row's
            query tokens; empty unless the row wants it, and if not predicted.
        hbm_tokens, host_tokens, ssd_tokens: exactly read tokens, zones included, by where they were
            found.
        missed_tokens: of the estimated tokens, those that the policy would have read exactly had
            their pages been in memory in time (on_miss=estimate).
        missed_mass: their share of the softmax mass; None unless the policy allows such misses.
        index_rows: rows of the index that a cluster policy looked at, clusters and groups of
            clusters, summed as tokens are; 0 of other policies and on a GPU.
        clusters: all clusters that there are, summed likewise.
        stage_us: processor time of score, select, attend and merge, summed over threads; fetch is
            the time that the row waited for pages from disk.
    """

    zone_tokens: int
    exact_tokens: int
    estimated_tokens: int
    dropped_tokens: int
    covered_mass: float | None
    exact_mass: float | None
    predicted_error_mean: float | None
    predicted_error_max: float | None
    hbm_tokens: int
    host_tokens: int
    ssd_tokens: int
    stage_us: dict[str, float]
    missed_tokens: int = 0
    missed_mass: float | None = None
    index_rows: int = 0
    clusters: int = 0
    predicted_error_of_kv_head: tuple[float, ...] = ()

    @staticmethod
    def from_proto(message: attnd_pb2.RowStats) -> RowStats:
        def optional(name: str) -> float | None:
            return getattr(message, name) if message.HasField(name) else None

        return RowStats(
            zone_tokens=message.zone_tokens,
            exact_tokens=message.exact_tokens,
            estimated_tokens=message.estimated_tokens,
            dropped_tokens=message.dropped_tokens,
            covered_mass=optional("covered_mass"),
            exact_mass=optional("exact_mass"),
            predicted_error_mean=optional("predicted_error_mean"),
            predicted_error_max=optional("predicted_error_max"),
            hbm_tokens=message.tiers.hbm,
            host_tokens=message.tiers.host,
            ssd_tokens=message.tiers.ssd,
            stage_us={
                stage: getattr(message.stages, f"{stage}_us")
                for stage in ("score", "select", "fetch", "attend", "merge")
            },
            missed_tokens=message.missed_tokens,
            missed_mass=optional("missed_mass"),
            index_rows=message.index_rows,
            clusters=message.clusters,
            predicted_error_of_kv_head=tuple(message.predicted_error_of_kv_head),
        )


@dataclass(frozen=True)
class RowResult:
    """Outcome of one row: OK with statistics, or a code and the reason."""

    code: grpc.StatusCode
    message: str
    stats: RowStats

    @property
    def ok(self) -> bool:
        return self.code is grpc.StatusCode.OK

    @staticmethod
    def from_proto(message: attnd_pb2.RowResult) -> RowResult:
        return RowResult(
            status_code(message.status.code),
            message.status.message,
            RowStats.from_proto(message.stats),
        )


@dataclass(frozen=True)
class StepResult:
    """The answer to one Decode message.

    Attributes:
        out: [sum of query_tokens, query_heads, value_dim] in the output dtype; NaN for failed rows.
            Read-only.
        lse: [sum of query_tokens, query_heads] float32, natural log of the sum of exp(logits); -inf
            where there was no token, NaN for failed rows. Read-only.
        rows: one outcome for each row, in order.
        queue_us: time from the message's arrival until its step began.
        engine_us: time of the step.
    """

    out: Array
    lse: Array
    rows: tuple[RowResult, ...]
    queue_us: int
    engine_us: int

    @staticmethod
    def from_proto(message: attnd_pb2.DecodeResponse) -> StepResult:
        return StepResult(
            out=from_tensor(message.out),
            lse=from_tensor(message.lse),
            rows=tuple(map(RowResult.from_proto, message.rows)),
            queue_us=message.queue_us,
            engine_us=message.engine_us,
        )


@dataclass(frozen=True)
class LayerResult:
    """The answer to one layer of a pass.

    Attributes:
        out: as StepResult's.
        lse: as StepResult's; None unless the pass wants it.
        rows: one outcome for each row, in order; empty if all are OK and the pass has no statistics
            to tell with this layer.
        queue_us, engine_us: as StepResult's.
    """

    out: Array
    lse: Array | None
    rows: tuple[RowResult, ...]
    queue_us: int
    engine_us: int

    @staticmethod
    def from_proto(message: attnd_pb2.DecodeResponse) -> LayerResult:
        return LayerResult(
            out=from_tensor(message.out),
            lse=from_tensor(message.lse) if message.HasField("lse") else None,
            rows=tuple(map(RowResult.from_proto, message.rows)),
            queue_us=message.queue_us,
            engine_us=message.engine_us,
        )


# Of RowStats, how parts are put together; all other fields are sums.
_MEANS = ("covered_mass", "exact_mass", "predicted_error_mean", "missed_mass")


def merged_stats(parts: Sequence[tuple[RowStats, int]]) -> RowStats:
    """The statistics of parts of a row, each with its weight: counts are sums, shares and errors
    means over the parts that have them."""

    def mean(name: str) -> float | None:
        found = [(getattr(s, name), w) for s, w in parts if getattr(s, name) is not None]
        total = sum(weight for _, weight in found)
        return sum(value * weight for value, weight in found) / total if found else None

    values: dict[str, Any] = {name: mean(name) for name in _MEANS}
    largest = [s.predicted_error_max for s, _ in parts if s.predicted_error_max is not None]
    values["predicted_error_max"] = max(largest) if largest else None
    values["stage_us"] = {
        stage: sum(s.stage_us[stage] for s, _ in parts) for stage in parts[0][0].stage_us
    }
    heads = [(s.predicted_error_of_kv_head, w) for s, w in parts if s.predicted_error_of_kv_head]
    weight = sum(w for _, w in heads)
    values["predicted_error_of_kv_head"] = tuple(
        sum(errors[head] * w for errors, w in heads) / weight
        for head in range(len(heads[0][0]) if heads else 0)
    )
    for field in fields(RowStats):
        if field.name not in values:
            values[field.name] = sum(getattr(s, field.name) for s, _ in parts)
    return RowStats(**values)


def merged_rows(
    count: int, results: Sequence[tuple[Sequence[Piece], StepResult]]
) -> tuple[RowResult, ...]:
    """The outcomes of `count` rows whose pieces were answered by several messages: the first
    failure, or the statistics of all pieces."""
    of_row: list[list[tuple[RowResult, int]]] = [[] for _ in range(count)]
    for pieces, result in results:
        for piece, row in zip(pieces, result.rows):
            of_row[piece.row].append((row, piece.tokens))
    merged = []
    for outcomes in of_row:
        failed = next((row for row, _ in outcomes if not row.ok), None)
        merged.append(
            failed
            or RowResult(
                outcomes[0][0].code, "", merged_stats([(row.stats, n) for row, n in outcomes])
            )
        )
    return tuple(merged)
