# SPDX-License-Identifier: Apache-2.0
"""Variants of error-target, as sets of options, and double-p to hold them against."""

from __future__ import annotations

import dataclasses

import torch
from attention import Haystack, Step
from indexes import Index, make_index
from options import NORM_GUARD, Variant
from torch import Tensor


@dataclasses.dataclass
class Result:
    out: Tensor  # [H, rows, D]
    read: Tensor  # [H, T] share of the middle
    predicted: Tensor  # [H, rows]
    error: Tensor  # [H, rows]
    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # [H, rows] each


def by_group(index: Index, per_group: list[Tensor]) -> Tensor:
    """per_group: [H, rows, C] for each group -> each cluster's own group's."""
    out = per_group[0]
    for g, x in enumerate(per_group[1:], 1):
        out = torch.where((index.group == g)[:, None], x, out)
    return out


def logit_variance(step: Step, index: Index, v: Variant) -> Tensor:
    if v.basis == "true":
        return step.true_variance(index.clustering)
    scale2 = step.hay.scale**2
    if v.basis == "channel":
        return scale2 * step.q**2 @ index.variance.transpose(1, 2)
    return by_group(index, [
        scale2 * (step.q @ index.query_basis[:, g]) ** 2 @ index.variance.transpose(1, 2)
        for g in range(index.groups)
    ])


def shifts(step: Step, index: Index, v: Variant, mass: Tensor) -> Tensor:
    """sum_i mass_i B Sigma_i a q: [H, rows, Dv]; plus each cluster's own direction."""
    out = torch.zeros_like(step.dense)
    if v.slope:
        for g in range(index.groups):
            own = mass * (index.group == g)[:, None]
            q = step.q if index.query_basis is None else step.q @ index.query_basis[:, g]
            shift = (own @ index.variance) * q
            out = out + step.hay.scale * shift @ index.slope[:, g].transpose(1, 2)
    if v.own_rank:
        for u, z in zip(index.own_value, index.own_key):
            out = out + (mass * (step.hay.scale * step.q @ z.transpose(1, 2))) @ u
    return out


def top_mask(scores: Tensor, count: Tensor) -> Tensor:
    """[H, T, C]: the first `count` [H, T] by descending score."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(
        -1, order, ranks < count[..., None])


def shortest_prefix(value: Tensor, order_by: Tensor, budget: Tensor | float) -> Tensor:
    """Mask of the shortest prefix by descending order_by whose remainder of value fits."""
    order = order_by.argsort(dim=-1, descending=True, stable=True)
    sorted_ = value.gather(-1, order).double()
    remainder = sorted_.flip(-1).cumsum(-1).flip(-1)
    return torch.zeros_like(value, dtype=torch.bool).scatter_(-1, order, remainder > budget)


class Estimate:
    """All clusters' estimates for a step's rows."""

    def __init__(self, step: Step, index: Index, v: Variant) -> None:
        self.step, self.index, self.v = step, index, v
        log_size = index.log_size[:, None]
        self.first = step.hay.scale * step.q @ index.centroid.transpose(1, 2) + log_size
        self.d2 = logit_variance(step, index, v)
        self.capped = self.d2.clamp(max=v.cap)
        if v.law == "finite":
            soft = 2 * (index.clustering.size[:, None] + 1)
            self.log_mean = self.d2 / 2 / (1 + self.d2 / soft)
            self.weight_variance = (2 * self.d2 / (1 + 4 * self.d2 / soft)
                                    - 2 * self.log_mean).clamp(min=0).expm1()
            self.shift_factor = (1 + self.d2 / soft) ** -2
        else:
            self.log_mean = self.capped / 2
            self.weight_variance = self.capped.expm1()
            # A cluster's value stops moving with the cap, too.
            self.shift_factor = (v.shift_cap / self.d2.clamp(min=1e-20)).clamp(max=1)
        if index.gain is not None:
            self.log_mean = self.log_mean * index.gain[:, None]
        if v.law == "bounded":
            most = (index.clustering.size[:, None] - 1).clamp(min=0)
            self.weight_variance = torch.minimum(self.weight_variance, most)
        if v.mass == "true":
            self.mass = step.true_mass(index.clustering)
        else:
            log_mass = self.first + (self.log_mean if v.mass == "second" else 0)
            self.mass = (log_mass - step.top[..., None]).exp()
        self.plain_log_mean = self.log_mean
        self.shift_mass = self.mass * self.shift_factor
        self.moment = step.zone_moment + (self.mass @ index.value_norm2[..., None])[..., 0]

    def value_sum(self, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """chosen [H, rows, C] or all -> sum of mass * value, and what shifts add to it."""
        left = self.mass if chosen is None else self.mass * chosen
        plain = left @ self.index.value
        if not (self.v.slope or self.v.own_rank):
            return plain, torch.zeros_like(plain)
        moved = self.shift_mass if chosen is None else self.shift_mass * chosen
        return plain, shifts(self.step, self.index, self.v, moved)

    def norm2(self, o: Tensor, total: Tensor) -> Tensor:
        guard = NORM_GUARD * (self.moment / total).sqrt()
        return (total * torch.maximum(o.norm(dim=-1), guard)) ** 2

    def correct(self, exact: Tensor, strength: float) -> None:
        """Scales log_mean by what the exactly read clusters show; exact [H, T, C]."""
        step = self.step
        true = step.true_mass(self.index.clustering)
        seen = step.per_row(exact) & (self.d2 > 0.05) & (true > 0)
        above = (true.clamp(min=1e-38).log() + step.top[..., None] - self.first).nan_to_num(0, 0, 0)
        half = self.plain_log_mean
        weight = torch.where(seen, true.sqrt(), 0.0)
        gain = (weight * half * above).sum(-1) / (weight * half**2).sum(-1).clamp(min=1e-20)
        gain = torch.where(seen.any(-1), gain.clamp(0, 2), 1.0)
        gain = step.per_row(step.over_group(gain))
        self.log_mean = half * (1 + strength * (gain[..., None] - 1))
        self.mass = (self.first + self.log_mean - step.top[..., None]).exp()
        self.shift_mass = self.mass * self.shift_factor

    def components(self, o: Tensor) -> dict[str, Tensor]:
        """Terms of each cluster's squared error [H, rows, C], before (total |o|)^2 divides it."""
        index, v = self.index, self.v
        size = index.clustering.size.clamp(min=1)[:, None]
        weight = self.mass**2
        varied = weight * self.weight_variance
        distance = (index.value_norm2[:, None] + (o * o).sum(-1, keepdim=True)
                    - 2 * o @ index.value.transpose(1, 2)).clamp(min=0)
        terms = {
            "bound": varied * index.spread[:, None],
            "half": varied * index.spread[:, None] / size.sqrt(),
            "sample": varied * index.spread[:, None] / size,
            "mass": weight * self.log_mean**2 * distance,
            "mass sample": varied / size * distance,
            "mass sat": weight * (1 - (-self.d2 / 2).exp()) ** 2 * distance,
            "mass far": weight * self.log_mean**2
            * (index.value_norm2[:, None] + (o * o).sum(-1, keepdim=True)),
        }
        if index.covariance_spread is not None:
            terms["covariance"] = varied * index.covariance_spread[:, None]
        return terms

    def squared_errors(self, o: Tensor) -> Tensor:
        terms = self.components(o)
        return sum(c * terms[name] for name, c in self.v.error_terms)


def double_p(step: Step, p1: float, p2: float) -> Result:
    v = Variant()
    index = make_index(step.hay, v)
    estimate = Estimate(step, index, dataclasses.replace(v, mass="first"))
    importance = step.over_group(estimate.first.softmax(-1))
    order = importance.argsort(dim=-1, descending=True, stable=True)
    cumulative = importance.gather(-1, order).double().cumsum(-1)

    def upto(p: float) -> Tensor:
        return top_mask(importance, (cumulative < p).sum(-1) + 1)

    exact = upto(p2)
    out, _, read, _ = finish(estimate, exact, upto(p1) & ~exact)
    error = step.relative_error(out)
    return Result(out, read, torch.zeros_like(error), error)


def finish(estimate: Estimate, exact: Tensor, estimated: Tensor):
    """exact, estimated [H, T, C] -> out, total mass (over e^top), read, shift of the output."""
    step, index = estimate.step, estimate.index
    token_exact = exact.gather(2, index.clustering.assignment[:, None].expand(
        -1, step.tokens, -1))
    weights = step.weights * step.per_row(token_exact)
    chosen = step.per_row(estimated)
    total = step.zone_sum + weights.sum(-1) + (estimate.mass * chosen).sum(-1)
    plain, shift = estimate.value_sum(chosen)
    out = (step.zone_out + weights @ step.hay.v + plain + shift) / total[..., None]
    return out, total, token_exact.float().mean(-1), shift / total[..., None]


def observed_ratio(estimate: Estimate, exact: Tensor, e2: Tensor, o: Tensor) -> Tensor:
    """(true / predicted)^2 error over the exactly read clusters alone: [H, rows]."""
    step, index = estimate.step, estimate.index
    token_exact = exact.gather(2, index.clustering.assignment[:, None].expand(
        -1, step.tokens, -1))
    weights = step.weights * step.per_row(token_exact)
    chosen = step.per_row(exact)
    plain, shift = estimate.value_sum(chosen)
    mass_gap = weights.sum(-1) - (estimate.mass * chosen).sum(-1)
    gap = weights @ step.hay.v - plain - shift - mass_gap[..., None] * o
    return (gap**2).sum(-1) / (e2 * chosen).sum(-1).clamp(min=1e-30)


def error_target(step: Step, v: Variant, tolerances: list[float], parts: bool = False
                 ) -> list[Result]:
    index = make_index(step.hay, v, parts)
    c = index.clustering
    estimate = Estimate(step, index, v)
    total = step.zone_sum + estimate.mass.sum(-1)
    plain, shift = estimate.value_sum(None)
    o = (step.zone_out + plain + shift) / total[..., None]

    e2 = estimate.squared_errors(o) / estimate.norm2(o, total)[..., None]
    squares = step.over_group(e2)
    size = c.size.clamp(min=1)[:, None]
    count = (c.size > 0).sum(-1)
    floor = torch.ceil(v.floor * count * (1 - 1e-9)).long()
    logits = estimate.first + v.optimism * estimate.d2.sqrt()
    optimistic = step.over_group(logits.softmax(-1))
    by = optimistic / size if v.floor_by == "token" else optimistic
    kept = top_mask(by, floor[:, None].expand(-1, step.tokens))
    if v.floor_least:
        kept &= optimistic >= v.floor_least
    results = []
    for tolerance in tolerances:
        order = squares / size if v.rank_by == "token" else squares
        exact = shortest_prefix(squares, order, tolerance**2) | kept
        exact &= (c.size > 0)[:, None]
        if v.control:
            estimate.correct(exact, v.control)
        out, all_mass, read, moved = finish(estimate, exact, ~exact)
        norm2 = estimate.norm2(out, all_mass)
        left = step.per_row(~exact)
        final = (estimate.squared_errors(out) * left).sum(-1) / norm2
        final = final + v.coherent**2 * (moved**2).sum(-1) / (norm2 / all_mass**2)
        result = Result(out, read, final.sqrt(), step.relative_error(out))
        if parts:
            terms = estimate.components(out)
            result.parts = {name: (x * left).sum(-1) / norm2 for name, x in terms.items()}
            result.parts["shift"] = (moved**2).sum(-1) / (norm2 / all_mass**2)
            for name, x in terms.items():
                result.parts["seen " + name] = (x * ~left).sum(-1) / norm2
            base = estimate.squared_errors(out)
            result.parts["seen ratio"] = observed_ratio(estimate, exact, base, out)
            result.parts["left mass"] = (estimate.mass * left).sum(-1) / all_mass
        results.append(result)
    return results
