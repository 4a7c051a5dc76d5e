r"""The log-posterior on the plane through two independently trained posteriors and the
second one aligned.

    python -m benchmarks.experiments.rossi_2023.log_posterior_map --out plots

The plane holds the means of both mean-field posteriors, m0 and m1, and P m1 after
alignment in Wasserstein distance. Its first axis points from m0 to P m1, the second is
what of m1 - m0 is orthogonal to it. On a grid, and along the segments from m0 to m1 and
to P m1, the log-joint of the data is taken at the point itself (a map of the posterior,
not of the guides). Printed are how far it falls below the straight line between its
values at the ends, in nats for each row, the lengths of the two segments and the cosine
of the angle between them. After the maps of Rossi et al. 2023 (arXiv 2310.10171);
perceptrons of two hidden layers on scikit-learn's digits, fitted as in
``barrier_curves``.
"""

from __future__ import annotations

import functools
from typing import Any

import pyro
import torch
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.experiments.rossi_2023.barrier_curves import fit_perceptron, started
from benchmarks.harness import Results, new_figure, parse, parser, save_figure
from benchmarks.networks import perceptron

Weights = dict[str, Tensor]
PRIOR_VARIANCE = 0.02


def run(seed: int, width: int, data: Any, options: Any) -> dict[str, Any]:
    x, y = data.train_x.flatten(1), data.train_y
    fits = []
    for member in (2 * seed, 2 * seed + 1):
        pyro.set_rng_seed(member)
        net = started(perceptron(x.shape[1], width, width, data.num_outputs))
        fits.append(fit_perceptron(net, x, y, 1.0, PRIOR_VARIANCE, member, options)[0])
    found = ps.align(fits[1], fits[0], ps.find_symmetry(net.eval(), x[:2]).permutations)
    model = ps.BayesianModel(net, PRIOR_VARIANCE**0.5, "categorical", num_data=len(x))
    m0, m1, aligned = fits[0].loc, fits[1].loc, found.element(fits[1].loc)

    def log_joint(points: Tensor, axes: tuple[Weights, ...]) -> Tensor:
        return torch.cat(
            [model.log_joint(moved(m0, part, axes), x, y) for part in points.split(50)]
        ) / len(x)

    first, second = plane(m0, m1, aligned)
    reach = torch.linspace(-0.4, 1.4, options.points)
    values = log_joint(torch.cartesian_prod(reach, reach), (first, second)).reshape(
        options.points, -1
    )
    t = torch.linspace(0, 1, 21)[:, None]
    falls = {}
    for name, end in (("as they come", m1), ("aligned", aligned)):
        along = log_joint(t, ({k: end[k] - m0[k] for k in m0},))
        falls[name] = float(
            ((1 - t[:, 0]) * along[0] + t[:, 0] * along[-1] - along).max()
        )
    to_m1 = flat({k: m1[k] - m0[k] for k in m0})
    cosine = float(to_m1 @ flat(first) / to_m1.norm() / flat(first).norm())
    ends = model.outputs({k: v[None] for k, v in m0.items()}, data.test_x.flatten(1))[
        0
    ].argmax(-1)
    return {
        "falls": falls,
        "cosine": cosine,
        "lengths": [float(to_m1.norm()), float(flat(first).norm())],
        "error": float((ends != data.test_y).double().mean()),
        "map": values.tolist(),
        "m1": [float(to_m1 @ flat(first) / flat(first).square().sum()), 1.0],
    }


def flat(weights: Weights) -> Tensor:
    return torch.cat([value.flatten() for value in weights.values()])


def plane(m0: Weights, m1: Weights, aligned: Weights) -> tuple[Weights, Weights]:
    """To the aligned mean; and the part of the way to the other mean that is orthogonal
    to it.
    """
    first, second = ({k: end[k] - m0[k] for k in m0} for end in (aligned, m1))
    share = float(flat(second) @ flat(first) / flat(first).square().sum())
    return first, {k: second[k] - share * first[k] for k in m0}


def moved(origin: Weights, coordinates: Tensor, axes: tuple[Weights, ...]) -> Weights:
    """Points of the plane, ``(K, ...)`` for each site, from coordinates ``(K,
    axes)``.
    """
    return {
        k: value
        + sum(
            c.reshape(-1, *[1] * value.dim()) * axis[k]
            for c, axis in zip(coordinates.T, axes, strict=True)
        )
        for k, value in origin.items()
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--widths", type=int, nargs="+", default=[32, 128])
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument(
        "--points", type=int, default=25, help="of the map along each axis"
    )
    arguments.set_defaults(batch=256, lr=0.003)
    options = parse(arguments, argv)
    if options.quick:
        options.widths, options.steps, options.points = [8], 20, 5
    data = ps.datasets.load("digits", dtype=torch.float32)
    results = Results.of(options, "steps", "points")
    results.fill(
        functools.partial(run, data=data, options=options),
        seed=range(options.seeds),
        width=options.widths,
    )
    columns: dict[str, tuple[Any, int]] = {
        "fall, as they come": (lambda row: row["falls"]["as they come"], 3),
        "fall, aligned": (lambda row: row["falls"]["aligned"], 3),
        "distance": (lambda row: row["lengths"][0], 2),
        "aligned": (lambda row: row["lengths"][1], 2),
        "cosine": ("cosine", 2),
        "test error of m0": ("error", 3),
    }
    results.table(
        "fall of the log-joint below the line between its ends, nats for each row",
        ["width"],
        columns,
    )
    if options.out is not None:
        plot(results, options)


def plot(results: Results, options: Any) -> None:
    figure, axes = new_figure(
        1, len(options.widths), size=(4 * len(options.widths), 3.4)
    )
    reach = torch.linspace(-0.4, 1.4, options.points)
    for ax, width in zip(axes[0], options.widths, strict=True):
        row = results.find(width=width)[0]
        values = torch.tensor(row["map"])
        drawn = ax.contourf(
            reach,
            reach,
            values.T.clamp_min(float(values.quantile(0.1))),
            levels=20,
            cmap="Blues",
        )
        figure.colorbar(drawn, ax=ax, label="log-joint / row (nats)")
        for name, point in (
            ("$m_0$", [0, 0]),
            ("$P m_1$", [1, 0]),
            ("$m_1$", row["m1"]),
        ):
            ax.plot(*point, "o", color="#ff725c", ms=4)
            ax.annotate(name, point, textcoords="offset points", xytext=(4, 4))
        ax.set(
            title=f"width {width}",
            xlabel="from $m_0$ to $P m_1$",
            ylabel="orthogonal, to $m_1$",
        )
    save_figure(figure, options.out, "log_posterior_map.png")


if __name__ == "__main__":
    main()
