# SPDX-License-Identifier: Apache-2.0
"""Retrieval with completion through the server, with the maps that lie in the repository: completed
answers are nearer to dense ones than those of the retrieved tokens alone."""

import numpy as np
import pytest

import attnd
from conftest import ROOT, require_program
from live_server import running

FOLDER = ROOT / "models/nano-llama"
TOKENS = 4096
QUESTIONS = 32


@pytest.fixture(scope="module")
def captured():
    """Rotated q, k and v of each layer, of a prefix of an evaluation text and its questions."""
    nano = pytest.importorskip("attnd.nano")
    model = nano.Model.load(FOLDER)
    with np.load(FOLDER / "nano_eval.npz") as sets:
        text = sets["tokens_8192"][0].astype(np.int64)
    tokens = np.concatenate([text[:TOKENS], text[-QUESTIONS:]])
    layers = []

    def attend(layer, q, k, v):
        layers.append((q, k, v))
        keys, values = (np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (k, v))
        return nano.causal_attention(q, keys, values, model.config.softmax_scale)

    model.forward(tokens, np.arange(len(tokens)), attend)
    return model.attnd_model(), layers


def answers(client, captured, policy):
    """[layers][questions, heads, value_dim] and the statistics of the last row."""
    model, layers = captured
    sequence = client.open_sequence(
        model, policy="topk-completion", indexes=["summary"]
    ).sequence_id
    prompt = [(k[:TOKENS], v[:TOKENS]) for _, k, v in layers]
    client.append_kv(sequence, attnd.layer_chunks(prompt), prefill_complete=True)
    outs = []
    with client.decode_session() as session:
        for layer, (q, k, v) in enumerate(layers):
            row = attnd.Row(sequence, position=TOKENS, query_tokens=QUESTIONS, policy=policy)
            result = session.step(layer, [row], q[TOKENS:], k[TOKENS:], v[TOKENS:])
            outs.append(result.out)
    client.close_sequence(sequence)
    return np.stack(outs), result.rows[0].stats


def error(answer, dense):
    return np.mean(np.linalg.norm(answer - dense, axis=-1) / np.linalg.norm(dense, axis=-1))


def test_completion_comes_nearer_to_dense_attention(captured):
    require_program()
    maps = FOLDER / "feature_maps_16384.safetensors"
    with running("--feature-maps", str(maps)) as (target, _), attnd.Client(target) as client:
        dense, _ = answers(client, captured, "dense:window=16")
        alone, dropped = answers(client, captured, "topk-completion:completion=off")
        completed, estimated = answers(client, captured, "topk-completion")
        assert dropped.dropped_tokens > 0 and dropped.estimated_tokens == 0
        assert estimated.estimated_tokens == dropped.dropped_tokens
        assert estimated.predicted_error_mean is None
        assert error(completed, dense) < 0.5 * error(alone, dense)


def test_without_maps_it_is_refused(captured):
    require_program()
    with running() as (target, _), attnd.Client(target) as client:
        with pytest.raises(attnd.FailedPreconditionError, match="no feature maps"):
            client.open_sequence(captured[0], policy="topk-completion")
