# SPDX-License-Identifier: Apache-2.0
from attnd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRegionsRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class ListRegionsResponse(_message.Message):
    __slots__ = ["regions"]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[RegionInfo]
    def __init__(self, regions: _Optional[_Iterable[_Union[RegionInfo, _Mapping]]] = ...) -> None: ...

class MemoryReply(_message.Message):
    __slots__ = ["list_regions", "register_region", "status", "unregister_region"]
    LIST_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    list_regions: ListRegionsResponse
    register_region: RegisterRegionResponse
    status: _types_pb2.Status
    unregister_region: UnregisterRegionResponse
    def __init__(self, status: _Optional[_Union[_types_pb2.Status, _Mapping]] = ..., register_region: _Optional[_Union[RegisterRegionResponse, _Mapping]] = ..., unregister_region: _Optional[_Union[UnregisterRegionResponse, _Mapping]] = ..., list_regions: _Optional[_Union[ListRegionsResponse, _Mapping]] = ...) -> None: ...

class MemoryRequest(_message.Message):
    __slots__ = ["list_regions", "register_region", "unregister_region"]
    LIST_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    list_regions: ListRegionsRequest
    register_region: RegisterRegionRequest
    unregister_region: UnregisterRegionRequest
    def __init__(self, register_region: _Optional[_Union[RegisterRegionRequest, _Mapping]] = ..., unregister_region: _Optional[_Union[UnregisterRegionRequest, _Mapping]] = ..., list_regions: _Optional[_Union[ListRegionsRequest, _Mapping]] = ...) -> None: ...

class RegionInfo(_message.Message):
    __slots__ = ["bytes", "in_use", "region_id"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    in_use: bool
    region_id: int
    def __init__(self, region_id: _Optional[int] = ..., bytes: _Optional[int] = ..., in_use: bool = ...) -> None: ...

class RegionTwin(_message.Message):
    __slots__ = ["bytes"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ["bytes", "tenant", "twin_gpu_uuid"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TWIN_GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    tenant: str
    twin_gpu_uuid: bytes
    def __init__(self, bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., twin_gpu_uuid: _Optional[bytes] = ...) -> None: ...

class RegisterRegionResponse(_message.Message):
    __slots__ = ["bytes", "no_twin", "region_id", "twin"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NO_TWIN_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    TWIN_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    no_twin: _types_pb2.Status
    region_id: int
    twin: RegionTwin
    def __init__(self, region_id: _Optional[int] = ..., bytes: _Optional[int] = ..., twin: _Optional[_Union[RegionTwin, _Mapping]] = ..., no_twin: _Optional[_Union[_types_pb2.Status, _Mapping]] = ...) -> None: ...

class UnregisterRegionRequest(_message.Message):
    __slots__ = ["region_id"]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    def __init__(self, region_id: _Optional[int] = ...) -> None: ...

class UnregisterRegionResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...
