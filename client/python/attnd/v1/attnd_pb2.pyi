# SPDX-License-Identifier: Apache-2.0
from attnd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
GPU_SHARING_MPS: GpuSharing
GPU_SHARING_NONE: GpuSharing
GPU_SHARING_TIME_SLICES: GpuSharing
GPU_SHARING_UNSPECIFIED: GpuSharing

class AppendKvRequest(_message.Message):
    __slots__ = ["first_position", "k", "layer", "memory", "observed_queries", "prefill_complete", "prompt_tokens", "sequence_id", "token_ids", "v"]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    k: _types_pb2.Tensor
    layer: int
    memory: KvMemory
    observed_queries: _types_pb2.Tensor
    prefill_complete: bool
    prompt_tokens: int
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    v: _types_pb2.Tensor
    def __init__(self, sequence_id: _Optional[int] = ..., layer: _Optional[int] = ..., first_position: _Optional[int] = ..., k: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prefill_complete: bool = ..., observed_queries: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., memory: _Optional[_Union[KvMemory, _Mapping]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class AppendKvResponse(_message.Message):
    __slots__ = ["committed_tokens", "index_build_us", "segmented_tokens"]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BUILD_US_FIELD_NUMBER: _ClassVar[int]
    SEGMENTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    committed_tokens: int
    index_build_us: int
    segmented_tokens: int
    def __init__(self, committed_tokens: _Optional[int] = ..., segmented_tokens: _Optional[int] = ..., index_build_us: _Optional[int] = ...) -> None: ...

class ClientMemory(_message.Message):
    __slots__ = ["bytes", "clients", "device_bytes", "passes", "regions", "socket"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    clients: int
    device_bytes: int
    passes: int
    regions: int
    socket: str
    def __init__(self, socket: _Optional[str] = ..., bytes: _Optional[int] = ..., regions: _Optional[int] = ..., clients: _Optional[int] = ..., passes: _Optional[int] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class CloseSequenceRequest(_message.Message):
    __slots__ = ["sequence_id"]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class CloseSequenceResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ["begin_pass", "complete_prefills", "deadline_us", "k", "layer", "output_dtype", "q", "round_trip", "rows", "step_id", "v"]
    BEGIN_PASS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    begin_pass: Pass
    complete_prefills: _containers.RepeatedScalarFieldContainer[int]
    deadline_us: int
    k: _types_pb2.Tensor
    layer: int
    output_dtype: _types_pb2.DType
    q: _types_pb2.Tensor
    round_trip: RoundTripRequest
    rows: _containers.RepeatedCompositeFieldContainer[DecodeRow]
    step_id: int
    v: _types_pb2.Tensor
    def __init__(self, step_id: _Optional[int] = ..., layer: _Optional[int] = ..., deadline_us: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[DecodeRow, _Mapping]]] = ..., q: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., k: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., output_dtype: _Optional[_Union[_types_pb2.DType, str]] = ..., begin_pass: _Optional[_Union[Pass, _Mapping]] = ..., complete_prefills: _Optional[_Iterable[int]] = ..., round_trip: _Optional[_Union[RoundTripRequest, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ["engine_us", "lse", "out", "queue_us", "round_trip", "rows", "status", "step_id"]
    ENGINE_US_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    engine_us: int
    lse: _types_pb2.Tensor
    out: _types_pb2.Tensor
    queue_us: int
    round_trip: RoundTrip
    rows: _containers.RepeatedCompositeFieldContainer[RowResult]
    status: _types_pb2.Status
    step_id: int
    def __init__(self, step_id: _Optional[int] = ..., status: _Optional[_Union[_types_pb2.Status, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[RowResult, _Mapping]]] = ..., out: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., queue_us: _Optional[int] = ..., engine_us: _Optional[int] = ..., round_trip: _Optional[_Union[RoundTrip, _Mapping]] = ...) -> None: ...

class DecodeRow(_message.Message):
    __slots__ = ["policy", "position", "query_only", "query_tokens", "sequence_id", "token_ids", "want_kv_head_errors"]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    QUERY_ONLY_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WANT_KV_HEAD_ERRORS_FIELD_NUMBER: _ClassVar[int]
    policy: _types_pb2.Policy
    position: int
    query_only: bool
    query_tokens: int
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    want_kv_head_errors: bool
    def __init__(self, sequence_id: _Optional[int] = ..., position: _Optional[int] = ..., query_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ..., query_only: bool = ..., want_kv_head_errors: bool = ...) -> None: ...

class DropSealedRequest(_message.Message):
    __slots__ = ["sealed_id"]
    SEALED_ID_FIELD_NUMBER: _ClassVar[int]
    sealed_id: int
    def __init__(self, sealed_id: _Optional[int] = ...) -> None: ...

class DropSealedResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class ForkSequenceRequest(_message.Message):
    __slots__ = ["length", "sequence_id"]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    length: int
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ForkSequenceResponse(_message.Message):
    __slots__ = ["committed_tokens", "sequence_id"]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    committed_tokens: int
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ..., committed_tokens: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ["backend_status", "backends", "client_memory", "default_policy", "device", "gpu_sharing", "limits", "policies", "presets", "round_trip", "simd_target", "version"]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_STATUS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_POLICY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GPU_SHARING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    PRESETS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    SIMD_TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    backend_status: str
    backends: _containers.RepeatedScalarFieldContainer[str]
    client_memory: ClientMemory
    default_policy: _types_pb2.Policy
    device: str
    gpu_sharing: GpuSharing
    limits: Limits
    policies: _containers.RepeatedCompositeFieldContainer[_types_pb2.Policy]
    presets: _containers.RepeatedCompositeFieldContainer[PresetInfo]
    round_trip: RoundTrip
    simd_target: str
    version: str
    def __init__(self, version: _Optional[str] = ..., backends: _Optional[_Iterable[str]] = ..., policies: _Optional[_Iterable[_Union[_types_pb2.Policy, _Mapping]]] = ..., default_policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., simd_target: _Optional[str] = ..., device: _Optional[str] = ..., backend_status: _Optional[str] = ..., presets: _Optional[_Iterable[_Union[PresetInfo, _Mapping]]] = ..., client_memory: _Optional[_Union[ClientMemory, _Mapping]] = ..., gpu_sharing: _Optional[_Union[GpuSharing, str]] = ..., round_trip: _Optional[_Union[RoundTrip, _Mapping]] = ...) -> None: ...

class KvMemory(_message.Message):
    __slots__ = ["k_offset", "region_id", "v_offset"]
    K_OFFSET_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    V_OFFSET_FIELD_NUMBER: _ClassVar[int]
    k_offset: int
    region_id: int
    v_offset: int
    def __init__(self, region_id: _Optional[int] = ..., k_offset: _Optional[int] = ..., v_offset: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ["max_message_bytes", "max_query_tokens", "max_queued_steps", "max_rows", "max_sequence_tokens", "max_sequences", "max_streams", "memory_budget_bytes"]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_query_tokens: int
    max_queued_steps: int
    max_rows: int
    max_sequence_tokens: int
    max_sequences: int
    max_streams: int
    memory_budget_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_query_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., memory_budget_bytes: _Optional[int] = ..., max_streams: _Optional[int] = ..., max_queued_steps: _Optional[int] = ...) -> None: ...

class ListSealedRequest(_message.Message):
    __slots__ = ["after_sealed_id", "page_size"]
    AFTER_SEALED_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    after_sealed_id: int
    page_size: int
    def __init__(self, after_sealed_id: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListSealedResponse(_message.Message):
    __slots__ = ["next_after_sealed_id", "sealed"]
    NEXT_AFTER_SEALED_ID_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    next_after_sealed_id: int
    sealed: _containers.RepeatedCompositeFieldContainer[SealedSequence]
    def __init__(self, sealed: _Optional[_Iterable[_Union[SealedSequence, _Mapping]]] = ..., next_after_sealed_id: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ["after_sequence_id", "page_size"]
    AFTER_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    after_sequence_id: int
    page_size: int
    def __init__(self, after_sequence_id: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ["next_after_sequence_id", "sequences"]
    NEXT_AFTER_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    next_after_sequence_id: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., next_after_sequence_id: _Optional[int] = ...) -> None: ...

class OpenSequenceRequest(_message.Message):
    __slots__ = ["indexes", "layout", "lease_seconds", "model", "policy", "resume_sealed_id", "token_ids", "tree"]
    class Index(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_16: OpenSequenceRequest.Index
    INDEX_BLOCKS_64: OpenSequenceRequest.Index
    INDEX_CLUSTERS: OpenSequenceRequest.Index
    INDEX_KEYS_4BIT: OpenSequenceRequest.Index
    INDEX_LABELS: OpenSequenceRequest.Index
    INDEX_REGRESSION: OpenSequenceRequest.Index
    INDEX_SUMMARY: OpenSequenceRequest.Index
    INDEX_TREE: OpenSequenceRequest.Index
    INDEX_UNSPECIFIED: OpenSequenceRequest.Index
    LAYOUT_CLUSTER_ORDER: OpenSequenceRequest.Layout
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_TOKEN_ORDER: OpenSequenceRequest.Layout
    LAYOUT_UNSPECIFIED: OpenSequenceRequest.Layout
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RESUME_SEALED_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedScalarFieldContainer[OpenSequenceRequest.Index]
    layout: OpenSequenceRequest.Layout
    lease_seconds: int
    model: _types_pb2.Model
    policy: _types_pb2.Policy
    resume_sealed_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tree: TreeOptions
    def __init__(self, model: _Optional[_Union[_types_pb2.Model, _Mapping]] = ..., layout: _Optional[_Union[OpenSequenceRequest.Layout, str]] = ..., indexes: _Optional[_Iterable[_Union[OpenSequenceRequest.Index, str]]] = ..., policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., resume_sealed_id: _Optional[int] = ..., lease_seconds: _Optional[int] = ..., tree: _Optional[_Union[TreeOptions, _Mapping]] = ...) -> None: ...

class OpenSequenceResponse(_message.Message):
    __slots__ = ["backend", "sequence_id", "tokens_present"]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    backend: str
    sequence_id: int
    tokens_present: int
    def __init__(self, sequence_id: _Optional[int] = ..., tokens_present: _Optional[int] = ..., backend: _Optional[str] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ["deadline_us", "layers", "memory", "stats", "want_lse"]
    class Stats(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATS_EACH_LAYER: Pass.Stats
    STATS_FIELD_NUMBER: _ClassVar[int]
    STATS_NONE: Pass.Stats
    STATS_OF_PASS: Pass.Stats
    WANT_LSE_FIELD_NUMBER: _ClassVar[int]
    deadline_us: int
    layers: int
    memory: PassMemory
    stats: Pass.Stats
    want_lse: bool
    def __init__(self, layers: _Optional[int] = ..., deadline_us: _Optional[int] = ..., want_lse: bool = ..., stats: _Optional[_Union[Pass.Stats, str]] = ..., memory: _Optional[_Union[PassMemory, _Mapping]] = ...) -> None: ...

class PassMemory(_message.Message):
    __slots__ = ["device_rings", "first_epoch", "in_twin", "k", "lse", "out", "q", "region_id", "spin_us", "v", "words_offset"]
    DEVICE_RINGS_FIELD_NUMBER: _ClassVar[int]
    FIRST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IN_TWIN_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    SPIN_US_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    WORDS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    device_rings: bool
    first_epoch: int
    in_twin: bool
    k: PassSpan
    lse: PassSpan
    out: PassSpan
    q: PassSpan
    region_id: int
    spin_us: int
    v: PassSpan
    words_offset: int
    def __init__(self, region_id: _Optional[int] = ..., words_offset: _Optional[int] = ..., first_epoch: _Optional[int] = ..., q: _Optional[_Union[PassSpan, _Mapping]] = ..., k: _Optional[_Union[PassSpan, _Mapping]] = ..., v: _Optional[_Union[PassSpan, _Mapping]] = ..., out: _Optional[_Union[PassSpan, _Mapping]] = ..., lse: _Optional[_Union[PassSpan, _Mapping]] = ..., spin_us: _Optional[int] = ..., device_rings: bool = ..., in_twin: bool = ...) -> None: ...

class PassSpan(_message.Message):
    __slots__ = ["layer_stride", "offset"]
    LAYER_STRIDE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    layer_stride: int
    offset: int
    def __init__(self, offset: _Optional[int] = ..., layer_stride: _Optional[int] = ...) -> None: ...

class PresetInfo(_message.Message):
    __slots__ = ["allowed", "backend", "indexes", "layout", "policy"]
    class AllowedEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    allowed: _containers.ScalarMap[str, str]
    backend: str
    indexes: _containers.RepeatedScalarFieldContainer[OpenSequenceRequest.Index]
    layout: OpenSequenceRequest.Layout
    policy: _types_pb2.Policy
    def __init__(self, policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ..., allowed: _Optional[_Mapping[str, str]] = ..., indexes: _Optional[_Iterable[_Union[OpenSequenceRequest.Index, str]]] = ..., layout: _Optional[_Union[OpenSequenceRequest.Layout, str]] = ..., backend: _Optional[str] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ["sequence_id"]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ["lease_seconds"]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: int
    def __init__(self, lease_seconds: _Optional[int] = ...) -> None: ...

class RoundTrip(_message.Message):
    __slots__ = ["advice", "device_us", "time_slices"]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_US_FIELD_NUMBER: _ClassVar[int]
    TIME_SLICES_FIELD_NUMBER: _ClassVar[int]
    advice: str
    device_us: float
    time_slices: bool
    def __init__(self, device_us: _Optional[float] = ..., time_slices: bool = ..., advice: _Optional[str] = ...) -> None: ...

class RoundTripRequest(_message.Message):
    __slots__ = ["memory", "turns"]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    memory: PassMemory
    turns: int
    def __init__(self, turns: _Optional[int] = ..., memory: _Optional[_Union[PassMemory, _Mapping]] = ...) -> None: ...

class RowResult(_message.Message):
    __slots__ = ["prefill", "stats", "status"]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    prefill: AppendKvResponse
    stats: RowStats
    status: _types_pb2.Status
    def __init__(self, status: _Optional[_Union[_types_pb2.Status, _Mapping]] = ..., stats: _Optional[_Union[RowStats, _Mapping]] = ..., prefill: _Optional[_Union[AppendKvResponse, _Mapping]] = ...) -> None: ...

class RowStats(_message.Message):
    __slots__ = ["clusters", "covered_mass", "dropped_tokens", "estimated_tokens", "exact_mass", "exact_tokens", "index_rows", "missed_mass", "missed_tokens", "predicted_error_max", "predicted_error_mean", "predicted_error_of_kv_head", "stages", "tiers", "zone_tokens"]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    COVERED_MASS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXACT_MASS_FIELD_NUMBER: _ClassVar[int]
    EXACT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MISSED_MASS_FIELD_NUMBER: _ClassVar[int]
    MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_ERROR_MAX_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_ERROR_MEAN_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_ERROR_OF_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ZONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    clusters: int
    covered_mass: float
    dropped_tokens: int
    estimated_tokens: int
    exact_mass: float
    exact_tokens: int
    index_rows: int
    missed_mass: float
    missed_tokens: int
    predicted_error_max: float
    predicted_error_mean: float
    predicted_error_of_kv_head: _containers.RepeatedScalarFieldContainer[float]
    stages: StageTimes
    tiers: TierTokens
    zone_tokens: int
    def __init__(self, zone_tokens: _Optional[int] = ..., exact_tokens: _Optional[int] = ..., estimated_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., covered_mass: _Optional[float] = ..., exact_mass: _Optional[float] = ..., predicted_error_mean: _Optional[float] = ..., predicted_error_max: _Optional[float] = ..., tiers: _Optional[_Union[TierTokens, _Mapping]] = ..., stages: _Optional[_Union[StageTimes, _Mapping]] = ..., missed_tokens: _Optional[int] = ..., missed_mass: _Optional[float] = ..., index_rows: _Optional[int] = ..., clusters: _Optional[int] = ..., predicted_error_of_kv_head: _Optional[_Iterable[float]] = ...) -> None: ...

class SealSequenceRequest(_message.Message):
    __slots__ = ["sequence_id"]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class SealSequenceResponse(_message.Message):
    __slots__ = ["sealed_id", "segments", "tokens", "written_bytes", "written_segments"]
    SEALED_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    sealed_id: int
    segments: int
    tokens: int
    written_bytes: int
    written_segments: int
    def __init__(self, sealed_id: _Optional[int] = ..., tokens: _Optional[int] = ..., segments: _Optional[int] = ..., written_segments: _Optional[int] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class SealedSequence(_message.Message):
    __slots__ = ["sealed_id", "sealed_unix_s", "tokens"]
    SEALED_ID_FIELD_NUMBER: _ClassVar[int]
    SEALED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sealed_id: int
    sealed_unix_s: int
    tokens: int
    def __init__(self, sealed_id: _Optional[int] = ..., tokens: _Optional[int] = ..., sealed_unix_s: _Optional[int] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ["backend", "committed_tokens", "indexes", "layer_tokens", "layout", "lease_left_seconds", "lease_seconds", "model", "policy", "resident_bytes", "segmented_tokens", "segments", "sequence_id", "tree"]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    LAYER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    backend: str
    committed_tokens: int
    indexes: _containers.RepeatedScalarFieldContainer[OpenSequenceRequest.Index]
    layer_tokens: _containers.RepeatedScalarFieldContainer[int]
    layout: OpenSequenceRequest.Layout
    lease_left_seconds: int
    lease_seconds: int
    model: _types_pb2.Model
    policy: _types_pb2.Policy
    resident_bytes: int
    segmented_tokens: int
    segments: int
    sequence_id: int
    tree: TreeOptions
    def __init__(self, sequence_id: _Optional[int] = ..., model: _Optional[_Union[_types_pb2.Model, _Mapping]] = ..., policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ..., committed_tokens: _Optional[int] = ..., segmented_tokens: _Optional[int] = ..., segments: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., layer_tokens: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[_Union[OpenSequenceRequest.Index, str]]] = ..., layout: _Optional[_Union[OpenSequenceRequest.Layout, str]] = ..., backend: _Optional[str] = ..., lease_seconds: _Optional[int] = ..., lease_left_seconds: _Optional[int] = ..., tree: _Optional[_Union[TreeOptions, _Mapping]] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ["attend_us", "fetch_us", "merge_us", "score_us", "select_us"]
    ATTEND_US_FIELD_NUMBER: _ClassVar[int]
    FETCH_US_FIELD_NUMBER: _ClassVar[int]
    MERGE_US_FIELD_NUMBER: _ClassVar[int]
    SCORE_US_FIELD_NUMBER: _ClassVar[int]
    SELECT_US_FIELD_NUMBER: _ClassVar[int]
    attend_us: float
    fetch_us: float
    merge_us: float
    score_us: float
    select_us: float
    def __init__(self, score_us: _Optional[float] = ..., select_us: _Optional[float] = ..., fetch_us: _Optional[float] = ..., attend_us: _Optional[float] = ..., merge_us: _Optional[float] = ...) -> None: ...

class TierTokens(_message.Message):
    __slots__ = ["hbm", "host", "ssd"]
    HBM_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    hbm: int
    host: int
    ssd: int
    def __init__(self, hbm: _Optional[int] = ..., host: _Optional[int] = ..., ssd: _Optional[int] = ...) -> None: ...

class TreeOptions(_message.Message):
    __slots__ = ["fan", "leaf_tokens", "levels"]
    FAN_FIELD_NUMBER: _ClassVar[int]
    LEAF_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    fan: int
    leaf_tokens: int
    levels: int
    def __init__(self, leaf_tokens: _Optional[int] = ..., fan: _Optional[int] = ..., levels: _Optional[int] = ...) -> None: ...

class TruncateSequenceRequest(_message.Message):
    __slots__ = ["length", "sequence_id"]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    length: int
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class TruncateSequenceResponse(_message.Message):
    __slots__ = ["segmented_tokens"]
    SEGMENTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    segmented_tokens: int
    def __init__(self, segmented_tokens: _Optional[int] = ...) -> None: ...

class GpuSharing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
