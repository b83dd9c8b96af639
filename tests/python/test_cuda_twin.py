# SPDX-License-Identifier: Apache-2.0
"""Passes of a CUDA stream whose kernels and the server's GPU meet in GPU memory: layer.cu's kernels on the
CPU, the real server over the fake device, whose "GPU memory" both processes map. Answers are those of
messages, in whichever memory they come; who cannot have a twin does without."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

import attnd
import live_server
import metrics_text
from attnd.errors import InvalidArgumentError
from attnd.pass_memory import PassLayout, PassMemory
from attnd.requests import PassOptions
from attnd.tensors import BF16
from attnd.words import ANSWER_OFFSET
from cases import Case, opened
from emulated_gpu import EmulatedGpu
from emulated_fixtures import PROMPT, TOKENS, gpu, layer_tokens, library
from emulated_model import Model
from memory_fixtures import connected

PROGRAM = live_server.PROGRAM.parent / "fake_gpu_attnd"
SHAPE = attnd.ModelShape(layers=4, query_heads=4, kv_heads=2, head_dim=64, dtype="bf16")
FLAGS = (
    "--backend=cuda", "--device-memory-bytes=64MiB", "--step-workers=2", "--allow-client-memory"
)
TWIN_BYTES = 2 << 20


@contextlib.contextmanager
def served(*flags: str):
    """A client of a server over the fake device, and the server's metrics' address."""
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} does not exist: build it")
    address = f"127.0.0.1:{live_server.free_port()}"
    listen = f"--metrics-listen={address}"
    with live_server.running(*FLAGS, listen, *flags, program=PROGRAM) as (target, _):
        with connected(target, timeout_s=10) as client:
            yield client, f"http://{address}/metrics"


def decode(client, gpu, model, case) -> None:
    """Passes of one token to the end of the case, each compared with one over messages."""
    layers = range(case.shape.layers)
    sequence, other = (opened(client, case, PROMPT, complete=False) for _ in range(2))
    graph = model.graph()
    with client.decode_session() as messages:
        for at in range(PROMPT, TOKENS):
            tokens = slice(at, at + 1)
            model.write(case, tokens)
            whole = model.session.begin_pass([attnd.Row(sequence, at)], want_lse=True)
            gpu.replay(graph)
            step = messages.begin_pass(len(layers), [attnd.Row(other, at)], want_lse=True)
            expected = [
                step.step(case.q[layer, tokens].astype(BF16), *case.sent(layer, tokens))
                for layer in layers
            ]
            whole.finish()
            gpu.synchronize()
            for layer in layers:
                np.testing.assert_array_equal(model.out[layer], expected[layer].out)
                np.testing.assert_array_equal(model.lse[layer], expected[layer].lse)
    assert layer_tokens(client, sequence) == [TOKENS] * len(layers)


def told(metrics: str) -> float:
    """Layers whose answers the GPU has told of by itself."""
    page = metrics_text.read(metrics)
    return page.get("attnd_backend_steps_ahead_total", outcome="told")


def test_kernels_meet_in_gpu_memory(gpu):
    """All but a pass's last layer, and those that were not launched ahead, are told there; the region's
    words say nothing of them."""
    case = Case.random(TOKENS, SHAPE)
    with served() as (client, metrics), Model(client, gpu, SHAPE, dtype="bf16", twin=True) as model:
        assert model.session.in_gpu_memory
        assert metrics_text.read(metrics).get("attnd_memory_twin_bytes") == TWIN_BYTES
        decode(client, gpu, model, case)
        assert 0 < told(metrics) <= (TOKENS - PROMPT) * (SHAPE.layers - 1)
        (twin,) = gpu.imported.values()
        answer = int.from_bytes(twin[ANSWER_OFFSET : ANSWER_OFFSET + 4], "little")
        assert 0 < answer < model.session._control.done  # the last layer's, which the host tells


@pytest.mark.parametrize("reason", ["asked", "full", "ahead", "other", "refused"])
def test_who_has_no_twin_does_without(library, monkeypatch, caplog, reason):
    """None was asked for, or the server has no room, or launches nothing ahead; or the client is on
    another GPU, or its CUDA refuses."""
    case = Case.random(TOKENS, SHAPE)
    gpu = EmulatedGpu(library)
    flags = {"full": "--client-device-memory-bytes=0", "ahead": "--device-launch-ahead=false"}
    if reason == "other":
        monkeypatch.setattr(gpu, "uuid", lambda: b"another device..")
    if reason == "refused":
        gpu.fails = lambda name: name == "import_memory"
    with (
        served(*filter(None, [flags.get(reason)])) as (client, metrics),
        Model(client, gpu, SHAPE, dtype="bf16", twin=reason != "asked") as model,
    ):
        assert not model.session.in_gpu_memory
        assert ("go through the host's" in caplog.text) == (reason == "refused")
        decode(client, gpu, model, case)
        assert (told(metrics) > 0) == (reason != "ahead")


def test_twins_come_and_go(library):
    """With their sessions; a client that ends takes them along, and the descriptors are closed."""
    gpu = EmulatedGpu(library)
    with served("--client-device-memory-bytes=4MiB") as (client, metrics):

        def twin_bytes() -> float:
            return metrics_text.read(metrics).get("attnd_memory_twin_bytes")

        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        Model(client, gpu, SHAPE, twin=True).session.close()
        before = descriptors()
        for _ in range(5):
            models = [Model(client, gpu, SHAPE, twin=True) for _ in range(3)]
            assert [model.session.in_gpu_memory for model in models] == [True, True, False]
            assert twin_bytes() == 2 * TWIN_BYTES
            for model in models:
                model.session.close()
            del models, model
        assert gpu.imported == {}
        assert descriptors() == before


def test_a_pass_in_a_twin_that_is_none_is_refused():
    with served() as (client, _):
        for twin, rings in ((False, True), (True, False)):
            refused(client, twin=twin, device_rings=rings)


def refused(client, *, twin: bool, device_rings: bool) -> None:
    case = Case.random(TOKENS, SHAPE)
    sequence = opened(client, case, PROMPT, complete=False)
    with contextlib.closing(client.memory_socket()) as connection:
        memory = PassMemory(connection, PassLayout(SHAPE, 1), twin=twin)
        stream = client.memory_stream()
        with contextlib.closing(stream):
            declaration = stream._declaration(
                memory, [attnd.Row(sequence, PROMPT)], PassOptions(), device_rings=device_rings
            )
            declaration.request.begin_pass.memory.in_twin = True
            stream._call.send(declaration.request)
            with pytest.raises(InvalidArgumentError, match="begin_pass.memory.in_twin"):
                declaration.reply.check(10)
