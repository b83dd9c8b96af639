# SPDX-License-Identifier: Apache-2.0
"""Clusters of the middle and what an index keeps of each; all KV heads of a layer at once."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

ITERATIONS = 10
TOKENS_PER_CLUSTER = 16


def segment_ranges(middle_end: int, sink: int, segment: int) -> list[tuple[int, int]]:
    """Token ranges of the middle's segments: runs [i * segment, (i + 1) * segment) less zones."""
    cuts = list(range(segment, middle_end, segment))
    if cuts and middle_end - cuts[-1] < 512:
        cuts.pop()
    return list(zip([sink, *cuts], [*cuts, middle_end]))


def kmeans(x: Tensor, clusters: int, split: float = 0.0) -> Tensor:
    """x [tokens, d] -> assignment [tokens] to 0..clusters-1; some may be empty.

    split: this share of the clusters is made half way, out of those with the greatest sums of
    squares: each gives its farthest member a cluster.
    """
    x = x - x.mean(0)
    tokens = len(x)
    late = int(split * clusters)
    first = clusters - late
    centres = x[torch.arange(first, device=x.device) * tokens // first]
    assignment = torch.zeros(tokens, dtype=torch.long, device=x.device)
    for iteration in range(ITERATIONS):
        if late and iteration == ITERATIONS // 2:
            far = ((x - centres[assignment]) ** 2).sum(-1)
            sums = torch.zeros(first, device=x.device).index_add_(0, assignment, far)
            worst = sums.topk(late).indices
            own = torch.where(assignment[None] == worst[:, None], far[None], -1.0)
            centres = torch.cat([centres, x[own.argmax(-1)]])
            first = clusters
        half_norms = (centres * centres).sum(-1) / 2
        for begin in range(0, tokens, 4096):
            block = slice(begin, begin + 4096)
            assignment[block] = (half_norms - x[block] @ centres.T).argmin(-1)
        count = torch.bincount(assignment, minlength=len(centres))
        sums = torch.zeros_like(centres).index_add_(0, assignment, x)
        centres = torch.where(count[:, None] > 0, sums / count.clamp(min=1)[:, None], centres)
    return assignment


@dataclasses.dataclass
class Clustering:
    """Which cluster a token of the middle is in; heads are padded with empty clusters."""

    assignment: Tensor  # [H, n], numbered over the segments
    size: Tensor  # [H, C] float; 0: padding
    segment: Tensor  # [H, C] number of the segment
    segments: int

    def sums(self, rows: Tensor) -> Tensor:
        """rows [H, n, d] -> [H, C, d]."""
        out = rows.new_zeros(*self.size.shape, rows.shape[-1])
        return out.scatter_add_(1, self.assignment[..., None].expand_as(rows), rows)

    def means(self, rows: Tensor) -> Tensor:
        return self.sums(rows) / self.size.clamp(min=1)[..., None]

    def members(self, table: Tensor) -> Tensor:
        """table [H, C, d] -> [H, n, d]: each token's cluster's row."""
        index = self.assignment[..., None].expand(-1, -1, table.shape[-1])
        return table.gather(1, index)

    def logit_sums(self, x: Tensor) -> Tensor:
        """x [H, m, n] -> [H, m, C]: sums over each cluster's tokens."""
        out = x.new_zeros(x.shape[0], x.shape[1], self.size.shape[1])
        return out.scatter_add_(2, self.assignment[:, None].expand_as(x), x)


def cluster(features: Tensor, ranges: list[tuple[int, int]], tokens_per_cluster: int,
            split: float = 0.0) -> Clustering:
    """features [H, n, d] over the middle; ranges relative to it."""
    heads = []
    for x in features:
        assignment, size, segment = [], [], []
        for number, (begin, end) in enumerate(ranges):
            a = kmeans(x[begin:end], -(-(end - begin) // tokens_per_cluster), split)
            _, a, counts = torch.unique(a, return_inverse=True, return_counts=True)
            assignment.append(a + sum(len(s) for s in size))
            size.append(counts)
            segment.append(torch.full_like(counts, number))
        heads.append((torch.cat(assignment), torch.cat(size).float(), torch.cat(segment)))
    most = max(len(size) for _, size, _ in heads)

    def pad(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, most - len(t)))

    return Clustering(
        torch.stack([h[0] for h in heads]),
        torch.stack([pad(h[1]) for h in heads]),
        torch.stack([pad(h[2]) for h in heads]),
        len(ranges),
    )


def quantise_deviation(variance: Tensor, bits: int) -> Tensor:
    """Standard deviations in `bits` bits of the cluster's greatest; back to variances."""
    if bits == 0:
        return variance
    levels = 2**bits - 1
    deviation = variance.clamp(min=0).sqrt()
    top = deviation.amax(-1, keepdim=True)
    code = (levels * deviation / top.clamp(min=1e-30) + 0.5).floor()
    return (top * code / levels) ** 2


def quantise_rows(rows: Tensor, bits: int) -> Tensor:
    """Signed integers of `bits` bits with one scale a row."""
    levels = 2 ** (bits - 1) - 1
    top = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (rows * levels / top).round() * top / levels
