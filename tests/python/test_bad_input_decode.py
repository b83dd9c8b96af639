# SPDX-License-Identifier: Apache-2.0
"""Decode: bad input is refused, named and without effect (bad_input.py)."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

import attnd
from attnd.tensors import to_tensor
from attnd.v1 import attnd_pb2 as pb
from bad_input import (
    CASE,
    TOKENS,
    assert_refused,
    bf16,
    decode,
    decode_request,
    more_tokens,
    policy,
    tensor_faults,
    verdict,
)
from cases import Case, lengths, opened


def row_field(name, value):
    return lambda request: setattr(request.rows[0], name, value)


def row_policy(preset, **parameters):
    def spoil(request):
        policy(preset, **parameters)(request.rows[0])

    return spoil


DECODE = {
    **tensor_faults("q"),
    **tensor_faults("k"),
    **tensor_faults("v"),
    "k in bf16": (bf16("k", "k"), "INVALID_ARGUMENT", "k"),
    "v in bf16": (bf16("v", "v"), "INVALID_ARGUMENT", "v"),
    "more tokens in q": (more_tokens("q"), "INVALID_ARGUMENT", "q"),
    "more tokens in k": (more_tokens("k"), "INVALID_ARGUMENT", "k"),
    "no rows": (lambda r: r.ClearField("rows"), "INVALID_ARGUMENT", "rows"),
    "a sequence twice": (
        lambda r: r.rows.append(r.rows[0]),
        "INVALID_ARGUMENT",
        "rows|sequence_id",
    ),
    "layer beyond": (lambda r: setattr(r, "layer", 2), "INVALID_ARGUMENT", "layer"),
    "absurd layer": (lambda r: setattr(r, "layer", 4294967295), "INVALID_ARGUMENT", "layer"),
    "unknown output dtype": (
        lambda r: setattr(r, "output_dtype", 42),
        "INVALID_ARGUMENT",
        "output_dtype",
    ),
    "unknown sequence": (row_field("sequence_id", 1 << 63), "NOT_FOUND", "sequence"),
    "no sequence": (row_field("sequence_id", 0), "NOT_FOUND", "sequence"),
    "gap": (row_field("position", TOKENS + 1), "FAILED_PRECONDITION", str(TOKENS)),
    "absurd position": (row_field("position", (1 << 64) - 1), "FAILED_PRECONDITION", str(TOKENS)),
    "position in a segment": (row_field("position", 5), "FAILED_PRECONDITION", "position"),
    "no query tokens": (row_field("query_tokens", 0), "INVALID_ARGUMENT", "query_tokens"),
    "more query tokens": (row_field("query_tokens", 2), "INVALID_ARGUMENT", "q|query_tokens"),
    "absurd query tokens": (
        row_field("query_tokens", 4294967295),
        "INVALID_ARGUMENT",
        "query_tokens",
    ),
    "token ids of another number": (
        lambda r: r.rows[0].token_ids.extend([1, 2]),
        "INVALID_ARGUMENT",
        "token_ids",
    ),
    "query_only with k": (row_field("query_only", True), "INVALID_ARGUMENT", "k"),
    "unknown policy": (row_policy("best"), "INVALID_ARGUMENT", "preset|best"),
    "unknown parameter": (row_policy("double-p", p3="1"), "INVALID_ARGUMENT", "p3"),
    "parameter is no number": (row_policy("double-p", p1="much"), "INVALID_ARGUMENT", "p1"),
}


@pytest.mark.parametrize("name", DECODE)
def test_bad_input_of_decode(stub, sequence, name):
    spoil, code, words = DECODE[name]
    request = decode_request(sequence)
    spoil(request)
    reading = decode_request(sequence)
    reading.rows[0].query_only = True
    reading.ClearField("k")
    reading.ClearField("v")
    bad, good = decode(stub, request, reading)  # the stream goes on
    assert bad.step_id == 17
    assert_refused(code, words, *verdict(bad))
    assert verdict(good)[0] is grpc.StatusCode.OK


def test_bad_input_query_only_at_another_position(stub, sequence):
    for position in (TOKENS - 1, TOKENS + 1, 0):
        request = decode_request(sequence)
        request.rows[0].query_only = True
        request.rows[0].position = position
        request.ClearField("k")
        request.ClearField("v")
        assert_refused("FAILED_PRECONDITION", str(TOKENS), *verdict(decode(stub, request)[0]))


def test_bad_input_step_repeated_with_other_contents(client, stub):
    name = opened(client, CASE, TOKENS)
    first, second = decode_request(name), decode_request(name)
    second.v.CopyFrom(to_tensor(CASE.v[0, :1]))
    good, bad, again = decode(stub, first, second, first)
    assert verdict(good)[0] is verdict(again)[0] is grpc.StatusCode.OK
    assert verdict(bad)[0] is grpc.StatusCode.ALREADY_EXISTS
    assert good.out == again.out
    assert lengths(client, name) == (TOKENS + 1, TOKENS)


def test_bad_input_more_rows_than_allowed(client, stub, sequence):
    rows = client.get_server_info().limits.max_rows + 1
    request = pb.DecodeRequest(
        rows=[pb.DecodeRow(sequence_id=(1 << 62) + i, query_tokens=1) for i in range(rows)],
        q=to_tensor(np.zeros((rows, 4, 32), np.float32)),
        k=to_tensor(np.zeros((rows, 2, 32), np.float32)),
        v=to_tensor(np.zeros((rows, 2, 32), np.float32)),
    )
    assert_refused("INVALID_ARGUMENT", "rows", *verdict(decode(stub, request)[0]))


def test_bad_input_more_query_tokens_than_allowed(client, stub, sequence):
    tokens = client.get_server_info().limits.max_query_tokens + 1
    request = decode_request(sequence)
    request.rows[0].query_tokens = tokens
    for field, heads in (("q", 4), ("k", 2), ("v", 2)):
        getattr(request, field).CopyFrom(to_tensor(np.zeros((tokens, heads, 32), np.float32)))
    assert_refused("INVALID_ARGUMENT", "query_tokens", *verdict(decode(stub, request)[0]))


@pytest.mark.parametrize("row", range(2))
def test_bad_input_without_query_tokens_is_the_whole_messages(client, stub, sequence, row):
    """query_tokens says how the tensors divide among the rows: without it none can be read."""
    other = opened(client, CASE, TOKENS)
    request = decode_request(sequence, other)
    request.rows[row].query_tokens = 0
    reply = decode(stub, request)[0]
    assert grpc.StatusCode.INVALID_ARGUMENT.value[0] == reply.status.code
    assert "query_tokens" in reply.status.message and not reply.rows
    assert lengths(client, other) == (TOKENS, TOKENS)


def test_bad_input_sequences_of_other_shapes_in_one_message(client, stub, sequence):
    wider = Case.random(1, attnd.ModelShape(1, 8, 4, 64, dtype="fp32"))
    other = client.open_sequence(wider.model).sequence_id
    reply = decode(stub, decode_request(sequence, other))[0]
    codes = {reply.status.code, *(row.status.code for row in reply.rows)}
    assert grpc.StatusCode.INVALID_ARGUMENT.value[0] in codes
    client.truncate_sequence(
        sequence, TOKENS
    )  # where the good row was answered, its layer 0 is longer
    assert lengths(client, other) == (0,)


def test_bad_input_a_decode_message_that_is_too_large(client, stub, sequence):
    request = decode_request(sequence)
    request.q.data = bytes(client.max_message_bytes)
    with pytest.raises(grpc.RpcError) as caught:
        decode(stub, request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bad_input_deadline_of_a_step(client, stub, sequence):
    request = decode_request(sequence)
    request.rows[0].query_only = True
    request.ClearField("k")
    request.ClearField("v")
    request.deadline_us = 60_000_000
    assert verdict(decode(stub, request)[0])[0] is grpc.StatusCode.OK
