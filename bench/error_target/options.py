# SPDX-License-Identifier: Apache-2.0
"""The options of a variant."""

from __future__ import annotations

import dataclasses

CAP = 8.0
NORM_GUARD = 1e-3


@dataclasses.dataclass(frozen=True)
class Variant:
    """Defaults are the definition that this folder started from."""

    name: str = "baseline"
    # The index.
    metric: str = "key"  # what k-means sees: indexes.features
    tokens_per_cluster: int = 16
    split: float = 0.0  # clusters.kmeans
    basis: str = "channel"  # of the variances: channel, pca, query; true is an oracle
    rank: int = 0  # how many coordinates have a variance of their own; 0: all
    bits: int = 4  # of a deviation; 0: float
    groups: int = 1  # of clusters with a basis and a slope of their own, a segment
    slope: bool = False  # values regressed on keys, pooled over the group
    own_rank: int = 0  # each cluster's own covariance of values and keys, at this rank
    vector_bits: int = 0  # of own directions; 0: float
    value_bits: int = 0
    centroid_bits: int = 0
    # The estimate.
    mass: str = "second"  # first, second; true is an oracle
    gain: str = "none"  # of log mass over first order: none; head, cluster: by observed queries
    law: str = "gauss"  # of a cluster's logits: gauss, capped; or finite: of size members
    cap: float = CAP
    shift_cap: float = CAP
    control: float = 0.0  # how far the mass follows what exactly read clusters show
    # The error: coefficients of Estimate.components' terms.
    error_terms: tuple[tuple[str, float], ...] = (("bound", 1.0),)
    coherent: float = 0.0  # the sum's error in shares of its shift
    # What is read.
    rank_by: str = "cluster"  # or token: squared error a token
    floor: float = 0.01
    floor_by: str = "cluster"  # or token
    floor_least: float = 0.0  # least optimistic share of a cluster of the floor
    optimism: float = 2.0
