# SPDX-License-Identifier: Apache-2.0
"""Leases as clients use them: a sequence that no call names for its lease is closed, above all that
of a client which was killed. Both servers, by the real clock: leases of a second, of three where
the client is busy. Calls under way are in tests/engine/leases_test.cc and
tests/server/leases_test.cc, by a clock of the test's."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import attnd
import live_server
import metrics_text
from cases import Case, opened, step
from conftest import require_program

CLOSED_WITHIN_S = 20.0


def is_open(client: attnd.Client, sequence: int) -> bool:
    return any(info.sequence_id == sequence for info in client.list_sequences())


def wait_until_closed(client: attnd.Client, *sequences: int) -> None:
    due = time.monotonic() + CLOSED_WITHIN_S
    while any(is_open(client, sequence) for sequence in sequences):
        assert time.monotonic() < due, "a sequence outlives its lease"
        time.sleep(0.05)


def test_leases_are_listed_and_renewed(client):
    model = Case.random(1).model
    leased = client.open_sequence(model, lease_seconds=100).sequence_id
    forever = client.open_sequence(model).sequence_id
    fork = client.fork_sequence(leased)
    assert client.renew_lease(leased) == 100
    assert client.renew_lease(forever) == 0
    listed = {info.sequence_id: info for info in client.list_sequences()}
    for sequence in (leased, fork):
        assert listed[sequence].lease_seconds == 100
        assert 80 < listed[sequence].lease_left_seconds <= 100
    assert (listed[forever].lease_seconds, listed[forever].lease_left_seconds) == (0, 0)
    client.close_sequence(leased)
    with pytest.raises(attnd.NotFoundError):
        client.renew_lease(leased)


@pytest.mark.parametrize("lease", [-1, 1 << 32])
def test_a_lease_that_is_no_field(client, lease):
    with pytest.raises(ValueError, match=str(lease)):
        client.open_sequence(Case.random(1).model, lease_seconds=lease)


def test_a_sequence_that_nobody_calls_is_closed(client, server):
    """Its client's stream is open and silent; another client decodes on, for longer than its lease,
    which is one that no stall of a busy machine outlasts."""
    case = Case.random(120)
    forever = opened(client, case, 3)
    silent = client.open_sequence(case.model, policy="dense", lease_seconds=1).sequence_id
    with attnd.Client(server, tenant="test") as other, other.decode_session() as stream:
        busy = other.open_sequence(case.model, policy="dense", lease_seconds=3).sequence_id
        with client.decode_session() as session:
            step(session, case, silent, 0, slice(0, 1))
            for position in range(50):  # 5 s: for longer than the leases
                step(stream, case, busy, 0, slice(position, position + 1))
                time.sleep(0.1)
            assert not is_open(client, silent)
            assert is_open(client, busy)
            with pytest.raises(attnd.RowError) as caught:
                step(session, case, silent, 0, slice(1, 2))
        assert caught.value.code.name == "NOT_FOUND"
    wait_until_closed(client, busy)
    assert is_open(client, forever)


def test_what_was_sealed_outlives_the_lease(client):
    case = Case.random(80)
    sequence = client.open_sequence(case.model, policy="dense", lease_seconds=1).sequence_id
    client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, 80))))
    sealed = client.seal_sequence(sequence).sealed_id
    wait_until_closed(client, sequence)
    resumed = client.open_sequence(case.model, resume=sealed)
    assert resumed.tokens_present == 80
    [info] = [i for i in client.list_sequences() if i.sequence_id == resumed.sequence_id]
    assert info.lease_seconds == 0
    client.drop_sealed(sealed)


PROGRAM = """
import sys, time
import attnd
from cases import Case
case = Case.random(4000)
client = attnd.Client(sys.argv[1])
sequence = client.open_sequence(case.model, policy="dense", lease_seconds=3).sequence_id
client.append_kv(sequence, attnd.layer_chunks(case.layers(slice(0, 4000))), prefill_complete=True)
print(sequence, flush=True)
while True:
    client.renew_lease(sequence)
    time.sleep(0.1)
"""


def test_a_killed_client_leaves_nothing_behind(request):
    """The server's memory is as before, and another client's sequence is as it was."""
    require_program()
    metrics = f"127.0.0.1:{live_server.free_port()}"

    def page() -> metrics_text.Page:
        return metrics_text.read(f"http://{metrics}/metrics")

    with live_server.running("--metrics-listen", metrics) as (target, _), attnd.Client(target) as c:
        case = Case.random(200)
        mine = opened(c, case, 199)
        before = page().get("attnd_resident_bytes")
        victim = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, target],
            cwd=request.path.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            theirs = int(victim.stdout.readline())
            time.sleep(5)  # the program renews its lease: it lives
            assert is_open(c, theirs)
            held = page()
            assert held.get("attnd_resident_bytes") > before + 4000 * case.k[:, :1].nbytes
            assert held.get("attnd_leased_sequences") == 1
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.wait(20)
            victim.stdout.close()
        wait_until_closed(c, theirs)
        due = time.monotonic() + CLOSED_WITHIN_S
        while page().get("attnd_resident_bytes") > before:
            assert time.monotonic() < due, "the memory is not free again"
            time.sleep(0.05)
        after = page()
        assert after.get("attnd_leases_ended_total") == 1
        assert after.get("attnd_leased_sequences") == 0
        assert after.get("attnd_sequences") == 1
        with pytest.raises(attnd.NotFoundError, match="its lease has ended"):
            c.renew_lease(theirs)
        with c.decode_session() as session:
            step(session, case, mine, 0, slice(199, 200))
