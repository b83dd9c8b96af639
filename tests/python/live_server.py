# SPDX-License-Identifier: Apache-2.0
"""The built server for programs that are run by hand; tests take theirs from conftest.py."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping

import attnd

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("ATTND_BIN", "build/bin/attnd")


@contextlib.contextmanager
def running(
    *flags: str, program: pathlib.Path = PROGRAM, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """A server in a folder of its own: its target and its process id. It must end in order.

    Args:
        program: the built server, or one like it.
        environment: variables that it has besides this process's.
    """
    with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
        target = f"unix:{folder}/run/attnd.sock"
        command = [program, "--listen", target, "--data-dir", f"{folder}/data", *flags]
        server = subprocess.Popen(command, env={**os.environ, **(environment or {})})
        try:
            wait_until_there(target)
            yield target, server.pid
        finally:
            server.terminate()
            code = server.wait(20)
    assert code == 0, f"attnd ended with {code}"


@contextlib.contextmanager
def to_be_ended(
    folder: pathlib.Path, *flags: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that the caller may end in any way, with its socket and data in the folder: its
    target and process. It is killed at the end."""
    target = f"unix:{folder}/attnd.sock"
    server = subprocess.Popen([PROGRAM, "--listen", target, "--data-dir", folder, *flags])
    try:
        wait_until_there(target)
        yield target, server
    finally:
        server.kill()
        server.wait()


def wait_until_there(target: str) -> None:
    due = time.monotonic() + 20
    with attnd.Client(target) as client:
        while True:
            try:
                client.get_server_info()
                return
            except attnd.UnavailableError:
                if time.monotonic() > due:
                    raise


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(server: subprocess.Popen[bytes]) -> None:
    """Stops a server that this process has started, and waits until the last of its threads stands
    still: until then some of them still answer."""
    server.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)


def status_bytes(process: int, field: str) -> int:
    """VmRSS, VmHWM and the like of a process."""
    for line in pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)
