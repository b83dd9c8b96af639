# SPDX-License-Identifier: Apache-2.0
"""One layer's question tokens against the zones and the middle of a haystack."""

from __future__ import annotations

import clusters
import torch
from clusters import Clustering
from torch import Tensor

SINK = 4
WINDOW = 64


class Haystack:
    """One layer's KV of one sequence, its clusterings and what indexes keep; built when asked."""

    def __init__(self, k: Tensor, v: Tensor, observed: Tensor, scale: float, segment: int) -> None:
        """k, v [H, tokens, D]; observed [heads, queries, D]: the prefill's last queries."""
        self.scale = scale
        self.zone_k = torch.cat([k[:, :SINK], k[:, -WINDOW:]], 1)
        self.zone_v = torch.cat([v[:, :SINK], v[:, -WINDOW:]], 1)
        self.k = k[:, SINK:-WINDOW].contiguous()
        self.v = v[:, SINK:-WINDOW].contiguous()
        self.observed = observed.reshape(len(k), -1, k.shape[-1])  # [H, group * queries, D]
        middle_end = k.shape[1] - WINDOW
        ranges = clusters.segment_ranges(middle_end, SINK, segment or middle_end)
        self.ranges = [(b - SINK, e - SINK) for b, e in ranges]
        self.made: dict = {}

    def once(self, key, make):
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


class Step:
    """The question tokens' queries of one layer; rows are [H, group * T]."""

    def __init__(self, hay: Haystack, q: Tensor, k: Tensor, v: Tensor, stride: int = 1) -> None:
        """q [heads, T, D], k and v [H, T, D] of the questions; every stride-th is asked."""
        self.hay = hay
        new = q.shape[1]
        q = q[:, ::stride]
        heads, self.tokens, d = q.shape
        self.kv_heads = len(k)
        self.group = heads // self.kv_heads
        self.q = q.reshape(self.kv_heads, -1, d)
        zone_k = torch.cat([hay.zone_k, k], 1)
        self.zone_v = torch.cat([hay.zone_v, v], 1)
        old = hay.zone_k.shape[1]
        visible = torch.ones(new, old + new, dtype=torch.bool, device=q.device)
        visible[:, old:] = visible[:, old:].tril()
        visible = visible[::stride]
        zone = hay.scale * self.q @ zone_k.transpose(1, 2)
        self.zone = zone.masked_fill(~visible.repeat(self.group, 1), -torch.inf)
        self.logits = hay.scale * self.q @ hay.k.transpose(1, 2)  # [H, rows, n]
        self.top = torch.maximum(self.zone.amax(-1), self.logits.amax(-1))
        zone_w = (self.zone - self.top[..., None]).exp()
        self.zone_sum = zone_w.sum(-1)
        self.zone_out = zone_w @ self.zone_v
        self.zone_moment = (zone_w @ (self.zone_v**2).sum(-1, keepdim=True))[..., 0]
        self.weights = (self.logits - self.top[..., None]).exp()
        self.mass = self.zone_sum + self.weights.sum(-1)
        self.dense = (self.zone_out + self.weights @ hay.v) / self.mass[..., None]
        self.dense_norm = self.dense.norm(dim=-1)

    def true_mass(self, clustering: Clustering) -> Tensor:
        """Exact mass of each cluster over e^top: [H, rows, C]."""
        return clustering.logit_sums(self.weights)

    def true_variance(self, clustering: Clustering) -> Tensor:
        """Exact variance of each cluster's logits: [H, rows, C]."""
        size = clustering.size.clamp(min=1)[:, None]
        mean = clustering.logit_sums(self.logits) / size
        wide = mean.gather(2, clustering.assignment[:, None].expand_as(self.logits))
        return clustering.logit_sums((self.logits - wide) ** 2) / size

    def over_group(self, x: Tensor) -> Tensor:
        """[H, group * T, ...] -> mean over the group [H, T, ...]."""
        return x.view(self.kv_heads, self.group, self.tokens, *x.shape[2:]).mean(1)

    def per_row(self, x: Tensor) -> Tensor:
        """[H, T, ...] -> [H, group * T, ...]."""
        return x.repeat(1, self.group, *([1] * (x.dim() - 2)))

    def relative_error(self, out: Tensor) -> Tensor:
        return (out - self.dense).norm(dim=-1) / self.dense_norm
