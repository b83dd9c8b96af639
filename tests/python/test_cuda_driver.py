# SPDX-License-Identifier: Apache-2.0
"""attnd.cuda's calls to CUDA's driver where the thread's current GPU is another one. Two GPUs are
imitated, with no more of PyTorch and the driver than the order of calls needs."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
import threading
from types import SimpleNamespace

import pytest

from attnd.cuda import driver, structs
from attnd.cuda.errors import CudaError

REFUSED = 1


class TwoGpus:
    """What libcuda.so.1 and torch are to CudaGpu. A context is its GPU's number plus 100, a stream
    its GPU's number plus 200.

    Attributes:
        called: functions of the driver, each with the GPU that was the thread's current one, None
            where it had none.
        capturing: streams that are captured.
        refuses: functions that return REFUSED.
        registered: addresses of host memory.
        launched: the sizes of each launch, in CUlaunchConfig's order, its stream, the bytes of its
            attributes, and where its parameter lies.
        missing: functions that the driver does not have.
        driver_version: as cuDriverGetVersion tells it.
        full: whether there is no memory left on the GPUs.
    """

    def __init__(self) -> None:
        self.called: list[tuple[str, int | None]] = []
        self.capturing: set[int] = set()
        self.refuses: set[str] = set()
        self.registered: list[int] = []
        self.launched: list[tuple[list[int], int, bytes, int]] = []
        self.missing: set[str] = set()
        self.driver_version = 12080
        self.full = False
        self.int32 = "int32"
        self.version = SimpleNamespace(cuda="12.8")
        self._threads = threading.local()
        self.cuda = SimpleNamespace(
            current_device=lambda: self.current or 0,
            current_stream=lambda device: SimpleNamespace(cuda_stream=200 + device.index),
            device=self._device,
            get_device_capability=lambda device: (9, 0),
            is_current_stream_capturing=lambda: 200 + (self.current or 0) in self.capturing,
        )

    @property
    def current(self) -> int | None:
        """The calling thread's GPU."""
        return self._stack[-1]

    @current.setter
    def current(self, gpu: int | None) -> None:
        self._stack[-1] = gpu

    @property
    def _stack(self) -> list[int | None]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = [None]
        return self._threads.stack

    # ---- PyTorch ----

    def device(self, kind, index=None):
        return SimpleNamespace(index=int(kind.split(":")[1]) if index is None else index)

    def zeros(self, _, dtype, device) -> None:
        if self.full:
            raise RuntimeError("CUDA out of memory (planted)")
        assert self.current == device.index

    @contextlib.contextmanager
    def _device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    # ---- The driver ----

    def cuCtxGetCurrent(self, context) -> int:  # noqa: N802
        context._obj.value = None if self.current is None else 100 + self.current
        return 0

    def cuCtxSetCurrent(self, context) -> int:  # noqa: N802
        self.current = None if context.value is None else context.value - 100
        return 0

    def cuCtxPushCurrent_v2(self, context) -> int:  # noqa: N802
        self._stack.append(context.value - 100)
        return 0

    def cuCtxPopCurrent_v2(self, context) -> int:  # noqa: N802
        context._obj.value = 100 + self._stack.pop()
        return 0

    def cuGetErrorString(self, code, text) -> int:  # noqa: N802
        text._obj.value = b"refused"
        return 0

    def cuMemHostRegister_v2(self, address, *_) -> int:  # noqa: N802
        code = self._answer("cuMemHostRegister_v2")
        if code == 0:
            self.registered.append(address.value)
        return code

    def cuMemHostUnregister(self, address) -> int:  # noqa: N802
        self.registered.remove(address.value)
        return self._answer("cuMemHostUnregister")

    def cuStreamIsCapturing(self, stream, status) -> int:  # noqa: N802
        status._obj.value = int(stream.value in self.capturing)
        return self._answer("cuStreamIsCapturing")

    def cuCtxGetDevice(self, device) -> int:  # noqa: N802
        device._obj.value = self.current
        return 0

    def cuMemImportFromShareableHandle(self, handle, descriptor, _) -> int:  # noqa: N802
        handle._obj.value = 1000 + descriptor.value
        return self._answer("cuMemImportFromShareableHandle")

    def cuMemAddressReserve(self, address, *_) -> int:  # noqa: N802
        address._obj.value = 1 << 21
        return self._answer("cuMemAddressReserve")

    def cuMemMap(self, address, size, offset, handle, flags) -> int:  # noqa: N802
        assert (address.value, offset.value, handle.value) == (1 << 21, 0, 1007)
        return self._answer("cuMemMap")

    def cuMemSetAccess(self, address, size, access, count) -> int:  # noqa: N802
        assert list(access) == [1, self.current, 3] and count.value == 1
        return self._answer("cuMemSetAccess")

    def cuMemUnmap(self, address, size) -> int:  # noqa: N802
        assert (address.value, size.value) == (1 << 21, 2 << 20)
        return self._answer("cuMemUnmap")

    def cuMemAddressFree(self, address, size) -> int:  # noqa: N802
        assert (address.value, size.value) == (1 << 21, 2 << 20)
        return self._answer("cuMemAddressFree")

    def cuDeviceGetUuid_v2(self, uuid, device) -> int:  # noqa: N802
        uuid.raw = bytes([device.value]) * 16
        return self._answer("cuDeviceGetUuid_v2")

    def cuDriverGetVersion(self, version) -> int:  # noqa: N802
        version._obj.value = self.driver_version
        return 0

    def cuLaunchKernel(self, kernel, *rest) -> int:  # noqa: N802
        *dims, stream, parameters, _ = rest
        numbers = [one.value for one in dims]
        self.launched.append((numbers, stream.value, b"", parameters[0]))
        return self._answer("cuLaunchKernel")

    def cuLaunchKernelEx(self, config, kernel, parameters, extra) -> int:  # noqa: N802
        # CUlaunchConfig and CUlaunchAttribute, as cuda.h lays them out.
        bytes_ = ctypes.string_at(ctypes.addressof(config._obj), 56)
        *dims, stream, attributes, count = struct.unpack("<7I4x2QI4x", bytes_)
        attribute_bytes = ctypes.string_at(attributes, 72 * count)
        self.launched.append((dims, stream, attribute_bytes, parameters[0]))
        return self._answer("cuLaunchKernelEx")

    def __getattr__(self, name: str):
        if not name.startswith("cu") or name in self.missing:
            raise AttributeError(name)
        return lambda *_: self._answer(name)

    def _answer(self, name: str) -> int:
        self.called.append((name, self.current))
        return REFUSED if name in self.refuses else 0


@pytest.fixture
def two(monkeypatch):
    two = TwoGpus()
    monkeypatch.setattr(driver, "_import_torch", lambda: two)
    monkeypatch.setattr(driver, "_load_driver", lambda: two)
    monkeypatch.setattr(driver, "compile_layer", lambda *_: b"cubin")
    monkeypatch.setattr(driver, "_loaded", driver.LoadedKernels())
    return two


IMPORTED = [
    "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
]


def use(gpu) -> None:
    """Every call of a session's."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    gpu.map(memory)
    gpu.capturing()
    gpu.launch("attnd_begin", structs.Begin(), 1, gpu.stream())
    gpu.busy(gpu.stream())
    gpu.synchronize()
    gpu.unmap(memory)
    gpu.release_memory(gpu.import_memory(7, 2 << 20))
    assert gpu.uuid() == bytes([1]) * 16


@pytest.mark.parametrize("current", [None, 0, 1])
def test_calls_leave_the_thread_its_gpu(two, current):
    """Those of a session on GPU 1, also in a thread that has none."""
    two.current = current
    gpu = driver.CudaGpu("cuda:1")
    assert two.current == current
    use(gpu)
    assert two.current == current
    for name in ("cuCtxSynchronize", "cuStreamQuery"):
        two.refuses = {name}
        with pytest.raises(CudaError, match=rf"{name}: refused \(1\)"):
            use(gpu)
        assert two.current == current
    assert {on for _, on in two.called} == {1}


def test_a_capture_is_its_own_stream_s(two):
    """Of the session's GPU, and not of the thread's current one."""
    two.current = 0
    gpu = driver.CudaGpu("cuda:1")
    for capturing, expected in ((set(), False), ({200}, False), ({201}, True)):
        two.capturing = capturing
        assert gpu.capturing() is expected


@pytest.mark.parametrize(("version", "major"), [("12.8", 12), ("13.0", 13)])
def test_kernels_are_compiled_by_pytorchs_version(two, monkeypatch, version, major):
    asked = []
    monkeypatch.setattr(driver, "compile_layer", lambda *told: asked.append(told) or b"cubin")
    two.version.cuda = version
    driver.CudaGpu()
    assert asked == [((9, 0), major)]


def test_a_gpu_s_kernels_are_loaded_once(two):
    """For all sessions of the process; not where it failed, which may pass."""
    two.refuses = {"cuModuleLoadData"}
    with pytest.raises(CudaError, match="cuModuleLoadData"):
        driver.CudaGpu("cuda:1")
    two.refuses, two.called = set(), []
    makers = [threading.Thread(target=driver.CudaGpu, args=("cuda:1",)) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert two.called.count(("cuModuleLoadData", 1)) == 1
    driver.CudaGpu("cuda:0")
    assert two.called.count(("cuModuleLoadData", 0)) == 1


@pytest.mark.parametrize(
    ("capability", "version", "beside"),
    [((8, 9), 12080, False), ((9, 0), 12020, False), ((9, 0), 12030, True), ((10, 0), 13000, True)],
)
def test_layers_are_launched_beside_the_kernel_before(two, capability, version, beside):
    """Where GPU and driver can: by CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, which is 6.
    The pass's first kernel, which does not wait, never is."""
    two.cuda.get_device_capability = lambda device: capability
    two.driver_version = version
    gpu = driver.CudaGpu("cuda:1")
    begin, layer = structs.Begin(), structs.Layer()
    gpu.launch("attnd_begin", begin, 1, gpu.stream())
    gpu.launch("attnd_layer", layer, 5, gpu.stream())
    attribute = struct.pack("<2I2I56x", 6, 0, 1, 0) if beside else b""
    assert two.launched == [
        ([1, 1, 1, 1024, 1, 1, 0], 201, b"", ctypes.addressof(begin)),
        ([5, 1, 1, 1024, 1, 1, 0], 201, attribute, ctypes.addressof(layer)),
    ]


def test_a_driver_without_a_function_is_told(two):
    gpu = driver.CudaGpu()
    two.missing = {"cuStreamQuery"}
    with pytest.raises(CudaError, match="cuStreamQuery: CUDA's driver is too old"):
        gpu.busy(gpu.stream())


def test_a_full_gpu_is_an_error_of_cuda(two):
    """And none of PyTorch's, which nobody expects from a session."""
    gpu = driver.CudaGpu()
    two.full = True
    two.current = 0
    with pytest.raises(CudaError, match="out of memory"):
        gpu.words(8)
    with pytest.raises(CudaError, match="out of memory"):
        driver.CudaGpu()


def test_a_pytorch_for_other_gpus_is_told(two):
    two.version.cuda = None
    with pytest.raises(CudaError, match="not built for CUDA"):
        driver.CudaGpu()


@pytest.mark.parametrize("name", ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"])
def test_memory_that_cannot_be_mapped_is_not_registered(two, name):
    gpu = driver.CudaGpu()
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    two.refuses = {name}
    with pytest.raises(CudaError, match=name):
        gpu.map(memory)
    assert two.registered == []
    two.refuses = set()
    assert gpu.map(memory) == 0
    assert two.registered == [ctypes.addressof(ctypes.c_char.from_buffer(memory))]
    gpu.unmap(memory)
    assert two.registered == []


@pytest.mark.parametrize("refused", [None, *IMPORTED])
def test_what_is_imported_is_released(two, refused):
    """All of it, and of what CUDA refuses all that had been done; the handle goes in any case."""
    gpu = driver.CudaGpu()
    two.called, two.refuses = [], {refused}
    if refused is None:
        gpu.release_memory(gpu.import_memory(7, 2 << 20))
    else:
        with pytest.raises(CudaError, match=refused):
            gpu.import_memory(7, 2 << 20)
    undone = {
        "cuMemMap": "cuMemUnmap",
        "cuMemAddressReserve": "cuMemAddressFree",
    }
    done = IMPORTED if refused is None else IMPORTED[: IMPORTED.index(refused)]
    expected = [*done, *([] if refused is None else [refused])]
    if "cuMemImportFromShareableHandle" in done:
        expected.append("cuMemRelease")
    expected += [undo for step, undo in undone.items() if step in done]
    assert two.called == [(name, 0) for name in expected]
