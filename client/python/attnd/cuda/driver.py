# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver through ctypes, beside PyTorch, whose context and streams it uses."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from attnd.cuda.compiler import compile_layer
from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import THREADS, DeviceTensor

_NOT_READY = 600
_HOST_REGISTER_PORTABLE, _HOST_REGISTER_DEVICEMAP = 1, 2
_KERNELS = ("attnd_begin", "attnd_layer")


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise CudaError(f"attnd.cuda needs PyTorch: {error}") from None
    if not torch.cuda.is_available():
        raise CudaError("PyTorch finds no CUDA device here (torch.cuda.is_available())")
    return torch


class CudaGpu:
    """One GPU of this process, in PyTorch's context of it. Any thread may call it."""

    def __init__(self, device: Any = None) -> None:
        """Compiles layer.cu, which takes some 0.1 s.

        Args:
            device: as torch.device takes; None is the current one.

        Raises:
            CudaError: if PyTorch, a GPU, the driver or NVRTC is missing.
        """
        torch = self._torch = _import_torch()
        index = None if device is None else torch.device(device).index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"CUDA's driver: {error}") from None
        with torch.cuda.device(self._device):
            torch.zeros(1, device=self._device)  # makes the context, if this is the first use
            self._context = ctypes.c_void_p()
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
            cubin = compile_layer(torch.cuda.get_device_capability(self._device))
            self._module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)
            self._kernels = {name: self._function(name) for name in _KERNELS}
        self._mapped: dict[int, int] = {}  # addresses here, by id of the memory

    @property
    def device(self) -> Any:
        """The torch.device."""
        return self._device

    def map(self, memory: mmap.mmap) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._enter()
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(len(memory)),
            ctypes.c_uint(_HOST_REGISTER_PORTABLE | _HOST_REGISTER_DEVICEMAP),
        )
        self._mapped[id(memory)] = address
        pointer = ctypes.c_uint64()
        self._call(
            "cuMemHostGetDevicePointer_v2",
            ctypes.byref(pointer),
            ctypes.c_void_p(address),
            ctypes.c_uint(0),
        )
        return pointer.value

    def unmap(self, memory: mmap.mmap) -> None:
        self._enter()
        address = self._mapped.pop(id(memory))
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def words(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.int32, device=self._device)

    def tensor(self, tensor: Any) -> DeviceTensor:
        if not self._torch.is_tensor(tensor) or tensor.device != self._device:
            raise ValueError(f"no tensor on {self._device}: {getattr(tensor, 'device', tensor)}")
        size = tensor.element_size()
        return DeviceTensor(
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(size * stride for stride in tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
        )

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def capturing(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    def launch(self, kernel: str, parameters: ctypes.Structure, blocks: int, stream: int) -> None:
        self._enter()
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))  # copied by the call
        self._call(
            "cuLaunchKernel",
            self._kernels[kernel],
            *map(ctypes.c_uint, (blocks, 1, 1, THREADS, 1, 1, 0)),
            ctypes.c_void_p(stream),
            pointers,
            None,
        )

    def busy(self, stream: int) -> bool:
        self._enter()
        code = self._library.cuStreamQuery(ctypes.c_void_p(stream))
        if code not in (0, _NOT_READY):
            self._check(code, "cuStreamQuery")
        return bool(code)

    def synchronize(self) -> None:
        self._enter()
        self._call("cuCtxSynchronize")

    def _function(self, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        return function

    def _enter(self) -> None:
        """Threads begin without a context."""
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != self._context.value:
            self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._library, name)(*arguments), name)

    def _check(self, code: int, name: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
