# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the GPU that torch_on_emulated.py has: PyTorch's operations and attnd's kernels,
done again with the very tensors, and the very numbers, that they had when they were captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnd.transformers.streams import ModelGpu
from torch_on_emulated import TorchGpu


class EmulatedGraph(TorchDispatchMode):
    """Attributes:
    replays: how often it was replayed.
    """

    def __init__(self, gpu: TorchGpu) -> None:
        super().__init__()
        self.replays = 0
        self._gpu = gpu
        self._work: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        mode = torch.is_inference_mode_enabled()
        self._work.append(lambda: _again(mode, func, args, kwargs, answer))
        return answer

    def append(self, kernel) -> None:
        """A kernel of attnd's, as of EmulatedGpu.captured."""
        self._work.append(lambda: self._gpu.replay([kernel]))

    def replay(self) -> None:
        self.replays += 1
        for work in self._work:
            work()
            self._gpu.synchronize()


def _again(mode: bool, func, args, kwargs, answer) -> None:
    """Does an operation again; what it returned is written to where it was."""
    with torch.inference_mode(mode), torch.no_grad():
        for old, new in zip(tree_leaves(answer), tree_leaves(func(*args, **kwargs))):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Captures:
    """Stands in for attnd.transformers.graphs.capture.

    Attributes:
        made: the graphs.
        fails: whether the next capture raises when the model has run.
    """

    def __init__(self, gpu: TorchGpu) -> None:
        self.made: list[EmulatedGraph] = []
        self.fails = False
        self._gpu = gpu

    def __call__(self, where: ModelGpu, run: Callable[[], Any]) -> tuple[EmulatedGraph, Any]:
        graph = EmulatedGraph(self._gpu)
        self._gpu.captured = graph
        try:
            with graph:
                output = run()
        finally:
            self._gpu.captured = None
        if self.fails:
            raise RuntimeError("planted: operation not permitted when stream is capturing")
        self.made.append(graph)
        return graph, output

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.made)
