"""Figures: each takes plain arrays by name and returns a matplotlib figure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#a463f2", "#97bbf5", "#3ca951", "#9498a0", "#ff8ab7")
GREY = "#999da6"
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
}

styled = matplotlib.rc_context(STYLE)
"""Draws in the library's style, without touching the user's."""


@styled
def loss_curves(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """One panel for each method: what its curve shows -> the curve, without the first tenth, which is too high."""
    figure, panels = _panels(list(curves), 3.6, 2.4)
    for name, ax in panels.items():
        for label, values in curves[name].items():
            first = len(values) // 10
            ax.plot(range(first, len(values)), values[first:], lw=0.8, color=COLOURS[0])
            ax.set(title=name, xlabel="step", ylabel=label)
    return figure


@styled
def calibration(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], xlabel: str, ylabel: str, reference: str
) -> Figure:
    """Reliability, a panel for each method: (expected, observed) points beside the diagonal, and the reference's."""
    figure, panels = _panels(_others(curves, reference), 2.7, 2.7)
    for name, ax in panels.items():
        ax.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls="--")
        if reference in curves:
            ax.plot(*curves[reference], color=GREY, marker="o", ms=2, lw=1, label=reference)
        ax.plot(*curves[name], marker="o", ms=3, lw=1.3, color=COLOURS[0], label="the method")
        ax.set(title=name, xlabel=xlabel, ylabel=ylabel, xlim=(0, 1), ylim=(0, 1))
    return _with_legend(figure, next(iter(panels.values())))


@styled
def barriers(curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Loss along paths: name of the path -> a barrier curve as JSON; one panel for each data set."""
    figure, panels = _panels(list(next(iter(curves.values()))["losses"]), 4.2, 3.2)
    for name, ax in panels.items():
        for (path, curve), shade in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
            ax.plot(curve["t"], curve["losses"][name], marker=".", color=shade, label=path)
        ax.set(title=f"{name} data", xlabel="position on the path t", ylabel="marginalised loss (nats per row)")
    return _with_legend(figure, next(iter(panels.values())))


@styled
def projections(points: Mapping[str, Array], reference: str) -> Figure:
    """Scatter plots, a panel for each method: method -> points ``(draws, 2)``, with the reference's in grey."""
    figure, panels = _panels(_others(points, reference), 2.1, 2.2)
    # A few stray draws must not shrink all others to a dot.
    low, high = np.quantile(np.concatenate(list(points.values())), (0.005, 0.995), axis=0)
    margin = 0.15 * (high - low) + 1e-9
    limits = {"xlim": (low[0] - margin[0], high[0] + margin[0]), "ylim": (low[1] - margin[1], high[1] + margin[1])}
    for method, ax in panels.items():
        if reference in points:
            x, y = points[reference].T
            ax.scatter(x, y, s=7, alpha=0.6, color=GREY, lw=0, label=reference)
        x, y = points[method].T
        ax.scatter(x, y, s=7, alpha=0.5, color=COLOURS[0], lw=0, label="the method")
        ax.set(title=method, xticks=[], yticks=[], **limits)
    return _with_legend(figure, next(iter(panels.values())))


@styled
def before_and_after(values: Mapping[str, tuple[float, float]], xlabel: str) -> Figure:
    """For each method a line from its value before to its value after."""
    figure, panels = _panels([""], 6.4, 0.9 + 0.34 * len(values))
    ax, heights = panels[""], range(len(values))
    before, after = zip(*values.values(), strict=True)
    ax.hlines(heights, before, after, color="#bbb", lw=1.5, zorder=1)
    ax.scatter(before, heights, color=COLOURS[2], label="as drawn", zorder=2)
    ax.scatter(after, heights, color=COLOURS[0], label="symmetries removed", zorder=2)
    ax.axvline(0, color=GREY, lw=0.8, ls="--")
    ax.set(yticks=list(heights), yticklabels=list(values), xlabel=xlabel)
    ax.invert_yaxis()
    return _with_legend(figure, ax)


def _others(names: Mapping[str, Any], reference: str) -> list[str]:
    """All but the reference, unless that is all there is."""
    return [name for name in names if name != reference] or list(names)


def _panels(names: Sequence[str], width: float, height: float) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each name, at most three in a row, of a figure that belongs to no window: many of them leak
    nothing."""
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    return figure, dict(zip(names, axes.flat, strict=False))


def _with_legend(figure: Figure, ax: Axes) -> Figure:
    """The figure with one panel's legend below."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(3, len(labels))))
    return figure
