# SPDX-License-Identifier: Apache-2.0
"""What a sequence must be opened with, so that rows may ask for a policy over it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnd.policy import Policy


@dataclass(frozen=True)
class Opening:
    """How a haystack is uploaded. Policies with equal openings share one upload. What else
    OpenSequence is told (a layout, indexes) is a field here, which remote.open_for passes on.

    Attributes:
        alone: text of the only policy that the upload is good for, where what the end of the
            prefill leaves is the policy's own; empty if policies share it.
    """

    alone: str = ""


# Cluster order with clusters: what a sequence has that asks for nothing.
CLUSTERS = Opening()


def opening_of(policy: Policy) -> Opening:
    """The opening that a policy needs. Dense and streaming need nothing, and go with the rest."""
    return CLUSTERS


def by_opening(policies: Iterable[Policy]) -> dict[Opening, list[int]]:
    """The numbers of the policies by what they must be opened with, in order of appearance."""
    groups: dict[Opening, list[int]] = {}
    for number, policy in enumerate(policies):
        groups.setdefault(opening_of(policy), []).append(number)
    return groups
