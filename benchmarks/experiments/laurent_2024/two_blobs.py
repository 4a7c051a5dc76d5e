"""Ten thousand perceptrons with two hidden units on two Gaussian blobs: the copies of a
mode, and one mode after the symmetries are gone (figure 1 of Laurent, Aldea & Franchi
2024, arXiv 2310.08287).

    python -m benchmarks.experiments.laurent_2024.two_blobs --out figures

The recipe is that of appendix A.1: 200 points of each class around (-2, -2) and (2, 2),
drawn until a line separates them; ten epochs of stochastic gradient descent in batches
of ten at a rate of two. A network has learnt them if its loss is under 0.1 at the end.
Then the joint law of the two output weights of these is looked at three times: as
trained, without scalings (units of norm three), and without scalings and permutations
(sorted by the output weights). Exchanging the two hidden units mirrors that plane at
its diagonal, so that a mode off the diagonal comes twice.

Printed are how many networks learn, the share of them above the diagonal, the squared
MMD between two halves of the networks as they are and with the units of one half
exchanged, and what the test of the corollary says. The paper's appendix D.8 reports
that mean shift (Comaniciu & Meer 2002) finds no sound number of modes; the last column
is what it finds here, of modes with a twentieth of a thousand networks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import (
    Results,
    new_figure,
    parse,
    parser,
    print_table,
    save_figure,
    spread,
)
from pyro_symmetric.compare import invariance_tests, mmd
from pyro_symmetric.ensembles import ensemble

LEARNT, NORM = 0.1, 3.0
HALF = 500  # networks on each side of an MMD


def blobs(rows: int) -> tuple[Tensor, Tensor]:
    """Two normals of ``rows`` points each, which the sum of both coordinates
    separates.
    """
    y = torch.arange(2 * rows) % 2
    while True:
        x = torch.randn(2 * rows, 2) + (4 * y[:, None] - 2)
        place = x.sum(1)
        if place[y == 0].max() < place[y == 1].min():
            return x, y


def stages(
    weights: dict[str, Tensor], symmetry: ps.Symmetry
) -> dict[str, dict[str, Tensor]]:
    """Weights as trained, and after each removal."""
    normed = ps.canonicalize(weights, symmetry, permutations=None)
    scaling = {
        name: torch.full((2,), float(np.log(NORM)))
        for name in symmetry.scalings.factors
    }
    normed = symmetry.scalings.element(log_scales=scaling)(normed)
    order = normed["2.weight"][:, 0].argsort(-1)
    factors = symmetry.permutations.factors
    ordered = symmetry.permutations.element({name: order for name in factors})(normed)
    return {
        "as trained": weights,
        "without scalings": normed,
        "without scalings and permutations": ordered,
    }


def modes(points: Tensor) -> int:
    """The number of modes that mean shift finds in up to a thousand points, with
    scikit-learn's bandwidth.
    """
    from sklearn.cluster import MeanShift, estimate_bandwidth

    data = points[:1000].double().numpy()
    labels = MeanShift(
        bandwidth=estimate_bandwidth(data), bin_seeding=True
    ).fit_predict(data)
    return int((np.bincount(labels) >= len(data) / 20).sum())


def run(seed: int, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    x, y = blobs(options.rows)
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    posterior = ensemble(
        net,
        (x, y),
        options.networks,
        loss="binary_cross_entropy",
        epochs=options.epochs,
        batch_size=10,
        optimizer=functools.partial(torch.optim.SGD, lr=2.0),
        cosine=False,
        progress=options.progress,
    )
    learnt = posterior.statistics["loss"][0] < LEARNT
    weights = {site: value[learnt] for site, value in posterior.get_samples().items()}
    symmetry = ps.find_symmetry(net, x[:2])
    exchanged = symmetry.permutations.element(
        {name: [1, 0] for name in symmetry.permutations.factors}
    )
    found = {}
    for name, stage in (removed := stages(weights, symmetry)).items():
        outputs = stage["2.weight"][:, 0]
        first, second = (
            {site: value[k : k + HALF] for site, value in stage.items()}
            for k in (0, HALF)
        )
        independent = ps.Posterior.from_samples(stage, kind="independent")
        found[name] = {
            "above": float((outputs[:, 1] > outputs[:, 0]).double().mean()),
            "itself": float(mmd(first, second)["mean"]),
            "exchanged": float(mmd(first, exchanged(second))["mean"]),
            "rejected": invariance_tests(independent, symmetry.permutations).rejected,
            "modes": modes(outputs),
        }
    figure(removed, options.out, seed)
    seconds = posterior.metadata["seconds"]
    return {
        "learnt": float(learnt.double().sum() / options.networks),
        "seconds": seconds,
        "stages": found,
    }


def figure(
    removed: dict[str, dict[str, Tensor]], folder: Path | None, seed: int
) -> None:
    if folder is None:
        return
    picture, axes = new_figure(1, len(removed), size=(4 * len(removed), 4))
    for axis, (name, stage) in zip(axes[0], removed.items(), strict=True):
        first, second = stage["2.weight"][:, 0].T.numpy()
        low, high = np.quantile(np.concatenate([first, second]), [0.001, 0.999])
        low, high = low - 0.15 * (high - low), high + 0.15 * (high - low)
        axis.hist2d(
            first, second, bins=120, range=[[low, high]] * 2, cmap="Blues", norm="log"
        )
        axis.plot([low, high], [low, high], color="0.6", linewidth=0.8)
        axis.set(
            title=name,
            xlabel="output weight of the first unit",
            ylabel="of the second",
            aspect="equal",
        )
    save_figure(picture, folder, f"two_blobs_{seed}.png")


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--networks", type=int, default=10_000)
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--rows", type=int, default=200, help="points of each class")
    options = parse(arguments, argv)
    if options.quick:
        options.networks = 1_000
    results = Results.of(options, "networks", "epochs", "rows")
    results.fill(functools.partial(run, options=options), seed=range(options.seeds))
    rows = results.rows
    print(
        f"\nof {options.networks:,} networks "
        f"{spread((100 * row['learnt'] for row in rows), 2)} % have learnt, in "
        f"{spread((row['seconds'] for row in rows), 1)} s"
    )
    lines = []
    for name in rows[0]["stages"]:
        own = [row["stages"][name] for row in rows]
        lines.append(
            [
                name,
                *(
                    spread((o[key] for o in own), 5)
                    for key in ("above", "itself", "exchanged")
                ),
            ]
        )
        lines[-1] += [
            f"{sum(o['rejected'] for o in own)} of {len(own)}",
            " ".join(str(o["modes"]) for o in own),
        ]
    head = (
        "output weights",
        "above the diagonal",
        "squared MMD",
        "exchanged",
        "not invariant",
        "modes by mean shift",
    )
    print_table("mean ± standard error over seeds", head, lines)


if __name__ == "__main__":
    main()
