# SPDX-License-Identifier: Apache-2.0
"""attach(memory=True): what is shared, lent and freed, what goes as messages in its place, and what
becomes of it when something fails. The real server, on sockets of its own."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import subprocess
import threading
import time

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.cache_utils import DynamicCache

import attnd
import live_server
from attnd.memory_stream import MemoryPass
from attnd.model import ModelShape
from attnd.transformers.regions import Regions
from conftest import require_program
from transformers_models import TINY, attached, generate, load, local, prompt, tiny, torch
from transformers_sequences import assert_none_soon

# Of attach and detach. 1,000 take a minute.
ATTACHMENTS = int(os.environ.get("ATTND_TEST_ATTACHMENTS", "40"))
LAYERS = 3


@pytest.fixture(scope="module")
def target():
    require_program()
    with live_server.running("--allow-client-memory", "--reply-timeout-s=2") as (target, _):
        yield target


def through_memory(model, target: str, **options):
    return attached(model, target, memory=True, **options)


def regions(attachment) -> list:
    """The attachment's, as the server has them."""
    return attachment._server.regions._socket.list_regions()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_tensors_of_a_pass_are_its_memory(target, dtype):
    """Both ways, in every element type; they stay readable when the session is closed."""
    shape = ModelShape(layers=1, query_heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    with attnd.Client(target) as client:
        sequence = client.open_sequence(attnd.Model("tensors", shape), policy="dense").sequence_id
        generator = torch.Generator().manual_seed(1)
        with client.memory_session(shape, query_tokens_max=2) as session:
            whole = session.begin_pass([attnd.Row(sequence, 0, 2)], want_lse=True)
            arrays = (whole.q, whole.k, whole.v, whole.out)
            q, k, v, out = map(attnd.as_torch, arrays)
            for tensor, array in zip((q, k, v, out), arrays):
                assert tensor.data_ptr() == array.ctypes.data
                assert tensor.shape == array.shape
                assert str(tensor.dtype) == f"torch.{array.dtype}"
            for tensor in (q, k, v):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            whole.step()
            lse = attnd.as_torch(whole.lse)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(part.float().transpose(0, 1) for part in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        assert (out.float() - expected).abs().max() < (1e-5 if dtype == "fp32" else 2e-2)
        logits = (q[0].float() * k[0].float().repeat_interleave(2, 0)).sum(-1) / 4
        assert (lse[0] - logits).abs().max() < 1e-4
        client.close_sequence(sequence)


def test_many_caches_share_one_region(target):
    """Which grows with the batch and goes with the attachment; a half-done pass has its own."""
    model = load(TINY[0])
    with through_memory(model, target) as attachment, torch.no_grad():
        assert regions(attachment) == []
        caches = [attachment.new_cache() for _ in range(3)]
        for cache in caches:
            generate(model, prompt(TINY[0], 1, 20), cache)
        (first,) = regions(attachment)
        batch = attachment.new_cache()
        generate(model, prompt(TINY[0], 5, 20), batch)
        (grown,) = regions(attachment)
        assert grown.region_id != first.region_id
        for cache in caches:
            model(prompt(TINY[0], 1, 1), past_key_values=cache)
        assert [region.region_id for region in regions(attachment)] == [grown.region_id]
        stop = model.model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(prompt(TINY[0], 5, 1), past_key_values=batch)
        stop.remove()
        model(prompt(TINY[0], 1, 1), past_key_values=caches[0])
        assert len(regions(attachment)) == 2
        batch.close()  # what the pass may still write to is nobody's
        assert len(regions(attachment)) == 1
        kept = attachment._server.regions
    with pytest.raises(ValueError, match="the attachment is closed"):
        kept.borrow(ModelShape(LAYERS, 4, 2, 16, dtype="fp32"), 1, 1)


class Waited:
    """A reply on its way."""

    def __init__(self) -> None:
        self.times = 0

    def get(self, timeout_s: float) -> None:
        self.times += 1


def test_the_reply_to_the_pass_before_is_waited_for(target):
    """By the next pass over the same region, of another cache, and by a larger region: until then
    the server has it."""
    model = load(TINY[0])
    with through_memory(model, target) as attachment:
        generate(model, prompt(TINY[0], 1, 20), attachment.new_cache())
        for rows in (1, 4):
            (memory,) = attachment._server.regions._free
            memory.reply = waited = Waited()
            generate(model, prompt(TINY[0], rows, 20), attachment.new_cache(), max_new_tokens=2)
            assert waited.times == 1


def test_a_pass_that_is_given_up_leaves_nothing(target):
    """The model fails in its second layer; the first one's token goes, and other caches go on."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    expected = local(model, ids)
    with attnd.Client(target, tenant="test") as client:
        with through_memory(model, target) as attachment, torch.no_grad():
            cache = attachment.new_cache()
            generate(model, ids, cache)
            tokens = [info.layer_tokens for info in client.list_sequences()]
            with model.model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0):
                with pytest.raises(ZeroDivisionError):
                    model(ids[:, -1:], past_key_values=cache)
            with pytest.raises(ValueError, match="attended in 1 of 3 layers"):
                model(ids[:, -1:], past_key_values=cache)
            cache._batch._passes.close()
            due = time.monotonic() + 5
            while [info.layer_tokens for info in client.list_sequences()] != tokens:
                assert time.monotonic() < due
                time.sleep(0.01)
            again = attachment.new_cache()
            assert torch.equal(generate(model, ids, again).sequences, expected.sequences)
            cache.reset()
            assert torch.equal(generate(model, ids, cache).sequences, expected.sequences)
            assert attachment.stats.through_memory == attachment.stats.answers
        assert_none_soon(lambda: len(list(client.list_sequences())))


def test_answers_stay_as_they_were(target):
    """Whoever keeps a layer's attention, in a hook, has it after the next layer's."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    kept: list = []

    def keep(module, arguments):
        kept.append((arguments[0], arguments[0].clone()))

    with through_memory(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        model(ids, past_key_values=cache)
        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(keep) for layer in model.model.layers
        ]
        try:
            model(ids[:, -1:], past_key_values=cache)
        finally:
            for hook in hooks:
                hook.remove()
    assert len(kept) == LAYERS
    assert all(torch.equal(now, then) for now, then in kept)
    assert not torch.equal(kept[0][0], kept[1][0])


def test_a_row_that_fails(target):
    """Its error comes with the last layer of the same call."""
    model, ids = load(TINY[0]), prompt(TINY[0], 3, 30)
    with attnd.Client(target, tenant="test") as client:
        with through_memory(model, target) as attachment, torch.no_grad():
            cache = attachment.new_cache()
            generate(model, ids, cache)
            client.close_sequence(cache.sequence_ids[1])
            with pytest.raises(attnd.NotFoundError, match="row 1 .*begin with a new cache"):
                model(ids[:, -1:], past_key_values=cache)
            with pytest.raises(ValueError, match="of no more use"):
                cache.fork()
            again = attachment.new_cache()
            generate(model, ids, again)
            assert len(regions(attachment)) == 2  # the failed one is the cache's until it is closed


def test_a_model_that_pauses_within_a_pass_is_told(target):
    """For longer than reply_timeout_s."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with through_memory(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        model(ids, past_key_values=cache)
        with model.model.layers[1].register_forward_pre_hook(lambda *a: time.sleep(2.5)):
            with pytest.raises(attnd.DeadlineExceededError, match="not rung for in time"):
                model(ids[:, -1:], past_key_values=cache)


def turns(model, cache, ids, turn):
    """Three calls of generate over one cache, the later ones with further tokens: all tokens."""
    for number in range(3):
        said = torch.cat([ids, turn], 1) if number else ids
        ids = generate(model, said, cache, attention_mask=torch.ones_like(said)).sequences
        yield ids


LIMITS = {
    # of a turn of 20 tokens and more
    "--max-query-tokens=8": lambda turn: LAYERS * turn,
    # of every step of 3 rows
    "--max-rows=2": lambda turn: LAYERS * 11 * (turn + 1) + LAYERS * turn,
}


@pytest.mark.parametrize("limit", LIMITS)
def test_steps_beyond_a_limit_go_as_messages(limit):
    """And those within it, between them, through memory: one writer at a time."""
    require_program()
    model, ids, turn = load(TINY[0]), prompt(TINY[0], 3, 60), prompt(TINY[0], 3, 20)
    expected = list(turns(model, DynamicCache(), ids, turn))
    with live_server.running("--allow-client-memory", limit) as (target, _):
        with through_memory(model, target) as attachment:
            for number, got in enumerate(turns(model, attachment.new_cache(), ids, turn)):
                assert torch.equal(got, expected[number])
                stats = attachment.stats
                assert stats.answers - stats.through_memory == LIMITS[limit](number)


def test_steps_without_room_for_a_region_go_as_messages(caplog):
    """A page holds 4 tokens' region."""
    require_program()
    model = load(TINY[0])
    expected = {rows: local(model, prompt(TINY[0], rows, 30)).sequences for rows in (3, 6)}
    with live_server.running("--allow-client-memory", "--client-memory-bytes=4096") as (target, _):
        with through_memory(model, target) as attachment:
            for rows in (3, 6, 3):
                attachment.reset_stats()
                got = generate(model, prompt(TINY[0], rows, 30), attachment.new_cache())
                assert torch.equal(got.sequences, expected[rows])
                stats = attachment.stats
                assert stats.through_memory == (0 if rows == 6 else stats.answers)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "client_memory_bytes" in warning.getMessage()


def test_models_beside_each_other(target):
    """Two attachments, each on a thread of its own, in float32 and bfloat16."""
    models = [tiny(TINY[0]), tiny(TINY[1], seed=1).bfloat16()]
    prompts = [prompt(TINY[0], 2, 50), prompt(TINY[0], 3, 70)]
    answers: dict[int, list] = {0: [], 1: []}

    def run(number: int) -> None:
        with through_memory(models[number], target) as attachment:
            for _ in range(3):
                cache = attachment.new_cache()
                got = generate(models[number], prompts[number], cache, max_new_tokens=20)
                answers[number].append(got.sequences)
            assert attachment.stats.through_memory == attachment.stats.answers

    for number in (0, 1):
        run(number)
    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        assert len(answers[number]) == 6
        assert all(torch.equal(answer, answers[number][0]) for answer in answers[number])


def test_caches_of_one_model_on_two_threads(target):
    model = load(TINY[0])
    prompts = [prompt(TINY[0], rows, 40) for rows in (1, 4)]
    expected = [local(model, ids, max_new_tokens=30).sequences for ids in prompts]
    got: list = [None, None]

    with through_memory(model, target) as attachment:

        def run(number: int) -> None:
            cache = attachment.new_cache()
            got[number] = generate(model, prompts[number], cache, max_new_tokens=30).sequences

        threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected))


def test_a_server_that_shares_no_memory(attnd_target):
    """Or none with further clients: it is refused before the model is touched."""
    model = load(TINY[0])
    with pytest.raises(attnd.UnavailableError, match="--allow-client-memory"):
        through_memory(model, attnd_target)
    assert model.config._attn_implementation == "sdpa"
    with live_server.running("--allow-client-memory", "--max-memory-clients=1") as (full, _):
        with through_memory(model, full):
            with pytest.raises(attnd.ResourceExhaustedError, match="max_memory_clients"):
                through_memory(tiny(TINY[1]), full)


def test_a_server_that_is_named_by_its_port_is_refused(attnd_target):
    with attnd.Client(attnd_target) as client, attnd.Client("localhost:1") as remote:
        with pytest.raises(ValueError, match="Unix socket"):
            Regions(remote, client.limits)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_ends_while_a_model_generates(folder, end, monkeypatch):
    """Is noticed within the deadline; a cache after it, of a server that was started anew, goes
    through memory again."""
    require_program()
    path = folder / f"generates-{end.name}"
    command = [live_server.PROGRAM, "--listen", f"unix:{path}/attnd.sock", "--data-dir", path]
    target = f"unix:{path}/attnd.sock"
    server = subprocess.Popen([*command, "--allow-client-memory"])
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    expected = local(model, ids).sequences
    step, steps = MemoryPass.step, []

    def step_of_an_ended_server(whole, **options):
        steps.append(whole.layer)
        if len(steps) == 5:
            live_server.stop(server) if end == signal.SIGSTOP else server.send_signal(end)
        step(whole, **options)

    try:
        live_server.wait_until_there(target)
        with through_memory(model, target, timeout_s=2) as attachment:
            cache = attachment.new_cache()
            assert torch.equal(generate(model, ids, attachment.new_cache()).sequences, expected)
            with monkeypatch.context() as patch, pytest.raises(attnd.AttndError) as raised:
                patch.setattr(MemoryPass, "step", step_of_an_ended_server)
                generate(model, ids, cache)
            if end == signal.SIGSTOP:
                assert isinstance(raised.value, attnd.DeadlineExceededError)
                server.send_signal(signal.SIGCONT)
            else:
                assert isinstance(raised.value, attnd.UnavailableError)
                server.wait()
                server = subprocess.Popen([*command, "--allow-client-memory"])
                live_server.wait_until_there(target)
            attachment.reset_stats()
            assert torch.equal(generate(model, ids, attachment.new_cache()).sequences, expected)
            assert attachment.stats.through_memory == attachment.stats.answers > 0
    finally:
        server.kill()
        server.wait()


def mapped_regions() -> int:
    """Of this process."""
    maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
    return sum("memfd:attnd" in line for line in maps.splitlines())


def test_attachments_leave_no_regions(target):
    """Nor descriptors, on either side."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 2, 8)

    def once() -> None:
        with through_memory(model, target, fingerprint="attachments") as attachment:
            generate(model, ids, attachment.new_cache(), max_new_tokens=2)
            assert attachment.stats.through_memory == LAYERS

    once()
    before, regions = len(os.listdir("/proc/self/fd")), mapped_regions()  # also of other tests
    for _ in range(ATTACHMENTS):
        once()
    assert mapped_regions() <= regions
    assert len(os.listdir("/proc/self/fd")) <= before + 8  # gRPC's own vary
    with live_server.running("--allow-client-memory", "--max-memory-regions=1") as (scarce, _):
        for _ in range(3):
            with through_memory(model, scarce) as attachment:
                for rows in (1, 3, 5):  # growing, too
                    ids = prompt(TINY[0], rows, 8)
                    generate(model, ids, attachment.new_cache(), max_new_tokens=2)
                assert attachment.stats.through_memory == 3 * LAYERS
