# SPDX-License-Identifier: Apache-2.0
"""Attention answered by attnd, for :class:`attnd.nano.Model`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnd.client import Client
from attnd.session import DecodeSession
from attnd.nano.model import LayerKv
from attnd.policy import Policy
from attnd.requests import Row, layer_chunks
from attnd.results import AppendedKv, StepResult
from attnd.tensors import FP32, Array


def upload(
    client: Client,
    sequence_id: int,
    layers: Sequence[LayerKv],
    dtype: npt.DTypeLike,
    *,
    latent: bool = False,
    token_ids: Sequence[int] = (),
    observed_queries: Sequence[Array] | None = None,
    timeout_s: float | None = None,
) -> AppendedKv:
    """Sends a whole prompt's keys and values, float32 rounded to dtype, and has it segmented; None
    is no limit of time. latent: whether the sequence's model is, whose values are not sent.
    observed_queries: of each layer, those of the prompt's last tokens."""
    converted = ((k.astype(dtype), None if latent else v.astype(dtype)) for k, v in layers)
    chunks = layer_chunks(converted, token_ids=token_ids)
    return client.append_kv(
        sequence_id,
        chunks,
        prefill_complete=True,
        observed_queries=observed_queries,
        prompt_tokens=len(layers[0][0]) if layers else 0,
        timeout_s=timeout_s,
    )


class RemoteKv:
    """Sequences on a server that decode together, one token a step; attend() is an `Attend`.

    Attributes:
        last: the newest answer, with its statistics.
    """

    def __init__(
        self,
        session: DecodeSession,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        dtype: npt.DTypeLike = FP32,
        policy: Policy | str | None = None,
        latent: bool = False,
        want_kv_head_errors: bool = False,
    ) -> None:
        """positions: length of each sequence; dtype: that of the sequences' KV; policy: None is the
        sequences' own; latent: whether their model is, whose values are not sent;
        want_kv_head_errors: as Row's."""
        self._session = session
        self._sequence_ids = tuple(sequence_ids)
        self._positions = list(positions)
        self._dtype = dtype
        self._policy = policy
        self._latent = latent
        self._want_kv_head_errors = want_kv_head_errors
        self._rows: list[Row] = []
        self.last: StepResult | None = None
        self.begin_token()

    def begin_token(self, token_ids: Sequence[int] = ()) -> None:
        """Before each forward(): says which tokens come (optional)."""
        ids: Sequence[Sequence[int]] = [[token] for token in token_ids] or [()] * len(
            self._sequence_ids
        )
        self._rows = [
            Row(
                sequence,
                position,
                token_ids=tokens,
                policy=self._policy,
                want_kv_head_errors=self._want_kv_head_errors,
            )
            for sequence, position, tokens in zip(self._sequence_ids, self._positions, ids)
        ]

    def end_token(self) -> None:
        """After each forward()."""
        self._positions = [position + 1 for position in self._positions]

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """One token a sequence: q [sequences, query_heads, head_dim], k and v [sequences, kv_heads,
        head_dim or value_dim]."""
        self.last = self._session.step(
            layer,
            self._rows,
            q,
            k.astype(self._dtype),
            None if self._latent else v.astype(self._dtype),
            output_dtype=np.float32,
        )
        return self.last.out
