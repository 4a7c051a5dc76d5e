"""Pictures of results by matplotlib, drawn into axes of the caller's or new ones.

Results have a method ``plot(ax=None)`` each, which calls these functions and returns
the axes; they know arrays and names only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Place = tuple[str, int]  # a site and one of its axes
Shapes = Mapping[str, Sequence[int]]
MOST_ENTRIES = 10  # of a site, whose traces are drawn


def axes_or_new(ax: Any, columns: int = 1, rows: int = 0) -> Any:
    """Return axes, or those of a new figure if there are none.

    :param rows: the number of lines of text beside the axes.
    :raises TypeError: if there are others than axes.
    """
    if ax is not None:
        axes = [ax] if columns == 1 else ax
        if not isinstance(axes, Iterable) or not all(map(_is_axes, axes)):
            wanted = "axes" if columns == 1 else f"a sequence of {columns} axes"
            raise TypeError(
                f"ax is a {type(ax).__name__}; it must be {wanted} of matplotlib, or "
                "None for new ones"
            )
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    size = (3 + 3 * columns, max(3.5, 1 + 0.25 * rows))
    return pyplot.subplots(1, columns, figsize=size, layout="constrained")[1]


def _is_axes(value: Any) -> bool:
    return hasattr(value, "transData")


def curves(
    ax: Any,
    lines: Mapping[str, tuple[Any, Any]],
    xlabel: str,
    ylabel: str,
    **style: Any,
) -> Any:
    """Plot lines by name, each of x and y."""
    ax = axes_or_new(ax)
    for name, (x, y) in lines.items():
        ax.plot(x, y, label=name, **style)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def dots(ax: Any, series: Mapping[str, Mapping[str, float]], xlabel: str) -> Any:
    """Plot numbers by the name of their row, in a colour for each series."""
    names = list(dict.fromkeys(name for row in series.values() for name in row))
    ax = axes_or_new(ax, rows=len(names))
    for label, numbers in series.items():
        heights = [names.index(name) for name in numbers]
        ax.scatter(list(numbers.values()), heights, label=label)
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel=xlabel)
    ax.invert_yaxis()
    ax.legend(frameon=False)
    return ax


def histogram(ax: Any, values: Any, xlabel: str) -> Any:
    """Plot a histogram of numbers."""
    ax = axes_or_new(ax)
    ax.hist(values, bins=30)
    ax.set(xlabel=xlabel, ylabel="count")
    return ax


def traces(ax: Any, site: str, draws: Any) -> Any:
    """Plot a line for each chain of each entry, and beside it the entry's marginals.

    :param ax: a pair of axes.
    :param draws: ``(chains, draws, entries)``, of which the first ten entries are
        drawn.
    """
    trace_axes, density_axes = axes = axes_or_new(ax, 2)
    shown = draws[..., :MOST_ENTRIES]
    for entry in range(shown.shape[-1]):
        for chain in shown[..., entry]:
            trace_axes.plot(chain, color=f"C{entry}", lw=0.6, alpha=0.7)
            density_axes.hist(
                chain,
                bins=30,
                density=True,
                histtype="step",
                orientation="horizontal",
                color=f"C{entry}",
            )
    title = site
    if shown.shape[-1] < draws.shape[-1]:
        title += f", {shown.shape[-1]} of {draws.shape[-1]} entries"
    trace_axes.set(title=title, xlabel="draw", ylabel=site)
    density_axes.set(title="a line for each chain", xlabel="density", ylabel=site)
    return axes


def coloured_axes(ax: Any, sites: Shapes, units: Mapping[str, Iterable[Place]]) -> Any:
    """Plot the axes of sites as cells with their lengths, coloured by the units that
    lie along them; grey ones stay.

    :param units: name -> the axes along which they lie.
    """
    ax = axes_or_new(ax, rows=len(sites))
    along: dict[Place, list[tuple[int, str]]] = {}
    for number, (name, places) in enumerate(units.items()):
        for place in places:
            along.setdefault(place, []).append((number, name))
    for row, (site, shape) in enumerate(sites.items()):
        for dim, length in enumerate(shape):
            ax.barh(row, 0.9, 0.8, dim, color="0.85")
            names = along.get((site, dim), [])
            for k, (number, name) in enumerate(names):
                height = 0.8 / len(names)
                bottom = row - 0.4 + k * height
                style = {"align": "edge", "color": f"C{number % 10}", "label": name}
                ax.barh(bottom, 0.9, height, dim, **style)
            ax.text(dim + 0.45, row, length, ha="center", va="center")
    ax.set(yticks=range(len(sites)), yticklabels=list(sites), xticks=[], xlabel="axes")
    ax.invert_yaxis()
    handles, labels = ax.get_legend_handles_labels()
    colours = dict(zip(labels, handles, strict=True))
    ax.legend(colours.values(), colours, title="units", bbox_to_anchor=(1, 1))
    return ax
