# SPDX-License-Identifier: Apache-2.0
"""The synchronous client against both servers: dense answers equal the float64 oracle over a real
socket, and every call does what the contract says. Policies other than dense are measured by
attnd.eval, not here."""

import dataclasses

import numpy as np
import pytest

import attnd
import cases
from attnd import requests
from attnd.tensors import dtype_name
from cases import Case, assert_near, lengths, opened, step

# Rounding of the stored and the sent dtype is the case's own; what remains is the answer's dtype.
OUTPUT_TOLERANCE = {attnd.FP32: 2e-5, attnd.BF16: 8e-3, attnd.FP16: 1e-3}


def test_server_info(client):
    info = client.get_server_info()
    assert info.version.count(".") == 2
    assert {"dense", "streaming", "clusters-top-k", "double-p", "error-target"} <= {
        p.preset for p in info.policies
    }
    assert info.default_policy.preset and info.backends
    assert info.limits.max_message_bytes == client.max_message_bytes > 0
    assert info.limits.max_rows > 0 and info.limits.max_query_tokens > 0
    assert (info.gpu_sharing == "none") == (info.device == "") and info.gpu_sharing


def test_who_has_a_sequence(client):
    model = attnd.Model("", cases.SHAPE)
    opened = client.open_sequence(model)
    listed = {info.sequence_id: info.backend for info in client.list_sequences()}
    client.close_sequence(opened.sequence_id)
    assert opened.backend in client.get_server_info().backends
    assert listed[opened.sequence_id] == opened.backend


@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 700])
def test_dense_equals_the_oracle(client, tokens):
    case = Case.random(tokens + 3)
    sequence = opened(client, case, tokens)
    with client.decode_session() as session:
        for at in range(tokens, tokens + 3):
            for layer in range(case.shape.layers):
                result = step(session, case, sequence, layer, slice(at, at + 1))
                assert_near(result, case.expected(layer, slice(at, at + 1)))
                assert result.out.dtype == np.float32 and result.rows[0].ok
    assert lengths(client, sequence) == (tokens + 3,) * case.shape.layers


@pytest.mark.parametrize("dtype", [attnd.BF16, attnd.FP16, attnd.FP32], ids=dtype_name)
@pytest.mark.parametrize("output_dtype", [attnd.BF16, attnd.FP16, attnd.FP32, None], ids=str)
def test_dtypes_of_kv_and_answer(client, dtype, output_dtype):
    case = Case.random(101, dataclasses.replace(cases.SHAPE, dtype=dtype))
    sequence = opened(client, case, 100)
    tokens = slice(100, 101)
    q = case.q[1, tokens].astype(dtype)
    row = attnd.Row(sequence, 100)
    with client.decode_session() as session:
        result = session.step(
            1, [row], q, case.k[1, tokens], case.v[1, tokens], output_dtype=output_dtype
        )
    assert result.out.dtype == (dtype if output_dtype is None else output_dtype)
    assert_near(
        result,
        case.expected(1, tokens, q),
        OUTPUT_TOLERANCE[attnd.tensors.as_dtype(result.out.dtype)],
    )


def test_values_may_have_another_size_and_logits_another_scale(client):
    shape = attnd.ModelShape(1, 6, 3, 48, value_dim=16, dtype="fp32", softmax_scale=0.3)
    case = Case.random(51, shape)
    sequence = opened(client, case, 50)
    with client.decode_session() as session:
        result = step(session, case, sequence, 0, slice(50, 51))
    assert result.out.shape == (1, 6, 16)
    assert_near(result, case.expected(0, slice(50, 51)))


def test_a_row_of_several_tokens_is_causal(client):
    case = Case.random(48)
    sequence = opened(client, case, 40)
    with client.decode_session() as session:
        assert_near(
            step(session, case, sequence, 0, slice(40, 48)), case.expected(0, slice(40, 48))
        )


def test_a_sequence_may_begin_empty(client):
    case = Case.random(5)
    sequence = client.open_sequence(case.model).sequence_id
    with client.decode_session() as session:
        for layer in range(case.shape.layers):
            assert_near(
                step(session, case, sequence, layer, slice(0, 5)), case.expected(layer, slice(0, 5))
            )


def test_rows_of_a_batch_do_not_touch_each_other(client):
    many = [Case.random(tokens + 2, seed=seed) for seed, tokens in enumerate((10, 70, 600))]
    sequences = [opened(client, case, case.k.shape[1] - 2) for case in many]
    spans = [slice(case.k.shape[1] - 2, case.k.shape[1]) for case in many]
    rows = [
        attnd.Row(sequence, span.start, 2, token_ids=[7, 8])
        for sequence, span in zip(sequences, spans)
    ]

    def together(name):
        return np.concatenate([getattr(case, name)[0, span] for case, span in zip(many, spans)])

    with client.decode_session() as session:
        result = session.step(0, rows, together("q"), together("k"), together("v"))
        expected = [case.expected(0, span) for case, span in zip(many, spans)]
        assert_near(result, tuple(map(np.concatenate, zip(*expected))))
        for index, (case, sequence, span) in enumerate(zip(many, sequences, spans)):
            alone = step(session, case, sequence, 0, span)  # a repeat
            assert np.array_equal(alone.out, result.out[2 * index : 2 * index + 2]), (
                "batch changed a row's bits"
            )


def test_query_only_appends_nothing(client):
    case = Case.random(30)
    sequence = opened(client, case, 30)
    q = np.random.default_rng(5).standard_normal((4, 4, 32)).astype(np.float32)
    with client.decode_session() as session:
        result = session.step(0, [attnd.Row(sequence, 30, 4, query_only=True)], q)
    assert_near(result, cases.oracle.attention(q, case.k[0], case.v[0], 32**-0.5, first=30))
    assert lengths(client, sequence) == (30, 30)


def test_query_only_of_an_empty_sequence_is_the_empty_state(client):
    sequence = client.open_sequence(attnd.Model("test", cases.SHAPE)).sequence_id
    with client.decode_session() as session:
        result = session.step(
            0, [attnd.Row(sequence, 0, query_only=True)], np.ones((1, 4, 32), np.float32)
        )
    assert np.all(result.lse == -np.inf)
    assert not np.isnan(result.out).any()


def test_log_sum_exps_merge_context_shards(client):
    case = Case.random(60)
    left, right = (
        client.open_sequence(case.model).sequence_id,
        client.open_sequence(case.model).sequence_id,
    )
    client.append_kv(left, attnd.layer_chunks(case.layers(slice(0, 25))))
    client.append_kv(right, attnd.layer_chunks(case.layers(slice(25, 60))))
    q = case.q[0, 59:60]
    with client.decode_session() as session:
        parts = [
            session.step(0, [attnd.Row(sequence, length, query_only=True)], q)
            for sequence, length in ((left, 25), (right, 35))
        ]
    lse = np.logaddexp(parts[0].lse, parts[1].lse)
    out = sum(part.out * np.exp(part.lse - lse)[..., None] for part in parts)
    expected_out, expected_lse = case.expected(0, slice(59, 60))
    np.testing.assert_allclose(out, expected_out, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_how_a_prompt_is_cut_into_messages_does_not_matter(client):
    case = Case.random(701)
    whole = opened(client, case, 700)
    pieces = client.open_sequence(case.model, policy="dense").sequence_id
    for start, end in ((0, 1), (1, 300), (300, 700)):
        client.append_kv(
            pieces, attnd.layer_chunks(case.layers(slice(start, end)), first_position=start)
        )
    client.append_kv(pieces, [], prefill_complete=True)
    with client.decode_session() as session:
        a, b = (step(session, case, sequence, 0, slice(700, 701)) for sequence in (whole, pieces))
    assert np.array_equal(a.out, b.out)


def test_uploads_are_split_below_the_message_limit():
    case = Case.random(200)
    chunks = list(attnd.layer_chunks(case.layers(slice(0, 200)), token_ids=range(200)))
    messages = list(requests.append_requests(9, chunks, True, None, 8192))
    assert len(messages) > 2 * 2 and all(message.ByteSize() < 8192 for message in messages)
    assert [m.first_position for m in messages if m.layer == 1] == sorted(
        m.first_position for m in messages if m.layer == 1
    )
    sent = np.concatenate([attnd.tensors.from_tensor(m.k) for m in messages[:-1] if m.layer == 1])
    assert np.array_equal(sent, case.k[1])
    assert [token for m in messages for token in m.token_ids] == list(range(200))
    assert messages[-1].prefill_complete and not messages[-1].HasField("k")
    with pytest.raises(ValueError, match="one token"):
        list(requests.append_requests(9, chunks, True, None, 4100))


def test_a_fork_goes_its_own_way(client):
    case, other = Case.random(605), Case.random(605, seed=1)
    other.k[:, :600], other.v[:, :600] = case.k[:, :600], case.v[:, :600]
    sequence = opened(client, case, 600)
    fork = client.fork_sequence(sequence)
    assert fork != sequence
    with client.decode_session() as session:
        for layer in range(2):
            assert_near(
                step(session, case, sequence, layer, slice(600, 605)),
                case.expected(layer, slice(600, 605)),
            )
            assert_near(
                step(session, other, fork, layer, slice(600, 605)),
                other.expected(layer, slice(600, 605)),
            )
    client.close_sequence(sequence)
    with client.decode_session() as session:
        q = other.q[0, 604:605]
        result = session.step(0, [attnd.Row(fork, 605, query_only=True)], q)
    assert_near(result, other.expected(0, slice(604, 605)))


@pytest.mark.parametrize("length", [0, 1, 63, 300, 536, 599, 600])
def test_forks_and_truncated_sequences_of_any_length(client, length):
    case, other = Case.random(602), Case.random(602, seed=2)
    other.k[:, :length], other.v[:, :length] = case.k[:, :length], case.v[:, :length]
    sequence = opened(client, case, 600)
    fork = client.fork_sequence(sequence, length=length)
    covered = client.truncate_sequence(sequence, length)
    assert covered <= length
    assert lengths(client, sequence) == lengths(client, fork) == (length, length)
    with client.decode_session() as session:
        for name in (sequence, fork):
            result = step(session, other, name, 1, slice(length, length + 2))
            assert_near(result, other.expected(1, slice(length, length + 2)))


def test_a_repeated_step_answers_again_and_appends_once(client):
    case = Case.random(22)
    sequence = opened(client, case, 20)
    with client.decode_session() as session:
        first = step(session, case, sequence, 0, slice(20, 22))
        assert np.array_equal(step(session, case, sequence, 0, slice(20, 22)).out, first.out)
    assert lengths(client, sequence) == (22, 20)


def test_a_sequence_has_another_writer_when_the_first_stream_has_ended(client):
    case = Case.random(22)
    sequence = opened(client, case, 20)
    for at in (20, 21):
        with client.decode_session() as session:
            for layer in range(2):
                step(session, case, sequence, layer, slice(at, at + 1))


def test_two_writers_of_a_sequence(client):
    case = Case.random(22)
    sequence = opened(client, case, 20)
    with client.decode_session() as first, client.decode_session() as second:
        step(first, case, sequence, 0, slice(20, 21))
        with pytest.raises(attnd.RowError) as caught:
            step(second, case, sequence, 0, slice(21, 22))
        assert caught.value.code.name == "ABORTED"
        with pytest.raises(attnd.AbortedError):
            client.append_kv(sequence, [attnd.KvChunk(1, 20, case.k[1, 20:21], case.v[1, 20:21])])
        assert_near(step(first, case, sequence, 0, slice(21, 22)), case.expected(0, slice(21, 22)))
        # A stream that appends nothing may read beside the writer.
        reading = attnd.Row(sequence, 22, query_only=True)
        assert second.step(0, [reading], case.q[0, 21:22]).rows[0].ok
    assert lengths(client, sequence) == (22, 20)


def test_one_bad_row_leaves_the_others_alone(client):
    case = Case.random(12)
    good, gap = opened(client, case, 10), opened(client, case, 10)
    rows = [attnd.Row(gap, 11), attnd.Row(good, 10), attnd.Row(1 << 60, 0)]
    q, k, v = (np.repeat(x[0, 10:11], 3, axis=0) for x in (case.q, case.k, case.v))
    with client.decode_session() as session:
        with pytest.raises(attnd.RowError) as caught:
            session.step(0, rows, q, k, v)
        assert caught.value.row == 0 and caught.value.sequence_id == gap
        assert caught.value.code.name == "FAILED_PRECONDITION" and "10" in caught.value.message
        result = session.step(0, rows, q, k, v, raise_on_row_error=False)
    assert [row.code.name for row in result.rows] == ["FAILED_PRECONDITION", "OK", "NOT_FOUND"]
    out, lse = case.expected(0, slice(10, 11))
    np.testing.assert_allclose(result.out[1], out[0], rtol=2e-5, atol=2e-5)
    assert np.isnan(result.out[[0, 2]]).all() and np.isnan(result.lse[[0, 2]]).all()
    assert lengths(client, gap) == (10, 10) and lengths(client, good) == (11, 10)


def test_statistics_count_every_token_once(client):
    case = Case.random(701)
    sequence = opened(client, case, 700)
    with client.decode_session() as session:
        stats = step(session, case, sequence, 0, slice(700, 701)).rows[0].stats
    assert stats.zone_tokens + stats.exact_tokens == 701 * case.shape.kv_heads
    assert stats.estimated_tokens == stats.dropped_tokens == 0
    assert stats.predicted_error_mean == 0
    assert stats.hbm_tokens + stats.host_tokens + stats.ssd_tokens == 701 * case.shape.kv_heads
    assert set(stats.stage_us) == {"score", "select", "fetch", "attend", "merge"}


@pytest.mark.parametrize("preset", ["streaming", "clusters-top-k", "double-p", "error-target"])
def test_every_policy_answers(client, preset):
    case = Case.random(2101)
    sequence = opened(client, case, 2100)
    with client.decode_session() as session:
        row = attnd.Row(sequence, 2100, policy=preset)
        result = session.step(0, [row], case.q[0, 2100:], case.k[0, 2100:], case.v[0, 2100:])
    assert np.isfinite(result.out).all() and np.isfinite(result.lse).all()


def test_listing_and_closing(client):
    case = Case.random(10)
    sequences = [opened(client, case, tokens) for tokens in (3, 5)]
    listed = list(client.list_sequences())
    assert [info.sequence_id for info in listed] == sequences
    assert [info.committed_tokens for info in listed] == [3, 5]
    model = listed[0].model  # the server may fill in what 0 stands for
    assert model.fingerprint == "test" and model.shape.dtype == case.shape.dtype
    assert (model.shape.layers, model.shape.kv_heads, model.shape.value_elements) == (2, 2, 32)
    assert listed[0].policy.preset == "dense"
    assert listed[0].resident_bytes > 0
    client.close_sequence(sequences[0])
    assert [info.sequence_id for info in client.list_sequences()] == sequences[1:]
    with pytest.raises(attnd.NotFoundError):
        client.close_sequence(sequences[0])


def test_tenants_do_not_see_each_other(client, server):
    case = Case.random(10)
    sequence = opened(client, case, 10)
    with attnd.Client(server, tenant="other") as other:
        assert list(other.list_sequences()) == []
        for call in (
            lambda: other.close_sequence(sequence),
            lambda: other.fork_sequence(sequence),
            lambda: other.truncate_sequence(sequence, 1),
            lambda: other.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, 1)))),
        ):
            with pytest.raises(attnd.NotFoundError):
                call()
        with other.decode_session() as session, pytest.raises(attnd.RowError) as caught:
            session.step(0, [attnd.Row(sequence, 10, query_only=True)], case.q[0, :1])
        assert caught.value.code.name == "NOT_FOUND"
    assert lengths(client, sequence) == (10, 10)
