# SPDX-License-Identifier: Apache-2.0
"""A calibration as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from attnd.calibrate.choose import Calibration, Candidate, Cell, compression
from attnd.calibrate.welch import SIGNIFICANT, Samples, smallest_loss
from attnd.eval.results import Measurement


def markdown(measurements: Sequence[Measurement]) -> str:
    """Maximum compression by task and in the worst task, and the cheapest parameters that keep all
    of them."""
    by_text = Calibration(measurements, Samples.SEQUENCES)
    by_answer = Calibration(measurements, Samples.ANSWERS)
    parts = [
        _by_task(by_text),
        "Losses of accuracy that the test would notice, by text and by answer:",
        _power(by_text, by_answer),
        "The cheapest parameters that keep every task at every length, by text and by answer:",
        _cheapest(by_text, by_answer),
    ]
    return "\n\n".join(parts)


def _tasks(calibration: Calibration) -> list[str]:
    """Of all measurements, in their order."""
    names = (name for one in calibration.measurements for name in one.task_names)
    return list(dict.fromkeys(names))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _times(value: float) -> str:
    """A compression, of two digits at the least."""
    if math.isinf(value):
        return "all dropped"
    return f"{value:.2g}x" if value < 10 else f"{value:.0f}x"


def _maximum(calibration: Calibration, preset: str, cell: Cell) -> tuple[float, str]:
    """A maximum compression, 0 for none, and as text, with a plus if there may be more."""
    value = calibration.maximum_compression(preset, cell)
    if value is None:
        return 0, "none"
    more = not math.isinf(value) and calibration.is_open(preset, cell)
    return value, _times(value) + ("+" if more else "")


def _by_task(calibration: Calibration) -> str:
    rows, tasks = [], _tasks(calibration)
    for preset in calibration.candidates:
        for measurement in calibration.measurements:
            cells = [cell for cell in calibration.cells if cell.run == measurement.run]
            found = {cell.task: _maximum(calibration, preset, cell) for cell in cells}
            worst = min(found.values(), key=lambda maximum: maximum[0])
            rows.append(
                (
                    f"`{preset}`",
                    f"{measurement.length:,}",
                    *(found[task][1] if task in found else "random" for task in tasks),
                    worst[1],
                )
            )
    return _table(("preset", "tokens", *tasks, "worst task"), rows)


def _power(by_text: Calibration, by_answer: Calibration) -> str:
    rows, tasks = [], _tasks(by_text)
    for measurement in by_text.measurements:
        row = [f"{measurement.length:,}"]
        for task in tasks:
            losses = [
                f"{smallest_loss(calibration.dense_scores[cell]):.3f}".removeprefix("0")
                for calibration in (by_text, by_answer)
                for cell in calibration.cells
                if (cell.run, cell.task) == (measurement.run, task)
            ]
            row.append(" / ".join(losses) or "random")
        rows.append(row)
    return _table(("tokens", *tasks), rows)


def _cheapest(by_text: Calibration, by_answer: Calibration) -> str:
    rows = []
    for preset in by_text.candidates:
        row = [f"`{preset}`"]
        for calibration in (by_text, by_answer):
            row += _chosen(calibration.cheapest(preset))
        rows.append(row)
    head = ("preset", "by text", "compression", "least p", "by answer", "compression", "least p")
    return _table(head, rows)


def _chosen(candidate: Candidate | None) -> list[str]:
    if candidate is None:
        return ["none", "", ""]
    parameters = candidate.policy.partition(":")[2] or "(no parameters)"
    assert candidate.worst_p >= SIGNIFICANT
    return [f"`{parameters}`", _times(compression(candidate.mean_read)), f"{candidate.worst_p:.3f}"]
