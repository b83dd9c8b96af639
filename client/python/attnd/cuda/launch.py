# SPDX-License-Identifier: Apache-2.0
"""How layer.cu's kernels are launched."""

from __future__ import annotations

import ctypes

from attnd.cuda.context import Context
from attnd.cuda.gpu import THREADS

# CUlaunchAttributeID. GPUs before compute capability 9.0 know nothing of it.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
OVERLAP_CAPABILITY = (9, 0)


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


def launch(
    context: Context,
    kernel: ctypes.c_void_p,
    parameters: ctypes.Structure,
    blocks: int,
    stream: int,
    *,
    overlaps: bool,
) -> None:
    """Enqueues a kernel of THREADS threads a thread block.

    Args:
        overlaps: it may begin before the stream's kernel ahead of it has ended, and waits for that
            end itself: it is resident when its turn comes.

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
        attribute_count=int(overlaps),
    )
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))  # copied by the call
    context.call("cuLaunchKernelEx", ctypes.byref(config), kernel, pointers, None)
