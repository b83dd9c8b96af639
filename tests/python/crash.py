# SPDX-License-Identifier: Apache-2.0
"""Kills a server without warning, again and again, and counts what was lost.

    python tests/python/crash.py [--cycles N] [--seed S] [--clients C] [--failpoints SHARE]
                                 [--pressure SHARE] [--rebuilds SHARE]           (scripts/crash.sh)

Clients of two tenants open, upload, decode, fork, truncate, seal, resume and drop sequences at
random while the server runs, with token ids and without, in cluster order and in token order, and
ask them under every policy that they have the indexes for (probes.py), on_miss=estimate among them.
At a random moment the server gets SIGKILL, or in a share of the cycles it meets one at a named
failpoint (faults.py), each of these in its turn; then it is started again on the same data folder.
This program knows what every acknowledged seal held. After each start all of these must be listed,
some of them are resumed and their answers compared with plain numpy; a seal or a drop that was
under way may have happened or not, but what is listed must be whole. For failpoints of quarantine
one sealed tail is damaged: it must be DATA_LOSS from then on. In a share of the cycles the server's
memory is nearly full, so that it moves segments to disk and is killed while it does.

After a share of the cycles, and at the end, attnctl works on a copy of the data folder: `verify`
must find nothing, and after `rebuild-catalogue` a server on the copy must have every acknowledged
seal; some of them are resumed there, at the end all. attnctl must have done its work: a
rebuild that fails, finds no catalogue or too few sequences counts as wrong.

A server that ends by itself, other than at a failpoint, ends the run and counts as wrong; so does a
client that cannot reach a server which nobody has ended. A failpoint that was never met is armed
once more at the end.

Prints how often each failpoint was met, what the clients did, and `N cycles, 0 lost, 0 wrong`, and
exits with 1 if it is not so.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
import threading
import time

import numpy as np

import attnd
import crash_checks
import faults
from campaign_clients import TENANTS, UPLOAD_S, Known, Worker
from campaign_server import Server, ServerFault, leave, left_of

# With little room: the least budget there is, most of it in what cannot be moved to disk.
SMALL_BUDGET = 16 << 20
FILLERS = 22  # sequences of less than a segment
FILLER_SHAPE = attnd.ModelShape(layers=1, query_heads=4, kv_heads=4, head_dim=128, dtype="fp32")
FILLER_TOKENS = 128
# So long at most a server lives that no failpoint ends: now and then long enough for clients to do
# a row of things to one sequence.
LIVES_S = (0.4, 0.4, 0.4, 2.0)
FAILPOINT_WAIT_S = 15.0  # for clients to come by; it ends when they do
# What a long run with little room must come to: steps that read what was moved to disk, also in
# token order, and that estimate what was not there in time (Worker.done).
MOVES = ("moved", "moved in token order", "missed")


def fill(target: str) -> None:
    """Takes most of the small budget."""
    shape = (FILLER_TOKENS, FILLER_SHAPE.kv_heads, FILLER_SHAPE.head_dim)
    layers = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32))]
    with attnd.Client(target, timeout_s=20) as client:
        for _ in range(FILLERS):
            sequence = client.open_sequence(attnd.Model("filler", FILLER_SHAPE)).sequence_id
            client.append_kv(sequence, attnd.layer_chunks(layers), timeout_s=UPLOAD_S)


def happens(share: float, cycle: int) -> bool:
    """In a share of the cycles, evenly."""
    return int((cycle + 1) * share) > int(cycle * share)


class Campaign:
    """All cycles on one data folder."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self.args, self.server, self.known = args, server, Known()
        self.dice = random.Random(args.seed)
        self.lost = self.wrong = 0
        self.done: collections.Counter[str] = collections.Counter()
        self.armed = dict.fromkeys(faults.FAILPOINTS, 0)
        self.met = dict.fromkeys(faults.FAILPOINTS, 0)

    def run(self) -> None:
        for cycle in range(self.args.cycles):
            before = (self.lost, self.wrong)
            failpoint = None
            if happens(self.args.failpoints, cycle):
                failpoint = min(self.armed, key=self.armed.__getitem__)  # the first one, if equal
                self.armed[failpoint] += 1
            # Apart from the failpoints' turns, so that each meets both; but what is resumed
            # to be found damaged needs room.
            pressed = self.dice.random() < self.args.pressure
            self.cycle(failpoint, pressed=pressed and not (failpoint and failpoint.damages))
            if happens(self.args.rebuilds, cycle):
                self.rebuild(everything=False)
            if before != (self.lost, self.wrong):
                print(f"... in cycle {cycle}", flush=True)
            if (cycle + 1) % 100 == 0:
                print(f"{cycle + 1} cycles, {len(self.known.sealed)} sealed sequences", flush=True)
        self.meet_the_rest()
        self.server.start()
        self.check()
        self.wrong += crash_checks.wrong_of_all(self.server.target, self.known)
        self.server.kill()
        self.rebuild(everything=True)

    def meet_the_rest(self) -> None:
        """Once more those failpoints that no client came by: that may be chance."""
        for failpoint in [f for f in self.armed if self.armed[f] and not self.met[f]]:
            self.armed[failpoint] += 1
            self.cycle(failpoint, pressed=False)

    def check(self) -> None:
        lost, wrong = crash_checks.check(self.server.target, self.known, self.dice)
        self.lost, self.wrong = self.lost + lost, self.wrong + wrong

    def rebuild(self, *, everything: bool) -> None:
        lost, wrong = crash_checks.check_rebuilt(
            self.server.folder, self.known, None if everything else self.dice
        )
        self.lost, self.wrong = self.lost + lost, self.wrong + wrong
        self.done["rebuild"] += 1

    def cycle(self, failpoint: faults.Failpoint | None, *, pressed: bool) -> None:
        if failpoint is not None and failpoint.needs_orphan:
            self.server.leave_orphan()
        room = ("--memory-budget-bytes", str(SMALL_BUDGET)) if pressed else ()
        if not self.server.start(*room, failpoint=failpoint, dice=self.dice):
            self.met[failpoint] += 1
            return
        self.check()
        if failpoint is not None and failpoint.damages:
            crash_checks.seal_to_damage(self.server.target, self.known)
            self.server.damage_newest_file()
        if pressed:
            fill(self.server.target)
        self.server.serving.touch()
        workers = [
            self.worker(TENANTS[number % len(TENANTS)]) for number in range(self.args.clients)
        ]
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        self.end(failpoint)
        if left := left_of(threads):
            self.wrong += left
            print(f"{left} clients still wait for a server that is gone")
        for worker in workers:
            self.wrong += worker.wrong
            self.done += worker.done

    def worker(self, tenant: str) -> Worker:
        client = attnd.Client(self.server.target, tenant=tenant, timeout_s=20)
        seed = self.dice.randrange(1 << 30)
        return Worker(client, tenant, self.known, seed, server_gone=self.server.is_gone)

    def end(self, failpoint: faults.Failpoint | None) -> None:
        """The server's, while clients are at work."""
        if failpoint is None:
            time.sleep(self.dice.uniform(0.0, self.dice.choice(LIVES_S)))
        else:
            if failpoint.damages:
                self.wrong += not crash_checks.touch_damaged(self.server, self.known)
            # Nothing is left to meet once it serves.
            wait = FAILPOINT_WAIT_S if failpoint.when == "serving" else 0.3
            if self.server.ended_within(wait):
                self.met[failpoint] += 1
                return
        self.server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--failpoints", type=float, default=0.5, help="share of the cycles, 0 to 1")
    parser.add_argument("--pressure", type=float, default=0.5, help="share of the cycles, 0 to 1")
    parser.add_argument("--rebuilds", type=float, default=1, help="share of the cycles, 0 to 1")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="attnd-crash-") as folder, Server(folder) as server:
        campaign = Campaign(server, args)
        try:
            campaign.run()
            if campaign.lost or campaign.wrong:
                print(server.log_end())
        except ServerFault as fault:  # it has the log's end
            campaign.wrong += 1
            print(fault)
    for failpoint, armed in campaign.armed.items():
        if armed > 0:
            print(f"{failpoint.name}: met {campaign.met[failpoint]} times of {armed}")
    never = [f.name for f, armed in campaign.armed.items() if armed and not campaign.met[f]]
    moves = args.pressure > 0 and args.cycles >= 200
    idle = [deed for deed in MOVES if moves and not campaign.done[deed]]
    if never:  # whoever renames a file must tell the table
        print(f"never met: {', '.join(never)}")
    if idle:
        print(f"never happened: {', '.join(idle)}")
    print(", ".join(f"{deed} {times}" for deed, times in sorted(campaign.done.items())))
    lost, wrong, left = campaign.lost, campaign.wrong, len(campaign.known.sealed)
    print(f"{args.cycles} cycles, {lost} lost, {wrong} wrong; {left} sealed at the end")
    return 1 if lost or wrong or never or idle or not left else 0


if __name__ == "__main__":
    leave(main())
