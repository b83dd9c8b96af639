# SPDX-License-Identifier: Apache-2.0
"""What attnd.transformers cannot answer is refused, with an error that names it; nothing is left
open on the server."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.cache_utils import DynamicCache

import attnd
from attnd.transformers import attention
from attnd.transformers.cache import _CROP_REMOVES
from attnd.transformers.refusals import check_model
from transformers_models import (
    SIZES,
    TINY,
    attached,
    generate,
    load,
    prompt,
    tiny,
    torch,
    transformers,
)


@pytest.fixture
def sequences(attnd_target):
    """How many sequences the test's tenant has."""

    def count() -> int:
        with attnd.Client(attnd_target, tenant="test") as client:
            return len(list(client.list_sequences()))

    yield count
    assert count() == 0


@pytest.fixture
def attachment(attnd_target, sequences):
    with attached(load(TINY[0]), attnd_target) as made:
        yield made


def of(config, **over):
    """All of a model that check_model() looks at."""
    return types.SimpleNamespace(config=config(**{**SIZES, **over}))


CONFIGS = {
    "a sliding window": (
        lambda: of(transformers.MistralConfig, sliding_window=64),
        "sliding_window",
    ),
    "windows in some layers": (
        lambda: of(transformers.Gemma2Config, attn_logit_softcapping=None),
        "layer_types",
    ),
    "a soft cap": (
        lambda: of(
            transformers.Gemma2Config,
            attn_logit_softcapping=50.0,
            layer_types=["full_attention"] * 3,
        ),
        "attn_logit_softcapping",
    ),
    "sinks and windows": (lambda: of(transformers.GptOssConfig), "layer_types"),
    "linear attention": (lambda: of(transformers.Qwen3NextConfig), "layer_types"),
    "an encoder": (
        lambda: types.SimpleNamespace(config=transformers.T5Config(num_layers=1)),
        "is_encoder_decoder",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_models_are_refused_by_their_config(case):
    make, field = CONFIGS[case]
    with pytest.raises(ValueError, match=field):
        check_model(make())


def test_a_recurrent_model_is_refused(attnd_target):
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=30, hidden_size=16, state_size=4, num_hidden_layers=1)
    )
    with pytest.raises(ValueError, match="recurrent state|config.layer_types"):
        attached(model, attnd_target)


def test_a_model_with_attention_of_its_own_is_refused(attnd_target):
    model = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=30, hidden_size=16, n_layer=1, n_head=2)
    )
    with pytest.raises(ValueError, match="does not call Transformers' attention interface"):
        attached(model, attnd_target)


def call(**over):
    """attention() of one column, with arguments that differ from good ones."""
    module = torch.nn.Module()
    tensor = torch.zeros(1, 2, 1, 16)
    arguments = {"attention_mask": None, "scaling": 1.0, **over}
    with torch.no_grad():
        return attention.attention(module, tensor, tensor, tensor, **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 30.0),
        ("s_aux", torch.zeros(2)),
        ("position_bias", torch.zeros(1, 2, 1, 1)),
        ("sliding_window", 64),
        ("output_attentions", True),
        ("cache", object()),
        ("cu_seq_lens_q", torch.zeros(2)),
        ("dropout", 0.1),
        ("is_causal", False),
        ("attention_mask", torch.zeros(1, 1, 1, 1)),
    ],
)
def test_calls_are_refused_by_their_arguments(name, value):
    with pytest.raises(ValueError, match=name):
        call(**{name: value})


def test_masks_of_other_patterns_are_refused():
    with pytest.raises(ValueError, match="causal attention only"):
        attention.padding_mask(mask_function=lambda *indices: True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"past_key_values": DynamicCache()},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=["none", "dynamic", "without", "static"],
)
def test_a_missing_cache_is_refused(attachment, options):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 20)
    with pytest.raises(ValueError, match="no cache of attnd: pass past_key_values"):
        model.generate(ids, max_new_tokens=2, do_sample=False, **options)


def test_a_ready_mask_is_refused(attachment):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 8)
    with torch.no_grad(), pytest.raises(ValueError, match="attention_mask has 4 dimensions"):
        mask = torch.zeros(1, 1, 8, 8)
        model(ids, attention_mask=mask, past_key_values=attachment.new_cache())


def test_attention_weights_are_refused(attachment):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 8)
    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True, past_key_values=attachment.new_cache())


def test_training_is_refused(attnd_target, sequences):
    model, ids = tiny(TINY[0], attention_dropout=0.1), prompt(TINY[0], 1, 8)
    with attached(model, attnd_target) as attachment:
        with pytest.raises(ValueError, match="no gradients"):
            model(ids, past_key_values=attachment.new_cache())
        model.train()
        with torch.no_grad(), pytest.raises(ValueError, match="dropout is 0.1"):
            model(ids, past_key_values=attachment.new_cache())


def test_another_mask_over_the_same_cache_is_refused(attachment):
    """Also none at all, where tokens before were padding."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 9)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    shown = torch.ones((1, 10), dtype=torch.long)
    for later, error in (
        (shown, "hides other tokens"),
        (None, "hides other tokens"),
        (torch.tensor([[0, 1, 1]]), "has shape"),
    ):
        cache = attachment.new_cache()
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            with pytest.raises(ValueError, match=error):
                model(ids[:, :1], attention_mask=later, past_key_values=cache)


def test_another_batch_over_the_same_cache_is_refused(attachment):
    model, cache = load(TINY[0]), attachment.new_cache()
    with torch.no_grad():
        model(prompt(TINY[0], 1, 9), past_key_values=cache)
        with pytest.raises(ValueError, match="the batch has 2 rows, the cache holds 1"):
            model(prompt(TINY[0], 2, 1), past_key_values=cache)


def test_a_cache_after_a_failed_pass_is_refused(attachment, monkeypatch):
    model, ids, cache = load(TINY[0]), prompt(TINY[0], 1, 9), attachment.new_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        monkeypatch.setattr(attnd.Pass, "step", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], past_key_values=cache)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="the pass before attended in 0 of 3 layers"):
            model(ids[:, :1], past_key_values=cache)


def test_another_attention_over_the_cache_is_refused(attachment):
    """It would see the new keys alone. Also another model's."""
    model, other, ids = load(TINY[0]), tiny(TINY[0], seed=1), prompt(TINY[0], 1, 9)
    with torch.no_grad():
        cache = attachment.new_cache()
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="a model that does not attend with attnd"):
            other(ids[:, :1], past_key_values=cache)
        cache = attachment.new_cache()
        model(ids, past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="the model's attention is 'sdpa'"):
            model(ids[:, :1], past_key_values=cache)


def test_a_closed_cache_and_a_closed_attachment_are_refused(attnd_target, sequences):
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 9)
    with attached(model, attnd_target) as attachment:
        with attachment.new_cache() as cache:
            generate(model, ids, cache)
        with torch.no_grad(), pytest.raises(ValueError, match="this cache is closed"):
            model(ids, past_key_values=cache)
    attachment.close()
    with pytest.raises(ValueError, match="this attachment is closed"):
        attachment.new_cache()


def test_a_length_is_refused_where_crop_removes(attachment):
    cache = attachment.new_cache()
    with torch.no_grad():
        load(TINY[0])(prompt(TINY[0], 1, 9), past_key_values=cache)
    if _CROP_REMOVES:
        with pytest.raises(ValueError, match=r"crop\(3\)"):
            cache.crop(3)
        cache.crop(-6)
    else:
        cache.crop(3)
    assert cache.get_seq_length() == 3


def test_a_dtype_that_the_server_lacks_is_refused(attnd_target, sequences):
    model, ids = tiny(TINY[0]).double(), prompt(TINY[0], 1, 9)
    with attached(model, attnd_target) as attachment:
        with pytest.raises(ValueError, match="none of bfloat16, float16, float32"):
            generate(model, ids, attachment.new_cache())


def test_layers_of_different_shapes_are_refused(attachment):
    """Told from the tensors of the second layer: here its scale."""
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 9)
    layer = model.model.layers[1].self_attn
    before, layer.scaling = layer.scaling, 1.0
    try:
        with torch.no_grad(), pytest.raises(ValueError, match="one shape for all layers"):
            model(ids, past_key_values=attachment.new_cache())
    finally:
        layer.scaling = before


def test_what_the_server_refuses_comes_in_its_words(attnd_target, sequences):
    ids = prompt(TINY[0], 1, 9)
    model = load(TINY[0])
    with attached(model, attnd_target, "no-such-policy") as attachment:
        with pytest.raises(attnd.InvalidArgumentError, match="no-such-policy"):
            generate(model, ids, attachment.new_cache())
    odd = tiny(TINY[0], head_dim=20)
    with attached(odd, attnd_target) as attachment:
        with pytest.raises(attnd.InvalidArgumentError, match="head_dim"):
            generate(odd, ids, attachment.new_cache())


def test_a_server_that_is_not_there(folder):
    model = load(TINY[0])
    with pytest.raises(attnd.UnavailableError):
        attached(model, f"unix:{folder}/nobody.sock", timeout_s=20)
    assert model.config._attn_implementation == "sdpa"


def test_weights_without_values_need_a_name(attnd_target):
    model = tiny(TINY[0]).to("meta")
    with pytest.raises(ValueError, match="give attach\\(\\) a fingerprint"):
        attached(model, attnd_target)
    with attached(model, attnd_target, fingerprint="mine") as attachment:
        assert attachment.fingerprint == "mine"
