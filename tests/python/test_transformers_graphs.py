# SPDX-License-Identifier: Apache-2.0
"""attach(memory=True, cuda_graphs=True): passes of one token a row are captured and replayed.
Without a GPU: over the GPU of test_transformers_on_stream.py, whose graphs repeat operations as
they were. The tests of generate() and of random histories run once more that way; behind them, what
is the graphs' own."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import attnd
import live_server
import transformers_models
from attnd.transformers import cache as cache_module
from attnd.transformers import graphs
from conftest import require_program
from emulated_fixtures import library  # noqa: F401
from graph_fixtures import captures, plain_copy, step, tokens  # noqa: F401
from test_transformers import (  # noqa: F401
    test_a_batch_with_padding_on_the_left,
    test_a_prompt_of_one_token,
    test_a_scale_of_its_own,
    test_a_second_and_a_third_turn,
    test_an_assistant_model,
    test_one_row,
    test_prompt_lookup,
    test_sampling_with_a_seed,
    test_three_beams,
)
from test_transformers_memory import (  # noqa: F401
    test_answers_stay_as_they_were,
    test_caches_of_one_model_on_two_threads,
)
from test_transformers_on_stream import (  # noqa: F401
    attnd_target,
    on_stream,
    target,
    test_sessions_go_with_their_caches,
)
from test_transformers_random import test_a_random_history  # noqa: F401
from transformers_models import TINY, attached, generate, load, local, prompt, tiny, torch


@pytest.fixture(params=(TINY[0],))
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_replays(target, captures, name, rows):
    """All behind the prompt's but the first three of the first cache: they open the session, and
    are compared. A further cache has but one that opens its session."""
    model, ids = load(name), prompt(name, rows, 40)
    expected = local(model, ids).sequences
    with attached(model, target) as attachment:
        for caches, replays in ((1, 8), (2, 8 + 10)):
            cache = attachment.new_cache()
            assert torch.equal(generate(model, ids, cache).sequences, expected)
            assert captures.replays == replays and len(captures.made) == caches
        stats = attachment.stats
        assert stats.answers == stats.through_memory == 2 * 11 * 3 and stats.read_share == 1


def test_logits_are_those_without_graphs(target, captures):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, target, cuda_graphs=False) as attachment:
        expected = generate(model, ids, attachment.new_cache()).logits
    with attached(model, target) as attachment:
        got = generate(model, ids, attachment.new_cache()).logits
    assert captures.replays
    assert all(torch.equal(*logits) for logits in zip(got, expected))


def test_padding_is_the_caches(target, captures):
    """A graph knows nothing of it: rows are of different lengths."""
    model = load(TINY[0])
    ids = prompt(TINY[0], 3, 30)
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, :20] = 0
    expected = local(model, ids, attention_mask=mask).sequences
    with attached(model, target) as attachment:
        got = generate(model, ids, attachment.new_cache(), attention_mask=mask).sequences
    assert torch.equal(got, expected) and captures.replays == 8


@torch.no_grad()
def test_a_row_that_gets_no_token(target, captures):
    """Its call is the model's own, and those behind it are replays again."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, target) as attachment:
        plain = plain_copy()
        cache = attachment.new_cache()
        mask = torch.ones_like(ids)
        model(ids, past_key_values=cache)
        plain(ids)
        for number in range(14):
            added = torch.ones(2, 1, dtype=torch.long)
            added[1, 0] = number != 6
            mask = torch.cat([mask, added], 1)
            column = prompt(TINY[0], 2, 40)[:, number : number + 1]
            positions = mask.sum(1, keepdim=True) - 1
            got = step(model, cache, column, attention_mask=mask, position_ids=positions)
            expected = plain(column, attention_mask=mask, position_ids=positions)
            assert torch.allclose(got.logits[0], expected.logits[0], atol=1e-3)
            if added[1, 0]:
                assert torch.allclose(got.logits[1], expected.logits[1], atol=1e-3)
        # Behind it the calls are those of a padded batch, which are compared by themselves.
        assert captures.replays == (6 - 3) + (7 - 2)


@torch.no_grad()
def test_an_output_stays_as_it_was(target, captures):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :4])
        outputs = [step(model, cache, ids[:, :1]) for _ in range(2)]
        first = outputs[0].logits.clone()
        outputs.append(step(model, cache, ids[:, 1:2]))
        assert torch.equal(outputs[0].logits, first)
        assert not torch.equal(outputs[1].logits, outputs[2].logits)
        assert all(output.past_key_values is cache for output in outputs)


def test_an_interrupt_in_a_replay(target, captures, monkeypatch):
    """Whatever is called behind it says that the cache is of no more use."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :5])

        def interrupt(*_) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(graphs.TokenGraph, "replay", interrupt)
            with pytest.raises(KeyboardInterrupt):
                tokens(model, cache, ids[:, :1])
        for options in ({}, {"logits_to_keep": 1}):
            with pytest.raises(ValueError, match="of no more use|attended in 0 of 3 layers"):
                with torch.no_grad():
                    step(model, cache, ids[:, :1], **options)
        other = attachment.new_cache()
        tokens(model, other, ids, ids[:, :2])
        assert captures.replays > 0


def test_a_lost_attachment_is_replaced(target, captures):
    """What it has left in the model is not called any more."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    expected = local(model, ids).sequences
    lost = attached(model, target)
    generate(model, ids, lost.new_cache())
    model.set_attn_implementation("sdpa")
    with attached(model, target) as attachment:
        for _ in range(2):
            assert torch.equal(generate(model, ids, attachment.new_cache()).sequences, expected)
    assert "forward" not in vars(model)
    model.set_attn_implementation("sdpa")
    lost.close()
    assert "forward" not in vars(model)


def test_crop_fork_and_select_behind_replays(target, captures):
    """The next replay is of what they have left."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    plain, local_cache = tiny(TINY[0]), transformers_models.DynamicCache()
    with attached(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        whole = tokens(model, cache, ids, ids[:, :6])
        plain(input_ids=ids, past_key_values=local_cache)
        expected = tokens(plain, local_cache, ids[:, :6])
        assert torch.allclose(whole, expected, atol=1e-3)
        columns = cache.get_seq_length()
        forked = cache.fork()
        cache.batch_select_indices(torch.tensor([1, 0]))
        swapped = tokens(model, cache, ids.flip(0)[:, :2])
        again = tokens(model, forked, ids[:, :3])
        assert torch.allclose(swapped.flip(0), again[:, :2], atol=1e-4)
        forked.crop(columns - 3 if not cache_module._CROP_REMOVES else -6)
        assert forked.get_seq_length() == columns - 3
        repeated = tokens(model, forked, ids[:, 3:6])
        assert torch.allclose(repeated, expected[:, 3:], atol=1e-3)
        assert captures.replays > 6


def test_a_closed_attachment_leaves_the_model_as_it_was(target, captures):
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    expected = local(model, ids).sequences
    with attached(model, target) as attachment:
        generate(model, ids, attachment.new_cache())
        assert "forward" in vars(model)
    assert "forward" not in vars(model)
    assert torch.equal(local(model, ids).sequences, expected)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_ends_before_a_replay(tmp_path, captures, end):
    """The call raises: no token is made of NaN."""
    require_program()
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with live_server.to_be_ended(tmp_path, "--allow-client-memory") as (target, server):
        with attached(model, target, timeout_s=1) as attachment:
            cache = attachment.new_cache()
            tokens(model, cache, ids, ids[:, :4])
            live_server.stop(server)
            if end == signal.SIGKILL:
                server.kill()
            before = captures.replays
            with pytest.raises((attnd.DeadlineExceededError, attnd.UnavailableError)):
                tokens(model, cache, ids[:, :1])
            with pytest.raises(ValueError, match="of no more use"):
                tokens(model, cache, ids[:, :1])
            assert captures.replays <= before + 1
            server.kill()
