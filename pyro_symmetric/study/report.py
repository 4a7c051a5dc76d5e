"""The report of a study: one HTML file with its tables and figures inside; beside it,
figures as SVG and PDF, and tables as CSV.

``tables.toml`` lists the tables: their columns, which numbers these hold, and what each
means.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
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
from pyro_symmetric.weights import Weights

if TYPE_CHECKING:
    from pyro_symmetric.study.compare import Study

Row = Json
Rows = Mapping[str, Row]
Array = NDArray[np.floating[Any]]

FEWEST_ROWS = 5  # test rows of a bin of confidence, for its accuracy to mean anything
FIGURES, CSV = "figures", "tables"  # folders beside the page
MISSING = "–"  # in place of a number
BEST = {"max": max, "min": min}
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
    rows, settings = study.results["methods"], study.problem.settings
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
    text = environment.get_template("report.html").render(
        title="Approximate posteriors of a neural network on "
        f"{study.problem.dataset.name}",
        problem=study.results["problem"],
        conclusion=conclusion(rows, settings.reference),
        command=settings.command(study.out),
        concerns=study.results["concerns"],
        quick=settings.quick,
        methods=[
            (name, make_method(name, settings.quick).description)
            for name in settings.methods
        ],
        tables=filled,
        verdicts={
            name: row["invariance"]["verdict"]
            for name, row in rows.items()
            if row["invariance"]
        },
        figures=shown,
        settings=study.results["settings"],
        environment=study.results["environment"],
    )
    write_whole(study.report, text.encode(), "report")


# tables -------------------------------------------------------------------------------


def tables(methods: Rows, is_classification: bool) -> list[Json]:
    """Return the tables that hold any number."""
    other = "regression" if is_classification else "classification"
    filled = [table_of(name, methods) for name in TABLES if name != other]
    return [one for one in filled if one["rows"]]


def table_of(name: str, methods: Rows) -> Json:
    """Fill a table of ``tables.toml``.

    :returns: its entries there, and ``rows``: method -> (text, whether it is the
        column's best) of each cell; without the methods that have no number.
    """
    entries, rows = TABLES[name], dict[str, list[tuple[str, bool]]]()
    for _, path, form, best, _ in entries["columns"]:
        values = {method: value_at(row, path) for method, row in methods.items()}
        # The reference's distance is that of its own halves.
        rivals = [
            m
            for m in values
            if entries.get("rivals", True)
            or value_at(methods[m], "distance/to") != OWN_HALF
        ]
        compared = [values[m] for m in rivals if values[m] is not None]
        top = BEST[best](compared) if best and len(compared) > 1 else None
        for method, value in values.items():
            is_best = method in rivals and top is not None and value == top
            text = _text(value, form)
            if error := methods[method].get("errors", {}).get(path):
                text += f" ± {error:{form.removeprefix('+')}}"
            rows.setdefault(method, []).append((text, is_best))
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
    path = folder / f"{_file_name(entries['title'])}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        titles = [column[0] for column in entries["columns"]]
        heads = [head for title in titles for head in (title, f"{title}, error")]
        writer.writerow(["method", *heads])
        for method in entries["rows"]:
            row = methods[method]
            cells = []
            for _, place, *_ in entries["columns"]:
                cells += [value_at(row, place), row.get("errors", {}).get(place)]
            writer.writerow([method, *cells])


def conclusion(rows: Rows, reference: str) -> list[str]:
    """Sum up in at most three sentences: predictions, distances of predictions,
    distances of weights.
    """
    scored = {name: nll(row["prediction"]) for name, row in rows.items()}
    best = min(scored, key=scored.__getitem__)
    aside = (
        f" ({reference}, the reference: {scored[reference]:.4f})"
        if reference in scored and best != reference
        else ""
    )
    score = f"{scored[best]:.4f} nats per row{aside}"
    sentences = [
        f"{best} predicts the test rows best: its negative log-likelihood is {score}."
    ]
    for space, path in (
        ("predictions (total variation)", "distance/prediction/total_variation/mean"),
        ("weights, symmetries removed (squared MMD)", "distance/removed/mmd/median"),
    ):
        values = {name: value_at(row, path) for name, row in rows.items()}
        others = {
            name: value
            for name, value in values.items()
            if name != reference and value is not None
        }
        if len(others) > 1:
            closest, farthest = (
                min(others, key=others.__getitem__),
                max(others, key=others.__getitem__),
            )
            sentences.append(
                f"In {space}, {closest} is closest to the reference "
                f"({others[closest]:.3g}) and {farthest} farthest "
                f"({others[farthest]:.3g}); the two halves of the reference are "
                f"{values[reference]:.3g} apart."
            )
    return sentences


def summary_table(methods: Rows, is_classification: bool) -> str:
    """Format the tables for a terminal."""
    parts = []
    for one in tables(methods, is_classification):
        lines = [
            (method, *(text for text, _ in cells))
            for method, cells in one["rows"].items()
        ]
        parts.append(
            f"{one['title']}\n{table([('', *(column[0] for column in one['columns'])), *lines])}"
        )
    return "\n\n".join(parts)


def value_at(row: Row, path: str) -> Any:
    """Look up a path ``key/key/...`` in a row of results; ``None`` if it leads
    nowhere.
    """
    value: Any = row
    for key in path.split("/"):
        value = None if value is None else value.get(key)
    return value


def _text(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return value or MISSING
    # The digits of smaller p-values are those of an approximation.
    return (
        "<1e-12" if form.endswith("g") and 0 <= value < 1e-12 else format(value, form)
    )


# figures ------------------------------------------------------------------------------


def figures(study: Study) -> list[tuple[str, str, Figure]]:
    """Draw the figures of a report: heading, caption, figure."""
    rows, reference = study.results["methods"], study.problem.settings.reference
    shown = []
    if distances := {
        name: row["distance"] for name, row in rows.items() if row["distance"]
    }:
        caption = "Squared MMD before and after symmetries are removed. Zero: the draws can't be told apart. The text "
        caption += "above the table says why removing symmetries can raise a distance."
        shown.append(
            ("Distance to the reference", caption, before_and_after(distances))
        )
    raw = {name: draws.raw for name, draws in study.draws.items()}
    together = pooled_frame(
        [draws.canonical for draws in study.draws.values()], study.problem.symmetry
    )
    frames = {
        "as drawn": raw,
        "symmetries removed": dict(zip(study.draws, together, strict=True)),
    }
    caption = "First two principal components of the weights of all methods; the reference in grey."
    for title, weights in frames.items():
        shown.append(
            (
                f"All draws, {title}",
                caption,
                projections(_project(weights), reference),
            )
        )
    if study.problem.is_classification:
        caption = f"Accuracy on test rows against confidence, in bins of at least {FEWEST_ROWS} rows. Above the diagonal "
        caption += "a method is underconfident, below it overconfident."
    else:
        caption = "Share of test targets inside the central predictive interval of each level. Above the diagonal the "
        caption += "intervals are too wide, below it too narrow."
    shown.append(
        (
            "Calibration",
            caption,
            calibration({n: r["prediction"] for n, r in rows.items()}, reference),
        )
    )
    caption = "Loss along the Wasserstein geodesic between two fits. The barrier is its largest height above the straight "
    caption += "line between its ends."
    paths = {name: row["barrier"] for name, row in rows.items() if row.get("barrier")}
    shown += [
        (f"Loss barrier of {name}", caption, barriers(curves))
        for name, curves in paths.items()
    ]
    if losses := {
        name: row["losses"] for name, row in rows.items() if row.get("losses")
    }:
        caption = (
            "The objective of each method by step; of chains, the potential energy."
        )
        shown.append(("Training", caption, loss_curves(losses)))
    return shown


class Projected(NamedTuple):
    """Points ``(draws, 2)`` of each method, and the components' shares of variance."""

    points: dict[str, Array]
    shares: Array


def _project(draws: Mapping[str, Weights]) -> Projected:
    """Project all draws on their first two principal components."""
    from sklearn.decomposition import PCA

    flat = {
        name: torch.cat([v.reshape(len(v), -1) for v in own.values()], 1).double().cpu()
        for name, own in draws.items()
    }
    # Every method counts alike, however many draws it has.
    fewest = min(len(points) for points in flat.values())
    pca = PCA(
        2, svd_solver="full" if fewest * len(flat) < 50 else "auto", random_state=0
    )
    pca.fit(torch.cat([points[:fewest] for points in flat.values()]).numpy())
    points = {name: pca.transform(values.numpy()) for name, values in flat.items()}
    return Projected(points, pca.explained_variance_ratio_)


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
    panels = {}
    for name, by_label in curves.items():
        panels[name] = {
            label: (range(len(values) // 10, len(values)), values[len(values) // 10 :])
            for label, values in by_label.items()
        }
    return line_panels(panels, xlabel="step", marker="")


def calibration(scores: Rows, reference: str) -> Figure:
    """Plot reliability curves of method -> scores beside the diagonal, a panel per
    method, each with the reference's.

    A classifier's curve is accuracy against confidence, a regression's coverage of
    intervals against their level.
    """
    curves: Json = {}
    for name, row in scores.items():
        if "coverage" in row:
            labels = {"xlabel": "level of the interval", "ylabel": "share inside"}
            levels = [float(level) for level in row["coverage"]]
            curves[name] = (levels, list(row["coverage"].values()))
        else:
            labels = {"xlabel": "confidence", "ylabel": "accuracy"}
            bins = row["calibration"]
            filled = np.array(bins["count"]) >= FEWEST_ROWS
            both = (bins["confidence"], bins["accuracy"])
            curves[name] = [np.array(values)[filled] for values in both]
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
    points, shares = projected
    figure, panels = _panels(_others(points, reference), 3.6, 2.9)
    # A few stray draws must not shrink all others to a dot.
    low, high = np.quantile(
        np.concatenate(list(points.values())), (0.005, 0.995), axis=0
    )
    margin = 0.15 * (high - low) + 1e-9
    limits = {
        "xlim": (low[0] - margin[0], high[0] + margin[0]),
        "ylim": (low[1] - margin[1], high[1] + margin[1]),
    }
    for method, ax in panels.items():
        if reference in points:
            x, y = points[reference].T
            ax.scatter(x, y, s=7, alpha=0.6, color=GREY, lw=0, label=reference)
        x, y = points[method].T
        ax.scatter(x, y, s=7, alpha=0.5, color=BLUE, lw=0, label="the method")
        labels = {
            f"{axis}label": f"component {k} ({share:.0%} of variance)"
            for axis, k, share in zip("xy", (1, 2), shares, strict=True)
        }
        ax.set(title=method, **labels, **limits)
    return _with_legend(figure, next(iter(panels.values())))


@styled
def before_and_after(distances: Rows) -> Figure:
    """Join the squared MMD of each method as drawn and with symmetries removed by a
    line.
    """
    figure, panels = _panels([""], 6.4, 0.9 + 0.34 * len(distances))
    ax, heights = panels[""], range(len(distances))
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
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
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
