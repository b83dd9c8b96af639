# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests.

`server` is a running server's target, once the reference in Python, once the real one;
`attnd_target` is the real one alone, `reference` the reference with its servicer.
ATTND_TEST_SERVERS=reference or =attnd leaves one of the two for `server`. ATTND_BIN names the real
server's program (default build/bin/attnd). If it does not exist, its tests are skipped, which
scripts/test.sh takes for failures.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import grpc
import pytest

import attnd
import reference_server
from attnd.v1 import attnd_pb2_grpc
from bad_input import CASE, TOKENS
from cases import assert_near, lengths, opened, step

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
SERVERS = os.environ.get("ATTND_TEST_SERVERS", "reference,attnd").split(",")
# The files that take longest come first: none is then left running alone at the end of a run.
LONG_FILES = (
    "test_report",
    "test_parts",
    "test_eval",
    "test_soak",
    "test_crash",
    "test_leases",
    "test_compat",
    "test_calibrate",
    "test_attnctl",
    "test_prometheus",
    "test_stages",
    "test_tidy",
    "test_campaigns",
)
PROGRAM = ROOT / os.environ.get("ATTND_BIN", "build/bin/attnd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of LONG_FILES first."""
    order = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def require_program() -> None:
    """Skips the test if the real server is not built."""
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} does not exist: build it, or set ATTND_BIN")


@pytest.fixture(scope="session")
def folder() -> Iterator[pathlib.Path]:
    """A short temporary path: a Unix socket's path has at most 107 bytes."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="attnd-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def attnd_target(folder: pathlib.Path) -> Iterator[str]:
    """The real server, one for all tests; they close what they open."""
    require_program()
    target = f"unix:{folder}/run/attnd.sock"
    log = folder / "attnd.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [
                PROGRAM,
                "--listen",
                target,
                "--data-dir",
                folder / "data",
                "--metrics-listen",
                "127.0.0.1:0",
                "--feature-maps",
                ROOT / "models/nano-llama/feature_maps_16384.safetensors",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_serving(target, process, log)
        yield target
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    assert code == 0, f"attnd ended with {code}:\n{log.read_text(errors='replace')[-4000:]}"


def wait_until_serving(target: str, process: subprocess.Popen, log: pathlib.Path) -> None:
    """Returns when grpc.health.v1 says SERVING."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    due = time.monotonic() + START_TIMEOUT_S
    while True:
        with grpc.insecure_channel(target) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=2
                )
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError as error:
                reply = error
        said = log.read_text(errors="replace")[-4000:]
        assert process.poll() is None, (
            f"attnd ended with {process.returncode} as it started:\n{said}"
        )
        assert time.monotonic() < due, (
            f"attnd is not healthy after {START_TIMEOUT_S} s ({reply}):\n{said}"
        )
        time.sleep(0.05)


@pytest.fixture
def reference(folder: pathlib.Path) -> Iterator[tuple[str, reference_server.Servicer]]:
    """A fresh reference server: its target and its servicer."""
    target = f"unix:{folder}/reference.sock"
    server, servicer = reference_server.start(target)
    yield target, servicer
    server.stop(0).wait(10)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    """The target of one of the two servers."""
    if request.param == "reference":
        target, _ = request.getfixturevalue("reference")
        return target
    return request.getfixturevalue("attnd_target")


@pytest.fixture
def client(server: str) -> Iterator[attnd.Client]:
    """A client of the tenant "test" at one of the two servers."""
    with attnd.Client(server, tenant="test", timeout_s=60) as client:
        yield client
        for sequence in client.list_sequences():
            client.close_sequence(sequence.sequence_id)


@pytest.fixture
def stub(server: str) -> Iterator[attnd_pb2_grpc.AttndStub]:
    """The generated stub of one of the two servers: it sends whatever it is given."""
    with grpc.insecure_channel(server, [("grpc.max_receive_message_length", -1)]) as channel:
        yield attnd_pb2_grpc.AttndStub(channel)


@pytest.fixture
def sequence(client: attnd.Client) -> Iterator[int]:
    """A sequence that must not change, whatever the test sends."""
    name = opened(client, CASE, TOKENS)
    yield name
    assert lengths(client, name) == (TOKENS, TOKENS)
    with client.decode_session() as session:
        at = slice(TOKENS, TOKENS + 1)
        assert_near(step(session, CASE, name, 0, at), CASE.expected(0, at))
