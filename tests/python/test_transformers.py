# SPDX-License-Identifier: Apache-2.0
"""generate() with attention answered by a server gives the tokens that it gives with attention
computed here.

Method: the same call of Transformers twice, over a DynamicCache with scaled_dot_product_attention
and over attnd's cache under the policy `dense`, in float32. Tokens must be equal, and logits nearly
so, as a random model may choose equal tokens for other reasons.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.cache_utils import DynamicCache

import attnd
from transformers_models import (
    NANO,
    TINY,
    attached,
    generate,
    load,
    local,
    prompt,
    texts,
    tiny,
    torch,
)

PADDING = (0, 11, 3)
LOGITS_TOLERANCE = 2e-3
TIE = 1e-2


@pytest.fixture(params=(*TINY, *NANO))
def name(request) -> str:
    return request.param


def padded(name: str, columns: int):
    """Three rows with padding on their left, and the mask."""
    ids = prompt(name, 3, columns)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(PADDING):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return ids, mask


def assert_same(got, expected, logits: bool = True) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    if logits:
        for position, (ours, theirs) in enumerate(zip(got.logits, expected.logits)):
            assert (ours - theirs).abs().max() < LOGITS_TOLERANCE, f"step {position}"


def assert_answered(attachment, layers: int, steps: int) -> None:
    assert attachment.stats.answers >= layers * steps


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one prompt"),
        pytest.param({"prefill_chunk_size": 16}, id="a prompt in chunks"),
        pytest.param({"prefill_chunk_size": 37}, id="a prompt in chunks, the last of one token"),
    ],
)
def test_one_row(attnd_target, name, options):
    model, ids = load(name), prompt(name, 1, 149)
    expected = local(model, ids, **options)
    with attached(model, attnd_target) as attachment:
        got = generate(model, ids, attachment.new_cache(), **options)
        assert_answered(attachment, model.config.num_hidden_layers, 11)
    assert_same(got, expected)


def test_a_prompt_of_one_token(attnd_target):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 1)
    expected = local(model, ids)
    with attached(model, attnd_target) as attachment:
        assert_same(generate(model, ids, attachment.new_cache()), expected)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 25}], ids=["whole", "in chunks"])
def test_a_batch_with_padding_on_the_left(attnd_target, name, options):
    model = load(name)
    ids, mask = padded(name, 120)
    expected = local(model, ids, attention_mask=mask, **options)
    with attached(model, attnd_target) as attachment:
        got = generate(model, ids, attachment.new_cache(), attention_mask=mask, **options)
    assert_same(got, expected)


def test_a_scale_of_its_own(attnd_target):
    """Logits that are not scaled by 1/sqrt(head_dim), as some models have them."""
    model, ids = tiny(TINY[0]), prompt(TINY[0], 1, 100)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.1
    expected = local(model, ids)
    with attached(model, attnd_target) as attachment:
        assert_same(generate(model, ids, attachment.new_cache()), expected)


def test_three_beams(attnd_target, name):
    """Of two padded rows each: sequences are forked and closed at nearly every step."""
    model = load(name)
    ids, mask = padded(name, 90)
    options = {"num_beams": 3, "attention_mask": mask, "output_scores": True}
    expected = local(model, ids, **options)
    with attached(model, attnd_target) as attachment:
        cache = attachment.new_cache()
        got = generate(model, ids, cache, **options)
        assert len(cache.sequence_ids) == 9
    assert_same(got, expected, logits=False)
    assert (got.sequences_scores - expected.sequences_scores).abs().max() < LOGITS_TOLERANCE


def test_a_second_and_a_third_turn(attnd_target, name):
    """Each one of many tokens over the cache, and after it tokens one by one."""
    model = load(name)
    text = prompt(name, 1, 200)
    here = DynamicCache()
    first, second, third = text[:, :120], text[:, 120:163], text[:, 163:170]
    with attached(model, attnd_target) as attachment:
        there = attachment.new_cache()
        expected = ids = first
        for turn in (second, third, None):
            expected = generate(model, ids, there)
            model.set_attn_implementation("sdpa")
            assert_same(expected, generate(model, ids, here))
            model.set_attn_implementation("attnd")
            if turn is not None:
                ids = torch.cat([expected.sequences, turn], 1)


def test_prompt_lookup(attnd_target, name, monkeypatch):
    """Several tokens a step, of which wrong ones are cut off again."""
    cut = []
    truncate = attnd.Client.truncate_sequence
    monkeypatch.setattr(
        attnd.Client, "truncate_sequence", lambda *a, **k: cut.append(a) or truncate(*a, **k)
    )
    model, ids = load(name), prompt(name, 1, 60).repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 24}
    expected = local(model, ids, **options)
    with attached(model, attnd_target) as attachment:
        got = generate(model, ids, attachment.new_cache(), **options)
    assert_same(got, expected)
    assert cut


def test_an_assistant_model(attnd_target):
    """Another model proposes tokens; its own attention stays here."""
    model, assistant, ids = load(TINY[0]), tiny(TINY[0], seed=1), prompt(TINY[0], 1, 70)
    # Transformers before 5.23 knows no least length beside an assistant.
    options = {"assistant_model": assistant, "min_new_tokens": None}
    expected = local(model, ids, **options)
    with attached(model, attnd_target) as attachment:
        got = generate(model, ids, attachment.new_cache(), **options)
    assert_same(got, expected)


@pytest.mark.parametrize("name", [*TINY, "nano-qwen3"])
def test_sampling_with_a_seed(attnd_target, name):
    model, ids = load(name), prompt(name, 2, 80)
    options = {"do_sample": True, "top_k": 50, "num_return_sequences": 2}
    torch.manual_seed(5)
    expected = local(model, ids, **options)
    with attached(model, attnd_target) as attachment:
        torch.manual_seed(5)
        assert_same(generate(model, ids, attachment.new_cache(), **options), expected)


@pytest.mark.parametrize("name", NANO)
def test_bfloat16(attnd_target, name):
    """The best token of each step is the same, given the same tokens before, but for ties: the two
    best logits differ by TIE of their size, about twice what bfloat16 can tell apart. The steps
    are questions and answers about the text before."""
    text = torch.from_numpy(texts(2048)[:1])
    model = load(name)
    model.to(torch.bfloat16)
    try:
        expected = logits_of_steps(model, text, DynamicCache())
        with attached(model, attnd_target) as attachment:
            got = logits_of_steps(model, text, attachment.new_cache())
    finally:
        model.to(torch.float32)
    best = expected.topk(2).values
    tied = best[:, 0] - best[:, 1] <= TIE * best[:, 0].abs()
    assert (tied | (got.argmax(1) == expected.argmax(1))).all()
    assert tied.sum() < len(tied) / 2


def logits_of_steps(model, text, cache, steps: int = 48):
    """[steps, vocabulary] float32: all but the last `steps` tokens are the prompt."""
    start = text.shape[1] - steps
    with torch.no_grad():
        model(text[:, :start], past_key_values=cache, logits_to_keep=1)
        answers = [
            model(text[:, [column]], past_key_values=cache).logits[0, -1]
            for column in range(start, start + steps)
        ]
    return torch.stack(answers).float()


@pytest.mark.parametrize("name", NANO)
def test_error_target_reports_what_it_read(attnd_target, name):
    """Over 1,920 tokens, of which the index covers most."""
    model, ids = load(name), prompt(name, 1, 1920)
    with attached(model, attnd_target, "error-target:tolerance=0.1") as attachment:
        generate(model, ids, attachment.new_cache())
        stats = attachment.stats
        assert stats.answers == 11 * model.config.num_hidden_layers
        assert 0 < stats.read_share < 0.9
        assert 0 < stats.estimated_share < 1
        assert stats.read_share + stats.estimated_share + stats.dropped_share == pytest.approx(1)
        assert 0 < stats.predicted_error < 0.3
        assert stats.predicted_error <= stats.predicted_error_max
        assert 0 < stats.server_s < stats.wait_s
        assert f"{stats.read_share:.2%} of the tokens read" in str(stats)
        attachment.reset_stats()
        assert attachment.stats == attnd.transformers.Stats()


@pytest.mark.parametrize("policy", ["snapkv", "asynctls"])
def test_policies_that_look_at_the_prompts_queries(attnd_target, policy):
    """The server refuses the end of a prompt without them for snapkv; here the rows are padded."""
    model = load("nano-llama")
    ids, mask = padded("nano-llama", 700)
    with attached(model, attnd_target, policy) as attachment:
        got = generate(model, ids, attachment.new_cache(), attention_mask=mask)
    assert got.sequences.shape == (3, 712)


def test_a_policy_for_one_cache(attnd_target):
    model, ids = load("nano-llama"), prompt("nano-llama", 1, 600)
    with attached(model, attnd_target, "dense") as attachment:
        generate(model, ids, attachment.new_cache(policy="streaming"))
        assert attachment.stats.dropped_share > 0


def test_trees_of_other_sizes(attnd_target):
    model, ids = load("nano-llama"), prompt("nano-llama", 1, 600)
    sizes = attnd.TreeOptions(leaf_tokens=16, fan=16)
    with attached(model, attnd_target, "error-target", tree=sizes) as attachment:
        cache = attachment.new_cache()
        generate(model, ids, cache)
        with attnd.Client(attnd_target, tenant="test") as client:
            trees = {info.sequence_id: info.tree for info in client.list_sequences()}
        (sequence_id,) = cache.sequence_ids
        assert trees[sequence_id] == attnd.TreeOptions(16, 16, 3)


def test_the_prompt_may_be_waited_for(attnd_target):
    """end_prompt() leaves no keys here, and the answers are the same."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 100)
    expected = local(model, ids)
    with attached(model, attnd_target) as attachment:
        cache = attachment.new_cache()
        with torch.no_grad():
            model(ids[:, :99], past_key_values=cache)
        assert all(layer.keys is not None for layer in cache.layers)
        cache.end_prompt()
        assert all(layer.keys is None for layer in cache.layers)
        assert_same(generate(model, ids, cache), expected)


def test_the_model_has_its_own_attention_back(attnd_target):
    model = load(TINY[0])
    with attached(model, attnd_target):
        assert model.config._attn_implementation == "attnd"
    assert model.config._attn_implementation == "sdpa"
