# SPDX-License-Identifier: Apache-2.0
"""Ordinary use of a live server, for as long as asked, with every answer checked.

    python tests/python/soak.py --minutes 60 [--seed 1]

Sequences of random lengths are opened, uploaded, decoded, forked, truncated and closed. Each decode
step's dense answer is compared with the oracle's over the caller's own copy of the history, and
estimated ones must be finite. At the end everything is closed: the server must then hold no
sequence, and its resident memory, after a first third for warming up, must not have grown by more
than a tenth and 32 MiB. test_soak.py runs a short form.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import time

import numpy as np

import attnd
import live_server
import oracle
from cases import SHAPE

MODEL = attnd.Model("soak", SHAPE)
SEQUENCES = 6
POLICIES = ("streaming", "clusters-top-k", "double-p", "error-target")
TOLERANCE = 1e-4


@dataclasses.dataclass
class Copy:
    """What the caller knows of a sequence: each layer's keys and values, [tokens, heads, dim]."""

    number: int
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def tokens(self) -> int:
        return len(self.keys[0])

    def cut(self, number: int, length: int) -> Copy:
        return Copy(number, [k[:length] for k in self.keys], [v[:length] for v in self.values])


def dense(copy: Copy, layer: int, q: np.ndarray) -> np.ndarray:
    """What the newest token's queries must get: [1, query_heads, head_dim]."""
    keys, values = copy.keys[layer], copy.values[layer]
    return oracle.attention(q, keys, values, SHAPE.head_dim**-0.5, len(keys))[0]


class Soak:
    def __init__(self, client: attnd.Client, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.client = client
        self.copies: list[Copy] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.worst = 0.0

    def normal(self, tokens: int, heads: int) -> np.ndarray:
        return self.rng.standard_normal((tokens, heads, SHAPE.head_dim), dtype=np.float32)

    def open(self) -> None:
        number = self.client.open_sequence(MODEL, policy="dense").sequence_id
        tokens = int(self.rng.integers(1, 4000))
        layers = range(SHAPE.layers)
        copy = Copy(
            number,
            [self.normal(tokens, SHAPE.kv_heads) for _ in layers],
            [self.normal(tokens, SHAPE.kv_heads) for _ in layers],
        )
        chunks = attnd.layer_chunks(list(zip(copy.keys, copy.values)))
        self.client.append_kv(number, chunks, prefill_complete=bool(self.rng.integers(2)))
        self.copies.append(copy)

    def decode(self, copy: Copy) -> None:
        # A stream of its own: its leases end with it, so that others may write afterwards.
        with self.client.decode_session() as session:
            for _ in range(int(self.rng.integers(1, 20))):
                for layer in range(SHAPE.layers):
                    position = copy.tokens if layer == 0 else copy.tokens - 1
                    q, k, v = (
                        self.normal(1, h)
                        for h in (SHAPE.query_heads, SHAPE.kv_heads, SHAPE.kv_heads)
                    )
                    result = session.step(
                        layer, [attnd.Row(copy.number, position=position)], q, k, v
                    )
                    copy.keys[layer] = np.concatenate([copy.keys[layer], k])
                    copy.values[layer] = np.concatenate([copy.values[layer], v])
                    self.check(dense(copy, layer, q), result.out)
                    row = attnd.Row(
                        copy.number,
                        position=position + 1,
                        query_only=True,
                        policy=str(self.rng.choice(POLICIES)),
                    )
                    assert np.isfinite(session.step(layer, [row], q).out).all()

    def check(self, expected: np.ndarray, got: np.ndarray) -> None:
        error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        self.worst = max(self.worst, error)
        assert error < TOLERANCE, f"a dense answer is off by {error}"

    def fork(self, copy: Copy) -> None:
        length = int(self.rng.integers(0, copy.tokens + 1))
        self.copies.append(copy.cut(self.client.fork_sequence(copy.number, length=length), length))

    def truncate(self, copy: Copy) -> None:
        length = int(self.rng.integers(0, copy.tokens + 1))
        self.client.truncate_sequence(copy.number, length)
        self.copies[self.copies.index(copy)] = copy.cut(copy.number, length)

    def close(self, copy: Copy) -> None:
        self.client.close_sequence(copy.number)
        self.copies.remove(copy)

    def step(self) -> None:
        if not self.copies:
            action = "open"
        else:
            full = len(self.copies) >= SEQUENCES
            action = str(
                self.rng.choice(
                    ["decode", "truncate", "close"] + ([] if full else ["open", "fork"]),
                    p=[0.6, 0.15, 0.25] if full else [0.5, 0.1, 0.05, 0.2, 0.15],
                )
            )
        self.done[action] += 1
        if action == "open":
            self.open()
        else:
            copy = self.copies[int(self.rng.integers(len(self.copies)))]
            getattr(self, action)(copy)

    def finish(self) -> None:
        while self.copies:
            self.close(self.copies[0])
        assert not list(self.client.list_sequences())


def run(seconds: float, seed: int) -> Soak:
    """Starts the built server, soaks it, and checks what it holds afterwards."""
    flags = ("--memory-budget-bytes=268435456", "--segment-tokens=1024")
    with live_server.running(*flags) as (target, process):
        with attnd.Client(target) as client:
            soak = Soak(client, seed)
            early = late = 0
            start = time.monotonic()
            while (passed := time.monotonic() - start) < seconds:
                soak.step()
                late = live_server.status_bytes(process, "VmRSS")
                if passed < seconds / 3:
                    early = max(early, late)
            soak.finish()
        assert late <= 1.1 * early + (32 << 20), f"grew from {early} to {late} resident bytes"
        resident = f"resident {early >> 20} -> {late >> 20} MiB"
        print(f"{dict(soak.done)}; worst dense error {soak.worst:.1e}; {resident}")
    return soak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=20261121)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes} minutes")
    run(60 * arguments.minutes, arguments.seed)
