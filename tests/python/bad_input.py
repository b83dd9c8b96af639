# SPDX-License-Identifier: Apache-2.0
"""What the tests of bad input share: good requests, and what may be wrong with their fields.

Bad input gets the code that proto/attnd/v1 documents for the field, a message that names it, and
changes nothing. The generated stubs are used directly, because the client would not send most of
this. Each case begins with a good request and spoils one thing. Afterwards the sequence must have
the lengths and give the answer that it had before. Run against both servers; whether the message or
its one row is refused is taken either way, except where a case says which.
"""

from __future__ import annotations

import struct

import grpc
import numpy as np
import pytest

import attnd
from attnd.tensors import to_tensor
from attnd.v1 import attnd_pb2 as pb
from cases import Case

METADATA = (("attnd-tenant", "test"),)
TIMEOUT_S = 60
TOKENS = 600  # of the sequence that is attacked; a segment and a tail
CASE = Case.random(TOKENS + 4)
NAN = struct.pack("<f", float("nan"))
INFINITY = struct.pack("<f", float("-inf"))


def assert_refused(code: str, words: str, said_code: grpc.StatusCode, said: str) -> None:
    """words: fields of which the message must name one, separated by |."""
    assert said_code.name == code, said
    assert any(word in said for word in words.split("|")), f"{said!r} names none of {words}"


# ---- Good requests ----


def open_request() -> pb.OpenSequenceRequest:
    return pb.OpenSequenceRequest(model=CASE.model.to_proto())


def chunk(sequence, at=TOKENS, tokens=1, layer=0) -> pb.AppendKvRequest:
    part = slice(at, at + tokens)
    return pb.AppendKvRequest(
        sequence_id=sequence,
        layer=layer,
        first_position=at,
        k=to_tensor(CASE.k[layer, part]),
        v=to_tensor(CASE.v[layer, part]),
    )


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


# ---- Faults: each spoils a request ----


def policy(preset, **parameters):
    def spoil(request):
        request.policy.preset = preset
        request.policy.parameters.update(parameters)

    return spoil


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


# ---- Calls ----


def append_error(stub, requests, metadata=METADATA) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        stub.AppendKv(iter(requests), metadata=metadata, timeout=TIMEOUT_S)
    return caught.value


def decode(stub, *requests, metadata=METADATA) -> list[pb.DecodeResponse]:
    return list(stub.Decode(iter(requests), metadata=metadata, timeout=TIMEOUT_S))


def verdict(reply: pb.DecodeResponse) -> tuple[grpc.StatusCode, str]:
    """What is said of a message with one row, wherever it is said."""
    status = reply.status if reply.status.code else reply.rows[0].status
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return code, status.message
