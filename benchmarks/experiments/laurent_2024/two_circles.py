"""The weights of ten thousand networks in two dimensions, before and after symmetries
are removed (figures 13 and 14 of Laurent, Aldea & Franchi 2024, arXiv 2310.08287).

    python -m benchmarks.experiments.laurent_2024.two_circles --out figures

The recipe is that of appendix D.7: perceptrons of two inputs, three hidden ReLU units
and one output, 13 parameters, on two circles; 300 epochs of stochastic gradient descent
in batches of 8 at a rate of 0.03 with an L2 penalty of 0.003. Their weights are drawn
by principal components and by t-SNE, as trained, without scalings, and without scalings
and permutations. Printed are the total variance of the weights, the shares of the first
two components (the paper: 18 and 15 %), and the mean distance to the nearest other
network as a share of the mean distance: copies of a mode are far apart and alike.
Scales are taken away by going to the least mass: units at norm one, of which some are
nearly dead, would have biases and outgoing weights so large that they decide all of it.
"""

from __future__ import annotations

import functools
from typing import Any

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
    without_symmetries,
)
from pyro_symmetric.ensembles import ensemble

SHOWN = 1_000  # networks of the pictures, and of distances


def circles(rows: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import make_circles

    x, y = make_circles(rows, noise=0.08, factor=0.5, random_state=0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def stages(options: Any) -> tuple[dict[str, Tensor], float]:
    """Flattened weights of the networks after each removal, and the networks'
    accuracy.
    """
    x, y = circles(200)
    net = nn.Sequential(
        nn.Linear(2, options.width), nn.ReLU(), nn.Linear(options.width, 1)
    )
    symmetry = ps.find_symmetry(net, x[:2])
    posterior = ensemble(
        net,
        (x, y),
        options.networks,
        loss="binary_cross_entropy",
        epochs=options.epochs,
        batch_size=8,
        optimizer=functools.partial(torch.optim.SGD, lr=0.03, weight_decay=0.003),
        cosine=False,
        progress=options.progress,
    )
    weights = posterior.get_samples()
    outputs = ps.predict(weights, net, x, progress=False).squeeze(-1)
    removed = without_symmetries(weights, symmetry, scalings="minimal_mass")
    flat = {
        name: torch.cat([value.flatten(1) for value in stage.values()], 1)
        for name, stage in removed.items()
    }
    return flat, float(((outputs > 0) == y.bool()).double().mean())


def run(seed: int, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    flat, accuracy = stages(options)
    numbers, planes = {}, {}
    for name, points in flat.items():
        centred = (points - points.mean(0)).double()
        _, values, directions = torch.linalg.svd(centred, full_matrices=False)
        variances = values.square() / (len(points) - 1)
        distances = torch.cdist(centred[:SHOWN], centred[:SHOWN])
        nearest = (
            distances + torch.diag(torch.full((len(distances),), torch.inf))
        ).amin(1)
        numbers[name] = {
            "variance": float(variances.sum()),
            "two": (variances[:2] / variances.sum()).tolist(),
            "nearest": float(nearest.mean() / distances.mean()),
        }
        planes[name] = centred[:SHOWN] @ directions[:2].T
    if options.out is not None:
        figure(
            planes,
            {name: tsne(points[:SHOWN]) for name, points in flat.items()},
            options,
            seed,
        )
    return {"accuracy": accuracy, "stages": numbers}


def tsne(points: Tensor) -> Tensor:
    from sklearn.manifold import TSNE

    return torch.from_numpy(
        TSNE(init="pca", random_state=0).fit_transform(points.numpy())
    )


def figure(
    planes: dict[str, Tensor], maps: dict[str, Tensor], options: Any, seed: int
) -> None:
    picture, axes = new_figure(2, len(planes), size=(3.2 * len(planes), 6))
    for row, (label, panels) in zip(
        axes, (("principal components", planes), ("t-SNE", maps)), strict=True
    ):
        for axis, (name, points) in zip(row, panels.items(), strict=True):
            axis.scatter(
                *points.T.numpy(), s=4, linewidths=0, alpha=0.6, color="#4269d0"
            )
            axis.set(
                title=name if label == "principal components" else "",
                xticks=[],
                yticks=[],
            )
        row[0].set_ylabel(label)
    save_figure(picture, options.out, f"two_circles_{seed}.png")


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--networks", type=int, default=10_000)
    arguments.add_argument("--epochs", type=int, default=300)
    arguments.add_argument("--width", type=int, default=3)
    options = parse(arguments, argv)
    if options.quick:
        options.networks, options.epochs = 100, 20
    results = Results.of(options, "networks", "epochs", "width")
    results.fill(functools.partial(run, options=options), seed=range(options.seeds))
    for row in results.rows:
        print_table(
            f"seed {row['seed']}: weights of {options.networks:,} networks of "
            f"{options.width} hidden units, "
            f"mean accuracy {row['accuracy']:.3f}",
            (
                "weights",
                "variance",
                "first component",
                "second",
                "nearest / mean distance",
            ),
            [
                (
                    name,
                    f"{stage['variance']:.2f}",
                    *(f"{share:.1%}" for share in stage["two"]),
                    f"{stage['nearest']:.3f}",
                )
                for name, stage in row["stages"].items()
            ],
        )


if __name__ == "__main__":
    main()
