# SPDX-License-Identifier: Apache-2.0
"""Audits of a real server: what /metrics says of them is what the answers that it gave show, and
options and limits are kept."""

from __future__ import annotations

import contextlib
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator

import numpy as np

import attnd
from cases import Case, opened
from conftest import PROGRAM, require_program, wait_until_serving

TOKENS = 1700  # three segments and a tail
CASE = Case.random(TOKENS + 40)
WAIT_S = 60


class Server:
    def __init__(self, target: str, log: pathlib.Path) -> None:
        self.target = target
        self.metrics_url = self._metrics_url(log)

    @staticmethod
    def _metrics_url(log: pathlib.Path) -> str:
        """Where the metrics are: the server says so soon after it serves."""
        due = time.monotonic() + WAIT_S
        while not (found := re.search(r"metrics at (http://\S+/metrics)\n", log.read_text())):
            assert time.monotonic() < due, log.read_text()
            time.sleep(0.02)
        return found[1]

    def metrics(self) -> dict[str, float]:
        """Every sample whose name begins with attnd_audit, by name and labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as reply:
            text = reply.read().decode()
        samples = re.findall(r"^(attnd_audit\S+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def rows(self) -> dict[str, float]:
        pattern = re.compile(r'attnd_audit_rows_total{outcome="(\w+)"}')
        found = ((pattern.fullmatch(name), value) for name, value in self.metrics().items())
        return {match[1]: value for match, value in found if match}

    def wait_for_rows(self, count: int) -> dict[str, float]:
        due = time.monotonic() + WAIT_S
        while sum(self.rows().values()) < count:
            assert time.monotonic() < due, self.rows()
            time.sleep(0.02)
        return self.rows()


@contextlib.contextmanager
def running(*flags: str) -> Iterator[Server]:
    require_program()
    with tempfile.TemporaryDirectory(prefix="attnd-") as name:
        folder = pathlib.Path(name)
        target, log = f"unix:{folder}/run/attnd.sock", folder / "attnd.log"
        command = [PROGRAM, "--listen", target, "--data-dir", folder / "data"]
        command += ["--metrics-listen", "127.0.0.1:0", "--segment-tokens", "512", *flags]
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_serving(target, process, log)
            yield Server(target, log)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(20)
        assert code == 0, log.read_text()[-4000:]


def decode(client: attnd.Client, sequence: int, count: int, policy: str) -> list:
    """The results of `count` steps of one token, each layer of each."""
    results = []
    with client.decode_session() as session:
        for token in range(count):
            tokens = slice(TOKENS + token, TOKENS + token + 1)
            for layer in range(CASE.shape.layers):
                row = attnd.Row(sequence, tokens.start, policy=policy)
                k, v = CASE.k[layer, tokens], CASE.v[layer, tokens]
                result = session.step(layer, [row], CASE.q[layer, tokens], k, v)
                results.append((layer, tokens, result))
    return results


def errors(results: list) -> tuple[np.ndarray, np.ndarray]:
    """Relative error and covered mass of each result: [results, query_heads]."""
    error, mass = [], []
    for layer, tokens, result in results:
        out, lse = CASE.expected(layer, tokens)
        off = np.linalg.norm(np.asarray(result.out, np.float64) - out, axis=-1)
        error.append((off / np.linalg.norm(out, axis=-1))[0])
        mass.append(np.minimum(1, np.exp(np.asarray(result.lse, np.float64) - lse))[0])
    return np.array(error), np.array(mass)


def sample(metrics: dict[str, float], name: str, policy: str, part: str) -> float:
    return metrics[f'attnd_audit_{name}_{part}{{policy="{policy}"}}']


def test_metrics_say_what_the_answers_show():
    count = 10
    # One policy after another, so that no queue is full; the sequence's own has no part in it.
    with running("--audit-share", "1", "--audit-cpu-share", "1") as server:
        rows = 0
        for policy in ["streaming", "clusters-top-k", "double-p", "error-target"]:
            with attnd.Client(server.target) as client:
                sequence = opened(client, CASE, TOKENS)
                results = decode(client, sequence, count, policy)
                rows += len(results)
                outcomes = server.wait_for_rows(rows)
                assert outcomes["audited"] == rows, outcomes
                client.close_sequence(sequence)
            error, mass = errors(results)
            metrics = server.metrics()
            close = {"rtol": 1e-4, "atol": 1e-4}
            for name, expected in [
                ("relative_error", error.mean(axis=1)),
                ("relative_error_max", error.max(axis=1)),
                ("covered_mass", mass.mean(axis=1)),
            ]:
                assert sample(metrics, name, policy, "count") == len(results)
                np.testing.assert_allclose(
                    sample(metrics, name, policy, "sum"), expected.sum(), **close
                )
            ratios = sample(metrics, "tolerance_ratio", policy, "count")
            predictions = sample(metrics, "predicted_ratio", policy, "count")
            if policy != "error-target":
                assert ratios == predictions == 0
                continue
            np.testing.assert_allclose(
                sample(metrics, "tolerance_ratio", policy, "sum"),
                (error.mean(axis=1) / 0.2).sum(),
                **close,
            )
            predicted = [result.rows[0].stats.predicted_error_mean for _, _, result in results]
            np.testing.assert_allclose(
                sample(metrics, "predicted_ratio", policy, "sum"),
                (predicted / error.mean(axis=1)).sum(),
                rtol=1e-3,
            )
        # The bounds that alerts look at (deploy/prometheus/alerts.yml).
        for name, bound in [("tolerance_ratio", "2"), ("covered_mass", "0.5")]:
            assert f'attnd_audit_{name}_bucket{{policy="error-target",le="{bound}"}}' in metrics


def test_dense_answers_are_not_audited():
    with running("--audit-share", "1") as server, attnd.Client(server.target) as client:
        sequence = opened(client, CASE, TOKENS)
        decode(client, sequence, 3, "dense")
        assert server.wait_for_rows(6)["exact"] == 6


def test_without_a_share_nothing_is_audited():
    with running("--audit-share", "0") as server, attnd.Client(server.target) as client:
        sequence = opened(client, CASE, TOKENS)
        decode(client, sequence, 20, "streaming")
        assert set(server.rows().values()) == {0}


def test_a_server_that_audits_stops_at_once():
    # At a thousandth of a core each of these takes a second or more.
    flags = ("--audit-share", "1", "--audit-cpu-share", "0.001")
    with running(*flags) as server, attnd.Client(server.target) as client:
        sequence = opened(client, CASE, TOKENS)
        decode(client, sequence, 40, "streaming")
        assert sum(server.rows().values()) < 80, "it was not slow"


def test_shares_have_ranges():
    require_program()
    for flag, value in [("audit-share", "1.5"), ("audit-share", "nan"), ("audit-cpu-share", "0")]:
        with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
            done = subprocess.run(
                [PROGRAM, "--data-dir", folder, f"--{flag}", value],
                capture_output=True,
                text=True,
                timeout=30,
            )
        assert done.returncode != 0
        assert flag.replace("-", "_") in done.stderr
