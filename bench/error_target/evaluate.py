# SPDX-License-Identifier: Apache-2.0
"""Sequences through a model with attention answered by variants of error-target."""

from __future__ import annotations

import pathlib
import sys
import time

import numpy as np
import torch
from model import Llama, prefill
from torch import Tensor

QUESTION_TOKENS = 128
TASKS = ("niah", "trace", "before", "top")


def load_sequences(path: pathlib.Path, length: int, limit: int, wanted: tuple[str, ...] = TASKS
                   ) -> list[tuple[str, int, np.ndarray, np.ndarray]]:
    """-> (task, number, tokens, answer mask) of `limit` sequences of each wanted task."""
    data = np.load(path)
    tasks = data[f"task_{length}"]
    chosen = [int(i) for t in range(4) if TASKS[t] in wanted
              for i in np.flatnonzero(tasks == t)[:limit]]
    return [
        (TASKS[tasks[i]], i, data[f"tokens_{length}"][i].astype(np.int64),
         data[f"answer_mask_{length}"][i])
        for i in chosen
    ]


def cached_prefill(model: Llama, cache: pathlib.Path | None, key: str, tokens: Tensor):
    """The haystack's KV, from the folder `cache` if it was made before."""
    if cache is None:
        return prefill(model, tokens)
    path = cache / f"{key}.pt"
    if path.exists():
        return torch.load(path, map_location=model.device)
    started = time.monotonic()
    kv = prefill(model, tokens)
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(kv, path)
    print(f"prefilled {key} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return kv
