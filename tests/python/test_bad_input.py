# SPDX-License-Identifier: Apache-2.0
"""Bad input gets the code that proto/attnd/v1 documents for the field, a message that names it, and
changes nothing.

The generated stubs are used directly, because the client would not send most of this. Each case
begins with a good request and spoils one thing. Afterwards the sequence must have the lengths and
give the answer that it had before. Run against both servers; whether the message or its one row is
refused is taken either way, except where a case says which.
"""

from __future__ import annotations

import random
import struct

import grpc
import numpy as np
import pytest

import attnd
import cases
from attnd.tensors import to_tensor
from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import attnd_pb2_grpc, types_pb2
from cases import Case, assert_near, lengths, opened, step

METADATA = (("attnd-tenant", "test"),)
TIMEOUT_S = 60
TOKENS = 600  # of the sequence that is attacked; a segment and a tail
CASE = Case.random(TOKENS + 4)
NAN = struct.pack("<f", float("nan"))
INFINITY = struct.pack("<f", float("-inf"))


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server, [("grpc.max_receive_message_length", -1)]) as channel:
        yield attnd_pb2_grpc.AttndStub(channel)


@pytest.fixture
def sequence(client):
    """A sequence that must not change, whatever the test sends."""
    name = opened(client, CASE, TOKENS)
    yield name
    assert lengths(client, name) == (TOKENS, TOKENS)
    with client.decode_session() as session:
        at = slice(TOKENS, TOKENS + 1)
        assert_near(step(session, CASE, name, 0, at), CASE.expected(0, at))


def assert_refused(code: str, words: str, said_code: grpc.StatusCode, said: str) -> None:
    """words: fields of which the message must name one, separated by |."""
    assert said_code.name == code, said
    assert any(word in said for word in words.split("|")), f"{said!r} names none of {words}"


# ---- OpenSequence ----


def open_request() -> pb.OpenSequenceRequest:
    return pb.OpenSequenceRequest(model=CASE.model.to_proto())


def shape_field(name, value):
    def spoil(request):
        setattr(request.model.shape, name, value)

    return spoil


def policy(preset, **parameters):
    def spoil(request):
        request.policy.preset = preset
        request.policy.parameters.update(parameters)

    return spoil


OPEN = {
    "no model": (lambda r: r.ClearField("model"), "INVALID_ARGUMENT", "model"),
    "no shape": (lambda r: r.model.ClearField("shape"), "INVALID_ARGUMENT", "model|shape|layers"),
    "no layers": (shape_field("layers", 0), "INVALID_ARGUMENT", "layers"),
    "absurd layers": (shape_field("layers", 4294967295), "INVALID_ARGUMENT", "layers"),
    "no heads": (shape_field("query_heads", 0), "INVALID_ARGUMENT", "query_heads"),
    "no kv heads": (shape_field("kv_heads", 0), "INVALID_ARGUMENT", "kv_heads"),
    "heads that do not divide": (shape_field("query_heads", 3), "INVALID_ARGUMENT", "query_heads"),
    "absurd heads": (shape_field("query_heads", 2048), "INVALID_ARGUMENT", "query_heads"),
    "absurd kv heads": (shape_field("kv_heads", 4294967294), "INVALID_ARGUMENT", "kv_heads"),
    "head_dim 0": (shape_field("head_dim", 0), "INVALID_ARGUMENT", "head_dim"),
    "head_dim 24": (shape_field("head_dim", 24), "INVALID_ARGUMENT", "head_dim"),
    "head_dim 592": (shape_field("head_dim", 592), "INVALID_ARGUMENT", "head_dim"),
    "head_dim 2^31": (shape_field("head_dim", 1 << 31), "INVALID_ARGUMENT", "head_dim"),
    "value_dim 8": (shape_field("value_dim", 8), "INVALID_ARGUMENT", "value_dim"),
    "value_dim 1024": (shape_field("value_dim", 1024), "INVALID_ARGUMENT", "value_dim"),
    "no dtype": (shape_field("dtype", 0), "INVALID_ARGUMENT", "dtype"),
    "unknown dtype": (shape_field("dtype", 9), "INVALID_ARGUMENT", "dtype"),
    "negative scale": (shape_field("softmax_scale", -1), "INVALID_ARGUMENT", "softmax_scale"),
    "NaN scale": (shape_field("softmax_scale", float("nan")), "INVALID_ARGUMENT", "softmax_scale"),
    "infinite scale": (
        shape_field("softmax_scale", float("inf")),
        "INVALID_ARGUMENT",
        "softmax_scale",
    ),
    "latent": (shape_field("latent", True), "UNIMPLEMENTED", "latent"),
    "long fingerprint": (
        lambda r: setattr(r.model, "fingerprint", "x" * 257),
        "INVALID_ARGUMENT",
        "fingerprint",
    ),
    "shard beyond count": (
        lambda r: setattr(r.model.shard, "index", 1),
        "INVALID_ARGUMENT",
        "shard|index",
    ),
    "absurd shards": (
        lambda r: setattr(r.model.shard, "count", 4097),
        "INVALID_ARGUMENT",
        "shard|count",
    ),
    "token order": (lambda r: setattr(r, "layout", 2), "UNIMPLEMENTED", "layout"),
    "unknown layout": (lambda r: setattr(r, "layout", 9), "INVALID_ARGUMENT", "layout"),
    "unknown index": (lambda r: r.indexes.append(9), "INVALID_ARGUMENT", "index"),
    "many indexes": (lambda r: r.indexes.extend([1] * 9), "INVALID_ARGUMENT", "indexes"),
    "unknown policy": (policy("best"), "INVALID_ARGUMENT", "preset|best"),
    "unknown parameter": (policy("double-p", p3="1"), "INVALID_ARGUMENT", "p3"),
    "parameter is no number": (policy("double-p", p1="much"), "INVALID_ARGUMENT", "p1"),
    "parameter is NaN": (policy("error-target", tolerance="nan"), "INVALID_ARGUMENT", "tolerance"),
    "negative parameter": (policy("error-target", tolerance="-1"), "INVALID_ARGUMENT", "tolerance"),
    "many parameters": (
        policy("dense", **{f"p{i}": "1" for i in range(33)}),
        "INVALID_ARGUMENT",
        "parameter",
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_bad_input_of_open_sequence(client, stub, name):
    spoil, code, words = OPEN[name]
    request = open_request()
    spoil(request)
    before = len(list(client.list_sequences()))
    with pytest.raises(grpc.RpcError) as caught:
        stub.OpenSequence(request, metadata=METADATA, timeout=TIMEOUT_S)
    assert_refused(code, words, caught.value.code(), caught.value.details())
    assert len(list(client.list_sequences())) == before


# ---- AppendKv ----


def chunk(sequence, at=TOKENS, tokens=1, layer=0) -> pb.AppendKvRequest:
    part = slice(at, at + tokens)
    return pb.AppendKvRequest(
        sequence_id=sequence,
        layer=layer,
        first_position=at,
        k=to_tensor(CASE.k[layer, part]),
        v=to_tensor(CASE.v[layer, part]),
    )


def tensor_faults(field):
    """Faults that a tensor field may have, by name: what spoils it, and the code."""

    def spoil(change):
        return lambda request: change(getattr(request, field))

    def shape(*dims):
        def change(tensor):
            del tensor.shape[:]
            tensor.shape.extend(dims)

        return spoil(change)

    def data(edit):
        return spoil(lambda tensor: setattr(tensor, "data", edit(tensor.data)))

    faults = {
        "absent": lambda request: request.ClearField(field),
        "dtype unspecified": spoil(lambda tensor: setattr(tensor, "dtype", 0)),
        "dtype unknown": spoil(lambda tensor: setattr(tensor, "dtype", 42)),
        "data too short": data(lambda raw: raw[:-1]),
        "data too long": data(lambda raw: raw + b"\0"),
        "data empty": data(lambda raw: b""),
        "NaN": data(lambda raw: NAN + raw[4:]),
        "infinite at the end": data(lambda raw: raw[:-4] + INFINITY),
        "no shape": shape(),
        "one dimension": shape(64),
        "four dimensions": shape(1, 1, 2, 32),
        "heads and dim exchanged": shape(1, 32, 2),
        "absurd product": shape(4294967295, 4294967295, 4294967295),
        "product that wraps to the length": shape(1 << 31, 1 << 31, 1 << 31),
        "zero dimension": shape(1, 0, 32),
    }
    return {
        f"{field} {name}": (change, "INVALID_ARGUMENT", field) for name, change in faults.items()
    }


def bf16(field, source):
    """The field in another dtype than the model's."""

    def spoil(request):
        tensor = to_tensor(getattr(CASE, source)[0, TOKENS : TOKENS + 1].astype(attnd.BF16))
        getattr(request, field).CopyFrom(tensor)

    return spoil


def more_tokens(field):
    def spoil(request):
        getattr(request, field).CopyFrom(to_tensor(getattr(CASE, field)[0, TOKENS : TOKENS + 2]))

    return spoil


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


def append_error(stub, requests, metadata=METADATA) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        stub.AppendKv(iter(requests), metadata=metadata, timeout=TIMEOUT_S)
    return caught.value


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


# ---- Decode ----


def decode_request(*sequences) -> pb.DecodeRequest:
    at = slice(TOKENS, TOKENS + 1)
    many = len(sequences)
    return pb.DecodeRequest(
        step_id=17,
        layer=0,
        rows=[
            pb.DecodeRow(sequence_id=name, position=TOKENS, query_tokens=1) for name in sequences
        ],
        q=to_tensor(np.repeat(CASE.q[0, at], many, axis=0)),
        k=to_tensor(np.repeat(CASE.k[0, at], many, axis=0)),
        v=to_tensor(np.repeat(CASE.v[0, at], many, axis=0)),
    )


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


def decode(stub, *requests, metadata=METADATA) -> list[pb.DecodeResponse]:
    return list(stub.Decode(iter(requests), metadata=metadata, timeout=TIMEOUT_S))


def verdict(reply: pb.DecodeResponse) -> tuple[grpc.StatusCode, str]:
    """What is said of a message with one row, wherever it is said."""
    status = reply.status if reply.status.code else reply.rows[0].status
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return code, status.message


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


# ---- The other calls ----


def unary_cases(sequence):
    unknown = 1 << 63
    return {
        "TruncateSequence": [
            (pb.TruncateSequenceRequest(sequence_id=unknown), "NOT_FOUND"),
            (
                pb.TruncateSequenceRequest(sequence_id=sequence, length=TOKENS + 1),
                "FAILED_PRECONDITION",
            ),
            (
                pb.TruncateSequenceRequest(sequence_id=sequence, length=(1 << 64) - 1),
                "FAILED_PRECONDITION",
            ),
        ],
        "ForkSequence": [
            (pb.ForkSequenceRequest(sequence_id=unknown), "NOT_FOUND"),
            (
                pb.ForkSequenceRequest(sequence_id=sequence, length=TOKENS + 1),
                "FAILED_PRECONDITION",
            ),
            (
                pb.ForkSequenceRequest(sequence_id=sequence, length=(1 << 64) - 1),
                "FAILED_PRECONDITION",
            ),
        ],
        "CloseSequence": [(pb.CloseSequenceRequest(sequence_id=unknown), "NOT_FOUND")],
        "ListSequences": [(pb.ListSequencesRequest(page_size=1001), "INVALID_ARGUMENT")],
    }


@pytest.mark.parametrize(
    "method", ["TruncateSequence", "ForkSequence", "CloseSequence", "ListSequences"]
)
def test_bad_input_of_unary_calls(stub, sequence, method):
    for request, code in unary_cases(sequence)[method]:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, method)(request, metadata=METADATA, timeout=TIMEOUT_S)
        assert caught.value.code().name == code, caught.value.details()


def test_bad_input_pages_of_a_listing(client, stub):
    names = [client.open_sequence(attnd.Model("test", cases.SHAPE)).sequence_id for _ in range(5)]
    seen, after = [], 0
    while True:
        request = pb.ListSequencesRequest(after_sequence_id=after, page_size=2)
        page = stub.ListSequences(request, metadata=METADATA, timeout=TIMEOUT_S)
        seen += [info.sequence_id for info in page.sequences]
        after = page.next_after_sequence_id
        if not after:
            break
    assert seen == names
    past = pb.ListSequencesRequest(after_sequence_id=(1 << 64) - 1)
    assert not stub.ListSequences(past, metadata=METADATA, timeout=TIMEOUT_S).sequences


# ---- Bytes that are no message, or one by chance ----


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


@pytest.mark.parametrize(
    ("kind", "path", "good"),
    [("stream_unary", "AppendKv", chunk), ("stream_stream", "Decode", decode_request)],
)
def test_bad_input_that_does_not_parse_is_not_the_end(attnd_target, kind, path, good):
    """A message that is no protobuf message must not look like the stream's orderly end."""
    with (
        attnd.Client(attnd_target, tenant="test") as client,
        grpc.insecure_channel(attnd_target) as channel,
    ):
        name = opened(client, CASE, TOKENS)
        messages = [good(name).SerializeToString(), b"\xff\xff\xff\xff"]
        with pytest.raises(grpc.RpcError) as caught:
            reply = raw_call(channel, kind, path)(
                iter(messages), metadata=METADATA, timeout=TIMEOUT_S
            )
            if kind == "stream_stream":
                list(reply)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        client.close_sequence(name)
