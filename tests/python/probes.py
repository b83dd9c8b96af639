# SPDX-License-Identifier: Apache-2.0
"""What the campaigns (crash.py, fuzz.py, soak.py) ask of a sequence, and what the answer must be.

A sequence is of a kind, which says what is built of its segments and so which policies can read it.
Some of these policies read every token when they are given the parameters below: their answer must
be dense attention's. The others leave tokens out or estimate them: theirs must be finite, and their
statistics must account for every token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import attnd
import oracle
from cases import Case

TOLERANCE = 2e-5


@dataclass(frozen=True)
class Kind:
    """What a sequence is opened with, and policies that can then read it."""

    indexes: tuple[str, ...] | None
    exact: tuple[str, ...]  # they read every token, or say in `missed_tokens` that they did not
    lossy: tuple[str, ...]
    policy: str = "dense"  # the sequence's own
    kept: tuple[str, ...] = ()  # lossy ones that need a keep-set, which no resumed sequence has

    @property
    def token_order(self) -> bool:
        return not set(self.indexes or ("clusters",)) & set(attnd.policy.CLUSTER_INDEXES)


_CLUSTERS_EXACT = (
    "dense",
    "clusters-top-k:exact=1,estimated=0",
    "double-p:p1=1,p2=1",
    "error-target:tolerance=0",
    "clusters-top-k:exact=1,estimated=0,on_miss=estimate",
    "double-p:p1=1,p2=1,on_miss=estimate",
)
_CLUSTERS_LOSSY = (
    "streaming",
    "clusters-top-k",
    "double-p",
    "error-target",
    "error-target:on_miss=estimate",
)
KINDS = (
    Kind(None, _CLUSTERS_EXACT, _CLUSTERS_LOSSY),
    Kind(
        ("blocks-16", "labels", "keys-4bit"),
        (
            "dense",
            "quest:budget=100%",
            "double-sparsity:budget=100%",
            "twilight:selector=full,p=1",
        ),
        (
            "streaming",
            "quest:budget=64",
            "double-sparsity:budget=64",
            "twilight:budget=30%",
            "twilight:selector=full",
        ),
    ),
    Kind(
        ("regression", "labels"),
        _CLUSTERS_EXACT,
        (*_CLUSTERS_LOSSY, "double-sparsity:budget=64"),
    ),
    Kind(("tree", "labels"), _CLUSTERS_EXACT, (*_CLUSTERS_LOSSY, "double-sparsity:budget=64")),
    Kind(
        ("blocks-64", "labels", "keys-4bit"),
        ("dense", "quest:block=64,budget=100%", "asynctls:blocks=1048576,budget=100%"),
        (
            "asynctls:blocks=4,budget=64",
            "quest:block=64,budget=64",
            "twilight:selector=asynctls,blocks=4,budget=30%",
        ),
    ),
    Kind(
        ("labels", "keys-4bit"),
        ("dense", "double-sparsity:budget=100%"),
        ("streaming", "double-sparsity:budget=64"),
        "snapkv:budget=64",
        ("snapkv:budget=64", "twilight:selector=snapkv,budget=64"),
    ),
    Kind(
        ("labels",),
        ("dense",),
        ("streaming", "double-sparsity:budget=64"),
        "ada-snapkv:budget=64",
        ("ada-snapkv:budget=64",),
    ),
)
# Of models that the server has feature maps for (soak.py).
COMPLETION = Kind(
    ("summary",),
    ("dense", "topk-completion:budget=100%"),
    ("topk-completion:budget=64", "topk-completion:budget=64,completion=off"),
)
OBSERVED = 16  # queries of a prompt's end, for keep-sets


def near(result: attnd.StepResult, expected: tuple[np.ndarray, np.ndarray]) -> bool:
    out, lse = expected
    return bool(
        np.allclose(np.asarray(result.out), out, rtol=TOLERANCE, atol=TOLERANCE)
        and np.allclose(np.asarray(result.lse), lse, rtol=TOLERANCE, atol=TOLERANCE)
    )


@dataclass
class Checked:
    """What was found of one answer, or of those of all layers."""

    fault: str = ""  # empty if nothing is wrong
    from_disk: int = 0  # tokens
    missed: int = 0  # tokens
    compared: bool = False  # with dense attention's answer, at least once


def fault_of(
    result: attnd.StepResult, tokens: int, shape: attnd.ModelShape, policy: str, *, exact: bool
) -> str:
    """What is wrong with the answer of a row of one query token, whatever its numbers; empty if
    nothing is. `tokens`: how many it attends to. `exact`: its policy reads all of them, or says in
    `missed_tokens` which it did not."""
    stats = result.rows[0].stats
    if not (np.isfinite(result.out).all() and np.isfinite(result.lse).all()):
        return "the answer is not finite"
    middle = stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens
    if stats.zone_tokens + middle != tokens * shape.kv_heads:
        return f"{stats.zone_tokens} and {middle} tokens are not all {tokens} of each head"
    if stats.missed_tokens and "on_miss=estimate" not in policy:
        return f"{stats.missed_tokens} tokens were missed by a policy that waits"
    if exact and stats.estimated_tokens + stats.dropped_tokens != stats.missed_tokens:
        left = f"{stats.estimated_tokens} estimated and {stats.dropped_tokens} dropped"
        return f"{left} tokens of a policy that reads all, {stats.missed_tokens} of them missed"
    if stats.missed_tokens > stats.estimated_tokens:
        return f"{stats.missed_tokens} missed tokens of {stats.estimated_tokens} estimated"
    if stats.missed_tokens and stats.missed_mass is None:
        return "tokens were missed, and nothing says of which mass"
    shares = (stats.covered_mass, stats.exact_mass, stats.missed_mass)
    if any(share is not None and not -1e-4 <= share <= 1 + 1e-4 for share in shares):
        return f"masses {shares} are no shares"
    errors = (stats.predicted_error_mean, stats.predicted_error_max)
    if any(error is not None and not (math.isfinite(error) and error >= 0) for error in errors):
        return f"errors of {errors} are predicted"
    return ""


def probe(
    session: attnd.DecodeSession,
    case: Case,
    sequence: int,
    layer: int,
    tokens: int,
    policy: str,
    *,
    exact: bool,
) -> Checked:
    """Asks under this policy what the case's next query sees in its first `tokens` tokens."""
    query = case.q[layer, tokens : tokens + 1]
    row = attnd.Row(sequence, tokens, query_only=True, policy=policy)
    result = session.step(layer, [row], query)
    stats = result.rows[0].stats
    checked = Checked("", stats.ssd_tokens, stats.missed_tokens)
    fault = fault_of(result, tokens, case.shape, policy, exact=exact)
    if not fault and exact and not stats.missed_tokens:
        checked.compared = True
        scale = case.shape.softmax_scale or case.shape.head_dim**-0.5
        keys, values = case.k[layer, :tokens], case.v[layer, :tokens]
        if not near(result, oracle.attention(query, keys, values, scale, tokens)):
            fault = "the answer is not dense attention's"
    checked.fault = f"{policy} over {tokens} tokens: {fault}" if fault else ""
    return checked


def decoded(
    session: attnd.DecodeSession,
    case: Case,
    sequence: int,
    tokens: int,
    policy: str = "dense",
    ids: tuple[int, ...] = (),
) -> Checked:
    """Decodes the case's token behind its first `tokens`, in every layer, under a policy that reads
    everything."""
    at = slice(tokens, tokens + 1)
    fault, checked = "", Checked()
    for layer in range(case.shape.layers):
        row = attnd.Row(sequence, tokens, token_ids=ids if layer == 0 else (), policy=policy)
        result = session.step(layer, [row], case.q[layer, at], *case.sent(layer, at))
        stats = result.rows[0].stats
        checked.from_disk += stats.ssd_tokens
        checked.missed += stats.missed_tokens
        fault = fault or fault_of(result, tokens + 1, case.shape, policy, exact=True)
        if not fault and not stats.missed_tokens:
            checked.compared = True
            if not near(result, case.expected(layer, at)):
                fault = "the answer is not dense attention's"
    checked.fault = f"{policy} at {tokens}: {fault}" if fault else ""
    return checked
