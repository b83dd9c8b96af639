# SPDX-License-Identifier: Apache-2.0
"""The server of campaigns: it is killed and started again on the same data folder."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

import attnd
import faults
from live_server import PROGRAM

JOIN_S = 120.0  # longer than any call of a client may take
END_S = 30.0  # so long a server takes to end at most
SAID_MOST = 4000  # characters of the log's end that a fault shows


class ServerFault(Exception):
    """The server ended as it must not."""


class Server:
    """A server of a campaign, on a data folder that outlives it. As a context it leaves no process
    behind, and shows the end of the log if the block raises."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.process: subprocess.Popen | None = None
        # Set just before it gets the signal that ends it.
        self.ending = threading.Event()
        self._failpoint: faults.Failpoint | None = None
        self._log_before = 0  # the log's bytes of lives before this one
        self.target = f"unix:{folder}/run/attnd.sock"
        self.log = pathlib.Path(folder, "attnd.log")
        # For failpoints: there once it has answered, and once clients are at work.
        self.started = pathlib.Path(folder, "started")
        self.serving = pathlib.Path(folder, "serving")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.ending.set()
            self.process.kill()
            self.process.wait(END_S)
        if kind is not None:
            print(self.log_end(), flush=True)

    def start(
        self,
        *flags: str,
        failpoint: faults.Failpoint | None = None,
        dice: random.Random | None = None,
    ) -> bool:
        """Whether it serves; otherwise it was killed as it started, by the failpoint, which needs
        `dice`."""
        self.ending.clear()
        self._failpoint = failpoint
        self._log_before = self.log.stat().st_size if self.log.exists() else 0
        self.started.unlink(missing_ok=True)
        self.serving.unlink(missing_ok=True)
        command = [PROGRAM, "--listen", self.target, "--data-dir", f"{self.folder}/data"]
        command += ["--segment-tokens", "512", *flags]
        environment = None
        if failpoint is not None:
            assert dice is not None
            rule = failpoint.rule(str(self.started), str(self.serving), dice)
            environment = faults.environment(rule)
            command += ["--io", failpoint.io] if failpoint.io else []
        with open(self.log, "ab") as log:
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
                    raise self._fault("as it started")
                try:
                    client.get_server_info()
                    self.started.touch()
                    return True
                except attnd.UnavailableError:
                    if time.monotonic() > due:
                        raise

    def kill(self) -> None:
        """By SIGKILL. Raises ServerFault if it had ended before, other than at its failpoint."""
        self.check_alive()
        if self.process.poll() is None:
            self.ending.set()
            self.process.send_signal(signal.SIGKILL)
        if self.process.wait(END_S) != -signal.SIGKILL:  # between the two
            raise self._fault("before it was killed")

    def end(self) -> str:
        """In order, by SIGTERM: what is wrong with that; empty if nothing is."""
        try:
            self.check_alive()
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(END_S)
        except ServerFault as fault:
            return str(fault)
        except subprocess.TimeoutExpired:
            return f"the server does not end within {END_S} s of SIGTERM:\n{self.log_end()}"
        return str(self._fault("in order")) if self.process.returncode else ""

    def check_alive(self) -> None:
        """Raises ServerFault if it has ended by itself, other than at its failpoint."""
        code = self.process.poll()
        at_failpoint = self._failpoint is not None and code == -signal.SIGKILL
        if code is not None and not at_failpoint:
            raise self._fault("by itself")

    def is_gone(self) -> bool:
        """For a client that could not reach it: whether it was being ended when the client asks, or
        has ended by itself, which kill() and end() judge. Its socket closes before that shows."""
        if self.ending.is_set():
            return True
        due = time.monotonic() + END_S
        while self.process.poll() is None:
            if self.ending.is_set() or time.monotonic() > due:
                return False  # it was alive
            time.sleep(0.01)
        return not self.ending.is_set()

    def _fault(self, how: str) -> ServerFault:
        return ServerFault(f"the server ended {how}, with {self.process.poll()}:\n{self.log_end()}")

    def said(self) -> str:
        """The log of this life."""
        return self.log.read_bytes()[self._log_before :].decode(errors="replace")

    def log_end(self) -> str:
        return self.said()[-SAID_MOST:] if self.log.exists() else ""

    def metrics_url(self) -> str:
        """Of this life. The server answers calls before it says so."""
        due = time.monotonic() + END_S
        while time.monotonic() < due:
            if urls := re.findall(r"metrics at (http://\S+/metrics)\n", self.said()):
                return urls[-1]
            self.check_alive()
            time.sleep(0.01)
        raise ServerFault(f"the server does not say where its metrics are:\n{self.log_end()}")

    def ended_within(self, seconds: float) -> bool:
        """Whether it ends by itself at its failpoint."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self.check_alive()
        return True

    def leave_orphan(self) -> None:
        """As a crash does; its number is one that no file will have."""
        shard = pathlib.Path(self.folder, "data/segments/00")
        if shard.exists():
            (shard / "00000000ffffff00.seg.tmp").touch()

    def damage_newest_file(self) -> None:
        files = pathlib.Path(self.folder, "data/segments").glob("*/*.seg")
        file = max(files, key=lambda f: f.name)
        contents = bytearray(file.read_bytes())
        contents[len(contents) // 2] ^= 1
        file.write_bytes(contents)


def left_of(threads: Iterable[threading.Thread]) -> int:
    """How many of these threads do not end in time."""
    threads, due = list(threads), time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, due - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)


def leave(code: int) -> None:
    """Ends the program, whatever a thread still waits for."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)
