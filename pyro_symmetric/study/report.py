"""The report of a study: one HTML file with its tables and plots inside, to be opened by double click."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure

from pyro_symmetric import plots
from pyro_symmetric.compare.frames import pooled_frame
from pyro_symmetric.store import write_whole
from pyro_symmetric.study.methods import make_method
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.study.tables import RISES, conclusion, tables
from pyro_symmetric.weights import Weights

if TYPE_CHECKING:
    from pyro_symmetric.study.compare import Study

# Bins of confidence with fewer test rows say nothing about accuracy.
FEWEST_ROWS = 5


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


def figures(study: Study) -> list[tuple[str, str, Figure]]:
    """Heading, caption and figure of everything that there is to see."""
    rows, reference = study.results["methods"], study.problem.settings.reference
    shown = []
    if distances := {name: row["distance"] for name, row in rows.items() if row["distance"]}:
        pairs = {n: (d["raw"]["mmd"]["median"], d["removed"]["mmd"]["median"]) for n, d in distances.items()}
        caption = "Squared MMD before and after symmetries are removed. Zero means that the draws can't be told apart. "
        figure = plots.before_and_after(pairs, "squared MMD, median over kernels")
        shown.append(("Distance to the reference", caption + RISES, figure))
    raw = {name: draws.raw for name, draws in study.draws.items()}
    together = pooled_frame([draws.canonical for draws in study.draws.values()], study.problem.symmetry)
    frames = {"as drawn": raw, "symmetries removed": dict(zip(study.draws, together, strict=True))}
    caption = "The first two principal components of all methods' weights, those of the reference in grey."
    for title, weights in frames.items():
        shown.append((f"All draws, {title}", caption, plots.projections(_project(weights), reference)))
    shown.append(_calibration(rows, study.problem))
    caption = "Loss along the Wasserstein geodesic between two fits; the hump over the straight line is the barrier."
    barriers = {name: row["barrier"] for name, row in rows.items() if row.get("barrier")}
    shown += [(f"Loss barrier of {name}", caption, plots.barriers(curves)) for name, curves in barriers.items()]
    losses = {name: row["losses"] for name, row in rows.items() if row.get("losses")}
    if losses:
        shown.append(("Training", "What each method minimised, or followed, step by step.", plots.loss_curves(losses)))
    return shown


def _project(draws: Mapping[str, Weights]) -> dict[str, plots.Array]:
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
    return "Calibration", caption, plots.calibration(curves, *labels, problem.settings.reference)


def _as_image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
