# SPDX-License-Identifier: Apache-2.0
"""What a stream session needs of a GPU: the seam between its logic and CUDA."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any, Protocol

# Of a thread block: one of them brings a whole answer, and its reads over PCIe, four a thread, are under
# way at the same time.
THREADS = 1024
# A kernel's thread blocks: enough for PCIe, which carries q, k and v.
BLOCKS_MAX = 16


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor in GPU memory.

    Attributes:
        address: of its first element.
        shape: elements.
        strides: bytes from one element to the next of each dimension.
        dtype: its element type's name, "bfloat16", "float16" or "float32".
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> DeviceTensor:
        """A torch.Tensor, on whichever device."""
        size = tensor.element_size()
        return cls(
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(size * stride for stride in tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
        )


class Gpu(Protocol):
    """A GPU, as the calling thread sees it. CudaGpu is CUDA's; tests have one on the CPU."""

    def map(self, memory: mmap.mmap) -> int:
        """Makes all of the memory usable by kernels; returns the address that they have it at."""

    def unmap(self, memory: mmap.mmap) -> None:
        """No kernel may touch the memory any more."""

    def uuid(self) -> bytes:
        """Its 16 bytes."""

    def import_memory(self, descriptor: int, size: int) -> int:
        """Maps GPU memory that another process has exported, for kernels; returns its address. The
        descriptor stays the caller's.

        Raises:
            CudaError: if CUDA refuses.
        """

    def release_memory(self, address: int) -> None:
        """Unmaps what import_memory has mapped: no kernel may touch it any more."""

    def words(self, count: int) -> Any:
        """GPU memory of `count` words of 32 bits, all zero, as a tensor.

        Raises:
            CudaError: if there is none.
        """

    def tensor(self, tensor: Any) -> DeviceTensor:
        """
        Raises:
            ValueError: if this is no tensor in this GPU's memory.
        """

    def stream(self) -> int:
        """The calling thread's current stream."""

    @property
    def device(self) -> Any:
        """The torch.device."""

    def own_stream(self) -> Any:
        """A torch.cuda.Stream that nobody else has, the same each time; PyTorch shares its own."""

    def new_stream(self) -> Any:
        """Another one each time, which lasts as long as the process."""

    def capturing(self) -> bool:
        """Whether the current stream is captured into a graph."""

    def launch(self, kernel: str, parameters: ctypes.Structure, blocks: int, stream: int) -> None:
        """Enqueues a kernel of layer.cu, with THREADS threads a thread block. A layer's may begin
        beside the end of the stream's kernel before it."""

    def busy(self, stream: int) -> bool:
        """Whether the stream has work before it.

        Raises:
            CudaError: if work of the stream has failed.
        """

    def synchronize(self) -> None:
        """Waits until all work of the GPU's streams is done, and first for captures under way."""
