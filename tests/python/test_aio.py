# SPDX-License-Identifier: Apache-2.0
"""The asyncio client against both servers: the same answers as the oracle, calls and sessions
beside each other."""

import asyncio

import pytest

import attnd
import attnd.aio
from cases import Case, assert_near, step


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
