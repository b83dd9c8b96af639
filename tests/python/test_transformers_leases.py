# SPDX-License-Identifier: Apache-2.0
"""Leases of attnd.transformers: kept while the process lives, over when it is gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import grpc
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import attnd
from attnd.transformers.renewal import Renewer
from transformers_models import TINY, attached, generate, load, prompt, tiny, torch
from transformers_sequences import CLOSED_WITHIN_S, PROGRAM, assert_none_soon, open_sequences  # noqa: F401

KILLED = PROGRAM.replace("sys.argv[1])", "sys.argv[1], lease_seconds=3)") + """
sys.stdout.flush()
import time
time.sleep(100)
"""


def test_a_process_that_is_killed_leaves_its_sequences_to_their_leases(
    attnd_target, open_sequences, request
):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, attnd_target],
        cwd=request.path.parent,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline().strip() == "2"
            time.sleep(5)  # it lives: its leases are renewed
            assert open_sequences() == 2
        finally:
            process.kill()
    assert_none_soon(open_sequences)


def test_a_cache_has_a_lease(attnd_target):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attnd.Client(attnd_target, tenant="test") as client:
        for options, expected in (({}, 600), ({"lease_seconds": 0}, 0), ({"lease_seconds": 9}, 9)):
            with attached(model, attnd_target, **options) as attachment:
                cache = attachment.new_cache()
                generate(model, ids, cache)
                forked = cache.fork()
                leases = [info.lease_seconds for info in client.list_sequences()]
                assert leases == [expected] * 4
                forked.close()


def renewers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "attnd-renewer"]


def unreachable(*args, **options):
    raise attnd.UnavailableError(grpc.StatusCode.UNAVAILABLE, "the test's server is away")


def test_a_cache_whose_lease_ended_says_what_to_do(attnd_target, open_sequences, monkeypatch):
    """In each of the calls that may come next; then the cache is of no more use. Nothing renews
    here: the server is cut off from it."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    advice = r"its lease has ended.*new cache.*cut off.*lease of 3 s.*lease_seconds"
    monkeypatch.setattr(attnd.Client, "renew_lease", unreachable)
    with attached(model, attnd_target, lease_seconds=3) as attachment, torch.no_grad():
        uploaded, *caches = [attachment.new_cache() for _ in range(5)]
        for cache in caches:
            generate(model, ids, cache)
        model(ids, past_key_values=uploaded)
        assert_none_soon(open_sequences)
        stepped, forked, cropped, selected = caches
        with pytest.raises(attnd.NotFoundError, match=advice):
            model(ids[:, -1:], past_key_values=stepped)
        with pytest.raises(ValueError, match="it failed"):
            model(ids[:, -1:], past_key_values=stepped)
        with pytest.raises(attnd.NotFoundError, match=advice):
            model(ids[:, -1:], past_key_values=uploaded)
        with pytest.raises(attnd.NotFoundError, match=advice):
            forked.fork()
        with pytest.raises(attnd.NotFoundError, match=advice):
            cropped.crop(-3)
        with pytest.raises(attnd.NotFoundError, match=advice):
            selected.batch_repeat_interleave(2)
        again = attachment.new_cache()
        assert generate(model, ids, again).sequences.shape == (2, 42)


def test_leases_are_renewed_while_the_model_pauses(attnd_target, open_sequences):
    """Of a prompt, of rows that are decoded, and of a copy; until the attachment is closed."""
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 30)
    with attached(model, attnd_target, lease_seconds=1) as attachment, torch.no_grad():
        cache, uploaded = attachment.new_cache(), attachment.new_cache()
        generate(model, ids, cache)
        model(ids, past_key_values=uploaded)
        kept = cache.fork()
        time.sleep(3)
        assert open_sequences() == 6
        more = torch.cat([ids, prompt(TINY[0], 2, 15)], 1)
        for paused in (cache, uploaded, kept):
            assert generate(model, more, paused).sequences.shape == (2, 57)
        assert len(renewers()) == 1
    assert open_sequences() == 0
    assert not renewers()


class Away:
    """A client whose sequence 1 is closed, and whose first calls fail."""

    def __init__(self):
        self.failures = [attnd.UnavailableError(grpc.StatusCode.UNAVAILABLE, "away"), OSError("x")]
        self.renewed: list[int] = []

    def renew_lease(self, sequence, timeout_s):
        if self.failures:
            raise self.failures.pop(0)
        if sequence == 1:
            raise attnd.NotFoundError(grpc.StatusCode.NOT_FOUND, "closed")
        self.renewed.append(sequence)


class Rows:
    """What a cache holds."""

    sequence_ids = (1, 2)


def test_a_renewal_that_fails_is_made_again(caplog):
    """And a sequence that is closed does not keep others from being renewed. Nobody hears of it,
    but the log of what is no error of a call."""
    client, held = Away(), Rows()
    renewer = Renewer(client, 0.03)
    renewer.watch(held)
    due = time.monotonic() + CLOSED_WITHIN_S
    while len(client.renewed) < 3 and time.monotonic() < due:
        time.sleep(0.01)
    renewer.end()
    renewer.join(CLOSED_WITHIN_S)
    assert not renewers()
    assert len(client.renewed) >= 3 and set(client.renewed) == {2}
    assert [record.getMessage() for record in caplog.records] == ["renewing leases"]


def test_nothing_renews_where_there_is_no_lease(attnd_target):
    with attached(load(TINY[0]), attnd_target, lease_seconds=0):
        assert not renewers()


def test_a_forgotten_attachment_renews_nothing(attnd_target, open_sequences):
    attachment = attached(tiny(TINY[0]), attnd_target)
    assert len(renewers()) == 1
    del attachment
    gc.collect()
    due = time.monotonic() + CLOSED_WITHIN_S
    while renewers():
        assert time.monotonic() < due, "the thread goes on"
        time.sleep(0.02)


@pytest.mark.parametrize("lease", [-1, 604801])
def test_a_lease_out_of_range_is_refused(attnd_target, lease):
    """Before the model is touched."""
    model = load(TINY[0])
    with pytest.raises(ValueError, match=rf"lease_seconds={lease}: allowed are 0\.\.604800"):
        attached(model, attnd_target, lease_seconds=lease)
    assert model.config._attn_implementation == "sdpa"
