# SPDX-License-Identifier: Apache-2.0
"""The asyncio client against both servers: the same answers as the oracle, calls and sessions
beside each other."""

import asyncio
import dataclasses

import grpc
import numpy as np
import pytest

import attnd
import attnd.aio
import cases
from cases import Case, assert_near, lengths, opened, step


def test_a_sequence_from_open_to_close(server):
    asyncio.run(_whole_life(server))


async def _whole_life(server):
    case = Case.random(605)
    async with attnd.aio.Client(server, tenant="aio") as client:
        assert (await client.get_server_info()).limits.max_rows > 0
        sequence = (
            await client.open_sequence(case.model, policy="dense", lease_seconds=100)
        ).sequence_id
        assert await client.renew_lease(sequence) == 100
        chunks = attnd.layer_chunks(case.layers(slice(0, 600)), token_ids=range(600))
        appended = await client.append_kv(sequence, chunks, prefill_complete=True)
        assert appended.committed_tokens == 600
        fork = await client.fork_sequence(sequence, length=100)
        async with client.decode_session() as session:
            for layer in range(2):
                result = await step(session, case, sequence, layer, slice(600, 605))
                assert_near(result, case.expected(layer, slice(600, 605)))
        assert await client.truncate_sequence(sequence, 3) <= 3
        assert [info.committed_tokens async for info in client.list_sequences()] == [3, 100]
        for name in (sequence, fork):
            await client.close_sequence(name)
        with pytest.raises(attnd.NotFoundError):
            await client.close_sequence(sequence)


def test_sessions_run_beside_each_other(server):
    asyncio.run(_many_sessions(server))


async def _many_sessions(server):
    many = [Case.random(40, seed=seed) for seed in range(4)]
    async with attnd.aio.Client(server, tenant="aio") as client:

        async def decode(case):
            sequence = (await client.open_sequence(case.model)).sequence_id
            await client.append_kv(
                sequence, attnd.layer_chunks(case.layers(slice(0, 30))), prefill_complete=True
            )
            async with client.decode_session() as session:
                for at in range(30, 40):
                    for layer in range(2):
                        result = await step(session, case, sequence, layer, slice(at, at + 1))
                        assert_near(result, case.expected(layer, slice(at, at + 1)))
            await client.close_sequence(sequence)

        await asyncio.gather(*map(decode, many))


def test_errors_are_those_of_the_synchronous_client(server):
    asyncio.run(_errors(server))


async def _errors(server):
    case = Case.random(12)
    async with attnd.aio.Client(server, tenant="aio") as client:
        sequence = (await client.open_sequence(case.model)).sequence_id
        with pytest.raises(attnd.FailedPreconditionError):
            await client.append_kv(sequence, [attnd.KvChunk(0, 5, case.k[0], case.v[0])])
        async with client.decode_session() as session:
            with pytest.raises(attnd.RowError):
                await step(session, case, sequence, 0, slice(5, 6))
            result = await step(session, case, sequence, 0, slice(5, 6), raise_on_row_error=False)
            assert result.rows[0].code.name == "FAILED_PRECONDITION"
        await client.close_sequence(sequence)


async def layer(whole, case, number, tokens: slice, **options):
    return await whole.step(case.q[number, tokens], *case.sent(number, tokens), **options)


def test_passes(server):
    asyncio.run(_passes(server))


async def _passes(server):
    """Several sessions beside each other: answers are the oracle's, and statistics come at the
    end."""
    many = [Case.random(26, seed=seed) for seed in range(3)]
    async with attnd.aio.Client(server, tenant="aio") as client:

        async def decode(case):
            sequence = (await client.open_sequence(case.model)).sequence_id
            await client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, 20))))
            async with client.decode_session() as session:
                for at in range(20, 26, 2):
                    tokens = slice(at, at + 2)
                    whole = session.begin_pass(2, [attnd.Row(sequence, at, 2)], want_lse=True)
                    for number in range(2):
                        assert whole.layer == number
                        answer = await layer(whole, case, number, tokens)
                        assert_near(answer, case.expected(number, tokens))
                        assert bool(answer.rows) == (number == 1)
                    assert answer.rows[0].stats.zone_tokens > 0
                    with pytest.raises(ValueError, match="complete"):
                        await layer(whole, case, 1, tokens)
            infos = [info async for info in client.list_sequences()]
            (found,) = [info for info in infos if info.sequence_id == sequence]
            assert tuple(found.layer_tokens) == (26, 26)
            await client.close_sequence(sequence)

        await asyncio.gather(*map(decode, many))


def test_what_ends_a_pass_takes_it_back(client, server):
    asyncio.run(_ended_passes(client, server))


async def _ended_passes(client, server):
    """A refused layer, another step, the end of the session, a cancelled task."""
    case = Case.random(22)
    sequence = opened(client, case, 20)
    tokens, row = slice(20, 21), attnd.Row(sequence, 20)

    async def half(session):
        whole = session.begin_pass(2, [row])
        await layer(whole, case, 0, tokens)
        return whole

    async with attnd.aio.Client(server, tenant="test") as async_client:
        async with async_client.decode_session() as session:
            whole = await half(session)
            assert lengths(client, sequence) == (21, 20)
            with pytest.raises(attnd.InvalidArgumentError):
                await whole.step(np.tile(case.q[1, tokens], (2, 1, 1)), *case.sent(1, tokens))
            assert lengths(client, sequence) == (20, 20)
            with pytest.raises(ValueError, match="failed"):
                await layer(whole, case, 1, tokens)
            whole = await half(session)
            await session.step(0, [dataclasses.replace(row, query_only=True)], case.q[0, tokens])
            assert lengths(client, sequence) == (20, 20)
            with pytest.raises(ValueError, match="gave way"):
                await layer(whole, case, 1, tokens)
            await half(session)
        assert lengths(client, sequence) == (20, 20)
        async with async_client.decode_session() as session:
            whole = await half(session)
            task = asyncio.create_task(layer(whole, case, 1, tokens))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ValueError, match="failed"):
                await layer(whole, case, 1, tokens)
        due = asyncio.get_running_loop().time() + 10
        while len(set(lengths(client, sequence))) == 2:
            assert asyncio.get_running_loop().time() < due
            await asyncio.sleep(0.01)
        rows = [row, attnd.Row(1 << 60, 20)]
        both = [np.tile(part[0, tokens], (2, 1, 1)) for part in (case.q, case.k, case.v)]
        while True:
            async with async_client.decode_session() as session:
                with pytest.raises(attnd.RowError) as failed:
                    await session.begin_pass(2, rows).step(*both)
            if failed.value.code != grpc.StatusCode.ABORTED:
                break
            # The cancelled stream may end after what it had appended is taken back.
            assert asyncio.get_running_loop().time() < due
            await asyncio.sleep(0.01)
        assert failed.value.row == 1 and np.isfinite(failed.value.result.out[0]).all()
    # The cancelled layer may have been answered before.
    assert lengths(client, sequence) in ((20, 20), (21, 21))


def test_a_pass_is_repeated_on_a_new_stream(reference):
    asyncio.run(_repeated(*reference))


async def _repeated(target, servicer):
    """And one that a row has left is not: the others' layers may be anything."""
    case = Case.random(24, dataclasses.replace(cases.SHAPE, layers=4))
    with attnd.Client(target) as client:
        sequence = opened(client, case, 20)
        async with attnd.aio.Client(target, timeout_s=20) as async_client:
            async with async_client.decode_session() as session:
                for at in (20, 21):
                    whole = session.begin_pass(4, [attnd.Row(sequence, at)], want_lse=True)
                    for number in range(4):
                        servicer.unavailable = 1 if number in (0, 2, 3) else 0
                        answer = await layer(whole, case, number, slice(at, at + 1))
                        assert_near(answer, case.expected(number, slice(at, at + 1)))
                assert lengths(client, sequence) == (22,) * 4
                rows = [attnd.Row(sequence, 22), attnd.Row(1 << 60, 22)]
                whole = session.begin_pass(4, rows, raise_on_row_error=False)
                both = [np.tile(part[0, 22:23], (2, 1, 1)) for part in (case.q, case.k, case.v)]
                assert not (await whole.step(*both)).rows[1].ok
                servicer.unavailable = 1
                with pytest.raises(attnd.UnavailableError, match="a row had left it"):
                    await whole.step(*both)


def test_a_message_that_is_too_large(server):
    asyncio.run(_too_large(server))


async def _too_large(server):
    case = Case.random(12)
    async with attnd.aio.Client(server, tenant="test") as client:
        client._max_message_bytes = 500
        async with client.decode_session() as session:
            whole = session.begin_pass(2, [attnd.Row(1, 0)])
            with pytest.raises(attnd.ResourceExhaustedError, match="max_message_bytes"):
                await layer(whole, case, 0, slice(0, 1))
