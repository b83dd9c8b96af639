# SPDX-License-Identifier: Apache-2.0
"""`cold_decode.py --four_times`: a sequence four times as large as the memory budget.

Keys and values of eight texts of 8192 tokens of the evaluation set (fp32, 252 MiB) go into one
sequence, in chunks of tokens with all their layers, to a server with a budget of a quarter of them,
which has to make segments of them and move those to disk as they come. Then the texts' questions
are decoded over all of it, error-target, round after round: memory must stay flat, and no step may
fail. The first round's answers must be those of a server with room for everything, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np
from cold_server import MIB, ServerProcess, running

import attnd
from attnd import FP32, Client, KvChunk, Policy
from attnd.eval.cache import DEFAULT_MAX_BYTES, Cache
from attnd.eval.evalset import QUESTION_TOKENS, TASKS, Example, read_examples
from attnd.eval.local import prefill
from attnd.nano import LayerKv, Model, RemoteKv
from attnd.nano.parallel import single_threaded_blas
from attnd.tensors import Array

LENGTH = 8192
TEXTS_A_TASK = 2
CHUNK_TOKENS = 256
SEGMENT_TOKENS = 2048
POLICY = Policy("error-target")
TIMES = 4  # the budget
# Memory counts as flat if its greatest value in the second half of decoding is at most this much
# above that of the first half.
GROWTH_MAX = 1.05

Texts = Sequence[tuple[Example, Sequence[LayerKv]]]


class Watch:
    """Samples a server's memory on a thread, until stopped."""

    PERIOD_S = 0.1

    def __init__(self, server: ServerProcess, steps: Callable[[], int]) -> None:
        self.samples: list[dict[str, float]] = []
        self._server = server
        self._steps = steps
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.samples.append(self._sample())
            if self._stopped.wait(self.PERIOD_S):
                self.samples.append(self._sample())
                return

    def _sample(self) -> dict[str, float]:
        metrics = self._server.metrics()
        return {
            "step": self._steps(),
            "process_bytes": metrics["attnd_process_resident_memory_bytes"],
            "budget_bytes": metrics['attnd_resident_bytes{tier="host"}'],
            "page_bytes": metrics['attnd_page_memory_bytes{state="taken"}'],
            "lookups": metrics['attnd_tier_lookup_pages_total{tier="host"}'],
            "hits": metrics['attnd_tier_hit_pages_total{tier="host"}'],
            "read_bytes": metrics['attnd_ssd_bytes_total{direction="read"}'],
            "written_bytes": metrics['attnd_ssd_bytes_total{direction="written"}'],
            "paged_out": metrics["attnd_segments_paged_out_total"],
            "failed_page_outs": metrics["attnd_page_out_failures_total"],
        }


@dataclass
class Decoding:
    """Times in microseconds and answers, of each step."""

    engine_us: list[int] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)  # hashes
    errors: list[str] = field(default_factory=list)


def chunks(texts: Texts) -> Iterator[KvChunk]:
    """Of all texts as one sequence, token-major."""
    first = 0
    for _, layers in texts:
        tokens = len(layers[0][0])
        for start in range(0, tokens, CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            for layer, (k, v) in enumerate(layers):
                yield KvChunk(layer, first + start, k[part], v[part])
        first += tokens


def upload(client: Client, model: Model, texts: Texts) -> int:
    sequence = client.open_sequence(model.attnd_model(FP32), policy=POLICY).sequence_id
    client.append_kv(sequence, chunks(texts), prefill_complete=True)
    return sequence


def decode(
    client: Client, model: Model, texts: Texts, sequence: int, rounds: int, into: Decoding
) -> None:
    """All texts' questions, `rounds` times; stops at the first error."""
    first = sum(len(example.haystack) for example, _ in texts)
    with client.decode_session() as session:
        kv = RemoteKv(session, [sequence], [first], FP32)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            began = time.perf_counter()
            out = kv.attend(layer, q, k, v)
            into.wall_us.append((time.perf_counter() - began) * 1e6)
            assert kv.last is not None
            into.engine_us.append(kv.last.engine_us)
            into.answers.append(hash(kv.last.out.tobytes() + kv.last.lse.tobytes()))
            return out

        try:
            for _ in range(rounds):
                for example, _ in texts:
                    for index in range(QUESTION_TOKENS):
                        kv.begin_token()
                        token = example.questions[index : index + 1]
                        position = np.array([len(example.haystack) + index])
                        model.forward(token, position, attend)
                        kv.end_token()
        except attnd.AttndError as error:
            into.errors.append(f"step {len(into.wall_us)}: {error}")


def quarters(decoding: Decoding, samples: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """What each quarter of the steps brought; memory is the greatest sampled."""
    steps = len(decoding.engine_us)
    rows = []
    for number in range(4):
        begin, end = number * steps // 4, (number + 1) * steps // 4
        within = [sample for sample in samples if begin <= sample["step"] <= end]
        if not within:
            continue
        lookups = within[-1]["lookups"] - within[0]["lookups"]
        row: dict[str, Any] = {
            name: max(sample[name] for sample in within)
            for name in ("process_bytes", "budget_bytes", "page_bytes")
        }
        row["steps"] = [begin, end]
        row["engine_us_p50"] = float(np.median(decoding.engine_us[begin:end]))
        row["engine_us_p95"] = float(np.percentile(decoding.engine_us[begin:end], 95))
        row["wall_us_p50"] = float(np.median(decoding.wall_us[begin:end]))
        row["hit_rate"] = (within[-1]["hits"] - within[0]["hits"]) / max(1, lookups)
        row["read_bytes_per_step"] = (within[-1]["read_bytes"] - within[0]["read_bytes"]) / max(
            1, within[-1]["step"] - within[0]["step"]
        )
        row["paged_out"] = within[-1]["paged_out"] - within[0]["paged_out"]
        rows.append(row)
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown."""
    lines = [
        "| steps | process MiB | budget in use MiB | of that pages | step p50 | p95 "
        "| round trip p50 | hit rate | KiB read a step | segments moved |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row['steps'][0]}..{row['steps'][1]} | {row['process_bytes'] / MIB:.1f} | "
            f"{row['budget_bytes'] / MIB:.1f} | {row['page_bytes'] / MIB:.1f} | "
            f"{row['engine_us_p50']:.0f} | {row['engine_us_p95']:.0f} | {row['wall_us_p50']:.0f} | "
            f"{row['hit_rate']:.3f} | {row['read_bytes_per_step'] / 1024:.0f} | "
            f"{row['paged_out']:.0f} |"
        )
    return "\n".join(lines)


def read_texts(options: argparse.Namespace, model: Model) -> Texts:
    cache = Cache(options.cache, DEFAULT_MAX_BYTES)
    examples = read_examples(options.model / "nano_eval.npz", LENGTH, TASKS, TEXTS_A_TASK)
    return [(example, prefill(model, example, cache, lambda _: None)) for example in examples]


def in_memory(
    options: argparse.Namespace, folder: pathlib.Path, model: Model, texts: Texts
) -> Decoding:
    """One round with room for everything."""
    flags = ("--memory_budget_bytes", str(4 << 30), f"--segment_tokens={SEGMENT_TOKENS}")
    decoding = Decoding()
    with running(options.server, folder, flags) as server, server.client() as client:
        decode(client, model, texts, upload(client, model, texts), 1, decoding)
    return decoding


def within_budget(
    options: argparse.Namespace,
    folder: pathlib.Path,
    model: Model,
    texts: Texts,
    budget_bytes: int,
) -> tuple[Decoding, list[dict[str, float]], float]:
    """The decoding, memory while it went on, and the greatest memory while uploading."""
    flags = (f"--memory_budget_bytes={budget_bytes}", f"--segment_tokens={SEGMENT_TOKENS}")
    decoding = Decoding()

    def steps() -> int:
        return len(decoding.wall_us)

    with running(options.server, folder, flags) as server, server.client() as client:
        print(f"started: {server.metrics()['attnd_process_resident_memory_bytes'] / MIB:.1f} MiB")
        began = time.monotonic()
        with Watch(server, steps) as watch:
            sequence = upload(client, model, texts)
        uploading = max(sample["process_bytes"] for sample in watch.samples)
        last = watch.samples[-1]
        budget = max(sample["budget_bytes"] for sample in watch.samples)
        print(
            f"uploaded in {time.monotonic() - began:.1f} s: at most {uploading / MIB:.1f} MiB in "
            f"the process, {budget / MIB:.1f} of the budget; "
            f"{last['paged_out']:.0f} segments moved ({last['failed_page_outs']:.0f} failed), "
            f"{last['written_bytes'] / MIB:.1f} MiB written",
            flush=True,
        )
        with Watch(server, steps) as watch:
            decode(client, model, texts, sequence, options.rounds, decoding)
        (info,) = list(client.list_sequences())
        print(f"{info.committed_tokens} tokens at the end, {info.segments} segments")
    return decoding, watch.samples, uploading


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    model = Model.load(options.model)
    texts = read_texts(options, model)
    payload = sum(k.nbytes + v.nbytes for _, layers in texts for k, v in layers)
    budget = options.budget_mib * MIB if options.budget_mib else payload // TIMES
    print(f"payload {payload / MIB:.1f} MiB, {payload / budget:.2f} budgets of {budget / MIB:.1f}")
    with tempfile.TemporaryDirectory(prefix="attnd-", dir=options.folder) as temporary:
        folder = pathlib.Path(temporary)
        with single_threaded_blas():
            try:
                decoding, samples, uploading = within_budget(
                    options, folder / "tight", model, texts, budget
                )
            except attnd.AttndError as error:
                print(f"the upload failed: {error}")
                return 1
            expected = in_memory(options, folder / "memory", model, texts)
    rows = quarters(decoding, samples)
    print(report(rows))
    memory_us = float(np.median(expected.engine_us))
    print(f"in memory a step takes {memory_us:.0f} us (first round, p50)")
    faults = decoding.errors + expected.errors
    different = sum(a != b for a, b in zip(decoding.answers, expected.answers))
    if different or len(decoding.answers) < len(expected.answers):
        faults.append(f"{different} of {len(expected.answers)} answers differ from memory's")
    half = len(samples) // 2
    peaks = [max(s["process_bytes"] for s in part) for part in (samples[:half], samples[half:])]
    if peaks[1] > GROWTH_MAX * peaks[0]:
        faults.append(f"memory grew from {peaks[0] / MIB:.1f} to {peaks[1] / MIB:.1f} MiB")
    if any(sample["budget_bytes"] > budget for sample in samples):
        faults.append("more than the budget was in use")
    if options.json:
        result: dict[str, Any] = {"quarters": rows, "samples": samples, "faults": faults}
        result["uploading_bytes"] = uploading
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    first = "first round's answers are equal in every bit; "
    print("\n".join(faults) if faults else f"{first}no errors; memory is flat")
    return 1 if faults else 0
