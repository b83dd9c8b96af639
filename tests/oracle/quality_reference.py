# SPDX-License-Identifier: Apache-2.0
"""A second reference of the cluster policies and of Quest, in numpy over a real model.

It shares no code with the service, its clients or the C++ oracles. It reads a Hugging Face folder
of the Llama family, prefills each haystack densely in float32, indexes the middle, and feeds the
questions teacher-forced with attention answered by a policy. All the questions of a sequence go
through a layer together, which changes nothing: a token's keys depend on the layers below only.

    python quality_reference.py --model models/nano-llama \\
        --eval-set models/nano-llama/nano_eval.npz --length 8192 --limit 2 \\
        --policies dense,streaming,clusters-top-k,double-p,error-target:0.2,quest:1024 --json OUT

What is measured, over layers, query heads, question tokens and sequences, each of equal weight:
  error      mean of |o - o_dense| / |o_dense|, o_dense from the same query and the same KV: the
             layer's own input, whatever lower layers did to it
  run error  the same against a run that was dense in every layer: lower layers' errors included
  read       exactly read middle tokens / middle tokens, once a KV head
  predicted  mean of the policy's own prediction, where it makes one
Zones: tokens [0, sink), the last `window` tokens of the haystack, and the question tokens up to the
query itself. Segments are the haystack's runs [i * segment, (i + 1) * segment) less the zones;
segment 0 is the whole middle as one. A last run with fewer than 512 tokens of the middle joins the
run before it here.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any, Callable, NamedTuple

import ml_dtypes
import numpy as np
from quality_model import Llama, prefill
from quality_policies import Index, Policy, attend, build_index, make_policy, segment_ranges

QUESTION_TOKENS = 128
TASKS = ("niah", "trace", "before", "top")


def bf16(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16 and back."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


# ---- Questions ----


class Run(NamedTuple):
    """One sequence's questions through the model."""

    logits: np.ndarray  # [questions, vocabulary]
    outs: np.ndarray  # [layers, questions, heads, D]
    error: float
    read: float
    predicted: float


def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)


def run_questions(
    model: Llama,
    policy: Policy,
    questions: np.ndarray,
    kv: list[tuple[np.ndarray, np.ndarray]],
    indexes: list[list[Index]],
    sink: int,
    window: int,
    round_kv: Callable[[np.ndarray], np.ndarray],
) -> Run:
    haystack = kv[0][0].shape[1]
    rows = len(questions)
    positions = haystack + np.arange(rows)
    first_window = haystack - window
    visible = np.concatenate(
        [np.ones((rows, sink + window), bool), np.tri(rows, dtype=bool)], axis=1
    )
    x = model.embed(questions)
    outs, errors, reads, predictions = [], [], [], []
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x, positions)
        k, v = round_kv(k), round_kv(v)
        parts = []
        for head in range(model.kv_heads):
            keys, values = kv[layer][0][head], kv[layer][1][head]
            zone = tuple(
                np.concatenate([old[:sink], old[first_window:], new[head]])
                for old, new in ((keys, k), (values, v))
            )
            group = q[:, head * model.group : (head + 1) * model.group]
            part = attend(
                policy,
                model.scale,
                group,
                (*zone, visible),
                (keys[sink:first_window], values[sink:first_window]),
                indexes[layer][head],
                sink,
            )
            parts.append(part.out)
            errors.append(relative(part.out, part.dense).mean())
            reads.append(part.read.mean())
            predictions.append(part.predicted.mean())
        outs.append(np.concatenate(parts, 1))
        x = model.after_attention(layer, x, outs[-1])
    means = (float(np.mean(a, dtype=np.float64)) for a in (errors, reads, predictions))
    return Run(model.logits(x), np.stack(outs), *means)


# ---- Evaluation ----


def kept_prefill(
    args: argparse.Namespace, haystack: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each layer's keys and values [kv_heads, tokens, D] as attnd.eval has them."""
    from attnd.eval.cache import Cache
    from attnd.eval.evalset import Example
    from attnd.eval.local import prefill as prefill_there
    from attnd.nano import Model

    nothing = np.empty(0, np.int64)
    example = Example("", haystack, nothing, nothing)
    model, cache = Model.load(args.model), Cache(args.prefilled)
    layers = prefill_there(model, example, cache, lambda share: None)
    return [(k.swapaxes(0, 1), v.swapaxes(0, 1)) for k, v in layers]


class Variant(NamedTuple):
    """How the index is made: segment length (0: the whole middle), dtype, tokens a cluster."""

    segment: int
    dtype: str
    tokens_per_cluster: int

    def __str__(self) -> str:
        runs = f"segments of {self.segment}" if self.segment else "whole middle"
        size = "" if self.tokens_per_cluster == 16 else f", {self.tokens_per_cluster} a cluster"
        return f"{runs}, {self.dtype}{size}"


def parse_variant(text: str) -> Variant:
    segment, dtype, *size = text.split(":")
    if dtype not in ("float32", "bf16"):
        raise SystemExit(f"variant {text!r}: dtype must be float32 or bf16")
    return Variant(int(segment), dtype, int(size[0]) if size else 16)


def make_indexes(
    model: Llama, kv: list[tuple[np.ndarray, np.ndarray]], ranges: list[tuple[int, int]], size: int
) -> list[list[Index]]:
    return [
        [build_index(k[head], v[head], ranges, size) for head in range(model.kv_heads)]
        for k, v in kv
    ]


def round_index(index: Index) -> Index:
    return index._replace(centroid=bf16(index.centroid), mean_value=bf16(index.mean_value))


class Tally:
    """Sums of one (policy, variant) over sequences."""

    def __init__(self) -> None:
        self.right = dict.fromkeys(TASKS, 0)
        self.answers = dict.fromkeys(TASKS, 0)
        self.error: list[float] = []
        self.run_error: list[float] = []
        self.read: list[float] = []
        self.predicted: list[float] = []
        self.agree = 0

    def add(self, task: str, run: Run, dense: Run, tokens: np.ndarray, mask: np.ndarray) -> None:
        """tokens, mask: of the questions. The first question token is never an answer."""
        wanted = np.flatnonzero(mask)
        best = run.logits.argmax(-1)[wanted - 1]
        self.right[task] += int((best == tokens[wanted]).sum())
        self.answers[task] += len(wanted)
        self.agree += int((best == dense.logits.argmax(-1)[wanted - 1]).sum())
        self.error.append(run.error)
        self.run_error.append(float(relative(run.outs, dense.outs).mean()))
        self.read.append(run.read)
        self.predicted.append(run.predicted)

    def result(self) -> dict[str, Any]:
        answers = sum(self.answers.values())
        return {
            "accuracy": {t: self.right[t] / self.answers[t] for t in TASKS if self.answers[t]},
            "answers": answers,
            "agreement": self.agree / answers,
            "error": float(np.mean(self.error)),
            "run_error": float(np.mean(self.run_error)),
            "read": float(np.mean(self.read)),
            "predicted": float(np.mean(self.predicted)),
        }


def print_results(results: list[dict[str, Any]]) -> None:
    print("| policy | index | niah trace before top | agree | error | run error | read "
          "| predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        accuracy = " ".join(f"{r['accuracy'][t]:.3f}" for t in TASKS if t in r["accuracy"])
        print(
            f"| {r['policy']} | {r['index']} | {accuracy} | {r['agreement']:.3f} | {r['error']:.4f}"
            f" | {r['run_error']:.4f} | {r['read']:.4f} | {r['predicted']:.4f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Reference figures of the cluster policies.")
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--eval-set", type=pathlib.Path, required=True)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--limit", type=int, default=2, help="sequences a task")
    parser.add_argument("--tasks", default=",".join(TASKS), help="some of them")
    parser.add_argument("--prefilled", type=pathlib.Path,
                        help="take the haystacks' keys and values from this cache of attnd.eval, "
                        "which makes them if they are not there: faster, and the one part that is "
                        "then shared with what is compared")
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--kv", choices=("float32", "bf16"), default="float32",
                        help="precision of keys and values as attention sees them")
    parser.add_argument("--policies", default="dense,streaming,clusters-top-k,double-p,"
                        "error-target:0.2,error-target:0.1")
    parser.add_argument("--indexes", default="0:float32,8192:float32,8192:bf16",
                        help="SEGMENT:DTYPE[:TOKENS_PER_CLUSTER],...; segment 0: whole middle")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()

    model = Llama(args.model)
    policies = [make_policy(text) for text in args.policies.split(",")]
    variants = [parse_variant(text) for text in args.indexes.split(",")]
    data = np.load(args.eval_set)
    all_tokens = data[f"tokens_{args.length}"].astype(np.int64)
    masks = data[f"answer_mask_{args.length}"]
    task_of = data[f"task_{args.length}"]
    haystack = args.length - QUESTION_TOKENS
    round_kv = bf16 if args.kv == "bf16" else lambda x: x
    chosen = [
        int(i)
        for task in map(TASKS.index, args.tasks.split(","))
        for i in np.flatnonzero(task_of == task)[: args.limit]
    ]

    tallies: dict[tuple[str, str], Tally] = {}
    for number, sequence in enumerate(chosen):
        started = time.monotonic()
        tokens, mask = all_tokens[sequence], masks[sequence]
        layers = (
            kept_prefill(args, tokens[:haystack])
            if args.prefilled
            else prefill(model, tokens[:haystack])
        )
        kv = [(round_kv(k), round_kv(v)) for k, v in layers]
        prefilled = time.monotonic()
        built: dict[tuple[tuple[tuple[int, int], ...], int], list[list[Index]]] = {}

        def run(policy: Policy, variant: Variant) -> Run:
            ranges = segment_ranges(haystack, args.sink, args.window, variant.segment)
            key = (tuple(ranges), variant.tokens_per_cluster)
            if key not in built:
                built[key] = make_indexes(model, kv, ranges, variant.tokens_per_cluster)
            indexes = built[key]
            if variant.dtype == "bf16":
                indexes = [[round_index(index) for index in layer] for layer in indexes]
            return run_questions(model, policy, tokens[haystack:], kv, indexes, args.sink,
                                 args.window, round_kv)

        dense = run(make_policy("dense"), variants[0])
        for policy in policies:
            # These read no clusters.
            whole = policy.name in ("dense", "streaming") or policy.blocks is not None
            for variant in variants[:1] if whole else variants:
                outcome = dense if policy.name == "dense" else run(policy, variant)
                tally = tallies.setdefault((policy.name, "-" if whole else str(variant)), Tally())
                tally.add(TASKS[task_of[sequence]], outcome, dense, tokens[haystack:],
                          mask[haystack:])
        print(f"{number + 1}/{len(chosen)} prefill {prefilled - started:.1f} s, "
              f"rest {time.monotonic() - prefilled:.1f} s", file=sys.stderr, flush=True)

    results = [{"policy": p, "index": i, **t.result()} for (p, i), t in tallies.items()]
    print_results(results)
    if args.json:
        args.json.write_text(json.dumps({"length": args.length, "limit": args.limit,
                                         "kv": args.kv, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
