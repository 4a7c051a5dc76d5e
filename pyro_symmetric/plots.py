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
def loss_curves(curves: Mapping[str, tuple[Sequence[float], int, str]]) -> Figure:
    """One panel for each method: its curve, the steps between points, and what the curve shows."""
    figure, panels = _panels(list(curves), 3.6, 2.4)
    for ax, (name, (values, stride, label)) in zip(panels.values(), curves.items(), strict=True):
        steps, heights = np.arange(len(values)) * stride, np.asarray(values, dtype=float)
        ax.plot(steps, heights, lw=0.8, color="#4269d0")
        # The first steps are so high that nothing else would be seen; the axis follows the rest.
        settled = heights[len(heights) // 10 :]
        settled = settled[np.isfinite(settled)]
        if len(settled) and np.ptp(settled) > 0:
            low, high = np.quantile(settled, (0.0, 0.99))
            ax.set_ylim(low - 0.1 * (high - low), high + 0.4 * (high - low))
        ax.set(title=name, xlabel="step", ylabel=label)
    return figure


@styled
def calibration(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    reference: str | None = None,
) -> Figure:
    """Reliability, a panel for each method: (expected, observed) points beside the diagonal.

    :param reference: the method whose curve every panel shows in grey.
    """
    figure, panels = _panels([name for name in curves if name != reference] or list(curves), 2.7, 2.7)
    for name, ax in panels.items():
        ax.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls="--")
        if reference is not None and reference in curves:
            ax.plot(*curves[reference], color=GREY, marker="o", ms=2, lw=1, label=reference)
        if name != reference:
            ax.plot(*curves[name], marker="o", ms=3, lw=1.3, color=COLOURS[0], label="the method")
        ax.set(title=name, xlabel=xlabel, ylabel=ylabel, xlim=(0, 1), ylim=(0, 1))
    _legend_below(figure, next(iter(panels.values())))
    return figure


@styled
def barriers(curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Loss along paths: name of the path -> a barrier curve as JSON; one panel for each data set."""
    data = list(next(iter(curves.values()))["losses"])
    figure, axes = _grid(1, len(data), 4.2, 3.2)
    for ax, name in zip(axes.flat, data, strict=True):
        for (path, curve), shade in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
            ax.plot(curve["t"], curve["losses"][name], marker=".", color=shade, label=path)
        ax.set(title=f"{name} data", xlabel="position on the path t", ylabel="marginalised loss (nats per row)")
    _legend_below(figure, axes.flat[0])
    return figure


@styled
def projections(rows: Mapping[str, Mapping[str, Array]], reference: str | None = None) -> Figure:
    """Scatter plots, a column of panels for each method: title of the row -> method -> points ``(draws, 2)``.

    :param reference: the method whose points every panel of the others shows in grey.
    """
    methods = [name for name in next(iter(rows.values())) if name != reference] or [str(reference)]
    figure, axes = _grid(len(rows), len(methods), 2.1, 2.2)
    for row, (title, by_method) in enumerate(rows.items()):
        # A few stray draws must not shrink all others to a dot.
        low, high = np.quantile(np.concatenate(list(by_method.values())), (0.005, 0.995), axis=0)
        margin = 0.15 * (high - low) + 1e-9
        for ax, method in zip(axes[row], methods, strict=True):
            if reference is not None and reference in by_method:
                ax.scatter(*by_method[reference].T, s=7, alpha=0.6, color=GREY, lw=0, label=reference)
            if method != reference:
                ax.scatter(*by_method[method].T, s=7, alpha=0.5, color=COLOURS[0], lw=0, label="the method")
            ax.set(title=method, xticks=[], yticks=[])
            ax.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
        axes[row, 0].set_ylabel(title)
    _legend_below(figure, axes.flat[0])
    return figure


@styled
def before_and_after(values: Mapping[str, tuple[float, float]], xlabel: str) -> Figure:
    """For each method a line from its value before to its value after."""
    figure, axes = _grid(1, 1, 6.4, 0.9 + 0.34 * len(values))
    ax = axes[0, 0]
    for height, (before, after) in enumerate(values.values()):
        ax.plot([before, after], [height, height], color="#bbb", lw=1.5, zorder=1)
    heights = range(len(values))
    ax.scatter([v[0] for v in values.values()], heights, color="#ff725c", label="as drawn", zorder=2)
    ax.scatter([v[1] for v in values.values()], heights, color="#4269d0", label="symmetries removed", zorder=2)
    ax.axvline(0, color="#999", lw=0.8, ls="--")
    ax.set(yticks=list(heights), yticklabels=list(values), xlabel=xlabel)
    ax.invert_yaxis()
    _legend_below(figure, ax)
    return figure


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, NDArray[Any]]:
    """A figure that belongs to no window, so that a thousand of them leak nothing."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _panels(names: Sequence[str], width: float, height: float) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each name, at most three in a row."""
    columns = min(3, max(1, len(names)))
    figure, axes = _grid(-(-len(names) // columns), columns, width, height)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    return figure, dict(zip(names, axes.flat, strict=False))


def _legend_below(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    per_row = max(1, int(figure.get_figwidth() / 1.5))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(per_row, max(1, len(labels))))
