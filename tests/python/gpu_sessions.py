# SPDX-License-Identifier: Apache-2.0
"""Sessions of CUDA streams beside a server on one real GPU: what tests over emulated kernels cannot show. By hand:

    PYTHONPATH=client/python scripts/with_mps.sh -- python -m pytest -q tests/python/gpu_sessions.py

with PyTorch, and a server built with CUDA (ATTND_BIN, default build/bin/attnd). No stage of scripts/test.sh
runs it, as they have no GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import attnd
import live_server
import metrics_text
from cases import Case

SHAPE = attnd.ModelShape(layers=3, query_heads=8, kv_heads=2, head_dim=128, dtype="bf16")
PROMPT, TOKENS = 700, 724
FLAGS = ("--backend=cuda", "--device-memory-bytes=4GiB", "--allow-client-memory")
PARKED_CYCLES = 20_000_000_000  # of the GPU's clock: some ten seconds
PARKED_S = 8.0  # at least
# bf16's rounding of the answers, and of weights on the way.
ERROR_MAX = 0.02


@pytest.fixture(scope="module")
def server():
    """A server's target, and its metrics' address."""
    address = f"127.0.0.1:{live_server.free_port()}"
    with live_server.running(*FLAGS, f"--metrics-listen={address}") as (target, _):
        yield target, f"http://{address}/metrics"


class Loop:
    """A client with a stream, a session and one sequence, whose answers are compared with dense attention."""

    def __init__(self, target: str, seed: int) -> None:
        self.case = Case.random(TOKENS, SHAPE, seed)
        self._made = contextlib.ExitStack()
        self.client = self._made.enter_context(attnd.Client(target, timeout_s=60))
        self.session = self._made.enter_context(self.client.cuda_session(SHAPE))
        self.stream = torch.cuda.Stream()
        self._q, self._k, self._v = (
            torch.tensor(np.asarray(part, dtype=np.float32)).to("cuda", torch.bfloat16)
            for part in (self.case.q, self.case.k, self.case.v)
        )
        self.outs: list[torch.Tensor] = []
        model = attnd.Model("on_gpu", SHAPE)
        self._sequence = self.client.open_sequence(model, policy="dense").sequence_id
        prompt = attnd.layer_chunks(self.case.layers(slice(0, PROMPT)))
        self.client.append_kv(self._sequence, prompt, prefill_complete=True)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close_sequence(self._sequence)
        self._made.close()

    def enqueue(self, position: int, before_last=lambda: None):
        """Begins the token's pass and enqueues its layers; before_last enqueues what comes before the last one."""
        with torch.cuda.stream(self.stream):
            whole = self.session.begin_pass([attnd.Row(self._sequence, position)])
            for layer in range(SHAPE.layers):
                if layer + 1 == SHAPE.layers:
                    before_last()
                q, k, v = (part[layer, position : position + 1] for part in (self._q, self._k, self._v))
                out = torch.full((1, SHAPE.query_heads, SHAPE.head_dim), float("nan"), device="cuda").bfloat16()
                self.session.layer(layer, q, k, v, out)
                self.outs.append(out)
        return whole

    def decode(self) -> None:
        for position in range(PROMPT, TOKENS):
            self.enqueue(position).finish()

    def check(self) -> None:
        self.stream.synchronize()
        assert len(self.outs) == (TOKENS - PROMPT) * SHAPE.layers
        for index, out in enumerate(self.outs):
            position = PROMPT + index // SHAPE.layers
            expected, _ = self.case.expected(index % SHAPE.layers, slice(position, position + 1))
            found = out.float().cpu().numpy()
            error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            assert error < ERROR_MAX, f"position {position}, layer {index % SHAPE.layers}"


def twin_bytes(metrics: str) -> float:
    return metrics_text.read(metrics).get("attnd_memory_twin_bytes")


def test_two_clients_have_twins(server):
    target, metrics = server
    with Loop(target, 1) as first, Loop(target, 2) as second:
        assert first.session.in_gpu_memory and second.session.in_gpu_memory
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Loop.decode, (first, second)))
        first.check()
        second.check()
        assert twin_bytes(metrics) > 0
    assert twin_bytes(metrics) == 0


def decode_when_told(target: str) -> None:
    """Another process's client: it comes when it is told to, decodes, and says how long that took."""
    torch.zeros(1, device="cuda")  # so that CUDA has started when it is told to come
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    with Loop(target, 5) as loop:
        assert loop.session.in_gpu_memory
        loop.decode()
        loop.check()
    print(time.monotonic() - start, flush=True)


def test_another_client_comes_while_a_pass_is_parked(server):
    """The first one's stream stands before its last layer for ten seconds; nobody waits for it but its own pass."""
    target, _ = server
    command = [sys.executable, __file__, target]
    with (
        Loop(target, 4) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdout.readline() == "ready\n"
        start = time.monotonic()
        whole = first.enqueue(PROMPT, before_last=lambda: torch.cuda._sleep(PARKED_CYCLES))
        other.stdin.write("go\n")
        other.stdin.flush()
        taken = float(other.stdout.readline())
        assert not first.stream.query(), "the first one is no longer parked"
        whole.finish()
        parked = time.monotonic() - start
        for position in range(PROMPT + 1, TOKENS):
            first.enqueue(position).finish()
        first.check()
    print(f"{taken:.2f} s beside a pass that was parked for {parked:.1f} s")
    assert parked > PARKED_S > taken


def test_registrations_leave_no_memory_behind(server):
    """Sessions come and go; the GPU has as much memory as before."""
    target, metrics = server
    with attnd.Client(target, timeout_s=60) as client:
        client.cuda_session(SHAPE).close()
        before, _ = torch.cuda.mem_get_info()
        for _ in range(200):
            with client.cuda_session(SHAPE) as session:
                assert session.in_gpu_memory
        after, _ = torch.cuda.mem_get_info()
    assert before - after < 4 << 20
    assert twin_bytes(metrics) == 0


if __name__ == "__main__":
    decode_when_told(sys.argv[1])
