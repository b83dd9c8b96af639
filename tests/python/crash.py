# SPDX-License-Identifier: Apache-2.0
"""Kills a server without warning, again and again, and counts what was lost.

    python tests/python/crash.py [--cycles N] [--seed S] [--clients C] [--failpoints SHARE]
                                 [--pressure SHARE]                              (scripts/crash.sh)

Clients open, upload, decode, fork, seal, resume and drop sequences at random while the server runs;
at a random moment it gets SIGKILL, or in a share of the cycles it meets one at a named failpoint
(faults.py), each of these in its turn; then it is started again on the same data folder. This
program knows what every acknowledged seal held. After each start all of these must be listed, some
of them are brought back and their answers compared with plain numpy; a seal or a drop that was
under way may have happened or not, but what is listed must be whole. For failpoints of quarantine
one sealed tail is damaged: it must be DATA_LOSS from then on. In a share of the cycles the server's
memory is nearly full, so that it moves segments to disk and is killed while it does. Prints how
often each failpoint was met, how many decode steps read what had been moved, and `N cycles, 0 lost,
0 wrong`, and exits with 1 if it is not so.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import attnd
import faults
from crash_clients import GONE, LENGTHS, Content, Known, Worker, answers, case_of, model_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("ATTND_BIN", "build/bin/attnd")
CHECKED_EACH_START = 3
# With little room: the least budget there is, most of it in what cannot be moved to disk.
SMALL_BUDGET = 16 << 20
FILLERS = 22  # sequences of less than a segment
FILLER_SHAPE = attnd.ModelShape(layers=1, query_heads=4, kv_heads=4, head_dim=128, dtype="fp32")
FILLER_TOKENS = 128
FAILPOINT_WAIT_S = 15.0  # for clients to come by; it ends when they do


class Server:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.target = f"unix:{folder}/run/attnd.sock"
        # For failpoints: there once it has answered, and once clients are at work.
        self.started = pathlib.Path(folder, "started")
        self.serving = pathlib.Path(folder, "serving")

    def start(
        self, failpoint: faults.Failpoint | None = None, dice=random, *, pressed: bool = False
    ) -> bool:
        """Whether it serves; otherwise it was killed as it started, by the failpoint."""
        self.started.unlink(missing_ok=True)
        self.serving.unlink(missing_ok=True)
        command = [PROGRAM, "--listen", self.target, "--data-dir", f"{self.folder}/data"]
        command += ["--segment-tokens", "512"]
        if pressed:
            command += ["--memory-budget-bytes", str(SMALL_BUDGET)]
        environment = None
        if failpoint is not None:
            rule = failpoint.rule(str(self.started), str(self.serving), dice)
            environment = faults.environment(rule)
            command += ["--io", failpoint.io] if failpoint.io else []
        with open(f"{self.folder}/attnd.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        faults.wait_for_socket(self.target, self.process)
        due = time.monotonic() + 30
        with attnd.Client(self.target, timeout_s=2) as client:
            while True:
                if self.process.poll() is not None:
                    if failpoint is not None and self.process.returncode == -signal.SIGKILL:
                        return False
                    text = pathlib.Path(f"{self.folder}/attnd.log").read_text(errors="replace")
                    sys.exit(f"the server ended as it started:\n{text[-2000:]}")
                try:
                    client.get_server_info()
                    self.started.touch()
                    return True
                except attnd.UnavailableError:
                    if time.monotonic() > due:
                        raise

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ended_within(self, seconds: float) -> bool:
        """Whether it ends by itself, as at a failpoint; it must be by SIGKILL."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        if code != -signal.SIGKILL:
            sys.exit(f"the server ended with {code}")
        return True

    def leave_orphan(self) -> None:
        """As a crash does; its number is one that no file will have."""
        shard = pathlib.Path(self.folder, "data/segments/00")
        if shard.exists():
            (shard / "00000000ffffff00.seg.tmp").touch()

    def newest_file(self) -> pathlib.Path:
        return max(pathlib.Path(self.folder, "data/segments").glob("*/*.seg"), key=lambda f: f.name)


def fill(target: str) -> None:
    """Takes most of the small budget."""
    shape = (FILLER_TOKENS, FILLER_SHAPE.kv_heads, FILLER_SHAPE.head_dim)
    layers = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32))]
    with attnd.Client(target, timeout_s=20) as client:
        for _ in range(FILLERS):
            sequence = client.open_sequence(attnd.Model("filler", FILLER_SHAPE)).sequence_id
            client.append_kv(sequence, attnd.layer_chunks(layers))


def damage_one(server: Server, known: Known) -> None:
    """Seals a sequence and changes its tail's file. Nobody else is at work."""
    content = Content(0, LENGTHS[1])
    with attnd.Client(server.target, timeout_s=20) as client:
        sequence = client.open_sequence(model_of(content.case)).sequence_id
        layers = case_of(content.case).layers(slice(0, content.tokens))
        client.append_kv(sequence, attnd.layer_chunks(layers))
        known.damaged = client.seal_sequence(sequence).sealed_id
    file = server.newest_file()
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


def touch_damaged(target: str, known: Known) -> bool:
    """Brings back what was damaged: whether it was DATA_LOSS, or the server ended meanwhile."""
    with attnd.Client(target, timeout_s=20) as client:
        try:
            client.open_sequence(model_of(0), resume=known.damaged)
        except (attnd.DataLossError, *GONE):
            return True
    print(f"sealed {known.damaged} was damaged, and came back")
    return False


def check_damaged(client: attnd.Client, known: Known) -> int:
    """1 if it came back, or cannot be dropped."""
    sealed_id, known.damaged = known.damaged, None
    try:
        client.open_sequence(model_of(0), resume=sealed_id)
    except attnd.DataLossError:
        client.drop_sealed(sealed_id)
        return 0
    print(f"sealed {sealed_id} was damaged, and came back")
    return 1


def check(target: str, known: Known, dice: random.Random) -> tuple[int, int]:
    """After a start: (lost, wrong). Adopts what was under way and has happened."""
    lost = wrong = 0
    with attnd.Client(target, timeout_s=60) as client:
        if known.damaged is not None:
            wrong += check_damaged(client, known)
        listed = {entry.sealed_id: entry.tokens for entry in client.list_sealed()}
        for sealed_id in known.dropping:
            if sealed_id not in listed:
                known.sealed.pop(sealed_id, None)
        known.dropping.clear()
        for sealed_id, content in known.sealed.items():
            if listed.get(sealed_id) != content.tokens:
                lost += 1
                print(f"sealed {sealed_id} of {content} is lost: listed {listed.get(sealed_id)}")
        for sealed_id in set(listed) - set(known.sealed):  # not acknowledged, and yet there
            fitting = [c for c in known.sealing if c.tokens == listed[sealed_id]]
            whole = [c for c in fitting if _comes_back(client, sealed_id, c)]
            if whole:
                known.sealed[sealed_id] = whole[0]
            else:
                wrong += 1
                print(f"sealed {sealed_id} of {listed[sealed_id]} tokens is nobody's")
        known.sealing.clear()
        some = dice.sample(sorted(known.sealed), min(CHECKED_EACH_START, len(known.sealed)))
        for sealed_id in some:
            if not _comes_back(client, sealed_id, known.sealed[sealed_id]):
                wrong += 1
                print(f"sealed {sealed_id} of {known.sealed[sealed_id]} answers wrong")
    return lost, wrong


def _comes_back(client: attnd.Client, sealed_id: int, content: Content) -> bool:
    try:
        back = client.open_sequence(model_of(content.case), resume=sealed_id)
    except attnd.FailedPreconditionError:
        return False  # of another case
    except attnd.DataLossError as error:
        print(f"sealed {sealed_id}: {error}")
        return False
    whole = back.tokens_present == content.tokens and answers(client, back.sequence_id, content)
    client.close_sequence(back.sequence_id)
    return whole


class Campaign:
    """All cycles on one data folder."""

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        self.args, self.server, self.known = args, Server(folder), Known()
        self.dice = random.Random(args.seed)
        self.lost = self.wrong = self.moved = 0
        self.armed = dict.fromkeys(faults.FAILPOINTS, 0)
        self.met = dict.fromkeys(faults.FAILPOINTS, 0)

    def run(self) -> None:
        for cycle in range(self.args.cycles):
            failpoint = None
            if int((cycle + 1) * self.args.failpoints) > int(cycle * self.args.failpoints):
                failpoint = min(self.armed, key=self.armed.__getitem__)  # the first one, if equal
                self.armed[failpoint] += 1
            # Apart from the failpoints' turns, so that each meets both; but what is brought back
            # to be found damaged needs room.
            pressed = self.dice.random() < self.args.pressure
            self.cycle(failpoint, pressed=pressed and not (failpoint and failpoint.damages))
            if (cycle + 1) % 100 == 0:
                print(f"{cycle + 1} cycles, {len(self.known.sealed)} sealed sequences", flush=True)
        self.server.start()
        self.check()
        with attnd.Client(self.server.target, timeout_s=60) as client:
            for sealed_id, content in self.known.sealed.items():
                self.wrong += not _comes_back(client, sealed_id, content)
        self.server.kill()

    def check(self) -> None:
        lost, wrong = check(self.server.target, self.known, self.dice)
        self.lost, self.wrong = self.lost + lost, self.wrong + wrong

    def cycle(self, failpoint: faults.Failpoint | None, *, pressed: bool) -> None:
        if failpoint is not None and failpoint.needs_orphan:
            self.server.leave_orphan()
        if not self.server.start(failpoint, self.dice, pressed=pressed):
            self.met[failpoint] += 1
            return
        self.check()
        if failpoint is not None and failpoint.damages:
            damage_one(self.server, self.known)
        if pressed:
            fill(self.server.target)
        self.server.serving.touch()
        workers = [
            Worker(self.server.target, self.known, self.dice.randrange(1 << 30))
            for _ in range(self.args.clients)
        ]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        self.end(failpoint)
        for thread in threads:
            thread.join(60)
        if any(thread.is_alive() for thread in threads):
            sys.exit("a client still waits for a server that is gone")
        self.wrong += sum(worker.wrong for worker in workers)
        self.moved += sum(worker.moved for worker in workers)

    def end(self, failpoint: faults.Failpoint | None) -> None:
        """The server's, while clients are at work."""
        if failpoint is None:
            time.sleep(self.dice.uniform(0.0, 0.6))
        else:
            if failpoint.damages:
                self.wrong += not touch_damaged(self.server.target, self.known)
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
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="attnd-crash-") as folder:
        campaign = Campaign(folder, args)
        campaign.run()
    for failpoint, armed in campaign.armed.items():
        if armed > 0:
            print(f"{failpoint.name}: met {campaign.met[failpoint]} times of {armed}")
    never = [f.name for f, armed in campaign.armed.items() if armed > 1 and not campaign.met[f]]
    idle = args.pressure > 0 and args.cycles >= 200 and not campaign.moved
    if never:  # whoever renames a file must tell the table
        print(f"never met: {', '.join(never)}")
    print(f"{campaign.moved} decode steps read segments that had been moved to disk")
    lost, wrong, left = campaign.lost, campaign.wrong, len(campaign.known.sealed)
    print(f"{args.cycles} cycles, {lost} lost, {wrong} wrong; {left} sealed at the end")
    return 1 if lost or wrong or never or idle or not left else 0


if __name__ == "__main__":
    sys.exit(main())
