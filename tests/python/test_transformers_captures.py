# SPDX-License-Identifier: Apache-2.0
"""attach(cuda_graphs=True): which calls of a model are captured, and when a graph no longer serves. Over the
GPU of test_transformers_on_stream.py, as in test_transformers_graphs.py."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import attnd
import transformers_models
from attnd.transformers import graphs
from emulated_fixtures import library  # noqa: F401
from graph_fixtures import (  # noqa: F401
    NUMBERS_COLUMNS,
    captures,
    plain_copy,
    step,
    tokens,
    warnings_of,
)
from test_transformers_on_stream import attnd_target, on_stream, target  # noqa: F401
from transformers_models import TINY, attached, generate, load, local, prompt, tiny, torch


@torch.no_grad()
@pytest.mark.parametrize("named", [{}, {"position_ids": None}])
def test_calls_without_positions_are_the_models(target, captures, named):
    """It makes them of the cache's length, or of the mask."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        plain = plain_copy()
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


class WithMask(torch.nn.Module):
    """In place of a model's last norm, which sees the mask of the model's call."""

    def __init__(self, norm, change) -> None:
        super().__init__()
        self._norm, self._change, self.mask = norm, change, None

    def forward(self, hidden):
        return self._change(self._norm(hidden), self.mask)


CHANGES = {
    "that there is one": lambda hidden, mask: hidden if mask is None else hidden + 0.1,
    "padding": lambda hidden, mask: (
        hidden + 0.1 if mask is not None and not bool(mask.all()) else hidden
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_decides_by_the_mask_is_not_captured(target, captures, caplog, change):
    """Python's code sees no mask where a pass is captured: what it does then is compared, too."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 2, 30)
    norm = model.model.norm = WithMask(model.model.norm, CHANGES[change])
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args, attention_mask=None, **kwargs):
        norm.mask = attention_mask
        return inner(*args, attention_mask=attention_mask, **kwargs)

    model.forward = forward
    padded = torch.ones_like(ids)
    padded[1, :9] = 0
    whole = local(model, ids)
    expected = local(model, ids, attention_mask=padded)
    with attached(model, target) as attachment:
        got = generate(model, ids, attachment.new_cache())
        assert torch.equal(got.sequences, whole.sequences)
        got = generate(model, ids, attachment.new_cache(), attention_mask=padded)
        assert torch.equal(got.sequences, expected.sequences)
    # generate() of Transformers 5 leaves a mask out that hides nothing.
    assert captures.replays == (0 if NUMBERS_COLUMNS and change == "that there is one" else 8)
    (warning,) = warnings_of(caplog)
    assert "where it is captured" in warning


def test_inputs_whose_numbers_lie_apart(target, captures):
    """As of slices of what grows with each token."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, target) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        model(input_ids=ids, past_key_values=cache)
        for number in range(6):
            grown = torch.arange(31 + number).repeat(2, 1)
            step(model, cache, ids[:, : number + 1][:, -1:], position_ids=grown[:, -1:])
        assert captures.replays == 3


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


def test_what_cannot_have_graphs_is_refused(target):
    with pytest.raises(ValueError, match="cuda_graphs=True needs memory=True"):
        attnd.transformers.attach(load(TINY[0]), target, cuda_graphs=True)
    model = tiny(TINY[0])
    model.forward = lambda input_ids: None
    with pytest.raises(ValueError, match="takes no position_ids"):
        attnd.transformers.attach(model, target, memory=True, cuda_graphs=True)
