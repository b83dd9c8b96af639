# SPDX-License-Identifier: Apache-2.0
"""What a sequence must be opened with, so that rows may ask for a policy over it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from attnd.policy import CLUSTER_INDEXES, INDEXES, Policy, Preset, TreeOptions, parse_pairs


@dataclass(frozen=True)
class Opening:
    """How a haystack is uploaded. Policies with equal openings share one upload.

    Attributes:
        indexes: what is built of its segments, which fixes their order.
        observed: whether the queries of the prompt's last tokens are uploaded, too.
        alone: text of the only policy that the upload is good for, where what the end of the
            prefill leaves is the policy's own; empty if policies share it.
        tree: sizes of the tree among the indexes; None is the server's defaults.
    """

    indexes: tuple[str, ...]
    observed: bool = False
    alone: str = ""
    tree: TreeOptions | None = None


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
        tree: sizes of the index "tree"; None is the server's defaults.
    """

    index: str = ""
    tree: TreeOptions | None = None

    def __str__(self) -> str:
        """The text that parse_policy() reads."""
        sizes = f":{self.tree}" if self.tree else ""
        return f"{super().__str__()}@{self.index}{sizes}"


def parse_policy(text: str) -> Policy:
    """Reads NAME[:key=value,...][@INDEX[:key=value,...]], for example
    "error-target:tolerance=0.1@clusters" or "error-target@tree:leaf_tokens=12,fan=16,levels=2".

    Raises:
        ValueError: as Policy.parse, if the index is none of INDEXES, and for keys of an index that
            are not sizes of a tree.
    """
    policy, at, over = text.partition("@")
    parsed = Policy.parse(policy)
    if not at:
        return parsed
    index, colon, sizes = over.partition(":")
    if index not in INDEXES:
        raise ValueError(f"policy {text!r}: index {index!r} is none of {', '.join(INDEXES)}")
    tree = _parse_tree(index, sizes, text) if colon else None
    return PolicyOver(parsed.preset, parsed.parameters, index, tree)


def _parse_tree(index: str, sizes: str, text: str) -> TreeOptions:
    """The sizes of a tree in key=value,... , a part of a policy's text."""
    known = [field.name for field in fields(TreeOptions)] if index == "tree" else []
    pairs = parse_pairs(sizes, text)
    wrong = [key for key, value in pairs.items() if key not in known or not value.isdecimal()]
    if wrong:
        raise ValueError(
            f"policy {text!r}: index {index!r} has no number {wrong[0]!r}; it has "
            f"{', '.join(known) or 'none'}"
        )
    return TreeOptions(**{key: int(value) for key, value in pairs.items()})


def opening_of(policy: Policy, presets: Iterable[Preset]) -> Opening:
    """The opening that a policy needs, from what the server says of its preset; unknown presets,
    which the server will refuse, go with the clusters."""
    selector = policy.parameters.get("selector")
    over, tree = (policy.index, policy.tree) if isinstance(policy, PolicyOver) else ("", None)
    if over and selector != "clusters":
        return Opening((over,), tree=tree)
    for preset in presets:
        if preset.policy.preset != policy.preset:
            continue
        shared = COMPLETION if "summary" in preset.indexes else TOKENS
        if selector in KEEP_SETS:  # made at the prefill's end
            return Opening(shared.indexes, observed=True, alone=str(policy))
        if selector == "clusters":
            others = (i for i in preset.indexes if not i.startswith("blocks"))
            return Opening((over or "clusters", *others), tree=tree)
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
