# SPDX-License-Identifier: Apache-2.0
"""Uploads from memory that is shared with the server: attnd.KvMemory and append_kv(memory=...)."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import numpy as np
import pytest

import attnd
import attnd.aio
import live_server
from attnd import requests
from attnd.memory_socket import MemorySocket
from cases import Case
from conftest import require_program
from memory_fixtures import connected, target  # noqa: F401

TOKENS = 700


@pytest.fixture
def client(target):  # noqa: F811
    with connected(target, timeout_s=10) as client:
        yield client


def in_memory(memory: attnd.KvMemory, array, offset: int):
    """A copy of the array in the memory."""
    copied = memory.array(offset, array.shape, array.dtype)
    copied[...] = array
    return copied


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_server_has_what_lies_there(client, dtype):
    """A repeat of a token must have the same bytes."""
    case = Case.random(TOKENS, attnd.ModelShape(2, 4, 2, 16, dtype=dtype))
    sequence = client.open_sequence(case.model, policy="dense").sequence_id
    with client.kv_memory(1 << 20) as memory:
        for layer in range(2):
            k, v = in_memory(memory, case.k[layer], 0), in_memory(memory, case.v[layer], 1 << 19)
            for part in (slice(0, 300), slice(296, TOKENS)):  # multiples of 8 tokens: of 64 bytes
                chunk = attnd.KvChunk(layer, part.start, k[part], v[part])
                client.append_kv(sequence, [chunk], memory=memory)
            k[...] = 0  # it was copied
    client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, TOKENS))))
    other = case.k[1, 500:501] + np.ones(1, case.k.dtype)
    with pytest.raises(attnd.AlreadyExistsError):
        client.append_kv(sequence, [attnd.KvChunk(1, 500, other, case.v[1, 500:501])])


def test_a_latent_model(client):
    shape = attnd.ModelShape(1, 2, 1, 32, value_dim=16, latent=True, dtype="fp32")
    keys = np.random.default_rng(0).standard_normal((50, 1, 32), dtype=np.float32)
    sequence = client.open_sequence(attnd.Model("latent", shape)).sequence_id
    with client.kv_memory(1 << 16) as memory:
        chunk = attnd.KvChunk(0, 0, in_memory(memory, keys, 128))
        assert client.append_kv(sequence, [chunk], memory=memory).committed_tokens == 50
    client.append_kv(sequence, [attnd.KvChunk(0, 0, keys)])


def test_messages_have_no_data(client):
    """And begin where a tensor may: each part has a multiple of 64 bytes of keys and of values."""
    with client.kv_memory(1 << 20) as memory:
        k = memory.array(64, (1000, 1, 12), "fp16")  # 24 bytes a token: units of 8 tokens
        v = memory.array(1 << 18, (1000, 1, 20), "fp16")  # 40
        chunk = attnd.KvChunk(0, 3, k, v, range(1000))
        messages = list(requests.append_requests(9, [chunk], False, None, 8000, memory))
    assert sum(message.k.shape[0] for message in messages) == 1000 and len(messages) > 10
    assert all(not message.k.data and not message.v.data for message in messages)
    assert all(message.memory.k_offset % 64 == 0 for message in messages)
    for message in messages:
        start = message.first_position - 3
        assert message.memory.k_offset == 64 + 24 * start
        assert message.memory.v_offset == (1 << 18) + 40 * start
        assert list(message.token_ids) == list(range(start, start + message.k.shape[0]))


def test_messages_without_data_stand_for_more(client):
    """Each costs a call's way to a thread and back, however little it carries."""
    with client.kv_memory(8 << 20) as memory:
        k, v = (memory.array(at << 20, (4096, 8, 32), "fp32") for at in (0, 4))
        chunk = attnd.KvChunk(0, 0, k, v)
        counts = [
            len(list(requests.append_requests(9, [chunk], False, None, most, where)))
            for most, where in ((64 << 20, None), (64 << 20, memory), (5 << 20, memory))
        ]
    assert counts == [3, 1, 2]


def test_arrays_of_other_memory_are_refused(client):
    case = Case.random(64)
    shape = case.k[0].shape
    sequence = client.open_sequence(case.model).sequence_id
    with client.kv_memory(1 << 18) as memory, client.kv_memory(1 << 18) as another:
        k = memory.array(0, shape, "fp32")
        v = another.array(1 << 17, shape, "fp32")
        for faulty in (
            attnd.KvChunk(0, 0, k, v),
            attnd.KvChunk(0, 0, case.k[0], case.v[0]),
            attnd.KvChunk(0, 0, k[:, :, ::2], k[:, :, ::2]),
        ):
            with pytest.raises(ValueError, match="no dense array of the memory"):
                client.append_kv(sequence, [faulty], memory=memory)
        misaligned = np.frombuffer(k, np.float32)[1:65].reshape(1, *shape[1:])
        with pytest.raises(ValueError, match="multiples of 64"):
            client.append_kv(sequence, [attnd.KvChunk(0, 0, misaligned, k[:1])], memory=memory)
        for offset in (-64, 32, memory.bytes, memory.bytes - 64):
            with pytest.raises(ValueError, match="allowed are multiples of 64 within"):
                memory.array(offset, shape, "fp32")


def test_a_closed_memory_is_gone(client):
    case = Case.random(64)
    sequence = client.open_sequence(case.model).sequence_id
    memory = client.kv_memory(1 << 18)
    k = in_memory(memory, case.k[0], 0)
    assert not memory.ended()
    memory.close()
    memory.close()
    assert memory.ended()
    with pytest.raises(attnd.NotFoundError):
        client.append_kv(sequence, [attnd.KvChunk(0, 0, k, k)], memory=memory)
    assert np.array_equal(k, case.k[0])


def test_a_call_that_fails_closes_the_memory(client):
    """The server may read it for the last time when the call has raised: it is nobody's any
    more."""
    case = Case.random(64)
    sequence = client.open_sequence(case.model).sequence_id
    for faulty in (attnd.KvChunk(0, 9, case.k[0], case.v[0]), attnd.KvChunk(0, 0, case.k[0])):
        memory = client.kv_memory(1 << 18)
        k = in_memory(memory, faulty.k, 0)
        v = None if faulty.v is None else in_memory(memory, faulty.v, 1 << 17)
        with pytest.raises(attnd.AttndError):
            client.append_kv(sequence, [attnd.KvChunk(0, faulty.first_position, k, v)],
            memory=memory)
        assert memory.ended()
    with client.kv_memory(1 << 18) as memory:
        k, v = in_memory(memory, case.k[0], 0), in_memory(memory, case.v[0], 1 << 17)
        client.append_kv(sequence, [attnd.KvChunk(0, 0, k, v)], memory=memory)
        assert not memory.ended()


def test_units_that_no_message_has_room_for(client):
    """Tokens of 1150 bytes begin at multiples of 64 bytes in units of 32."""
    with client.kv_memory(1 << 20) as memory:
        k = memory.array(0, (64, 1, 575), "fp16")
        v = memory.array(1 << 19, (64, 1, 575), "fp16")
        chunk = attnd.KvChunk(0, 0, k, v)
        with pytest.raises(ValueError, match="32 tokens, .* messages have at most 65536"):
            list(requests.append_requests(9, [chunk], False, None, 1 << 16, memory))
        messages = requests.append_requests(9, [chunk], False, None, 1 << 17, memory)
        assert [message.k.shape[0] for message in messages] == [32, 32]


def test_the_asyncio_client(target):  # noqa: F811
    asyncio.run(_uploaded_by_asyncio(target))


async def _uploaded_by_asyncio(target):  # noqa: F811
    case = Case.random(TOKENS)
    async with attnd.aio.Client(target) as client:
        sequence = (await client.open_sequence(case.model, policy="dense")).sequence_id
        with await client.kv_memory(1 << 20) as memory:
            for layer in range(2):
                k = in_memory(memory, case.k[layer], 0)
                v = in_memory(memory, case.v[layer], 1 << 19)
                await client.append_kv(sequence, [attnd.KvChunk(layer, 0, k, v)], memory=memory)
            assert not memory.ended()
            with pytest.raises(attnd.AlreadyExistsError):
                k += 1
                await client.append_kv(sequence, [attnd.KvChunk(1, 0, k, v)], memory=memory)
            assert memory.ended()
        await client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, TOKENS))))
        await client.close_sequence(sequence)


def test_an_asyncio_client_that_waits_no_longer(target, monkeypatch):  # noqa: F811
    """A memory that comes then is closed."""
    asked, may_come, closed = threading.Event(), threading.Event(), threading.Event()
    register, close = MemorySocket.register, MemorySocket.close

    def late(socket, *args, **options):
        asked.set()
        assert may_come.wait(10)
        return register(socket, *args, **options)

    monkeypatch.setattr(MemorySocket, "register", late)
    monkeypatch.setattr(MemorySocket, "close", lambda socket: (close(socket), closed.set()))

    async def give_up():
        async with attnd.aio.Client(target) as client:
            waiting = asyncio.ensure_future(client.kv_memory(1 << 18))
            assert await asyncio.to_thread(asked.wait, 10)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not closed.is_set()
            may_come.set()

    asyncio.run(give_up())
    assert closed.wait(10)


def test_an_asyncio_client_is_told_what_a_memory_may_have(target):  # noqa: F811
    async def ask():
        async with attnd.aio.Client(target) as client:
            await client.kv_memory(1 << 30)

    with pytest.raises(attnd.ResourceExhaustedError, match="client_memory_bytes"):
        asyncio.run(ask())


def test_a_server_that_does_not_answer(tmp_path):
    """The call's own time holds, and a second more, whatever the client's is."""
    require_program()
    case = Case.random(64)
    with live_server.to_be_ended(tmp_path, "--allow-client-memory") as (address, server):
        with attnd.Client(address, timeout_s=60) as client:
            sequence = client.open_sequence(case.model).sequence_id
            assert client.max_message_bytes > 0  # asked once, in the client's time
            memory = client.kv_memory(1 << 18)
            k, v = in_memory(memory, case.k[0], 0), in_memory(memory, case.v[0], 1 << 17)
            server.send_signal(signal.SIGSTOP)
            try:
                begun = time.monotonic()
                with pytest.raises(attnd.DeadlineExceededError):
                    chunk = attnd.KvChunk(0, 0, k, v)
                    client.append_kv(sequence, [chunk], memory=memory, timeout_s=0.1)
                assert time.monotonic() - begun < 30
                assert memory.ended()
            finally:
                server.send_signal(signal.SIGCONT)
