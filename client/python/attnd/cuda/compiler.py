# SPDX-License-Identifier: Apache-2.0
"""Compiling layer.cu with NVRTC, which PyTorch brings."""

from __future__ import annotations

import ctypes
import glob
import os
import pathlib
import sys
from typing import Any

from attnd.cuda.errors import CudaError

SOURCE = pathlib.Path(__file__).with_name("layer.cu")


def load_nvrtc(major: int) -> ctypes.CDLL:
    """The library, from the process, the loader's path, a wheel, or CUDA_HOME.

    Args:
        major: the version of CUDA that PyTorch was built for (torch.version.cuda). Another one's
            cubin may be of a form that the driver does not know, however well PyTorch runs on it.

    Raises:
        CudaError: if there is none of that version.
    """
    name = f"libnvrtc.so.{major}"
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [f"{path}/{place}" for path in sys.path for place in ("nvidia/*/lib", "torch/lib")]
    folders.append(f"{toolkit}/lib64")
    for path in [name, *(found for folder in folders for found in glob.glob(f"{folder}/{name}"))]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError(
        f"no {name}, as PyTorch is built for CUDA {major}: neither on the loader's path, nor in a "
        f"wheel of nvidia or torch, nor in {toolkit}"
    )


def compile_layer(capability: tuple[int, int], major: int) -> bytes:
    """layer.cu as a cubin for GPUs of this compute capability.

    Args:
        major: as load_nvrtc.

    Raises:
        CudaError: if NVRTC is missing, too old for the GPU, or refuses the source.
    """
    nvrtc = load_nvrtc(major)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    architecture = f"sm_{capability[0]}{capability[1]}"
    program = ctypes.c_void_p()

    def check(code: int, what: str, log: str = "") -> None:
        if code:
            words = nvrtc.nvrtcGetErrorString(code).decode()
            raise CudaError(f"NVRTC, {what} for {architecture}: {words}\n{log}".strip())

    headers = [SOURCE.with_name(name) for name in ("layer_device.cuh", "layer_structs.cuh")]
    strings = ctypes.c_char_p * len(headers)
    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), len(headers),
            strings(*(header.read_bytes() for header in headers)),
            strings(*(header.name.encode() for header in headers)),
        ),
        "creating a program",
    )
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        code = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        if code:
            _, log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            check(code, "compiling layer.cu", log.decode(errors="replace"))
        code, cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        check(code, "taking the cubin")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: Any, get: Any, program: ctypes.c_void_p) -> tuple[int, bytes]:
    """The first code of two functions of NVRTC's that is not 0, or 0; and what they tell, which is
    nothing where they fail."""
    size = ctypes.c_size_t()
    code = size_of(program, ctypes.byref(size))
    if code:
        return code, b""
    text = ctypes.create_string_buffer(size.value)
    code = get(program, text)
    return code, b"" if code else text.raw
