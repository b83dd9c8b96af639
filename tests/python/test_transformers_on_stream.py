# SPDX-License-Identifier: Apache-2.0
"""attach(memory=True) of a model on a GPU: steps are kernels of its stream. Without a GPU: attnd.cuda's
kernels on the CPU, over PyTorch's CPU tensors. The tests of generate() and of random histories run
once more that way; behind them, what is the stream's own."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
import types
import warnings

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import attnd
import live_server
import transformers_models
from attnd.cuda import driver
from attnd.cuda.errors import CudaError
from attnd.cuda.session import StreamSession
from attnd.cuda.sharing import TimeSlicesWarning
from attnd.transformers import passes, regions, streams
from attnd.transformers.stats import StatsCounter
from conftest import require_program
from emulated_fixtures import library
from emulated_gpu import EmulatedGpu
from test_transformers import (  # noqa: F401
    test_a_batch_with_padding_on_the_left,
    test_a_prompt_of_one_token,
    test_a_scale_of_its_own,
    test_a_second_and_a_third_turn,
    test_an_assistant_model,
    test_one_row,
    test_prompt_lookup,
    test_three_beams,
)
from test_transformers_memory import turns
from test_transformers_memory import (  # noqa: F401
    test_a_pass_that_is_given_up_leaves_nothing,
    test_a_row_that_fails,
    test_answers_stay_as_they_were,
    test_caches_of_one_model_on_two_threads,
)
from test_transformers_random import test_a_random_history  # noqa: F401
from torch_on_emulated import model_gpu
from transformers_models import (
    TINY,
    attached,
    generate,
    load,
    local,
    local_of,
    prompt,
    tiny,
    torch,
)
from transformers_sequences import assert_none_soon


@pytest.fixture(params=(TINY[0],))
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def target():
    require_program()
    with live_server.running("--allow-client-memory", "--reply-timeout-s=2") as (target, _):
        yield target


@pytest.fixture
def attnd_target(target):
    return target


@pytest.fixture(autouse=True)
def on_stream(monkeypatch, library):
    """The models' GPU. No answer may come through memory another way: sessions count theirs."""
    where = model_gpu(library)
    monkeypatch.setattr(streams, "gpu_of", lambda model: where)
    monkeypatch.setitem(transformers_models.attach_options, "memory", True)
    layers, answers = [], []
    layer, add = StreamSession.layer, StatsCounter.add
    monkeypatch.setattr(
        StreamSession, "layer", lambda *args, **kw: layers.append(1) or layer(*args, **kw)
    )
    monkeypatch.setattr(
        StatsCounter, "add", lambda *args, **kw: answers.append(1) or add(*args, **kw)
    )
    yield where.gpu, layers, answers
    assert where.gpu.mapped == []


def all_on_stream(watched) -> bool:
    _, layers, answers = watched
    return 0 < len(layers) == len(answers)


def test_every_answer_is_the_streams(target, on_stream):
    """Three turns of a padded batch, and their statistics."""
    model, ids, turn = load(TINY[0]), prompt(TINY[0], 3, 60), prompt(TINY[0], 3, 20)
    expected = list(turns(model, transformers_models.DynamicCache(), ids, turn))
    with attached(model, target) as attachment:
        for number, got in enumerate(turns(model, attachment.new_cache(), ids, turn)):
            assert torch.equal(got, expected[number])
        stats = attachment.stats
        assert stats.answers == stats.through_memory and stats.server_s > 0
        assert stats.read_share == 1
    assert all_on_stream(on_stream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_elements(target, on_stream, dtype):
    """The same answers as through memory, which the kernels only carry."""
    model, ids = tiny(TINY[1]).to(dtype), prompt(TINY[1], 2, 40)
    with attached(model, target) as attachment:
        got = generate(model, ids, attachment.new_cache())
        attachment._server.streams.serves = lambda *args: False
        copied = generate(model, ids, attachment.new_cache())
    assert torch.equal(got.sequences, copied.sequences)
    assert all(torch.equal(*logits) for logits in zip(got.logits, copied.logits))
    layers, answers = map(len, on_stream[1:])
    assert layers == answers // 2


def test_a_batch_that_grows_has_a_larger_session(target, on_stream):
    """And one that shrinks keeps it."""
    model = load(TINY[0])
    with attached(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        generate(model, prompt(TINY[0], 2, 20), cache)
        first = cache._batch._passes._writer
        cache.batch_select_indices(torch.tensor([0, 1, 1, 0, 1]))
        model(prompt(TINY[0], 5, 1), past_key_values=cache)
        grown = cache._batch._passes._writer
        assert grown is not first and grown.query_tokens_max == 8
        cache.batch_select_indices(torch.tensor([2]))
        model(prompt(TINY[0], 1, 1), past_key_values=cache)
        assert cache._batch._passes._writer is grown
    assert all_on_stream(on_stream)


def test_sessions_go_with_their_caches(target, on_stream):
    gpu = on_stream[0]
    model = load(TINY[0])
    with attached(model, target) as attachment:
        caches = [attachment.new_cache() for _ in range(3)]
        for cache in caches:
            generate(model, prompt(TINY[0], 1, 20), cache)
        assert len(gpu.mapped) == 6  # a region and a page of words each
        caches.pop().close()
        assert len(gpu.mapped) == 4
        del cache
        caches.pop()
        assert_none_soon(lambda: len(gpu.mapped) - 2)
    assert gpu.mapped == []


def test_without_room_for_a_session_tensors_are_copied(on_stream, caplog, monkeypatch):
    """The server has room for one region, which the first cache holds; the second one's steps are
    messages."""
    require_program()
    model, ids = load(TINY[0]), prompt(TINY[0], 3, 30)
    expected = local(model, ids).sequences
    asked, ask = [], streams.Streams.open
    monkeypatch.setattr(streams.Streams, "open", lambda *args: asked.append(1) or ask(*args))
    with live_server.running("--allow-client-memory", "--max-memory-regions=1") as (target, _):
        with attached(model, target) as attachment:
            first, second = attachment.new_cache(), attachment.new_cache()
            for cache in (first, second):
                assert torch.equal(generate(model, ids, cache).sequences, expected)
            assert attachment.stats.through_memory == attachment.stats.answers // 2
    layers, answers = len(on_stream[1]), len(on_stream[2])
    assert layers == answers // 2
    assert len(asked) == 2  # not in each pass of the second one
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "max_memory_regions" in warnings[0].getMessage()


def test_a_gpu_that_refuses_the_region(target, on_stream, caplog):
    """Where CUDA does not map it, tensors are copied."""
    gpu = on_stream[0]
    gpu.fails = lambda name: name == "map"
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        got = generate(model, ids, attachment.new_cache()).sequences
        assert torch.equal(got, local_of(model, ids))
        assert attachment.stats.through_memory == attachment.stats.answers
    assert not on_stream[1]
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "planted" in warning.getMessage()


def test_a_model_that_was_moved_is_copied(target, on_stream, monkeypatch):
    """Its tensors are no longer the GPU's that it was attached on."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    moved = torch.device("meta")
    monkeypatch.setattr(
        streams, "gpu_of", lambda model: streams.ModelGpu(moved, on_stream[0])
    )
    with attached(model, target) as attachment:
        assert torch.equal(
            generate(model, ids, attachment.new_cache()).sequences, local_of(model, ids)
        )
        assert attachment.stats.through_memory == attachment.stats.answers
    assert not on_stream[1]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_ends_in_a_pass(tmp_path, on_stream, end):
    """The same call of the model raises: no token is made of NaN."""
    require_program()
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with live_server.to_be_ended(tmp_path, "--allow-client-memory") as (target, server):

        def end_server(*_) -> None:
            live_server.stop(server)
            if end == signal.SIGKILL:
                server.kill()

        with attached(model, target, timeout_s=1) as attachment, torch.no_grad():
            cache = attachment.new_cache()
            generate(model, ids, cache)
            expected = (
                attnd.DeadlineExceededError if end == signal.SIGSTOP else attnd.UnavailableError
            )
            with model.model.layers[1].register_forward_pre_hook(end_server):
                with pytest.raises(expected):
                    model(ids[:, -1:], past_key_values=cache)
            with pytest.raises(ValueError, match="of no more use"):
                cache.fork()
            server.kill()


def test_tokens_whose_heads_lie_apart():
    """As of a query that a model keeps by heads; a session's kernels take whole tokens."""
    by_heads = torch.arange(24.0).view(1, 2, 3, 4)  # [rows, heads, new, dim]
    tokens = by_heads.transpose(1, 2).reshape(3, 2, 4)
    assert tokens.stride(1) != 4
    assert passes._dense(tokens).is_contiguous() and torch.equal(passes._dense(tokens), tokens)


def test_time_slices_are_warned_of(target, on_stream, monkeypatch):
    """Where the program attaches the model; the host copies then."""
    ask = attnd.Client.get_server_info
    monkeypatch.setattr(
        attnd.Client,
        "get_server_info",
        lambda client: dataclasses.replace(ask(client), gpu_sharing="time-slices"),
    )
    with pytest.warns(TimeSlicesWarning, match="does not run under MPS") as warned:
        attachment = attnd.transformers.attach(load(TINY[0]), target, memory=True)
    with attachment:
        generate(load(TINY[0]), prompt(TINY[0], 1, 20), attachment.new_cache())
        assert attachment.stats.through_memory == attachment.stats.answers > 0
    assert [warning.filename for warning in warned] == [__file__]
    assert not on_stream[1]


@pytest.mark.parametrize("slow", [True, False])
def test_a_round_trip_decides(target, on_stream, monkeypatch, slow):
    """Whatever the pipes say; a warning that is an error leaves no connection."""
    ask, measured = attnd.Client.get_server_info, []
    monkeypatch.setattr(
        attnd.Client,
        "get_server_info",
        lambda client: dataclasses.replace(ask(client), gpu_sharing="time-slices"),
    )

    def measure(client, gpu):
        measured.append(gpu)
        return attnd.RoundTrip(2000.0 if slow else 20.0, slow, "Mend it" if slow else "", 2100.0)

    monkeypatch.setattr(attnd.Client, "measure_round_trip", measure)
    closed = []
    close = regions.Regions.close
    monkeypatch.setattr(
        regions.Regions, "close", lambda self: closed.append(self) or close(self)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if slow:
            with pytest.raises(TimeSlicesWarning, match="Mend it. A kernel .* waited 2100 us"):
                attnd.transformers.attach(load(TINY[0]), target, memory=True)
            assert len(closed) == 1
        else:
            with attached(load(TINY[0]), target) as attachment:
                generate(load(TINY[0]), prompt(TINY[0], 1, 20), attachment.new_cache())
            assert all_on_stream(on_stream)
    assert measured == [on_stream[0]]


def test_a_long_pass_leaves_the_session_as_it_was(target, on_stream, monkeypatch):
    """It has a region for its own time only."""
    monkeypatch.setattr(streams, "QUERY_TOKENS_MAX", 8)
    model, ids, turn = load(TINY[0]), prompt(TINY[0], 1, 60), prompt(TINY[0], 1, 20)
    expected = list(turns(model, transformers_models.DynamicCache(), ids, turn))
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        for number, got in enumerate(turns(model, cache, ids, turn)):
            assert torch.equal(got, expected[number])
            assert cache._batch._passes._writer.query_tokens_max == 1
        assert attachment.stats.through_memory == attachment.stats.answers
    assert len(on_stream[1]) < len(on_stream[2])


def test_a_larger_session_that_is_refused_leaves_the_smaller_one(target, on_stream, monkeypatch):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 40)
    with attached(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        generate(model, ids, cache)
        session, layers = cache._batch._passes._writer, len(on_stream[1])
        gpu = on_stream[0]
        gpu.fails = lambda name: name == "map"
        cache.batch_select_indices(torch.tensor([0, 0]))
        model(ids[:, -1:].repeat(2, 1), past_key_values=cache)
        assert len(on_stream[1]) == layers
        cache.batch_select_indices(torch.tensor([0]))
        gpu.fails = lambda name: False
        model(ids[:, -1:], past_key_values=cache)
        assert len(on_stream[1]) > layers
        assert session is not cache._batch._passes._writer  # the two rows went another way


def test_caches_share_the_attachments_connection(target, on_stream):
    model = load(TINY[0])
    with attached(model, target) as attachment:
        caches = [attachment.new_cache() for _ in range(3)]
        for cache in caches:
            generate(model, prompt(TINY[0], 1, 20), cache)
        assert len(attachment._server.regions._socket.list_regions()) == 3
        caches[0].close()
        assert len(attachment._server.regions._socket.list_regions()) == 2


def test_the_device_of_a_model(monkeypatch, caplog):
    """One GPU, and CUDA's consent, or none."""
    monkeypatch.undo()

    def model_on(*devices):
        parameters = [types.SimpleNamespace(device=torch.device(device)) for device in devices]
        return types.SimpleNamespace(parameters=lambda: iter(parameters))

    monkeypatch.setattr(driver, "CudaGpu", lambda device: f"GPU of {device}")
    found = streams.gpu_of(model_on("cuda:1", "cuda:1"))
    assert found == streams.ModelGpu(torch.device("cuda:1"), "GPU of cuda:1")
    for devices in (("cpu",), ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ()):
        assert streams.gpu_of(model_on(*devices)) is None

    def refuse(device):
        raise CudaError("planted")

    monkeypatch.setattr(driver, "CudaGpu", refuse)
    assert streams.gpu_of(model_on("cuda:0")) is None
    assert "planted" in caplog.text


def test_regions_of_sessions_have_twins(library, monkeypatch):
    """Which the server is asked for with the GPU's UUID, for answers in bf16."""
    asked = []

    def register(*_, twin_gpu):
        asked.append(twin_gpu)
        return types.SimpleNamespace(region_id=len(asked))

    monkeypatch.setattr(regions, "PassMemory", register)
    gpu = EmulatedGpu(library)
    shared = object.__new__(regions.Regions)
    shared._lock, shared._closed = threading.Lock(), False
    shared._socket = types.SimpleNamespace(ended=lambda: False)
    shared._lent = set()
    for dtype, expected in (("bf16", gpu.uuid()), ("fp32", b"")):
        shape = attnd.ModelShape(2, 4, 2, 64, dtype=dtype)
        shared.reserve(shape, 1, gpu)
        assert asked[-1] == expected
