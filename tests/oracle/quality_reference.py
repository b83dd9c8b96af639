# SPDX-License-Identifier: Apache-2.0
"""A second reference of the cluster policies, in numpy over a real model: what attnd should reach.

It shares no code with the service, its clients or the C++ oracles. It reads a Hugging Face folder
of the Llama family, prefills each haystack densely in float32, indexes the middle, and feeds the
questions teacher-forced with attention answered by a policy. All the questions of a sequence go
through a layer together, which changes nothing: a token's keys depend on the layers below only.

    python quality_reference.py --model models/nano-llama \\
        --eval-set models/nano-llama/nano_eval.npz --length 8192 --limit 2 \\
        --policies dense,streaming,clusters-top-k,double-p,error-target:0.2 --json OUT

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
import math
import pathlib
import struct
import sys
import time
from typing import Any, Callable, NamedTuple

import ml_dtypes
import numpy as np

QUESTION_TOKENS = 128
TASKS = ("niah", "trace", "before", "top")
SPREAD_CAP = 8.0
NORM_GUARD = 1e-3
TINY = 2.0**-126
SHORTEST_RUN = 512


def bf16(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16 and back."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


# ---- Model ----


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    dtypes = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(raw[begin:end], dtypes[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).astype(np.float32)
    return tensors


class Llama:
    """The parts of a Llama in float32; hidden states are [tokens, hidden]."""

    def __init__(self, folder: pathlib.Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.w = read_safetensors(folder / "model.safetensors")
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.group = self.heads // self.kv_heads
        self.head_dim = config["head_dim"]
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.eps = config["rms_norm_eps"]
        theta = config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * self.w[name]

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x: [tokens, heads, head_dim]; the two halves of a head are the pairs' parts."""
        angles = positions[:, None] * self.frequencies  # float64
        cos = np.cos(angles).astype(np.float32)[:, None]
        sin = np.sin(angles).astype(np.float32)[:, None]
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def qkv(
        self, layer: int, x: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> q [tokens, heads, D], k and v [kv_heads, tokens, D], rotated."""
        prefix = f"model.layers.{layer}."
        h = self.norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            (h @ self.w[f"{prefix}self_attn.{p}_proj.weight"].T).reshape(
                len(x), -1, self.head_dim
            )
            for p in "qkv"
        )
        k = np.ascontiguousarray(self.rotate(k, positions).swapaxes(0, 1))
        return self.rotate(q, positions), k, np.ascontiguousarray(v.swapaxes(0, 1))

    def after_attention(self, layer: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        """out: [tokens, heads, D]."""
        prefix = f"model.layers.{layer}."
        x = x + out.reshape(len(x), -1) @ self.w[prefix + "self_attn.o_proj.weight"].T
        h = self.norm(x, prefix + "post_attention_layernorm.weight")
        gate = h @ self.w[prefix + "mlp.gate_proj.weight"].T
        up = h @ self.w[prefix + "mlp.up_proj.weight"].T
        return x + (gate / (1.0 + np.exp(-gate)) * up) @ self.w[prefix + "mlp.down_proj.weight"].T

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self.w["model.embed_tokens.weight"][tokens]

    def logits(self, x: np.ndarray) -> np.ndarray:
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self.norm(x, "model.norm.weight") @ head.T


def causal_attention(model: Llama, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Dense prefill in blocks of queries."""
    out = np.empty_like(q)
    block = 256
    for begin in range(0, len(q), block):
        end = min(begin + block, len(q))
        hidden = np.triu(np.ones((end - begin, end), bool), begin + 1)
        for head in range(model.heads):
            kv = head // model.group
            logits = model.scale * (q[begin:end, head] @ k[kv, :end].T)
            logits[hidden] = -np.inf
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[begin:end, head] = weights @ v[kv, :end]
    return out


def prefill(model: Llama, tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """-> for each layer, k and v: [kv_heads, tokens, D]."""
    x = model.embed(tokens)
    kv = []
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x, np.arange(len(tokens)))
        kv.append((k, v))
        if layer + 1 < model.layers:
            x = model.after_attention(layer, x, causal_attention(model, q, k, v))
    return kv


# ---- Index ----


class Index(NamedTuple):
    """All clusters of one (layer, KV head), segment after segment."""

    assignment: np.ndarray  # [middle]
    size: np.ndarray  # [clusters]
    centroid: np.ndarray  # [clusters, D]
    mean_value: np.ndarray  # [clusters, D]
    variance: np.ndarray  # [clusters, D] after 4 bits
    spread: np.ndarray  # [clusters]


def group_mean(rows: np.ndarray, order: np.ndarray, starts: np.ndarray, size: np.ndarray):
    """Mean of the rows of each (non-empty) cluster, in float64; order sorts the rows by cluster."""
    return np.add.reduceat(rows[order].astype(np.float64), starts, 0) / size[:, None]


def kmeans(keys: np.ndarray, clusters: int, iterations: int) -> np.ndarray:
    """-> assignment [tokens] to 0..clusters-1; some may be empty."""
    x = (keys - keys.mean(0, dtype=np.float64)).astype(np.float32)
    centres = x[np.arange(clusters) * len(x) // clusters]
    for _ in range(iterations):
        assignment = np.empty(len(x), np.int64)
        half_norms = (centres * centres).sum(-1) / 2
        for begin in range(0, len(x), 4096):
            block = slice(begin, begin + 4096)
            assignment[block] = np.argmin(half_norms - x[block] @ centres.T, -1)
        order = np.argsort(assignment, kind="stable")
        members, starts, size = np.unique(
            assignment[order], return_index=True, return_counts=True
        )
        centres = centres.copy()
        centres[members] = group_mean(x, order, starts, size)
    return assignment


def summarise(keys: np.ndarray, values: np.ndarray, assignment: np.ndarray) -> Index:
    order = np.argsort(assignment, kind="stable")
    _, starts, number, size = np.unique(
        assignment[order], return_index=True, return_inverse=True, return_counts=True
    )
    dense = np.empty_like(assignment)
    dense[order] = number
    centroid = group_mean(keys, order, starts, size)
    mean_value = group_mean(values, order, starts, size)
    variance = group_mean((keys - centroid[dense]) ** 2, order, starts, size)
    spread = group_mean(((values - mean_value[dense]) ** 2).sum(-1)[:, None], order, starts, size)
    r = np.sqrt(variance).max(-1, keepdims=True)
    code = np.floor(15 * np.sqrt(variance) / np.where(r > 0, r, 1) + 0.5)  # half away from zero
    return Index(
        dense,
        size.astype(np.float32),
        centroid.astype(np.float32),
        mean_value.astype(np.float32),
        ((r * code / 15) ** 2).astype(np.float32),
        spread[:, 0].astype(np.float32),
    )


def segment_ranges(haystack: int, sink: int, window: int, segment: int) -> list[tuple[int, int]]:
    """Token ranges of the middle; they follow one another without gaps."""
    end = haystack - window
    cuts = list(range(segment, end, segment)) if segment else []
    if cuts and end - cuts[-1] < SHORTEST_RUN:
        cuts.pop()
    return list(zip([sink, *cuts], [*cuts, end]))


def build_index(
    keys: np.ndarray, values: np.ndarray, ranges: list[tuple[int, int]], tokens_per_cluster: int
) -> Index:
    """keys, values: [haystack, D]."""
    parts: list[Index] = []
    clusters = 0
    for begin, end in ranges:
        k, v = keys[begin:end], values[begin:end]
        part = summarise(k, v, kmeans(k, -(-(end - begin) // tokens_per_cluster), 10))
        parts.append(part._replace(assignment=part.assignment + clusters))
        clusters += len(part.size)
    return Index(*(np.concatenate(field) for field in zip(*parts)))


# ---- Policies ----


class Scores(NamedTuple):
    """What selection sees of T queries of one KV head; g is the group."""

    log_mass: np.ndarray  # [T, g, clusters] in the policy's order of estimate
    first_order: np.ndarray  # [T, g, clusters]
    d2: np.ndarray  # [T, g, clusters]
    zone: np.ndarray  # [T, g, zone tokens] logits, -inf where not visible
    zone_values: np.ndarray  # [zone tokens, D]
    index: Index


def descending(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, -1, kind="stable")


def prefix_mask(order: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[T, clusters]: the first count [T] of each row's order."""
    mask = np.empty(order.shape, bool)
    ranks = np.arange(order.shape[-1])
    np.put_along_axis(mask, order, ranks < count[:, None], -1)
    return mask


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp((x - x.max(-1, keepdims=True)).astype(np.float64))
    return weights / weights.sum(-1, keepdims=True)


def fraction_count(fraction: float, count: int) -> int:
    if fraction <= 0:
        return 0
    return min(max(math.ceil(fraction * count * (1 - 1e-9)), 1), count)


class Policy(NamedTuple):
    name: str
    second_order: bool
    select: Callable[[Scores], tuple[np.ndarray, np.ndarray]]  # exact, covered: [T, clusters]


def everything(s: Scores, value: bool) -> np.ndarray:
    return np.full((s.d2.shape[0], s.d2.shape[2]), value)


def select_top_k(s: Scores, exact: float, estimated: float) -> tuple[np.ndarray, np.ndarray]:
    order = descending(softmax(s.log_mass).mean(1))
    rows, count = order.shape
    first = fraction_count(exact, count)
    both = min(first + fraction_count(estimated, count), count)
    return (
        prefix_mask(order, np.full(rows, first)),
        prefix_mask(order, np.full(rows, both)),
    )


def select_double_p(s: Scores, p1: float, p2: float) -> tuple[np.ndarray, np.ndarray]:
    importance = softmax(s.log_mass).mean(1)
    order = descending(importance)
    cumulative = np.cumsum(np.take_along_axis(importance, order, -1), -1)
    count = order.shape[-1]

    def upto(p: float) -> np.ndarray:
        reached = np.minimum((cumulative < p).sum(-1) + 1, count)
        return prefix_mask(order, reached if p < 1 else np.full_like(reached, count))

    return upto(p2), upto(p1)


def denominators(s: Scores, lse: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """max(|o|, guard, tiny) [T, g] for a log mass and output norm [T, g]."""
    square = np.exp(s.log_mass - lse[..., None]) @ (s.index.mean_value**2).sum(-1)
    square += np.exp(s.zone - lse[..., None]) @ (s.zone_values**2).sum(-1)
    return np.maximum(np.maximum(norm, NORM_GUARD * np.sqrt(square)), TINY)


def cluster_errors(s: Scores, lse: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """e_i [T, g, clusters]."""
    deviation = np.sqrt(np.expm1(np.minimum(s.d2, SPREAD_CAP))) * np.sqrt(s.index.spread)
    mass = np.exp(s.log_mass - lse[..., None])
    return (mass * deviation / denominators(s, lse, norm)[..., None]).astype(np.float64)


def select_error_target(
    s: Scores, tolerance: float, floor: float
) -> tuple[np.ndarray, np.ndarray]:
    if tolerance == 0:
        return everything(s, True), everything(s, True)
    out, lse = combine((s.zone, s.zone_values), (s.log_mass, s.index.mean_value))
    squares = (cluster_errors(s, lse, np.linalg.norm(out, axis=-1)) ** 2).mean(1)
    order = descending(squares)
    ascending = np.take_along_axis(squares, order, -1)[:, ::-1]
    remainder = np.cumsum(ascending, -1)[:, ::-1]  # of rank r and all below it
    exact = prefix_mask(order, (remainder > tolerance**2).sum(-1))

    order = descending(softmax(s.first_order + 2 * np.sqrt(s.d2)).mean(1))
    kept = fraction_count(floor, order.shape[-1])
    exact |= prefix_mask(order, np.full(len(order), kept))
    return exact, everything(s, True)


def make_policy(text: str) -> Policy:
    """NAME[:NUMBER[:NUMBER]][:first|:second]: the numbers as the selectors take them."""
    name, *rest = text.split(":")
    orders = [part for part in rest if part in ("first", "second")]
    numbers = [float(part) for part in rest if part not in ("first", "second")]
    second = orders[0] == "second" if orders else name == "error-target"
    selectors: dict[str, Callable[..., Any]] = {
        "dense": lambda s: (everything(s, True), everything(s, True)),
        "streaming": lambda s: (everything(s, False), everything(s, False)),
        "clusters-top-k": lambda s, a=0.018, b=0.232: select_top_k(s, a, b),
        "double-p": lambda s, p1=0.95, p2=0.7: select_double_p(s, p1, p2),
        "error-target": lambda s, t=0.2, f=0.01: select_error_target(s, t, f),
    }
    if name not in selectors:
        raise SystemExit(f"unknown policy {name!r}: one of {', '.join(selectors)}")
    return Policy(text, second, lambda s: selectors[name](s, *numbers))


# ---- Attention by a policy ----


def combine(*parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Merges (logits [T, g, n], values [n, D]) -> out [T, g, D], lse [T, g]."""
    maximum = np.max([logits.max(-1) for logits, _ in parts], 0)
    mass = 0.0
    out = 0.0
    for logits, values in parts:
        weights = np.exp(logits - maximum[..., None])
        mass = mass + weights.sum(-1)
        out = out + weights @ values
    return out / mass[..., None], maximum + np.log(mass)


class Attended(NamedTuple):
    out: np.ndarray  # [T, g, D]
    dense: np.ndarray  # [T, g, D]
    read: np.ndarray  # [T] share of the middle
    predicted: np.ndarray  # [T, g]


def attend(
    policy: Policy,
    scale: float,
    q: np.ndarray,
    zone: tuple[np.ndarray, np.ndarray, np.ndarray],
    middle: tuple[np.ndarray, np.ndarray],
    index: Index,
) -> Attended:
    """q [T, g, D]; zone: keys, values [n, D], visible [T, n]; middle: keys, values [m, D]."""
    zone_keys, zone_values, visible = zone
    zone_logits = np.where(visible[:, None], scale * (q @ zone_keys.T), -np.inf)
    middle_logits = scale * (q @ middle[0].T)
    d2 = scale * scale * ((q * q) @ index.variance.T)
    first = scale * (q @ index.centroid.T) + np.log(index.size)
    log_mass = first + np.minimum(d2, SPREAD_CAP) / 2 if policy.second_order else first
    s = Scores(log_mass, first, d2, zone_logits, zone_values, index)

    exact, covered = policy.select(s)
    estimated = covered & ~exact
    token_exact = exact[:, index.assignment]
    out, lse = combine(
        (zone_logits, zone_values),
        (np.where(token_exact[:, None], middle_logits, -np.inf), middle[1]),
        (np.where(estimated[:, None], log_mass, -np.inf), index.mean_value),
    )
    dense, _ = combine((zone_logits, zone_values), (middle_logits, middle[1]))
    errors = cluster_errors(s, lse, np.linalg.norm(out, axis=-1)) if estimated.any() else d2
    predicted = np.sqrt(((errors * estimated[:, None]) ** 2).sum(-1))
    return Attended(out, dense, token_exact.mean(-1), predicted)


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
        int(i) for task in range(len(TASKS)) for i in np.flatnonzero(task_of == task)[: args.limit]
    ]

    tallies: dict[tuple[str, str], Tally] = {}
    for number, sequence in enumerate(chosen):
        started = time.monotonic()
        tokens, mask = all_tokens[sequence], masks[sequence]
        kv = [(round_kv(k), round_kv(v)) for k, v in prefill(model, tokens[:haystack])]
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
            whole = policy.name in ("dense", "streaming")  # these read no index
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
