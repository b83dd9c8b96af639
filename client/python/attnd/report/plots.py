# SPDX-License-Identifier: Apache-2.0
"""Pareto plots: error and accuracy against tokens read, as SVG.

Two panels, a curve for each series, each named beside it; a broad grey line behind them is the best
that any series reaches with so many tokens. Colours are those of Okabe and Ito, which colour-blind
readers tell apart; two series of one colour differ in their markers. The same measurement gives the
same bytes with the same matplotlib: no dates, and ids that are hashed with a fixed salt.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from attnd.eval.results import Measurement, Point
from attnd.eval.series import SERIES
from attnd.report.labels import Label, Place, place

Value = Callable[[Point], float]

# By series: colour and marker. Clusters are warm, blocks and tokens cold, keep-sets black.
_STYLES = {
    "error-target": ("#D55E00", "o"),
    "double-p": ("#E69F00", "s"),
    "clusters-top-k": ("#CC79A7", "D"),
    "topk-completion": ("#CC79A7", "v"),
    "quest": ("#56B4E9", "o"),
    "double-sparsity": ("#0072B2", "s"),
    "asynctls": ("#009E73", "D"),
    "twilight over full": ("#009E73", "^"),
    "twilight over quest": ("#56B4E9", "^"),
    "twilight over double-sparsity": ("#0072B2", "^"),
    "snapkv": ("#000000", "v"),
    "ada-snapkv": ("#000000", "P"),
}
_OTHER = ("#555555", "x")
_GLYPHS = {
    "o": "\N{BLACK CIRCLE}",
    "s": "\N{BLACK SQUARE}",
    "D": "\N{BLACK DIAMOND}",
    "v": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "^": "\N{BLACK UP-POINTING TRIANGLE}",
    "P": "\N{HEAVY GREEK CROSS}",
    "x": "\N{MULTIPLICATION SIGN}",
}
_GREY = "#666666"
_BEST = "#DDDDDD"
_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "attnd",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
}
_SPAN_MIN = 0.25  # of accuracies: less would show single answers as if they mattered
_SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_ERRORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class _Panel:
    """What is drawn on the vertical axis. `better` is -1 where less is better."""

    title: str
    label: str
    value: Value
    better: int


_PANELS = (
    _Panel(
        "Error of attention: lower is better",
        "mean of |o - o_dense| / |o_dense|",
        lambda point: point.error,
        -1,
    ),
    _Panel(
        "Right answers: higher is better",
        "accuracy, mean of the tasks",
        lambda point: point.mean_accuracy,
        1,
    ),
)


def description(measurement: Measurement) -> str:
    """What the plot shows, for those who do not see it."""
    return (
        f"Error and accuracy against the share of tokens read exactly, at {measurement.length:,} "
        "tokens, a curve for each policy"
    )


def pareto(measurement: Measurement) -> str:
    """The plot as SVG.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: pip install attnd[report]") from None
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_SETTINGS}):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        axes = figure.subplots(1, 2)
        for panel, where in zip(_PANELS, axes):
            _draw(where, panel, measurement)
        figure.suptitle(f"{measurement.length:,} tokens", x=0.01, ha="left", fontsize=11)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # everything has its place, names are put beside it
        for panel, where in zip(_PANELS, axes):
            _name_curves(where, panel, measurement)
        text = io.StringIO()
        metadata = {"Date": None, "Creator": None}
        canvas.print_svg(text, metadata=metadata)
        return text.getvalue()


def curves(measurement: Measurement) -> dict[str, list[Point]]:
    """The points of each series that were measured, by tokens read; dense and what reads nothing
    are no curves."""
    found = {}
    for series in SERIES:
        points = [measurement.find(str(policy)) for policy in series.policies]
        there = [point for point in points if point is not None and 0 < point.read]
        if there and series.preset != "dense":
            found[series.name] = sorted(there, key=lambda point: point.read)
    return found


def best(points: Sequence[Point], value: Value, better: int) -> list[Point]:
    """Those that no point beats with as few tokens read, by tokens read."""
    front: list[Point] = []
    for point in sorted(points, key=lambda one: (one.read, -better * value(one))):
        if not front or better * value(point) > better * value(front[-1]):
            front.append(point)
    return front


# ---- Drawing ----


def _draw(axes: Any, panel: _Panel, measurement: Measurement) -> None:
    drawn = curves(measurement)
    everything = [point for points in drawn.values() for point in points]
    _set_axes(axes, panel, everything, measurement)
    axes.plot(
        *_xy(best(everything, panel.value, panel.better), panel.value),
        color=_BEST,
        linewidth=10,
        zorder=1,
        solid_joinstyle="round",
        solid_capstyle="round",
    )
    for name, points in drawn.items():
        colour, marker = _STYLES.get(name, _OTHER)
        axes.plot(
            *_xy(points, panel.value),
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=2.2 if name == "error-target" else 1.3,
            zorder=3,
        )
    for name in ("dense", "streaming"):
        _draw_level(axes, panel, measurement.find(name))


def _set_axes(axes: Any, panel: _Panel, points: Sequence[Point], measurement: Measurement) -> None:
    """Ranges, ticks and words. Errors show streaming's, too; accuracies at least _SPAN_MIN."""
    axes.set_title(panel.title)
    axes.set_ylabel(panel.label)
    axes.set_xlabel("share of the middle tokens read exactly")
    axes.set_axisbelow(True)
    axes.grid(color="#EEEEEE")
    axes.set_xscale("log")
    axes.set_xlim(0.7 * min((point.read for point in points), default=0.01), 1.15)
    _ticks(axes.xaxis, axes.get_xlim(), _SHARES, lambda share: f"{100 * share:g}%")
    levels = [measurement.find(name) for name in ("dense", "streaming")]
    values = [panel.value(point) for point in (*points, *filter(None, levels))]
    if panel.better < 0:
        shown = [value for value in values if value > 1e-3] or [1.0]
        axes.set_yscale("log")
        axes.set_ylim(0.6 * min(shown), 1.4 * max(shown))
        _ticks(axes.yaxis, axes.get_ylim(), _ERRORS, lambda error: f"{error:g}")
    else:
        values = [panel.value(point) for point in points] or values
        dense = panel.value(levels[0]) if levels[0] else max(values)
        high = max(*values, dense) + 0.15 * _SPAN_MIN  # room for names
        axes.set_ylim(min(min(values) - 0.1 * _SPAN_MIN, high - _SPAN_MIN), high)


def _draw_level(axes: Any, panel: _Panel, point: Point | None) -> None:
    """A line for what has no place on the horizontal axis, or is everybody's measure; only its
    value where the line would leave no room for the curves."""
    if point is None or panel.value(point) < 1e-3:
        return
    height = panel.value(point)
    says = "dense: reads all" if point.preset == "dense" else "streaming: reads none"
    if panel.better > 0 and height < axes.get_ylim()[0]:
        axes.annotate(
            f"{says}, {height:.2f} \N{DOWNWARDS ARROW}",
            (1, 0),
            xycoords="axes fraction",
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=_GREY,
            fontsize=9,
        )
        return
    axes.axhline(height, color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    axes.annotate(
        says,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=_GREY,
        fontsize=9,
    )


def _ticks(axis: Any, limits: Place, places: Sequence[float], text: Callable[[float], str]) -> None:
    shown = [value for value in places if limits[0] <= value <= limits[1]]
    axis.set_ticks(shown, [text(value) for value in shown])
    axis.set_ticks([], minor=True)


def _xy(points: Sequence[Point], value: Value) -> tuple[list[float], list[float]]:
    return [point.read for point in points], [value(point) for point in points]


def _name_curves(axes: Any, panel: _Panel, measurement: Measurement) -> None:
    drawn = curves(measurement)
    lines, labels, texts = [], [], []
    for name, points in drawn.items():
        colour, marker = _STYLES.get(name, _OTHER)
        text = axes.text(
            0,
            0,
            f"{_GLYPHS[marker]} {name}",
            color=colour,
            fontsize=9,
            transform=None,
            zorder=4,
            fontweight="bold" if name == "error-target" else "normal",
        )
        box = text.get_window_extent()
        pixels = axes.transData.transform(list(zip(*_xy(points, panel.value))))
        line = [(float(x), float(y)) for x, y in pixels]
        lines.append(line)
        labels.append(Label(box.width, box.height, line))
        texts.append(text)
    bounds = axes.get_window_extent()
    corners = place(labels, lines + _levels(axes), (bounds.x0, bounds.y0, bounds.x1, bounds.y1))
    for text, corner in zip(texts, corners):
        text.set_position(corner)
        text.set_verticalalignment("bottom")


def _levels(axes: Any) -> list[list[tuple[float, float]]]:
    """The levels' lines and texts, as lines that labels must keep off."""
    bounds = axes.get_window_extent()
    lines = []
    for text in axes.texts:
        if text.get_color() == _GREY:
            box = text.get_window_extent()
            middle = (box.y0 + box.y1) / 2
            lines.append([(box.x0, middle), (box.x1, middle)])
            lines.append([(bounds.x0, box.y0), (bounds.x1, box.y0)])
    return lines
