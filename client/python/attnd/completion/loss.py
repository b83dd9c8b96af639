# SPDX-License-Identifier: Apache-2.0
"""The distillation loss (Top-K with Linear-Attention Completion, appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, log_softmax, relu


@dataclass(frozen=True)
class LossWeights:
    """The paper's default configuration; it gives no temperature.

    Attributes:
        kl: lambda_KL; the auxiliary terms weigh what it leaves of 1.
        top: of the symmetric regression where the teacher is within `band` of its greatest logit.
        far: of overestimates elsewhere that reach into the band.
        partition: of an overestimated log partition.
        band: Delta.
        delta: where the Huber penalty becomes linear.
    """

    temperature: float
    kl: float = 0.99
    top: float = 1.0
    far: float = 2.0
    partition: float = 4.0
    band: float = 8.0
    delta: float = 1.0


def distillation_loss(teacher: Tensor, student: Tensor, weights: LossWeights) -> Tensor:
    """Equations 20 to 32, the mean over all but the last dimension, which is that of the keys."""
    greatest = teacher.amax(-1, keepdim=True)
    r, r_student = teacher - greatest, student - greatest
    log_p = log_softmax(r / weights.temperature, -1)
    log_p_student = log_softmax(r_student / weights.temperature, -1)
    kl = weights.temperature**2 * (log_p.exp() * (log_p - log_p_student)).sum(-1)

    in_band = r >= -weights.band
    regression = _huber(r_student - r, weights.delta)
    overestimate = _huber(relu(r_student + weights.band), weights.delta)
    log_partition = r_student.logsumexp(-1) - r.logsumexp(-1)
    auxiliary = (
        weights.top * _mean_where(in_band, regression)
        + weights.far * _mean_where(~in_band, overestimate)
        + weights.partition * _huber(relu(log_partition), weights.delta)
    )
    return (weights.kl * kl + (1 - weights.kl) * auxiliary).mean()


def _huber(x: Tensor, delta: float) -> Tensor:
    return huber_loss(x, torch.zeros_like(x), reduction="none", delta=delta)


def _mean_where(mask: Tensor, x: Tensor) -> Tensor:
    """Over the last dimension; 0 where the mask is empty."""
    return (x * mask).sum(-1) / mask.sum(-1).clamp_min(1)
