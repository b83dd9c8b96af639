# SPDX-License-Identifier: Apache-2.0
"""A fault of the GPU under MPS, in the server and in a client, while the client's CUDA graph has its
attention answered (docs/OPERATIONS.md, "When the GPU fails").

    scripts/with_mps.sh -- python tests/python/gpu_faults.py --fault planted_fault.so

Once a side, and once while the server fetches pages from host memory: starts a server, uploads and
seals a sequence, starts examples/decode_loop.py, and plants the fault when the loop decodes
(tests/gpu/planted_fault.cu). The server must end with status
75, the loop with an error, both soon; a server that is started again must bring the sequence back,
with the same answer, from the GPU. Exits with 1 if any of it fails.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

import attnd
import live_server
import metrics_text

EXIT_GPU_FAULT = 75
SHAPE = attnd.ModelShape(layers=2, query_heads=8, kv_heads=2, head_dim=128, dtype=attnd.BF16)
TOKENS = 4096
LOOP = (
    "--rows=2", "--prompt-tokens=8192", "--layers=8", "--hidden=1024", "--intermediate=2048",
    "--vocabulary=32000", "--attention=attnd", "--new-tokens=30000",
    "--policy=error-target:tolerance=off,floor=0.01",
)  # fmt: skip
FLAGS = ("--allow-client-memory", "--backend", "cuda", "--device-memory-bytes", "8GiB")
# The loop's keys and values take 512 MiB.
FETCHING = ("--device-page-memory-bytes", "128MiB")
# Seconds until something must have happened.
STARTED_S, ENDED_S = 120, 30


class Side:
    """One run: a server and a loop, of which `faulty` has the fault."""

    def __init__(
        self, fault: pathlib.Path, folder: pathlib.Path, faulty: str, flags: tuple[str, ...]
    ) -> None:
        self._fault, self._folder, self._faulty = fault, folder, faulty
        self._flags = (*FLAGS, *flags)
        self._file = folder / "fault"
        self.target = f"unix:{folder}/run/attnd.sock"
        self._port = live_server.free_port()

    def server(self) -> subprocess.Popen[bytes]:
        metrics = ("--metrics-listen", f"127.0.0.1:{self._port}")
        command = [live_server.PROGRAM, "--listen", self.target, "--data-dir"]
        server = self._start("server", [*command, self._folder / "data", *self._flags, *metrics])
        live_server.wait_until_there(self.target)
        return server

    def loop(self) -> subprocess.Popen[bytes]:
        program = live_server.ROOT / "examples/decode_loop.py"
        return self._start("client", [sys.executable, program, "--target", self.target, *LOOP])

    def plant(self) -> None:
        self._file.touch()

    def mend(self) -> None:
        self._file.unlink()

    def metric(self, name: str, **labels: str) -> float:
        page = metrics_text.read(f"http://127.0.0.1:{self._port}/metrics")
        return page.get(name, **labels)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace")

    def _start(self, name: str, command: list) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if name == self._faulty:
            environment |= {"LD_PRELOAD": str(self._fault), "ATTND_PLANT_FAULT": str(self._file)}
        with (self._folder / f"{name}.txt").open("ab") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def upload(client: attnd.Client) -> int:
    """Of a sealed sequence."""
    random = np.random.default_rng(1)
    opened = client.open_sequence(attnd.Model("gpu-faults", SHAPE), policy="error-target")
    kv = random.standard_normal((SHAPE.layers, TOKENS, SHAPE.kv_heads, SHAPE.head_dim))
    kv = kv.astype(attnd.BF16)
    chunks = [attnd.KvChunk(layer, 0, kv[layer], kv[layer]) for layer in range(SHAPE.layers)]
    client.append_kv(opened.sequence_id, chunks, prefill_complete=True)
    return client.seal_sequence(opened.sequence_id).sealed_id


def answer(client: attnd.Client, sealed: int) -> np.ndarray:
    """Of the sealed sequence, resumed, to a query of its own."""
    opened = client.open_sequence(attnd.Model("gpu-faults", SHAPE), resume=sealed)
    query = np.random.default_rng(2).standard_normal((1, SHAPE.query_heads, SHAPE.head_dim))
    with client.decode_session() as session:
        rows = [attnd.Row(opened.sequence_id, TOKENS, query_only=True)]
        out = session.step(0, rows, query.astype(np.float32)).out.copy()
    client.close_sequence(opened.sequence_id)
    return out


def await_that(what: str, holds, seconds: float) -> float:
    """Seconds until it holds; raises where it does not."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - start


def run(fault: pathlib.Path, faulty: str, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="attnd-faults-") as name:
        side = Side(fault, pathlib.Path(name), faulty, flags)
        server = side.server()
        loop = None
        try:
            with attnd.Client(side.target) as client:
                sealed = upload(client)
                before = answer(client, sealed)
            loop = side.loop()
            # Some passes: 8 layers each.
            await_that(
                "the loop decodes",
                lambda: side.metric("attnd_steps_total") > 2000 or loop.poll() is not None,
                STARTED_S,
            )
            if loop.poll() is not None:
                raise RuntimeError("the loop ended before the fault")
            fallback = side.metric("attnd_backend_fallback_steps_total")
            if fallback:
                raise RuntimeError(f"the CPU answered {fallback} steps")
            fetched = side.metric("attnd_pcie_bytes_total", path="fetch")
            if bool(fetched) != bool(flags):
                raise RuntimeError(f"{fetched} bytes of pages were fetched")
            side.plant()
            start = time.monotonic()
            await_that("the server ends", lambda: server.poll() is not None, ENDED_S)
            server_s = time.monotonic() - start
            await_that("the loop ends", lambda: loop.poll() is not None, ENDED_S)
            loop_s = time.monotonic() - start
            print(
                f"a fault in the {faulty} {' '.join(flags)}: the server ended with {server.returncode} after "
                f"{server_s:.2f} s, the loop with {loop.returncode} after {loop_s:.2f} s: "
                f"{side.log('client').strip().splitlines()[-1][:160]}"
            )
            if server.returncode != EXIT_GPU_FAULT or loop.returncode == 0:
                raise RuntimeError("the server or the loop ended as it should not")
            side.mend()
            server = side.server()
            with attnd.Client(side.target) as client:
                status = client.get_server_info().backend_status
                same = np.array_equal(answer(client, sealed), before)
            print(f"  after the restart: backend {status or 'healthy'}, the same answer: {same}")
            if status or not same:
                raise RuntimeError("the server that was started again is not what it was")
        except (RuntimeError, OSError):
            print(f"the server:\n{side.log('server')[-3000:]}\nthe loop:\n{side.log('client')[-3000:]}")
            raise
        finally:
            for process in (server, loop):
                if process is not None and process.poll() is None:
                    process.terminate()
                    process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", type=pathlib.Path, required=True, help="planted_fault.so")
    fault = parser.parse_args().fault.absolute()
    failed = False
    for faulty, flags in (("server", ()), ("client", ()), ("server", FETCHING)):
        try:
            run(fault, faulty, flags)
        except (RuntimeError, OSError, attnd.AttndError) as error:
            print(f"FAILED, a fault in the {faulty}: {error}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
