# SPDX-License-Identifier: Apache-2.0
"""How much of the KV a query reads exactly: a preset's name and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnd.v1 import types_pb2


@dataclass(frozen=True)
class Policy:
    """A preset (docs/POLICIES.md) and the parameters that differ from its defaults.

    Attributes:
        preset: dense, streaming, clusters-top-k, double-p or error-target; empty means the
            sequence's policy, and for a new sequence the server's default.
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
        parameters: dict[str, str] = {}
        for part in rest.split(",") if colon else ():
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not (key and equals and value):
                raise ValueError(f"policy {text!r}: {part!r} is not key=value")
            if key in parameters:
                raise ValueError(f"policy {text!r}: {key!r} comes twice")
            parameters[key] = value
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
