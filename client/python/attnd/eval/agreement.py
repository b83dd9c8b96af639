# SPDX-License-Identifier: Apache-2.0
"""How much of the answers must be local attention's for an evaluation to succeed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnd import Policy
from attnd.eval.opening import parse_policy

# The least share of each policy, by its text; of all policies without one of their own by EVERY.
EVERY = ""
Requirements = Mapping[str, float]


def parse_requirement(text: str) -> tuple[str, float]:
    """Reads "SHARE" or "POLICY=SHARE".

    Raises:
        ValueError: if the share is no number in [0, 1], or the policy none.
    """
    policy, _, share = text.rpartition("=")
    number = float(share)
    if not 0 <= number <= 1:
        raise ValueError(f"share {share} is not in [0, 1]")
    return str(parse_policy(policy)) if policy else EVERY, number


def requirements(parsed: Iterable[tuple[str, float]], policies: Sequence[Policy]) -> Requirements:
    """Gathers what was parsed.

    Raises:
        ValueError: if a policy is not among those that are evaluated.
    """
    required = dict(parsed)
    evaluated = {EVERY, *map(str, policies)}
    for policy in required:
        if policy not in evaluated:
            raise ValueError(f"agreement of {policy} is required, which is not evaluated")
    return required


def too_low(results: Iterable[Mapping[str, Any]], required: Requirements) -> list[str]:
    """What to say of each result whose share of equal answers is below the one required."""
    said = []
    for result in results:
        policy, agreement = result["policy"], result["agreement"]
        share = required.get(policy, required.get(EVERY, 0.0))
        if not agreement >= share:  # a NaN is below everything
            said.append(
                f"{policy}: {agreement:.4f} of {result['answers']} answers agree with local "
                f"attention, {share:g} is required"
            )
    return said
