# SPDX-License-Identifier: Apache-2.0
"""`cold_decode.py`: a text of which a quarter fits into memory.

A text of the evaluation set is prefilled by nano-llama, uploaded, sealed, and its server killed.
Then its questions are decoded, teacher-forced, through

  memory      a server with room for everything and a fresh upload: all segments whole;
  paged       a server on the sealed data folder whose budget has room for the indexes, the tail,
              and a quarter of the payload (--share): pages are read as steps want them, ahead where
              it can be known;
  no-prefetch the same without reading ahead.

The three take turns. Every answer of the last two must be the first's, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cold_server import MIB, ServerProcess, running

from attnd import BF16, FP32, Client, Policy, layer_chunks
from attnd.eval.cache import DEFAULT_MAX_BYTES, Cache
from attnd.eval.evalset import Example, read_examples
from attnd.eval.local import prefill
from attnd.eval.run import widest_zones
from attnd.nano import LayerKv, Model, RemoteKv, upload
from attnd.nano.parallel import single_threaded_blas
from attnd.tensors import Array

DTYPES = {"bf16": BF16, "fp32": FP32}
VARIANTS = ("memory", "paged", "no-prefetch")
PAGE_TOKENS = 16
BLOCK_TOKENS = 64  # of the tail
# Tokens at whose end a run counts as warm.
WARM_TOKENS = 16
# Servers refuse smaller budgets.
BUDGET_BYTES_MIN = 16 * MIB
PAGE_MEMORY_BYTES_MIN = MIB
LARGE_BUDGET = ("--memory_budget_bytes", str(4 << 30))

_COUNTERS = {
    "lookups": 'attnd_tier_lookup_pages_total{tier="host"}',
    "hits": 'attnd_tier_hit_pages_total{tier="host"}',
    "late": "attnd_pages_late_total",
    "pages_read": "attnd_pages_read_total",
    "bytes_read": 'attnd_ssd_bytes_total{direction="read"}',
    "issued": 'attnd_prefetched_pages_total{outcome="issued"}',
    "used": 'attnd_prefetched_pages_total{outcome="used"}',
    "wasted": 'attnd_prefetched_pages_total{outcome="wasted"}',
    "refused": 'attnd_prefetched_pages_total{outcome="refused"}',
}


@dataclass(frozen=True)
class Text:
    """A text ready to be uploaded."""

    model: Model
    example: Example
    layers: Sequence[LayerKv]
    dtype: np.dtype[Any]
    widest: Policy  # its sequence's

    @property
    def token_bytes(self) -> int:
        config = self.model.config
        return 2 * config.layers * config.kv_heads * config.head_dim * self.dtype.itemsize

    def uploaded(self, client: Client) -> int:
        shape = self.model.attnd_model(self.dtype)
        sequence = client.open_sequence(shape, policy=self.widest).sequence_id
        ids = self.example.haystack.tolist()
        upload(client, sequence, self.layers, self.dtype, token_ids=ids)
        return sequence


@dataclass
class Run:
    """One decoding of the questions; times in microseconds."""

    answers: list[bytes] = field(default_factory=list)  # out and lse of each step
    engine_us: list[int] = field(default_factory=list)  # of each step
    wall_us: list[float] = field(default_factory=list)  # of each step, as the client sees it
    waited: list[bool] = field(default_factory=list)  # whether a step had to read pages
    warm: dict[str, float] = field(default_factory=dict)  # counters of the tokens after WARM_TOKENS
    all: dict[str, float] = field(default_factory=dict)  # of all tokens
    page_bytes: float = 0  # memory that pages had at the end


@dataclass(frozen=True)
class Sealed:
    """A text on disk and the budget under which a quarter of it fits."""

    id: int
    payload_bytes: int
    fixed_bytes: int  # indexes, tables and tail of it
    page_memory_bytes: int
    wanted_budget_bytes: int

    @property
    def ballast_bytes(self) -> int:
        """What a server's least budget is too large by; another sequence must hold it."""
        return max(0, BUDGET_BYTES_MIN - self.wanted_budget_bytes)

    def flags(self, prefetch: bool) -> tuple[str, ...]:
        return (
            f"--memory_budget_bytes={self.wanted_budget_bytes + self.ballast_bytes}",
            f"--page_memory_bytes={self.page_memory_bytes}",
            f"--page_prefetch={str(prefetch).lower()}",
        )


def seal(options: argparse.Namespace, folder: pathlib.Path, text: Text) -> Sealed:
    """Uploads, seals, kills; then looks at what the text takes when it comes back."""
    with running(options.server, folder, LARGE_BUDGET) as server, server.client() as client:
        sequence = text.uploaded(client)
        (info,) = list(client.list_sequences())
        sealed = client.seal_sequence(sequence)
        server.kill()
    flags = (*LARGE_BUDGET, f"--page_memory_bytes={PAGE_MEMORY_BYTES_MIN}")
    with running(options.server, folder, flags) as server, server.client() as client:
        client.open_sequence(text.model.attnd_model(text.dtype), resume=sealed.sealed_id)
        resident = int(server.metrics()['attnd_resident_bytes{tier="host"}'])
        fixed = resident - PAGE_MEMORY_BYTES_MIN
    payload = info.segmented_tokens * text.token_bytes
    # Whole pages in each of the cache's 16 slabs.
    page_bytes = PAGE_TOKENS * text.token_bytes // (
        text.model.config.layers * text.model.config.kv_heads
    )
    slabs_bytes = 16 * page_bytes
    pages = max(PAGE_MEMORY_BYTES_MIN, int(payload * options.share) // slabs_bytes * slabs_bytes)
    # The tokens to come, in whole blocks, and a little for the answers under way.
    growth = (options.tokens + 2 * BLOCK_TOKENS) * text.token_bytes + MIB // 4
    return Sealed(sealed.sealed_id, payload, fixed, pages, fixed + growth + pages)


def load_ballast(client: Client, text: Text, size: int) -> None:
    """Another sequence, all of it tail."""
    config = text.model.config
    tokens = size // (BLOCK_TOKENS * text.token_bytes) * BLOCK_TOKENS
    zeros = np.zeros((tokens, config.kv_heads, config.head_dim), text.dtype)
    sequence = client.open_sequence(text.model.attnd_model(text.dtype)).sequence_id
    client.append_kv(sequence, layer_chunks([(zeros, zeros)] * config.layers))


def decode(
    server: ServerProcess, client: Client, text: Text, sequence: int, policy: Policy, tokens: int
) -> Run:
    """The first questions of a text."""
    run = Run()
    start = len(text.example.haystack)
    before = _counters(server)
    warm = before
    with client.decode_session() as session:
        kv = RemoteKv(session, [sequence], [start], text.dtype, policy)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            began = time.perf_counter()
            out = kv.attend(layer, q, k, v)
            run.wall_us.append((time.perf_counter() - began) * 1e6)
            assert kv.last is not None
            run.engine_us.append(kv.last.engine_us)
            run.waited.append(kv.last.rows[0].stats.ssd_tokens > 0)
            run.answers.append(kv.last.out.tobytes() + kv.last.lse.tobytes())
            return out

        for index in range(tokens):
            if index == WARM_TOKENS:
                warm = _counters(server)
            kv.begin_token([int(text.example.questions[index])])
            token = text.example.questions[index : index + 1]
            text.model.forward(token, np.array([start + index]), attend)
            kv.end_token()
    after = _counters(server)
    run.warm = {name: after[name] - warm[name] for name in after}
    run.all = {name: after[name] - before[name] for name in after}
    run.page_bytes = server.metrics().get('attnd_page_memory_bytes{state="taken"}', 0)
    return run


def _counters(server: ServerProcess) -> dict[str, float]:
    metrics = server.metrics()
    return {short: metrics.get(name, 0.0) for short, name in _COUNTERS.items()}


def measure(options: argparse.Namespace, folder: pathlib.Path, text: Text) -> list[dict[str, Any]]:
    """The variants of each policy in turns."""
    sealed = seal(options, folder / "sealed", text)
    print(
        f"MiB: payload {sealed.payload_bytes / MIB:.1f}, indexes and tail "
        f"{sealed.fixed_bytes / MIB:.1f}, budget {sealed.wanted_budget_bytes / MIB:.1f}, of it for "
        f"pages {sealed.page_memory_bytes / MIB:.1f}; and another sequence of "
        f"{sealed.ballast_bytes / MIB:.1f} as no budget is below {BUDGET_BYTES_MIN / MIB:.0f}",
        flush=True,
    )
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    large_folder = folder / "memory"
    with running(options.server, large_folder, LARGE_BUDGET) as large, large.client() as client:
        base = text.uploaded(client)
        for _ in range(options.repetitions):
            for policy in options.policies:
                fork = client.fork_sequence(base)
                run = decode(large, client, text, fork, policy, options.tokens)
                runs[str(policy), "memory"].append(run)
                client.close_sequence(fork)
                for variant in VARIANTS[1:]:
                    flags = sealed.flags(prefetch=variant == "paged")
                    run = _decode_cold(options, folder / "sealed", flags, text, sealed, policy)
                    runs[str(policy), variant].append(run)
    return [
        {**figures(runs[str(policy), variant], runs[str(policy), "memory"], text, sealed),
         "policy": str(policy), "variant": variant}
        for policy in options.policies
        for variant in VARIANTS
    ]  # fmt: skip


def _decode_cold(
    options: argparse.Namespace,
    folder: pathlib.Path,
    flags: Sequence[str],
    text: Text,
    sealed: Sealed,
    policy: Policy,
) -> Run:
    with running(options.server, folder, flags) as server, server.client() as client:
        model = text.model.attnd_model(text.dtype)
        if sealed.ballast_bytes > 0:
            load_ballast(client, text, sealed.ballast_bytes)
        sequence = client.open_sequence(model, resume=sealed.id).sequence_id
        return decode(server, client, text, sequence, policy, options.tokens)


def figures(
    runs: Sequence[Run], memory: Sequence[Run], text: Text, sealed: Sealed
) -> dict[str, Any]:
    """Of all repetitions together; times after WARM_TOKENS."""
    layers = text.model.config.layers
    warm = WARM_TOKENS * layers

    def engine(of: Sequence[Run]) -> Array:
        return np.concatenate([run.engine_us[warm:] for run in of])

    def token_wall(run: Run) -> Array:
        return np.reshape(run.wall_us, (-1, layers)).sum(1)

    walls = np.concatenate([token_wall(run)[WARM_TOKENS:] for run in runs])
    memory_walls = np.concatenate([token_wall(run)[WARM_TOKENS:] for run in memory])
    expected = memory[0].answers
    different = sum(a != b for run in runs for a, b in zip(run.answers, expected))
    tokens = len(expected) // layers
    mean = {name: float(np.mean([run.warm[name] for run in runs])) for name in _COUNTERS}
    cold = {name: float(np.mean([run.all[name] for run in runs])) for name in _COUNTERS}
    waited = np.concatenate([run.waited[warm:] for run in runs])
    ready = engine(runs)[~waited]
    ratios = [
        float(np.median(run.engine_us[warm:]) / np.median(beside.engine_us[warm:]))
        for run, beside in zip(runs, memory)
    ]
    return {
        "dtype": text.dtype.name,
        "steps": len(expected) * len(runs),
        "different_answers": different,
        "budget_bytes": sealed.wanted_budget_bytes,
        "payload_bytes": sealed.payload_bytes,
        "page_memory_bytes": float(np.mean([run.page_bytes for run in runs])),
        "hit_rate": mean["hits"] / mean["lookups"] if mean["lookups"] else None,
        "hit_rate_cold": cold["hits"] / cold["lookups"] if cold["lookups"] else None,
        "pages_read_per_token": mean["pages_read"] / max(1, tokens - WARM_TOKENS),
        "bytes_read_per_token": mean["bytes_read"] / max(1, tokens - WARM_TOKENS),
        "counters": cold,
        "engine_us_p50": float(np.median(engine(runs))),
        "engine_us_p95": float(np.percentile(engine(runs), 95)),
        "ready_share": float(np.mean(~waited)),
        "ready_us_p50": float(np.median(ready)) if len(ready) else None,
        "engine_ratio": float(np.median(ratios)),
        "engine_ratios": ratios,
        "engine_p95_ratio": float(
            np.percentile(engine(runs), 95) / np.percentile(engine(memory), 95)
        ),
        "token_us_p50": float(np.median(walls)),
        "token_us_p95": float(np.percentile(walls, 95)),
        "token_ratio": float(np.median(walls) / np.median(memory_walls)),
        "first_token_us": float(np.median([token_wall(run)[0] for run in runs])),
    }


def report(results: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown."""
    lines = [
        "| dtype | policy | KV | answers that differ | hit rate | MiB read a token "
        "| step p50 [of each run beside memory's] | p95 | steps that read nothing | their p50 "
        "| token p50 | first token |",
        "|" + "---|" * 12,
    ]
    for result in results:
        rate = "-" if result["hit_rate"] is None else f"{result['hit_rate']:.3f}"
        ready = "-" if result["ready_us_p50"] is None else f"{result['ready_us_p50']:.0f}"
        beside = ", ".join(f"{ratio:.2f}" for ratio in result["engine_ratios"])
        lines.append(
            f"| {result['dtype']} | `{result['policy']}` | {result['variant']} | "
            f"{result['different_answers']} of {result['steps']} | {rate} | "
            f"{result['bytes_read_per_token'] / MIB:.2f} | "
            f"{result['engine_us_p50']:.0f} [{beside}] | "
            f"{result['engine_us_p95']:.0f} | {result['ready_share']:.2f} | {ready} | "
            f"{result['token_us_p50']:.0f} | {result['first_token_us']:.0f} |"
        )
    lines += ["", "| dtype | policy | KV | " + " | ".join(_COUNTERS) + " |", "|---" * 12 + "|"]
    for result in results:
        counts = " | ".join(f"{result['counters'][name]:.0f}" for name in _COUNTERS)
        lines.append(
            f"| {result['dtype']} | `{result['policy']}` | {result['variant']} | {counts} |"
        )
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    model = Model.load(options.model)
    cache = Cache(options.cache, DEFAULT_MAX_BYTES)
    examples = read_examples(options.model / "nano_eval.npz", options.length, [options.task], 1)
    layers = prefill(model, examples[0], cache, lambda _: None)
    results = []
    with tempfile.TemporaryDirectory(prefix="attnd-", dir=options.folder) as temporary:
        folder = pathlib.Path(temporary)
        with running(options.server, folder / "ask") as server, server.client() as client:
            widest = widest_zones(options.policies, client.get_server_info())
        for name in options.dtype:
            print(f"{name}, {options.length} tokens:", flush=True)
            text = Text(model, examples[0], layers, DTYPES[name], widest)
            with single_threaded_blas():
                results += measure(options, folder / name, text)
    print(report(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    different = sum(result["different_answers"] for result in results)
    print("every answer is equal in every bit" if different == 0 else f"{different} answers DIFFER")
    return 0 if different == 0 else 1
