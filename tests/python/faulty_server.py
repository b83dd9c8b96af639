# SPDX-License-Identifier: Apache-2.0
"""A server under rules that a test turns on and off, and sequences whose answers are compared."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator

import attnd
import faults
import live_server
from cases import Case, assert_near, step
from conftest import PROGRAM, require_program, wait_until_serving

TOKENS = 700  # a segment and a tail
CASE = Case.random(TOKENS + 60, seed=5)


class Server:
    """A server on a data folder that outlives it. Its rules act while the file `on` is there."""

    def __init__(
        self,
        folder: pathlib.Path,
        *rules: str,
        io: str = "auto",
        data: pathlib.Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        require_program()
        self.folder, self.rules, self.io, self.before = folder, rules, io, before
        self.data = data or folder / "data"
        self.on = folder / "on"
        self.acted_log = folder / "acted.log"
        self.log = folder / "attnd.log"
        self.target = f"unix:{folder}/run/attnd.sock"
        self.start()

    def start(self) -> None:
        self.metrics = f"127.0.0.1:{live_server.free_port()}"
        command = [PROGRAM, "--listen", self.target, "--data-dir", self.data, "--io", self.io]
        command += ["--segment-tokens", "512", "--metrics-listen", self.metrics]
        environment = None
        if self.rules:
            rules = [f"{rule} if={self.on}" for rule in self.rules]
            environment = faults.environment(*rules, log=self.acted_log)
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, preexec_fn=self.before
            )
        faults.wait_for_socket(self.target, self.process)
        wait_until_serving(self.target, self.process, self.log)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(20)

    def restart(self) -> None:
        """Without ceremony: SIGTERM takes two seconds, as clients may still want something."""
        assert self.process.poll() is None, "the server has ended"
        self.stop(signal.SIGKILL)
        self.start()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """The rules act; they must have, in the end."""
        self.acted_log.unlink(missing_ok=True)
        self.on.touch()
        yield
        self.on.unlink()
        assert self.acted() != [], "no call met the rule"

    def acted(self) -> list[str]:
        """A line for each time that a rule acted since the last `failing` began."""
        return self.acted_log.read_text().splitlines() if self.acted_log.exists() else []

    def files(self) -> set[str]:
        """Names of segment files, whole or temporary."""
        return {file.name for file in (self.data / "segments").glob("*/*")}

    def metric(self, name: str) -> float:
        """The value of a metric, 0 if it is not there yet."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.rsplit(" ", 1)[1])
        return 0.0

    def ended(self, method: str, code: str) -> float:
        return self.metric(f'attnd_rpcs_total{{code="{code}",method="{method}"}}')


@contextlib.contextmanager
def serving(*rules: str, **options) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
        server = Server(pathlib.Path(folder), *rules, **options)
        try:
            yield server
            assert server.process.poll() is None, "the server has ended"
        finally:
            server.process.kill()
            server.process.wait()


def client_of(server: Server) -> attnd.Client:
    return attnd.Client(server.target, tenant="faults", timeout_s=30)


class Life:
    """A sequence and how far it has come; each decode is compared with plain attention."""

    def __init__(self, client: attnd.Client, sequence: int, tokens: int = TOKENS) -> None:
        self.client, self.sequence, self.tokens = client, sequence, tokens

    def decode(self, steps: int = 2) -> None:
        with self.client.decode_session() as session:
            for position in range(self.tokens, self.tokens + steps):
                tokens = slice(position, position + 1)
                for layer in range(CASE.shape.layers):
                    result = step(session, CASE, self.sequence, layer, tokens)
                    assert_near(result, CASE.expected(layer, tokens))
        self.tokens += steps

    def resumed(self, sealed: attnd.SealResult) -> Life:
        """The sealed sequence, resumed."""
        back = self.client.open_sequence(CASE.model, resume=sealed.sealed_id)
        assert back.tokens_present == sealed.tokens
        return Life(self.client, back.sequence_id, sealed.tokens)
