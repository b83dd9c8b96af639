# SPDX-License-Identifier: Apache-2.0
"""Sessions on the CUDA stream of a model that lies on a GPU."""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch

from attnd.client import Client
from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import Gpu
from attnd.cuda.session import StreamSession
from attnd.errors import AttndError, ResourceExhaustedError
from attnd.model import ModelShape
from attnd.transformers.regions import OneWarning, Regions

_LOGGER = logging.getLogger(__name__)
# Query tokens of a pass on a stream, at most: those of a batch's next tokens. A turn of many tokens
# would leave its cache with a large region, pinned, for as long as it decodes.
QUERY_TOKENS_MAX = 256
# As Client.cuda_session.
_SPIN_US = 1000


@dataclass(frozen=True)
class ModelGpu:
    """Where a model lies.

    Attributes:
        device: of all its parameters.
        gpu: that device for kernels of a session.
    """

    device: torch.device
    gpu: Gpu


def gpu_of(model: Any) -> ModelGpu | None:
    """The GPU that holds a whole model; None for a model on the CPU, or on several devices, and
    where CUDA refuses, which the log then says."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    from attnd.cuda.driver import CudaGpu

    device = devices.pop()
    try:
        return ModelGpu(device, CudaGpu(device))
    except CudaError as error:
        _LOGGER.warning("tensors are copied to the host, not by kernels of the GPU: %s", error)
        return None


class Streams:
    """Makes the sessions of an attachment's caches, each of which has one of its own while it
    decodes: a session's region has one writer. Threads may share it."""

    def __init__(self, client: Client, regions: Regions, where: ModelGpu) -> None:
        self._client = client
        self._regions = regions
        self._where = where
        self._warn = OneWarning("tensors are copied to the host, not by kernels")

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self._where.device

    def serves(
        self, shape: ModelShape, rows: int, query_tokens: int, device: torch.device
    ) -> bool:
        """Whether there are sessions for such passes: of tensors of the model's GPU, within what a
        message may have, and of at most QUERY_TOKENS_MAX query tokens."""
        return (
            device == self._where.device
            and query_tokens <= QUERY_TOKENS_MAX
            and self._regions.allow(shape, rows, query_tokens)
        )

    def open(self, shape: ModelShape, query_tokens: int) -> StreamSession | None:
        """A session for passes of so many query tokens and somewhat more; None if the server or the
        GPU has no room for its region, of which the log has one warning.

        Raises:
            AttndError: if the server cannot be reached.
        """
        try:
            return self._open(shape, query_tokens)
        except (ResourceExhaustedError, CudaError) as error:
            self._warn(error)
            return None

    def _open(self, shape: ModelShape, query_tokens: int) -> StreamSession:
        with contextlib.ExitStack() as made:
            memory = self._regions.reserve(shape, query_tokens, self._where.gpu)
            made.callback(self._regions.drop, memory)
            stream = self._client.memory_stream(spin_us=_SPIN_US)
            made.callback(stream.close)
            release = functools.partial(self._regions.drop, memory)
            session = StreamSession(self._where.gpu, stream, memory, release)
            made.pop_all()  # they are the session's
            return session


def close_quietly(session: StreamSession) -> None:
    """Ends a session whose stream is of no more use."""
    try:
        session.close()
    except (AttndError, CudaError) as error:
        _LOGGER.warning("closing a session: %s", error)
