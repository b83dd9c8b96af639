# SPDX-License-Identifier: Apache-2.0
"""Bytes that are no message, or one by chance (bad_input.py)."""

from __future__ import annotations

import random

import grpc
import pytest

import attnd
from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import types_pb2
from bad_input import (
    CASE,
    METADATA,
    TIMEOUT_S,
    TOKENS,
    chunk,
    decode_request,
    open_request,
)
from cases import assert_near, opened, step


def raw_call(channel, kind, path):
    """A call that sends bytes as they are."""
    return getattr(channel, kind)(f"/attnd.v1.Attnd/{path}", lambda raw: raw, lambda raw: raw)


def spoiled(raw: bytes, rng: random.Random) -> bytes:
    """raw with some bytes exchanged, cut off or repeated."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(min(len(data), 64))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_bad_input_of_random_bytes(attnd_target, seed):
    """Every call ends, with any code but those that say that the server itself failed. The real
    server only: gRPC's Python server does not end streams whose messages it cannot read."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    with (
        attnd.Client(attnd_target, tenant="test") as client,
        grpc.insecure_channel(attnd_target) as channel,
    ):
        victim = opened(client, CASE, TOKENS)
        for _ in range(200):
            send_spoiled(channel, rng, victim)
        for info in (
            client.list_sequences()
        ):  # what was well-formed by chance may have opened or closed sequences
            client.close_sequence(info.sequence_id)
        name = opened(client, CASE, TOKENS)
        with client.decode_session() as session:
            at = slice(TOKENS, TOKENS + 1)
            assert_near(step(session, CASE, name, 0, at), CASE.expected(0, at))
        client.close_sequence(name)


def send_spoiled(channel, rng: random.Random, victim: int) -> None:
    own_faults = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    truncate = pb.TruncateSequenceRequest(sequence_id=victim, length=9)
    kind, path, good = rng.choice(
        [
            ("unary_unary", "OpenSequence", open_request()),
            ("stream_unary", "AppendKv", chunk(victim)),
            ("stream_stream", "Decode", decode_request(victim)),
            ("unary_unary", "TruncateSequence", truncate),
        ]
    )
    message = spoiled(good.SerializeToString(), rng)
    try:
        sent = message if kind == "unary_unary" else iter([message])
        reply = raw_call(channel, kind, path)(sent, metadata=METADATA, timeout=TIMEOUT_S)
        if kind == "stream_stream":
            list(reply)
    except grpc.RpcError as error:
        assert error.code() not in own_faults, f"{path} {message!r}: {error.details()}"


def test_bad_input_of_unknown_methods(server):
    with grpc.insecure_channel(server) as channel, pytest.raises(grpc.RpcError) as caught:
        raw_call(channel, "unary_unary", "Nothing")(b"", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bad_input_of_types_pb2_is_covered():
    """A new field of a tensor or a shape needs a case here."""
    assert [field.name for field in types_pb2.Tensor.DESCRIPTOR.fields] == [
        "dtype",
        "shape",
        "data",
    ]
    assert len(types_pb2.ModelShape.DESCRIPTOR.fields) == 8


@pytest.mark.parametrize("path", ["OpenSequence", "ListSequences", "GetServerInfo"])
def test_bad_input_that_does_not_parse_is_refused_by_calls(attnd_target, path):
    with grpc.insecure_channel(attnd_target) as channel, pytest.raises(grpc.RpcError) as caught:
        raw_call(channel, "unary_unary", path)(b"\xff", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "broken",
    [
        b"\xff\xff\xff\xff",
        b"\x10\xff\xff\xff\xff\x0f\x00",  # begins with layer = 2^32 - 1
        b"\x10\x00\x00",
        b"\x00",
    ],
)
@pytest.mark.parametrize(
    ("kind", "path", "good"),
    [("stream_unary", "AppendKv", chunk), ("stream_stream", "Decode", decode_request)],
)
def test_bad_input_that_does_not_parse_is_not_the_end(attnd_target, kind, path, good, broken):
    """A message that is no protobuf message must not look like the stream's orderly end."""
    with (
        attnd.Client(attnd_target, tenant="test") as client,
        grpc.insecure_channel(attnd_target) as channel,
    ):
        name = opened(client, CASE, TOKENS)
        messages = [good(name).SerializeToString(), broken]
        with pytest.raises(grpc.RpcError) as caught:
            reply = raw_call(channel, kind, path)(
                iter(messages), metadata=METADATA, timeout=TIMEOUT_S
            )
            if kind == "stream_stream":
                list(reply)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        client.close_sequence(name)
