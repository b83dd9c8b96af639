# SPDX-License-Identifier: Apache-2.0
"""The questions of a batch of examples through the model, attention answered by attnd."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnd import Client, NotFoundError, Policy, RowStats
from attnd.eval.evalset import QUESTION_TOKENS, Example
from attnd.eval.local import Progress, round_to
from attnd.eval.opening import Opening
from attnd.nano import LayerKv, Model, RemoteKv, upload
from attnd.tensors import Array


@dataclass
class RemoteRun:
    """What one example's questions brought. Lists have one entry a question token, inside one a
    layer.

    Attributes:
        best: [QUESTION_TOKENS] arg-max token after each question token.
        q, k, v, out: [n, heads, head_dim] of each layer, what attention was asked and answered; k
            and v rounded.
        stats: of each question token and layer.
    """

    best: list[int]
    q: list[list[Array]]
    k: list[list[Array]]
    v: list[list[Array]]
    out: list[list[Array]]
    stats: list[RowStats] = field(default_factory=list)

    def layer(self, name: str, layer: int) -> Array:
        """[QUESTION_TOKENS, heads, head_dim] of "q", "k", "v" or "out"."""
        return np.stack(getattr(self, name)[layer])

    @staticmethod
    def empty(layers: int) -> RemoteRun:
        def lists() -> list[list[Array]]:
            return [[] for _ in range(layers)]

        return RemoteRun([], lists(), lists(), lists(), lists())


def open_for(
    client: Client, model: Model, dtype: np.dtype[Any], policy: Policy, opening: Opening
) -> int:
    """An empty sequence over which the policy may be asked for."""
    opened = client.open_sequence(
        model.attnd_model(dtype), policy=policy, indexes=opening.indexes, tree=opening.tree
    )
    return opened.sequence_id


@dataclass(frozen=True)
class Haystack:
    """What is uploaded of an example.

    Attributes:
        layers: keys and values of each layer.
        observed: of each layer, the queries of the last tokens; None where nobody looks at them.
    """

    layers: Sequence[LayerKv]
    observed: Sequence[Array] | None = None


@contextmanager
def uploaded(
    client: Client,
    model: Model,
    batch: Sequence[tuple[Example, Haystack]],
    dtype: np.dtype[Any],
    policy: Policy,
    opening: Opening,
) -> Iterator[list[int]]:
    """Sequences with the haystacks, segmented, closed at the end. `policy` must have the widest
    window of all that will be asked for."""
    with ExitStack() as stack:
        sequences = []
        for example, haystack in batch:
            sequence = open_for(client, model, dtype, policy, opening)
            stack.callback(_close, client, sequence)
            upload(
                client,
                sequence,
                haystack.layers,
                dtype,
                latent=model.config.latent is not None,
                observed_queries=haystack.observed,
            )
            sequences.append(sequence)
        yield sequences


def _close(client: Client, sequence: int) -> None:
    try:
        client.close_sequence(sequence)
    except NotFoundError:
        pass  # the server was restarted, and another error says so


def run_policy(
    client: Client,
    model: Model,
    examples: Sequence[Example],
    sequences: Sequence[int],
    dtype: np.dtype[Any],
    policy: Policy,
    progress: Progress,
) -> tuple[list[RemoteRun], list[float]]:
    """The questions of a batch, one token of each example a step.

    Forks of the sequences are decoded, so that every policy begins with the same haystack.

    Returns:
        One run for each example, and the round-trip time of each Decode message in microseconds.
    """
    with ExitStack() as stack:
        forks = []
        for sequence in sequences:
            forks.append(client.fork_sequence(sequence))
            stack.callback(_close, client, forks[-1])
        session = stack.enter_context(client.decode_session())
        positions = [len(example.haystack) for example in examples]
        latent = model.config.latent is not None
        kv = RemoteKv(session, forks, positions, dtype, policy, latent, want_kv_head_errors=True)
        recorder = _Recorder(kv, [RemoteRun.empty(model.config.layers) for _ in examples], dtype)
        for index in range(QUESTION_TOKENS):
            tokens = np.array([example.questions[index] for example in examples])
            kv.begin_token(tokens.tolist())
            logits = model.forward(tokens, np.array(positions) + index, recorder.attend)
            kv.end_token()
            for run, best in zip(recorder.runs, logits.argmax(-1)):
                run.best.append(int(best))
            progress(1 / QUESTION_TOKENS)
        return recorder.runs, recorder.decode_us


class _Recorder:
    """Attention by attnd that keeps what was asked and answered."""

    def __init__(self, kv: RemoteKv, runs: list[RemoteRun], dtype: np.dtype[Any]) -> None:
        self._kv = kv
        self._dtype = dtype
        self.runs = runs
        self.decode_us: list[float] = []

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        began = time.perf_counter()
        out = self._kv.attend(layer, q, k, v)
        self.decode_us.append((time.perf_counter() - began) * 1e6)
        assert self._kv.last is not None
        k, v = round_to(k, self._dtype), round_to(v, self._dtype)
        for row, run in enumerate(self.runs):
            for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
                getattr(run, name)[layer].append(x[row])
            run.stats.append(self._kv.last.rows[row].stats)
        return out
