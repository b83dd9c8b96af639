# SPDX-License-Identifier: Apache-2.0
"""What a variant's index keeps of each cluster, and of a group of clusters."""

from __future__ import annotations

import dataclasses

import clusters
import torch
from attention import Haystack
from options import Variant
from torch import Tensor


@dataclasses.dataclass
class Index:
    """[H, C, ...] each, but for what a group has."""

    clustering: clusters.Clustering
    log_size: Tensor  # -inf: padding
    centroid: Tensor
    value: Tensor
    value_norm2: Tensor
    spread: Tensor  # mean squared residual of a value
    covariance_spread: Tensor | None
    group: Tensor | None = None  # [H, C]
    groups: int = 1
    variance: Tensor | None = None  # [H, C, D] in the basis
    query_basis: Tensor | None = None  # [H, groups, D, D]: q @ basis; None: channels
    slope: Tensor | None = None  # [H, groups, Dv, D] of coordinates
    gain: Tensor | None = None  # [H, C]
    own_value: list[Tensor] = dataclasses.field(default_factory=list)  # each [H, C, Dv]
    own_key: list[Tensor] = dataclasses.field(default_factory=list)  # each [H, C, D]


def root(s: Tensor, power: float) -> Tensor:
    """Symmetric positive matrices to a power, small eigenvalues lifted."""
    w, u = torch.linalg.eigh(s)
    w = torch.maximum(w, 1e-4 * w[..., -1:]).clamp(min=1e-12)
    return (u * w[..., None, :] ** power) @ u.transpose(-1, -2)


def query_moment(hay: Haystack) -> Tensor:
    q = hay.observed
    m = q.transpose(1, 2) @ q / q.shape[1]
    eye = torch.eye(m.shape[-1], device=m.device)
    return m + 1e-2 * m.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * eye


def features(hay: Haystack, metric: str) -> Tensor:
    """key; query: keys under the observed queries' metric; X+v:S: with values of share S."""
    base, *value = metric.split("+v:")
    x = hay.k if base == "key" else hay.k @ root(query_moment(hay), 0.5)
    if not value:
        return x
    share = float(value[0])

    def unit(rows: Tensor) -> Tensor:
        """Each segment's rows less their mean, over their root mean square length."""
        parts = []
        for b, e in hay.ranges:
            part = rows[:, b:e] - rows[:, b:e].mean(1, keepdim=True)
            length = (part**2).sum(-1).mean(1).sqrt().clamp(min=1e-30)
            parts.append(part / length[:, None, None])
        return torch.cat(parts, 1)

    return torch.cat([unit(x), share * unit(hay.v)], -1)


def quantised_centroids(hay: Haystack, c: clusters.Clustering, centroid: Tensor, bits: int
                        ) -> Tensor:
    """Codes are of what a centroid differs from its segment's mean key by."""
    mean = torch.stack([hay.k[:, b:e].mean(1) for b, e in hay.ranges], 1)  # [H, segments, D]
    own = mean.gather(1, c.segment[..., None].expand(-1, -1, mean.shape[-1]))
    return clusters.quantise_rows(centroid - own, bits) + own


class Builder:
    """The parts of indexes over one clustering of a haystack; each is made once."""

    def __init__(self, hay: Haystack, metric: str, tokens_per_cluster: int, split: float) -> None:
        self.hay, self.made = hay, {}
        self.c = clusters.cluster(features(hay, metric), hay.ranges, tokens_per_cluster, split)
        self.centroid, self.value = self.c.means(hay.k), self.c.means(hay.v)
        self.dk = hay.k - self.c.members(self.centroid)
        self.dv = hay.v - self.c.members(self.value)

    def once(self, key, make):
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def group(self, groups: int) -> Tensor:
        """[H, C]: which of segments * groups a cluster belongs to."""
        c = self.c
        if groups == 1:
            return c.segment
        out = torch.zeros_like(c.segment)
        for h in range(len(out)):
            for s in range(c.segments):
                own = (c.segment[h] == s) & (c.size[h] > 0)
                part = clusters.kmeans(self.centroid[h][own], groups)
                out[h, own] = s * groups + part
        return out

    def bases(self, kind: str, groups: int) -> tuple[Tensor, Tensor]:
        """-> [H, groups, D, D] for queries and for keys: q.k = (q @ first) . (k @ second)."""
        group = self.once(("group", groups), lambda: self.group(groups))
        token_group = group.gather(1, self.c.assignment)
        moment = query_moment(self.hay)
        first, second = [], []
        for h in range(len(group)):
            for g in range(groups * self.c.segments):
                x = self.dk[h, token_group[h] == g]
                s = x.T @ x / max(len(x), 1)
                s = s + 1e-6 * s.diagonal().mean().clamp(min=1e-12) * torch.eye(
                    s.shape[0], device=s.device)
                if kind == "pca":
                    u = torch.linalg.eigh(s)[1].flip(-1)
                    first.append(u)
                    second.append(u)
                else:
                    up, down = root(s, 0.5), root(s, -0.5)
                    u = torch.linalg.eigh(up @ moment[h] @ up)[1].flip(-1)
                    first.append(up @ u)
                    second.append(down @ u)
        shape = (len(group), groups * self.c.segments, *first[0].shape)
        return torch.stack(first).view(shape), torch.stack(second).view(shape)

    def coordinates(self, kind: str, groups: int) -> Tensor:
        """Members' deviations in the basis: [H, n, D]."""
        if kind == "channel":
            return self.dk
        _, second = self.once(("bases", kind, groups), lambda: self.bases(kind, groups))
        group = self.once(("group", groups), lambda: self.group(groups))
        token_group = group.gather(1, self.c.assignment)
        out = torch.zeros_like(self.dk)
        for g in range(groups * self.c.segments):
            own = (token_group == g)[..., None]
            out = torch.where(own, self.dk @ second[:, g], out)
        return out

    def variances(self, v: Variant) -> Tensor:
        y = self.once(("y", v.basis, v.groups), lambda: self.coordinates(v.basis, v.groups))
        w = self.once(("w", v.basis, v.groups), lambda: self.c.means(y**2))
        if not v.rank:
            return clusters.quantise_deviation(w, v.bits)
        rest = w[..., v.rank :].mean(-1, keepdim=True).expand_as(w[..., v.rank :])
        return torch.cat([clusters.quantise_deviation(w[..., : v.rank], v.bits), rest], -1)

    def slopes(self, kind: str, groups: int) -> Tensor:
        """[H, groups, Dv, D]: values' regression on coordinates, over a group's members."""
        y = self.once(("y", kind, groups), lambda: self.coordinates(kind, groups))
        group = self.once(("group", groups), lambda: self.group(groups))
        token_group = group.gather(1, self.c.assignment)
        out = []
        for g in range(groups * self.c.segments):
            x = y * (token_group == g)[..., None]
            xx = x.transpose(1, 2) @ x
            share = x.shape[-1] / (token_group == g).sum(1).clamp(min=1)
            ridge = share[:, None] * xx.diagonal(dim1=1, dim2=2)
            xx = xx + torch.diag_embed(ridge + 1e-9)
            out.append(torch.linalg.solve(xx, x.transpose(1, 2) @ self.dv).transpose(1, 2))
        return torch.stack(out, 1)

    def residual(self, v: Variant) -> Tensor:
        if not v.slope:
            return self.dv
        slope = self.once(("B", v.basis, v.groups), lambda: self.slopes(v.basis, v.groups))
        y = self.once(("y", v.basis, v.groups), lambda: self.coordinates(v.basis, v.groups))
        group = self.once(("group", v.groups), lambda: self.group(v.groups))
        token_group = group.gather(1, self.c.assignment)
        out = self.dv.clone()
        for g in range(v.groups * self.c.segments):
            own = (token_group == g)[..., None]
            out -= own * (y @ slope[:, g].transpose(1, 2))
        return out

    def cross(self, residual: Tensor) -> Tensor:
        """Covariance of values' residuals and keys of each cluster: [H, C, Dv, D]."""
        h, n, d = residual.shape
        count = self.c.size.shape[1]
        out = residual.new_zeros(h, count, d * self.dk.shape[-1])
        for i in range(h):
            for block in torch.arange(n, device=out.device).split(2048):
                rows = residual[i, block, :, None] * self.dk[i, block, None, :]
                out[i].index_add_(0, self.c.assignment[i, block], rows.flatten(1))
        out /= self.c.size.clamp(min=1)[..., None]
        return out.view(h, count, d, -1)

    def covariance_spread(self, v: Variant) -> Tensor:
        """|cov(v, k)|^2 over var(k): the values' spread along logits, over all directions."""
        trace = self.c.means(self.dk**2).sum(-1)
        cross = self.cross(self.residual(v))
        return (cross**2).sum((-1, -2)) / trace.clamp(min=1e-20)

    def own_directions(self, v: Variant) -> tuple[list[Tensor], list[Tensor]]:
        """The leading parts of each cluster's own covariance of values and keys."""
        left = self.cross(self.residual(v))
        us, zs = [], []
        for _ in range(v.own_rank):
            z = left.sum(-2)  # a start that depends on the data alone
            z = torch.where(z.norm(dim=-1, keepdim=True) > 0, z, torch.ones_like(z))
            for _ in range(12):
                u = (left @ z[..., None])[..., 0]
                z = (u[..., None, :] @ left)[..., 0, :]
                z = z / z.norm(dim=-1, keepdim=True).clamp(min=1e-20)
            u = (left @ z[..., None])[..., 0]
            left = left - u[..., None] * z[..., None, :]
            us.append(clusters.quantise_rows(u, v.vector_bits) if v.vector_bits else u)
            zs.append(clusters.quantise_rows(z, v.vector_bits) if v.vector_bits else z)
        return us, zs


def make_index(hay: Haystack, v: Variant, parts: bool = False) -> Index:
    b = hay.once((v.metric, v.tokens_per_cluster, v.split),
                 lambda: Builder(hay, v.metric, v.tokens_per_cluster, v.split))
    kind = "channel" if v.basis == "true" else v.basis
    plain = dataclasses.replace(v, basis=kind)
    key = (kind, v.groups, v.slope)
    spread = b.once(("t", *key), lambda: b.c.means((b.residual(plain) ** 2).sum(-1, True))[..., 0])
    covariance = None
    if parts or any(name == "covariance" for name, _ in v.error_terms):
        covariance = b.once(("tc", *key), lambda: b.covariance_spread(plain))
    centroid = b.centroid
    if v.centroid_bits:
        centroid = quantised_centroids(hay, b.c, centroid, v.centroid_bits)
    value = clusters.quantise_rows(b.value, v.value_bits) if v.value_bits else b.value
    index = Index(b.c, b.c.size.log(), centroid, value, (value**2).sum(-1), spread, covariance)
    index.group = b.once(("group", v.groups), lambda: b.group(v.groups))
    index.groups = v.groups * b.c.segments
    index.variance = b.once(("q", kind, v.groups, v.rank, v.bits), lambda: b.variances(plain))
    if kind != "channel":
        index.query_basis = b.once(("bases", kind, v.groups), lambda: b.bases(kind, v.groups))[0]
    if v.slope:
        index.slope = b.once(("B", kind, v.groups), lambda: b.slopes(kind, v.groups))
    if v.own_rank:
        index.own_value, index.own_key = b.once(
            ("own", *key, v.own_rank, v.vector_bits), lambda: b.own_directions(plain))
    if v.gain != "none":
        index.gain = b.once(("gain", v.gain, kind, v.groups, v.rank),
                            lambda: mass_gain(hay, index, v))
    return index


def mass_gain(hay: Haystack, index: Index, v: Variant) -> Tensor:
    """What times d2 / 2 gives the log mass of observed queries: least squares by their weights."""
    q = hay.observed[:, ::4]
    c = index.clustering
    logits = hay.scale * q @ hay.k.transpose(1, 2)
    top = logits.amax(-1, keepdim=True)
    true = c.logit_sums((logits - top).exp()).clamp(min=1e-30).log() + top
    first = hay.scale * q @ index.centroid.transpose(1, 2) + index.log_size[:, None]
    half = torch.zeros_like(first)
    for g in range(index.groups):
        rotated = q if index.query_basis is None else q @ index.query_basis[:, g]
        own = hay.scale**2 * rotated**2 @ index.variance.transpose(1, 2) / 2
        half = torch.where((index.group == g)[:, None], own, half)
    half = half.clamp(max=v.cap / 2)
    weight = torch.where(c.size[:, None] > 1, (true - top).exp() * (half > 0), 0.0)
    above = (weight * half * (true - first).nan_to_num(0, 0, 0)).sum(1)
    below = (weight * half**2).sum(1)
    head = above.sum(-1, keepdim=True) / below.sum(-1, keepdim=True).clamp(min=1e-20)
    if v.gain == "head":
        return head.expand_as(above)
    prior = 0.3 * below.mean(-1, keepdim=True)
    return ((above + prior * head) / (below + prior).clamp(min=1e-20)).clamp(0, 3)
