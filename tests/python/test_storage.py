# SPDX-License-Identifier: Apache-2.0
"""Sealed sequences through a real server that is killed without warning: what was acknowledged is
there again, with the same answers; what was not is absent; damage is told apart from both."""

import pathlib
import signal
import subprocess
import tempfile

import grpc
import numpy as np
import pytest

import attnd
from cases import Case, assert_near, opened, step
from conftest import PROGRAM, require_program, wait_until_serving

TOKENS = 1100  # a segment and a tail
CASE = Case.random(TOKENS + 20)
IDS = range(TOKENS)


class Server:
    """A server on a data folder that outlives it."""

    def __init__(self, folder: pathlib.Path, *flags: str) -> None:
        require_program()
        self.folder, self.flags = folder, flags
        self.target = f"unix:{folder}/run/attnd.sock"
        self.start()

    def start(self) -> None:
        log = self.folder / "attnd.log"
        command = [PROGRAM, "--listen", self.target, "--data-dir", self.folder / "data"]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [*command, *self.flags], stdout=output, stderr=subprocess.STDOUT
            )
        wait_until_serving(self.target, self.process, log)

    def stop(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(20)

    def restart(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.stop(how)
        self.start()

    def segment_files(self) -> list[pathlib.Path]:
        return sorted((self.folder / "data" / "segments").glob("*/*.seg"))


@pytest.fixture(params=["auto", "threads"])
def any_server(request):
    with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
        server = Server(pathlib.Path(folder), "--io", request.param, "--segment-tokens", "512")
        yield server
        assert server.stop(signal.SIGTERM) == 0


def client_of(server: Server, tenant: str = "storage") -> attnd.Client:
    return attnd.Client(server.target, tenant=tenant)


def decode_and_check(client: attnd.Client, sequence: int, begin: int, end: int) -> None:
    with client.decode_session() as session:
        for position in range(begin, end):
            for layer in range(CASE.shape.layers):
                tokens = slice(position, position + 1)
                result = step(session, CASE, sequence, layer, tokens)
                assert_near(result, CASE.expected(layer, tokens))


def test_what_was_sealed_survives_kill_nine(any_server):
    with client_of(any_server) as client:
        sequence = opened(client, CASE, TOKENS)
        decode_and_check(client, sequence, TOKENS, TOKENS + 5)
        sealed = client.seal_sequence(sequence)
        assert sealed.tokens == TOKENS + 5
        assert sealed.segments == sealed.written_segments == 2
        decode_and_check(client, sequence, TOKENS + 5, TOKENS + 8)  # not part of the seal
        opened(client, CASE, 600)  # never sealed
    any_server.restart(signal.SIGKILL)
    with client_of(any_server) as client:
        assert list(client.list_sequences()) == []
        assert [entry.sealed_id for entry in client.list_sealed()] == [sealed.sealed_id]
        back = client.open_sequence(CASE.model, resume=sealed.sealed_id)
        assert back.tokens_present == TOKENS + 5
        decode_and_check(client, back.sequence_id, TOKENS + 5, TOKENS + 12)
        again = client.seal_sequence(back.sequence_id)
        assert again.written_segments == 0, "the segments lie there already"
        client.drop_sealed(sealed.sealed_id)
        assert [entry.sealed_id for entry in client.list_sealed()] == [again.sealed_id]
    any_server.restart(signal.SIGTERM)
    with client_of(any_server) as client:
        back = client.open_sequence(CASE.model, resume=again.sealed_id)
        decode_and_check(client, back.sequence_id, TOKENS + 12, TOKENS + 14)


def test_a_prompt_that_was_sealed_needs_no_second_upload(any_server):
    with client_of(any_server) as client:
        client.seal_sequence(opened(client, CASE, TOKENS))
    any_server.restart()
    with client_of(any_server) as client:
        found = client.open_sequence(CASE.model, policy="dense", token_ids=IDS)
        assert found.tokens_present == 1024
        rest = slice(found.tokens_present, TOKENS)
        chunks = attnd.layer_chunks(
            CASE.layers(rest), first_position=rest.start, token_ids=IDS[rest]
        )
        done = client.append_kv(found.sequence_id, chunks, prefill_complete=True)
        assert done.committed_tokens == TOKENS
        decode_and_check(client, found.sequence_id, TOKENS, TOKENS + 3)
        other = list(IDS)
        other[100] = 60000
        assert client.open_sequence(CASE.model, token_ids=other).tokens_present == 0
    with client_of(any_server, tenant="another") as client:
        assert client.open_sequence(CASE.model, token_ids=IDS).tokens_present == 0


def test_damage_is_data_loss_for_its_sequences_only(any_server):
    with client_of(any_server) as client, client_of(any_server, tenant="another") as other:
        first = client.seal_sequence(opened(client, CASE, TOKENS))
        files = any_server.segment_files()
        second = other.seal_sequence(opened(other, CASE, 700))
        any_server.restart()
        contents = bytearray(files[0].read_bytes())
        contents[len(contents) // 2] ^= 1
        files[0].write_bytes(contents)
        # A page, as it is: resuming reads indexes alone, and the step that needs the page finds it.
        resumed = client.open_sequence(CASE.model, resume=first.sealed_id).sequence_id
        for _ in range(2):
            with pytest.raises(attnd.RowError) as failure:
                decode_and_check(client, resumed, TOKENS, TOKENS + 1)
            assert failure.value.code is grpc.StatusCode.DATA_LOSS
            assert "positions 0..511 are lost" in str(failure.value)
            assert str(any_server.folder) not in str(failure.value)
            named = f"sealed sequence {first.sealed_id}"
            with pytest.raises(attnd.DataLossError, match=named) as lost:
                client.open_sequence(CASE.model, resume=first.sealed_id)
            assert str(any_server.folder) not in str(lost.value)
        assert str(files[0]) in (any_server.folder / "attnd.log").read_text()
        assert other.open_sequence(CASE.model, resume=second.sealed_id).tokens_present == 700
        assert not files[0].exists()
        assert (any_server.folder / "data" / "quarantine" / files[0].name).exists()


def test_refusals_name_the_field(any_server):
    with client_of(any_server) as client, client_of(any_server, tenant="another") as stranger:
        sequence = opened(client, CASE, 600)
        sealed = client.seal_sequence(sequence)
        for call, error, text in (
            (lambda: client.seal_sequence(sequence + 1), attnd.NotFoundError, "sequence_id"),
            (lambda: stranger.seal_sequence(sequence), attnd.NotFoundError, "sequence_id"),
            (lambda: client.drop_sealed(12345), attnd.NotFoundError, "12345"),
            (lambda: stranger.drop_sealed(sealed.sealed_id), attnd.NotFoundError, "unknown"),
            (
                lambda: stranger.open_sequence(CASE.model, resume=sealed.sealed_id),
                attnd.NotFoundError,
                "unknown",
            ),
            (
                lambda: client.open_sequence(CASE.model, resume=sealed.sealed_id, token_ids=[1]),
                attnd.InvalidArgumentError,
                "token_ids",
            ),
            (
                lambda: client.open_sequence(
                    attnd.Model("other", CASE.shape), resume=sealed.sealed_id
                ),
                attnd.FailedPreconditionError,
                "model",
            ),
            (
                lambda: client.open_sequence(
                    CASE.model, resume=sealed.sealed_id, policy="dense:window=4000"
                ),
                attnd.FailedPreconditionError,
                "window",
            ),
            (
                lambda: client.seal_sequence(client.open_sequence(CASE.model).sequence_id),
                attnd.FailedPreconditionError,
                "committed",
            ),
        ):
            with pytest.raises(error, match=text):
                call()
        assert list(stranger.list_sealed()) == []


def test_sealing_and_decoding_do_not_disturb_each_other(any_server):
    with client_of(any_server) as client, client_of(any_server) as other:
        sequence = opened(client, CASE, TOKENS)
        with client.decode_session() as session:
            for position in range(TOKENS, TOKENS + 15):
                sealed = other.seal_sequence(sequence)
                assert sealed.tokens == position
                for layer in range(CASE.shape.layers):
                    tokens = slice(position, position + 1)
                    result = step(session, CASE, sequence, layer, tokens)
                    assert_near(result, CASE.expected(layer, tokens))
        any_server.restart()
        entries = list(other.list_sealed())
        assert [entry.tokens for entry in entries] == list(range(TOKENS, TOKENS + 15))
        ids = [entry.sealed_id for entry in entries]
        assert np.all(np.diff(ids) > 0)
        back = other.open_sequence(CASE.model, resume=ids[7])
        decode_and_check(other, back.sequence_id, TOKENS + 7, TOKENS + 10)
