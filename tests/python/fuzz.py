# SPDX-License-Identifier: Apache-2.0
"""Malformed requests to a live server, over its socket.

    python tests/python/fuzz.py --count 100000 [--seed 1] [--target unix:PATH]

Good messages of every call that the service has are spoiled by chance, in their bytes or in their
fields (values at the edges of their types), and sent as they are. Each call must end, with any code
but those that say that the server itself failed, and not with OK if bytes were no message. Beside
it, in every round, a well-behaved client (campaign_clients.py) works, whose dense answers are
compared with numpy's, one in each round at least; a witness, another sequence of its tenant, must
give the same bits afterwards. Seed and number of the message are printed on failure; so many calls,
by code, at the end. Without --target the built server is started, with small limits. test_fuzz.py
runs a short form.
"""

from __future__ import annotations

import argparse
import collections
import operator
import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import numpy as np

import attnd
import campaign_clients
import live_server
from attnd.tensors import to_tensor
from attnd.v1 import attnd_pb2 as pb
from campaign_server import left_of
from cases import SHAPE
from google.protobuf import descriptor_pb2

TIMEOUT_S = 30.0
# Codes that a server without fault never answers with.
OWN_FAULTS = ("UNAVAILABLE", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL")
MODEL = attnd.Model("fuzz", SHAPE)
EDGES = (0, 1, 2, 3, 16, 512, 65536, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, 1.0, -1.0, float("nan"), float("inf"), 3.4e38, 1e-45)
# After so many messages the attacked tenant's sequences are closed and what it sealed is dropped:
# some are opened by chance.
ROUND = 100
TENANT = "fuzz"
COMPANION = "companion"  # the tenant of the well-behaved client
ROOM_S = 30.0  # so long a call waits that finds the server's memory full
Reply = TypeVar("Reply")


class Failure(AssertionError):
    """The server did what it must not."""


def tensor(tokens: int, heads: int) -> Any:
    rng = np.random.default_rng(tokens * 100 + heads)
    return to_tensor(rng.standard_normal((tokens, heads, SHAPE.head_dim)).astype(np.float32))


def calls() -> dict[str, tuple[str, type]]:
    """Every call that the service has: how grpc names its kind, and its message."""
    found = {}
    for method in pb.DESCRIPTOR.services_by_name["Attnd"].methods:
        described = descriptor_pb2.MethodDescriptorProto()
        method.CopyToProto(described)
        sent = "stream" if described.client_streaming else "unary"
        got = "stream" if described.server_streaming else "unary"
        found[method.name] = (f"{sent}_{got}", getattr(pb, method.input_type.name))
    return found


CALLS = calls()


def good_messages(sequence: int, short: int, sealed: int) -> list[tuple[str, list[Any]]]:
    """Calls that the server takes: the name of each, and its messages, of which only a stream has
    several. `sequence` is empty, `short` is not, and `sealed` is what the latter was sealed as."""
    policy = attnd.Policy.parse("double-p:p1=0.9").to_proto()
    row = pb.DecodeRow(
        sequence_id=sequence,
        query_tokens=2,
        token_ids=[1, 2],
        policy=attnd.Policy.parse("streaming:sink=1").to_proto(),
        want_kv_head_errors=True,
    )
    chunk = pb.AppendKvRequest(
        sequence_id=sequence, k=tensor(3, 2), v=tensor(3, 2), token_ids=range(3)
    )
    observed = pb.AppendKvRequest(sequence_id=sequence, observed_queries=tensor(3, 4))
    complete = pb.AppendKvRequest(sequence_id=sequence, prefill_complete=True)
    step = pb.DecodeRequest(
        step_id=7,
        deadline_us=10_000_000,
        rows=[row],
        q=tensor(2, 4),
        k=tensor(2, 2),
        v=tensor(2, 2),
    )
    prompt = pb.OpenSequenceRequest(model=MODEL.to_proto(), policy=policy, token_ids=range(5))
    keeps = pb.OpenSequenceRequest(
        model=MODEL.to_proto(),
        policy=attnd.Policy.parse("snapkv:budget=2").to_proto(),
        layout=pb.OpenSequenceRequest.LAYOUT_TOKEN_ORDER,
        indexes=[pb.OpenSequenceRequest.INDEX_LABELS, pb.OpenSequenceRequest.INDEX_KEYS_4BIT],
    )
    resumed = pb.OpenSequenceRequest(model=MODEL.to_proto(), resume_sealed_id=sealed)
    return [
        ("GetServerInfo", [pb.GetServerInfoRequest()]),
        ("OpenSequence", [prompt]),
        ("OpenSequence", [keeps]),
        ("OpenSequence", [resumed]),
        ("AppendKv", [chunk]),
        ("AppendKv", [observed]),
        ("AppendKv", [complete]),
        ("AppendKv", [chunk, observed, complete]),
        ("Decode", [step]),
        ("Decode", [step, step]),
        ("TruncateSequence", [pb.TruncateSequenceRequest(sequence_id=sequence)]),
        ("ForkSequence", [pb.ForkSequenceRequest(sequence_id=sequence, length=0)]),
        ("SealSequence", [pb.SealSequenceRequest(sequence_id=short)]),
        ("ListSealed", [pb.ListSealedRequest(page_size=10)]),
        ("DropSealed", [pb.DropSealedRequest(sealed_id=sealed)]),
        ("RenewLease", [pb.RenewLeaseRequest(sequence_id=sequence)]),
        ("CloseSequence", [pb.CloseSequenceRequest(sequence_id=sequence)]),
        ("ListSequences", [pb.ListSequencesRequest(page_size=10)]),
    ]


def check_messages(messages: list[tuple[str, list[Any]]]) -> None:
    """Every call of the service has a good message of its type, and nothing else has."""
    forgotten = set(CALLS) ^ {name for name, _ in messages}
    if forgotten:
        raise Failure(f"good_messages and the service differ in {sorted(forgotten)}")
    for name, sent in messages:
        if any(type(message) is not CALLS[name][1] for message in sent):
            raise Failure(f"good_messages has another message than {name}'s")


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


def parses(message: type, raw: bytes) -> bool:
    try:
        message.FromString(raw)
    except Exception:  # of another class in each protobuf runtime
        return False
    return True


def well_answered(name: str, raw: list[bytes], code: str, replies: list[bytes]) -> bool:
    """Whether a server without fault may answer these bytes so."""
    readable = [parses(CALLS[name][1], one) for one in raw]
    if code in OWN_FAULTS:
        return False
    if code != "OK":
        return True
    if name != "Decode":
        return all(readable)
    # A stream of Decode goes on after a message that it refuses, and says so in the reply.
    refused = [pb.DecodeResponse.FromString(one).status.code != 0 for one in replies]
    return len(refused) == len(raw) and all(map(operator.or_, readable, refused))


def patiently(call: Callable[[], Reply]) -> Reply:
    """What the call gives, made again while others have all of the server's memory."""
    due = time.monotonic() + ROOM_S
    while True:
        try:
            return call()
        except attnd.AttndError as error:
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > due:
                raise
        time.sleep(0.05)


class Companion:
    """The well-behaved client: a round of its work beside each round of messages."""

    def __init__(self, client: attnd.Client, seed: int, server_gone: Callable[[], bool]) -> None:
        known = campaign_clients.Known()
        self._worker = campaign_clients.Worker(
            client, COMPANION, known, seed, shape=SHAPE, server_gone=server_gone
        )
        self._thread: threading.Thread | None = None
        self._cut_off = False  # the server was ended amid a round

    def begin(self) -> None:
        self._before = self._worker.done["compared"]
        self._thread = threading.Thread(target=self._round, daemon=True)
        self._thread.start()

    def end(self) -> str:
        """What went wrong in the round that has begun; empty if nothing did."""
        if self._thread is None:
            return ""
        if left_of([self._thread]):
            return "the well-behaved client still waits for an answer"
        self._thread = None
        if self._worker.wrong:
            return "the well-behaved client was answered wrong"
        if self._cut_off or self._has_compared():
            return ""
        return "the well-behaved client got no dense answer"

    def _has_compared(self) -> bool:
        return self._worker.done["compared"] > self._before

    def _round(self) -> None:
        worker = self._worker
        try:
            for deed in (worker.upload, worker.decode, worker.probe, worker.fork, worker.decode):
                worker.act(deed)
            for deed in (worker.truncate, worker.seal, worker.resume, worker.decode, worker.drop):
                worker.act(deed)
            # Others may have had all of the server's memory meanwhile.
            due = time.monotonic() + ROOM_S
            while not self._has_compared() and time.monotonic() < due:
                worker.act(worker.upload)
                worker.act(worker.decode)
            if len(worker.open) > 4:
                worker.make_room()
        except attnd.AttndError as error:
            self._cut_off = campaign_clients.unreachable(error, worker.server_gone)
            if not self._cut_off:
                worker.fault(str(error))
        except Exception:
            worker.fault(traceback.format_exc())

    def close(self) -> None:
        self.end()
        self._worker.make_room()
        _drop_sealed(self._worker.client)


class Fuzzer:
    """Sends spoiled messages as the tenant "fuzz"; asks the witness, and has the companion work, as
    another. `client_of` makes the clients that send nothing spoiled; `server_gone` is as for
    campaign_clients.Worker."""

    def __init__(
        self,
        target: str,
        seed: int,
        client_of: Callable[..., attnd.Client] = attnd.Client,
        server_gone: Callable[[], bool] = campaign_clients.never,
    ) -> None:
        self.codes: collections.Counter[tuple[str, str]] = collections.Counter()  # call, code
        self.ending = threading.Event()  # once set, run() returns
        self._server_gone = server_gone
        self._rng = random.Random(seed)
        self._seed = seed
        self._channel = grpc.insecure_channel(target)
        self._client = client_of(target, tenant=TENANT, timeout_s=TIMEOUT_S)
        self._witness_client = client_of(target, tenant=COMPANION, timeout_s=TIMEOUT_S)
        _drop_sealed(self._witness_client)  # of a fuzzer whose server was killed
        self._companion = Companion(self._witness_client, seed, server_gone)
        rng = np.random.default_rng(seed)
        kv = [
            tuple(rng.standard_normal((2, 700, 2, 32)).astype(np.float32))
            for _ in range(SHAPE.layers)
        ]
        self._question = rng.standard_normal((1, 4, 32)).astype(np.float32)
        opened = patiently(lambda: self._witness_client.open_sequence(MODEL, policy="double-p"))
        self._witness = opened.sequence_id
        patiently(
            lambda: self._witness_client.append_kv(
                self._witness,
                attnd.layer_chunks(kv),
                prefill_complete=True,
                timeout_s=campaign_clients.UPLOAD_S,
            )
        )
        self._answer = self._ask()
        self._messages: list[tuple[str, list[Any]]] = []

    def close(self) -> None:
        self._close_all()
        self._companion.close()
        self._witness_client.close_sequence(self._witness)
        self._client.shutdown()
        self._witness_client.shutdown()
        self._channel.close()

    def run(self, count: int) -> None:
        """Raises Failure, naming seed and message. Returns early once `ending` is set."""
        for number in range(count):
            if self.ending.is_set():
                return
            if number % ROUND == 0:
                self.finish(number)
                self._companion.begin()
            if not self._messages or number % ROUND == 0:
                self._messages = good_messages(*patiently(self._new_sequences))
                check_messages(self._messages)
            name, good = self._rng.choice(self._messages)
            raw = [spoiled(message, self._rng) for message in good]
            code, replies = self._send(name, raw)
            self.codes[name, code] += 1
            if code == "OK" and name == "CloseSequence":
                self._messages = []
            if code == "UNAVAILABLE" and self._server_gone():
                return
            if not well_answered(name, raw, code, replies):
                shown = [one[:200] for one in raw]
                raise Failure(f"seed {self._seed}, message {number}: {name} {shown!r} gave {code}")
        self.finish(count)

    def _new_sequences(self) -> tuple[int, int, int]:
        """What good_messages wants."""
        sequence = self._client.open_sequence(MODEL).sequence_id
        short = self._client.open_sequence(MODEL).sequence_id
        layers = [(np.ones((1, 2, 32), np.float32),) * 2] * SHAPE.layers
        self._client.append_kv(
            short, attnd.layer_chunks(layers), timeout_s=campaign_clients.UPLOAD_S
        )
        return sequence, short, self._client.seal_sequence(short).sealed_id

    def _send(self, name: str, raw: list[bytes]) -> tuple[str, list[bytes]]:
        """The code that the call ends with, and its replies."""
        kind = CALLS[name][0]
        call = getattr(self._channel, kind)(f"/attnd.v1.Attnd/{name}", bytes, bytes)
        sent = raw[0] if kind == "unary_unary" else iter(raw)
        try:
            reply = call(sent, metadata=(("attnd-tenant", TENANT),), timeout=TIMEOUT_S)
            return "OK", list(reply) if kind == "stream_stream" else [reply]
        except grpc.RpcError as error:
            return str(error.code().name), []

    def _ask(self) -> bytes:
        with self._witness_client.decode_session() as session:
            row = attnd.Row(self._witness, 700, query_only=True)
            result = patiently(lambda: session.step(1, [row], self._question))
            return result.out.tobytes() + result.lse.tobytes()

    def finish(self, number: int) -> None:
        """Ends a round: `number` messages have been sent."""
        self._close_all()
        fault = self._companion.end()
        if self._ask() != self._answer:
            fault = "the witness has changed"
        if fault:
            raise Failure(f"seed {self._seed}, before message {number}: {fault}")

    def end_companion(self) -> str:
        """What is wrong with the companion's round, should one be under way."""
        return self._companion.end()

    def _close_all(self) -> None:
        for info in list(self._client.list_sequences()):
            self._client.close_sequence(info.sequence_id)
        _drop_sealed(self._client)


def _drop_sealed(client: attnd.Client) -> None:
    for entry in list(client.list_sealed()):
        client.drop_sealed(entry.sealed_id)


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
        for (name, code), times in sorted(fuzzer.codes.items()):
            print(f"{times:8d} {name} {code}")
    fuzzer.close()
    print(f"{time.monotonic() - began:.0f} s, no fault")


if __name__ == "__main__":
    main()
