# SPDX-License-Identifier: Apache-2.0
"""Measurements as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attnd.eval.results import Measurement, Point, Task
from attnd.eval.series import SERIES, policies_of
from attnd.report.check import References, compare


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells as they are."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def short(share: float) -> str:
    """Three decimals, without the zero in front."""
    return f"{share:.3f}".removeprefix("0")


def accuracies(tasks: Mapping[str, Task], names: Iterable[str]) -> str:
    return " ".join(short(tasks[name].accuracy) for name in names)


def figures(measurement: Measurement) -> str:
    """All points of a run, in the order of the series. Accuracies less local dense attention's
    are in points, with 95% bounds (attnd.eval.paired)."""
    names = measurement.task_names
    order = {str(policy): number for number, policy in enumerate(policies_of(SERIES))}
    points = sorted(measurement.points, key=lambda point: order.get(point.policy, len(order)))
    head = (
        "policy",
        " ".join(names),
        "minus dense",
        "agreement",
        "clear disagreements",
        "error",
        "predicted",
        "read",
    )
    rows = [("local dense", accuracies(measurement.local_dense, names), *[""] * 6)]
    for point in points:
        differences = measurement.minus_dense(point)
        rows.append(
            (
                f"`{point.policy}`",
                accuracies(point.tasks, names),
                " ".join(str(differences[name]) for name in names),
                f"{point.agreement:.3f}",
                str(point.clear_disagreements),
                _error(point),
                _predicted(point),
                f"{point.read:.4f}",
            )
        )
    return table(head, rows)


def claims(measurement: Measurement) -> str:
    """What error-target promises and what it kept: a line for each policy. `predicted / measured`
    compares means; `within` is the share of rows whose error kept the tolerance."""
    head = (
        "policy",
        "agreement",
        "error",
        "predicted / measured",
        "within",
        "read",
        "index",
    )
    rows = []
    for point in measurement.points:
        within, index = (
            "-" if share is None else f"{share:.3f}" for share in (point.within, point.index)
        )
        rows.append(
            (
                f"`{point.policy}`",
                f"{point.agreement:.3f}",
                _error(point),
                _ratio(point.predicted, point.error),
                within,
                f"{100 * point.read:.2f}%",
                index,
            )
        )
    return table(head, rows)


def by_head(measurement: Measurement) -> str:
    """A line for each layer and KV head. Of each policy that names a tolerance: predicted over
    measured error, the share of rows whose error is beyond the tolerance, and the 95th percentile
    of the errors; the head that is so most often is bold."""
    heads = {point.policy: point.kv_heads for point in measurement.points if point.kv_heads}
    names = next(iter(heads.values())).names if heads else []
    rows = []
    for layer, head in names:
        cells = []
        for of in heads.values():
            predicted = None if of.predicted is None else of.predicted[layer][head]
            ratio = _ratio(predicted, of.error[layer][head])
            beyond, p95 = short(1 - of.within[layer][head]), f"{of.p95[layer][head]:.2f}"
            cell = f"{ratio}, {beyond}, {p95}"
            cells.append(f"**{cell}**" if of.worst == (layer, head) else cell)
        rows.append((f"{layer}.{head}", *cells))
    return table(("layer.head", *(_column(policy) for policy in heads)), rows)


def by_task(measurement: Measurement) -> str:
    """A line for each task: dense attention's accuracy, and each policy's less that, in points with
    95% bounds."""
    policies = [_column(point.policy) for point in measurement.points]
    apart = [measurement.minus_dense(point) for point in measurement.points]
    rows = [
        (name, str(len(dense.right)), short(dense.accuracy), *(str(of[name]) for of in apart))
        for name, dense in measurement.local_dense.items()
    ]
    return table(("task", "texts", "dense", *policies), rows)


def _column(policy: str) -> str:
    """A policy at the head of a column: error-target by its tolerance, which says which it is."""
    return f"`{policy.removeprefix('error-target:tolerance=')}`"


def _error(point: Point) -> str:
    return f"{point.error:.2g}" if point.error < 1e-3 else f"{point.error:.3f}"


def _ratio(predicted: float | None, measured: float) -> str:
    return f"{predicted / measured:.2f}" if predicted and measured else "-"


def _predicted(point: Point) -> str:
    return "-" if point.predicted is None else f"{point.predicted:.3f}"


def caption(measurement: Measurement) -> str:
    """What a run was, in a line."""
    segments = f"segments of {measurement.segment_tokens:,} tokens"
    if measurement.length > 2 * measurement.segment_tokens:
        segments += " and, over a tree, more"
    return (
        f"{measurement.length:,} tokens, {measurement.dtype}, {segments}, "
        f"{_texts(measurement)}, {measurement.answers} answer tokens "
        f"({measurement.model}, {measurement.eval_set}; {measurement.server})."
    )


def _texts(measurement: Measurement) -> str:
    """How many texts each task has."""
    with_count: dict[int, list[str]] = {}
    for name, task in measurement.local_dense.items():
        with_count.setdefault(len(task.right), []).append(name)
    if len(with_count) == 1:
        return f"{measurement.sequences_per_task} texts a task"
    said = (f"{count} of {' '.join(names)}" for count, names in with_count.items())
    return f"texts: {', '.join(said)}"


def beside_references(references: References, measurement: Measurement) -> str:
    """Reference / measured for each policy that has both. Figures beyond their tolerance are bold,
    with a second reference behind them if there is one; its source stands below."""
    accuracies_of = (reference.accuracy for reference in references.policies.values())
    names = dict.fromkeys(name for accuracy in accuracies_of for name in accuracy)
    head = ("policy", *names, "error", "read")
    rows = []
    for policy in references.policies:
        point = measurement.find(policy)
        if point is None:
            rows.append((f"`{policy}`", *["not offered"] * (len(head) - 1)))
            continue
        cells = [f"`{policy}`"]
        for one in compare(references, policy, point):
            text = f"{short(one.reference)} / {short(one.measured)}"
            if not one.reproduces:
                text = f"**{text}**" + (f" ({short(one.second)})" if one.second is not None else "")
            cells.append(text)
        rows.append(tuple(cells))
    sources = [
        f"(`{policy}`: {reference.second_source})"
        for policy, reference in references.policies.items()
        if reference.second
    ]
    return "\n\n".join([table(head, rows), *sources])


def skipped(measurements: Iterable[Measurement]) -> str:
    """Which presets are missing, and why."""
    names = sorted({name for one in measurements for name in one.not_offered})
    if not names:
        return "Every preset of POLICIES.md was offered by the server and measured."
    listed = ", ".join(f"`{name}`" for name in names)
    return f"Not measured, as the server does not offer them: {listed}."
