# SPDX-License-Identifier: Apache-2.0
"""Random histories of a cache: passes of some columns with padding anywhere, rows reordered,
repeated and selected, columns cropped, forks.

Method: every operation goes to a DynamicCache with local attention and to attnd's cache; the logits
of all columns that hold tokens must agree. A failure prints the seed and the history so far.
"""

from __future__ import annotations

import copy
import random

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.cache_utils import DynamicCache

from attnd.transformers.cache import _CROP_REMOVES
from transformers_models import TINY, attached, load, torch

ROWS_MAX = 5
OPERATIONS = 14
TOLERANCE = 2e-3


class History:
    """Two caches that are treated alike."""

    def __init__(self, model, cache, rng: random.Random) -> None:
        self.model = model
        self.rng = rng
        self.caches = {"sdpa": DynamicCache(), "attnd": cache}
        self.mask = torch.ones((rng.randint(1, 3), 0), dtype=torch.long)
        self.said: list[str] = []

    def run(self) -> None:
        self.go(self.rng.randint(1, 90))
        for _ in range(OPERATIONS):
            operation = self.rng.choice(
                [self.turn, self.turn, self.token, self.token, self.reorder, self.repeat]
                + [self.select, self.crop, self.fork]
            )
            operation()
        self.token()

    def go(self, columns: int) -> None:
        """A pass; some rows begin with padding, though not a row's only column."""
        rows = len(self.mask)
        new = torch.ones((rows, columns), dtype=torch.long)
        for row in range(rows):
            new[row, : self.rng.choice([0, 0, self.rng.randrange(columns)])] = 0
        self.said.append(f"pass {new.sum(1).tolist()} of {columns}")
        self.mask = torch.cat([self.mask, new], 1)
        seed = self.rng.randrange(1 << 30)
        ids = torch.randint(2, 300, new.shape, generator=torch.Generator().manual_seed(seed))
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -columns:]
        answers = {}
        for name, cache in self.caches.items():
            self.model.set_attn_implementation(name)
            with torch.no_grad():
                answers[name] = self.model(
                    ids, attention_mask=self.mask, position_ids=positions, past_key_values=cache
                ).logits[new.bool()]
        self.model.set_attn_implementation("attnd")
        difference = (answers["attnd"] - answers["sdpa"]).abs().max()
        assert difference < TOLERANCE, f"logits differ by {difference}"

    def turn(self) -> None:
        self.go(self.rng.randint(2, 40))

    def token(self) -> None:
        self.go(1)

    def choose(self, name: str, rows: list[int]) -> None:
        self.said.append(f"{name} {rows}")
        for cache in self.caches.values():
            getattr(cache, name)(torch.tensor(rows))
        self.mask = self.mask[rows]

    def reorder(self) -> None:
        rows = len(self.mask)
        self.choose("reorder_cache", [self.rng.randrange(rows) for _ in range(rows)])

    def select(self) -> None:
        rows = len(self.mask)
        self.choose(
            "batch_select_indices", sorted(self.rng.sample(range(rows), self.rng.randint(1, rows)))
        )

    def repeat(self) -> None:
        if 2 * len(self.mask) > ROWS_MAX:
            return
        self.said.append("repeat 2")
        for cache in self.caches.values():
            cache.batch_repeat_interleave(2)
        self.mask = self.mask.repeat_interleave(2, 0)

    def crop(self) -> None:
        """Leaves a column; a row may lose all its tokens."""
        drop = self.rng.randrange(min(20, self.mask.shape[1]))
        self.said.append(f"crop {drop}")
        length = self.mask.shape[1] - drop
        for cache in self.caches.values():
            cache.crop(-drop if _CROP_REMOVES or self.rng.random() < 0.5 and drop else length)
        self.mask = self.mask[:, :length]

    def fork(self) -> None:
        """The history goes on in the fork; the cache before it is left as it is and then closed."""
        self.said.append("fork")
        before = self.caches["attnd"]
        self.caches = {name: copy.deepcopy(cache) for name, cache in self.caches.items()}
        before.close()


@pytest.mark.parametrize("seed", range(10))
def test_a_random_history(attnd_target, seed):
    model = load(TINY[seed % len(TINY)])
    with attached(model, attnd_target) as attachment:
        history = History(model, attachment.new_cache(), random.Random(seed))
        try:
            history.run()
        except BaseException:
            print(f"seed {seed}: {'; '.join(history.said)}")
            raise
