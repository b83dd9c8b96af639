# SPDX-License-Identifier: Apache-2.0
"""AppendKv: bad input is refused, named and without effect (bad_input.py)."""

from __future__ import annotations

import grpc
import pytest

from attnd.tensors import to_tensor
from attnd.v1 import attnd_pb2 as pb
from bad_input import (
    CASE,
    METADATA,
    TIMEOUT_S,
    TOKENS,
    append_error,
    assert_refused,
    bf16,
    chunk,
    more_tokens,
    tensor_faults,
)
from cases import lengths, opened

APPEND = {
    **tensor_faults("k"),
    **tensor_faults("v"),
    "k in bf16": (bf16("k", "k"), "INVALID_ARGUMENT", "k"),
    "v in bf16": (bf16("v", "v"), "INVALID_ARGUMENT", "v"),
    "more tokens in v": (more_tokens("v"), "INVALID_ARGUMENT", "v"),
    "layer beyond": (lambda r: setattr(r, "layer", 2), "INVALID_ARGUMENT", "layer"),
    "absurd layer": (lambda r: setattr(r, "layer", 4294967295), "INVALID_ARGUMENT", "layer"),
    "gap": (lambda r: setattr(r, "first_position", TOKENS + 1), "FAILED_PRECONDITION", str(TOKENS)),
    "absurd position": (
        lambda r: setattr(r, "first_position", (1 << 64) - 1),
        "FAILED_PRECONDITION",
        str(TOKENS),
    ),
    "token ids of another number": (
        lambda r: r.token_ids.extend([1, 2]),
        "INVALID_ARGUMENT",
        "token_ids",
    ),
    "unknown sequence": (lambda r: setattr(r, "sequence_id", 1 << 63), "NOT_FOUND", "sequence"),
    "no sequence": (lambda r: setattr(r, "sequence_id", 0), "NOT_FOUND", "sequence"),
    "empty chunk": (lambda r: (r.ClearField("k"), r.ClearField("v")), "INVALID_ARGUMENT", "k"),
}


@pytest.mark.parametrize("name", APPEND)
def test_bad_input_of_append_kv(stub, sequence, name):
    spoil, code, words = APPEND[name]
    request = chunk(sequence)
    spoil(request)
    error = append_error(stub, [request])
    assert_refused(code, words, error.code(), error.details())


def test_bad_input_repeats_with_other_contents(stub, sequence):
    request = chunk(sequence, at=TOKENS - 2)
    request.k.CopyFrom(to_tensor(CASE.k[0, :1]))
    assert append_error(stub, [request]).code() is grpc.StatusCode.ALREADY_EXISTS
    request = chunk(sequence, at=TOKENS - 2)
    request.token_ids.append(4711)  # the fixture gave it its position
    assert append_error(stub, [request]).code() is grpc.StatusCode.ALREADY_EXISTS


def test_bad_input_repeats_with_equal_contents_are_accepted(stub, sequence):
    reply = stub.AppendKv(
        iter([chunk(sequence, at=TOKENS - 2, tokens=2)]), metadata=METADATA, timeout=TIMEOUT_S
    )
    assert reply.committed_tokens == TOKENS


def test_bad_input_of_a_foreign_tenant_looks_like_an_unknown_sequence(stub, sequence):
    foreign = append_error(stub, [chunk(sequence)], metadata=(("attnd-tenant", "other"),))
    request = chunk(sequence)
    request.sequence_id = 1 << 63
    unknown = append_error(stub, [request])
    assert foreign.code() is unknown.code() is grpc.StatusCode.NOT_FOUND
    assert foreign.details().replace(str(sequence), "N") == unknown.details().replace(
        str(1 << 63), "N"
    )


def test_bad_input_prefill_complete_of_uneven_layers(client, stub):
    name = opened(client, CASE, 10)
    uneven = [chunk(name, at=10), pb.AppendKvRequest(prefill_complete=True)]
    error = append_error(stub, uneven)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert lengths(client, name) == (11, 10)


def test_bad_input_messages_after_prefill_complete(stub, sequence):
    requests = [pb.AppendKvRequest(sequence_id=sequence, prefill_complete=True), chunk(sequence)]
    assert append_error(stub, requests).code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    )


def test_bad_input_other_sequence_in_mid_stream(client, stub, sequence):
    other = opened(client, CASE, 10)
    requests = [chunk(other, at=10), chunk(sequence)]
    assert append_error(stub, requests).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert lengths(client, other) == (11, 10)


def test_bad_input_empty_upload(stub):
    assert append_error(stub, []).code().name in ("INVALID_ARGUMENT", "NOT_FOUND")


def test_bad_input_oversize_message(client, stub, sequence):
    request = chunk(sequence)
    request.k.data = bytes(client.max_message_bytes)
    assert append_error(stub, [request]).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
