# SPDX-License-Identifier: Apache-2.0
"""What the tests of attnd.cuda share: the kernels on the CPU, and the real server with a client. A
test file imports the fixtures that it uses, and those that they use."""

from __future__ import annotations

import ctypes

import pytest

import attnd
import emulated_gpu
import live_server
from conftest import require_program
from emulated_gpu import EmulatedGpu

# Tokens of a case: before its first pass, and with those of all passes.
PROMPT, TOKENS = 40, 56
FLAGS = ("--allow-client-memory", "--client-memory-bytes=16MiB", "--reply-timeout-s=2")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    return ctypes.CDLL(str(emulated_gpu.compiled(folder, "emulated_layer")))


@pytest.fixture(scope="module")
def target():
    require_program()
    with live_server.running(*FLAGS) as (target, _):
        yield target


@pytest.fixture
def client(target):
    with attnd.Client(target, timeout_s=10) as client:
        yield client
        for info in client.list_sequences():
            client.close_sequence(info.sequence_id)


@pytest.fixture(params=[1, 4])
def gpu(library, request):
    """Kernels of one thread block, and of several, of which the last to arrive waits."""
    return EmulatedGpu(library, request.param)


def layer_tokens(client, sequence: int) -> list[int]:
    return next(
        list(info.layer_tokens) for info in client.list_sequences() if info.sequence_id == sequence
    )
