# SPDX-License-Identifier: Apache-2.0
"""Everything at once, on a real server, for as long as asked.

    python tests/python/soak.py [--seconds 1800] [--seed 1]                       (scripts/soak.sh)

Clients of two tenants (campaign_clients.py) upload, decode, fork, truncate, seal, resume and drop
sequences of every kind, and ask them under every preset, over a memory budget that does not hold
them, so that segments move to disk. Beside them work a client that sends malformed requests with a
well-behaved one (fuzz.py), slow and silent ones, and one that reads /metrics (soak_clients.py). The
server has several lives on one data folder: in the first half of the time short ones, every second
one killed at work, then a long one.

Every answer is checked. A life that ends in order must leave no sequence, no stream, no file that
no record names; its resident memory must not have grown after a third of a life of a minute or
more, nor its budget be in use for anything but pages; /metrics must be finite at all times and have
counted what the clients did. At the end every acknowledged seal must come back, before and after
`attnctl rebuild-catalogue` on a copy, and `attnctl verify` must find nothing. Prints what was done,
and exits with 1 if anything was wrong. test_soak.py runs a short form.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import random
import statistics
import tempfile
import threading
import time

import grpc
import numpy as np
from safetensors.numpy import save_file

import crash_checks
import ctl
import fuzz
import live_server
import metrics_text
from campaign_clients import CASES, COMPLETED_CASE, TENANTS, Known, Worker, model_of
from campaign_server import Server, ServerFault, leave, left_of
from cases import SHAPE
from soak_clients import Counts, Malformed, Scraper, Slow

WORKERS = 4
BUDGET = 24 << 20
SHORT_LIFE_S = 60.0
EVERYTHING_S = 120.0  # in so long a soak every preset must have been asked, and all this met
EVERYTHING = ("moved", "missed", "memory full", "through memory", "given up")
GROWTH_BYTES = 32 << 20  # beside a tenth of what was resident in a life's first third
GROWTH_LIFE_S = 60.0  # in a shorter life memory is still being taken for the first time
IDLE_S = 20.0  # so long ends of streams may take, beside other work
MAPS_WIDTH, MAPS_INNER = 16, 16


def save_feature_maps(path: pathlib.Path) -> None:
    """Maps that estimate nothing well, for the model of COMPLETED_CASE."""
    rng = np.random.default_rng(1)
    dim, tensors = SHAPE.head_dim, {}
    for side, heads in (("query", SHAPE.query_heads), ("key", SHAPE.kv_heads)):
        extents = {
            "stem.weight": (MAPS_WIDTH, dim),
            "stem.bias": (MAPS_WIDTH,),
            "inner.weight": (MAPS_INNER, MAPS_WIDTH),
            "inner.bias": (MAPS_INNER,),
            "outer.weight": (MAPS_WIDTH, MAPS_INNER),
            "outer.bias": (MAPS_WIDTH,),
            "alpha": (),
            "output.weight": (dim, MAPS_WIDTH),
            "output.bias": (dim,),
        }
        for name, extent in extents.items():
            values = 0.1 * rng.standard_normal((SHAPE.layers, heads, *extent))
            tensors[f"{side}.{name}"] = values.astype(np.float32)
    tensors["completed"] = np.ones((SHAPE.layers, SHAPE.query_heads), np.int64)
    metadata = {
        "format": "attnd.feature_maps.1",
        "fingerprint": model_of(COMPLETED_CASE, SHAPE).fingerprint,
        "softmax_scale": repr(SHAPE.head_dim**-0.5),
        "prefill_tokens": "1700",
    }
    save_file(tensors, path, metadata=metadata)


def growth_fault(samples: list[tuple[float, int]], seconds: float) -> str:
    """Whether resident memory, sampled at these times of a life, has grown after its first third:
    its most there against its median in the last third. Empty if not."""
    early = [size for passed, size in samples if passed < seconds / 3]
    late = [size for passed, size in samples if passed >= seconds * 2 / 3]
    if seconds < GROWTH_LIFE_S or not early or not late:
        return ""
    grown = statistics.median(late) > 1.1 * max(early) + GROWTH_BYTES
    return f"resident memory grew from {max(early)} to {statistics.median(late)} bytes" * grown


class Life:
    """A server's, from its start to its end, with everybody who works with it. `reserved`: bytes of
    the budget that were in use when it had only started."""

    def __init__(self, server: Server, known: Known, dice: random.Random, reserved: float) -> None:
        self.server, self.reserved = server, reserved
        self.counts = Counts()
        self.faults: list[str] = []
        url, gone = server.metrics_url(), server.is_gone
        self.scraper = Scraper(url, gone)
        self.at_start = self.scraper.last
        self.malformed = Malformed(server.target, dice.randrange(1 << 30), self.counts, gone)
        self.slow = Slow(server.target, url, dice.randrange(1 << 30), self.counts, gone)
        self.workers = [
            self._worker(known, dice.randrange(1 << 30), TENANTS[number % len(TENANTS)])
            for number in range(WORKERS)
        ]
        self.threads = [threading.Thread(target=worker.run, daemon=True) for worker in self.workers]
        for thread in (*self.threads, self.scraper, self.malformed, self.slow):
            thread.start()

    def _worker(self, known: Known, seed: int, tenant: str) -> Worker:
        client = self.counts.client(self.server.target, tenant=tenant, timeout_s=60)
        return Worker(
            client,
            tenant,
            known,
            seed,
            shape=SHAPE,
            cases=(*CASES, COMPLETED_CASE),
            shares_memory=True,
            server_gone=self.server.is_gone,
        )

    def live(self, seconds: float) -> None:
        """Until then, unless something is wrong already; memory must not grow after a third."""
        samples = []
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds and not self._wrong():
            self.server.check_alive()
            with contextlib.suppress(KeyError, OSError):  # it is ending; the next look says so
                size = live_server.status_bytes(self.server.process.pid, "VmRSS")
                samples.append((passed, size))
            time.sleep(0.2)
        if fault := growth_fault(samples, seconds):
            self.faults.append(fault)

    def _wrong(self) -> bool:
        helpers = (self.scraper, self.malformed, self.slow)
        return any(helper.faults for helper in helpers) or any(w.wrong for w in self.workers)

    def kill(self) -> None:
        """While all are at work."""
        for helper in (self.scraper, self.slow, self.malformed):
            helper.stopping.set()
        self.malformed.fuzzer.ending.set()
        self.server.kill()
        self._join()

    def end(self) -> None:
        """In order: everybody leaves, and then nothing must be left."""
        for worker in self.workers:
            worker.stop.set()
        self.slow.stopping.set()
        self.malformed.fuzzer.ending.set()
        self._join()
        if not self.malformed.faults:
            self.faults += self.malformed.end_in_order()
        in_order = not self.faults  # otherwise somebody has not left
        if in_order:
            self._check_idle()
        data = pathlib.Path(self.server.folder, "data")
        self.faults += ctl.faults_of(data, unnamed=not in_order)
        if fault := self.server.end():
            self.faults.append(fault)

    def _join(self) -> None:
        helpers = (self.malformed, self.slow, self.scraper)
        for helper in helpers:
            helper.stop()
            self.faults += helper.faults
        if left := left_of(self.threads):
            self.faults.append(f"{left} clients still wait for a reply")
        for worker in self.workers:
            if worker.wrong:
                self.faults.append(f"a client of {worker.tenant} was answered wrong")

    def _check_idle(self) -> None:
        due = time.monotonic() + IDLE_S
        while faults := self._idle_faults():
            if time.monotonic() > due:
                self.faults += faults
                return
            time.sleep(0.2)

    def _idle_faults(self) -> list[str]:
        """What a server must not have, or not have counted, when everybody has left."""
        scraper = self.scraper
        page = scraper.last
        try:
            scraper.round()
            page = scraper.last
        except OSError as error:
            return [f"/metrics: {error}"]
        faults = list(scraper.faults)
        for gauge in ("sequences", "streams", "queue_depth", "queued_calls", "pages_waiting"):
            if left := page.get(f"attnd_{gauge}"):
                faults.append(f"attnd_{gauge} is {left} after everybody has left")
        used = page.get("attnd_resident_bytes", tier="host")
        pages = page.get("attnd_page_memory_bytes", state="taken")
        if used > max(pages, self.reserved):
            faults.append(f"{used} bytes are in use by no sequence: {self.reserved} at the start")
        if page.get("attnd_page_memory_bytes", state="pinned"):
            faults.append("pages are pinned when there is no step")
        return faults + self._miscounts(page)

    def _miscounts(self, page: metrics_text.Page) -> list[str]:
        """Unary calls by code, and seals, that server and clients have not counted alike."""

        def grown(name: str, **labels: str) -> float:
            return page.get(name, **labels) - self.at_start.get(name, **labels)

        pairs = {
            "sealed sequences": (
                grown("attnd_sealed_sequences_total"),
                self.counts.ok("SealSequence"),
            )
        }
        for name in (call for call, (kind, _) in fuzz.CALLS.items() if kind == "unary_unary"):
            here = self.counts.of(name)
            for code in {code.name for code in grpc.StatusCode}:
                there = grown("attnd_rpcs_total", method=name, code=code)
                pairs[f"{name} {code}"] = (there, here.get(code, 0))
        return [
            f"{name}: the server counted {there}, the clients {here}"
            for name, (there, here) in pairs.items()
            if there != here
        ]


class Soak:
    """All lives on one data folder."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.known = server, Known()
        self.dice = random.Random(seed)
        self.faults: list[str] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.presets: set[str] = set()
        maps = pathlib.Path(server.folder, "maps.safetensors")
        save_feature_maps(maps)
        self.flags = (
            f"--memory-budget-bytes={BUDGET}",
            "--metrics-listen=127.0.0.1:0",
            f"--feature-maps={maps}",
            "--max-sequences=500",
            "--reply-timeout-s=2",
            "--audit-share=0.5",
            "--allow-client-memory",
            "--client-memory-bytes=32MiB",
        )

    def run(self, seconds: float) -> None:
        short = max(1, round(seconds / 4 / SHORT_LIFE_S))
        lives = [(seconds / 4 / short, killed) for _ in range(short) for killed in (True, False)]
        for length, killed in (*lives, (seconds / 2, False)):
            self.live(length, killed=killed)
            if self.faults:
                return
        if seconds >= EVERYTHING_S:
            never = sorted(name for name in self.presets if not self.done[name])
            never += [deed for deed in EVERYTHING if not self.done[deed]]
            if never:
                self.faults.append(f"never asked or met: {never}")
        self.check_disk()

    def live(self, seconds: float, *, killed: bool) -> None:
        self.server.start(*self.flags)
        page = metrics_text.read(self.server.metrics_url())
        self.check_start()
        reserved = page.get("attnd_resident_bytes", tier="host")
        life = Life(self.server, self.known, self.dice, reserved)
        try:
            life.live(seconds)
            if killed:
                life.kill()
            else:
                life.end()
        finally:
            self.faults += life.faults
        for worker in life.workers:
            self.done += worker.done
        self.done["malformed"] += sum(life.malformed.fuzzer.codes.values())
        self.done["scrapes"] += life.scraper.reads

    def check_start(self) -> None:
        lost, wrong = crash_checks.check(self.server.target, self.known, self.dice)
        if lost or wrong:
            self.faults.append(f"after a start {lost} sealed sequences are lost, {wrong} wrong")
        with crash_checks.clients_of(self.server.target) as clients:
            info = clients[TENANTS[0]].get_server_info()
        self.presets = {preset.policy.preset for preset in info.presets}

    def check_disk(self) -> None:
        self.server.start(*self.flags)
        self.check_start()
        if wrong := crash_checks.wrong_of_all(self.server.target, self.known):
            self.faults.append(f"{wrong} sealed sequences do not come back at the end")
        self.server.kill()
        lost, wrong = crash_checks.check_rebuilt(
            self.server.folder, self.known, None, flags=self.flags
        )
        if lost or wrong:
            self.faults.append(f"{lost} sealed sequences are lost by a rebuild, {wrong} wrong")


def run(seconds: float, seed: int) -> Soak:
    """Soaks the built server, and says what was done and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="attnd-soak-") as folder, Server(folder) as server:
        soak = Soak(server, seed)
        try:
            soak.run(seconds)
            if soak.faults:
                print(server.log_end())
        except ServerFault as fault:  # it has the log's end
            soak.faults.append(str(fault))
    print(", ".join(f"{deed} {times}" for deed, times in sorted(soak.done.items())))
    print(f"{len(soak.known.sealed)} sealed at the end, {len(soak.faults)} faults")
    for fault in soak.faults:
        print(fault)
    return soak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.seconds:.0f} seconds", flush=True)
    leave(bool(run(arguments.seconds, arguments.seed).faults))
