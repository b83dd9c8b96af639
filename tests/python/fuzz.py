# SPDX-License-Identifier: Apache-2.0
"""Malformed requests to a live server, over its socket.

    python tests/python/fuzz.py --count 100000 [--seed 1] [--target unix:PATH]

Good messages of every call are spoiled by chance, in their bytes or in their fields (values at the
edges of their types), and sent as they are. Each call must end, with any code but those that say
that the server itself failed; a witness, another tenant's sequence, must give the same bits
afterwards. Seed and number of the message are printed on failure; so many calls, by code, at the
end. Without --target the built server is started, with small limits. test_fuzz.py runs a short
form.
"""

from __future__ import annotations

import argparse
import collections
import random
import time
from typing import Any

import grpc
import numpy as np

import attnd
import live_server
from attnd.tensors import to_tensor
from attnd.v1 import attnd_pb2 as pb
from cases import SHAPE

TIMEOUT_S = 30.0
# Codes that a server without fault never answers with.
OWN_FAULTS = ("UNAVAILABLE", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNKNOWN")
MODEL = attnd.Model("fuzz", SHAPE)
EDGES = (0, 1, 2, 3, 16, 512, 65536, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, 1.0, -1.0, float("nan"), float("inf"), 3.4e38, 1e-45)
# Sequences of the attacked tenant are closed after so many messages: a few are opened by chance.
ROUND = 500


class Failure(AssertionError):
    """The server did what it must not."""


def tensor(tokens: int, heads: int) -> Any:
    rng = np.random.default_rng(tokens * 100 + heads)
    return to_tensor(rng.standard_normal((tokens, heads, SHAPE.head_dim)).astype(np.float32))


def good_messages(sequence: int) -> list[tuple[str, str, Any]]:
    """Kind of call, its name, and a message that the server takes."""
    return [
        ("unary_unary", "GetServerInfo", pb.GetServerInfoRequest()),
        (
            "unary_unary",
            "OpenSequence",
            pb.OpenSequenceRequest(
                model=MODEL.to_proto(),
                policy=attnd.Policy.parse("double-p:p1=0.9").to_proto(),
                token_ids=range(5),
            ),
        ),
        (
            "stream_unary",
            "AppendKv",
            pb.AppendKvRequest(
                sequence_id=sequence, k=tensor(3, 2), v=tensor(3, 2), token_ids=range(3)
            ),
        ),
        (
            "stream_unary",
            "AppendKv",
            pb.AppendKvRequest(sequence_id=sequence, prefill_complete=True),
        ),
        (
            "stream_stream",
            "Decode",
            pb.DecodeRequest(
                step_id=7,
                deadline_us=10_000_000,
                rows=[
                    pb.DecodeRow(
                        sequence_id=sequence,
                        query_tokens=2,
                        token_ids=[1, 2],
                        policy=attnd.Policy.parse("streaming:sink=1").to_proto(),
                    )
                ],
                q=tensor(2, 4),
                k=tensor(2, 2),
                v=tensor(2, 2),
            ),
        ),
        ("unary_unary", "TruncateSequence", pb.TruncateSequenceRequest(sequence_id=sequence)),
        ("unary_unary", "ForkSequence", pb.ForkSequenceRequest(sequence_id=sequence, length=0)),
        ("unary_unary", "CloseSequence", pb.CloseSequenceRequest(sequence_id=sequence)),
        ("unary_unary", "ListSequences", pb.ListSequencesRequest(page_size=10)),
    ]


def is_repeated(field: Any) -> bool:
    """Old protobuf runtimes say it by the label, which new ones lack."""
    repeated = getattr(field, "is_repeated", None)
    return field.label == field.LABEL_REPEATED if repeated is None else repeated


def spoil_field(message: Any, rng: random.Random) -> None:
    """One field, somewhere in the message."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    kind = field.cpp_type
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = rng.choice(["p1", "window", "tolerance", "", "x" * rng.randrange(300)])
        getattr(message, field.name)[key] = rng.choice(["", "0", "-1", "1e999", "nan", "y" * 200])
    elif is_repeated(field):
        values = getattr(message, field.name)
        if kind == field.CPPTYPE_MESSAGE:
            spoil_field(rng.choice(values) if values and rng.random() < 0.8 else values.add(), rng)
        elif kind == field.CPPTYPE_ENUM:
            values.extend([rng.randrange(-2, 10)] * rng.choice((1, 9)))
        else:
            values.append(rng.choice(EDGES) & 0xFFFFFFFF)
    elif kind == field.CPPTYPE_MESSAGE:
        spoil_field(getattr(message, field.name), rng)
    elif kind == field.CPPTYPE_ENUM:
        setattr(message, field.name, rng.randrange(-2, 10))
    elif kind == field.CPPTYPE_BOOL:
        setattr(message, field.name, rng.random() < 0.5)
    elif kind == field.CPPTYPE_FLOAT:
        setattr(message, field.name, rng.choice(FLOATS))
    elif kind == field.CPPTYPE_STRING:
        raw = rng.randbytes(rng.choice((0, 1, 255, 257, 5000)))
        setattr(message, field.name, raw if field.type == field.TYPE_BYTES else raw.hex())
    else:
        bits = 32 if kind == field.CPPTYPE_UINT32 else 64
        setattr(message, field.name, rng.choice(EDGES) & ((1 << bits) - 1))


def spoiled(message: Any, rng: random.Random) -> bytes:
    """The message with one to three faults; now and then none."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(rng.randrange(3)):
        spoil_field(copy, rng)
    raw = bytearray(copy.SerializeToString())
    if raw and rng.random() < 0.4:
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(min(len(raw), 96))] = rng.randrange(256)
        if rng.random() < 0.3:
            del raw[rng.randrange(len(raw)) :]
    return bytes(raw)


def parses(message: Any, raw: bytes) -> bool:
    try:
        type(message).FromString(raw)
    except Exception:  # of another class in each protobuf runtime
        return False
    return True


class Fuzzer:
    """Sends spoiled messages as the tenant "fuzz", asks the witness as another."""

    def __init__(self, target: str, seed: int) -> None:
        self.codes: collections.Counter[str] = collections.Counter()
        self._rng = random.Random(seed)
        self._seed = seed
        self._channel = grpc.insecure_channel(target)
        self._client = attnd.Client(target, tenant="fuzz", timeout_s=TIMEOUT_S)
        self._witness_client = attnd.Client(target, tenant="witness", timeout_s=TIMEOUT_S)
        rng = np.random.default_rng(seed)
        kv = [
            tuple(rng.standard_normal((2, 700, 2, 32)).astype(np.float32))
            for _ in range(SHAPE.layers)
        ]
        self._question = rng.standard_normal((1, 4, 32)).astype(np.float32)
        self._witness = self._witness_client.open_sequence(MODEL, policy="double-p").sequence_id
        self._witness_client.append_kv(self._witness, attnd.layer_chunks(kv), prefill_complete=True)
        self._answer = self._ask()
        self._messages: list[tuple[str, str, Any]] = []

    def close(self) -> None:
        self._close_all()
        self._witness_client.close_sequence(self._witness)
        self._client.shutdown()
        self._witness_client.shutdown()
        self._channel.close()

    def run(self, count: int) -> None:
        """Raises Failure, naming seed and message."""
        for number in range(count):
            if number % ROUND == 0:
                self._close_all()
                self._check_witness(number)
            if not self._messages or number % ROUND == 0:
                self._messages = good_messages(self._client.open_sequence(MODEL).sequence_id)
            kind, name, good = self._rng.choice(self._messages)
            raw = spoiled(good, self._rng)
            code = self._send(kind, name, raw)
            self.codes[code] += 1
            if code == "OK" and name == "CloseSequence":
                self._messages = []
            # gRPC itself answers INTERNAL where bytes are no message of a unary call.
            if code in OWN_FAULTS or (code == "INTERNAL" and parses(good, raw)):
                raise Failure(
                    f"seed {self._seed}, message {number}: {name} {raw[:200]!r} gave {code}"
                )
        self._check_witness(count)

    def _send(self, kind: str, name: str, raw: bytes) -> str:
        call = getattr(self._channel, kind)(f"/attnd.v1.Attnd/{name}", bytes, bytes)
        sent = raw if kind == "unary_unary" else iter([raw])
        try:
            reply = call(sent, metadata=(("attnd-tenant", "fuzz"),), timeout=TIMEOUT_S)
            if kind == "stream_stream":
                list(reply)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def _ask(self) -> bytes:
        with self._witness_client.decode_session() as session:
            row = attnd.Row(self._witness, 700, query_only=True)
            result = session.step(1, [row], self._question)
            return result.out.tobytes() + result.lse.tobytes()

    def _check_witness(self, number: int) -> None:
        if self._ask() != self._answer:
            raise Failure(f"seed {self._seed}, before message {number}: the witness has changed")

    def _close_all(self) -> None:
        for info in list(self._client.list_sequences()):
            self._client.close_sequence(info.sequence_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--target", help="unix:PATH or HOST:PORT of a running server")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.count} messages")
    if arguments.target:
        report(arguments.target, arguments.count, arguments.seed)
        return
    limits = ("--memory-budget-bytes=67108864", "--max-sequences=100")
    with live_server.running(*limits) as (target, process):
        report(target, arguments.count, arguments.seed)
        print(f"resident at most: {live_server.status_bytes(process, 'VmHWM') >> 10} kB")


def report(target: str, count: int, seed: int) -> None:
    began = time.monotonic()
    fuzzer = Fuzzer(target, seed)
    try:
        fuzzer.run(count)
    finally:
        for code, times in fuzzer.codes.most_common():
            print(f"{times:8d} {code}")
    fuzzer.close()
    print(f"{time.monotonic() - began:.0f} s, no fault")


if __name__ == "__main__":
    main()
