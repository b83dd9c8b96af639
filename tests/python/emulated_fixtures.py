# SPDX-License-Identifier: Apache-2.0
"""What the tests of attnd.cuda share: the kernels on the CPU, and the real server with a client. A
test file imports the fixtures that it uses, and those that they use."""

from __future__ import annotations

import ctypes

import pytest

import emulated_gpu
from emulated_gpu import EmulatedGpu
from memory_fixtures import connected, layer_tokens, target

# Tokens of a case: before its first pass, and with those of all passes.
PROMPT, TOKENS = 40, 56


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    return ctypes.CDLL(str(emulated_gpu.compiled(folder, "emulated_layer")))


@pytest.fixture
def client(target):
    with connected(target, timeout_s=10) as client:
        yield client


@pytest.fixture(params=[1, 4])
def gpu(library, request):
    """Kernels of one thread block, and of several, of which the last to arrive waits."""
    return EmulatedGpu(library, request.param)
