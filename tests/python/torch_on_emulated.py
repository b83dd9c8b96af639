# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CPU as the GPU that a model is on: its tensors are there when a call returns, and so is
what a kernel writes."""

from __future__ import annotations

import threading

import torch

from attnd.cuda.gpu import DeviceTensor
from attnd.transformers.streams import ModelGpu
from emulated_gpu import EmulatedGpu


class TorchGpu(EmulatedGpu):
    """Each thread has a stream that it may capture."""

    def __init__(self, library) -> None:
        self._capture = threading.local()
        super().__init__(library)

    @property
    def captured(self):
        return getattr(self._capture, "graph", None)

    @captured.setter
    def captured(self, graph) -> None:
        self._capture.graph = graph

    def words(self, count: int):
        self._call("words")
        return torch.zeros(count, dtype=torch.int32)

    def tensor(self, tensor) -> DeviceTensor:
        return DeviceTensor.of(tensor)

    def launch(self, kernel, parameters, blocks, stream) -> None:
        super().launch(kernel, parameters, blocks, stream)
        self._work.join()


def model_gpu(library) -> ModelGpu:
    return ModelGpu(torch.device("cpu"), TorchGpu(library))
