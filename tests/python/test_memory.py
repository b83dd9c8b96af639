# SPDX-License-Identifier: Apache-2.0
"""Passes over shared memory from Python: answers are those of messages, bit for bit; arrays are
views of the region; whoever dies, the other notices. The real server, on sockets of its own."""

from __future__ import annotations

import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import grpc
import numpy as np
import pytest

import attnd
import live_server
from attnd import memory_stream
from attnd.memory_socket import MemorySocket, memory_socket_of
from attnd.pass_memory import PassLayout, PassMemory
from attnd.pass_reply import PassReply
from attnd.requests import PassOptions
from attnd.words import ClientTurns
from cases import SHAPE, Case, assert_near, opened
from conftest import require_program
from memory_fixtures import PROMPT, TOKENS, client, layer_tokens, target, write

SHAPES = {
    "fp32": SHAPE,
    "bf16": attnd.ModelShape(layers=3, query_heads=4, kv_heads=1, head_dim=64, dtype="bf16"),
    "latent": attnd.ModelShape(
        layers=2, query_heads=4, kv_heads=1, head_dim=96, value_dim=64, dtype="fp32", latent=True
    ),
}


@pytest.mark.parametrize("spin_us", [0, 200])
@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_those_of_messages(client, name, spin_us):
    case = Case.random(TOKENS, SHAPES[name])
    sequence, twin = (opened(client, case, PROMPT, complete=False) for _ in range(2))
    layers = range(case.shape.layers)
    with (
        client.memory_session(
            case.shape, query_tokens_max=5, query_dtype="fp32", spin_us=spin_us
        ) as session,
        client.decode_session() as messages,
    ):
        start = PROMPT
        for count in (5, 1, 2):
            tokens = slice(start, start + count)
            ids = list(range(tokens.start, tokens.stop))
            whole = session.begin_pass([attnd.Row(sequence, start, count, ids)], want_lse=True)
            other = messages.begin_pass(
                len(layers), [attnd.Row(twin, start, count, ids)], want_lse=True
            )
            for layer in layers:
                write(whole, case, layer, tokens)
                whole.step()
                expected = other.step(case.q[layer, tokens], *case.sent(layer, tokens))
                np.testing.assert_array_equal(whole.out, expected.out)
                np.testing.assert_array_equal(whole.lse, expected.lse)
                if name == "fp32":
                    assert_near(whole, case.expected(layer, tokens))
            assert whole.rows[0].stats.zone_tokens == expected.rows[0].stats.zone_tokens > 0
            assert whole.failed_rows == 0
            start += count
    assert layer_tokens(client, sequence) == [TOKENS] * len(layers)


def test_arrays_are_views_of_the_region(client):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with client.memory_session(SHAPE, query_tokens_max=2) as session:
        region = np.frombuffer(session._memory.memory, np.uint8)
        whole = session.begin_pass([attnd.Row(sequence, PROMPT)], want_lse=True)
        for array in (whole.q, whole.k, whole.v, whole.out, whole.lse):
            assert np.shares_memory(region, array)
            assert array.flags.c_contiguous and array.ctypes.data % 64 == 0
        # By DLPack and by the buffer protocol, too.
        for layer in range(SHAPE.layers):
            tokens = slice(PROMPT, PROMPT + 1)
            k, v = case.sent(layer, tokens)
            np.from_dlpack(whole.q)[:] = case.q[layer, tokens]
            memoryview(whole.k).cast("B")[:] = memoryview(k).cast("B")
            whole.v[:] = v
            whole.step()
            assert np.shares_memory(np.from_dlpack(whole.out), region)
            assert_near(whole, case.expected(layer, tokens))
        out = whole.out
    assert np.isfinite(out).all()  # still mapped


def test_rows_that_fail_raise_at_the_end(client):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    rows = [attnd.Row(sequence, PROMPT), attnd.Row(sequence + 1000, PROMPT)]
    with client.memory_session(SHAPE, query_tokens_max=2) as session:
        for raises in (True, False):
            whole = session.begin_pass(rows, raise_on_row_error=raises)
            for layer in range(SHAPE.layers):
                write(whole, case, layer, slice(PROMPT, PROMPT + 2))
                if layer + 1 == SHAPE.layers and raises:
                    with pytest.raises(attnd.RowError, match="sequence_id") as caught:
                        whole.step()
                    assert caught.value.row == 1
                    assert np.isfinite(caught.value.result.out[0]).all()
                else:
                    whole.step()
                assert whole.failed_rows == 1
                assert np.isnan(whole.out[1]).all() and np.isfinite(whole.out[0]).all()
            assert [row.ok for row in whole.rows] == [True, False]
    assert layer_tokens(client, sequence) == [PROMPT + 1] * SHAPE.layers


def test_a_row_that_fails_behind_the_first_layer_has_nothing_of_that_layer_s(client):
    case = Case.random(TOKENS)
    both = [opened(client, case, PROMPT, complete=False) for _ in range(2)]
    with client.memory_session(SHAPE, query_tokens_max=2) as session:
        rows = [attnd.Row(one, PROMPT) for one in both]
        whole = session.begin_pass(rows, want_lse=True, raise_on_row_error=False)
        for layer in range(SHAPE.layers):
            write(whole, case, layer, [PROMPT, PROMPT])
            if layer == 1:
                whole.q[1] = np.nan
            whole.step()
            for answer in (whole.out, whole.lse):
                assert np.isfinite(answer[0]).all()
                assert (np.isfinite if layer == 0 else np.isnan)(answer[1]).all()
        assert [row.ok for row in whole.rows] == [True, False]
    assert [layer_tokens(client, one) for one in both] == [
        [PROMPT + 1] * SHAPE.layers, [PROMPT] * SHAPE.layers,
    ]  # fmt: skip


def test_a_pass_that_is_refused_leaves_its_session(client):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    row = attnd.Row(sequence, PROMPT)
    with client.memory_session(SHAPE) as session:
        whole = session.begin_pass([row], pass_deadline_us=1)
        with pytest.raises(attnd.DeadlineExceededError):
            whole.step()
        with pytest.raises(ValueError, match="complete or failed"):
            whole.step()
        # One that nobody rings for is given up by the server; its client is told at its next step.
        whole = session.begin_pass([row])
        whole.step()
        assert layer_tokens(client, sequence) == [PROMPT + 1, PROMPT]
        time.sleep(2.2)
        assert layer_tokens(client, sequence) == [PROMPT] * 2
        with pytest.raises(attnd.DeadlineExceededError, match="not rung for in time"):
            whole.step()
        whole = session.begin_pass([row], want_lse=True)
        with pytest.raises(ValueError, match="under way"):
            session.begin_pass([row])
        for layer in range(SHAPE.layers):
            write(whole, case, layer, slice(PROMPT, PROMPT + 1))
            whole.step()
            assert_near(whole, case.expected(layer, slice(PROMPT, PROMPT + 1)))
    with pytest.raises(ValueError, match="closed"):
        session.begin_pass([row])


def test_the_servers_time_is_without_the_clients(client):
    """What a pass says of its time lies within what its steps took here."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with client.memory_session(SHAPE) as session:
        whole = session.begin_pass([attnd.Row(sequence, PROMPT)])
        waited = 0.0
        for layer in range(SHAPE.layers):
            write(whole, case, layer, slice(PROMPT, PROMPT + 1))
            time.sleep(0.05)
            assert (whole.queue_us, whole.engine_us, whole.rows) == (0, 0, ())
            begun = time.monotonic()
            whole.step()
            waited += time.monotonic() - begun
        assert 0 < whole.queue_us + whole.engine_us < waited * 1e6


def test_a_session_that_is_closed_lets_its_sequences_go(client):
    """At once: the next writer finds them free."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    for at in range(PROMPT, TOKENS, 2):
        with client.memory_session(SHAPE) as session:
            whole = session.begin_pass([attnd.Row(sequence, at)])
            for layer in range(SHAPE.layers):
                write(whole, case, layer, slice(at, at + 1))
                whole.step()
        assert session._stream._call._call.code() is grpc.StatusCode.OK  # ended in order
        assert whole.rows[0].ok  # told later
        with client.decode_session() as messages:
            other = messages.begin_pass(SHAPE.layers, [attnd.Row(sequence, at + 1)])
            for layer in range(SHAPE.layers):
                tokens = slice(at + 1, at + 2)
                other.step(case.q[layer, tokens], *case.sent(layer, tokens))
    assert layer_tokens(client, sequence) == [TOKENS] * 2
    # Whoever waits for a reply of it is told, each time.
    for _ in range(2):
        with pytest.raises(attnd.UnavailableError, match="ended the stream"):
            PassReply(session._stream._call, 9, None).get(5)


def test_queries_alone(client):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT)
    row = attnd.Row(sequence, PROMPT, 3, query_only=True)
    with client.memory_session(SHAPE, query_tokens_max=3) as session:
        whole = session.begin_pass([row], stats="none")
        assert len(whole.k) == len(whole.v) == 0 and whole.lse is None
        for layer in range(SHAPE.layers):
            whole.q[:] = case.q[layer, :3]
            whole.step()
        assert whole.rows == ()
    assert layer_tokens(client, sequence) == [PROMPT] * 2


def test_what_cannot_work_is_refused(client, target, folder):
    for options, words in (
        ({"query_tokens_max": 0}, "query_tokens_max is 0"),
        ({"spin_us": 10_001}, "spin_us is 10001"),
        ({"output_dtype": "float64"}, "float64"),
    ):
        with pytest.raises(ValueError, match=words):
            client.memory_session(SHAPE, **options)
    with pytest.raises(attnd.ResourceExhaustedError, match="client_memory_bytes"):
        client.memory_session(SHAPE, query_tokens_max=1 << 20)
    with pytest.raises(attnd.UnavailableError, match="none"):
        client.memory_session(SHAPE, socket=f"{folder}/none")
    with attnd.Client("localhost:1") as remote, pytest.raises(ValueError, match="Unix socket"):
        remote.memory_session(SHAPE)
    with client.memory_session(SHAPE) as session:
        with pytest.raises(ValueError, match='"pass" or "none"'):
            session.begin_pass([attnd.Row(1, 0)], stats="layer")
        with pytest.raises(ValueError, match="2 query tokens; allowed are 1..1"):
            session.begin_pass([attnd.Row(1, 0, 2)])


def test_it_is_off_unless_allowed(attnd_target):
    with attnd.Client(attnd_target) as client, pytest.raises(attnd.UnavailableError):
        client.memory_session(SHAPE)


def test_regions_are_listed_and_unregistered(target):
    memory = MemorySocket(memory_socket_of(target), 10)
    region = memory.register(5000)
    assert len(region.memory) == 8192
    assert [(info.region_id, info.bytes) for info in memory.list_regions()] == [(region.id, 8192)]
    memory.unregister(region.id)
    assert memory.list_regions() == []
    with pytest.raises(attnd.NotFoundError):
        memory.unregister(region.id)
    memory.close()


STRANGER = """
import os, sys
import attnd
from attnd.memory_socket import MemorySocket, memory_socket_of

path = memory_socket_of(sys.argv[1])
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    MemorySocket(path, 10).register(4096)
except attnd.AttndError as error:
    print(type(error).__name__, error)
else:
    print("registered")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="this user may not become another one")
def test_a_process_of_another_user_is_kept_out():
    """By the socket's mode; and where somebody has opened that, by the server."""
    require_program()
    nobody = 65534
    with live_server.running("--allow-client-memory") as (target, _):
        path = pathlib.Path(memory_socket_of(target))
        for folder in (path.parent, path.parent.parent):
            folder.chmod(0o711)

        def said():
            arguments = [sys.executable, "-c", STRANGER, target, str(nobody)]
            run = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
            assert run.returncode == 0, run.stderr
            return run.stdout

        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "Permission denied" in said()
        path.chmod(0o666)
        refusal = said()
        assert refusal.startswith("AttndError PERMISSION_DENIED")
        assert f"processes of user 0 alone; this is one of user {nobody}" in refusal
        memory = MemorySocket(str(path), 10)
        assert memory.list_regions() == []
        memory.close()


def test_a_step_that_is_interrupted_gives_its_pass_up(client, monkeypatch):
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)

    def interrupted(*_):
        raise KeyboardInterrupt

    with client.memory_session(SHAPE) as session:
        whole = session.begin_pass([attnd.Row(sequence, PROMPT)])
        write(whole, case, 0, slice(PROMPT, PROMPT + 1))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ClientTurns, "await_answer", interrupted)
            whole.step()
        with pytest.raises(ValueError, match="complete or failed"):
            whole.step()
        with pytest.raises(attnd.AttndError, match="interrupted"):
            session.begin_pass([attnd.Row(sequence, PROMPT)])
    for _ in range(500):  # until the server has noticed, the sequence has another writer
        try:
            with client.memory_session(SHAPE) as session:
                whole = session.begin_pass([attnd.Row(sequence, PROMPT)])
                for layer in range(SHAPE.layers):
                    write(whole, case, layer, slice(PROMPT, PROMPT + 1))
                    whole.step()
            break
        except attnd.RowError:
            time.sleep(0.01)
    assert layer_tokens(client, sequence) == [PROMPT + 1] * SHAPE.layers


def test_a_pass_that_is_not_declared_is_not_waited_for(client, monkeypatch):
    """Its begin ends before the message, or in sending it: nobody knows then whether the server has
    it, so that the stream has ended. Neither a next pass nor another stream waits for a reply."""
    case = Case.random(TOKENS)
    sequence, twin = (opened(client, case, PROMPT, complete=False) for _ in range(2))

    def interrupted(*_):
        raise KeyboardInterrupt

    def decode(stream, row) -> None:
        whole = stream.begin_pass(memory, [row], PassOptions())
        for layer in range(SHAPE.layers):
            write(whole, case, layer, slice(row.position, row.position + 1))
            whole.step()

    connection = client.memory_socket()
    memory = PassMemory(connection, PassLayout(SHAPE, 1))
    stream = client.memory_stream()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(memory_stream, "MemoryPass", interrupted)
        decode(stream, attnd.Row(sequence, PROMPT))
    decode(stream, attnd.Row(sequence, PROMPT))
    assert layer_tokens(client, sequence) == [PROMPT + 1] * SHAPE.layers
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stream._call, "send", interrupted)
        decode(stream, attnd.Row(sequence, PROMPT + 1))
    with pytest.raises(attnd.AttndError, match="declaration of a pass .* interrupted"):
        decode(stream, attnd.Row(sequence, PROMPT + 1))
    other = client.memory_stream()
    decode(other, attnd.Row(twin, PROMPT))
    for each in (stream, other, connection):
        each.close()
    assert layer_tokens(client, twin) == [PROMPT + 1] * SHAPE.layers


# A client that answers its prompt's next token up to a moment, and then says so and waits.
DYING = """
import os, signal, sys, time
import attnd
from cases import SHAPE, Case
from test_memory import PROMPT, TOKENS, write
target, sequence, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
case = Case.random(TOKENS)
client = attnd.Client(target)
session = client.memory_session(SHAPE)
whole = session.begin_pass([attnd.Row(sequence, PROMPT)])
write(whole, case, 0, slice(PROMPT, PROMPT + 1))
whole.step()
write(whole, case, 1, slice(PROMPT, PROMPT + 1))
if moment == "between ring and answer":
    session._memory.turns.ring()
    os.kill(os.getpid(), signal.SIGKILL)
print("parked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["without a ring", "between ring and answer"])
def test_a_client_that_is_killed_leaves_nothing(moment):
    require_program()
    case = Case.random(TOKENS)
    flags = ("--allow-client-memory", "--max-memory-regions=1", "--max-memory-passes=1")
    with live_server.running(*flags) as (target, _), attnd.Client(target) as client:
        sequence = opened(client, case, PROMPT, complete=False)
        dying = subprocess.Popen(
            [sys.executable, "-c", DYING, target, str(sequence), moment],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
        )
        if moment == "without a ring":
            assert dying.stdout.readline() == b"parked\n"
            assert layer_tokens(client, sequence) == [PROMPT + 1, PROMPT]
            dying.kill()
        dying.wait(30)
        due = time.monotonic() + 5
        while True:  # the region, the pass's place and the sequence are free again within a second
            try:
                session = client.memory_session(SHAPE)
                break
            except attnd.ResourceExhaustedError:
                assert time.monotonic() < due
                time.sleep(0.02)
        with session:
            # All layers or none: the last layer's answer may have been made in time.
            held = layer_tokens(client, sequence)
            while held[0] != held[1]:
                assert time.monotonic() < due, held
                held = layer_tokens(client, sequence)
            if moment == "without a ring":
                assert held == [PROMPT] * 2
            while True:
                try:
                    whole = session.begin_pass([attnd.Row(sequence, PROMPT)])
                    for layer in range(SHAPE.layers):
                        write(whole, case, layer, slice(PROMPT, PROMPT + 1))
                        whole.step()
                    break
                except (attnd.ResourceExhaustedError, attnd.AbortedError, attnd.RowError):
                    assert time.monotonic() < due
                    time.sleep(0.02)
        assert layer_tokens(client, sequence) == [PROMPT + 1] * 2


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_server_that_ends_is_noticed(folder, end):
    require_program()
    case = Case.random(TOKENS)
    path = folder / f"ending-{end.name}"
    with live_server.to_be_ended(path, "--allow-client-memory") as (target, server):
        with attnd.Client(target) as client:
            sequence = opened(client, case, PROMPT, complete=False)
            with client.memory_session(SHAPE) as session:
                whole = session.begin_pass([attnd.Row(sequence, PROMPT)])
                write(whole, case, 0, slice(PROMPT, PROMPT + 1))
                whole.step()
                if end == signal.SIGSTOP:
                    live_server.stop(server)
                else:
                    server.send_signal(end)
                    time.sleep(0.2)
                start = time.monotonic()
                expected = (
                    attnd.DeadlineExceededError if end == signal.SIGSTOP else attnd.UnavailableError
                )
                with pytest.raises(expected):
                    whole.step(timeout_s=1)
                assert time.monotonic() - start < 1.5
                with pytest.raises(ValueError, match="complete or failed"):
                    whole.step()
