r"""The first block of Table 1 of Laurent, Aldea & Franchi 2024 (arXiv 2310.08287): OptuNet, all methods.

    python -m benchmarks.experiments.laurent_2024.approximations --data-root data --out runs/approximations
    python -m benchmarks.experiments.laurent_2024.approximations --data-root data --out runs/quick --quick

Every seed is a study of its own (``pyro-symmetric compare`` with the same settings), so that a broken run goes on
where it stopped. The reference is an ensemble of independent networks, as in the paper; its own row compares one half
of it with the other, and ``multi-ensemble`` is a deep ensemble apart from it, ``single-ensemble`` one network. The
paper trains on all of MNIST; here rows, steps and members are reduced to what a CPU does (see ``BUDGETS`` and the
options), which is printed with the table. The squared MMD is unbiased, so that seeds after the first do with a smaller
reference; it is noisier there.

Two tables: squared MMD to the reference as weights are and with symmetries removed (medians over kernels), accuracy and
proper scores on test and training rows; and calibration errors, entropy and mutual information in and out of
distribution, and scores of telling Fashion-MNIST apart. Mean and standard deviation over seeds. Under the tables:
whether what the paper says holds here, counted. Calibration plots are in each seed's ``report.html``.
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
from pyro_symmetric.study.methods import make_method

VARIATIONAL = ("mean-field", "symmetrized", "aligned")
AROUND_MODES = ("mc-dropout", "swag", "laplace-full", "laplace-diagonal", "laplace-last-layer")
CHAINS = ("sghmc", "sgld", "psgld", "hmc", "nuts")
REFERENCE = "ensemble"

BUDGETS: dict[str, dict[str, float]] = {
    "networks": {"steps": 300, "batch_size": 64, "learning_rate": 0.05},
    "variational": {"steps": 400, "batch_size": 64, "learning_rate": 0.02},
    "momentum": {"warmup": 60, "draws": 60, "num_steps": 10, "batch_size": 64},
    "langevin": {"warmup": 60, "draws": 60, "num_steps": 40, "batch_size": 64},  # without momentum chains move slowly
    "hmc": {"warmup": 30, "draws": 30, "num_steps": 8},
    "nuts": {"warmup": 20, "draws": 20, "max_treedepth": 4},
}
KIND = {
    **dict.fromkeys((REFERENCE, *AROUND_MODES), "networks"),
    **dict.fromkeys(VARIATIONAL, "variational"),
    **{"sghmc": "momentum", "sgld": "langevin", "psgld": "langevin", "hmc": "hmc", "nuts": "nuts"},
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


def methods_of(options: argparse.Namespace) -> tuple[str, ...]:
    wanted = options.methods or (REFERENCE, *VARIATIONAL, *AROUND_MODES, *CHAINS)
    return (REFERENCE, *(f"{prefix}{name}" for name in wanted for prefix in ("single-", "multi-")))


def budgets_of(methods: tuple[str, ...], seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    if options.quick:
        return {}
    budgets: dict[str, dict[str, Any]] = {}
    for method in methods:
        kind = KIND[method.removeprefix("single-").removeprefix("multi-")]
        budgets[method] = dict(BUDGETS[kind])
        if method.startswith("multi-"):
            budgets[method][make_method(method).counted] = options.modes
    budgets[REFERENCE]["modes"] = options.members[min(seed, len(options.members) - 1)]
    return budgets


def study(seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    methods = methods_of(options)
    settings = StudySettings(
        data="mnist",
        data_root=str(options.data_root),
        download=options.download,
        max_train=200 if options.quick else options.max_train,
        max_test=200 if options.quick else options.max_test,
        ood="fashion-mnist",
        net="optunet",
        methods=methods,
        reference=REFERENCE,
        budgets=budgets_of(methods, seed, options),
        draws=options.draws,
        quick=options.quick,
        seed=seed,
        device=options.device,
    )
    return run_study(settings, options.out / f"seed-{seed}", progress=options.progress).results["methods"]


def entry(row: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = row
    for step in path:
        value = None if value is None else value[step]  # a single network has no distance
    return float("nan") if value is None else float(value)


def cell(values: list[float], seeds: int) -> str:
    if any(math.isnan(value) for value in values):
        return "-"
    return spread(values, 4) + ("" if len(values) == seeds else f" (n={len(values)})")


def findings(found: list[Mapping[str, Any]], labels: list[str]) -> list[str]:
    """The paper's statements, and how often each holds here."""
    ones = [label for label in labels if label.startswith("single-") and "midpoint" not in label]
    pairs = [(label, f"multi-{label.removeprefix('single-')}") for label in ones]

    def count(path: tuple[str, ...]) -> str:
        both = [(rows[one], rows[many]) for rows in found for one, many in pairs if one in rows and many in rows]
        wins = [entry(many, path) < entry(one, path) for one, many in both if not math.isnan(entry(one, path))]
        return f"{sum(wins)} of {len(wins)}"

    ensembles = (REFERENCE, f"multi-{REFERENCE}")
    order = [sorted(rows, key=lambda row: entry(rows[row], COLUMNS["NLL"])) for rows in found]
    next_best = [next((row for row in rows if row not in ensembles), "none") for rows in order]
    ahead = [rows[0] in ensembles for rows in order]
    lines = [
        f"several modes nearer to the reference than one, as weights are: {count(COLUMNS['MMD2'])}; "
        f"symmetries removed: {count(COLUMNS['MMD2 removed'])}; by NLL: {count(COLUMNS['NLL'])}",
        f"a deep ensemble predicts best (NLL): {sum(ahead)} of {len(ahead)} seeds (first: "
        f"{', '.join(rows[0] for rows in order)}); best of the other methods: {', '.join(next_best)}",
    ]
    if {"single-mean-field", "single-ensemble"} <= set(labels):
        behind = [
            entry(rows["single-mean-field"], COLUMNS[column]) > entry(rows["single-ensemble"], COLUMNS[column])
            for rows in found
            for column in ("NLL train", "NLL")
        ]
        lines.append(
            "mean-field underfits (NLL above that of one trained network, on training and on test rows): "
            f"{sum(behind)} of {len(behind)} comparisons"
        )
    return lines


def main() -> None:
    arguments = parser(__doc__, seeds=2)
    arguments.set_defaults(out=Path("runs/approximations"))
    arguments.add_argument("--data-root", type=Path, default=Path("data"), help="folder of MNIST and Fashion-MNIST")
    arguments.add_argument("--download", action="store_true")
    arguments.add_argument("--max-train", type=int, default=1000, help="training rows (default 1000)")
    arguments.add_argument("--max-test", type=int, default=500, help="test rows (default 500)")
    arguments.add_argument(
        "--members",
        type=int,
        nargs="+",
        default=[1000, 250],
        help="networks of the reference, for each seed; the last number stands for all further ones (default 1000 250)",
    )
    arguments.add_argument("--modes", type=int, default=8, help="runs of the multi-mode methods (default 8)")
    arguments.add_argument("--draws", type=int, default=1000, help="draws of each method that are compared")
    arguments.add_argument("--methods", nargs="*", metavar="NAME", help="families to compare (default: all)")
    arguments.add_argument("--device", default="cpu")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    found = [study(seed, options) for seed in range(options.seeds)]
    labels = list(max(found, key=len))  # a study that was measured before may hold more methods than the others
    sizes = ", ".join(str(row[REFERENCE]["draws"]) for row in found)
    for name, columns in TABLES.items():
        rows = []
        for label in labels:
            own = [row[label] for row in found if label in row]
            rows.append([label, *(cell([entry(row, path) for row in own], len(found)) for path in columns.values())])
        title = f"{name}: {options.seeds} seeds, {options.max_train} training rows, references of {sizes} networks"
        print_table(title, ["method", *columns], rows)
    budgets = budgets_of(methods_of(options), 0, options)
    print("\nbudgets: " + "; ".join(f"{name} {budget}" for name, budget in budgets.items()))
    for line in findings(found, labels):
        print(line)


if __name__ == "__main__":
    main()
