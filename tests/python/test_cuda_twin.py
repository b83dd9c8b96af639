# SPDX-License-Identifier: Apache-2.0
"""Passes of a CUDA stream whose kernels and the server's GPU meet in GPU memory: layer.cu's kernels on the
CPU, the real server over the fake device, whose "GPU memory" both processes map. Answers are those of
messages, in whichever memory they come; who cannot have a twin does without."""

from __future__ import annotations

import contextlib
import logging
import os
import time

import numpy as np
import pytest

import attnd
import emulated_gpu
import live_server
import metrics_text
from attnd.cuda import driver
from attnd.cuda.errors import CudaError
from attnd.errors import InvalidArgumentError
from attnd.pass_memory import PassLayout, PassMemory
from attnd.requests import PassOptions
from attnd.tensors import BF16
from attnd.words import ANSWER_OFFSET
from cases import Case, opened
from emulated_gpu import UUID, EmulatedGpu
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


@pytest.fixture(scope="module")
def one_server():
    with served() as client_and_metrics:
        yield client_and_metrics


@pytest.fixture
def model(one_server, gpu):
    with Model(one_server[0], gpu, SHAPE, 2, dtype="bf16", twin=True) as model:
        yield model


class Twin:
    """The words of a session's twin."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        (self.memory,) = gpu.imported.values()

    def word(self, offset: int) -> int:
        return int.from_bytes(self.memory[offset : offset + 4], "little")

    def set_answer(self, epoch: int) -> None:
        self.memory[ANSWER_OFFSET : ANSWER_OFFSET + 4] = (epoch % (1 << 32)).to_bytes(4, "little")


def decode(client, gpu, model, case, after_layer=lambda: None) -> None:
    """Passes of one token to the end of the case, each compared with one over messages.

    Args:
        after_layer: called in stream order, behind each layer.
    """
    layers = range(case.shape.layers)
    sequence, other = (opened(client, case, PROMPT, complete=False) for _ in range(2))
    with client.decode_session() as messages:
        for at in range(PROMPT, TOKENS):
            tokens = slice(at, at + 1)
            model.write(case, tokens)
            whole = model.session.begin_pass([attnd.Row(sequence, at)], want_lse=True)
            for layer in layers:
                model.layer(layer)
                gpu.then(after_layer)
            step = messages.begin_pass(len(layers), [attnd.Row(other, at)], want_lse=True)
            expected = [
                step.step(case.q[layer, tokens].astype(BF16), *case.sent(layer, tokens))
                for layer in layers
            ]
            whole.finish()
            gpu.synchronize()
            for layer in layers:
                np.testing.assert_array_equal(model.out[layer][:1], expected[layer].out)
                np.testing.assert_array_equal(model.lse[layer][:1], expected[layer].lse)
    assert layer_tokens(client, sequence) == [TOKENS] * len(layers)


def told(metrics: str) -> float:
    """Layers whose answers the GPU has told of by itself."""
    page = metrics_text.read(metrics)
    return page.get("attnd_backend_steps_ahead_total", outcome="told")


def test_kernels_meet_in_gpu_memory(one_server, gpu, model, monkeypatch):
    """Where the GPU tells, it tells there alone; the host tells of the other layers, of each pass's last
    one for one, in the region alone."""
    client, metrics = one_server
    alone = gpu._blocks == 1
    if alone:  # so fast that rings come within a millisecond, also on a machine that is busy
        monkeypatch.setattr(emulated_gpu, "THREADS", 1)
    assert model.session.in_gpu_memory
    assert metrics_text.read(metrics).get("attnd_memory_twin_bytes") == TWIN_BYTES
    before, words, passes = told(metrics), [], 0

    def look() -> None:
        region = model.session._memory.memory
        answer = int.from_bytes(region[ANSWER_OFFSET : ANSWER_OFFSET + 4], "little")
        words.append((model.session._control.done, answer, Twin(gpu).word(ANSWER_OFFSET)))

    rounds = 40 if alone else 1
    while told(metrics) == before and passes < rounds * (TOKENS - PROMPT):
        decode(client, gpu, model, Case.random(TOKENS, SHAPE), look)
        passes += TOKENS - PROMPT
    in_region = sum(done == region != twin for done, region, twin in words)
    in_twin = sum(done == twin != region for done, region, twin in words)
    assert in_region + in_twin == len(words) == passes * SHAPE.layers
    assert in_region >= passes and in_twin == told(metrics) - before
    assert in_twin > 0 or not alone


@pytest.mark.parametrize("reason", ["asked", "none", "full", "ahead", "other", "refused"])
def test_who_has_no_twin_does_without(one_server, library, monkeypatch, caplog, reason):
    """None was asked for, or the server gives none, has no room left, or launches nothing ahead; or the
    client is on another GPU, or its CUDA refuses. The server counts what is beyond its limit."""
    caplog.set_level(logging.INFO, "attnd.cuda")
    case = Case.random(TOKENS, SHAPE)
    gpu = EmulatedGpu(library)
    flags = {
        "none": "--client-device-memory-bytes=0",
        "full": "--client-device-memory-bytes=2MiB",
        "ahead": "--device-launch-ahead=false",
    }
    reasons = {
        "asked": "",
        "none": "client_device_memory_bytes is 0",
        "full": "client_device_memory_bytes: a twin of 2097152 bytes",
        "ahead": "the server's GPU shares no memory",
        "other": "the server's GPU is another one",
        "refused": "import_memory: planted",
    }
    if reason == "other":
        monkeypatch.setattr(gpu, "uuid", lambda: b"another device..")
    if reason == "refused":
        gpu.fails = lambda name: name == "import_memory"
    own = served(flags[reason]) if reason in flags else contextlib.nullcontext(one_server)
    with (
        own as (client, metrics),
        Model(client, EmulatedGpu(library), SHAPE, twin=reason == "full"),
        Model(client, gpu, SHAPE, dtype="bf16", twin=reason != "asked") as model,
    ):
        assert not model.session.in_gpu_memory
        assert reasons[reason] in caplog.text
        assert ("through the host's memory" in caplog.text) == (reason != "asked")
        page = metrics_text.read(metrics)
        refused = page.get("attnd_rejections_total", reason="client_memory")
        assert refused == (reason == "full")
        decode(client, gpu, model, case)
        assert told(metrics) == 0 or reason != "ahead"


def test_sessions_of_clients_ask_for_one(one_server, library, monkeypatch):
    """But where answers are fp32, which no GPU tells of, or the driver cannot say which GPU it is."""
    client, _ = one_server
    gpu = EmulatedGpu(library)
    monkeypatch.setattr(driver, "CudaGpu", lambda device: gpu)
    with client.cuda_session(SHAPE) as session:
        assert session.in_gpu_memory
    with client.cuda_session(SHAPE, output_dtype="fp32") as session:
        assert not session.in_gpu_memory
    with monkeypatch.context() as old:
        old.setattr(gpu, "uuid", lambda: (_ for _ in ()).throw(CudaError("planted")))
        with client.cuda_session(SHAPE) as session:
            assert not session.in_gpu_memory
    assert gpu.imported == {} and gpu.mapped == []


def test_twins_come_and_go(library):
    """With their sessions, also with one that is not closed, whose connection ends; their descriptors
    are closed at once."""
    gpu = EmulatedGpu(library)
    with served("--client-device-memory-bytes=4MiB") as (client, metrics):

        def twin_bytes() -> float:
            return metrics_text.read(metrics).get("attnd_memory_twin_bytes")

        def twins_open() -> int:
            count = 0
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):  # it is closed by now, as listdir's own is
                    count += "fake-device" in os.readlink(f"/proc/self/fd/{number}")
            return count

        for _ in range(3):
            models = [Model(client, gpu, SHAPE, twin=True) for _ in range(3)]
            assert [model.session.in_gpu_memory for model in models] == [True, True, False]
            assert twin_bytes() == 2 * TWIN_BYTES
            assert twins_open() == len(gpu.imported) == 2  # mmap's own
            for model in models:
                model.session.close()
            assert gpu.imported == {}
        model = Model(client, gpu, SHAPE, twin=True)
        model.connection.close()  # as if its process had ended
        deadline = time.monotonic() + 5
        while twin_bytes() > 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert twin_bytes() == 0
        model.session.close()


@pytest.mark.parametrize("failing", ["import_memory", "words", "launch", "synchronize"])
def test_a_session_that_cannot_be_made_leaves_no_twin(one_server, library, failing):
    """But that one is made without a twin if it is that which cannot be imported."""
    client, _ = one_server
    gpu = EmulatedGpu(library)
    gpu.fails = lambda name: name == failing
    if failing == "import_memory":
        Model(client, gpu, SHAPE, twin=True).session.close()
    else:
        with pytest.raises(CudaError, match=failing):
            Model(client, gpu, SHAPE, twin=True)
    assert gpu.imported == {} and gpu.mapped == []


def test_a_row_that_fails_is_told_in_the_region(one_server, gpu, model):
    """From there on the host tells of all layers; the other row's answers are what they are without."""
    client, _ = one_server
    case = Case.random(TOKENS, SHAPE)
    good, bad = (opened(client, case, PROMPT, complete=False) for _ in range(2))
    model.write(case, slice(PROMPT, PROMPT + 1))
    model.write(case, slice(PROMPT, PROMPT + 1), at=1)
    model.k[2][1] = np.nan
    whole = model.session.begin_pass(
        [attnd.Row(good, PROMPT), attnd.Row(bad, PROMPT)], raise_on_row_error=False
    )
    told_in_twin = []
    for layer in range(SHAPE.layers):
        model.layer(layer)
        gpu.then(
            lambda: told_in_twin.append(
                Twin(gpu).word(ANSWER_OFFSET) == model.session._control.done
            )
        )
    whole.finish()
    gpu.synchronize()
    assert not any(told_in_twin[2:])
    assert [row.ok for row in whole.rows] == [True, False] and whole.failed_rows == 1
    for layer in range(SHAPE.layers):
        np.testing.assert_allclose(
            model.out[layer][0].astype(np.float32),
            case.expected(layer, slice(PROMPT, PROMPT + 1))[0][0], rtol=0.05, atol=0.05,
        )
        assert np.isnan(model.out[layer][1]).all() == (layer >= 2)


def test_what_a_failed_pass_leaves_is_none_of_the_next_one_s(one_server, gpu, model):
    """A row that would leave a gap, again and again, and a good pass behind each."""
    client, _ = one_server
    case = Case.random(TOKENS, SHAPE)
    sequence = opened(client, case, PROMPT, complete=False)
    for at in range(PROMPT, PROMPT + 3):
        model.write(case, slice(at, at + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, at + 1)])
        model.layers()
        with pytest.raises(attnd.AttndError):
            whole.finish()
        gpu.synchronize()
        assert all(np.isnan(out[:1].astype(np.float32)).all() for out in model.out)
        good = model.session.begin_pass([attnd.Row(sequence, at)])
        model.layers()
        good.finish()
        gpu.synchronize()
        assert all(np.isfinite(out[:1].astype(np.float32)).all() for out in model.out)


def test_a_word_of_long_ago_is_no_answer(one_server, gpu, model):
    """Epochs go round after 2^32 layers, and the twin's answer word may stand for as long."""
    client, _ = one_server
    case = Case.random(TOKENS, SHAPE)
    sequence = opened(client, case, PROMPT, complete=False)
    tokens = slice(PROMPT, PROMPT + 1)
    model.write(case, tokens)
    whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
    for layer in range(SHAPE.layers):
        gpu.then(lambda layer=layer: Twin(gpu).set_answer(whole.first_epoch + layer))
        model.layer(layer)
    whole.finish()
    gpu.synchronize()
    for layer in range(SHAPE.layers):
        expected = case.expected(layer, tokens)[0]
        found = model.out[layer][:1].astype(np.float32)
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)


def test_layers_that_are_too_large_go_through_the_region(one_server, gpu):
    """Their server's GPU begins when its host says so: 129 tokens have 129 KiB."""
    client, _ = one_server
    count = 129
    case = Case.random(PROMPT + count, SHAPE)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu, SHAPE, count, dtype="bf16", twin=True) as model:
        assert model.session.in_gpu_memory
        for start, tokens in ((PROMPT, 128), (PROMPT + 128, 1)):
            model.write(case, slice(start, start + tokens))
            whole = model.session.begin_pass([attnd.Row(sequence, start, tokens)])
            model.layers()
            whole.finish()
            gpu.synchronize()
            assert Twin(gpu).word(0) == model.session._control.done
        client.truncate_sequence(sequence, PROMPT)
        rung = Twin(gpu).word(0)
        model.write(case, slice(PROMPT, PROMPT + count))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT, count)])
        model.layers()
        whole.finish()
        gpu.synchronize()
        assert Twin(gpu).word(0) == rung
        expected = case.expected(1, slice(PROMPT, PROMPT + count))[0]
        np.testing.assert_allclose(model.out[1].astype(np.float32), expected, rtol=0.05, atol=0.05)


def test_a_pass_in_a_twin_that_is_none_is_refused(one_server):
    client, _ = one_server
    for twin, rings in ((b"", True), (UUID, False)):
        refused(client, twin_gpu=twin, device_rings=rings)


def refused(client, *, twin_gpu: bytes, device_rings: bool) -> None:
    case = Case.random(TOKENS, SHAPE)
    sequence = opened(client, case, PROMPT, complete=False)
    with contextlib.closing(client.memory_socket()) as connection:
        memory = PassMemory(connection, PassLayout(SHAPE, 1), twin_gpu=twin_gpu)
        stream = client.memory_stream()
        with contextlib.closing(stream):
            declaration = stream._declaration(
                memory, [attnd.Row(sequence, PROMPT)], PassOptions(), device_rings=device_rings
            )
            declaration.request.begin_pass.memory.in_twin = True
            stream._call.send(declaration.request)
            with pytest.raises(InvalidArgumentError, match="begin_pass.memory.in_twin"):
                declaration.reply.check(10)


def test_a_uuid_has_sixteen_bytes(one_server):
    client, _ = one_server
    with contextlib.closing(client.memory_socket()) as connection:
        with pytest.raises(InvalidArgumentError, match="twin_gpu_uuid has 15 bytes"):
            connection.register(1, twin_gpu=UUID[1:])
        region = connection.register(1, twin_gpu=UUID)
        assert not os.get_inheritable(region.twin.descriptor)
        region.twin.close()
