# SPDX-License-Identifier: Apache-2.0
"""A server of one's own for a measurement: the program, started in a temporary folder."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

from attnd import AttndError, Client

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0


@contextlib.contextmanager
def running(program: pathlib.Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Its target. The server listens on a Unix socket, and its folder goes when it ends.

    Raises:
        OSError: if the program cannot be started.
        ValueError: if it ends as it starts, or does not answer in time; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
        target = f"unix:{folder}/run/attnd.sock"
        log = pathlib.Path(folder) / "log"
        command = [str(program), "--listen", target, "--data-dir", f"{folder}/data", *flags]
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_there(target, server, log)
            yield target
        finally:
            server.terminate()
            try:
                server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_there(target: str, server: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    due = time.monotonic() + _START_TIMEOUT_S
    with Client(target) as client:
        while True:
            with contextlib.suppress(AttndError):
                client.get_server_info(timeout_s=1)
                return
            if server.poll() is not None or time.monotonic() > due:
                said = log.read_text(errors="replace")[-2000:]
                raise ValueError(f"the server does not serve; it said:\n{said}")
            time.sleep(0.05)
