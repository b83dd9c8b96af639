# SPDX-License-Identifier: Apache-2.0
from attnd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NamedPolicy(_message.Message):
    __slots__ = ["name", "note", "policy"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    name: str
    note: str
    policy: _types_pb2.Policy
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ..., note: _Optional[str] = ...) -> None: ...

class PolicyFile(_message.Message):
    __slots__ = ["policies"]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[NamedPolicy]
    def __init__(self, policies: _Optional[_Iterable[_Union[NamedPolicy, _Mapping]]] = ...) -> None: ...

class ServerConfig(_message.Message):
    __slots__ = ["allow_client_memory", "allow_insecure_tcp", "allow_remote_metrics", "audit_cpu_share", "audit_share", "backend", "client_device_memory_bytes", "client_memory_bytes", "data_dir", "default_policy", "device_launch_ahead", "device_memory_bytes", "device_page_memory_bytes", "disk_read_bytes_per_s", "disk_step_workers", "feature_maps", "grpc_memory_bytes", "index_threads", "io", "label_channels", "listen", "max_connection_streams", "max_memory_clients", "max_memory_passes", "max_memory_regions", "max_message_bytes", "max_query_tokens", "max_queued_steps", "max_rows", "max_sequence_tokens", "max_sequences", "max_streams", "memory_budget_bytes", "metrics_listen", "min_ping_interval_s", "on_gpu_fault", "page_memory_bytes", "page_prefetch", "page_readers", "policy_file", "reply_timeout_s", "retain_bytes", "retain_s", "segment_tokens", "step_threads", "step_workers"]
    ALLOW_CLIENT_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ALLOW_INSECURE_TCP_FIELD_NUMBER: _ClassVar[int]
    ALLOW_REMOTE_METRICS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_CPU_SHARE_FIELD_NUMBER: _ClassVar[int]
    AUDIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    CLIENT_DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_DIR_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_POLICY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_LAUNCH_AHEAD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PAGE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DISK_STEP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_MAPS_FIELD_NUMBER: _ClassVar[int]
    GRPC_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_THREADS_FIELD_NUMBER: _ClassVar[int]
    IO_FIELD_NUMBER: _ClassVar[int]
    LABEL_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTION_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_PASSES_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_REGIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_LISTEN_FIELD_NUMBER: _ClassVar[int]
    MIN_PING_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    ON_GPU_FAULT_FIELD_NUMBER: _ClassVar[int]
    PAGE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PAGE_READERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FILE_FIELD_NUMBER: _ClassVar[int]
    REPLY_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RETAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_THREADS_FIELD_NUMBER: _ClassVar[int]
    STEP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    allow_client_memory: bool
    allow_insecure_tcp: bool
    allow_remote_metrics: bool
    audit_cpu_share: float
    audit_share: float
    backend: str
    client_device_memory_bytes: int
    client_memory_bytes: int
    data_dir: str
    default_policy: _types_pb2.Policy
    device_launch_ahead: bool
    device_memory_bytes: int
    device_page_memory_bytes: int
    disk_read_bytes_per_s: int
    disk_step_workers: int
    feature_maps: _containers.RepeatedScalarFieldContainer[str]
    grpc_memory_bytes: int
    index_threads: int
    io: str
    label_channels: _containers.RepeatedScalarFieldContainer[str]
    listen: _containers.RepeatedScalarFieldContainer[str]
    max_connection_streams: int
    max_memory_clients: int
    max_memory_passes: int
    max_memory_regions: int
    max_message_bytes: int
    max_query_tokens: int
    max_queued_steps: int
    max_rows: int
    max_sequence_tokens: int
    max_sequences: int
    max_streams: int
    memory_budget_bytes: int
    metrics_listen: str
    min_ping_interval_s: int
    on_gpu_fault: str
    page_memory_bytes: int
    page_prefetch: bool
    page_readers: int
    policy_file: _containers.RepeatedScalarFieldContainer[str]
    reply_timeout_s: int
    retain_bytes: int
    retain_s: int
    segment_tokens: int
    step_threads: int
    step_workers: int
    def __init__(self, listen: _Optional[_Iterable[str]] = ..., data_dir: _Optional[str] = ..., metrics_listen: _Optional[str] = ..., memory_budget_bytes: _Optional[int] = ..., step_threads: _Optional[int] = ..., step_workers: _Optional[int] = ..., max_queued_steps: _Optional[int] = ..., index_threads: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., max_streams: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_query_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., segment_tokens: _Optional[int] = ..., default_policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ..., reply_timeout_s: _Optional[int] = ..., allow_insecure_tcp: bool = ..., max_connection_streams: _Optional[int] = ..., grpc_memory_bytes: _Optional[int] = ..., min_ping_interval_s: _Optional[int] = ..., backend: _Optional[str] = ..., device_memory_bytes: _Optional[int] = ..., io: _Optional[str] = ..., page_memory_bytes: _Optional[int] = ..., page_readers: _Optional[int] = ..., disk_read_bytes_per_s: _Optional[int] = ..., disk_step_workers: _Optional[int] = ..., page_prefetch: bool = ..., retain_bytes: _Optional[int] = ..., retain_s: _Optional[int] = ..., policy_file: _Optional[_Iterable[str]] = ..., audit_share: _Optional[float] = ..., audit_cpu_share: _Optional[float] = ..., feature_maps: _Optional[_Iterable[str]] = ..., label_channels: _Optional[_Iterable[str]] = ..., allow_remote_metrics: bool = ..., allow_client_memory: bool = ..., client_memory_bytes: _Optional[int] = ..., max_memory_regions: _Optional[int] = ..., max_memory_clients: _Optional[int] = ..., max_memory_passes: _Optional[int] = ..., device_page_memory_bytes: _Optional[int] = ..., on_gpu_fault: _Optional[str] = ..., device_launch_ahead: bool = ..., client_device_memory_bytes: _Optional[int] = ...) -> None: ...
