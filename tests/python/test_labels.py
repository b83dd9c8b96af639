# SPDX-License-Identifier: Apache-2.0
"""Label channels: attnd.labels against a reference in loops, and a server that was given a file of
them against labels that are made and searched by their definition, in float64."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
import attnd  # noqa: E402
import oracle  # noqa: E402
from attnd.eval import server as servers  # noqa: E402
from attnd.labels import channels as label_channels  # noqa: E402
from attnd.labels import cli, texts  # noqa: E402
from attnd.nano import Config, Model  # noqa: E402
from cases import Case  # noqa: E402
from conftest import PROGRAM, ROOT, require_program  # noqa: E402
from test_nano import ref_model  # noqa: E402
from tiny_models import FAMILIES, random_weights  # noqa: E402

NANO_LLAMA = ROOT / "models" / "nano-llama"
SET_LENGTH = 160

# ---- Choosing ----


def reference_importance(config, weights, prompts):
    """mean_h max|q_h[i]| * max|k[i]|, one number at a time."""
    passes = [ref_model(config, weights, tokens)[1] for tokens in prompts]
    queries, keys, _ = passes[0][0]
    kv_heads, dim = keys.shape[1:]
    group = queries.shape[1] // kv_heads
    result = np.zeros((config["num_hidden_layers"], kv_heads, dim))
    for layer, kv_head, i in np.ndindex(result.shape):
        queries = [
            max(abs(token[kv_head * group + h][i]) for one in passes for token in one[layer][0])
            for h in range(group)
        ]
        keys = max(abs(token[kv_head][i]) for one in passes for token in one[layer][1])
        result[layer, kv_head, i] = math.fsum(queries) / group * keys
    return result


@pytest.mark.parametrize("name", FAMILIES)
def test_importance_equals_the_reference(name):
    config = FAMILIES[name]
    weights = random_weights(config)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, config["vocab_size"], length) for length in (19, 7)]
    model = Model(Config.parse(config), weights)
    expected = reference_importance(config, weights, prompts)
    np.testing.assert_allclose(label_channels.importance(model, prompts), expected, rtol=1e-3)
    # Each text, and each query head of a group, counts.
    assert not np.allclose(expected, reference_importance(config, weights, prompts[:1]), rtol=1e-2)


def test_channels_are_the_greatest_the_lower_of_equals_first():
    weights = np.array([[[1.0, 5, 5, 2, 5], [0, 0, 0, 0, 0]], [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]])
    np.testing.assert_array_equal(
        label_channels.choose(weights, 2), [[[1, 2], [0, 1]], [[2, 4], [0, 2]]]
    )
    assert [label_channels.label_channels(dim) for dim in (16, 64, 128, 512, 576)] == [
        4, 16, 32, 128, 128,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "prompts, words",
    [
        ([], "no calibration texts"),
        ([[]], "text 1: 0 tokens"),
        ([[1], [2, 29]], "text 2: .*0..28"),
        ([[-1]], "text 1"),
    ],
)
def test_texts_that_are_no_texts(prompts, words):
    config = FAMILIES["qwen3, untied"]
    model = Model(Config.parse(config), random_weights(config))
    with pytest.raises(ValueError, match=words):
        label_channels.importance(model, [np.array(one, np.int64) for one in prompts])


# ---- The program ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny random model, its set of two sequences for two tasks each, and an array
    of texts."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("tiny")
    config = FAMILIES["llama, untied, theta at the top"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config), folder / "model.safetensors")
    tokens = np.random.default_rng(8).integers(0, 29, (4, SET_LENGTH), dtype=np.int16)
    mask = np.zeros(tokens.shape, bool)
    mask[:, -8] = True
    arrays = {"tokens": tokens, "answer_mask": mask, "task": np.array([0, 3, 0, 3], np.int8)}
    np.savez(folder / "set.npz", **{f"{name}_{SET_LENGTH}": x for name, x in arrays.items()})
    np.save(folder / "texts.npy", tokens)
    return folder


def test_the_file_is_what_the_texts_choose(tiny, tmp_path, capsys):
    from safetensors import safe_open

    out = tmp_path / "channels.safetensors"
    arguments = ["--model", str(tiny), "--texts", str(tiny / "set.npz"), "--out", str(out)]
    arguments += ["--length", str(SET_LENGTH), "--skip", "1"]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert "4 of 16 channels of 3 layers and 2 KV heads, from 2 texts" in capsys.readouterr().out
    assert os.listdir(tmp_path) == [out.name]
    model = Model.load(tiny)
    chosen = np.load(tiny / "texts.npy")[2:].astype(np.int64)  # the second of each task
    expected = label_channels.choose(label_channels.importance(model, chosen), 4)
    with safe_open(out, "np") as file:
        assert list(file.keys()) == ["channels"]
        channels, metadata = file.get_tensor("channels"), file.metadata()
    assert channels.dtype == np.int64 and channels.shape == (3, 2, 4)
    np.testing.assert_array_equal(channels, expected)
    assert metadata.pop("command").startswith("python -m attnd.labels --model")
    assert metadata == {
        "format": "attnd.label_channels.1", "fingerprint": model.fingerprint, "head_dim": "16",
    }  # fmt: skip


def test_texts_of_either_file(tiny):
    rows = np.load(tiny / "texts.npy")
    of_set = tiny / "set.npz"
    for got, wanted in (
        (texts.read_texts(of_set, SET_LENGTH, 0, None), rows[[0, 2, 1, 3]]),  # task by task
        (texts.read_texts(of_set, SET_LENGTH, 0, 1), rows[[0, 1]]),
        (texts.read_texts(of_set, SET_LENGTH, 1, 5), rows[[2, 3]]),
        (texts.read_texts(tiny / "texts.npy", None, 0, None), rows),
        (texts.read_texts(tiny / "texts.npy", 50, 1, 2), rows[1:3, :50]),
    ):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "change, words",
    [
        (["--length", "99"], "lengths 160, not 99"),
        ([], "--length is missing"),
        (["--length", "160", "--skip", "2"], "no texts behind the first 2"),
        (["--length", "160", "--skip", "-1"], "skip is -1"),
        (["--length", "160", "--limit", "0"], "limit 0"),
        (["--texts", "{tiny}/texts.npy", "--length", "161"], "texts of 160 tokens, not 161"),
        (["--texts", "{tiny}/config.json"], "config.json"),
        (["--texts", "/nonexistent.npy"], "No such file"),
        (["--model", "/nonexistent"], "No such file"),
    ],
)
def test_faults_are_said_in_a_line(tiny, tmp_path, capsys, change, words):
    out = tmp_path / "out"
    arguments = ["--model", str(tiny), "--texts", str(tiny / "set.npz"), "--out", str(out)]
    assert cli.main([*arguments, *(text.format(tiny=tiny) for text in change)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnd.labels: ") and words in line
    assert not out.exists()


def test_the_repositorys_file_is_its_models():
    from safetensors import safe_open

    with safe_open(NANO_LLAMA / "label_channels.safetensors", "np") as file:
        assert file.metadata()["fingerprint"] == Model.load(NANO_LLAMA).fingerprint
        assert file.get_tensor("channels").shape == (4, 2, 16)
        command = file.metadata()["command"]
    assert command in (NANO_LLAMA / "README.md").read_text().replace("\\\n  ", "")


# ---- A server with a file ----

TOKENS = 1400
SINK = 4
CASE = Case.random(TOKENS + 8)
BUDGET = 64
CHANNELS = np.sort(
    [[np.random.default_rng([7, i, j]).permutation(32)[:8] for j in range(2)] for i in range(2)]
)


@pytest.fixture(name="file", scope="module")
def fixture_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "channels.safetensors"
    label_channels.save(path, CHANNELS, "test", 32, {})
    return path


def test_what_lies_beside_the_file_stays(tmp_path):
    path = tmp_path / "channels.safetensors"
    (tmp_path / "channels.safetensors.partial").write_text("mine")
    label_channels.save(path, CHANNELS, "test", 32, {})
    assert (tmp_path / "channels.safetensors.partial").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture(name="client", scope="module")
def fixture_client(file):
    require_program()
    flags = [f"--label-channels={file}", "--segment-tokens=512"]
    with servers.running(PROGRAM, flags) as target, attnd.Client(target) as client:
        yield client


def dequantised(row):
    """Asymmetric 4 bits: scale = (max - min) / 15."""
    least = np.float32(row.min())
    scale = np.float32((row.max().astype(np.float64) - row.min()) / 15)
    if scale == 0:
        return np.full(len(row), float(least))
    codes = np.floor((row.astype(np.float64) - float(least)) / float(scale) + 0.5)
    return float(least) + float(scale) * np.clip(codes, 0, 15)


def expected(layer, position, channels, candidates, always):
    """Attention over the `always` tokens and the BUDGET candidates of most weight by labels, of
    each KV head: [query_heads, value_dim]."""
    scale = CASE.shape.head_dim**-0.5
    group = CASE.shape.query_heads // CASE.shape.kv_heads
    outs = []
    for kv_head in range(CASE.shape.kv_heads):
        keys, values = CASE.k[layer, :, kv_head], CASE.v[layer, :, kv_head]
        queries = CASE.q[layer, position, kv_head * group : (kv_head + 1) * group]
        chosen = channels[layer, kv_head]
        labels = np.array([dequantised(keys[token, chosen]) for token in candidates])
        weight = np.zeros(len(candidates))
        for query in queries:
            logits = scale * labels @ query[chosen].astype(np.float64)
            weight += np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() / group
        best = np.argsort(-weight, kind="stable")[:BUDGET]
        read = np.union1d(always, np.asarray(candidates)[best])
        out, _ = oracle.attention(
            queries[None], keys[read][:, None], values[read][:, None], scale, len(read)
        )
        outs.append(out[0])
    return np.concatenate(outs)


def answered(client, model, policy, position):
    """Tokens in segments, and [layers][query_heads, value_dim] of one token behind the prompt."""
    sequence = client.open_sequence(model, policy=policy).sequence_id
    prompt = attnd.layer_chunks(CASE.layers(slice(0, position)))
    # They would weigh channels, were there no file.
    observed = [CASE.q[layer, position - 16 : position] for layer in range(CASE.shape.layers)]
    appended = client.append_kv(sequence, prompt, prefill_complete=True, observed_queries=observed)
    outs = []
    with client.decode_session() as session:
        for layer in range(CASE.shape.layers):
            at = slice(position, position + 1)
            row = attnd.Row(sequence, position)
            step = session.step(layer, [row], CASE.q[layer, at], *CASE.sent(layer, at))
            outs.append(step.out[0])
    client.close_sequence(sequence)
    return appended.segmented_tokens, np.array(outs)


def test_double_sparsity_answers_by_the_files_channels(client):
    policy = f"double-sparsity:budget={BUDGET}"
    segmented, outs = answered(client, CASE.model, policy, TOKENS)
    assert segmented >= 1024, "two segments"
    middle = range(SINK, segmented)
    always = [*range(SINK), *range(segmented, TOKENS + 1)]
    by_keys = np.abs(CASE.k[:, SINK:512]).max(1).argsort(-1)[..., -8:]
    for layer, out in enumerate(outs):
        wanted = expected(layer, TOKENS, CHANNELS, middle, always)
        np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)
        others = expected(layer, TOKENS, by_keys, middle, always)
        assert np.abs(out - others).max() > 1e-2, "other channels make other answers"
    # Another model's channels are its own affair.
    _, own = answered(client, attnd.Model("another", CASE.shape), policy, TOKENS)
    assert np.abs(own - outs).max() > 1e-2


def test_asynctls_answers_by_the_files_channels(client):
    """All blocks are searched, so that labels alone choose; those that are not full are read."""
    segmented, outs = answered(client, CASE.model, f"asynctls:budget={BUDGET}", TOKENS)
    # Segments have whole blocks but for the sink's, and maybe the last.
    full = range(64, segmented // 64 * 64)
    always = [token for token in range(TOKENS + 1) if token not in full]
    for layer, out in enumerate(outs):
        wanted = expected(layer, TOKENS, CHANNELS, full, always)
        np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)


def test_a_model_of_another_shape_is_refused(client):
    shape = attnd.ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=64, dtype="fp32")
    model = attnd.Model("test", shape)
    for policy in ("double-sparsity", "asynctls"):
        with pytest.raises(attnd.FailedPreconditionError, match="head_dim 32, 8 .* 16 channels"):
            client.open_sequence(model, policy=policy)
    client.close_sequence(client.open_sequence(model, policy="quest").sequence_id)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), ""),
        (lambda path: path.unlink(), "No such file"),
        (
            lambda path: label_channels.save(path, CHANNELS[..., ::-1], "test", 32, {}),
            "channels has .* ascending",
        ),
        (lambda path: label_channels.save(path, CHANNELS, "", 32, {}), "metadata fingerprint"),
    ],
    ids=["short", "missing", "descending", "nameless"],
)
def test_a_wrong_file_keeps_the_server_from_starting(file, tmp_path, spoil, words):
    require_program()
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(file.read_bytes())
    spoil(path)
    with pytest.raises(ValueError, match=f"label_channels {path}: .*{words}"):
        with servers.running(PROGRAM, [f"--label-channels={path}"]):
            pass


def test_two_files_of_one_model_are_refused(file):
    require_program()
    flags = [f"--label-channels={file}", f"--label-channels={file}"]
    with pytest.raises(ValueError, match=f"label_channels {file}: another file is of the same"):
        with servers.running(PROGRAM, flags):
            pass
