# SPDX-License-Identifier: Apache-2.0
"""Compiling layer.cu when a session is made: with NVRTC where a machine has it, and with an
emulated one (emulated_nvrtc.cc) for what NVRTC itself does not do."""

from __future__ import annotations

import ctypes
import shutil

import pytest

import emulated_gpu
from attnd.cuda import compiler
from attnd.cuda.errors import CudaError

# Versions of CUDA that no machine has.
OLDER, NEWER, MISSING = 97, 98, 99


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Two versions of NVRTC, as wheels bring them."""
    library = emulated_gpu.compiled(tmp_path, "emulated_nvrtc")
    for version in (OLDER, NEWER):
        folder = tmp_path / f"nvidia/cu{version}/lib"
        folder.mkdir(parents=True)
        shutil.copy(library, folder / f"libnvrtc.so.{version}")
    monkeypatch.syspath_prepend(tmp_path)


def test_nvrtc_compiles_the_kernels():
    """As on a machine with a GPU, which compiling does not need."""
    for major in (13, 12):
        try:
            compiler.load_nvrtc(major)
        except CudaError as error:
            assert f"libnvrtc.so.{major}" in str(error)
            continue
        cubin = compiler.compile_layer((9, 0), major)
        assert b"attnd_layer" in cubin and b"attnd_begin" in cubin
        with pytest.raises(CudaError, match="sm_11"):
            compiler.compile_layer((1, 1), major)
        return
    assert not shutil.which("nvcc")


@pytest.mark.parametrize("major", [OLDER, NEWER])
def test_nvrtc_is_that_of_pytorchs_cuda(wheels, major):
    """Also where there is a newer one."""
    assert compiler.load_nvrtc(major)._name.endswith(f"libnvrtc.so.{major}")
    assert compiler.compile_layer((9, 0), major) == b"cubin"


def test_no_other_nvrtc_takes_its_place(wheels):
    with pytest.raises(CudaError, match=f"no libnvrtc.so.{MISSING}, as PyTorch"):
        compiler.load_nvrtc(MISSING)


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        ("compile_code", "compiling layer.cu for sm_90: planted\nlog"),
        ("size_code", "taking the cubin for sm_90: planted"),
        ("cubin_code", "taking the cubin for sm_90: planted"),
    ],
)
def test_what_nvrtc_refuses_is_told(wheels, failing, words):
    ctypes.c_int.in_dll(compiler.load_nvrtc(OLDER), failing).value = 5
    with pytest.raises(CudaError, match=words):
        compiler.compile_layer((9, 0), OLDER)
