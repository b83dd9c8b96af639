# SPDX-License-Identifier: Apache-2.0
"""Server processes for the benchmarks of sequences on disk, and what their /metrics say."""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence

import attnd

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "build/bin/attnd"
_START_S = 30.0
_CALL_S = 600.0

MIB = 1 << 20


class ServerProcess:
    """A running server; used by one thread, but for metrics()."""

    def __init__(self, process: subprocess.Popen[bytes], target: str, metrics_url: str) -> None:
        self.process = process
        self.target = target
        self._metrics_url = metrics_url

    def client(self) -> attnd.Client:
        return attnd.Client(self.target, timeout_s=_CALL_S)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name with labels as Prometheus writes them."""
        with urllib.request.urlopen(self._metrics_url, timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def kill(self) -> None:
        """As a crash does: nothing is written any more."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(
    program: pathlib.Path, folder: pathlib.Path, flags: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """A server on `folder`/data, which may have been another server's. It must end in order, or by
    kill()."""
    folder.mkdir(parents=True, exist_ok=True)
    target = f"unix:{folder}/run/attnd.sock"
    command = [str(program), "--listen", target, "--data-dir", f"{folder}/data"]
    command += ["--metrics-listen", "127.0.0.1:0", "--backend", "cpu", *flags]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    server = None
    try:
        server = ServerProcess(process, target, _metrics_url(process, log))
        yield server
    finally:
        killed = process.poll() is not None
        process.terminate()
        code = process.wait(60)
    if code != 0 and not killed:
        raise RuntimeError(f"the server ended with {code}: {log.read_text(errors='replace')}")


def _metrics_url(process: subprocess.Popen[bytes], log: pathlib.Path) -> str:
    """Waits until the server serves."""
    due = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < due:
        text = log.read_text(errors="replace")
        found = re.search(r"metrics at (http://\S+)", text)
        if found and " serves at " in text:
            return found.group(1)
        time.sleep(0.02)
    process.kill()
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')}")
