# SPDX-License-Identifier: Apache-2.0
"""A region's twin in GPU memory (proto/attnd/v1/memory.proto), as a session uses it."""

from __future__ import annotations

import contextlib
import logging

from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import Gpu
from attnd.pass_memory import PassLayout, PassMemory
from attnd.tensors import FP32

_LOGGER = logging.getLogger(__name__)


def twin_gpu_of(gpu: Gpu, layout: PassLayout) -> bytes:
    """What :meth:`attnd.pass_memory.PassMemory` asks for a session on this GPU: the GPU's UUID, or
    nothing. A server's GPU leaves no answers in fp32 in a twin, and answers no latent models."""
    if layout.out.dtype == FP32 or layout.shape.latent:
        return b""
    try:
        return gpu.uuid()
    except CudaError as error:  # a driver without that call, say
        _LOGGER.info("layers go through the host's memory: %s", error)
        return b""


def import_twin(gpu: Gpu, memory: PassMemory, mapped: contextlib.ExitStack) -> int:
    """The address of a region's twin for the GPU's kernels, from here on until `mapped` is closed; 0 if
    there is none, of which the log has the reason. Its descriptor is closed in any case.

    Args:
        mapped: releases it; no kernel may touch it then.
    """
    twin, memory.twin = memory.twin, None  # it is imported once
    if twin is None:
        if memory.no_twin:
            _LOGGER.info("layers go through the host's memory: %s", memory.no_twin)
        return 0
    try:
        address = gpu.import_memory(twin.descriptor, twin.bytes)
    except CudaError as error:
        _LOGGER.warning("layers go through the host's memory: the server's GPU memory: %s", error)
        return 0
    finally:
        twin.close()
    mapped.callback(gpu.release_memory, address)
    memory.in_twin = True
    mapped.callback(_leave, memory)
    return address


def _leave(memory: PassMemory) -> None:
    memory.in_twin = False
