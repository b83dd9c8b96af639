# SPDX-License-Identifier: Apache-2.0
"""What the clients do when a server fails: retries where they are safe, errors of the right class
where not. The reference server fails on demand."""

import asyncio
import dataclasses
import socket
import threading
import time

import numpy as np
import pytest

import attnd
import attnd.aio
import attnd.session as attnd_session
import cases
from cases import Case, assert_near, lengths, opened, step


@pytest.fixture
def session_parts(reference):
    target, servicer = reference
    case = Case.random(22)
    with attnd.Client(target, timeout_s=20) as client:
        yield client, servicer, case, opened(client, case, 20)


def test_reads_are_repeated(reference):
    target, servicer = reference
    with attnd.Client(target) as client:
        servicer.unavailable = 2
        assert client.get_server_info().version == "0.0.0"
        servicer.unavailable = 2
        assert list(client.list_sequences()) == []
    assert servicer.calls.count("GetServerInfo") == 3 and servicer.calls.count("ListSequences") == 3


def test_writes_are_not_repeated(session_parts):
    client, servicer, case, sequence = session_parts
    for name, call in {
        "OpenSequence": lambda: client.open_sequence(case.model),
        "ForkSequence": lambda: client.fork_sequence(sequence),
        "CloseSequence": lambda: client.close_sequence(sequence),
        "TruncateSequence": lambda: client.truncate_sequence(sequence, 1),
        "AppendKv": lambda: client.append_kv(sequence, []),
    }.items():
        before = servicer.calls.count(name)
        servicer.unavailable = 1
        with pytest.raises(attnd.UnavailableError, match="told to fail"):
            call()
        assert servicer.calls.count(name) == before + 1


def test_a_step_is_repeated_on_a_new_stream(session_parts):
    client, servicer, case, sequence = session_parts
    with client.decode_session() as session:
        step(session, case, sequence, 0, slice(20, 21))
        servicer.unavailable = 2
        result = step(session, case, sequence, 0, slice(21, 22))
    assert_near(result, case.expected(0, slice(21, 22)))
    assert servicer.calls.count("Decode") == 3
    assert lengths(client, sequence) == (22, 20)


def test_a_step_is_given_up_in_the_end(session_parts):
    client, servicer, case, sequence = session_parts
    servicer.unavailable = 100
    with client.decode_session() as session:
        with pytest.raises(attnd.UnavailableError):
            step(session, case, sequence, 0, slice(20, 21))
        servicer.unavailable = 0
        step(session, case, sequence, 0, slice(20, 21))  # the session is still good


def test_a_step_waits_no_longer_than_told(session_parts):
    client, servicer, case, sequence = session_parts
    servicer.pause_s = 3.0
    with client.decode_session() as session:
        began = time.monotonic()
        with pytest.raises(attnd.DeadlineExceededError, match="repeating"):
            step(session, case, sequence, 0, slice(20, 21), timeout_s=0.2)
        assert time.monotonic() - began < 2
        servicer.pause_s = 0.0


def test_the_watchdog_strikes_only_what_is_armed():
    """An answer that comes just in time must not have the next step cancelled."""
    watchdog = attnd_session._Watchdog()
    watchdog.stop()
    armed, struck = [False], []

    def strike():
        struck.append(armed[0])

    watchdog.arm(0, strike)
    assert not watchdog.disarm()
    watchdog.check(float("inf"))
    assert not struck
    ended = threading.Event()

    def check():
        while not ended.is_set():
            watchdog.check(float("inf"))
            time.sleep(0)

    checker = threading.Thread(target=check)
    checker.start()
    expirations = 0
    for _ in range(200):
        armed[0] = True
        watchdog.arm(0, strike)
        expirations += watchdog.disarm()
        armed[0] = False
    ended.set()
    checker.join()
    assert all(struck) and len(struck) == expirations


def test_an_upload_has_no_limit_of_time_unless_told(reference):
    """The client's timeout is for calls of a known size."""
    target, servicer = reference
    case = Case.random(20)

    def chunks():
        yield from attnd.layer_chunks(case.layers(slice(0, 10)))
        time.sleep(0.6)
        for chunk in attnd.layer_chunks(case.layers(slice(10, 20)), first_position=10):
            yield chunk

    with attnd.Client(target, timeout_s=0.3) as client:
        sequence = client.open_sequence(case.model).sequence_id
        with pytest.raises(attnd.DeadlineExceededError):
            client.append_kv(sequence, chunks(), timeout_s=0.3)
        sequence = client.open_sequence(case.model).sequence_id
        assert client.append_kv(sequence, chunks()).committed_tokens == 20

    async def upload():
        async with attnd.aio.Client(target, timeout_s=0.3) as client:
            sequence = (await client.open_sequence(case.model)).sequence_id
            return await client.append_kv(sequence, chunks())

    assert asyncio.run(upload()).committed_tokens == 20


def test_an_uploads_limit_is_for_asking_the_server_too(tmp_path):
    """A new client asks for the limits first, here of nobody; and a memory is closed by that."""
    listener = socket.socket(socket.AF_UNIX)  # whose connections nobody accepts
    listener.bind(f"{tmp_path}/nobody.sock")
    listener.listen()
    case, target = Case.random(2), f"unix:{tmp_path}/nobody.sock"
    chunks = list(attnd.layer_chunks(case.layers(slice(0, 2))))

    class Memory:
        closed = False

        def close(self, *, wait):
            self.closed = True

    begun, memory = time.monotonic(), Memory()
    with attnd.Client(target, timeout_s=60) as client:
        with pytest.raises((attnd.DeadlineExceededError, attnd.UnavailableError)):
            client.append_kv(1, chunks, memory=memory, timeout_s=0.3)
    assert memory.closed

    async def upload():
        async with attnd.aio.Client(target, timeout_s=60) as client:
            await client.append_kv(1, chunks, timeout_s=0.3)

    with pytest.raises((attnd.DeadlineExceededError, attnd.UnavailableError)):
        asyncio.run(upload())
    listener.close()
    assert time.monotonic() - begun < 30


def test_calls_have_deadlines(session_parts):
    client, servicer, case, sequence = session_parts
    servicer._lock.acquire()  # as a server that hangs
    try:
        with pytest.raises(attnd.DeadlineExceededError):
            client.fork_sequence(sequence, timeout_s=0.2)
    finally:
        servicer._lock.release()


def test_messages_that_the_server_would_refuse_are_not_sent(session_parts):
    client, servicer, case, sequence = session_parts
    with client.decode_session() as session:
        session._limits = dataclasses.replace(session._limits, max_message_bytes=100)
        with pytest.raises(attnd.ResourceExhaustedError, match="max_message_bytes"):
            step(session, case, sequence, 0, slice(20, 21))
    assert servicer.calls.count("Decode") == 0


def test_faults_of_the_callers_chunks_are_raised_as_they_are(session_parts):
    client, servicer, case, sequence = session_parts

    def chunks():
        yield attnd.KvChunk(0, 20, case.k[0, 20:21], case.v[0, 20:21])
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.append_kv(sequence, chunks())


@pytest.mark.parametrize(
    "k, v, ids",
    [
        (np.zeros((2, 2, 32)), np.zeros((3, 2, 32)), ()),
        (np.zeros((0, 2, 32)), np.zeros((0, 2, 32)), ()),
        (np.zeros((2, 64)), np.zeros((2, 64)), ()),
        (np.zeros((2, 2, 32)), np.zeros((2, 2, 32)), (1,)),
    ],
)
def test_chunks_must_fit_themselves(k, v, ids):
    with pytest.raises(ValueError):
        attnd.KvChunk(0, 0, k, v, ids)


@pytest.mark.parametrize("target", ["", "unix:", "nowhere", "host:", ":1", "host:x", "host:70000"])
def test_targets_are_checked(target):
    with pytest.raises(ValueError, match="unix:PATH"):
        attnd.Client(target)


def test_nobody_listens(folder):
    with (
        attnd.Client(f"unix:{folder}/nobody.sock") as client,
        pytest.raises(attnd.UnavailableError),
    ):
        client.open_sequence(attnd.Model("test", cases.SHAPE))


def test_asyncio_steps_are_repeated_and_bounded(reference):
    target, servicer = reference
    case = Case.random(22)

    async def run():
        async with attnd.aio.Client(target) as client:
            sequence = (await client.open_sequence(case.model)).sequence_id
            await client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, 20))))
            async with client.decode_session() as session:
                servicer.unavailable = 2
                assert_near(
                    await step(session, case, sequence, 0, slice(20, 21)),
                    case.expected(0, slice(20, 21)),
                )
                servicer.pause_s = 3.0
                with pytest.raises(attnd.DeadlineExceededError):
                    await step(session, case, sequence, 0, slice(21, 22), timeout_s=0.2)
                servicer.pause_s = 0.0
            servicer.unavailable = 1
            with pytest.raises(attnd.UnavailableError):
                await client.fork_sequence(sequence)
            servicer.unavailable = 1
            with pytest.raises(attnd.UnavailableError):
                await client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, 20))))

    asyncio.run(run())
