# SPDX-License-Identifier: Apache-2.0
"""What completing a head is worth: the error of its answers with and without, on held-out texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnd.completion.capture import Captured
from attnd.completion.maps import ModelMaps, student_logits


@dataclass(frozen=True)
class Zones:
    """Tokens that are always read exactly, and the share of all that is read."""

    sink: int
    window: int
    share: float

    def retrieved(self, tokens: int) -> int:
        """K of a query that sees so many."""
        wanted = -int(-self.share * tokens // 1)  # rounded up
        return max(0, wanted - self.sink - self.window)


@dataclass(frozen=True)
class Errors:
    """Mean relative error of a head's answers, each [layers * kv_heads, group].

    Attributes:
        alone: zones and the retrieved tokens, the rest dropped.
        completed: the rest by the maps.
    """

    alone: Tensor
    completed: Tensor


@torch.no_grad()
def measure(maps: ModelMaps, text: Captured, prefill: int, scale: float, zones: Zones) -> Errors:
    """Errors over the queries behind the prefill, which is the middle but for the zones. A query
    sees the tokens up to its own; the retrieved ones are those with the greatest mean over the
    group of each head's softmax over the middle."""
    heads, group, queries, dim = text.queries.shape
    tokens = text.keys.shape[1]
    middle = slice(zones.sink, prefill - zones.window)
    logits = scale * text.queries.flatten(1, 2) @ text.keys.mT  # [heads, group * queries, tokens]
    logits = logits.unflatten(1, (group, queries))
    positions = torch.arange(tokens, device=logits.device)
    seen = positions[None] <= positions[tokens - queries :, None]
    logits = logits.masked_fill(~seen, -torch.inf)

    weights = logits[..., middle].softmax(-1).mean(1)  # [heads, queries, middle]
    top = weights.topk(min(zones.retrieved(prefill), weights.shape[-1]), dim=-1).indices
    read = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, top, True)[:, None]

    log_queries = maps.query(text.queries.flatten(0, 1)).unflatten(0, (heads, group))
    log_keys = maps.key(text.keys[:, middle])
    student = student_logits(log_queries.flatten(1, 2), log_keys).unflatten(1, (group, queries))
    alone, completed = logits.clone(), logits.clone()
    alone[..., middle] = logits[..., middle].masked_fill(~read, -torch.inf)
    completed[..., middle] = torch.where(read, logits[..., middle], student)

    values = text.values[:, None]
    dense = logits.softmax(-1) @ values

    def error(answer: Tensor) -> Tensor:
        return ((answer - dense).norm(dim=-1) / dense.norm(dim=-1)).mean(-1)

    return Errors(error(alone.softmax(-1) @ values), error(completed.softmax(-1) @ values))
