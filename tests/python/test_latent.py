# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA) against both servers: one KV head whose value is the front of its key.
Values are never sent; answers equal the float64 oracle over the keys' fronts; messages that send
values, or lack those of other models, are refused."""

import asyncio
import dataclasses

import grpc
import numpy as np
import pytest

import attnd
import attnd.aio
from attnd.tensors import dtype_name, to_tensor
from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import attnd_pb2_grpc
from bad_input import METADATA, TIMEOUT_S, append_error, assert_refused, decode, verdict
from cases import Case, assert_near, lengths, opened, step
from tiny_models import FAMILIES, random_weights

LATENT = attnd.ModelShape(
    layers=2, query_heads=8, kv_heads=1, head_dim=80, value_dim=64, dtype="fp32", latent=True
)
# What may share a message's queries and keys with it.
PLAIN = dataclasses.replace(LATENT, latent=False)
INVALID = grpc.StatusCode.INVALID_ARGUMENT

# Policies that read every token, one for each way of choosing.
EXACT = {
    "dense": None,
    "error-target:tolerance=0": None,
    "clusters-top-k:exact=1": None,
    "double-p:p1=1,p2=1": None,
    "quest:budget=100%": None,
    "double-sparsity:budget=100%": None,
    "twilight:selector=full,p=1": None,
    "asynctls:blocks=1000000,budget=100%,lag=0": None,
    "twilight:selector=clusters,budget=100%,p=1": None,
    "twilight:selector=asynctls,blocks=1000000,budget=100%,p=1,lag=0": None,
}
# The same of keep-sets, which need the queries of the prompt's end.
EXACT_KEPT = (
    "snapkv:budget=100%",
    "ada-snapkv:budget=100%",
    "twilight:selector=ada-snapkv,budget=100%,p=1",
)


@pytest.mark.parametrize("dtype", [attnd.BF16, attnd.FP16, attnd.FP32], ids=dtype_name)
@pytest.mark.parametrize("tokens", [1, 65, 700])
def test_latent_equals_the_oracle(client, dtype, tokens):
    case = Case.random(tokens + 3, dataclasses.replace(LATENT, dtype=dtype))
    sequence = opened(client, case, tokens)
    listed = next(info for info in client.list_sequences() if info.sequence_id == sequence)
    assert listed.model.shape.latent
    with client.decode_session() as session:
        for at in range(tokens, tokens + 3):
            for layer in range(case.shape.layers):
                result = step(session, case, sequence, layer, slice(at, at + 1))
                assert result.out.shape == (1, 8, 64)
                assert_near(result, case.expected(layer, slice(at, at + 1)))
    assert lengths(client, sequence) == (tokens + 3,) * case.shape.layers


def test_a_value_may_be_all_of_its_key(client):
    case = Case.random(30, attnd.ModelShape(1, 4, 1, 32, dtype="fp32", latent=True))
    sequence = opened(client, case, 20)
    with client.decode_session() as session:
        result = step(session, case, sequence, 0, slice(20, 30))
    assert_near(result, case.expected(0, slice(20, 30)))


def test_latent_attention_of_its_real_size(client):
    shape = attnd.ModelShape(
        1, 128, 1, 576, value_dim=512, dtype="bf16", softmax_scale=192**-0.5, latent=True
    )
    case = Case.random(101, shape)
    sequence = opened(client, case, 100)
    with client.decode_session() as session:
        result = step(session, case, sequence, 0, slice(100, 101))
    assert_near(result, case.expected(0, slice(100, 101)))


def test_latent_with_the_asyncio_client(server):
    async def life():
        case = Case.random(605, LATENT)
        async with attnd.aio.Client(server, tenant="aio") as client:
            sequence = (await client.open_sequence(case.model)).sequence_id
            chunks = attnd.layer_chunks(case.layers(slice(0, 600)))
            await client.append_kv(sequence, chunks, prefill_complete=True)
            async with client.decode_session() as session:
                result = await step(session, case, sequence, 1, slice(600, 605))
                assert_near(result, case.expected(1, slice(600, 605)))
            await client.close_sequence(sequence)

    asyncio.run(life())


def test_forks_and_shorter_histories(client):
    case = Case.random(705, LATENT)
    sequence = opened(client, case, 700)
    fork = client.fork_sequence(sequence, length=650)
    client.truncate_sequence(sequence, 40)
    with client.decode_session() as session:
        for name, at in ((fork, 650), (sequence, 40)):
            tokens = slice(at, at + 2)
            result = step(session, case, name, 0, tokens)
            assert_near(result, case.expected(0, tokens))
            again = step(session, case, name, 0, tokens)
            assert np.array_equal(again.out, result.out)


def test_other_keys_are_no_repeat(client, stub):
    case = Case.random(20, LATENT)
    sequence = opened(client, case, 19)
    other = case.k[0, 18:19].copy()
    other[..., 79] += 1  # behind the value
    request = pb.AppendKvRequest(sequence_id=sequence, first_position=18, k=to_tensor(other))
    assert append_error(stub, [request]).code() is grpc.StatusCode.ALREADY_EXISTS
    request.k.CopyFrom(to_tensor(case.k[0, 18:19]))
    stub.AppendKv(iter([request]), metadata=METADATA, timeout=TIMEOUT_S)


# ---- bad input ----


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("kv_heads", 2, "kv_heads"), ("value_dim", 96, "value_dim"), ("value_dim", 8, "value_dim")],
)
def test_bad_input_of_a_latent_shape(client, stub, field, value, named):
    request = pb.OpenSequenceRequest(model=Case.random(1, LATENT).model.to_proto())
    setattr(request.model.shape, field, value)
    with pytest.raises(grpc.RpcError) as caught:
        stub.OpenSequence(request, metadata=METADATA, timeout=TIMEOUT_S)
    assert_refused("INVALID_ARGUMENT", named, caught.value.code(), caught.value.details())


@pytest.mark.parametrize("shape", [LATENT, PLAIN], ids=["latent", "plain"])
def test_bad_input_values_that_are_not_the_models(client, stub, shape):
    case = Case.random(31, shape)
    sequence = opened(client, case, 30)
    v = to_tensor(case.v[0, 30:31]) if shape.latent else None
    request = pb.AppendKvRequest(
        sequence_id=sequence, first_position=30, k=to_tensor(case.k[0, 30:31]), v=v
    )
    error = append_error(stub, [request])
    assert_refused("INVALID_ARGUMENT", "v ", error.code(), error.details())
    step_request = pb.DecodeRequest(
        rows=[pb.DecodeRow(sequence_id=sequence, position=30, query_tokens=1)],
        q=to_tensor(case.q[0, 30:31]),
        k=to_tensor(case.k[0, 30:31]),
        v=v,
    )
    assert_refused("INVALID_ARGUMENT", "v ", *verdict(decode(stub, step_request)[0]))
    assert lengths(client, sequence) == (30, 30)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("channel", [0, 79])
def test_bad_input_keys_that_are_no_numbers(client, stub, fault, channel):
    case = Case.random(31, LATENT)
    sequence = opened(client, case, 30)
    key = case.k[0, 30:31].copy()
    key[..., channel] = fault
    request = pb.AppendKvRequest(sequence_id=sequence, first_position=30, k=to_tensor(key))
    error = append_error(stub, [request])
    assert_refused("INVALID_ARGUMENT", "k", error.code(), error.details())


def test_one_message_has_values_for_all_or_for_none(client, stub):
    """The rows that the message does not suit are refused; the others are answered."""
    cases = [Case.random(31, shape) for shape in (LATENT, PLAIN)]
    names = [opened(client, case, 30) for case in cases]
    for good, with_v in ((0, False), (1, True)):
        bad = 1 - good
        order = [good, bad]
        request = pb.DecodeRequest(
            rows=[pb.DecodeRow(sequence_id=names[i], position=30, query_tokens=1) for i in order],
            q=to_tensor(np.concatenate([cases[i].q[0, 30:31] for i in order])),
            k=to_tensor(np.concatenate([cases[i].k[0, 30:31] for i in order])),
        )
        if with_v:
            request.v.CopyFrom(to_tensor(np.concatenate([cases[i].v[0, 30:31] for i in order])))
        reply = decode(stub, request)[0]
        assert reply.status.code == 0
        assert [row.status.code for row in reply.rows] == [0, INVALID.value[0]]
        out = np.frombuffer(reply.out.data, np.float32).reshape(2, 8, 64)
        expected, _ = cases[good].expected(0, slice(30, 31))
        np.testing.assert_allclose(out[:1], expected, rtol=2e-5, atol=2e-5)
        assert np.isnan(out[1]).all()
        client.truncate_sequence(names[good], 30)
        assert [lengths(client, name) for name in names] == [(30, 30)] * 2


# ---- the real server alone ----


@pytest.fixture
def attnd_client(attnd_target):
    with attnd.Client(attnd_target, tenant="latent", timeout_s=60) as client:
        yield client
        for sequence in client.list_sequences():
            client.close_sequence(sequence.sequence_id)


@pytest.mark.parametrize("policy", EXACT)
def test_every_policy_that_reads_all_equals_the_oracle(attnd_client, policy):
    case = Case.random(1402, LATENT)
    sequence = opened(attnd_client, case, 1400, policy=policy)
    with attnd_client.decode_session() as session:
        result = step(session, case, sequence, 1, slice(1400, 1402))
    assert_near(result, case.expected(1, slice(1400, 1402)))
    stats = result.rows[0].stats
    assert stats.dropped_tokens == stats.estimated_tokens == 0
    assert stats.zone_tokens + stats.exact_tokens == 1401 + 1402


@pytest.mark.parametrize("policy", EXACT_KEPT)
def test_every_keep_set_that_keeps_all_equals_the_oracle(attnd_client, policy):
    case = Case.random(1402, LATENT)
    sequence = attnd_client.open_sequence(case.model, policy=policy).sequence_id
    attnd_client.append_kv(
        sequence,
        attnd.layer_chunks(case.layers(slice(0, 1400))),
        prefill_complete=True,
        observed_queries=[case.q[layer, 1390:1400] for layer in range(LATENT.layers)],
    )
    tokens = slice(1400, 1402)
    with attnd_client.decode_session() as session:
        result = step(session, case, sequence, 1, tokens)
    assert_near(result, case.expected(1, tokens))
    assert result.rows[0].stats.dropped_tokens == 0


def test_error_target_over_a_regression(attnd_client):
    case = Case.random(1402, LATENT)
    tokens = slice(1400, 1401)
    sequence = opened(attnd_client, case, 1400, policy="error-target", indexes=["regression"])
    info = next(i for i in attnd_client.list_sequences() if i.sequence_id == sequence)
    assert info.indexes == ("regression",)
    with attnd_client.decode_session() as session:
        result = step(session, case, sequence, 1, tokens)
    out, _ = case.expected(1, tokens)
    error = np.linalg.norm(result.out - out, axis=-1) / np.linalg.norm(out, axis=-1)
    stats = result.rows[0].stats
    assert stats.estimated_tokens > 0 and stats.dropped_tokens == 0
    assert 0 < error.mean() < 3 * stats.predicted_error_mean


def test_values_beyond_their_bound_are_those_of_the_front(attnd_client, attnd_target):
    """A key's rest has the bound of keys alone."""
    case = Case.random(31, LATENT)
    sequence = opened(attnd_client, case, 30, policy="dense")
    metadata = (("attnd-tenant", "latent"),)
    key = case.k[0, 30:31].copy()
    with grpc.insecure_channel(attnd_target) as channel:
        stub = attnd_pb2_grpc.AttndStub(channel)
        key[..., 63] = 2e13
        request = pb.AppendKvRequest(sequence_id=sequence, first_position=30, k=to_tensor(key))
        error = append_error(stub, [request], metadata=metadata)
        assert_refused("INVALID_ARGUMENT", "k", error.code(), error.details())
        key[..., 63], key[..., 64] = 0, 2e13
        request.k.CopyFrom(to_tensor(key))
        stub.AppendKv(iter([request]), metadata=metadata, timeout=TIMEOUT_S)


def test_a_latent_sequence_takes_its_keys_memory(attnd_client):
    """By what it takes beside a plain sequence of the same keys."""
    taken = {}
    for shape in (LATENT, PLAIN):
        sequence = opened(attnd_client, Case.random(1400, shape), 1400, policy="streaming")
        info = next(i for i in attnd_client.list_sequences() if i.sequence_id == sequence)
        taken[shape.latent] = info.resident_bytes
    token_bytes = 2 * 80 * 4  # of both layers
    assert 1400 * token_bytes <= taken[True] <= 1.15 * 1400 * token_bytes
    assert taken[False] - taken[True] >= 1400 * 2 * 64 * 4


def test_a_sealed_latent_sequence_comes_back(attnd_client):
    case = Case.random(1302, LATENT)
    tokens = slice(1300, 1302)
    sequence = opened(attnd_client, case, 1300, policy="error-target")
    with attnd_client.decode_session() as session:
        before = step(session, case, sequence, 1, tokens)
    attnd_client.truncate_sequence(sequence, 1300)
    sealed = attnd_client.seal_sequence(sequence)
    attnd_client.close_sequence(sequence)
    with pytest.raises(attnd.FailedPreconditionError):
        attnd_client.open_sequence(Case.random(1, PLAIN).model, resume=sealed.sealed_id)
    resumed = attnd_client.open_sequence(case.model, resume=sealed.sealed_id).sequence_id
    with attnd_client.decode_session() as session:
        after = step(session, case, resumed, 1, tokens)
    assert np.array_equal(after.out, before.out) and np.array_equal(after.lse, before.lse)
    # Equal ids of a plain model are another prompt.
    plain = attnd_client.open_sequence(Case.random(1, PLAIN).model, token_ids=range(1300))
    assert plain.tokens_present == 0
    again = attnd_client.open_sequence(case.model, policy="error-target", token_ids=range(1300))
    assert again.tokens_present > 0


def test_a_latent_model_decodes_over_the_server_as_it_does_alone(client):
    nano = pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
    # Sizes that attention accepts: 48 + 16 elements of a key are a multiple of 16.
    config = {**FAMILIES["deepseek_v3"], "kv_lora_rank": 48, "qk_rope_head_dim": 16}
    model = nano.Model(nano.Config.parse(config), random_weights(config), "tiny-latent")
    tokens = np.random.default_rng(5).integers(0, config["vocab_size"], 304)
    prompt = model.prefill(tokens[:300])
    alone = nano.LocalKv(prompt, len(tokens), model.config.softmax_scale)

    described = model.attnd_model(attnd.FP32)
    sequence = client.open_sequence(described, policy="dense").sequence_id
    nano.upload(client, sequence, prompt, attnd.FP32, latent=True)
    with client.decode_session() as session:
        served = nano.RemoteKv(session, [sequence], [300], attnd.FP32, latent=True)
        for at in range(300, 304):
            token, position = tokens[at : at + 1], np.array([at])
            served.begin_token()
            logits = model.forward(token, position, served.attend)
            served.end_token()
            expected = model.forward(token, position, alone.attend)
            np.testing.assert_allclose(logits, expected, atol=1e-4)
