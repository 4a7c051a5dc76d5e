"""Marginals of a layer's units over thousands of networks, with Kolmogorov-Smirnov
tests of whether they are equal (figure 17 of Laurent, Aldea & Franchi 2024, arXiv
2310.08287).

    python -m benchmarks.experiments.laurent_2024.unit_marginals --root data

Perceptrons on a regression set (UCI energy, from ``--root/uci/energy``), all trained at
once. Independent networks carry no order of their units, so that the units' output
weights must have equal marginals; once units are sorted they don't. Printed are the
p-values of pairs of units, each test on different networks for the two units so that
the exact law holds, and the verdict over all of them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from scipy.stats import ks_2samp
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, parse, parser, print_table, without_symmetries
from pyro_symmetric.compare import invariance_tests
from pyro_symmetric.ensembles import ensemble


def independent(weights: dict[str, Tensor]) -> ps.Posterior:
    """Networks that know nothing of each other."""
    return ps.Posterior.from_samples(weights, kind="independent")


def pair_p_values(units: Tensor) -> Tensor:
    """p-value of every pair of units of ``(networks, units)``, in the order of
    ``torch.triu_indices``.
    """
    even, odd = units[::2].T.numpy(), units[1::2].T.numpy()
    pairs = torch.triu_indices(len(even), len(even), 1).T.tolist()
    return torch.tensor([float(ks_2samp(even[i], odd[j]).pvalue) for i, j in pairs])


def run(seed: int, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    data = ps.datasets.load(options.data, root=options.root, dtype=torch.float32)
    x, y = data.train_x, data.train_y
    net = nn.Sequential(
        nn.Linear(x.shape[1], options.width), nn.ReLU(), nn.Linear(options.width, 1)
    )
    posterior = ensemble(
        net,
        (x, y),
        options.networks,
        loss="mse",
        epochs=options.epochs,
        optimizer=functools.partial(
            torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4
        ),
        progress=options.progress,
    )
    weights = posterior.get_samples()
    symmetry = ps.find_symmetry(net, x[:2])
    stages = without_symmetries(weights, symmetry)
    p_values = {
        name: pair_p_values(stage["2.weight"][:, 0]) for name, stage in stages.items()
    }
    means = ps.predict(posterior, net, data.test_x, progress=False).squeeze(-1)
    return {
        "rmse": float((means.mean(0) - data.test_y).square().mean().sqrt()),
        "single_rmse": float((means - data.test_y).square().mean(1).sqrt().mean()),
        "p_values": {name: value.tolist() for name, value in p_values.items()},
        "verdicts": {
            name: invariance_tests(independent(stage), symmetry.permutations).verdict
            for name, stage in stages.items()
        },
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument(
        "--root", type=Path, default=Path("data"), help="folder of data sets"
    )
    arguments.add_argument("--data", default="uci/energy")
    arguments.add_argument("--networks", type=int, default=2_000)
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--width", type=int, default=8)
    options = parse(arguments, argv)
    if options.quick:
        options.networks, options.epochs = 200, 2
    results = Results.of(options, "data", "networks", "epochs", "width")
    results.fill(functools.partial(run, options=options), seed=range(options.seeds))
    for row in results.rows:
        rows = []
        for name, values in row["p_values"].items():
            p = torch.tensor(values)
            share = f"{float((p < 0.05).double().mean()):.0%}"
            rows.append(
                (
                    name,
                    str(len(p)),
                    f"{float(p.min()):.2g}",
                    f"{float(p.median()):.2g}",
                    share,
                )
            )
        print_table(
            f"seed {row['seed']}: {options.networks:,} networks on {options.data}, "
            "test RMSE of one "
            f"{row['single_rmse']:.3f}, of all {row['rmse']:.3f} (standardised "
            "target); output weights by unit",
            ("weights", "pairs of units", "least p", "median p", "under 0.05"),
            rows,
        )
        for name, verdict in row["verdicts"].items():
            print(f"  {name}: {verdict}")


if __name__ == "__main__":
    main()
