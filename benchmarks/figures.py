"""Draw the pictures of the page "What was measured".

    python -m benchmarks.figures

Tables are read as the records hold them, in ``benchmarks/results``; distances and
R-hats from the leaderboard and the certificates of the reference posteriors, and
verdicts from the page of networks. The pictures are written to
``docs/_static/measured``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.record import RESULTS
from benchmarks.references.table import PAGES
from pyro_symmetric.references import CERTIFICATE, CHECKOUT, reference_names

PICTURES = Path(__file__).parents[1] / "docs" / "_static" / "measured"


class Estimate(NamedTuple):
    """A figure of a record, with its standard error."""

    value: float
    error: float


def estimate(text: str) -> Estimate:
    """Read "+0.174 ± 0.014"."""
    value, _, error = text.partition("±")
    return Estimate(float(value), float(error or 0.0))


def tables(record: str) -> dict[str, pd.DataFrame]:
    """Return the tables of a record by title, all cells as text."""
    lines = json.loads((RESULTS / f"{record}.json").read_text())["output"]
    read = {}
    for number, title in enumerate(lines[:-1]):
        if not title or title.startswith(" ") or not lines[number + 1].startswith("  "):
            continue
        rows = []
        for line in lines[number + 1 :]:
            if not line.startswith("  "):
                break
            rows.append(re.split(r"\s{2,}", line.strip()))
        read[title] = pd.DataFrame(rows[1:], columns=rows[0])
    return read


def bars(axes: Axes, labels: list[str], estimates: list[Estimate]) -> None:
    """Draw one horizontal point with its error bar for each label, the first on top."""
    places = range(len(labels))
    axes.errorbar(
        [point.value for point in estimates],
        places,
        xerr=[point.error for point in estimates],
        fmt="o",
        capsize=3,
    )
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


# pictures -----------------------------------------------------------------------------


def predictions(axes: Axes) -> None:
    """Draw what symmetrised training adds to the log-likelihood of test rows."""
    table = next(iter(tables("experiments.beyond.little_data").values()))
    differences = table["difference"].iloc[:, 0]
    bars(axes, [*table["case"]], [estimate(text) for text in differences])
    axes.axvline(0, color="grey", linewidth=1)
    axes.set_xlabel("log-likelihood of a test row: symmetrised less plain, nats")


def agreement(axes: Axes) -> None:
    """Draw the R-hats of the chains of the reference posteriors."""
    spaces = {"weights": "s", "modulo symmetry": "o", "predictions": "x"}
    certificates = {
        name: json.loads((CHECKOUT / name / CERTIFICATE).read_text())["samplers"][
            "NUTS"
        ]
        for name in reference_names()
    }
    for space, marker in spaces.items():
        points = [
            (numbers[space]["r_hat"] - 1, place)
            for place, numbers in enumerate(certificates.values())
            if space in numbers
        ]
        label = "weights as drawn" if space == "weights" else space
        axes.plot(*zip(*points, strict=True), marker, label=label)
    axes.axvline(0.01, color="grey", linewidth=1)
    axes.set_yticks(range(len(certificates)), certificates)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("R-hat of 64 chains of NUTS, less 1; at most 0.01 agree")
    axes.legend()


def distances(axes: Axes) -> None:
    """Draw the distances of approximations from the reference posteriors."""
    board = pd.read_csv(PAGES / "leaderboard.csv")
    for method, rows in board.groupby("method", sort=False):
        axes.errorbar(
            rows["predictions"],
            rows["reference"],
            xerr=rows["predictions: error"],
            fmt="o",
            capsize=3,
            label=method,
        )
    floors = board.groupby("reference", sort=False)["predictions: noise floor"].first()
    axes.plot(floors, floors.index, "k|", markersize=14, label="noise floor")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("mean total variation of predictions from the reference")
    axes.legend(fontsize="small")


def found(axes: Axes) -> None:
    """Draw what became of the networks of each library."""
    counts = dict[str, dict[str, int]]()
    for section in (PAGES / "networks.md").read_text().split("\n## ")[1:]:
        library, _, text = section.partition("\n")
        rows = [line for line in text.splitlines() if line.startswith("|")][2:]
        verdicts = [row.split("|")[-2].strip() for row in rows]
        counts[library] = {
            "found and verified": sum(v.startswith("yes") for v in verdicts),
            "with moves that fail": sum(v.startswith("NO") for v in verdicts),
            "refused or failed": sum(v[:3] not in ("yes", "NO:") for v in verdicts),
        }
    table = pd.DataFrame(counts).T
    table.plot.barh(stacked=True, ax=axes, color=["C2", "C3", "0.7"])
    axes.invert_yaxis()
    axes.set_xlabel("networks")


def cost(axes: Axes) -> None:
    """Draw the time of a step with matched units, beside one of the plain guide."""
    table = next(iter(tables("performance.symmetrized_cost").values()))
    bars(
        axes,
        [*table["inputs, depth, width"]],
        [estimate(text) for text in table["matched, times"]],
    )
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_ylabel("inputs, hidden layers, width")
    axes.set_xlabel("time of a step, relative to the plain guide's")


DRAWN: dict[str, Callable[[Axes], None]] = {
    "predictions": predictions,
    "agreement": agreement,
    "distances": distances,
    "found": found,
    "cost": cost,
}


def main() -> None:
    # equal records give equal files, with text as text
    plt.rcParams |= {"svg.hashsalt": "measured", "svg.fonttype": "none"}
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        draw(axes)
        figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        print(f"wrote {PICTURES / name}.svg")


if __name__ == "__main__":
    main()
