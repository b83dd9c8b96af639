# SPDX-License-Identifier: Apache-2.0
"""attach(memory=True, cuda_graphs=True): passes of one token a row are captured and replayed.
Without a GPU: over the GPU of test_transformers_on_stream.py, whose graphs repeat operations as
they were. The tests of generate() and of random histories run once more that way; behind them, what
is the graphs' own."""

from __future__ import annotations

import functools
import logging
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
from emulated_graphs import Captures
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
    local_of,
    on_stream,
    target,
    test_sessions_go_with_their_caches,
)
from test_transformers_random import test_a_random_history  # noqa: F401
from transformers_models import TINY, attached, generate, load, local, prompt, tiny, torch


# Transformers 4 gives the new columns' numbers to a model besides.
NUMBERS_COLUMNS = transformers_models.transformers.__version__.startswith("4.")


@pytest.fixture(params=(TINY[0],))
def name(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def captures(monkeypatch, on_stream):
    made = Captures(on_stream[0])
    monkeypatch.setattr(graphs, "capture", made)
    monkeypatch.setitem(transformers_models.attach_options, "cuda_graphs", True)
    return made


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


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
    with attached(model, target) as attachment, attached_local(model) as plain:
        cache = attachment.new_cache()
        mask = torch.ones_like(ids)
        model(ids, past_key_values=cache)
        plain(ids)
        for number in range(9):
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
        assert captures.replays == 9 - 3 - 1


class attached_local:
    """Another model of the same weights, over a cache of its own."""

    def __init__(self, model) -> None:
        self._model = tiny(TINY[0])

    def __enter__(self):
        cache = transformers_models.DynamicCache()
        return lambda ids, **options: self._model(ids, past_key_values=cache, **options)

    def __exit__(self, *_) -> None:
        pass


@torch.no_grad()
@pytest.mark.parametrize("named", [{}, {"position_ids": None}])
def test_calls_without_positions_are_the_models(target, captures, named):
    """It makes them of the cache's length, or of the mask."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment, attached_local(model) as plain:
        plain(ids)
        caches = [attachment.new_cache() for _ in range(2)]
        for cache in caches:
            model(input_ids=ids, past_key_values=cache)
        for number in range(7):
            step = ids[:, number : number + 1]
            expected = plain(step).logits
            for cache in caches:
                got = model(input_ids=step, past_key_values=cache, **named).logits
                assert torch.allclose(got, expected, atol=1e-3)
    assert captures.made == []


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


class Planted(torch.nn.Module):
    """In place of a model's last norm: adds what `number` says, by the cache's length."""

    def __init__(self, norm, number) -> None:
        super().__init__()
        self._norm, self.number = norm, number

    def forward(self, hidden):
        return self._norm(hidden) + self.number(hidden)


PLANTED = {
    # By the columns of the model's cache, as Python's code could know them.
    "a number of Python's": lambda hidden, columns: columns % 13 * 0.05,
    "read on the host": lambda hidden, columns: 0.1 if float(hidden.sum()) > 0 else 0.2,
    "a choice on the host": lambda hidden, columns: 0.1 if (hidden.sum() > 0) else 0.2,
    "a shape": lambda hidden, columns: torch.ones(columns % 13 + 1).sum() * 0.05,
    "flags": lambda hidden, columns: hidden[hidden > 0].sum() * 0.001,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", PLANTED)
def test_what_differs_from_token_to_token_is_not_captured(target, captures, caplog, kind, mode):
    """A replay would repeat what was so at the token that was captured. Caches of equal length show
    nothing: the calls that are compared are those of different ones."""
    model, plain, ids = tiny(TINY[0]), tiny(TINY[0]), prompt(TINY[0], 1, 30)
    columns = [0]
    for each in (model, plain):
        each.model.norm = Planted(
            each.model.norm, lambda hidden: PLANTED[kind](hidden, columns[0])
        )
    with attached(model, target) as attachment, mode():
        caches = [attachment.new_cache() for _ in range(2)]
        local_cache = transformers_models.DynamicCache()
        for each, cache in ((model, caches[0]), (model, caches[1]), (plain, local_cache)):
            each(input_ids=ids, past_key_values=cache)
        for number in range(7):
            columns[0] = 30 + number
            column = ids[:, number : number + 1]
            expected = step(plain, local_cache, column).logits
            for cache in caches:
                assert torch.allclose(step(model, cache, column).logits, expected, atol=1e-3)
    assert captures.made == []
    (warning,) = warnings_of(caplog)
    assert "the model's forward" in warning


def test_calls_behind_as_many_columns_show_nothing(target, captures):
    """Two caches whose first tokens come in turns: the second cache's first call is not compared
    with the first one's."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        caches = [attachment.new_cache() for _ in range(2)]
        for cache in caches:
            tokens(model, cache, ids, ids[:, :2])  # opens the session, and one that is noted
        assert captures.made == []
        tokens(model, caches[0], ids[:, :1])  # compared
        assert captures.made == []
        tokens(model, caches[1], ids[:, :1])
        assert captures.replays == 1


class ByMask(torch.nn.Module):
    """In place of a model's forward: one that makes something of the mask."""

    def __init__(self, forward) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, *args, position_ids=None, attention_mask=None, **kwargs):
        output = self._forward(
            *args, position_ids=position_ids, attention_mask=attention_mask, **kwargs
        )
        if attention_mask is not None:
            output.logits = output.logits * attention_mask.sum(1)[:, None, None]
        return output


def test_a_model_that_computes_with_the_mask_is_not_captured(target, captures, caplog):
    """A graph has no mask. Only attention may have looked at it."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 2, 30)
    model.forward = ByMask(model.forward).forward
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    expected = local(model, ids, attention_mask=mask)
    with attached(model, target) as attachment:
        got = generate(model, ids, attachment.new_cache(), attention_mask=mask)
    assert torch.equal(got.sequences, expected.sequences)
    assert captures.made == []
    (warning,) = warnings_of(caplog)
    assert "over the attention mask" in warning


def test_modes_are_kinds_of_their_own(target, captures):
    """PyTorch's operations are others under inference_mode: neither spoils the other one."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :1])
        for _ in range(4):
            with torch.inference_mode():
                step(model, cache, ids[:, :1])
            with torch.no_grad():
                step(model, cache, ids[:, :1])
        assert len(captures.made) == 2 and captures.replays == 2 * 2


def test_hidden_states_and_then_none(target, captures):
    """Transformers 5 leaves hooks behind, which do nothing, and 4 other functions of the same."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :5])
        before = captures.replays
        output = step(model, cache, ids[:, :1], output_hidden_states=True)
        assert len(output.hidden_states) == 4 and captures.replays == before
        tokens(model, cache, ids[:, :4])
        assert captures.replays == before + (2 if NUMBERS_COLUMNS else 4)


def test_kinds_of_calls_have_graphs_of_their_own(target, captures):
    """As many as a cache may have."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :1])
        for _ in range(6):
            for keep in range(3):
                step(model, cache, ids[:, :1], logits_to_keep=keep)
        assert len(captures.made) == 3 and captures.replays == 3 * 4
        for keep in range(3, 9):
            for _ in range(3):
                step(model, cache, ids[:, :1], logits_to_keep=keep)
        assert len(cache._batch.graphs) == graphs._GRAPHS_MAX


def test_a_capture_that_fails(target, captures, caplog):
    """The cache is as it was, and the model's own forward goes on."""
    captures.fails = True
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    expected = local(model, ids).sequences
    with attached(model, target) as attachment:
        for _ in range(2):
            got = generate(model, ids, attachment.new_cache()).sequences
            assert torch.equal(got, expected)
    (warning,) = warnings_of(caplog)
    assert "planted" in warning and captures.made == []


@pytest.mark.parametrize("change", ["moved", "replaced", "in place"])
def test_weights_that_change(target, captures, change):
    """Those that lie elsewhere now are captured anew; a graph reads what is in place."""
    model, other = tiny(TINY[0]), tiny(TINY[0], seed=1)
    ids = prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :4])
        before = captures.replays
        head = model.lm_head
        if change == "moved":
            head.weight.data = other.lm_head.weight.data.clone()
        elif change == "replaced":
            model.lm_head = other.lm_head
        else:
            head.weight.data.copy_(other.lm_head.weight.data)
        got = tokens(model, cache, ids[:, 4:10])
        assert captures.replays - before == (6 if change == "in place" else 4)
    plain = tiny(TINY[0])
    plain.lm_head.weight.data.copy_(other.lm_head.weight.data)
    with torch.no_grad():
        expected = plain(torch.cat([ids, ids[:, :10]], 1)).logits[:, -6:]
    assert torch.allclose(got, expected, atol=1e-2)


@torch.no_grad()
def tokens(model, cache, *prompt_and_tokens):
    """The logits of the last ids given, [rows, columns], each column a pass of its own; any ids
    before are passed as a whole."""
    *before, after = prompt_and_tokens
    for ids in before:
        model(input_ids=ids, past_key_values=cache)
    return torch.cat([step(model, cache, column).logits for column in after.split(1, 1)], 1)


def step(model, cache, column, **options):
    """A pass of a token for each row, which is told its positions, as generate() tells them."""
    positions = torch.full_like(column[:1], cache.get_seq_length())
    if NUMBERS_COLUMNS:
        options["cache_position"] = positions[0]
    options.setdefault("position_ids", positions)
    return model(input_ids=column, past_key_values=cache, **options)


@pytest.mark.parametrize("change", ["train", "forward", "attention"])
def test_what_python_looks_at_is_looked_at(target, captures, change):
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :5])
        before, layer = captures.replays, model.model.layers[1].mlp
        if change == "train":
            layer.train()
        elif change == "forward":
            layer.forward = lambda hidden: hidden * 0
        else:
            model.set_attn_implementation("sdpa")
            with pytest.raises(ValueError, match="its cache needs 'attnd'"):
                tokens(model, cache, ids[:, :1])
            return
        got = tokens(model, cache, ids[:, :2])
        assert captures.replays == before
        assert not torch.equal(got[:, 0], got[:, 1])


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


def test_a_model_with_a_forward_of_its_own(target, captures):
    """A compiled one, say: it is called, and is there again."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    expected, inner, called = local(model, ids).sequences, model.forward, []

    @functools.wraps(inner)
    def own(*args, **kwargs):
        called.append(1)
        return inner(*args, **kwargs)

    model.forward = own
    with attached(model, target) as attachment:
        assert torch.equal(generate(model, ids, attachment.new_cache()).sequences, expected)
    assert model.forward is own and len(called) == 1 + 3 + 1 and captures.replays == 8


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


def test_a_model_with_hooks_is_called(target, captures):
    """A replay would not call them."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    called: list[int] = []
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :4])
        before = captures.replays
        hook = model.model.layers[1].register_forward_hook(lambda *_: called.append(1))
        with hook:
            tokens(model, cache, ids[:, :2])
        assert len(called) == 2 and captures.replays == before
        tokens(model, cache, ids[:, :1])
        assert len(called) == 2 and captures.replays == before + 1


def test_a_closed_attachment_leaves_the_model_as_it_was(target, captures):
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    expected = local(model, ids).sequences
    with attached(model, target) as attachment:
        generate(model, ids, attachment.new_cache())
        assert "forward" in vars(model)
    assert "forward" not in vars(model)
    assert torch.equal(local(model, ids).sequences, expected)


def test_what_cannot_have_graphs_is_refused(target):
    with pytest.raises(ValueError, match="cuda_graphs=True needs memory=True"):
        attnd.transformers.attach(load(TINY[0]), target, cuda_graphs=True)
    model = tiny(TINY[0])
    model.forward = lambda input_ids: None
    with pytest.raises(ValueError, match="takes no position_ids"):
        attnd.transformers.attach(model, target, memory=True, cuda_graphs=True)


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
