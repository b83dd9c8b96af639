# SPDX-License-Identifier: Apache-2.0
"""How layer.cu's kernels are launched."""

from __future__ import annotations

import ctypes
from typing import Any

from attnd.cuda.context import Context
from attnd.cuda.gpu import THREADS

# CUlaunchAttributeID.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# Of a GPU that lets a kernel begin before the one ahead of it has ended, and of a driver that has
# graphs do so, too (CUDA 12.3).
_OVERLAP_CAPABILITY, _OVERLAP_DRIVER = (9, 0), 12030


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    ]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def overlaps(context: Context, capability: tuple[int, int]) -> bool:
    """Whether launch_beside does what it says.

    Raises:
        CudaError: if the driver refuses.
    """
    version = ctypes.c_int()
    context.call("cuDriverGetVersion", ctypes.byref(version))
    return capability >= _OVERLAP_CAPABILITY and version.value >= _OVERLAP_DRIVER


def launch(
    context: Context, kernel: ctypes.c_void_p, parameters: ctypes.Structure, blocks: int, stream: int
) -> None:
    """Enqueues a kernel of THREADS threads a thread block.

    Raises:
        CudaError: if the driver refuses.
    """
    context.call(
        "cuLaunchKernel",
        kernel,
        *map(ctypes.c_uint, (blocks, 1, 1, THREADS, 1, 1, 0)),
        ctypes.c_void_p(stream),
        _pointers_to(parameters),
        None,
    )


def launch_beside(
    context: Context, kernel: ctypes.c_void_p, parameters: ctypes.Structure, blocks: int, stream: int
) -> None:
    """As launch; the kernel may begin before the stream's kernel ahead of it has ended, and waits
    for that end itself: it is there when its turn comes.

    Raises:
        CudaError: if the driver refuses.
    """
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    config = _Config(
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        attributes=ctypes.pointer(attribute),
        attribute_count=1,
    )
    context.call("cuLaunchKernelEx", ctypes.byref(config), kernel, _pointers_to(parameters), None)


def _pointers_to(parameters: ctypes.Structure) -> Any:
    """A kernel's one parameter, which the launch copies."""
    return (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
