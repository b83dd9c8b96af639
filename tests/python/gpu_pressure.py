# SPDX-License-Identifier: Apache-2.0
"""Mixed decoding on a GPU whose memory, like the host's, holds a part of the keys and values.

    python tests/python/gpu_pressure.py [--seconds 480] [--seed 1] [--backend cuda] [flags...]

Starts a server with audits. Clients open sequences, upload prompts, decode under policies that
change from step to step, fork, truncate, seal and resume. The server's budgets, which further flags
may change, hold a fraction of what is open: so layers are mapped and cached on the GPU, and
segments move to disk and back. Of some steps the same query is asked again under `dense`, which
tells the true error.

Prints a table of policies with errors and what they predicted, what moved, and memory of the server
and of the GPU over time. Exits with 1 if an answer is not finite, an exact policy errs, a policy
with a tolerance errs by more than twice it in the mean, a call fails but for lack of room, memory
grew from the second third to the last by more than a twentieth and 256 MiB, a sequence stays open,
the server ends, reports a damaged page, a fault of the GPU or a number that is not one; and, of a
run of a minute or more, if something was not done: a policy not compared, nothing read from disk.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import grpc
import ml_dtypes
import numpy as np

import attnd
import live_server
import metrics_text

NOT_FINITE = "attnd_metric_values_refused_total"
SHAPE = attnd.ModelShape(
    layers=2,
    query_heads=16,
    kv_heads=4,
    head_dim=128,
    value_dim=128,
    dtype=attnd.BF16,
    softmax_scale=128**-0.5,
)
MODEL = attnd.Model("gpu-pressure", SHAPE)
TOPICS = 64  # keys lie around so many directions, as a trained model's do
TOLERANCES = {"error-target": 0.2, "error-target:tolerance=0.05": 0.05}
POLICIES = (
    *TOLERANCES,
    "error-target:tolerance=off,floor=0.02",
    "error-target:tolerance=0.1,quantile=0.9",
    "error-target:on_miss=estimate,miss_wait_us=200",
    "clusters-top-k",
    "double-p",
    "dense",
    "streaming",
)
GROWTH_BYTES = 256 << 20
# Six workers have some 2 GB open.
BUDGETS = (
    *("--memory-budget-bytes", "1200000000"),
    *("--device-memory-bytes", "900000000"),
    *("--device-page-memory-bytes", "500000000"),
)
CHANGES = ("fork", "truncate", "resume")
EVERYTHING_S = 60.0  # in so long a run everything must have been done
SHOWN = (
    "attnd_backend_steps",
    "attnd_backend_graph",
    "attnd_backend_fallback_rows",
    "attnd_tier_",
    "attnd_pcie_bytes",
    "attnd_audit_rows",
)


class Asked(NamedTuple):
    error: float
    predicted: float


class Results:
    """What workers have seen. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: dict[str, list[Asked]] = collections.defaultdict(list)
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def note(self, policy: str, asked: Asked) -> None:
        with self._lock:
            self.asked[policy].append(asked)

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times

    def fault(self, text: str) -> None:
        with self._lock:
            self.faults.append(text)


class Conversation:
    """One sequence, from its prompt to its end."""

    def __init__(
        self, client: attnd.Client, dice: np.random.Generator, longest: int, results: Results
    ) -> None:
        self.client, self.dice, self.results = client, dice, results
        self.topics = dice.standard_normal((SHAPE.kv_heads, TOPICS, SHAPE.head_dim))
        tokens = int(dice.integers(longest // 16, longest))
        self.id = client.open_sequence(MODEL, indexes=["tree"], lease_seconds=600).sequence_id
        self.position = tokens
        chunks = attnd.layer_chunks([self._kv(tokens) for _ in range(SHAPE.layers)])
        client.append_kv(self.id, chunks, prefill_complete=True)
        results.count("prompt tokens", tokens)

    def _rows(self, tokens: int, heads: int, noise: float) -> np.ndarray:
        """[tokens, heads, head_dim] around the topics of the head's KV head."""
        topics = self.dice.integers(0, TOPICS, (tokens, heads))
        kv = np.arange(heads) * SHAPE.kv_heads // heads
        rows = self.topics[kv, topics] + noise * self.dice.standard_normal(
            (tokens, heads, SHAPE.head_dim)
        )
        return rows.astype(ml_dtypes.bfloat16)

    def _kv(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        return self._rows(tokens, SHAPE.kv_heads, 0.5), self._rows(tokens, SHAPE.kv_heads, 0.3)

    def decode(self, session: attnd.DecodeSession, steps: int) -> None:
        for _ in range(steps):
            policy = str(self.dice.choice(POLICIES))
            compared = self.dice.random() < 0.1
            for layer in range(SHAPE.layers):
                q = self._rows(1, SHAPE.query_heads, 0.3)
                k, v = self._kv(1)
                row = attnd.Row(self.id, self.position, policy=policy)
                step = session.step(layer, [row], q, k, v)
                if not np.isfinite(np.asarray(step.out, np.float32)).all():
                    self.results.fault(f"{policy}: an answer that is not finite")
                if compared:
                    self._compare(session, layer, q, policy, step)
            self.position += 1
            self.results.count("steps")

    def _compare(
        self,
        session: attnd.DecodeSession,
        layer: int,
        q: np.ndarray,
        policy: str,
        step: attnd.StepResult,
    ) -> None:
        """Asks the same query again, under dense."""
        row = attnd.Row(self.id, self.position + 1, policy="dense", query_only=True)
        dense = np.asarray(session.step(layer, [row], q).out, np.float32)
        error = np.linalg.norm(np.asarray(step.out, np.float32) - dense, axis=-1)
        relative = float((error / np.linalg.norm(dense, axis=-1)).mean())
        if not np.isfinite(relative):
            self.results.fault(f"an error of {policy} that is not finite")
            return
        self.results.note(policy, Asked(relative, step.rows[0].stats.predicted_error_mean or 0.0))

    def change(self, what: str) -> None:
        """A fork in its place, a shorter one, or itself from the disk."""
        if what == "fork":
            fork = self.client.fork_sequence(self.id, length=self.position)
            self.client.close_sequence(self.id)
            self.id = fork
        elif what == "truncate":
            self.position = int(self.dice.integers(self.position * 3 // 4, self.position))
            self.client.truncate_sequence(self.id, self.position)
        else:
            sealed = self.client.seal_sequence(self.id)
            self.client.close_sequence(self.id)
            opened = self.client.open_sequence(
                MODEL, resume=sealed.sealed_id, indexes=["tree"], lease_seconds=600
            )
            self.id, self.position = opened.sequence_id, opened.tokens_present
            self.client.drop_sealed(sealed.sealed_id)
        self.results.count(f"{what}s")

    def close(self) -> None:
        self.client.close_sequence(self.id)


class Worker:
    """Conversations one after the other, some left idle beside the one that decodes."""

    def __init__(self, target: str, seed: int, longest: int, results: Results) -> None:
        self._target, self._longest, self._results = target, longest, results
        self._tenant = f"worker-{seed}"
        self._dice = np.random.default_rng(seed)
        self._idle: list[Conversation] = []
        self._changes = itertools.cycle(CHANGES[seed % 3 :] + CHANGES[: seed % 3])

    def run(self, until: float) -> None:
        with attnd.Client(self._target, tenant=self._tenant, timeout_s=120) as client:
            try:
                while time.monotonic() < until:
                    self._converse(client)
            except Exception:
                self._results.fault(traceback.format_exc(limit=4))
            for each in client.list_sequences():
                client.close_sequence(each.sequence_id)
            for sealed in client.list_sealed():  # of a resume that was refused
                client.drop_sealed(sealed.sealed_id)
            for left in client.list_sequences():
                self._results.fault(f"sequence {left.sequence_id} is still open")

    def _converse(self, client: attnd.Client) -> None:
        try:
            with client.decode_session() as session:
                if len(self._idle) < 3:
                    new = Conversation(client, self._dice, self._longest, self._results)
                    self._idle.append(new)
                one = self._idle.pop(int(self._dice.integers(len(self._idle))))
                one.decode(session, int(self._dice.integers(20, 120)))
                one.change(next(self._changes))
                one.decode(session, int(self._dice.integers(5, 40)))
                self._idle.append(one)
            if self._dice.random() < 0.4:
                self._idle.pop(0).close()
        except (attnd.ResourceExhaustedError, attnd.RowError) as error:  # of a call, or of a row
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            self._results.count("refusals for lack of room")
            self._drop_others(client)

    def _drop_others(self, client: attnd.Client) -> None:
        """Closes what was under way when a call was refused, and one that is idle."""
        if self._idle:
            self._idle.pop(0)
        kept = {one.id for one in self._idle}
        for each in client.list_sequences():
            if each.sequence_id not in kept:
                client.close_sequence(each.sequence_id)


class Memory(NamedTuple):
    seconds: float
    resident: int
    gpu: int  # of the whole GPU; 0 without one


def gpu_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, check=True).stdout.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, IndexError):
        return 0


def grown(kind: str, sizes: list[int]) -> str:
    """Whether the last third's most is above the second's; empty if not."""
    third = len(sizes) // 3
    if third < 3:
        return ""
    before, last = max(sizes[third : 2 * third]), max(sizes[2 * third :])
    if last <= 1.05 * before + GROWTH_BYTES:
        return ""
    return f"{kind} grew from {before >> 20} to {last >> 20} MiB"


def undone(results: Results, page: metrics_text.Page) -> list[str]:
    """What a long run must have done and has not."""
    missing = [
        f"{policy} was compared with dense" for policy in POLICIES if not results.asked[policy]
    ]
    for deed in ("steps", "forks", "truncates", "resumes"):
        if not results.counts[deed]:
            missing.append(deed)
    for tier in ("hbm", "host", "ssd"):
        if page.get("attnd_tier_lookup_tokens_total", tier=tier) == 0:
            missing.append(f"a token looked up in {tier}")
    return [f"never: {what}" for what in missing]


def judge(results: Results, page: metrics_text.Page, memory: list[Memory]) -> list[str]:
    faults = [*results.faults, *metrics_text.faults_of(page, None)]
    for policy, tolerance in TOLERANCES.items():
        errors = [asked.error for asked in results.asked[policy]]
        if errors and float(np.mean(errors)) > 2 * tolerance:
            faults.append(f"{policy} errs by {np.mean(errors):.3f} in the mean")
    # bf16 outputs differ by their rounding.
    if any(asked.error > 0.01 for asked in results.asked["dense"]):
        faults.append("dense errs")
    faults.append(grown("resident memory", [each.resident for each in memory]))
    faults.append(grown("the GPU's memory", [each.gpu for each in memory]))
    for name in ("attnd_backend_degraded", "attnd_quarantined_files_total", NOT_FINITE):
        if (value := page.get(name)) != 0:
            faults.append(f"{name} is {value}")
    if memory[-1].seconds >= EVERYTHING_S:
        faults += undone(results, page)
    return [fault for fault in faults if fault]


def show(results: Results, page: metrics_text.Page, memory: list[Memory]) -> None:
    print("| policy | compared | error: mean | 95% | predicted: mean |\n|---|---|---|---|---|")
    for policy, all_asked in sorted(results.asked.items()):
        errors = [asked.error for asked in all_asked]
        predicted = np.mean([asked.predicted for asked in all_asked])
        print(
            f"| {policy} | {len(errors)} | {np.mean(errors):.4f} | "
            f"{np.quantile(errors, 0.95):.4f} | {predicted:.4f} |"
        )
    print("did:", ", ".join(f"{times} {what}" for what, times in sorted(results.counts.items())))
    for name, value in sorted(page.samples.items()):
        if name.startswith(SHOWN) and value != 0:
            print(f"  {name} {value:.6g}")
    name = "attnd_audit_relative_error"
    audited = {key.split('"')[1] for key in page.samples if key.startswith(f"{name}_sum")}
    for policy in sorted(audited):
        if count := page.get(f"{name}_count", policy=policy):
            mean = page.get(f"{name}_sum", policy=policy) / count
            print(f"  audited {policy}: {count:.0f} rows, error {mean:.4f} in the mean")
    for each in memory[:: max(1, len(memory) // 12)]:
        sizes = f"{each.resident >> 20} MiB resident, {each.gpu >> 20} on the GPU"
        print(f"  {each.seconds:.0f} s: {sizes}")


class Outcome(NamedTuple):
    results: Results
    page: metrics_text.Page  # /metrics at the end
    memory: list[Memory]

    def faults(self) -> list[str]:
        return judge(self.results, self.page, self.memory)


def run(
    seconds: float, seed: int, workers: int, longest: int, *flags: str, **server: Any
) -> Outcome:
    """Starts a server with these flags, and works with it.

    Args:
        longest: the most tokens of a prompt.
        server: more of live_server.running.
    """
    results, memory = Results(), []
    metrics = f"127.0.0.1:{live_server.free_port()}"
    audits = ("--audit-share", "0.05", "--audit-cpu-share", "1")
    with live_server.running("--metrics-listen", metrics, *audits, *flags, **server) as started:
        target, pid = started
        begin = time.monotonic()
        threads = [
            threading.Thread(
                target=Worker(target, seed * 1000 + n, longest, results).run,
                args=(begin + seconds,),
            )
            for n in range(workers)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            try:
                resident = live_server.status_bytes(pid, "VmRSS")
            except (KeyError, OSError):
                results.fault("the server has ended")
                break
            memory.append(Memory(time.monotonic() - begin, resident, gpu_bytes()))
            time.sleep(2)
        for thread in threads:
            thread.join()
        page = metrics_text.Page({}, {})
        try:
            for _ in range(2):  # a first page has nothing of the latency of pages
                page = metrics_text.read(f"http://{metrics}/metrics")
        except OSError as error:
            results.fault(f"/metrics: {error}")
    return Outcome(results, page, memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--longest", type=int, default=49152, help="tokens of a prompt")
    parser.add_argument("--backend", default="cuda")
    options, flags = parser.parse_known_args()
    outcome = run(
        options.seconds,
        options.seed,
        options.workers,
        options.longest,
        "--backend",
        options.backend,
        *BUDGETS,
        *flags,
    )
    show(*outcome)
    faults = outcome.faults()
    for fault in faults:
        print("FAULT:", fault)
    print(f"seed {options.seed}, {outcome.memory[-1].seconds:.0f} s: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
