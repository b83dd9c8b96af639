# SPDX-License-Identifier: Apache-2.0
"""Compiling layer.cu with NVRTC, which PyTorch brings."""

from __future__ import annotations

import ctypes
import glob
import os
import pathlib
import sys

from attnd.cuda.errors import CudaError

SOURCE = pathlib.Path(__file__).with_name("layer.cu")
# The newest first.
_VERSIONS = ("13", "12")


def load_nvrtc() -> ctypes.CDLL:
    """The library, from the process, the loader's path, or a wheel.

    Raises:
        CudaError: if there is none.
    """
    names = [f"libnvrtc.so.{version}" for version in _VERSIONS]
    patterns = [
        f"{folder}/{place}/libnvrtc.so.{version}"
        for folder in sys.path
        for place in ("nvidia/*/lib", "torch/lib")
        for version in _VERSIONS
    ]
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    patterns += [f"{toolkit}/lib64/libnvrtc.so.{version}" for version in _VERSIONS]
    for name in names + [found for pattern in patterns for found in glob.glob(pattern)]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError(
        f"no {' or '.join(names)}: neither on the loader's path, nor in a wheel of nvidia or torch, "
        f"nor in {toolkit}"
    )


def compile_layer(capability: tuple[int, int]) -> bytes:
    """layer.cu as a cubin for GPUs of this compute capability.

    Raises:
        CudaError: if NVRTC is missing, too old for the GPU, or refuses the source.
    """
    nvrtc = load_nvrtc()
    architecture = f"sm_{capability[0]}{capability[1]}"
    program = ctypes.c_void_p()

    def check(code: int, what: str, log: str = "") -> None:
        if code:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            words = nvrtc.nvrtcGetErrorString(code).decode()
            raise CudaError(f"NVRTC, {what} for {architecture}: {words}\n{log}".strip())

    source = SOURCE.read_bytes()
    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None
        ),
        "creating a program",
    )
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        code = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = _string(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program) if code else b""
        check(code, "compiling layer.cu", log.decode(errors="replace"))
        return _string(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _string(size_of: object, get: object, program: ctypes.c_void_p) -> bytes:
    """What a pair of NVRTC's functions tells; nothing if they fail."""
    size = ctypes.c_size_t()
    if size_of(program, ctypes.byref(size)):  # type: ignore[operator]
        return b""
    text = ctypes.create_string_buffer(size.value)
    return b"" if get(program, text) else text.raw  # type: ignore[operator]
