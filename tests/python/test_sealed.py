# SPDX-License-Identifier: Apache-2.0
"""Sealing against both servers, by both clients."""

import asyncio

import pytest

import attnd
import attnd.aio
from cases import Case, assert_near, opened, step


def test_sealed_sequences_are_listed_resumed_and_dropped(server):
    case = Case.random(230)
    with attnd.Client(server, tenant="sealed") as client:
        ids = []
        for tokens in (100, 200, 220):
            sequence = opened(client, case, tokens)
            ids.append(client.seal_sequence(sequence).sealed_id)
            client.close_sequence(sequence)
        assert [(s.sealed_id, s.tokens) for s in client.list_sealed()] == list(
            zip(ids, (100, 200, 220))
        )
        back = client.open_sequence(case.model, resume=ids[1])
        assert back.tokens_present == 200
        with client.decode_session() as session:
            for layer in range(case.shape.layers):
                result = step(session, case, back.sequence_id, layer, slice(200, 205))
                assert_near(result, case.expected(layer, slice(200, 205)))
        client.close_sequence(back.sequence_id)
        for number in ids:
            client.drop_sealed(number)
        assert list(client.list_sealed()) == []
        with pytest.raises(attnd.NotFoundError):
            client.drop_sealed(ids[0])
        with pytest.raises(attnd.NotFoundError):
            client.open_sequence(case.model, resume=ids[0])


def test_the_asyncio_client_seals_alike(server):
    asyncio.run(_whole_life(server))


async def _whole_life(server):
    case = Case.random(80)
    async with attnd.aio.Client(server, tenant="sealed aio") as client:
        sequence = (await client.open_sequence(case.model)).sequence_id
        await client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, 80))))
        sealed = await client.seal_sequence(sequence)
        assert sealed.tokens == 80
        assert [entry.sealed_id async for entry in client.list_sealed()] == [sealed.sealed_id]
        back = await client.open_sequence(case.model, resume=sealed.sealed_id)
        assert back.tokens_present == 80
        for name in (sequence, back.sequence_id):
            await client.close_sequence(name)
        await client.drop_sealed(sealed.sealed_id)
