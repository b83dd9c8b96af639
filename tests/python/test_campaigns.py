# SPDX-License-Identifier: Apache-2.0
"""The campaigns themselves (crash.py, soak.py, fuzz.py): what they must not overlook. Each of these
faults is made here, by a stand-in or by a signal to a real server, and must be reported."""

from __future__ import annotations

import argparse
import pathlib
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

import attnd
import campaign_clients
import campaign_server
import crash
import ctl
import faults
import fuzz
import metrics_text
import probes
import soak
from campaign_server import Server, ServerFault
from conftest import require_program
from soak_clients import Helper

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def server(tmp_path_factory):
    require_program()
    with Server(str(tmp_path_factory.mktemp("s"))) as server:
        yield server


# ---- servers that end by themselves ----


def test_a_crash_of_the_server_is_no_kill(server):
    server.start()
    assert not server.ending.is_set()
    server.process.send_signal(signal.SIGSEGV)
    assert server.is_gone()
    with pytest.raises(ServerFault, match="by itself, with -11"):
        server.kill()
    assert "-11" in server.end()
    with pytest.raises(ServerFault, match="-11"):
        server.ended_within(1)


def test_a_server_is_killed_with_its_block(server, capsys):
    with pytest.raises(ZeroDivisionError), server:
        server.start()
        raise ZeroDivisionError
    assert server.process.poll() == -signal.SIGKILL
    assert "serves at" in capsys.readouterr().out, "the log's end"


def process_of(*command: str) -> subprocess.Popen:
    return subprocess.Popen(command)


def test_only_a_server_that_is_ended_may_be_unreachable(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign_server, "END_S", 0.1)
    with Server(str(tmp_path)) as server:
        server.process = process_of("sleep", "60")
        assert not server.is_gone()
        server.kill()
        assert server.is_gone()


def test_the_address_of_metrics_is_that_of_this_life(tmp_path):
    server = Server(str(tmp_path))
    server.log.write_text("metrics at http://old/metrics\n")
    server._log_before = server.log.stat().st_size
    with server:
        server.process = process_of("sleep", "60")

        def say():
            time.sleep(0.1)
            with server.log.open("a") as log:
                log.write("metrics at http://new/metrics\n")

        threading.Thread(target=say).start()
        assert server.metrics_url() == "http://new/metrics"


# ---- clients ----


class NoClient:
    """Fails each call with this code."""

    def __init__(self, code):
        self.code = code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, _):
        def call(*_, **__):
            raise attnd.AttndError(self.code, "made up")

        return call


def worker_of(code, *, gone):
    client, known = NoClient(code), campaign_clients.Known()
    return campaign_clients.Worker(client, "red", known, 1, server_gone=lambda: gone)


@pytest.mark.parametrize(
    ("code", "gone", "wrong"),
    [(UNAVAILABLE, True, 0), (UNAVAILABLE, False, 1), (grpc.StatusCode.ABORTED, True, 1)],
)
def test_a_live_server_answers(code, gone, wrong):
    worker = worker_of(code, gone=gone)
    worker.run()
    assert worker.wrong == wrong


def test_only_what_was_done_is_counted():
    worker = worker_of(grpc.StatusCode.RESOURCE_EXHAUSTED, gone=False)
    for deed in (worker.decode, worker.probe, worker.fork, worker.truncate, worker.seal):
        worker.act(deed)
    worker.act(worker.resume)
    worker.act(worker.drop)
    worker.make_room()
    assert not +worker.done
    worker.act(worker.upload)
    assert +worker.done == {"memory full": 1}


def test_a_helper_keeps_what_it_finds_as_the_server_ends():
    class Finds(Helper):
        what: Exception = fuzz.Failure("wrong answer")

        def round(self):
            self.stopping.set()
            raise self.what

    found = []
    for what in (fuzz.Failure("wrong answer"), ZeroDivisionError(), OSError("gone")):
        helper = Finds(lambda: True)
        helper.what = what
        helper.start()
        helper.stop()
        found.append(helper.faults)
    assert found[0] == ["wrong answer"]
    assert "ZeroDivisionError" in found[1][0]
    assert found[2] == []


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(campaign_server, "JOIN_S", 0.05)
    hangs = threading.Event()

    class Hangs(Helper):
        def round(self):
            hangs.wait(5)

    helper = Hangs(lambda: False)
    helper.start()
    helper.stop()
    companion = fuzz.Companion(NoClient(UNAVAILABLE), 1, lambda: False)
    companion._worker.upload = lambda: hangs.wait(5)
    companion.begin()
    assert "still waits" in companion.end()
    assert "still waits" in helper.faults[0]
    hangs.set()


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (KeyError("x"), "was answered wrong"),
        (attnd.AttndError(UNAVAILABLE, ""), "was answered wrong"),
        (None, "got no dense answer"),
    ],
)
def test_the_companion_reports_whatever_happens(monkeypatch, error, fault):
    monkeypatch.setattr(fuzz, "ROOM_S", 0.01)
    companion = fuzz.Companion(NoClient(UNAVAILABLE), 1, lambda: False)

    def upload() -> bool:
        if error:
            raise error
        return False

    companion._worker.upload = upload
    companion.begin()
    assert fault in companion.end()


def test_a_killed_life_has_the_faults_of_all_its_helpers():
    life = soak.Life.__new__(soak.Life)
    names = ("malformed", "slow", "scraper")  # in this order they are stopped
    for name in names:
        setattr(life, name, SimpleNamespace(stop=lambda: None, faults=[name]))
    life.faults, life.workers, life.threads = [], [], []
    life._join()
    assert life.faults == list(names)


def test_a_soak_ends_with_its_server(server):
    life = soak.Life.__new__(soak.Life)
    life.server, life.faults, life.workers = server, [], []
    life.malformed = life.slow = life.scraper = SimpleNamespace(faults=[])
    server.process = process_of("sleep", "0.1")
    with pytest.raises(ServerFault, match="by itself, with 0"):
        life.live(20)


# ---- answers and figures ----


def answer(**stats):
    known = {
        "zone_tokens": 4,
        "exact_tokens": 6,
        "estimated_tokens": 0,
        "dropped_tokens": 0,
        "missed_tokens": 0,
        "missed_mass": 0.1,
        "covered_mass": None,
        "exact_mass": None,
        "predicted_error_mean": None,
        "predicted_error_max": None,
    }
    row = SimpleNamespace(stats=SimpleNamespace(**{**known, **stats}))
    return SimpleNamespace(out=np.zeros(1), lse=np.zeros(1), rows=[row])


@pytest.mark.parametrize(
    ("policy", "exact", "stats", "fault"),
    [
        ("dense", True, {}, ""),
        ("dense", True, {"missed_tokens": 2, "estimated_tokens": 2, "exact_tokens": 4}, "waits"),
        ("quest", False, {"missed_tokens": 2, "estimated_tokens": 2, "exact_tokens": 4}, "waits"),
        ("quest", False, {"dropped_tokens": 2, "exact_tokens": 4}, ""),
        ("quest", True, {"dropped_tokens": 2, "exact_tokens": 4}, "reads all"),
        ("quest", True, {"estimated_tokens": 2, "exact_tokens": 4}, "reads all"),
        (
            "double-p:on_miss=estimate",
            True,
            {"missed_tokens": 2, "estimated_tokens": 2, "exact_tokens": 4},
            "",
        ),
        (
            "double-p:on_miss=estimate",
            True,
            {"missed_tokens": 2, "estimated_tokens": 3, "exact_tokens": 3},
            "reads all",
        ),
    ],
)
def test_who_waits_misses_nothing(policy, exact, stats, fault):
    shape = attnd.ModelShape(layers=1, query_heads=1, kv_heads=1, head_dim=8, dtype="fp32")
    found = probes.fault_of(answer(**stats), 10, shape, policy, exact=exact)
    assert fault in found and bool(fault) == bool(found)


def test_internal_is_the_servers_own_fault():
    assert not fuzz.well_answered("GetServerInfo", [b"\xff"], "INTERNAL", [])


def test_growth_is_judged_by_the_end_of_a_long_life():
    grows = [(float(at), (100 if at < 40 else 300) << 20) for at in range(120)]
    assert soak.growth_fault(grows, 120.0)
    assert not soak.growth_fault(grows, 30.0)
    peak = [(at, size if at != 119 else 900 << 20) for at, size in grows if at < 40 or at == 119]
    peak += [(float(at), 100 << 20) for at in range(80, 119)]
    assert not soak.growth_fault(sorted(peak), 120.0), "one sample is no growth"


def test_calls_are_compared_by_code():
    page = metrics_text.Page(
        {'attnd_rpcs_total{method="CloseSequence",code="NOT_FOUND"}': 2.0}, {}
    )
    life = soak.Life.__new__(soak.Life)
    life.at_start, life.counts = metrics_text.Page({}, {}), soak.Counts()
    life.counts.add("CloseSequence", "NOT_FOUND")
    assert life._miscounts(page) == [
        "CloseSequence NOT_FOUND: the server counted 2.0, the clients 1"
    ]


def test_hits_are_read_before_the_look_ups_that_are_raised_before_them(server):
    server.start("--metrics-listen=127.0.0.1:0")
    names = [sample.partition("{")[0] for sample in metrics_text.read(server.metrics_url()).samples]
    for what in ("tokens", "pages"):
        hits = names.index(f"attnd_tier_hit_{what}_total")
        assert hits < names.index(f"attnd_tier_lookup_{what}_total")


# ---- attnctl, and failpoints ----

MADE = '{"sequences": %d, "old_catalogue": "%s", "quarantined_files": []}'


@pytest.mark.parametrize(
    ("said", "ending", "damaged", "fault"),
    [
        (MADE % (3, "old"), "exit 0", None, ""),
        (MADE % (3, "old"), "exit 1", 7, ""),
        (MADE % (3, "old"), "exit 1", None, "ended with 1"),
        (MADE % (3, "old"), "kill -9 $$", 7, "ended with -9"),
        (MADE % (2, "old"), "exit 0", None, "2 sequences of at least 3"),
        (MADE % (3, ""), "exit 0", None, "no catalogue"),
        ('{"error": {"code": "ABORTED", "message": "m"}}', "exit 1", 7, "ABORTED"),
        ("", "kill -6 $$", None, "ended with -6"),
    ],
)
def test_a_rebuild_must_have_happened(tmp_path, monkeypatch, said, ending, damaged, fault):
    program = tmp_path / "attnctl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n{ending}\n")
    program.chmod(0o755)
    monkeypatch.setattr(ctl, "ATTNCTL", program)
    found, _ = ctl.rebuild(pathlib.Path(tmp_path), 3, damaged)
    assert len(found) == bool(fault) and fault in "".join(found)


def test_a_failpoint_that_was_missed_gets_another_try(tmp_path):
    args = argparse.Namespace(seed=1)
    campaign = crash.Campaign(Server(str(tmp_path)), args)
    met, missed = faults.FAILPOINTS[:2]
    campaign.armed[met] = campaign.armed[missed] = campaign.met[met] = 1
    tried = []
    campaign.cycle = lambda failpoint, *, pressed: tried.append(failpoint)
    campaign.meet_the_rest()
    assert tried == [missed] and campaign.armed[missed] == 2
