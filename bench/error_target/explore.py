# SPDX-License-Identifier: Apache-2.0
"""Variants over sequences: their error, reading, prediction and, with --answers, accuracy.

Without --answers every layer sees the queries of a dense run, and a variant's scores are shared by
its tolerances. With it each (variant, tolerance) answers the questions itself, layer after layer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections import defaultdict

import numpy as np
import torch
from attention import Haystack, Step
from evaluate import QUESTION_TOKENS, TASKS, cached_prefill, load_sequences
from model import Llama
from plans import PLANS
from options import Variant
from variants import Result, double_p, error_target


def answer(step: Step, v: Variant | str, tolerances: list[float], parts: bool = False
           ) -> list[Result]:
    if isinstance(v, Variant):
        return error_target(step, v, tolerances, parts)
    if v == "dense":
        zero = torch.zeros_like(step.dense_norm)
        one = torch.ones(step.kv_heads, step.tokens)
        return [Result(step.dense, one, zero, zero)]
    _, p1, p2 = v.split(":")
    return [double_p(step, float(p1), float(p2))]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    rank = [np.argsort(np.argsort(x)).astype(np.float64) for x in (a, b)]
    return float(np.corrcoef(*rank)[0, 1]) if len(a) > 1 else 0.0


class Tally:
    """One (variant, tolerance) over sequences and layers."""

    def __init__(self) -> None:
        self.cells: dict[int, list[tuple[np.ndarray, ...]]] = defaultdict(list)
        self.right = dict.fromkeys(TASKS, 0)
        self.answers = dict.fromkeys(TASKS, 0)
        self.agree = 0
        self.parts: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, layer: int, result: Result) -> None:
        self.cells[layer].append(tuple(
            x.float().cpu().numpy() for x in (result.error, result.predicted, result.read)))
        if result.parts:
            error = result.error
            head = torch.arange(error.shape[0], device=error.device)[:, None].expand_as(error)
            extra = {"error": error, "layer": torch.full_like(error, layer), "head": head}
            for name, x in (result.parts | extra).items():
                self.parts[name].append(x[:, ::9].flatten().float().cpu().numpy())

    def grade(self, task: str, best: np.ndarray, dense: np.ndarray, wanted: np.ndarray) -> None:
        self.right[task] += int((best == wanted).sum())
        self.answers[task] += len(wanted)
        self.agree += int((best == dense).sum())

    def result(self) -> dict:
        heads = []  # (error, predicted, read) of each (layer, KV head)
        for layer in sorted(self.cells):
            error, predicted, read = (np.stack(x) for x in zip(*self.cells[layer]))
            for h in range(error.shape[1]):
                heads.append((error[:, h].ravel(), predicted[:, h].ravel(), read[:, h].ravel()))
        error, predicted, read = (np.concatenate(x) for x in zip(*heads))
        out = {
            "error": float(error.mean()), "read": float(read.mean()),
            "predicted": float(predicted.mean()),
            "rank": spearman(predicted, error) if predicted.any() else 0.0,
            "heads": [[float(x.mean()) for x in h] for h in heads],
            "p95": float(np.quantile(error, 0.95)),
        }
        answers = sum(self.answers.values())
        if answers:
            out["accuracy"] = {t: self.right[t] / self.answers[t] for t in TASKS if self.answers[t]}
            out["agreement"] = self.agree / answers
        return out


def questions(model, kv, hays, tokens, v, tolerance, tally):
    """Teacher-forced; -> the arg-max after every question token."""
    x = model.embed(tokens)
    first = kv[0][0].shape[1]
    for layer, hay in enumerate(hays):
        step = Step(hay, *model.qkv(layer, x, first))
        result = answer(step, v, [tolerance])[0]
        if tally is not None:
            tally.add(layer, result)
        out = result.out.reshape(model.heads, len(tokens), -1)
        x = model.after_attention(layer, x, out)
    return model.logits(x).argmax(-1).cpu().numpy()


def one_sequence(model, kv, tokens, mask, task, plan, tolerances, tallies, args) -> None:
    hays = [Haystack(k, v, q, model.scale, args.segment) for k, v, q in kv]
    asked = tokens[-QUESTION_TOKENS:]
    wanted = np.flatnonzero(mask[-QUESTION_TOKENS:])
    targets = asked.cpu().numpy()[wanted]
    if args.answers:
        dense = questions(model, kv, hays, asked, "dense", 0, None)[wanted - 1]
        for v in plan:
            name = v.name if isinstance(v, Variant) else v
            for tolerance in tolerances if isinstance(v, Variant) else [0.0]:
                tally = tallies[name, tolerance]
                best = questions(model, kv, hays, asked, v, tolerance, tally)[wanted - 1]
                tally.grade(task, best, dense, targets)
        return
    x = model.embed(asked)
    for layer, hay in enumerate(hays):
        q, k, values = model.qkv(layer, x, len(tokens) - QUESTION_TOKENS)
        step = Step(hay, q, k, values, args.stride)
        for v in plan:
            name = v.name if isinstance(v, Variant) else v
            started = time.monotonic()
            levels = tolerances if isinstance(v, Variant) else [0.0]
            for tolerance, result in zip(levels, answer(step, v, levels, args.parts is not None)):
                tallies[name, tolerance].add(layer, result)
            if args.verbose:
                print(f"{layer} {name} {time.monotonic() - started:.2f} s", file=sys.stderr)
        out = step.dense if args.stride == 1 else Step(hay, q, k, values).dense
        out = out.reshape(model.heads, QUESTION_TOKENS, -1)
        x = model.after_attention(layer, x, out)
        hay.made.clear()


def interpolate(points: list[tuple[float, float]], at: float) -> float | None:
    """points (read, error): log-log error at a reading, or None outside."""
    points = sorted(points)
    for (r0, e0), (r1, e1) in zip(points, points[1:]):
        if r0 <= at <= r1 and r0 < r1:
            f = (np.log(at) - np.log(r0)) / (np.log(r1) - np.log(r0))
            return float(np.exp(np.log(e0) + f * (np.log(e1) - np.log(e0))))
    return None


def report(results: dict, tolerances: list[float], matched: list[float]) -> None:
    print("variant | " + " | ".join(f"tol {t}: err read p/t" for t in tolerances)
          + " | err at read " + " ".join(f"{m:.4f}" for m in matched) + " | head ratios | rank")
    for name, by_tolerance in results.items():
        cells, points = [], []
        for tolerance, r in by_tolerance.items():
            ratio = r["predicted"] / max(r["error"], 1e-12)
            cells.append(f"{r['error']:.4f} {r['read']:.4f} {ratio:.2f}")
            if "accuracy" in r:
                accuracy = " ".join(f"{a:.3f}" for a in r["accuracy"].values())
                cells[-1] += f" ({accuracy}; agree {r['agreement']:.3f})"
            points.append((r["read"], r["error"]))
        at = [interpolate(points, m) for m in matched]
        line = f"{name} | " + " | ".join(cells) + " | "
        line += " ".join("-" if a is None else f"{a:.4f}" for a in at)
        middle = list(by_tolerance.values())[len(by_tolerance) // 2]
        ratios = [p / max(e, 1e-12) for e, p, _ in middle["heads"]]
        line += f" | {min(ratios):.2f}..{max(ratios):.2f} | {middle['rank']:.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--eval-set", type=pathlib.Path, required=True)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--limit", type=int, default=1, help="sequences a task")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--segment", type=int, default=8192, help="0: the whole middle")
    parser.add_argument("--plan", default="baseline", help="plans.py: names, with commas")
    parser.add_argument("--tolerances", default="0.02,0.05,0.1,0.2,0.4")
    parser.add_argument("--matched", default="0.0127,0.0254,0.06,0.2")
    parser.add_argument("--stride", type=int, default=1, help="without answers: skip tokens")
    parser.add_argument("--answers", action="store_true")
    parser.add_argument("--cache", type=pathlib.Path, help="a folder for prefilled KV")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no sequence after these")
    parser.add_argument("--parts", type=pathlib.Path, help="npz: terms of the error by row")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_default_device(args.device)
    began = time.monotonic()
    model = Llama(args.model, args.device)
    plan = [v for name in args.plan.split(",") for v in PLANS[name]]
    tolerances = [float(t) for t in args.tolerances.split(",")]
    tallies: dict = defaultdict(Tally)
    done = 0
    for task, number, tokens, mask in load_sequences(
            args.eval_set, args.length, args.limit, tuple(args.tasks.split(","))):
        if time.monotonic() - began > args.seconds:
            break
        tokens = torch.from_numpy(tokens).to(args.device)
        key = f"{args.model.name}-{args.length}-{number}"
        kv = cached_prefill(model, args.cache, key, tokens[:-QUESTION_TOKENS])
        one_sequence(model, kv, tokens, mask, task, plan, tolerances, tallies, args)
        done += 1
        print(f"{key} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    results: dict = defaultdict(dict)
    for (name, tolerance), tally in tallies.items():
        results[name][tolerance] = tally.result()
    print(f"{args.model.name} {args.length}, {done} sequences, answers {args.answers}")
    report(results, tolerances, [float(m) for m in args.matched.split(",")])
    if args.parts:
        np.savez_compressed(args.parts, **{
            f"{name}/{tolerance}/{part}": np.concatenate(x).astype(np.float32)
            for (name, tolerance), tally in tallies.items() for part, x in tally.parts.items()})
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
