"""Does a chain visit all copies of a mode, as independent networks do? The corollary
test on Hamiltonian chains and on an ensemble of one network (appendix B of Laurent,
Aldea & Franchi 2024, arXiv 2310.08287).

    python -m benchmarks.experiments.laurent_2024.hmc_or_ensemble --root data

One hidden layer on a regression set, a normal prior, known noise. Four NUTS chains, and
an ensemble of modes of the same posterior. The posterior is invariant under
permutations of the hidden units; samples that aren't have missed copies. The tests look
at as many draws as count as independent (half of the smallest effective sample size of
a chain's weights, ``independent_draws``), so that autocorrelation isn't taken for
asymmetry; where these are few the verdict says so. Beside them *all draws* counts as
the paper does (figures 6 and 7): in how many of all draws each unit holds the largest
weight, and the p-value that the counts would have if the draws were independent.

*Orders* counts the orders of units, sorted by their largest incoming weight, that the
draws visit: more than the copies of a mode that they visit, since the order changes
within a copy, too, where two units are nearly equal. A narrow network and little data
let a chain cross between copies; the noisier the data are said to be, the easier.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.compare import independent_draws, invariance_tests
from pyro_symmetric.ensembles import ensemble


def test(name: str, posterior: ps.Posterior, group: ps.Group) -> dict[str, Any]:
    weights, result = posterior.get_samples(), invariance_tests(posterior, group)
    units = next(iter(result.parts.values()))
    order = ps.canonical.sorting_permutation(weights, group, "max")["0"]
    every = invariance_tests(posterior, group, thin=False).parts["0"]
    return {
        "samples": name,
        "draws": result.num_samples[0],
        "orders": len(order.unique(dim=0)),
        "index": units["index_adjusted"],
        "marginals": units["marginal_adjusted"],
        "counts": every["index_counts"].flatten().tolist(),
        "index_of_all": every["index_p_value"],
        "rejected": result.rejected,
        "verdict": result.verdict,
    }


def run(noise: float, seed: int, options: Any) -> Row:
    torch.manual_seed(seed)
    data = ps.datasets.load(
        options.data, root=options.root, max_train=options.rows, dtype=torch.float32
    )
    x, y = data.train_x, data.train_y
    net = nn.Sequential(
        nn.Linear(x.shape[1], options.width), nn.Tanh(), nn.Linear(options.width, 1)
    )
    model = ps.BayesianModel(
        net, ps.GaussianPrior(1.0), ps.GaussianLikelihood(noise), num_data=len(x)
    )
    group = ps.find_symmetry(net, x[:2]).permutations
    chains = ps.sample(
        ps.NUTS(model, max_tree_depth=options.depth),
        x,
        y,
        num_samples=options.draws,
        num_warmup=options.draws // 2,
        num_chains=4,
        seed=seed,
        progress=options.progress,
    )
    singles = {
        f"chain {chain}": chains.select([chain]) for chain in range(chains.num_chains)
    }
    rows = [
        test(name, one, group)
        for name, one in singles.items()
        if independent_draws(one) > 1
    ]
    pooled = independent_draws(chains)
    rows.append(test("four chains", chains, group))
    few = chains.thin(max(1, chains.num_samples // rows[0]["draws"]))
    moved = few.map(group.sample((few.num_chains, few.num_samples)))
    rows.append(
        test(
            "four chains, moved by random elements",
            ps.Posterior(moved.samples, kind="independent"),
            group,
        )
    )
    members = ensemble(
        model,
        (x, y),
        options.members,
        epochs=options.epochs,
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        progress=options.progress,
    )
    rows.append(test("ensemble of modes", members, group))
    return {
        "seconds": sum(chains.metadata["seconds"].values()),
        "divergences": int(chains.statistics["diverging"].sum()),
        "independent": pooled,
        "tests": rows,
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument(
        "--root", type=Path, default=Path("data"), help="folder of data sets"
    )
    arguments.add_argument("--data", default="uci/energy")
    arguments.add_argument("--rows", type=int, default=150)
    arguments.add_argument("--width", type=int, default=5)
    arguments.add_argument("--noises", type=float, nargs="+", default=[0.5, 0.1])
    arguments.add_argument(
        "--draws",
        type=int,
        default=1_000,
        help="of each chain, after half as many of warm-up",
    )
    arguments.add_argument(
        "--depth", type=int, default=7, help="largest tree depth of NUTS"
    )
    arguments.add_argument("--members", type=int, default=1_000)
    arguments.add_argument("--epochs", type=int, default=100)
    options = parse(arguments, argv)
    if options.quick:
        options.draws, options.members, options.epochs, options.depth = 50, 100, 5, 4
    keys = ("data", "rows", "width", "draws", "depth", "members", "epochs")
    results = Results.of(options, *keys)
    results.fill(
        functools.partial(run, options=options),
        seed=range(options.seeds),
        noise=options.noises,
    )
    for found in results.rows:
        title = (
            f"seed {found['seed']}, noise {found['noise']:g}, {options.rows} rows, "
            f"{options.width} hidden units "
            f"({math.factorial(options.width)} orders), NUTS {found['seconds']:.0f} s, "
            f"{found['divergences']} "
            f"divergences, {found['independent']} independent draws of all chains"
        )
        head = (
            "samples",
            "draws tested",
            "orders seen",
            "index p",
            "marginals p",
            "invariant?",
            "all draws",
            "index p",
        )
        lines = []
        for row in found["tests"]:
            values = (f"{row[name]:.2g}" for name in ("index", "marginals"))
            verdict, counts = (
                "rejected" if row["rejected"] else "-",
                " ".join(map(str, row["counts"])),
            )
            numbers = (row["samples"], row["draws"], row["orders"], *values)
            lines.append(
                (*map(str, numbers), verdict, counts, f"{row['index_of_all']:.2g}")
            )
        print_table(title, head, lines)
        for row in found["tests"]:
            print(f"  {row['samples']}: {row['verdict']}")


if __name__ == "__main__":
    main()
