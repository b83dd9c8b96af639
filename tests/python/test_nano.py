# SPDX-License-Identifier: Apache-2.0
"""The model runner equals a reference that is written in loops, in float64, from the papers'
formulas; for random tiny models of all families and for nano-llama's own answers."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import pytest

import oracle
from tiny_models import FAMILIES, random_weights

nano = pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
from attnd.nano import attention  # noqa: E402
from attnd.nano.model import heads_first  # noqa: E402
from attnd.nano.parallel import map_blocks, run_all, single_threaded_blas  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO_LLAMA = ROOT / "models" / "nano-llama"

# ---- The reference: one token, one head, one element at a time ----


def ref_norm(x, weight, eps):
    return x / math.sqrt(sum(e * e for e in x) / len(x) + eps) * weight


def ref_rope(x, position, theta):
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def ref_heads(config, w, name, h, position):
    """One token's q, k and v of all heads as the model defines them, and again as a server sees
    them: six times [heads, dim]. w holds float64 weights, name is the layer's prefix."""
    eps, dim, theta = config["rms_norm_eps"], config["head_dim"], ref_theta(config)
    rows = []
    for part in "qkv":
        row = (w[f"{name}{part}_proj.weight"] @ h).reshape(-1, dim)
        if part != "v":
            if config["model_type"] == "qwen3":
                norm = w[f"{name}{part}_norm.weight"]
                row = np.array([ref_norm(e, norm, eps) for e in row])
            row = np.array([ref_rope(e, position, theta) for e in row])
        rows.append(row)
    q, k, v = rows
    return q, k, v, q, k, v


def ref_latent_heads(config, w, name, h, position):
    """The same of latent attention as DeepSeek-V2 defines it (arXiv 2405.04434, section 2.1): with
    keys and values written out for each head. A server sees the latent vector as key and value, and
    queries multiplied with what makes a head's keys of it."""
    eps, theta = config["rms_norm_eps"], ref_theta(config)
    rank, plain = config["kv_lora_rank"], config["qk_nope_head_dim"]
    heads = config["num_attention_heads"]
    q = (w[f"{name}q_proj.weight"] @ h).reshape(heads, -1)
    q = np.array([[*e[:plain], *ref_rope(e[plain:], position, theta)] for e in q])
    compressed = w[f"{name}kv_a_proj_with_mqa.weight"] @ h
    latent = ref_norm(compressed[:rank], w[f"{name}kv_a_layernorm.weight"], eps)
    rotated = ref_rope(compressed[rank:], position, theta)
    kv = (w[f"{name}kv_b_proj.weight"] @ latent).reshape(heads, -1)
    k = np.array([[*e[:plain], *rotated] for e in kv])
    makes_kv = w[f"{name}kv_b_proj.weight"].reshape(heads, -1, rank)
    seen_q = np.array([[*(e[:plain] @ m[:plain]), *e[plain:]] for e, m in zip(q, makes_kv)])
    return q, k, kv[:, plain:], seen_q, np.array([[*latent, *rotated]]), latent[None]


def ref_theta(config):
    return (
        config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
    )


def ref_model(config, weights, tokens):
    """Logits [tokens, vocab] and what a server sees of each layer, q, k and v [tokens, heads, dim];
    float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    eps = config["rms_norm_eps"]
    heads_of = ref_latent_heads if config["model_type"] == "deepseek_v3" else ref_heads
    x = [w["model.embed_tokens.weight"][token] for token in tokens]
    layers = []
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        parts = []
        for position, hidden in enumerate(x):
            h = ref_norm(hidden, w[name + "input_layernorm.weight"], eps)
            parts.append(heads_of(config, w, f"{name}self_attn.", h, position))
        q, k, v, *seen = (np.array(part) for part in zip(*parts))
        layers.append(seen)
        out, _ = oracle.attention(q, k, v, q.shape[-1] ** -0.5, first=0)
        for position in range(len(x)):
            y = x[position] + w[name + "self_attn.o_proj.weight"] @ out[position].reshape(-1)
            h = ref_norm(y, w[name + "post_attention_layernorm.weight"], eps)
            gate = w[name + "mlp.gate_proj.weight"] @ h
            up = w[name + "mlp.up_proj.weight"] @ h
            x[position] = y + w[name + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return np.array([head @ ref_norm(h, w["model.norm.weight"], eps) for h in x]), layers


def tiny(config, seed=0):
    weights = random_weights(config, seed)
    return nano.Model(nano.Config.parse(config), weights), weights


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_decode_equal_the_reference(name):
    config = FAMILIES[name]
    model, weights = tiny(config)
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], 21)
    logits, layers = ref_model(config, weights, tokens)

    prefilled = model.prefill(tokens[:17])
    for (k, v), (_, ref_k, ref_v) in zip(prefilled, layers):
        np.testing.assert_allclose(k, ref_k[:17], atol=2e-4)
        np.testing.assert_allclose(v, ref_v[:17], atol=2e-4)
    local = nano.LocalKv(prefilled, 21, model.config.softmax_scale)
    decoded = [
        model.forward(tokens[i : i + 1], np.array([i]), local.attend)[0] for i in range(17, 21)
    ]
    np.testing.assert_allclose(decoded, logits[17:], atol=2e-4)
    # Several tokens at once are the same.
    local = nano.LocalKv(prefilled, 21, model.config.softmax_scale)
    np.testing.assert_allclose(
        model.forward(tokens[17:], np.arange(17, 21), local.attend), logits[17:], atol=2e-4
    )


def test_the_families_differ():
    """A reference that ignored head norms would pass both, so they must matter."""
    config = FAMILIES["qwen3, untied"]
    weights = random_weights(config)
    tokens = np.arange(9)
    with_norms, _ = ref_model(config, weights, tokens)
    without, _ = ref_model({**config, "model_type": "llama"}, weights, tokens)
    assert abs(with_norms - without).max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_folder_is_read(tmp_path, dtype):
    safetensors = pytest.importorskip("safetensors.numpy")
    import attnd  # noqa: F401  registers bfloat16 with numpy

    config = FAMILIES["qwen3, tied, theta in rope_parameters"]
    weights = {name: array.astype(dtype) for name, array in random_weights(config).items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    model = nano.Model.load(tmp_path)
    same = nano.Model(nano.Config.parse(config), weights)
    tokens = np.arange(5)
    for loaded, direct in zip(model.prefill(tokens), same.prefill(tokens)):
        assert np.array_equal(loaded[0], direct[0]) and np.array_equal(loaded[1], direct[1])
    assert len(model.fingerprint) == 64
    assert model.attnd_model("bf16").shape.kv_heads == 2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1.0}, "rope_type"),
    ],
)
def test_models_that_are_not_supported(change, words):
    with pytest.raises(ValueError, match=words):
        nano.Config.parse({**FAMILIES["llama, untied, theta at the top"], **change})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"q_lora_rank": 8}, "q_lora_rank"),
        ({"rope_interleave": True}, "rope_interleave"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
    ],
)
def test_latent_models_that_are_not_supported(change, words):
    with pytest.raises(ValueError, match=words):
        nano.Config.parse({**FAMILIES["deepseek_v3"], **change})
    entries = {k: v for k, v in FAMILIES["deepseek_v3"].items() if k != "rope_interleave"}
    with pytest.raises(ValueError, match="rope_interleave"):
        nano.Config.parse(entries)  # Hugging Face takes a missing entry for true


def test_a_latent_model_is_one_kv_head_to_attnd():
    model, _ = tiny(FAMILIES["deepseek_v3"])
    shape = model.attnd_model("bf16").shape
    assert (shape.query_heads, shape.kv_heads, shape.latent) == (4, 1, True)
    assert (shape.head_dim, shape.value_dim) == (32, 20)
    assert shape.softmax_scale == pytest.approx(26**-0.5)


@pytest.mark.parametrize("missing", ["rope_theta", "hidden_size", "rms_norm_eps"])
def test_configurations_that_lack_something(missing):
    entries = {k: v for k, v in FAMILIES["llama, untied, theta at the top"].items() if k != missing}
    with pytest.raises(ValueError, match=missing):
        nano.Config.parse(entries)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.2.self_attn.q_norm.weight"]
)
def test_weights_that_are_missing_or_misshapen(name):
    config = FAMILIES["qwen3, untied"] | {"tie_word_embeddings": False}
    weights = random_weights(config)
    with pytest.raises(ValueError, match=name):
        nano.Model(nano.Config.parse(config), {k: v for k, v in weights.items() if k != name})
    with pytest.raises(ValueError, match=name):
        nano.Model(nano.Config.parse(config), weights | {name: weights[name][:-1]})


@pytest.mark.parametrize(
    "queries, tokens", [(1, 1), (1, 700), (3, 3), (64, 64), (65, 1100), (130, 130), (200, 1025)]
)
def test_blocked_attention_equals_the_oracle(queries, tokens):
    rng = np.random.default_rng([queries, tokens])
    q = 3 * rng.standard_normal((queries, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((tokens, 2, 16)).astype(np.float32) for _ in range(2))
    out = nano.causal_attention(q, heads_first(k), heads_first(v), 0.25)
    expected, _ = oracle.attention(q, k, v, 0.25, first=tokens - queries)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_threads_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((150, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((2, 600, 16)).astype(np.float32) for _ in range(2))
    with single_threaded_blas():  # a BLAS's own threads may divide a product's sums
        alone = nano.causal_attention(q, k, v, 0.25)
    monkeypatch.setattr(attention, "_THREADED_PRODUCTS_MIN", 0)
    assert np.array_equal(nano.causal_attention(q, k, v, 0.25), alone)


def test_blocks_are_put_together_in_order_and_errors_come_through():
    rows = np.arange(5000.0)
    doubled, squared = map_blocks(lambda a, b: (a + b, a * b), rows, rows)
    assert np.array_equal(doubled, 2 * rows) and np.array_equal(squared, rows * rows)
    with pytest.raises(ZeroDivisionError):
        run_all([lambda: None, lambda: 1 // 0])  # type: ignore[list-item, return-value]


def test_local_kv_has_a_capacity():
    model, _ = tiny(FAMILIES["llama, untied, theta at the top"])
    local = nano.LocalKv(model.prefill(np.arange(4)), 5, model.config.softmax_scale)
    model.forward(np.array([1]), np.array([4]), local.attend)
    with pytest.raises(ValueError, match="capacity"):
        model.forward(np.array([1]), np.array([5]), local.attend)


def test_nano_llama_answers_its_questions():
    """The repository's model, its first niah text of 2,048 tokens: all answers are right with dense
    attention."""
    model = nano.Model.load(NANO_LLAMA)
    with np.load(NANO_LLAMA / "nano_eval.npz") as data:
        index = int(np.flatnonzero(data["task_2048"] == 0)[0])
        tokens, mask = data["tokens_2048"][index].astype(int), data["answer_mask_2048"][index]
    start = 2048 - 128
    local = nano.LocalKv(model.prefill(tokens[:start]), 2048, model.config.softmax_scale)
    best = model.forward(tokens[start:], np.arange(start, 2048), local.attend).argmax(-1)
    answers = np.flatnonzero(mask) - start
    assert (best[answers - 1] == tokens[start:][answers]).mean() >= 0.96
