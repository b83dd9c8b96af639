# SPDX-License-Identifier: Apache-2.0
"""The parts of attnd.transformers: what a cache leaves on the server, messages within the server's
limits, names of models, tensors, columns."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
import types
import weakref
from dataclasses import replace

import grpc
import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import attnd
from attnd.results import RowResult, RowStats
from attnd.transformers import Attachment, Stats, fingerprint
from attnd.transformers.arrays import to_numpy, to_torch
from attnd.transformers.columns import Columns, flags_of
from attnd.splitting import split
from attnd.transformers.stats import StatsCounter
from attnd.v1 import attnd_pb2
from transformers_models import TINY, attached, generate, load, local, prompt, tiny, torch
from transformers_sequences import PROGRAM, assert_none_soon, open_sequences  # noqa: F401

def test_close_and_the_end_of_the_attachment_close_all(attnd_target, open_sequences):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, attnd_target) as attachment:
        with attachment.new_cache() as cache:
            generate(model, ids, cache, num_beams=2)
            assert open_sequences() == 4
        assert open_sequences() == 0
        kept = attachment.new_cache()
        generate(model, ids, kept)
        forked = kept.fork()
        assert open_sequences() == 4
    assert open_sequences() == 0
    assert not forked.sequence_ids
    kept.close()


def test_a_sequence_that_cannot_be_closed_holds_up_nothing_else(
    attnd_target, open_sequences, monkeypatch
):
    """The others are closed, the model has its attention back, and the error is raised."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    before = model.config._attn_implementation
    attachment = attached(model, attnd_target)
    first, second = attachment.new_cache(), attachment.new_cache()
    for cache in (first, second):
        generate(model, ids, cache)
    stuck = first.sequence_ids[0]
    close = attnd.Client.close_sequence

    def close_others(client, sequence, *args, **kwargs):
        if sequence == stuck:
            raise attnd.AttndError(grpc.StatusCode.DEADLINE_EXCEEDED, "stuck")
        return close(client, sequence, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(attnd.Client, "close_sequence", close_others)
        with pytest.raises(attnd.AttndError, match="stuck"):
            attachment.close()
    assert open_sequences() == 1
    assert model.config._attn_implementation == before
    with attnd.Client(attnd_target, tenant="test") as client:
        client.close_sequence(stuck)


def test_a_closed_or_failed_cache_does_not_come_back(attnd_target, open_sequences, monkeypatch):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, attnd_target) as attachment:
        closed, failed = attachment.new_cache(), attachment.new_cache()
        for cache in (closed, failed):
            generate(model, ids, cache)
        closed.close()
        for use in (closed.reset, closed.fork, lambda: copy.deepcopy(closed)):
            with pytest.raises(ValueError, match="closed"):
                use()
        with monkeypatch.context() as patch:
            patch.setattr(attnd.Pass, "step", lambda *a, **k: 1 / 0)
            with pytest.raises(ZeroDivisionError), torch.no_grad():
                model(ids[:, -1:], past_key_values=failed)
        with pytest.raises(ValueError, match="of no more use"):
            failed.fork()
    assert open_sequences() == 0


def test_a_model_is_attached_once(attnd_target):
    model = tiny(TINY[0])
    with attached(model, attnd_target):
        with pytest.raises(ValueError, match="attached already"):
            attached(model, attnd_target)
    attached(model, attnd_target).close()


def test_a_forgotten_cache_is_closed(attnd_target, open_sequences):
    """Without the collector of cycles: nothing of a cache is one, the prompt's keys included."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, attnd_target) as attachment:
        gc.disable()
        try:
            generate(model, ids, attachment.new_cache())
            prompt_alone = attachment.new_cache()
            with torch.no_grad():
                model(ids, past_key_values=prompt_alone)
            keys = weakref.ref(prompt_alone.layers[0].keys)
            assert keys() is not None
            del prompt_alone
            assert keys() is None
            assert_none_soon(open_sequences)
        finally:
            gc.enable()


def test_a_forgotten_attachment_closes_its_caches_when_these_are_forgotten(
    attnd_target, open_sequences
):
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    attachment = attached(model, attnd_target)
    cache = attachment.new_cache()
    del attachment
    gc.collect()
    tokens = generate(model, ids, cache).sequences
    assert tokens.shape == (1, 42)
    del cache
    gc.collect()
    assert_none_soon(open_sequences)


def test_a_failed_call_leaves_nothing_open(attnd_target, open_sequences, monkeypatch):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, attnd_target) as attachment:
        monkeypatch.setattr(attnd.Pass, "step", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError), attachment.new_cache() as cache:
            generate(model, ids, cache)
        assert open_sequences() == 0


def test_a_failed_upload_is_raised_and_leaves_nothing_open(
    attnd_target, open_sequences, monkeypatch
):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, attnd_target) as attachment:
        monkeypatch.setattr(attnd.Client, "append_kv", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError), attachment.new_cache() as cache:
            generate(model, ids, cache)
        assert open_sequences() == 0


def test_a_failed_fork_leaves_the_rows_as_they_were(attnd_target, open_sequences, monkeypatch):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    fork = attnd.Client.fork_sequence
    made = []

    def second_fails(*args, **kwargs):
        made.append(args)
        return 1 / 0 if len(made) == 2 else fork(*args, **kwargs)

    with attached(model, attnd_target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        model(ids, past_key_values=cache)
        before = cache.sequence_ids
        monkeypatch.setattr(attnd.Client, "fork_sequence", second_fails)
        for fails in (lambda: cache.batch_repeat_interleave(2), cache.fork):
            made.clear()
            with pytest.raises(ZeroDivisionError):
                fails()
            assert cache.sequence_ids == before
            assert open_sequences() == 2


def test_a_process_that_ends_closes_its_sequences(attnd_target, open_sequences, request):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, attnd_target],
        cwd=request.path.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "2"), ended.stderr
    assert open_sequences() == 0


def test_a_cache_begins_anew_after_reset(attnd_target, open_sequences):
    model = load(TINY[0])
    with attached(model, attnd_target) as attachment:
        cache = attachment.new_cache()
        generate(model, prompt(TINY[0], 2, 30), cache)
        cache.reset()
        assert open_sequences() == 0
        assert cache.get_seq_length() == 0
        ids = prompt(TINY[0], 1, 50)
        got = generate(model, ids, cache)
    assert torch.equal(got.sequences, local(model, ids).sequences)


def test_one_prompt_serves_several_copies(attnd_target):
    """As Transformers' guide does it with copy.deepcopy; the copies do not see each other."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 80)
    questions = [torch.cat([ids, prompt(TINY[0], 1, n)], 1) for n in (5, 9)]
    expected = [local(model, question).sequences for question in questions]
    with attached(model, attnd_target) as attachment:
        shared = attachment.new_cache()
        with torch.no_grad():
            model(ids, past_key_values=shared)
        for question, answer in zip(questions, expected):
            got = generate(model, question, copy.deepcopy(shared)).sequences
            assert torch.equal(got, answer)
        assert shared.get_seq_length() == 80


class SmallLimits(attnd.Client):
    """A client of a server that takes 7 tokens and 2 rows a message."""

    @property
    def limits(self):
        return replace(super().limits, max_query_tokens=7, max_rows=2)


def test_steps_are_split_to_the_servers_limits(attnd_target, monkeypatch):
    """Three rows of 20 new columns, padding among them, in messages of 7 tokens."""
    model, ids = load(TINY[0]), prompt(TINY[0], 3, 60)
    mask = torch.ones_like(ids)
    mask[1, 40:45] = 0
    here = torch.no_grad()
    with here:
        expected = model(ids, attention_mask=mask).logits
    client = SmallLimits(attnd_target, tenant="test")
    with here, Attachment(model, client, "small", "dense") as attachment:
        cache = attachment.new_cache()
        model(ids[:, :39], past_key_values=cache)
        model(ids[:, 39:40], past_key_values=cache)
        assert attachment.stats.answers == 3
        messages = []
        exchange = attnd.DecodeSession._exchange
        monkeypatch.setattr(
            attnd.DecodeSession,
            "_exchange",
            lambda *arguments: messages.append(1) or exchange(*arguments),
        )
        got = model(
            ids[:, 40:],
            attention_mask=mask,
            past_key_values=cache,
            position_ids=torch.arange(40, 60)[None].expand(3, -1),
        ).logits
        assert attachment.stats.answers == 3 + 3
        assert len(messages) >= 3 * 55 / 7
    assert (got - expected[:, 40:])[mask[:, 40:].bool()].abs().max() < 2e-3


@pytest.mark.parametrize("seed", range(20))
def test_split(seed):
    """Every token once and in order, within the limits, no row twice in a message."""
    rng = random.Random(seed)
    tokens = [rng.choice([0, 1, rng.randint(0, 30)]) for _ in range(rng.randint(1, 9))]
    most, rows = rng.randint(1, 20), rng.randint(1, 5)
    print(f"seed {seed}: {tokens}, at most {most} tokens and {rows} rows")
    messages = split(tokens, most, rows)
    seen = [(p.row, p.start + i) for pieces in messages for p in pieces for i in range(p.tokens)]
    assert seen == [(row, token) for row, count in enumerate(tokens) for token in range(count)]
    for pieces in messages:
        assert 0 < sum(piece.tokens for piece in pieces) <= most
        assert len({piece.row for piece in pieces}) == len(pieces) <= rows


def test_columns_tell_padding_from_tokens():
    columns = Columns()
    columns.begin(2)
    step = columns.append(2, 3, flags_of(torch.tensor([[1, 1, 1], [0, 1, 1]])))
    assert (step.positions, step.tokens(), step.full) == ([0, 0], [3, 2], False)
    step = columns.append(2, 2, flags_of(torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]])))
    assert (step.positions, step.tokens()) == ([3, 2], [2, 1])
    mask = step.local_mask(torch.device("cpu"))
    assert mask.shape == (2, 1, 2, 5)
    assert mask[1, 0].tolist() == [
        [False, True, True, True, False],
        [False, True, True, False, True],
    ]
    columns.select([1, 1, 0])
    assert columns.tokens() == [3, 3, 5]
    columns.crop(4)
    assert columns.tokens() == [2, 2, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_keep_their_bits(dtype):
    tensor = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    array = to_numpy(tensor.transpose(0, 1))
    assert array.shape == (2, 5, 16)
    array.flags.writeable = False
    assert torch.equal(to_torch(array, tensor.device), tensor.transpose(0, 1))
    assert np.array_equal(array.astype(np.float32), tensor.transpose(0, 1).float().numpy())


def test_stats_are_means_over_rows():
    """Zones count as read; a row without a prediction is left out of the mean error."""
    row = RowStats.from_proto(attnd_pb2.RowStats())
    rows = [
        replace(
            row,
            zone_tokens=10,
            exact_tokens=20,
            estimated_tokens=60,
            predicted_error_mean=0.1,
            predicted_error_max=0.4,
        ),
        replace(row, zone_tokens=30, dropped_tokens=80),
        replace(row, predicted_error_mean=0.3, predicted_error_max=0.3),
    ]
    results = tuple(RowResult(grpc.StatusCode.OK, "", stats) for stats in rows)
    counter = StatsCounter()
    counter.add(results[:2], wait_s=0.5, server_s=0.003, through_memory=False)
    # What a pass through memory tells comes later, and whoever asks waits for it.
    counter.add((), wait_s=0.25, server_s=0.0, through_memory=True)
    whole = types.SimpleNamespace(rows=results[2:], queue_us=400, engine_us=600)
    counter.add_later(whole)
    assert counter.snapshot() == Stats(
        answers=2,
        read_share=0.3,
        estimated_share=0.3,
        dropped_share=0.4,
        predicted_error=pytest.approx(0.2),
        predicted_error_max=0.4,
        wait_s=0.75,
        server_s=pytest.approx(0.004),
        through_memory=1,
    )
    # Another pass's reply is not waited for.
    counter.add_later(types.SimpleNamespace(told=False))
    counter.add_later(whole)
    counter.reset()
    assert counter.snapshot() == Stats()
    assert "not predicted" in str(Stats(answers=1))


def test_names_tell_models_apart():
    """By any element of a weight, the config and the dtype; not by where a model was loaded."""
    name = fingerprint(tiny(TINY[0]))
    assert name == fingerprint(tiny(TINY[0]))
    assert name.startswith("transformers/llama/") and len(name) <= 256
    names = {name, fingerprint(tiny(TINY[0], seed=1)), fingerprint(tiny(TINY[0]).bfloat16())}
    names.add(fingerprint(tiny(TINY[0], rope_theta=1e6)))
    names.add(fingerprint(tiny(TINY[1])))
    changed = tiny(TINY[0])
    with torch.no_grad():
        changed.model.layers[2].mlp.up_proj.weight[77, 13] += 1e-3
    names.add(fingerprint(changed))
    assert len(names) == 6
    moved = tiny(TINY[0])
    moved.config._name_or_path = "elsewhere"
    assert fingerprint(moved) == name
