# SPDX-License-Identifier: Apache-2.0
"""Places the names of curves beside them, so that none lies on another, on a curve or outside.

Greedy: each label in its turn takes the cheapest of some places around the curve's points. All
numbers are in pixels, y upwards; a box is (left, bottom, right, top).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[float, float, float, float]
Place = tuple[float, float]

_GAP = 7.0  # between a point and its label
_ON_LABEL, _OUTSIDE, _ON_CURVE = 1000.0, 400.0, 20.0
_STEP = 4.0  # between the points at which a line is looked at


@dataclass(frozen=True)
class Label:
    """A text of some size that names a line through some points."""

    width: float
    height: float
    line: Sequence[Place]


def place(labels: Sequence[Label], lines: Sequence[Sequence[Place]], bounds: Box) -> list[Place]:
    """The lower left corner of each label. `lines` are all lines of the plot, the labels' own
    included."""
    dots = [dot for line in lines for dot in _dots(line)]
    taken: list[Box] = []
    corners = []
    for label in labels:
        boxes = [
            (left, bottom, left + label.width, bottom + label.height)
            for left, bottom in _candidates(label)
        ]
        best = min(boxes, key=lambda box: _cost(box, label, taken, dots, bounds))
        taken.append(best)
        corners.append((best[0], best[1]))
    return corners


def _candidates(label: Label) -> Iterator[Place]:
    """Around each point, those of the ends first: right, above, below, left, then farther off."""
    width, height = label.width, label.height
    ends = [label.line[-1], label.line[0], *label.line[1:-1]]
    for far in (1.0, 2.0, 3.5, 5.0):
        gap = _GAP * far
        for x, y in ends:
            yield x + gap, y - height / 2
            for left in (x - width / 2, x, x - width):
                yield left, y + gap
                yield left, y - gap - height
            yield x - gap - width, y - height / 2


def _cost(
    box: Box, label: Label, taken: Sequence[Box], dots: Sequence[Place], bounds: Box
) -> float:
    inside = _within(box, bounds)
    covered = sum(box[0] - 2 < x < box[2] + 2 and box[1] - 2 < y < box[3] + 2 for x, y in dots)
    overlapped = sum(_overlap(box, other) for other in taken)
    nearest = min(_distance(box, dot) for dot in label.line)
    return _ON_LABEL * overlapped + _OUTSIDE * (not inside) + _ON_CURVE * covered + nearest


def _dots(line: Sequence[Place]) -> Iterator[Place]:
    """Points along a line, close together."""
    for (x0, y0), (x1, y1) in zip(line, line[1:]):
        count = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / _STEP))
        for number in range(count):
            share = number / count
            yield x0 + share * (x1 - x0), y0 + share * (y1 - y0)
    yield line[-1]


def _within(box: Box, bounds: Box) -> bool:
    return (
        box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]
    )


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _distance(box: Box, dot: Place) -> float:
    dx = max(box[0] - dot[0], 0.0, dot[0] - box[2])
    dy = max(box[1] - dot[1], 0.0, dot[1] - box[3])
    return max(dx, dy)
