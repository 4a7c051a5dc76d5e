"""The report of a study: one HTML file with its tables and plots inside, to be opened by double click.

``tables.toml`` lists the tables: which numbers, under which heading, and what each means.
"""

from __future__ import annotations

import base64
import io
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pyro_symmetric.compare.frames import pooled_frame
from pyro_symmetric.posterior.tables import table
from pyro_symmetric.store import write_whole
from pyro_symmetric.study.measure import OWN_HALF, nll
from pyro_symmetric.study.methods import make_method
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.weights import Weights

if TYPE_CHECKING:
    from pyro_symmetric.study.compare import Study

Row = Mapping[str, Any]
Array = NDArray[np.floating[Any]]

FEWEST_ROWS = 5  # bins of confidence with fewer test rows say nothing about accuracy
MISSING = "–"  # in place of a number
BEST = {"max": max, "min": min}
# Why a symmetrised guide may lie further away once symmetries are removed.
RISES = (
    "With symmetries removed the number can rise: as drawn, a method that is spread over all copies resembles any "
    "reference that is, whatever its shape within a copy; removed, only that shape is left to be compared."
)
TABLES = tomllib.loads(resources.files(__package__).joinpath("tables.toml").read_text("utf-8"))

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

styled = matplotlib.rc_context(STYLE)  # the library's style, without touching the user's


def write_report(study: Study) -> None:
    """Write ``report.html`` into the study's folder."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pyro_symmetric.study", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    rows, settings = study.results["methods"], study.problem.settings
    text = environment.get_template("report.html").render(
        title=f"Posteriors of a neural network on {study.problem.dataset.name}",
        problem=study.results["problem"],
        conclusion=conclusion(rows, settings.reference),
        command=settings.command(study.out),
        concerns=study.results["concerns"],
        quick=settings.quick,
        methods=[(name, make_method(name, settings.quick).description) for name in settings.methods],
        tables=tables(rows, study.problem.is_classification),
        verdicts={name: row["invariance"]["verdict"] for name, row in rows.items() if row["invariance"]},
        figures=[(heading, caption, _as_image(figure)) for heading, caption, figure in figures(study)],
        settings=study.results["settings"],
        environment=study.results["environment"],
    )
    write_whole(study.report, text.encode(), "report")


# tables ---------------------------------------------------------------------------------------------------------------


def tables(methods: Mapping[str, Row], is_classification: bool) -> list[dict[str, Any]]:
    """All tables of a report with any number in them. Methods without any are left out of a table."""
    other = "regression" if is_classification else "classification"
    found = [table_of(name, methods) for name in TABLES if name != other]
    return [one for one in found if one["rows"]]


def table_of(name: str, methods: Mapping[str, Row]) -> dict[str, Any]:
    """One of the tables that ``tables.toml`` lists, with ``rows``: method -> of each column the text, and whether it is
    the best."""
    about, rows = TABLES[name], dict[str, list[tuple[str, bool]]]()
    for _, path, form, best, _ in about["columns"]:
        values = {method: value_at(row, path) for method, row in methods.items()}
        # In a table of distances the reference, compared with its own half, doesn't compete.
        rivals = [m for m in values if about.get("rivals", True) or value_at(methods[m], "distance/to") != OWN_HALF]
        known = [values[m] for m in rivals if values[m] is not None]
        top = BEST[best](known) if best and len(known) > 1 else None
        for method, value in values.items():
            rows.setdefault(method, []).append(
                (_text(value, form), method in rivals and top is not None and value == top)
            )
    shown = {method: cells for method, cells in rows.items() if any(text != MISSING for text, _ in cells)}
    return {**about, "rows": shown}


def conclusion(rows: Mapping[str, Row], reference: str) -> list[str]:
    """The findings in up to three sentences: of predictions, of distances in them, and in weights."""
    scored = {name: nll(row["prediction"]) for name, row in rows.items()}
    best = min(scored, key=scored.__getitem__)
    other = (
        f" (the reference {reference}: {scored[reference]:.4f})" if reference in scored and best != reference else ""
    )
    said = [f"{best} predicts the test rows best, at {scored[best]:.4f} nats a row{other}."]
    for words, path in (
        ("in what they predict", "distance/prediction/total_variation/mean"),
        ("in weights (symmetries removed)", "distance/removed/mmd/median"),
    ):
        values = {name: value_at(row, path) for name, row in rows.items()}
        found = {name: value for name, value in values.items() if name != reference and value is not None}
        if len(found) > 1:
            near, far = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            said.append(
                f"Closest to the reference {words} is {near} ({found[near]:.3g}; the reference's own halves "
                f"{values[reference]:.3g}), furthest {far} ({found[far]:.3g})."
            )
    return said


def summary_table(methods: Mapping[str, Row], is_classification: bool) -> str:
    """The tables for a terminal."""
    parts = []
    for one in tables(methods, is_classification):
        lines = [(method, *(text for text, _ in cells)) for method, cells in one["rows"].items()]
        parts.append(f"{one['title']}\n{table([('', *(column[0] for column in one['columns'])), *lines])}")
    return "\n\n".join(parts)


def value_at(row: Row, path: str) -> Any:
    """The number at a place in a row of results, keys parted by /; ``None`` if there is none."""
    found: Any = row
    for key in path.split("/"):
        found = None if found is None else found.get(key)
    return found


def _text(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return value or MISSING
    # Smaller p-values say nothing more, and their digits are those of an approximation.
    return "<1e-12" if form.endswith("g") and 0 <= value < 1e-12 else format(value, form)


# figures --------------------------------------------------------------------------------------------------------------


def figures(study: Study) -> list[tuple[str, str, Figure]]:
    """Heading, caption and figure of everything that there is to see."""
    rows, reference = study.results["methods"], study.problem.settings.reference
    shown = []
    if distances := {name: row["distance"] for name, row in rows.items() if row["distance"]}:
        pairs = {n: (d["raw"]["mmd"]["median"], d["removed"]["mmd"]["median"]) for n, d in distances.items()}
        caption = "Squared MMD before and after symmetries are removed. Zero means that the draws can't be told apart. "
        figure = before_and_after(pairs, "squared MMD, median over kernels")
        shown.append(("Distance to the reference", caption + RISES, figure))
    raw = {name: draws.raw for name, draws in study.draws.items()}
    together = pooled_frame([draws.canonical for draws in study.draws.values()], study.problem.symmetry)
    frames = {"as drawn": raw, "symmetries removed": dict(zip(study.draws, together, strict=True))}
    caption = "The first two principal components of all methods' weights, those of the reference in grey."
    for title, weights in frames.items():
        shown.append((f"All draws, {title}", caption, projections(_project(weights), reference)))
    shown.append(_calibration(rows, study.problem))
    caption = "Loss along the Wasserstein geodesic between two fits; the hump over the straight line is the barrier."
    paths = {name: row["barrier"] for name, row in rows.items() if row.get("barrier")}
    shown += [(f"Loss barrier of {name}", caption, barriers(curves)) for name, curves in paths.items()]
    losses = {name: row["losses"] for name, row in rows.items() if row.get("losses")}
    if losses:
        shown.append(("Training", "What each method minimised, or followed, step by step.", loss_curves(losses)))
    return shown


def _project(draws: Mapping[str, Weights]) -> dict[str, Array]:
    from sklearn.decomposition import PCA

    flat = {
        name: torch.cat([v.reshape(len(v), -1) for v in own.values()], 1).double().cpu() for name, own in draws.items()
    }
    # Every method counts alike, however many draws it gave.
    fewest = min(len(points) for points in flat.values())
    pca = PCA(2, svd_solver="full" if fewest * len(flat) < 50 else "auto", random_state=0)
    pca.fit(torch.cat([points[:fewest] for points in flat.values()]).numpy())
    return {name: pca.transform(points.numpy()) for name, points in flat.items()}


def _calibration(rows: Mapping[str, Any], problem: Problem) -> tuple[str, str, Figure]:
    if problem.is_classification:
        labels = "confidence", "accuracy"
        caption = (
            f"Accuracy of test rows against the confidence in them, in bins of at least {FEWEST_ROWS} rows; above the "
            f"diagonal a method is too cautious, below too sure."
        )
    else:
        labels = "level of the interval", "share of targets inside"
        caption = "Share of test targets inside the central predictive interval of each level."
    curves = {}
    for name, row in rows.items():
        if problem.is_classification:
            bins = row["prediction"]["calibration"]
            filled = [i for i, count in enumerate(bins["count"]) if count >= FEWEST_ROWS]
            curves[name] = ([bins["confidence"][i] for i in filled], [bins["accuracy"][i] for i in filled])
        else:
            covered = row["prediction"]["coverage"]
            curves[name] = ([float(level) for level in covered], list(covered.values()))
    return "Calibration", caption, calibration(curves, *labels, problem.settings.reference)


def _as_image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# one figure each, of plain arrays by name -----------------------------------------------------------------------------


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
