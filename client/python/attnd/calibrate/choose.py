# SPDX-License-Identifier: Apache-2.0
"""Which parameters keep accuracy, and which of those read least.

A cell is a task at a length; a point keeps a cell if it is not significantly worse than dense
attention there (:mod:`attnd.calibrate.welch`). What a point costs is its read share, the middle
tokens read exactly: the compression is its inverse. Indexes, which selection reads, are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnd.calibrate.welch import RANDOM_BELOW, SIGNIFICANT, Samples, p_of_decrease, scores
from attnd.eval.results import Measurement, Point

DENSE = "dense"


@dataclass(frozen=True, order=True)
class Cell:
    """A task in a run."""

    run: str
    task: str


@dataclass(frozen=True)
class Candidate:
    """One policy's parameters over all runs.

    Attributes:
        policy: its text.
        p: of a decrease, for each cell.
        read: share of the middle tokens read exactly, for each cell.
    """

    policy: str
    p: Mapping[Cell, float]
    read: Mapping[Cell, float]

    @property
    def mean_read(self) -> float:
        """Of all cells, each of equal weight."""
        return sum(self.read.values()) / len(self.read)

    @property
    def worst_p(self) -> float:
        return min(self.p.values())

    def keeps(self, cell: Cell) -> bool:
        return self.p[cell] >= SIGNIFICANT

    @property
    def keeps_all(self) -> bool:
        return self.worst_p >= SIGNIFICANT


def compression(read: float) -> float:
    """Middle tokens for each one read exactly; infinite if none is."""
    return 1 / read if read > 0 else math.inf


class Calibration:
    """Candidates of every preset in some runs of one model and evaluation set."""

    def __init__(self, measurements: Sequence[Measurement], samples: Samples) -> None:
        """
        Raises:
            ValueError: if there are none, they are of different models or sets, one has no dense
                point or a task of less than two texts, or no task is answered above random.
        """
        _check(measurements)
        self.measurements = tuple(measurements)
        self.samples = samples
        dense = {one.run: _dense(one) for one in measurements}
        self.cells = [
            Cell(run, task)
            for run, point in dense.items()
            for task, figures in point.tasks.items()
            if figures.accuracy >= RANDOM_BELOW
        ]
        if not self.cells:
            raise ValueError(f"dense attention answers no task above {RANDOM_BELOW}")
        self.dense_scores = {
            cell: scores(dense[cell.run].tasks[cell.task], samples) for cell in self.cells
        }
        self.candidates: dict[str, list[Candidate]] = {}  # by preset
        for preset, policy in _common_policies(measurements):
            self.candidates.setdefault(preset, []).append(self._candidate(policy))

    def _candidate(self, policy: str) -> Candidate:
        points = {one.run: _found(one, policy) for one in self.measurements}
        p, read = {}, {}
        for cell, dense in self.dense_scores.items():
            task = points[cell.run].tasks[cell.task]
            p[cell] = p_of_decrease(scores(task, self.samples), dense)
            read[cell] = task.read
        return Candidate(policy, p, read)

    def cheapest(self, preset: str) -> Candidate | None:
        """The candidate that reads least of those that keep every cell; None if none does."""
        kept = [one for one in self.candidates[preset] if one.keeps_all]
        return min(kept, key=lambda one: one.mean_read, default=None)

    def maximum_compression(self, preset: str, cell: Cell) -> float | None:
        """Of the candidates that keep a cell; None if none does."""
        kept = [one.read[cell] for one in self.candidates[preset] if one.keeps(cell)]
        return compression(min(kept)) if kept else None

    def is_open(self, preset: str, cell: Cell) -> bool:
        """Whether even the candidate that reads least keeps a cell, so that there may be more."""
        return min(self.candidates[preset], key=lambda one: one.read[cell]).keeps(cell)


def _check(measurements: Sequence[Measurement]) -> None:
    if not measurements:
        raise ValueError("there are no measurements to calibrate with")
    of = {(one.fingerprint, one.eval_set) for one in measurements}
    if len(of) > 1:
        raise ValueError("measurements of different models or evaluation sets: one at a time")


def _dense(measurement: Measurement) -> Point:
    return _found(measurement, DENSE)


def _found(measurement: Measurement, policy: str) -> Point:
    point = measurement.find(policy)
    if point is None:
        raise ValueError(f"{measurement.run} has no point {policy!r}")
    return point


def _common_policies(measurements: Sequence[Measurement]) -> Iterator[tuple[str, str]]:
    """Presets and texts of the points that every run has, but dense; none over an index of the
    caller's choice, which a named preset cannot ask for."""
    for point in measurements[0].points:
        everywhere = all(one.find(point.policy) is not None for one in measurements)
        if everywhere and point.policy != DENSE and "@" not in point.policy:
            yield point.preset, point.policy
