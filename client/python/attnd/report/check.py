# SPDX-License-Identifier: Apache-2.0
"""Figures held against references that were computed apart from this project, and against figures
that attnd itself gave before.

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

Figures of attnd's own, stored() of a measurement, are not rounded and say nothing of what is right:
they show what has changed, so their tolerances are those of another processor.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnd.eval.results import Measurement, Point
from attnd.eval.opening import parse_policy

_ROUNDING = 0.0005 + 1e-9
# Rounding differs with the processor's vectors, and near ties in clusters and answers with it.
# Between AVX-512 and SSE4 in the server, and AVX2 and SSE in the model runner, errors of the CI
# subset's 19 points moved by 0.06% at most, reads by 0.01%, predictions by 0.005%, and no answer
# did. Fifteen times that is allowed.
_STORED_SHARE = 0.01
_STORED_ANSWERS = 1
# Of errors that are nothing but rounding, as those of dense attention are (4e-7).
_STORED_ROUNDING = 1e-6


@dataclass(frozen=True)
class Reference:
    """Figures of one policy: accuracy of each task, error, read share; some of them a second time,
    by task or as "error" or "read". `predicted` is compared where it is given."""

    accuracy: Mapping[str, float]
    error: float
    read: float
    second: Mapping[str, float] = field(default_factory=dict)
    second_source: str = ""
    predicted: float | None = None


@dataclass(frozen=True)
class References:
    """Those of one run.

    Attributes:
        accuracy, answers, error, read: tolerances; that of `error` is predictions', too.
        rounding: allowed in any case.
        called: what a figure of these is called in messages.
    """

    source: str
    sequences_per_task: int
    accuracy: float
    answers: int
    error: float
    read: float
    policies: Mapping[str, Reference]
    rounding: float = _ROUNDING
    called: str = "reference"


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


def stored(kept: Measurement) -> References:
    """A measurement that was kept, as what a newer one is held against."""
    policies = {
        point.policy: Reference(
            {name: task.accuracy for name, task in point.tasks.items()},
            point.error,
            point.read,
            predicted=point.predicted,
        )
        for point in kept.points
    }
    return References(
        source=f"attnd's own figures of the run {kept.run}",
        sequences_per_task=kept.sequences_per_task,
        accuracy=0.0,
        answers=_STORED_ANSWERS,
        error=_STORED_SHARE,
        read=_STORED_SHARE,
        policies=policies,
        rounding=_STORED_ROUNDING,
        called="stored figure",
    )


def changes(kept: Measurement, measured: Measurement) -> list[str]:
    """A line for each figure that is not what was kept, for each point that has none, and for
    each that was kept and not measured though its preset is offered.

    Raises:
        ValueError: if the two measured different things.
    """
    kept.require_settings_of(measured)
    found = list(_deviations_of(stored(kept), measured))
    for point in measured.points:
        if kept.find(point.policy) is None:
            found.append(f"{measured.run}: {point.policy} has no stored figure")
    return found


def compare(references: References, policy: str, point: Point) -> Iterator[Comparison]:
    """Every figure that has a reference. A prediction that is not made any more is no number."""
    reference = references.policies[policy]
    predicted = math.nan if point.predicted is None else point.predicted
    for task, accuracy in reference.accuracy.items():
        measured = point.tasks[task]
        allowed = max(references.accuracy, references.answers / sum(measured.answers))
        second = reference.second.get(task)
        yield Comparison(
            task, accuracy, measured.accuracy, allowed + references.rounding, second
        )
    for what, expected, measured_share, tolerance in (
        ("error", reference.error, point.error, references.error),
        ("read", reference.read, point.read, references.read),
        ("predicted", reference.predicted, predicted, references.error),
    ):
        if expected is not None:
            allowed = tolerance * expected + references.rounding
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
        called = references.called
        yield f"{run}: {sequences} sequences a task were measured; each {called} is of {wanted}"
        return
    for policy in references.policies:
        point = measurement.find(policy)
        if point is None:
            if parse_policy(policy).preset not in measurement.not_offered:
                yield f"{run}: {policy} has a {references.called} and was not measured"
            continue
        for one in compare(references, policy, point):
            if not one.holds:
                yield (
                    f"{run}: {policy}: {one.what} is {one.measured:.4g}; the "
                    f"{references.called} is {one.reference:.4g}, and {one.allowed:.2g} is allowed"
                )
