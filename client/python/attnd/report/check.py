# SPDX-License-Identifier: Apache-2.0
"""Figures held against references that were computed apart from this project.

docs/quality/references.json:

    {RUN: {"source": text, "sequences_per_task": n,
           "tolerance": {"accuracy": points, "answers": n, "error": share, "read": share},
           "policies": {POLICY: {"accuracy": {task: share}, "error": number, "read": share,
                                 "second": {figure: number}, "second_source": text}}}}

An accuracy may differ by `accuracy` or by `answers` answers, whichever is more; an error and a read
share by that share of the reference. References are rounded to three decimals, so that half of the
last one is allowed in any case.

`second` (optional, as is its source) has figures of another computation that is independent of
what is measured, for references that cannot be reproduced: where rounding decides which tokens fall
into a cluster, a few answers turn either way. A figure then holds if it is within its tolerance of
one of the two.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnd.eval.results import Measurement, Point
from attnd.eval.opening import parse_policy

_ROUNDING = 0.0005 + 1e-9


@dataclass(frozen=True)
class Reference:
    """Figures of one policy: accuracy of each task, error, read share; some of them a second time,
    by task or as "error" or "read"."""

    accuracy: Mapping[str, float]
    error: float
    read: float
    second: Mapping[str, float] = field(default_factory=dict)
    second_source: str = ""


@dataclass(frozen=True)
class References:
    """Those of one run."""

    source: str
    sequences_per_task: int
    accuracy: float
    answers: int
    error: float
    read: float
    policies: Mapping[str, Reference]


@dataclass(frozen=True)
class Comparison:
    """One figure beside its reference; `allowed` is how far they may lie apart."""

    what: str
    reference: float
    measured: float
    allowed: float
    second: float | None = None

    @property
    def reproduces(self) -> bool:
        """Whether it is near the reference itself."""
        return abs(self.measured - self.reference) <= self.allowed

    @property
    def holds(self) -> bool:
        if self.second is not None and abs(self.measured - self.second) <= self.allowed:
            return True
        return self.reproduces


def read_references(path: pathlib.Path) -> dict[str, References]:
    """By run.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not what the module's text says.
    """
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
        return {run: _references(fields) for run, fields in runs.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no references: {error}") from None


def _references(fields: dict[str, Any]) -> References:
    tolerance = fields["tolerance"]
    return References(
        fields["source"],
        fields["sequences_per_task"],
        tolerance["accuracy"],
        tolerance["answers"],
        tolerance["error"],
        tolerance["read"],
        {policy: Reference(**reference) for policy, reference in fields["policies"].items()},
    )


def compare(references: References, policy: str, point: Point) -> Iterator[Comparison]:
    """Every figure that has a reference."""
    reference = references.policies[policy]
    for task, accuracy in reference.accuracy.items():
        measured = point.tasks[task]
        allowed = max(references.accuracy, references.answers / sum(measured.answers))
        second = reference.second.get(task)
        yield Comparison(task, accuracy, measured.accuracy, allowed + _ROUNDING, second)
    for what, expected, measured_share, tolerance in (
        ("error", reference.error, point.error, references.error),
        ("read", reference.read, point.read, references.read),
    ):
        allowed = tolerance * expected + _ROUNDING
        yield Comparison(what, expected, measured_share, allowed, reference.second.get(what))


def deviations(
    references: Mapping[str, References], measured: Mapping[str, Measurement]
) -> list[str]:
    """A line for each figure that leaves its tolerance, and for each that could not be compared
    though its preset is offered. Only runs that are there are looked at."""
    problems: list[str] = []
    for run, measurement in measured.items():
        if run in references:
            problems += _deviations_of(references[run], measurement)
    return problems


def _deviations_of(references: References, measurement: Measurement) -> Iterator[str]:
    run, sequences = measurement.run, measurement.sequences_per_task
    if sequences != references.sequences_per_task:
        wanted = references.sequences_per_task
        yield f"{run}: {sequences} sequences a task were measured; the references are of {wanted}"
        return
    for policy in references.policies:
        point = measurement.find(policy)
        if point is None:
            if parse_policy(policy).preset not in measurement.not_offered:
                yield f"{run}: {policy} has references and was not measured"
            continue
        for one in compare(references, policy, point):
            if not one.holds:
                yield (
                    f"{run}: {policy}: {one.what} is {one.measured:.4g}; the reference is "
                    f"{one.reference:.4g}, and {one.allowed:.2g} is allowed"
                )
