# SPDX-License-Identifier: Apache-2.0
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
DTYPE_BF16: DType
DTYPE_FP16: DType
DTYPE_FP32: DType
DTYPE_UNSPECIFIED: DType

class Model(_message.Message):
    __slots__ = ["fingerprint", "shape", "shard"]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    shape: ModelShape
    shard: Shard
    def __init__(self, fingerprint: _Optional[str] = ..., shape: _Optional[_Union[ModelShape, _Mapping]] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ...) -> None: ...

class ModelShape(_message.Message):
    __slots__ = ["dtype", "head_dim", "kv_heads", "latent", "layers", "query_heads", "softmax_scale", "value_dim"]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    LATENT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    SOFTMAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    head_dim: int
    kv_heads: int
    latent: bool
    layers: int
    query_heads: int
    softmax_scale: float
    value_dim: int
    def __init__(self, layers: _Optional[int] = ..., query_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., softmax_scale: _Optional[float] = ..., latent: bool = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ["parameters", "preset"]
    class ParametersEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    parameters: _containers.ScalarMap[str, str]
    preset: str
    def __init__(self, preset: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ["count", "index", "kind"]
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    COUNT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_CONTEXT: Shard.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    KIND_HEADS: Shard.Kind
    KIND_UNSPECIFIED: Shard.Kind
    count: int
    index: int
    kind: Shard.Kind
    def __init__(self, kind: _Optional[_Union[Shard.Kind, str]] = ..., index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ["code", "message"]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ["data", "dtype", "shape"]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
