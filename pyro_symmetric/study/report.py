"""The report of a study: one HTML file with its tables and plots inside, to be opened by double click."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure

from pyro_symmetric import plots
from pyro_symmetric.compare.frames import pooled_frame
from pyro_symmetric.storage import write_whole
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
    rows = study.results["methods"]
    text = environment.get_template("report.html").render(
        title=f"Posteriors of a neural network on {study.problem.dataset.name}",
        problem=study.results["problem"],
        conclusion=conclusion(rows, study.problem.settings.reference),
        command=study.problem.settings.command(study.out),
        concerns=study.results["concerns"],
        quick=study.problem.settings.quick,
        methods=[(name, _described(name, study.problem)) for name in study.problem.settings.methods],
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
    caption = (
        "The first two principal components of all methods' weights, those of the reference in grey: as drawn, and "
        "with symmetries removed, in one frame for the draws of all methods."
    )
    projected = {title: _project(draws) for title, draws in frames.items()}
    shown.append(("All draws, projected", caption, plots.projections(projected, reference)))
    shown.append(_calibration(rows, study.problem))
    caption = "Loss along the Wasserstein geodesic between two fits; the hump over the straight line is the barrier."
    barriers = {name: row["barrier"] for name, row in rows.items() if row["barrier"]}
    shown += [(f"Loss barrier of {name}", caption, plots.barriers(curves)) for name, curves in barriers.items()]
    curves = {
        name: (fit.losses, int(fit.posterior.metadata.get("loss_stride", 1)), fit.loss_label)
        for name, fit in study.fits.items()
        if len(fit.losses) > 1
    }
    if curves:
        shown.append(("Training", "What each method minimised, or followed, step by step.", plots.loss_curves(curves)))
    return shown


def _described(name: str, problem: Problem) -> str:
    settings = problem.settings
    method = make_method(name, settings.quick, settings.budgets.get(name))
    reason = method.too_large(problem, method.parts)
    return f"{method.description} Left out here: {reason}." if reason else method.description


def _project(draws: Mapping[str, Weights]) -> dict[str, plots.Array]:
    from sklearn.decomposition import PCA

    flat = {
        n: torch.cat([v.reshape(len(v), -1) for v in own.values()], 1).double().cpu().numpy()
        for n, own in draws.items()
    }
    # Every method counts alike, however many draws it gave.
    fewest = min(len(points) for points in flat.values())
    pca = PCA(2, svd_solver="full" if fewest * len(flat) < 50 else "auto", random_state=0)
    pca.fit(np.concatenate([points[:fewest] for points in flat.values()]))
    return {name: pca.transform(points) for name, points in flat.items()}


def _calibration(rows: Mapping[str, Any], problem: Problem) -> tuple[str, str, Figure]:
    predictions = {name: row["prediction"] for name, row in rows.items()}
    if not problem.is_classification:
        curves = {
            n: ([float(level) for level in p["coverage"]], [*p["coverage"].values()]) for n, p in predictions.items()
        }
        caption = "Share of test targets inside the central predictive interval of each level."
        labels = "level of the interval", "share of targets inside"
        return "Calibration", caption, plots.calibration(curves, *labels, problem.settings.reference)
    curves = {}
    for name, prediction in predictions.items():
        bins = prediction["calibration"]
        filled = [i for i, count in enumerate(bins["count"]) if count >= FEWEST_ROWS]
        curves[name] = ([bins["confidence"][i] for i in filled], [bins["accuracy"][i] for i in filled])
    caption = (
        f"Accuracy of test rows against the confidence in them, in bins of at least {FEWEST_ROWS} rows; above the "
        f"diagonal a method is too cautious, below too sure."
    )
    return "Calibration", caption, plots.calibration(curves, "confidence", "accuracy", problem.settings.reference)


def _as_image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
