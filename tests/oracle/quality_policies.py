# SPDX-License-Identifier: Apache-2.0
"""The policies of quality_reference.py, those of clusters and Quest: index, selection and attention
of one KV head."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import numpy as np

SPREAD_CAP = 8.0
NORM_GUARD = 1e-3
TINY = 2.0**-126
SHORTEST_RUN = 512
BLOCK_TOKENS = 16


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


class Blocks(NamedTuple):
    """How quest cuts and chooses."""

    budget: int  # tokens
    # Whether blocks are cut at multiples of BLOCK_TOKENS of the tokens' own numbers, those that are
    # not full read besides the budget; else from the sink's end on, the last one as any other.
    aligned: bool


class Policy(NamedTuple):
    name: str
    second_order: bool
    select: Callable[[Scores], tuple[np.ndarray, np.ndarray]]  # exact, covered: [T, clusters]
    blocks: Blocks | None = None  # instead of a selection of clusters


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
    """NAME[:NUMBER[:NUMBER]][:first|:second]: the numbers as the selectors take them; or
    quest:BUDGET[:aligned|:from-sink]."""
    name, *rest = text.split(":")
    if name == "quest":
        blocks = Blocks(int(rest[0]), rest[1:] != ["from-sink"])
        return Policy(text, False, lambda s: (everything(s, False),) * 2, blocks)
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


def choose_blocks(blocks: Blocks, q: np.ndarray, keys: np.ndarray, sink: int) -> np.ndarray:
    """Of the middle's keys [m, D], which are read for q [T, g, D]: [T, m]."""
    block = (np.arange(len(keys)) + (sink if blocks.aligned else 0)) // BLOCK_TOKENS
    starts = np.flatnonzero(np.diff(block, prepend=-1))
    size = np.diff(starts, append=len(keys))
    block = np.repeat(np.arange(len(starts)), size)
    greatest, least = np.maximum.reduceat(keys, starts), np.minimum.reduceat(keys, starts)
    bound = (np.maximum(q, 0) @ greatest.T + np.minimum(q, 0) @ least.T).sum(1)
    always = (size < BLOCK_TOKENS) & blocks.aligned
    order = descending(np.where(always, -np.inf, bound))
    count = min(-(-blocks.budget // BLOCK_TOKENS), int((~always).sum()))
    return (prefix_mask(order, np.full(len(q), count)) | always)[:, block]


def attend(
    policy: Policy,
    scale: float,
    q: np.ndarray,
    zone: tuple[np.ndarray, np.ndarray, np.ndarray],
    middle: tuple[np.ndarray, np.ndarray],
    index: Index,
    sink: int,
) -> Attended:
    """q [T, g, D]; zone: keys, values [n, D], visible [T, n]; middle: keys, values [m, D], which
    begins at token `sink`."""
    zone_keys, zone_values, visible = zone
    zone_logits = np.where(visible[:, None], scale * (q @ zone_keys.T), -np.inf)
    middle_logits = scale * (q @ middle[0].T)
    d2 = scale * scale * ((q * q) @ index.variance.T)
    first = scale * (q @ index.centroid.T) + np.log(index.size)
    log_mass = first + np.minimum(d2, SPREAD_CAP) / 2 if policy.second_order else first
    s = Scores(log_mass, first, d2, zone_logits, zone_values, index)

    exact, covered = policy.select(s)
    estimated = covered & ~exact
    if policy.blocks is None:
        token_exact = exact[:, index.assignment]
    else:
        token_exact = choose_blocks(policy.blocks, q, middle[0], sink)
    out, lse = combine(
        (zone_logits, zone_values),
        (np.where(token_exact[:, None], middle_logits, -np.inf), middle[1]),
        (np.where(estimated[:, None], log_mass, -np.inf), index.mean_value),
    )
    dense, _ = combine((zone_logits, zone_values), (middle_logits, middle[1]))
    errors = cluster_errors(s, lse, np.linalg.norm(out, axis=-1)) if estimated.any() else d2
    predicted = np.sqrt(((errors * estimated[:, None]) ** 2).sum(-1))
    return Attended(out, dense, token_exact.mean(-1), predicted)
