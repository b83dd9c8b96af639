# SPDX-License-Identifier: Apache-2.0
"""Pareto plots: error and accuracy against tokens read, as SVG.

Two panels, a curve for each series, named below them by what becomes of the tokens that a policy
does not read; a broad grey line behind them is the best that any series reaches with so many
tokens. Colours are those of Okabe and Ito and two darker ones, which colour-blind readers tell
apart together with the markers. The same measurement gives the same bytes with the same matplotlib:
no dates, and ids that are hashed with a fixed salt.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from attnd.eval.results import Measurement, Point
from attnd.eval.series import SERIES

Value = Callable[[Point], float]


@dataclass(frozen=True)
class _Style:
    colour: str
    marker: str
    line: Any = "-"
    width: float = 1.3


@dataclass(frozen=True)
class _Family:
    """Series that do the same with what they do not read."""

    title: str
    styles: Mapping[str, _Style]


_DASHED: Any = (0, (4, 2))
_DOTTED: Any = (0, (1, 1.5))
_FAMILIES = (
    _Family(
        "estimate the rest",
        {
            "error-target": _Style("#D55E00", "o", width=2.6),
            "error-target over a regression": _Style("#D55E00", "o", _DOTTED),
            "error-target over clusters": _Style("#D55E00", "o", _DASHED),
            "clusters-top-k": _Style("#CC79A7", "D", width=1.8),
            "double-p": _Style("#E69F00", "s", width=1.8),
            "topk-completion": _Style("#009E73", "v", width=1.8),
        },
    ),
    _Family(
        "drop the rest",
        {
            "quest": _Style("#56B4E9", "o"),
            "double-sparsity": _Style("#0072B2", "s"),
            "asynctls": _Style("#5E3C99", "D"),
            "twilight over quest": _Style("#56B4E9", "^", _DASHED),
            "twilight over double-sparsity": _Style("#0072B2", "^", _DASHED),
            "twilight over asynctls": _Style("#5E3C99", "^", _DASHED),
            "twilight over clusters": _Style("#CC79A7", "^", _DASHED),
            "twilight over full": _Style("#444444", "^", _DASHED),
        },
    ),
    _Family(
        "drop it before the question",
        {
            "snapkv": _Style("#888888", "v", _DOTTED),
            "ada-snapkv": _Style("#000000", "P", _DOTTED),
        },
    ),
)
_STYLES = {name: style for family in _FAMILIES for name, style in family.styles.items()}
_OTHER = _Style("#555555", "x")
_GREY = "#666666"
_BEST = "#DDDDDD"
_NAMES_OF_A_COLUMN = 4
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
_LEAST_READ = 0.002  # what reads less has no place on the axis
_SPAN_MIN = 0.25  # of accuracies: less would show single answers as if they mattered
_SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
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
        figure = Figure(figsize=(11, 6.3))
        canvas = FigureCanvasSVG(figure)
        axes = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.07, right=0.985, top=0.905, bottom=0.275, wspace=0.18)
        for panel, where in zip(_PANELS, axes):
            _draw(where, panel, measurement)
        figure.suptitle(f"{measurement.length:,} tokens", x=0.01, ha="left", fontsize=11)
        _name_curves(figure, measurement)
        text = io.StringIO()
        metadata = {"Date": None, "Creator": None}
        canvas.print_svg(text, metadata=metadata)
        return text.getvalue()


def curves(measurement: Measurement) -> dict[str, list[Point]]:
    """The points of each series that were measured, by tokens read; dense, and points that read
    (almost) nothing or everything, are in no curve."""
    found = {}
    for series in SERIES:
        points = [measurement.find(str(policy)) for policy in series.policies]
        there = [point for point in points if point and _LEAST_READ <= point.read < 1]
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
        axes.plot(*_xy(points, panel.value), zorder=3, **_line(_STYLES.get(name, _OTHER)))
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


def _ticks(
    axis: Any, limits: tuple[float, float], places: Sequence[float], text: Callable[[float], str]
) -> None:
    shown = [value for value in places if limits[0] <= value <= limits[1]]
    axis.set_ticks(shown, [text(value) for value in shown])
    axis.set_ticks([], minor=True)


def _xy(points: Sequence[Point], value: Value) -> tuple[list[float], list[float]]:
    return [point.read for point in points], [value(point) for point in points]


def _line(style: _Style) -> dict[str, Any]:
    """As matplotlib's arguments."""
    return {
        "color": style.colour,
        "marker": style.marker,
        "markersize": 5.5,
        "linestyle": style.line,
        "linewidth": style.width,
    }


def _name_curves(figure: Any, measurement: Measurement) -> None:
    """The names below the panels, a box for each family."""
    from matplotlib.lines import Line2D

    drawn = curves(measurement)
    left = 0.05
    for family in _FAMILIES:
        names = [name for name in family.styles if name in drawn]
        columns = max(1, math.ceil(len(names) / _NAMES_OF_A_COLUMN))
        if names:
            figure.legend(
                [Line2D([], [], **_line(family.styles[name])) for name in names],
                names,
                title=family.title,
                title_fontproperties={"weight": "bold", "size": 10},
                alignment="left",
                loc="upper left",
                bbox_to_anchor=(left, 0.195),
                ncols=columns,
                frameon=False,
                handlelength=2.4,
                fontsize=9,
                columnspacing=1.2,
            )
        left += 0.02 + 0.172 * columns
