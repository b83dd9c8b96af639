# SPDX-License-Identifier: Apache-2.0
"""Passes in which a CUDA stream takes part, without a GPU: layer.cu's own kernels on the CPU, a thread
as the stream, the real server. Answers are those of messages, bit for bit, in replays of one graph;
whatever fails, the stream comes to its end, `out` is NaN, and the host is told why."""

from __future__ import annotations

import ctypes
import signal
import time

import numpy as np
import pytest

import attnd
import live_server
from attnd.cuda import structs
from attnd.cuda.errors import CudaError
from attnd.cuda.structs import Failure
from attnd.memory_stream import DEVICE_PASSES_MAX
from cases import SHAPE, Case, opened
from conftest import require_program
from emulated_fixtures import PROMPT, TOKENS, client, gpu, layer_tokens, library, target
from emulated_model import Model

SHAPES = {
    "fp32": SHAPE,
    "bf16": attnd.ModelShape(layers=3, query_heads=4, kv_heads=1, head_dim=64, dtype="bf16"),
    "latent": attnd.ModelShape(
        layers=2, query_heads=4, kv_heads=1, head_dim=96, value_dim=64, dtype="fp32", latent=True
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_those_of_messages(client, gpu, name):
    """One graph for passes of one and more tokens: those without a row are zero."""
    case = Case.random(TOKENS, SHAPES[name])
    sequence, twin = (opened(client, case, PROMPT, complete=False) for _ in range(2))
    layers = range(case.shape.layers)
    with Model(client, gpu, case.shape, 3) as model, client.decode_session() as messages:
        graph = model.graph()
        start = PROMPT
        for count in (3, 1, 2, 1, 1):
            tokens = slice(start, start + count)
            model.write(case, tokens)
            rows = (attnd.Row(sequence, start, count), attnd.Row(twin, start, count))
            whole = model.session.begin_pass([rows[0]], want_lse=True)
            gpu.replay(graph)
            other = messages.begin_pass(len(layers), [rows[1]], want_lse=True)
            expected = [
                other.step(case.q[layer, tokens], *case.sent(layer, tokens)) for layer in layers
            ]
            whole.finish()
            gpu.synchronize()
            for layer in layers:
                np.testing.assert_array_equal(model.out[layer][:count], expected[layer].out)
                np.testing.assert_array_equal(model.lse[layer][:count], expected[layer].lse)
                assert not model.out[layer][count:].any() and not model.lse[layer][count:].any()
            assert model.session.invalid[0] == Failure.NONE
            assert whole.rows[0].stats.zone_tokens == expected[-1].rows[0].stats.zone_tokens > 0
            assert whole.engine_us > 0 and whole.complete
            start += count
    assert layer_tokens(client, sequence) == [start] * len(layers)


def test_the_next_pass_is_begun_while_the_stream_works(client, gpu):
    """finish waits for the last layer alone, and not for what the stream does behind it."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        graph = model.graph()
        for at in range(PROMPT, TOKENS):
            model.gpu.then(lambda at=at: model.write(case, slice(at, at + 1)))
            whole = model.session.begin_pass([attnd.Row(sequence, at)])
            gpu.replay(graph)
            gpu.then(lambda: time.sleep(0.02))
            whole.finish()
            assert gpu.busy(0)
        gpu.synchronize()
        expected, _ = case.expected(1, slice(TOKENS - 1, TOKENS))
        np.testing.assert_allclose(model.out[1], expected, rtol=2e-5, atol=2e-5)
    assert layer_tokens(client, sequence) == [TOKENS] * 2


def test_tokens_may_lie_apart(client, gpu):
    """Slices of a product for q, k and v together."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    width = (SHAPE.query_heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim
    qkv = np.zeros((2, width), np.float32)
    sizes = np.cumsum([SHAPE.query_heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim])
    q, k, v = (part.reshape(2, -1, SHAPE.head_dim) for part in np.split(qkv, sizes, axis=1))
    assert all(np.shares_memory(part, qkv) for part in (q, k, v))
    tokens = slice(PROMPT, PROMPT + 2)
    with Model(client, gpu, tokens=2, lse=False) as model:
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT, 2)])
        for layer in range(SHAPE.layers):

            def write(layer=layer):
                q[:], k[:], v[:] = case.q[layer, tokens], *case.sent(layer, tokens)

            gpu.then(write)
            model.session.layer(layer, q, k, v, model.out[layer])
        whole.finish()
        gpu.synchronize()
        for layer in range(SHAPE.layers):
            expected, _ = case.expected(layer, tokens)
            np.testing.assert_allclose(model.out[layer], expected, rtol=2e-5, atol=2e-5)


def test_rows_with_queries_alone(client, gpu):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT)
    with Model(client, gpu, tokens=2, lse=False) as model:
        model.write(case, slice(PROMPT, PROMPT + 2))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT, 2, query_only=True)])
        for layer in range(SHAPE.layers):
            model.session.layer(layer, model.q[layer], None, None, model.out[layer])
        whole.finish()
        assert np.isfinite(model.out[1]).all() and model.out[1].all()
    assert layer_tokens(client, sequence) == [PROMPT] * 2


def test_lse_is_never_an_earlier_pass_s(client, gpu):
    """One graph, with an lse, for passes that want it and passes that do not."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu, tokens=3) as model:
        graph = model.graph()
        start = PROMPT
        for count, want_lse in ((3, True), (2, False), (1, False), (3, True)):
            model.write(case, slice(start, start + count))
            whole = model.session.begin_pass([attnd.Row(sequence, start, count)], want_lse=want_lse)
            gpu.replay(graph)
            whole.finish()
            gpu.synchronize()
            for lse in model.lse:
                assert (np.isfinite if want_lse else np.isnan)(lse[:count]).all()
                assert not lse[count:].any()
            assert np.isfinite(model.out).all()
            start += count


def test_a_pass_that_the_server_refuses_leaves_its_session(client, gpu):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    tokens = slice(PROMPT, PROMPT + 1)
    with Model(client, gpu) as model:
        graph = model.graph()
        refused = (
            (0, {"pass_deadline_us": 1}, attnd.DeadlineExceededError),
            # Of another region, whose words are not there for the server: it writes none.
            (1, {}, attnd.NotFoundError),
        )
        for other_region, options, error in refused:
            for attempt in range(3):
                model.write(case, tokens)
                gpu.then(lambda attempt=attempt: time.sleep(0.03 * attempt))  # refused meanwhile
                model.session._memory.region_id += other_region
                whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)], **options)
                model.session._memory.region_id -= other_region
                gpu.replay(graph)
                with pytest.raises(error):
                    whole.finish()
                gpu.synchronize()
                assert model.all_nan() and model.session.invalid[0] != Failure.NONE
                with pytest.raises(ValueError, match="finished"):
                    whole.finish()
        assert layer_tokens(client, sequence) == [PROMPT] * 2
        model.write(case, tokens)
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        gpu.replay(graph)
        whole.finish()
        assert np.isfinite(model.out).all() and model.session.invalid[0] == Failure.NONE
    assert layer_tokens(client, sequence) == [PROMPT + 1] * 2


def test_a_pass_that_is_given_up_in_its_middle(client, gpu):
    """By a server that waits for its next ring in vain: later layers get NaN, and do not ring."""
    case = Case.random(TOKENS, SHAPES["bf16"])
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu, case.shape) as model:
        model.write(case, slice(PROMPT, PROMPT + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        model.layer(0)
        gpu.then(lambda: time.sleep(2.5))  # longer than --reply-timeout-s
        model.layer(1)
        model.layer(2)
        with pytest.raises(attnd.DeadlineExceededError, match="not rung for in time"):
            whole.finish()
        gpu.synchronize()
        assert np.isfinite(model.out[0]).all() and model.all_nan(1)
        ring = int.from_bytes(model.session._memory.memory[:4], "little")
        assert ring == whole.first_epoch + 1
        assert layer_tokens(client, sequence) == [PROMPT] * 3
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        model.layers()
        whole.finish()


def test_a_row_that_fails(client, gpu):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu, tokens=2) as model:
        graph = model.graph()
        for raises in (True, False):
            model.write(case, slice(PROMPT, PROMPT + 1))
            model.write(case, slice(PROMPT, PROMPT + 1), at=1)
            rows = [attnd.Row(sequence, PROMPT), attnd.Row(999, 0)]
            whole = model.session.begin_pass(rows, want_lse=True, raise_on_row_error=raises)
            gpu.replay(graph)
            if raises:
                with pytest.raises(attnd.RowError, match="sequence_id") as caught:
                    whole.finish()
                assert caught.value.row == 1
                np.testing.assert_array_equal(caught.value.result.out, model.out[1])
            else:
                whole.finish()
            assert [row.ok for row in whole.rows] == [True, False] and whole.failed_rows == 1
            for answer in (model.out[0], model.lse[0]):
                assert np.isnan(answer[1]).all() and np.isfinite(answer[0]).all()
            assert model.session.invalid[0] == Failure.NONE  # the other row is of use


def test_layers_outside_a_pass_wait_for_nothing(client, gpu):
    """A warm-up, and a graph that is replayed once too often."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        model.layers()
        gpu.synchronize()
        assert model.all_nan()
        graph = model.graph()
        model.write(case, slice(PROMPT, PROMPT + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        gpu.replay(graph)
        whole.finish()
        gpu.synchronize()
        assert np.isfinite(model.out).all()
        gpu.replay(graph)
        gpu.synchronize()
        assert model.all_nan() and model.session.invalid[0] == Failure.NO_PASS
        model.write(case, slice(PROMPT + 1, PROMPT + 2))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT + 1)])
        gpu.replay(graph)
        whole.finish()
        assert np.isfinite(model.out).all()
    assert layer_tokens(client, sequence) == [PROMPT + 2] * 2


def test_layers_behind_a_pass_are_not_its_own(client, gpu):
    """finish says the same of a pass whose graph was replayed twice: its own failure, or none."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        graph = model.graph()
        for at in (PROMPT, PROMPT + 1):
            model.write(case, slice(at, at + 1))
            whole = model.session.begin_pass([attnd.Row(sequence, at)])
            for _ in range(2):
                gpu.replay(graph)
            gpu.synchronize()
            assert model.session.invalid[0] == Failure.NO_PASS
            whole.finish()
            assert whole.complete and whole.rows[0].ok
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT + 2)], pass_deadline_us=1)
        for _ in range(2):
            gpu.replay(graph)
        gpu.synchronize()
        assert model.session.invalid[0] not in (Failure.NONE, Failure.NO_PASS)
        with pytest.raises(attnd.DeadlineExceededError):
            whole.finish()
    assert layer_tokens(client, sequence) == [PROMPT + 2] * 2


def test_invalid_tells_of_the_newest_pass_in_stream_order(client, gpu):
    """A copy of it by the stream itself, as a kernel of the model's would read it."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu, tokens=2) as model:
        seen = []

        def look() -> None:
            gpu.then(lambda: seen.append(Failure(model.session.invalid[0])))

        def decode(*rows, **options) -> None:
            whole = model.session.begin_pass(rows, raise_on_row_error=False, **options)
            look()
            model.layers()
            look()
            if options:
                with pytest.raises(attnd.DeadlineExceededError):
                    whole.finish()
            else:
                whole.finish()

        look()
        decode(attnd.Row(sequence, PROMPT), attnd.Row(999, 0))  # a row that fails by itself
        model.layer(0)  # outside a pass
        look()
        decode(attnd.Row(sequence, PROMPT + 1), pass_deadline_us=1)
        model.layer(0)  # outside a pass, behind one that has failed
        look()
        decode(attnd.Row(sequence, PROMPT + 1))
        gpu.synchronize()
        before, *first, outside, begun, failed, behind, last_begun, last = seen
        assert before != Failure.NONE and first == [Failure.NONE] * 2
        assert outside == Failure.NO_PASS and begun == last_begun == last == Failure.NONE
        assert failed == behind and failed not in (Failure.NONE, Failure.NO_PASS)


def test_layers_that_do_not_fit_the_pass(client, gpu):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)

    def fails(words, enqueue, rows=None):
        with Model(client, gpu, tokens=2) as model:
            whole = model.session.begin_pass(rows or [attnd.Row(sequence, PROMPT)])
            enqueue(model)
            with pytest.raises(ValueError, match=words):
                whole.finish()
            gpu.synchronize()
            # Nobody rings any more: the session's stream has ended, as the server's pass has.
            with pytest.raises(attnd.AttndError, match="given up"):
                model.session.begin_pass([attnd.Row(sequence, PROMPT)])

    fails("layer 1 was not the pass's next", lambda model: (model.layer(1), model.layer(0)))
    fails("with 1 of the pass's 2 layers", lambda model: model.layer(0))
    fails("with 0 of the pass's 2 layers", lambda model: None)

    def short(model):
        for layer in range(SHAPE.layers):
            tensors = (array[layer][:1] for array in (model.q, model.k, model.v, model.out))
            model.session.layer(layer, *tensors)

    fails("layer 0 have fewer tokens", short, [attnd.Row(sequence, PROMPT, 2)])


def test_what_cannot_work_is_refused(client, gpu):
    with Model(client, gpu, tokens=2) as model:
        session = model.session
        q, k, v, out, lse = (
            array[0] for array in (model.q, model.k, model.v, model.out, model.lse)
        )
        wide = np.zeros((2, SHAPE.query_heads, SHAPE.head_dim + 1), np.float32)
        for arguments, words in (
            ((2, q, k, v, out), "layer is 2; allowed are 0..1"),
            ((0, q[:, :2], k, v, out), r"q is float32 \[2, 2, 32\]; allowed is float32 \[1..2, 4"),
            ((0, q.astype(np.float16), k, v, out), "q is float16"),
            ((0, q, k, v[:1], out), "k 2, v 1"),
            ((0, q, k, v, out[:1]), "tokens of q 2"),
            ((0, q, k, None, out), "k and v come together"),
            ((0, wide[:, :, 1:], k, v, out), "q has strides"),
            ((0, q[:, :, ::-1], k, v, out), "q has strides"),
            ((0, [1], k, v, out), "no tensor"),
            ((0, q, k, v, out, lse[:1]), r"lse is float32 \[1, 4\]; allowed is float32 \[2, 4\]"),
            ((0, q, k, v, out, lse[:, ::-1]), "lse has strides"),
        ):
            with pytest.raises(ValueError, match=words):
                session.layer(*arguments)
        for options in ({"timeout_s": 0}, {"timeout_s": 11}):
            with pytest.raises(ValueError, match="timeout_s is"):
                session.begin_pass([attnd.Row(1, 0)], **options)
        gpu.captured = []
        with pytest.raises(ValueError, match="captured"):
            session.begin_pass([attnd.Row(1, 0)])
        gpu.captured = None
    with pytest.raises(ValueError, match="closed"):
        session.layer(0, q, k, v, out)
    with pytest.raises(ValueError, match="closed"):
        session.begin_pass([attnd.Row(1, 0)])


def test_a_launch_that_fails_leaves_the_stream_as_it_was(client, gpu):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        gpu.fails = lambda name: name == "launch"
        for _ in range(2):
            with pytest.raises(CudaError, match="planted"):
                model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        gpu.fails = lambda name: False
        model.write(case, slice(PROMPT, PROMPT + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        model.layers()
        whole.finish()
    assert layer_tokens(client, sequence) == [PROMPT + 1] * 2


def test_a_stream_that_is_held_up_loses_its_pass(client, gpu):
    """By a model that computes for longer than it may."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        model.write(case, slice(PROMPT, PROMPT + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)], timeout_s=0.2)
        model.layer(0)
        gpu.then(lambda: time.sleep(1))
        model.layer(1)
        start = time.monotonic()
        with pytest.raises(attnd.DeadlineExceededError, match="behind layer 1"):
            whole.finish()
        assert time.monotonic() - start < 1.5
        gpu.synchronize()
        assert model.all_nan(1)
        with pytest.raises(attnd.DeadlineExceededError):
            model.session.begin_pass([attnd.Row(sequence, PROMPT)])


def test_a_session_is_closed_under_way(client, gpu):
    """Its stream goes on, to the end of what was enqueued."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        model.layer(0)
        gpu.then(lambda: time.sleep(0.3))
        model.layer(1)
    assert model.all_nan(1)
    with pytest.raises(ValueError, match="closed"):
        whole.finish()
    due = time.monotonic() + 5
    while layer_tokens(client, sequence) != [PROMPT] * 2:
        assert time.monotonic() < due
        time.sleep(0.01)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_server_that_ends_is_noticed(tmp_path, gpu, end):
    require_program()
    case = Case.random(TOKENS)
    with live_server.to_be_ended(tmp_path, "--allow-client-memory") as (target, server):
        with attnd.Client(target) as client:
            sequence = opened(client, case, PROMPT, complete=False)
            model = Model(client, gpu, timeout_s=1)
            model.write(case, slice(PROMPT, PROMPT + 1))
            whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
            model.layer(0)
            gpu.synchronize()
            if end == signal.SIGSTOP:
                live_server.stop(server)
            else:
                server.send_signal(end)
                time.sleep(0.2)
            model.layer(1)
            start = time.monotonic()
            expected = (
                attnd.DeadlineExceededError if end == signal.SIGSTOP else attnd.UnavailableError
            )
            with pytest.raises(expected):
                whole.finish()
            assert time.monotonic() - start < 2
            gpu.synchronize()
            assert np.isfinite(model.out[0]).all() and model.all_nan(1)
            # One that shuts down gives the pass up in its words, others cannot.
            told = Failure.OVER if end == signal.SIGTERM else Failure.ABORTED
            assert model.session.invalid[0] == told
            with pytest.raises(expected):
                whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
                model.layers()
                whole.finish()
            model.session.close()


def test_structs_are_those_of_the_kernels(library):
    sizes = [library.size_of(index) for index in range(6)]
    assert sizes == [
        ctypes.sizeof(structs.Layer),
        ctypes.sizeof(structs.Begin),
        ctypes.sizeof(structs.Control),
        4 * structs.PASS_WORDS,
        4 * structs.FAILURE_WORD,
        DEVICE_PASSES_MAX * ctypes.sizeof(structs.PassEnd),
    ]


def test_a_machine_without_cuda_is_told(client):
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        return
    with pytest.raises(CudaError, match="PyTorch"):
        client.cuda_session(SHAPE)
