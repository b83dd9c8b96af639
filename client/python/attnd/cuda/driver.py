# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver through ctypes, beside PyTorch, whose context and streams it uses."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Any

from attnd.cuda import captures
from attnd.cuda.compiler import compile_layer
from attnd.cuda.context import Context
from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import DeviceTensor
from attnd.cuda.launch import launch, launch_beside, overlaps

_NOT_READY = 600
# CUmemAllocationHandleType, CUmemLocationType and CUmemAccess_flags.
_POSIX_FILE_DESCRIPTOR, _LOCATION_DEVICE, _READ_WRITE = 1, 1, 3
_HOST_REGISTER_PORTABLE, _HOST_REGISTER_DEVICEMAP = 1, 2
_STREAM_NON_BLOCKING = 1
_KERNELS = ("attnd_begin", "attnd_layer")


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise CudaError(f"attnd.cuda needs PyTorch: {error}") from None
    if not torch.cuda.is_available():
        raise CudaError("PyTorch finds no CUDA device here (torch.cuda.is_available())")
    return torch


def _cuda_major(torch: Any) -> int:
    """Of the CUDA that PyTorch was built for."""
    version = torch.version.cuda
    if version is None:
        raise CudaError("PyTorch is not built for CUDA (torch.version.cuda)")
    return int(version.split(".")[0])


def _load_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"CUDA's driver: {error}") from None


class LoadedKernels:
    """layer.cu's kernels in each context of the process. They stay loaded, as a captured graph may
    launch them when its session is gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[int, dict[str, ctypes.c_void_p]] = {}  # by name, by context

    def of(self, context: Context, cubin: Callable[[], bytes]) -> dict[str, ctypes.c_void_p]:
        """
        Args:
            cubin: compiles them; asked if the context has none.

        Raises:
            CudaError: if compiling or the driver fails.
        """
        with self._lock:
            kernels = self._kernels.get(context.handle)
            if kernels is None:
                kernels = self._kernels[context.handle] = _load(context, cubin())
            return kernels


def _load(context: Context, cubin: bytes) -> dict[str, ctypes.c_void_p]:
    module = ctypes.c_void_p()
    context.call("cuModuleLoadData", ctypes.byref(module), cubin)
    kernels = {name: ctypes.c_void_p() for name in _KERNELS}
    for name, kernel in kernels.items():
        context.call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
    return kernels


_loaded = LoadedKernels()


class CudaGpu:
    """One GPU of this process, in PyTorch's context of it. Any thread may call it, whatever its
    current GPU is, which stays that."""

    def __init__(self, device: Any = None) -> None:
        """Compiles layer.cu, which takes some 0.1 s, if it is the GPU's first in this process.

        Args:
            device: as torch.device takes; None is the current one.

        Raises:
            CudaError: if PyTorch, a GPU, the driver or NVRTC is missing.
        """
        torch = self._torch = _import_torch()
        index = None if device is None else torch.device(device).index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        library = _load_driver()
        with torch.cuda.device(self._device):
            self.words(1)  # makes the context, if this is the first use
            self._context = Context(library)
        capability = torch.cuda.get_device_capability(self._device)
        self._overlaps = overlaps(self._context, capability)
        self._kernels = _loaded.of(
            self._context, lambda: compile_layer(capability, _cuda_major(torch))
        )
        self._mapped: dict[int, int] = {}  # addresses here, by id of the memory
        self._imported: dict[int, contextlib.ExitStack] = {}  # what unmaps it, by address
        self._own_stream: Any = None
        self._number = ctypes.c_int()
        self._context.call("cuCtxGetDevice", ctypes.byref(self._number))

    @property
    def device(self) -> Any:
        """The torch.device."""
        return self._device

    def map(self, memory: mmap.mmap) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._context.call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(len(memory)),
            ctypes.c_uint(_HOST_REGISTER_PORTABLE | _HOST_REGISTER_DEVICEMAP),
        )
        self._mapped[id(memory)] = address
        pointer = ctypes.c_uint64()
        try:
            self._context.call(
                "cuMemHostGetDevicePointer_v2",
                ctypes.byref(pointer),
                ctypes.c_void_p(address),
                ctypes.c_uint(0),
            )
        except BaseException:
            self.unmap(memory)
            raise
        return pointer.value

    def unmap(self, memory: mmap.mmap) -> None:
        address = self._mapped.pop(id(memory))
        self._context.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def uuid(self) -> bytes:
        uuid = ctypes.create_string_buffer(16)
        self._context.call("cuDeviceGetUuid_v2", uuid, self._number)
        return uuid.raw

    def import_memory(self, descriptor: int, size: int) -> int:
        handle, address = ctypes.c_uint64(), ctypes.c_uint64()
        length = ctypes.c_size_t(size)
        with contextlib.ExitStack() as undo:
            # A descriptor is passed as a pointer.
            self._context.call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(descriptor),
                ctypes.c_int(_POSIX_FILE_DESCRIPTOR),
            )
            try:
                zero = ctypes.c_uint64(0)
                arguments = (ctypes.byref(address), length, ctypes.c_size_t(0), zero, zero)
                self._context.call("cuMemAddressReserve", *arguments)
                undo.callback(self._context.call, "cuMemAddressFree", address, length)
                self._context.call("cuMemMap", address, length, ctypes.c_size_t(0), handle, zero)
                undo.callback(self._context.call, "cuMemUnmap", address, length)
                access = (ctypes.c_int * 3)(_LOCATION_DEVICE, self._number.value, _READ_WRITE)
                arguments = (address, length, access, ctypes.c_size_t(1))
                self._context.call("cuMemSetAccess", *arguments)
            finally:  # the mapping keeps the memory
                self._context.call("cuMemRelease", handle)
            self._imported[address.value] = undo.pop_all()
        return address.value

    def release_memory(self, address: int) -> None:
        self._imported.pop(address).close()

    def words(self, count: int) -> Any:
        try:
            return self._torch.zeros(count, dtype=self._torch.int32, device=self._device)
        except RuntimeError as error:  # of which PyTorch's OutOfMemoryError is one
            raise CudaError(f"{count} words of GPU memory: {error}") from None

    def tensor(self, tensor: Any) -> DeviceTensor:
        if not self._torch.is_tensor(tensor) or tensor.device != self._device:
            raise ValueError(f"no tensor on {self._device}: {getattr(tensor, 'device', tensor)}")
        return DeviceTensor.of(tensor)

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def own_stream(self) -> Any:
        if self._own_stream is None:
            self._own_stream = self.new_stream()
        return self._own_stream

    def new_stream(self) -> Any:
        handle = ctypes.c_void_p()
        flags = ctypes.c_uint(_STREAM_NON_BLOCKING)
        self._context.call("cuStreamCreate", ctypes.byref(handle), flags)
        return self._torch.cuda.ExternalStream(handle.value, self._device)

    def capturing(self) -> bool:
        # PyTorch's own question is about the thread's current GPU.
        status = ctypes.c_int()
        stream = ctypes.c_void_p(self.stream())
        self._context.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def launch(self, kernel: str, parameters: ctypes.Structure, blocks: int, stream: int) -> None:
        beside = self._overlaps and kernel == "attnd_layer"  # which waits for the one ahead of it
        enqueue = launch_beside if beside else launch
        enqueue(self._context, self._kernels[kernel], parameters, blocks, stream)

    def busy(self, stream: int) -> bool:
        query = self._context.call("cuStreamQuery", ctypes.c_void_p(stream), allowed=(_NOT_READY,))
        return query == _NOT_READY

    def synchronize(self) -> None:
        with captures.UNDER_WAY:
            self._context.call("cuCtxSynchronize")
