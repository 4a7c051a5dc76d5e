"""Figures: each takes plain arrays by name and returns a matplotlib figure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#a463f2", "#97bbf5", "#3ca951", "#9498a0", "#ff8ab7")


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour for each name, in their order."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
}

Plot = TypeVar("Plot", bound=Callable[..., Figure])


def styled(plot: Plot) -> Plot:
    """Draw in the library's style, without touching the user's."""

    @functools.wraps(plot)
    def wrapped(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(STYLE):
            return plot(*args, **kwargs)

    return cast(Plot, wrapped)


@styled
def loss_curves(curves: Mapping[str, tuple[Sequence[float], int, str]]) -> Figure:
    """One panel for each method: its curve, the steps between points, and what the curve shows."""
    columns = min(3, max(1, len(curves)))
    figure, axes = _grid(-(-len(curves) // columns), columns, 3.6, 2.4)
    for ax, (name, (values, stride, label)) in zip(axes.flat, curves.items(), strict=False):
        steps, heights = np.arange(len(values)) * stride, np.asarray(values, dtype=float)
        ax.plot(steps, heights, lw=0.8, color="#4269d0")
        # The first steps are so high that nothing else would be seen; the axis follows the rest.
        settled = heights[len(heights) // 10 :]
        settled = settled[np.isfinite(settled)]
        if len(settled) and np.ptp(settled) > 0:
            low, high = np.quantile(settled, (0.0, 0.99))
            ax.set_ylim(low - 0.1 * (high - low), high + 0.4 * (high - low))
        ax.set(title=name, xlabel="step", ylabel=label)
    for ax in axes.flat[len(curves) :]:
        ax.set_visible(False)
    return figure


@styled
def marginals(
    weights: Sequence[str],
    samples: Sequence[Mapping[str, Array]],
    rows: Sequence[str],
    reference: str | None = None,
) -> Figure:
    """Histograms of single weights.

    :param weights: what the columns show.
    :param samples: one mapping for each row of panels: method -> ``(draws, len(weights))``.
    :param rows: what the rows show.
    :param reference: the method to draw as a grey area behind the others.
    """
    figure, axes = _grid(len(rows), len(weights), 3.4, 2.2)
    shades = colours(list(samples[0]))
    for row, (title, by_method) in enumerate(zip(rows, samples, strict=True)):
        for column, name in enumerate(weights):
            ax = axes[row, column]
            pooled = np.concatenate([values[:, column] for values in by_method.values()])
            low, high = map(float, np.quantile(pooled, (0.002, 0.998)))
            edges = np.linspace(low, high, 41)
            if edges[0] == edges[-1]:
                edges = np.linspace(edges[0] - 0.5, edges[0] + 0.5, 41)
            for method, values in by_method.items():
                inside = np.clip(values[:, column], edges[0], edges[-1])
                look: dict[str, Any] = {"histtype": "step", "lw": 1.2, "color": shades[method]}
                if method == reference:
                    look = {"histtype": "stepfilled", "color": "#cfd2d8", "zorder": 0}
                ax.hist(inside, edges, density=True, label=method, **look)
            ax.set(title=f"{name}, {title}", yticks=[])
    _legend_below(figure, axes.flat[0])
    return figure


@styled
def calibration(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], xlabel: str, ylabel: str) -> Figure:
    """Reliability of each method: (expected, observed) points beside the diagonal."""
    figure, axes = _grid(1, 1, 6.4, 4.6)
    ax, shades = axes[0, 0], colours(list(curves))
    ax.plot([0, 1], [0, 1], color="#999", lw=1, ls="--")
    for name, (expected, observed) in curves.items():
        ax.plot(expected, observed, marker="o", ms=3, lw=1.2, color=shades[name], label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 1), ylim=(0, 1))
    _legend_below(figure, ax)
    return figure


@styled
def barriers(curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Loss along paths: name of the path -> a barrier curve as JSON; one panel for each data set."""
    data = list(next(iter(curves.values()))["losses"])
    figure, axes = _grid(1, len(data), 4.2, 3.2)
    shades = colours(list(curves))
    for ax, name in zip(axes.flat, data, strict=True):
        for path, curve in curves.items():
            ax.plot(curve["t"], curve["losses"][name], marker=".", color=shades[path], label=path)
        ax.set(title=f"{name} data", xlabel="position on the path t", ylabel="marginalised loss (nats per row)")
    _legend_below(figure, axes.flat[0])
    return figure


@styled
def projections(panels: Mapping[str, Mapping[str, Array]], reference: str | None = None) -> Figure:
    """Scatter plots side by side: title -> method -> points ``(draws, 2)``."""
    figure, axes = _grid(1, len(panels), 4.6, 4.2)
    shades = colours(list(next(iter(panels.values()))))
    for ax, (title, by_method) in zip(axes.flat, panels.items(), strict=True):
        for method, points in by_method.items():
            look: dict[str, Any] = {"s": 7, "alpha": 0.55, "color": shades[method]}
            if method == reference:
                look = {"s": 12, "alpha": 0.8, "color": "#b3b7bf", "zorder": 0}
            ax.scatter(points[:, 0], points[:, 1], lw=0, label=method, **look)
        # A few stray draws must not shrink all others to a dot.
        pooled = np.concatenate(list(by_method.values()))
        low, high = np.quantile(pooled, (0.005, 0.995), axis=0)
        margin = 0.15 * (high - low) + 1e-9
        ax.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
        ax.set(title=title, xticks=[], yticks=[], xlabel="first component", ylabel="second component")
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


@styled
def chain_agreement(r_hats: Mapping[str, Array], sizes: Mapping[str, Array], threshold: float) -> Figure:
    """Sorted R-hat and effective sample sizes: what they were computed for -> one value for each entry."""
    figure, axes = _grid(1, 2, 4.2, 3.2)
    shades = colours(list(r_hats))
    for ax, curves in zip(axes.flat, (r_hats, sizes), strict=True):
        for name, values in curves.items():
            heights = np.sort(values[np.isfinite(values)])
            ax.plot(np.linspace(0, 1, len(heights)), heights, color=shades[name], lw=1.4, label=name)
        ax.set(xlabel="share of the entries", yscale="log")
        ax.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))  # 1.08 and not 1.08 × 10⁰
        ax.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    axes[0, 0].axhline(threshold, color="#999", lw=0.8, ls="--")
    axes[0, 0].set(title="R-hat")
    axes[0, 1].set(title="bulk effective sample size")
    _legend_below(figure, axes.flat[0])
    return figure


@styled
def bars(names: Sequence[str], values: Sequence[float], xlabel: str, ylabel: str, title: str) -> Figure:
    """One bar for each name."""
    figure, axes = _grid(1, 1, max(3.2, 0.8 + 0.5 * len(names)), 3.0)
    axes[0, 0].bar(names, values, color=COLOURS[0])
    axes[0, 0].tick_params(axis="x", rotation=90 if len(names) > 6 else 0)
    axes[0, 0].set(xlabel=xlabel, ylabel=ylabel, title=title)
    return figure


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, NDArray[Any]]:
    """A figure that belongs to no window, so that a thousand of them leak nothing."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _legend_below(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    per_row = max(1, int(figure.get_figwidth() / 1.5))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(per_row, max(1, len(labels))))
