# SPDX-License-Identifier: Apache-2.0
"""What a sequence must be opened with, so that rows may ask for a policy over it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnd.policy import CLUSTER_INDEXES, INDEXES, Policy, Preset


@dataclass(frozen=True)
class Opening:
    """How a haystack is uploaded. Policies with equal openings share one upload.

    Attributes:
        indexes: what is built of its segments, which fixes their order.
        observed: whether the queries of the prompt's last tokens are uploaded, too.
        alone: text of the only policy that the upload is good for, where what the end of the
            prefill leaves is the policy's own; empty if policies share it.
    """

    indexes: tuple[str, ...]
    observed: bool = False
    alone: str = ""


# What a sequence has that asks for nothing; policies that read no index go with it.
CLUSTERS = Opening(("clusters",))
# One upload for all policies over tokens in order; another for those that need feature maps, which a
# server has for some models only.
COMPLETION = Opening(tuple(name for name in INDEXES if name not in CLUSTER_INDEXES), observed=True)
TOKENS = Opening(tuple(name for name in COMPLETION.indexes if name != "summary"), observed=True)
# Selectors by what the sequence itself keeps.
KEEP_SETS = ("snapkv", "ada-snapkv")


@dataclass(frozen=True)
class PolicyOver(Policy):
    """A policy over sequences that are opened with an index of the caller's choice.

    Attributes:
        index: its name; the policy must be able to read it.
    """

    index: str = ""

    def __str__(self) -> str:
        """The text that parse_policy() reads."""
        return f"{super().__str__()}@{self.index}"


def parse_policy(text: str) -> Policy:
    """Reads NAME[:key=value,...][@INDEX], for example "error-target:tolerance=0.1@clusters".

    Raises:
        ValueError: as Policy.parse, and if the index is none of INDEXES.
    """
    policy, at, index = text.partition("@")
    parsed = Policy.parse(policy)
    if not at:
        return parsed
    if index not in INDEXES:
        raise ValueError(f"policy {text!r}: index {index!r} is none of {', '.join(INDEXES)}")
    return PolicyOver(parsed.preset, parsed.parameters, index)


def opening_of(policy: Policy, presets: Iterable[Preset]) -> Opening:
    """The opening that a policy needs, from what the server says of its preset; unknown presets,
    which the server will refuse, go with the clusters."""
    selector = policy.parameters.get("selector")
    over = policy.index if isinstance(policy, PolicyOver) else ""
    if over and selector != "clusters":
        return Opening((over,))
    for preset in presets:
        if preset.policy.preset != policy.preset:
            continue
        shared = COMPLETION if "summary" in preset.indexes else TOKENS
        if selector in KEEP_SETS:  # made at the prefill's end
            return Opening(shared.indexes, observed=True, alone=str(policy))
        if selector == "clusters":
            others = (i for i in preset.indexes if not i.startswith("blocks"))
            return Opening((over or "clusters", *others))
        if preset.token_order and not preset.indexes:  # a keep-set, made at the prefill's end
            return Opening((), observed=True, alone=str(policy))
        own = [index for index in preset.indexes if index in CLUSTER_INDEXES]
        if own:
            return Opening((own[0],))
        if preset.indexes:
            return shared
    return CLUSTERS


def by_opening(policies: Iterable[Policy], presets: Iterable[Preset]) -> dict[Opening, list[int]]:
    """The numbers of the policies by what they must be opened with, in order of appearance."""
    known = tuple(presets)
    groups: dict[Opening, list[int]] = {}
    for number, policy in enumerate(policies):
        groups.setdefault(opening_of(policy, known), []).append(number)
    return groups
