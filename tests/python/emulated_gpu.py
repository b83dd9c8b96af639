# SPDX-License-Identifier: Apache-2.0
"""A GPU on the CPU for attnd.cuda: its stream is a thread, its tensors are numpy's, and its kernels are
layer.cu's own, compiled as C++ (emulated_layer.cc)."""

from __future__ import annotations

import ctypes
import mmap
import pathlib
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable

import numpy as np
import pytest

from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import DeviceTensor
from attnd.cuda.structs import Layer

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The fake device's (tests/gpu/fake_device.h), as if this were that one.
UUID = b"the fake device."
# Of a thread block: enough that its threads have to wait for each other.
THREADS = 3


def compiled(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The shared library of a file of this folder; skips where there is no compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = folder / f"{name}.so"
    source = ROOT / f"tests/python/{name}.cc"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{ROOT}"]
    subprocess.run(
        [*command, "-Wno-unknown-pragmas", source, "-o", library], check=True, timeout=120
    )
    return library


class EmulatedGpu:
    """A GPU with one stream.

    Attributes:
        captured: kernels of the graph that is being captured; None if none is.
        mapped: memories that kernels may touch.
        imported: GPU memory of others', by address.
        fails: told the name of each call that CUDA may refuse: whether it raises.
    """

    def __init__(self, library: ctypes.CDLL, blocks: int | None = None) -> None:
        """blocks: of each layer's kernel; None: as many as the session says."""
        self.captured: list | None = None
        self.mapped: list = []
        self.imported: dict = {}
        self.fails: Callable[[str], bool] = lambda name: False
        self._library = library
        self._blocks = blocks
        self._work: queue.Queue = queue.Queue()
        self._ended = ctypes.c_uint()  # kernels
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def map(self, memory) -> int:
        self._call("map")
        self.mapped.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def unmap(self, memory) -> None:
        self._call("unmap")
        self.mapped.remove(memory)

    def uuid(self) -> bytes:
        return UUID

    def import_memory(self, descriptor: int, size: int) -> int:
        self._call("import_memory")
        memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        self.imported[ctypes.addressof(ctypes.c_char.from_buffer(memory))] = memory
        return next(reversed(self.imported))

    def release_memory(self, address: int) -> None:
        self._call("release_memory")
        del self.imported[address]

    def words(self, count: int):
        self._call("words")
        return np.zeros(count, np.int32)

    def tensor(self, tensor) -> DeviceTensor:
        if not isinstance(tensor, np.ndarray):
            raise ValueError(f"no tensor on the emulated GPU: {tensor}")
        address = tensor.__array_interface__["data"][0]
        return DeviceTensor(address, tensor.shape, tensor.strides, tensor.dtype.name)

    def stream(self) -> int:
        return 7

    def capturing(self) -> bool:
        return self.captured is not None

    def launch(self, kernel, parameters, blocks, stream) -> None:
        self._call("launch")
        copied = type(parameters).from_buffer_copy(parameters)
        run = getattr(self._library, f"emulate_{kernel}")
        call = (run, copied, self._blocks or blocks)
        if self.captured is None:
            self._work.put(call)
        else:
            self.captured.append(call)

    def replay(self, graph: list) -> None:
        for call in graph:
            self._work.put(call)

    def then(self, function) -> None:
        """Has the stream call a function of the host's."""
        self._work.put(function)

    def busy(self, stream: int) -> bool:
        self._call("busy")
        return self._work.unfinished_tasks > 0

    def synchronize(self) -> None:
        self._work.join()
        self._call("synchronize")

    def _call(self, name: str) -> None:
        if self.fails(name):
            raise CudaError(f"{name}: planted (1)")

    def _run(self) -> None:
        """The stream. A layer's kernel begins when the one ahead of it may still run, and waits for it
        itself; all else begins when what was before it has ended."""
        begun = 0
        running: list[threading.Thread] = []  # kernels, the oldest first
        while True:
            work = self._work.get()
            is_kernel = isinstance(work, tuple)
            beside = 1 if is_kernel and isinstance(work[1], Layer) else 0
            while len(running) > beside:
                running.pop(0).join()
            if is_kernel:
                kernel = threading.Thread(target=self._run_kernel, args=(*work, begun), daemon=True)
                kernel.start()
                running.append(kernel)
                begun += 1
            else:
                work()
                self._work.task_done()

    def _run_kernel(self, run, parameters, blocks: int, before: int) -> None:
        run(ctypes.byref(parameters), blocks, THREADS, ctypes.byref(self._ended), before)
        self._ended.value = before + 1
        self._work.task_done()
