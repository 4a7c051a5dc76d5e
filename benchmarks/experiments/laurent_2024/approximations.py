r"""The first block of Table 1 of Laurent, Aldea & Franchi 2024 (arXiv 2310.08287):
OptuNet, all methods.

    python -m benchmarks.experiments.laurent_2024.approximations --data-root data --out
    runs/approximations python -m benchmarks.experiments.laurent_2024.approximations
    --data-root data --out runs/quick --quick

Every seed is a study of its own (``pyro-symmetric compare`` with the same settings), so
that a broken run goes on where it stopped. The reference is an ensemble of independent
networks, as in the paper; its own row compares one half of it with the other. Every
method comes with one run and with several; the ensembles among them are networks apart
from the reference. The paper trains on all of MNIST; here rows, steps and members are
reduced to what a CPU does (see ``BUDGETS`` and the options), which is printed with the
table. The squared MMD is unbiased, so that seeds after the first do with a smaller
reference; it is noisier there.

Two tables: squared MMD to the reference as weights are and with symmetries removed
(medians over kernels), accuracy and proper scores on test and training rows; and
calibration errors, entropy and mutual information in and out of distribution, and
scores of telling Fashion-MNIST apart. Mean and standard error over seeds. Under the
tables: whether what the paper says holds here, counted. Calibration plots are in each
seed's ``report.html``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import parser, print_table, spread
from pyro_symmetric.study import StudySettings, run_study

VARIATIONAL = ("mean-field", "symmetrized", "aligned")
AROUND_MODES = (
    "mc-dropout",
    "swag",
    "laplace-full",
    "laplace-diagonal",
    "laplace-last-layer",
)
CHAINS = ("sghmc", "sgld", "psgld", "hmc", "nuts")
REFERENCE = "ensemble"

BUDGETS: dict[str, dict[str, float]] = {
    "networks": {"steps": 300, "batch_size": 64, "learning_rate": 0.05},
    "variational": {"steps": 400, "batch_size": 64, "learning_rate": 0.02},
    "momentum": {"warmup": 60, "draws": 60, "num_steps": 10, "batch_size": 64},
    # without momentum chains move slowly
    "langevin": {"warmup": 60, "draws": 60, "num_steps": 40, "batch_size": 64},
    "hmc": {"warmup": 30, "draws": 30, "num_steps": 8},
    "nuts": {"warmup": 20, "draws": 20, "max_tree_depth": 4},
}
KIND = {
    **dict.fromkeys((REFERENCE, *AROUND_MODES), "networks"),
    **dict.fromkeys(VARIATIONAL, "variational"),
    **{
        "sghmc": "momentum",
        "sgld": "langevin",
        "psgld": "langevin",
        "hmc": "hmc",
        "nuts": "nuts",
    },
}

TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "distances and likelihood": {
        "MMD2": ("distance", "raw", "mmd", "median"),
        "MMD2 removed": ("distance", "removed", "mmd", "median"),
        "accuracy": ("prediction", "accuracy"),
        "NLL": ("prediction", "nll"),
        "Brier": ("prediction", "brier"),
        "accuracy train": ("training", "accuracy"),
        "NLL train": ("training", "nll"),
    },
    "calibration, and telling other inputs apart": {
        "ECE": ("prediction", "ece"),
        "ACE": ("prediction", "adaptive_ece"),
        "entropy": ("prediction", "uncertainty", "entropy"),
        "entropy ood": ("prediction", "uncertainty_ood", "entropy"),
        "MI": ("prediction", "uncertainty", "mutual_information"),
        "MI ood": ("prediction", "uncertainty_ood", "mutual_information"),
        "AUPR": ("prediction", "detection", "maximum_probability", "aupr"),
        "AUROC": ("prediction", "detection", "maximum_probability", "auroc"),
        "FPR95": ("prediction", "detection", "maximum_probability", "fpr95"),
    },
}
COLUMNS = {name: path for table in TABLES.values() for name, path in table.items()}


def asked(name: str, **budget: Any) -> str:
    """A method on a budget, as a study asks for it."""
    return ":".join([name, *(f"{part}={value}" for part, value in budget.items())])


def short(label: str) -> str:
    """A row of a study by the last part of its budget."""
    name, *parts = label.split(":")
    return ", ".join([name, *parts[-1:]])


def methods_of(seed: int, options: argparse.Namespace) -> tuple[str, ...]:
    """The reference, then each method with one run and with several."""

    def on_budget(name: str, runs: int) -> str:
        counted = {"chains" if name in CHAINS else "modes": runs}
        return asked(name, **({} if options.quick else BUDGETS[KIND[name]]), **counted)

    wanted = (REFERENCE, *VARIATIONAL, *AROUND_MODES, *CHAINS)
    members = (
        40 if options.quick else options.members[min(seed, len(options.members) - 1)]
    )
    return (
        on_budget(REFERENCE, members),
        *(on_budget(name, runs) for name in wanted for runs in (1, options.modes)),
    )


def study(seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    methods = methods_of(seed, options)
    settings = StudySettings(
        data="mnist",
        data_root=str(options.data_root),
        download=options.download,
        max_train=200 if options.quick else options.max_train,
        max_test=200 if options.quick else options.max_test,
        ood="fashion-mnist",
        net="optunet",
        methods=methods,
        reference=methods[0],
        draws=options.draws,
        quick=options.quick,
        seed=seed,
        device="cpu",
    )
    rows = run_study(
        settings, options.out / f"seed-{seed}", progress=options.progress
    ).results["methods"]
    return {
        "reference" if label == methods[0] else short(label): row
        for label, row in rows.items()
    }


def entry(row: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = row
    for step in path:
        # a single network has no distance
        value = None if value is None else value[step]
    return float("nan") if value is None else float(value)


def cell(values: list[float], seeds: int) -> str:
    if any(math.isnan(value) for value in values):
        return "-"
    return spread(values, 4) + ("" if len(values) == seeds else f" (n={len(values)})")


def findings(
    found: list[Mapping[str, Any]], labels: list[str], modes: int
) -> list[str]:
    """The paper's statements, and how often each holds here."""
    ones = [
        label for label in labels if label.endswith("=1") and "midpoint" not in label
    ]
    pairs = [(label, f"{label[:-1]}{modes}") for label in ones]

    def count(path: tuple[str, ...]) -> str:
        both = [
            (rows[one], rows[many])
            for rows in found
            for one, many in pairs
            if one in rows and many in rows
        ]
        wins = [
            entry(many, path) < entry(one, path)
            for one, many in both
            if not math.isnan(entry(one, path))
        ]
        return f"{sum(wins)} of {len(wins)}"

    ensembles = ("reference", f"{REFERENCE}, modes={modes}")
    order = [
        sorted(rows, key=lambda row: entry(rows[row], COLUMNS["NLL"])) for rows in found
    ]
    next_best = [
        next((row for row in rows if row not in ensembles), "none") for rows in order
    ]
    ahead = [rows[0] in ensembles for rows in order]
    lines = [
        "several modes nearer to the reference than one, as weights are: "
        f"{count(COLUMNS['MMD2'])}; "
        f"symmetries removed: {count(COLUMNS['MMD2 removed'])}; by NLL: "
        f"{count(COLUMNS['NLL'])}",
        f"a deep ensemble predicts best (NLL): {sum(ahead)} of {len(ahead)} seeds "
        "(first: "
        f"{', '.join(rows[0] for rows in order)}); best of the other methods: "
        f"{', '.join(next_best)}",
    ]
    if {"mean-field, modes=1", "ensemble, modes=1"} <= set(labels):
        behind = [
            entry(rows["mean-field, modes=1"], COLUMNS[column])
            > entry(rows["ensemble, modes=1"], COLUMNS[column])
            for rows in found
            for column in ("NLL train", "NLL")
        ]
        lines.append(
            "mean-field underfits (NLL above that of one trained network, on training "
            "and on test rows): "
            f"{sum(behind)} of {len(behind)} comparisons"
        )
    return lines


def main() -> None:
    arguments = parser(__doc__, seeds=2)
    arguments.set_defaults(out=Path("runs/approximations"))
    arguments.add_argument(
        "--data-root",
        type=Path,
        default=Path("data"),
        help="folder of MNIST and Fashion-MNIST",
    )
    arguments.add_argument("--download", action="store_true")
    arguments.add_argument(
        "--max-train", type=int, default=1000, help="training rows (default 1000)"
    )
    arguments.add_argument(
        "--max-test", type=int, default=500, help="test rows (default 500)"
    )
    arguments.add_argument(
        "--members",
        type=int,
        nargs="+",
        default=[1000, 250],
        help="networks of the reference, for each seed; the last number stands for all "
        "further ones (default 1000 250)",
    )
    arguments.add_argument(
        "--modes",
        type=int,
        default=8,
        help="runs of each method, beside one alone (default 8)",
    )
    arguments.add_argument(
        "--draws", type=int, default=1000, help="draws of each method that are compared"
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    found = [study(seed, options) for seed in range(options.seeds)]
    # a study that was measured before may hold more methods than the others
    labels = list(max(found, key=len))
    sizes = ", ".join(str(row["reference"]["draws"]) for row in found)
    for name, columns in TABLES.items():
        rows = []
        for label in labels:
            own = [row[label] for row in found if label in row]
            rows.append(
                [
                    label,
                    *(
                        cell([entry(row, path) for row in own], len(found))
                        for path in columns.values()
                    ),
                ]
            )
        title = f"{name}: {options.seeds} seeds, {options.max_train} training rows, references of {sizes} networks"
        print_table(title, ["method", *columns], rows)
    print("\nbudgets: " + " ".join(methods_of(0, options)))
    for line in findings(found, labels, options.modes):
        print(line)


if __name__ == "__main__":
    main()
