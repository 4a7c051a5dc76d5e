"""The report of a study: one HTML file with its tables and figures inside; beside it,
figures as SVG and PDF, and tables as CSV.

``tables.toml`` lists the tables: their columns, which numbers these hold, and what each
means.
"""

from __future__ import annotations

import base64
import io
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pyro_symmetric.arguments import Json
from pyro_symmetric.compare.frames import pooled_frame
from pyro_symmetric.posterior.tables import table
from pyro_symmetric.store import write_whole
from pyro_symmetric.study.measure import OWN_HALF, nll
from pyro_symmetric.study.methods import make_method
from pyro_symmetric.weights import Weights, drop_names, map_values

if TYPE_CHECKING:
    from pyro_symmetric.study.compare import Study

Row = Json
Rows = Mapping[str, Row]
Array = NDArray[np.floating[Any]]

FEWEST_ROWS = 5  # test rows of a bin of confidence, for its accuracy to mean anything
FIGURES, CSV = "figures", "tables"  # folders beside the page
MISSING = "–"  # in place of a number
TABLES = tomllib.loads(
    resources.files(__package__).joinpath("tables.toml").read_text("utf-8")
)

BLUE, YELLOW, RED = ("#4269d0", "#efb118", "#ff725c")
GREY = "#999da6"
COLOURS = (BLUE, YELLOW, GREY)
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
}

styled = matplotlib.rc_context(STYLE)  # the user's own style stays


def write_report(study: Study) -> None:
    """Write ``report.html`` into the study's folder."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pyro_symmetric.study", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    rows = study.results["methods"]
    settings = study.problem.settings
    for folder in (FIGURES, CSV):
        (study.out / folder).mkdir(exist_ok=True)
    shown = []
    for heading, caption, figure in figures(study):
        name = _file_name(heading)
        _save(figure, study.out / FIGURES / name)
        caption += f" Files: {FIGURES}/{name}.svg and .pdf."
        shown.append((heading, caption, _as_image(figure)))
    filled = tables(rows, study.problem.is_classification)
    for entries in filled:
        _save_csv(entries, rows, study.out / CSV)
    descriptions = {
        name: make_method(name, settings.quick).description for name in settings.methods
    }
    text = environment.get_template("report.html").render(
        study.results,
        title="Approximate posteriors of a neural network on "
        f"{study.problem.dataset.name}",
        conclusion=conclusion(rows, settings.reference),
        command=settings.command(study.out),
        descriptions=descriptions,
        tables=filled,
        figures=shown,
    )
    write_whole(study.report, text.encode(), "report")


# tables -------------------------------------------------------------------------------


def by_path(methods: Rows) -> pd.DataFrame:
    """Return a row of numbers for each method, in columns named ``key/key/...``."""
    return pd.json_normalize(list(methods.values()), sep="/").set_axis(list(methods))


def column(numbers: pd.DataFrame, path: str) -> pd.Series:
    """Return the column of a path; NaN if it leads nowhere."""
    return numbers.get(path, pd.Series(math.nan, numbers.index))


def tables(methods: Rows, is_classification: bool) -> list[Json]:
    """Return the tables that hold any number."""
    inapplicable = "regression" if is_classification else "classification"
    filled = [table_of(name, methods) for name in TABLES if name != inapplicable]
    return [entries for entries in filled if entries["rows"]]


def table_of(name: str, methods: Rows) -> Json:
    """Fill a table of ``tables.toml``.

    :returns: its entries there, and ``rows``: method -> (text, whether it is the
        column's best) of each cell; without the methods that have no number.
    """
    entries = TABLES[name]
    numbers = by_path(methods)
    rows: dict[str, list[tuple[str, bool]]] = {method: [] for method in methods}
    # The reference's distance is that of its own halves.
    competes = column(numbers, "distance/to") != OWN_HALF
    for _, path, form, best, _ in entries["columns"]:
        values = column(numbers, path)
        errors = column(numbers, f"errors/{path}")
        compared = values.dropna()
        if not entries.get("rivals", True):
            compared = compared[competes]
        top = getattr(compared, best)() if best and len(compared) > 1 else None
        for method, value in values.items():
            text = _text(value, form)
            if errors[method] > 0:
                text += f" ± {errors[method]:{form.removeprefix('+')}}"
            rows[method].append((text, method in compared and value == top))
    shown = {
        method: cells
        for method, cells in rows.items()
        if any(text != MISSING for text, _ in cells)
    }
    return {**entries, "rows": shown}


def _file_name(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _save_csv(entries: Row, methods: Rows, folder: Path) -> None:
    """Write the numbers of a table and their standard errors."""
    numbers = by_path(methods)
    heads = []
    columns = []
    for head, path, *_ in entries["columns"]:
        heads += [head, f"{head}, error"]
        columns += [column(numbers, path), column(numbers, f"errors/{path}")]
    filled = pd.concat(columns, axis=1).set_axis(heads, axis=1)
    filled.loc[list(entries["rows"])].convert_dtypes().to_csv(
        folder / f"{_file_name(entries['title'])}.csv", index_label="method"
    )


def conclusion(rows: Rows, reference: str) -> list[str]:
    """Sum up in at most three sentences: predictions, distances of predictions,
    distances of weights.
    """
    numbers = by_path(rows)
    scores = pd.Series({name: nll(row["prediction"]) for name, row in rows.items()})
    best = scores.idxmin()
    aside = ""
    if reference in scores and best != reference:
        aside = f" ({reference}, the reference: {scores[reference]:.4f})"
    sentences = [
        f"{best} predicts the test rows best: its negative log-likelihood is "
        f"{scores[best]:.4f} nats per row{aside}."
    ]
    for space, path in (
        ("predictions (total variation)", "distance/prediction/total_variation/mean"),
        ("weights, symmetries removed (squared MMD)", "distance/removed/mmd/median"),
    ):
        values = column(numbers, path)
        compared = values.drop(reference, errors="ignore").dropna()
        if len(compared) > 1:
            sentences.append(
                f"In {space}, {compared.idxmin()} is closest to the reference "
                f"({compared.min():.3g}) and {compared.idxmax()} farthest "
                f"({compared.max():.3g}); the two halves of the reference are "
                f"{values[reference]:.3g} apart."
            )
    return sentences


def summary_table(methods: Rows, is_classification: bool) -> str:
    """Format the tables for a terminal."""
    parts = []
    for entries in tables(methods, is_classification):
        lines = [("", *(head for head, *_ in entries["columns"]))]
        for method, cells in entries["rows"].items():
            lines.append((method, *(text for text, _ in cells)))
        parts.append(f"{entries['title']}\n{table(lines)}")
    return "\n\n".join(parts)


def _text(value: Any, form: str) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return MISSING
    # The digits of smaller p-values are those of an approximation.
    return (
        "<1e-12" if form.endswith("g") and 0 <= value < 1e-12 else format(value, form)
    )


# figures ------------------------------------------------------------------------------


def figures(study: Study) -> Iterator[tuple[str, str, Figure]]:
    """Draw the figures of a report: heading, caption, figure."""
    rows = study.results["methods"]
    reference = study.problem.settings.reference
    if distances := _having(rows, "distance"):
        yield (
            "Distance to the reference",
            "Squared MMD before and after symmetries are removed. Zero: the draws "
            "can't be told apart. The text above the table says why removing "
            "symmetries can raise a distance.",
            before_and_after(distances),
        )
    canonical = [draws.canonical for draws in study.draws.values()]
    together = pooled_frame(canonical, study.problem.symmetry)
    for title, weights in {
        "as drawn": [draws.raw for draws in study.draws.values()],
        "symmetries removed": together,
    }.items():
        projected = _project(dict(zip(study.draws, weights, strict=True)))
        yield (
            f"All draws, {title}",
            "First two principal components of the weights of all methods; the "
            "reference in grey.",
            projections(projected, reference),
        )
    yield (
        "Calibration",
        f"Accuracy on test rows against confidence, in bins of at least {FEWEST_ROWS} "
        "rows. Above the diagonal a method is underconfident, below it overconfident."
        if study.problem.is_classification
        else "Share of test targets inside the central predictive interval of each "
        "level. Above the diagonal the intervals are too wide, below it too narrow.",
        calibration(_having(rows, "prediction"), reference),
    )
    for name, curves in _having(rows, "barrier").items():
        yield (
            f"Loss barrier of {name}",
            "Loss along the Wasserstein geodesic between two fits. The barrier is its "
            "largest height above the straight line between its ends.",
            barriers(curves),
        )
    if losses := _having(rows, "losses"):
        yield (
            "Training",
            "The objective of each method by step; of chains, the potential energy.",
            loss_curves(losses),
        )


def _having(rows: Rows, name: str) -> Rows:
    """Return an entry of the rows that have it."""
    return {method: row[name] for method, row in rows.items() if row.get(name)}


class Projected(NamedTuple):
    """Points ``(draws, 2)`` of each method, and the components' shares of variance."""

    points: dict[str, Array]
    shares: Array


def _project(draws: Mapping[str, Weights]) -> Projected:
    """Project all draws on their first two principal components."""
    from sklearn.decomposition import PCA

    flat = {}
    for name, weights in draws.items():
        parts = [value.reshape(len(value), -1) for value in weights.values()]
        flat[name] = torch.cat(parts, 1).double().cpu().numpy()
    # Every method counts alike, however many draws it has.
    fewest = min(map(len, flat.values()))
    solver = "full" if fewest * len(flat) < 50 else "auto"
    pca = PCA(2, svd_solver=solver, random_state=0)
    pca.fit(np.concatenate([points[:fewest] for points in flat.values()]))
    return Projected(map_values(pca.transform, flat), pca.explained_variance_ratio_)


def _as_image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG and PDF."""
    for kind in ("svg", "pdf"):
        figure.savefig(path.with_suffix(f".{kind}"))


def loss_curves(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Plot method -> label -> losses, a panel per method; the first tenth, which is too
    high, is left out.
    """
    panels: Json = {}
    for name, by_label in curves.items():
        if not any(by_label.values()):
            continue  # points of a path between two fits weren't trained
        panels[name] = {}
        for label, values in by_label.items():
            start = len(values) // 10
            panels[name][label] = (range(start, len(values)), values[start:])
    return line_panels(panels, xlabel="step", marker="")


def calibration(scores: Rows, reference: str) -> Figure:
    """Plot reliability curves of method -> scores beside the diagonal, a panel per
    method, each with the reference's.

    A classifier's curve is accuracy against confidence, a regression's coverage of
    intervals against their level.
    """
    labels = {"xlabel": "confidence", "ylabel": "accuracy"}
    curves: Json = {}
    for name, row in scores.items():
        if "coverage" in row:
            labels = {"xlabel": "level of the interval", "ylabel": "share inside"}
            curves[name] = ([*map(float, row["coverage"])], [*row["coverage"].values()])
        else:
            bins = pd.DataFrame(drop_names(row["calibration"], ["edges"]))
            filled = bins[bins["count"] >= FEWEST_ROWS]
            curves[name] = (filled["confidence"], filled["accuracy"])
    panels = {}
    for name in _others(curves, reference):
        panels[name] = {"the method": curves[name]}
        if reference in curves:
            panels[name][reference] = curves[reference]
        panels[name]["calibrated"] = ((0, 1), (0, 1))
    return line_panels(panels, **labels, xlim=(0, 1), ylim=(0, 1))


def barriers(curves: Rows) -> Figure:
    """Plot the loss along paths, name -> barrier curve as JSON, a panel per data
    set.
    """
    panels: dict[str, Json] = {}
    for path, curve in curves.items():
        for name, losses in curve["losses"].items():
            panels.setdefault(f"{name} data", {})[path] = (curve["t"], losses)
    ylabel = "marginalised loss (nats per row)"
    return line_panels(panels, xlabel="position on the path t", ylabel=ylabel)


@styled
def line_panels(panels: Rows, marker: str = ".", **options: Any) -> Figure:
    """Plot title -> label -> x and y, a panel for each title.

    :param options: of all axes: labels and limits.
    """
    figure, axes = _panels(list(panels), 3.6, 2.7)
    for title, ax in axes.items():
        for (label, (x, y)), colour in zip(
            panels[title].items(), COLOURS, strict=False
        ):
            ax.plot(x, y, label=label, marker=marker, color=colour, lw=1)
        # a single curve is what its axis holds
        ax.set(title=title, **{"ylabel": label, **options})
    if len(panels[title]) == 1:
        return figure
    return _with_legend(figure, ax)


@styled
def projections(projected: Projected, reference: str) -> Figure:
    """Scatter the points of each method in a panel of its own, those of the reference
    in grey.
    """
    points = projected.points
    figure, panels = _panels(_others(points, reference), 3.6, 2.9)
    # A few stray draws must not shrink all others to a dot.
    low, high = np.quantile(np.concatenate([*points.values()]), (0.005, 0.995), axis=0)
    margin = 0.15 * (high - low) + 1e-9
    (x_low, bottom), (right, top) = low - margin, high + margin
    xlabel, ylabel = (
        f"component {number} ({share:.0%} of variance)"
        for number, share in enumerate(projected.shares, 1)
    )
    for method, ax in panels.items():
        if reference in points:
            x, y = points[reference].T
            ax.scatter(x, y, s=7, alpha=0.6, color=GREY, lw=0, label=reference)
        x, y = points[method].T
        ax.scatter(x, y, s=7, alpha=0.5, color=BLUE, lw=0, label="the method")
        ax.set(title=method, xlabel=xlabel, ylabel=ylabel)
        ax.set(xlim=(x_low, right), ylim=(bottom, top))
    return _with_legend(figure, ax)


@styled
def before_and_after(distances: Rows) -> Figure:
    """Join the squared MMD of each method as drawn and with symmetries removed by a
    line.
    """
    figure, panels = _panels([""], 6.4, 0.9 + 0.34 * len(distances))
    ax = panels[""]
    heights = range(len(distances))
    before, after = (
        [row[kind]["mmd"]["median"] for row in distances.values()]
        for kind in ("raw", "removed")
    )
    ax.hlines(heights, before, after, color="#bbb", lw=1.5, zorder=1)
    ax.scatter(before, heights, color=RED, label="as drawn", zorder=2)
    ax.scatter(after, heights, color=BLUE, label="symmetries removed", zorder=2)
    ax.axvline(0, color=GREY, lw=0.8, ls="--")
    ax.set(
        yticks=list(heights),
        yticklabels=list(distances),
        xlabel="squared MMD, median over kernels",
    )
    ax.invert_yaxis()
    return _with_legend(figure, ax)


def _others(names: Row, reference: str) -> list[str]:
    """Return all names but the reference's, or that alone if there are no others."""
    return [name for name in names if name != reference] or list(names)


def _panels(
    names: Sequence[str], width: float, height: float
) -> tuple[Figure, dict[str, Axes]]:
    """Make a figure of a panel per name, at most three in a row. It has no window, and
    needs no closing.
    """
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(width * columns, height * rows))
    figure.set_layout_engine("constrained", hspace=0.08)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    return figure, dict(zip(names, axes.flat, strict=False))


def _with_legend(figure: Figure, ax: Axes) -> Figure:
    """Put the legend of one panel below the figure."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(1, min(3, len(labels)))
    )
    return figure
