# SPDX-License-Identifier: Apache-2.0
"""attach(memory=True, cuda_graphs=True): passes of one token a row are captured and replayed.
Without a GPU: over the GPU of test_transformers_on_stream.py, whose graphs repeat operations as
they were. The tests of generate() and of random histories run once more that way; behind them, what
is the graphs' own."""

from __future__ import annotations

import logging
import signal

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import attnd
import live_server
import transformers_models
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
            step = prompt(TINY[0], 2, 40)[:, number : number + 1]
            positions = mask.sum(1, keepdim=True) - 1
            got = model(step, attention_mask=mask, position_ids=positions, past_key_values=cache)
            expected = plain(step, attention_mask=mask, position_ids=positions)
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
def test_calls_without_positions(target, captures):
    """Models number the next column themselves; a graph is told."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment, attached_local(model) as plain:
        cache = attachment.new_cache()
        plain(ids)
        model(input_ids=ids, past_key_values=cache)
        for number in range(7):
            step = ids[:, number : number + 1]
            got = model(input_ids=step, past_key_values=cache).logits
            assert torch.allclose(got, plain(step).logits, atol=1e-3)
        assert captures.replays == 4


@torch.no_grad()
def test_an_output_stays_as_it_was(target, captures):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 30)
    with attached(model, target) as attachment:
        cache = attachment.new_cache()
        tokens(model, cache, ids, ids[:, :4])
        outputs = [model(input_ids=ids[:, :1], past_key_values=cache) for _ in range(2)]
        first = outputs[0].logits.clone()
        outputs.append(model(input_ids=ids[:, 1:2], past_key_values=cache))
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


@pytest.mark.parametrize("kind", ["a number of Python's", "read on the host", "a shape"])
def test_what_differs_from_token_to_token_is_not_captured(target, captures, caplog, kind):
    """A replay would repeat the number of the token that was captured."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 30)
    lengths: list[int] = []  # of the caches, as Python's code could know them

    def length() -> int:
        lengths.append(0)
        return len(lengths) % 13

    numbers = {
        "a number of Python's": lambda hidden: length() * 0.05,
        "read on the host": lambda hidden: 0.1 if float(hidden.sum()) > 0 else 0.2,
        "a shape": lambda hidden: torch.ones(length() + 1).sum() * 0.05,
    }
    model.model.norm = Planted(model.model.norm, numbers[kind])
    expected = local(model, ids).sequences
    lengths.clear()
    with attached(model, target) as attachment:
        got = generate(model, ids, attachment.new_cache()).sequences
    assert torch.equal(got, expected)
    assert captures.made == []
    (warning,) = warnings_of(caplog)
    assert ("_local_scalar_dense" if kind == "read on the host" else "at each token") in warning


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
    passes = [model(input_ids=column, past_key_values=cache) for column in after.split(1, 1)]
    return torch.cat([output.logits for output in passes], 1)


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
