# SPDX-License-Identifier: Apache-2.0
"""Sequences with random contents, and what attention over them must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import attnd
import oracle

SHAPE = attnd.ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=32, dtype="fp32")


@dataclass
class Case:
    """KV of one sequence, one [layers, tokens, kv_heads, dim] array each for k and v, and queries
    for every token."""

    shape: attnd.ModelShape
    q: np.ndarray  # [layers, tokens, query_heads, head_dim] float32
    k: np.ndarray
    v: np.ndarray

    @staticmethod
    def random(tokens: int, shape: attnd.ModelShape = SHAPE, seed: int = 0) -> Case:
        rng = np.random.default_rng([seed, tokens])

        def normal(heads: int, dim: int) -> np.ndarray:
            return rng.standard_normal((shape.layers, tokens, heads, dim)).astype(np.float32)

        q = normal(shape.query_heads, shape.head_dim)
        k = normal(shape.kv_heads, shape.head_dim).astype(shape.dtype)
        if shape.latent:
            return Case(shape, q, k, k[..., : shape.value_elements])
        return Case(shape, q, k, normal(shape.kv_heads, shape.value_elements).astype(shape.dtype))

    @property
    def model(self) -> attnd.Model:
        return attnd.Model("test", self.shape)

    def sent(self, layer: int, tokens: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Keys and values of these tokens as they are sent: no values if the model is latent."""
        return self.k[layer, tokens], None if self.shape.latent else self.v[layer, tokens]

    def layers(self, tokens: slice) -> list[tuple[np.ndarray, np.ndarray | None]]:
        return [self.sent(layer, tokens) for layer in range(self.shape.layers)]

    def expected(
        self, layer: int, tokens: slice, q: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Dense causal attention of these tokens' queries: out and lse, float64."""
        scale = self.shape.softmax_scale or self.shape.head_dim**-0.5
        queries = self.q[layer, tokens] if q is None else q
        return oracle.attention(
            queries, self.k[layer, : tokens.stop], self.v[layer, : tokens.stop], scale, tokens.start
        )


def opened(
    client: attnd.Client,
    case: Case,
    tokens: int,
    *,
    complete: bool = True,
    policy: str = "dense",
    indexes: Sequence[str] | None = None,
) -> int:
    """A sequence that holds the case's first tokens."""
    sequence = client.open_sequence(case.model, policy=policy, indexes=indexes).sequence_id
    chunks = attnd.layer_chunks(case.layers(slice(0, tokens)), token_ids=range(tokens))
    appended = client.append_kv(sequence, chunks, prefill_complete=complete)
    assert appended.committed_tokens == tokens
    return sequence


def step(session, case, sequence, layer, tokens: slice, **options):
    """The step that decodes these tokens of one sequence."""
    row = attnd.Row(sequence, tokens.start, tokens.stop - tokens.start)
    k, v = case.sent(layer, tokens)
    return session.step(layer, [row], case.q[layer, tokens], k, v, **options)


def assert_near(result, expected, tolerance: float = 2e-5) -> None:
    """A result equals (out, lse): tolerance is absolute and relative, for values of about 1."""
    out, lse = expected
    np.testing.assert_allclose(
        np.asarray(result.out, np.float64), out, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(result.lse, lse, rtol=max(1e-5, tolerance / 10), atol=1e-5)


def lengths(client: attnd.Client, sequence: int) -> tuple[int, ...]:
    """Tokens of each layer, as the server lists them."""
    return next(
        info.layer_tokens for info in client.list_sequences() if info.sequence_id == sequence
    )
