# SPDX-License-Identifier: Apache-2.0
"""How much of the KV a query reads exactly: a preset's name and its parameters; and the indexes
that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from attnd.v1 import attnd_pb2, types_pb2

_WIRE = attnd_pb2.OpenSequenceRequest
_WIRE_INDEXES = {
    "clusters": _WIRE.INDEX_CLUSTERS,
    "blocks-16": _WIRE.INDEX_BLOCKS_16,
    "blocks-64": _WIRE.INDEX_BLOCKS_64,
    "labels": _WIRE.INDEX_LABELS,
    "keys-4bit": _WIRE.INDEX_KEYS_4BIT,
    "summary": _WIRE.INDEX_SUMMARY,
    "regression": _WIRE.INDEX_REGRESSION,
    "tree": _WIRE.INDEX_TREE,
}
#: What may be built of a sequence's segments (docs/POLICIES.md, "Indexes").
INDEXES = tuple(_WIRE_INDEXES)
#: Those that put a segment's tokens into the order of clusters; a sequence has one of them or none.
CLUSTER_INDEXES = ("clusters", "regression", "tree")


def to_wire_indexes(indexes: Iterable[str]) -> list[int]:
    """
    Raises:
        ValueError: if one is none of INDEXES.
    """
    unknown = [name for name in indexes if name not in _WIRE_INDEXES]
    if unknown:
        raise ValueError(f"index {unknown[0]!r} is none of {', '.join(INDEXES)}")
    return [_WIRE_INDEXES[name] for name in indexes]


def from_wire_indexes(indexes: Iterable[int]) -> tuple[str, ...]:
    """The names; numbers that this version does not know are left out."""
    names = {number: name for name, number in _WIRE_INDEXES.items()}
    return tuple(names[index] for index in indexes if index in names)


def parse_pairs(text: str, whole: str) -> dict[str, str]:
    """Reads key=value,... , which is a part of the text ``whole``.

    Raises:
        ValueError: if a part is not key=value, or a key is empty or comes twice.
    """
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"policy {whole!r}: {part!r} is not key=value")
        if key in pairs:
            raise ValueError(f"policy {whole!r}: {key!r} comes twice")
        pairs[key] = value
    return pairs


@dataclass(frozen=True)
class TreeOptions:
    """Sizes of the index "tree"; 0 is the server's default. The server checks them.

    Attributes:
        leaf_tokens: tokens of a leaf on average.
        fan: leaves of a group, and groups of a section, on average.
        levels: 2 is leaves and groups; with 3 long segments have sections of groups, too.
    """

    leaf_tokens: int = 0
    fan: int = 0
    levels: int = 0

    def __str__(self) -> str:
        """key=value,... of the sizes that are not 0."""
        return ",".join(f"{key}={value}" for key, value in vars(self).items() if value)

    def to_proto(self) -> attnd_pb2.TreeOptions:
        return attnd_pb2.TreeOptions(**vars(self))

    @staticmethod
    def from_proto(message: attnd_pb2.TreeOptions) -> TreeOptions:
        return TreeOptions(message.leaf_tokens, message.fan, message.levels)


@dataclass(frozen=True)
class Policy:
    """A preset (docs/POLICIES.md) and the parameters that differ from its defaults.

    Attributes:
        preset: a name of docs/POLICIES.md, for example error-target; empty means the sequence's
            policy, and for a new sequence the server's default.
        parameters: text by name, for example {"tolerance": "0.1"}. The server checks names and
            values.
    """

    preset: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> Policy:
        """Reads NAME[:key=value,...], for example "double-p:p1=0.95,p2=0.7".

        Raises:
            ValueError: if a part is not key=value, or a key is empty or comes twice.
        """
        preset, colon, rest = (piece.strip() for piece in text.partition(":"))
        parameters = parse_pairs(rest, text) if colon else {}
        if not preset:
            raise ValueError(f"policy {text!r} names no preset")
        return Policy(preset, parameters)

    def __str__(self) -> str:
        """The text that parse() reads."""
        if not self.parameters:
            return self.preset
        pairs = (f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.preset}:{','.join(pairs)}"

    def to_proto(self) -> types_pb2.Policy:
        return types_pb2.Policy(preset=self.preset, parameters=dict(self.parameters))

    @staticmethod
    def from_proto(message: types_pb2.Policy) -> Policy:
        return Policy(message.preset, dict(sorted(message.parameters.items())))


def as_policy(policy: Policy | str | None) -> Policy | None:
    """The policy itself, or the one that the text names."""
    return Policy.parse(policy) if isinstance(policy, str) else policy


@dataclass(frozen=True)
class Preset:
    """A preset that a server has.

    Attributes:
        policy: with the defaults of all its parameters.
        allowed: in words, what values each parameter may have.
        indexes: what a sequence is to be opened with for it on that server; empty if any do. Either
            of CLUSTER_INDEXES does for the other, if the server's backend has it.
        token_order: whether the sequence's segments must be in token order (True), in cluster order
            (False), or either (None).
        backend: of a sequence that is opened under it, if the server's first backend has kernels
            for the model's shape.
    """

    policy: Policy
    allowed: Mapping[str, str]
    indexes: tuple[str, ...]
    token_order: bool | None
    backend: str = ""

    @staticmethod
    def from_proto(message: attnd_pb2.PresetInfo) -> Preset:
        orders = {_WIRE.LAYOUT_TOKEN_ORDER: True, _WIRE.LAYOUT_CLUSTER_ORDER: False}
        return Preset(
            Policy.from_proto(message.policy),
            dict(sorted(message.allowed.items())),
            from_wire_indexes(message.indexes),
            orders.get(message.layout),
            message.backend,
        )
